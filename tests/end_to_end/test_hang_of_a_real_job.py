"""A real job stands still, torch's own recorder is dumped, and the rank at fault is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

WORLD = 3
PROGRAM = """
import os, sys, time
import torch
import torch.distributed as dist
import torch._C._distributed_c10d as c10d

rank, folder = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo", init_method="file://" + folder + "/store", world_size=3, rank=rank)
pair = dist.new_group([1, 2])
ones = torch.ones(8)
for _ in range(2):
    dist.all_reduce(ones)
    if rank:
        dist.all_reduce(ones, group=pair)
works = []
if rank == 1:
    works.append(dist.all_reduce(ones, group=pair, async_op=True))
if rank == 0:
    works.append(dist.all_reduce(ones, async_op=True))
open(f"{folder}/ready_{rank}", "w").close()
while not all(os.path.exists(f"{folder}/ready_{other}") for other in range(3)):
    time.sleep(0.05)
with open(f"{folder}/dumps/nccl_trace_rank_{rank}", "wb") as file:
    file.write(c10d._dump_fr_trace())
open(f"{folder}/done_{rank}", "w").close()
while not all(os.path.exists(f"{folder}/done_{other}") for other in range(3)):
    time.sleep(0.05)
os._exit(0)
"""


def test_the_rank_that_left_out_a_call_is_named(tmp_path, run_command):
    c10d = pytest.importorskip("torch._C._distributed_c10d", reason="needs torch")
    if not hasattr(c10d, "_dump_fr_trace"):
        pytest.skip("this torch has no flight recorder for gloo")
    (tmp_path / "dumps").mkdir()
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    processes = [
        subprocess.Popen(
            [sys.executable, program, tmp_path],
            env={**os.environ, "RANK": str(rank), "TORCH_FR_BUFFER_SIZE": "2000"},
        )
        for rank in range(WORLD)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0] * WORLD
    finally:
        for process in processes:
            process.kill()
    done = run_command("prismtrace", "hang", "dumps", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (culprit,) = report["culprits"]
    assert (report["verdict"], culprit["rank"], culprit["reason"]) == ("hang", 2, "not-enqueued")
    assert culprit["waited_for_by"] == [0, 1]
    assert "train.py:14 in <module>" in culprit["last_site"]
    text = run_command("prismtrace", "hang", "dumps").stdout
    assert text.startswith("hang: rank 2 (not-enqueued)")
    assert " in group [1-2]\n" in text
    assert "\ngroup default_pg [0-2] (0 in torch's logs), ranks 0-2: " in text
