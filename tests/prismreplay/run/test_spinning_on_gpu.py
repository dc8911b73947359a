"""Named pieces of a program at another pace on a GPU: steps change by as much as they should."""

from __future__ import annotations

import json
from textwrap import dedent

import pytest

pytest.importorskip("torch")

from benchmarks.gpu.emulate_cuda import emulate

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
x = torch.ones(1 << 16, device=device)
def compute(ms):
    torch.cuda._sleep(2_000_000 * ms) if on_gpu else time.sleep(ms / 1e3)
for step in range(6):
    with torch.profiler.record_function(f"step {step}"):
        with torch.profiler.record_function("piece"):
            compute(10 if dist.get_rank() == 0 else 2)  # the other one waits
        dist.all_reduce(x)
        x /= dist.get_world_size()
        compute(5)
results = Path(sys.argv[sys.argv.index("--results") + 1])
results.mkdir(parents=True, exist_ok=True)
(results / f"rank-{dist.get_rank():04d}.json").write_text(json.dumps({"losses": [], "parameters": ""}))
dist.destroy_process_group()
"""


def test_steps_with_pieces_at_another_pace(tmp_path, run_command):
    program = tmp_path / "program.py"
    program.write_text(dedent(PROGRAM))
    emulate(tmp_path, [str(program)], 2)
    ms = {}
    for factor in (1.0, 3.0, 0.5):
        done = run_command(
            *("prismreplay", "run", tmp_path / "emulation" / "calibrated.parquet"),
            *("--tensors", tmp_path / "emulation" / "bare.tensors"),
            *("--sandbox", "0", "--spin", 'name = "piece"', factor, "--json"),
            *("-o", f"run-{factor}.parquet", "--", program, "--results", tmp_path / "other"),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ms[factor] = json.loads(done.stdout)["step_ns"] / 1e6
    piece = (ms[3.0] - ms[1.0]) / 2
    assert piece == pytest.approx(ms[1.0] * 10 / 15, rel=0.15), ms
    assert ms[1.0] - ms[0.5] == pytest.approx(piece / 2, rel=0.15), ms
