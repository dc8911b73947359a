"""Whole runs whose ranks share GPUs. Without one: ranks are processes that are really stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from prismreplay.collect import collecting
from prismreplay.collect.collecting import CollectOptions, collect
from prismreplay.collect.gpu_room import Room
from prismreplay.collect.gpus import Gpu, ran_on_cpus
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.rank_memory import RankMemory
from prismreplay.errors import SwapError
from prismreplay.local_ranks import with_paths
from prismtrace.trace import open_trace

GIB = 1 << 30

PROGRAM = """
import os, torch
import torch.distributed as dist
torch.cuda.set_device = lambda device: None
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
pair = dist.new_subgroups(2)[0]
x = torch.full((5000,), float(rank))
for step in range(3):
    with torch.profiler.record_function(f"step {step}"):
        dist.all_reduce(x, group=pair)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x /= size
        if rank:
            dist.send(x, rank - 1)
        if rank + 1 < size:
            dist.recv(x, rank + 1)
print(torch.cuda.device_count(), os.environ["CUDA_VISIBLE_DEVICES"], float(x.sum()), flush=True)
"""


class Stopper:
    """Moves ranks by stopping them: one that is used while it is away never answers."""

    def __init__(self) -> None:
        self.away: set[int] = set()
        self.most_away = 0

    def move_out(self, pid):
        os.kill(pid, signal.SIGSTOP)
        self.away.add(pid)
        self.most_away = max(self.most_away, len(self.away))

    def move_in(self, pid):
        self.away.remove(pid)
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def stopper():
    return Stopper()


@pytest.fixture
def run(tmp_path: Path, monkeypatch, stopper):
    """`run(gpus, gib, ranks)`: the report, and what ranks printed."""

    def note(_):
        return "memory", 3 * GIB, 3 * GIB, 3 * GIB

    monkeypatch.setattr(RankMemory, "note", note)
    monkeypatch.setattr(collecting, "load_checkpoints", lambda: stopper)
    monkeypatch.setattr(collecting.Nvml, "load", lambda: None)

    def run(
        gpus: int, gib: float, ranks: int = 4, program: str = PROGRAM, host: float = 99, **more
    ):
        room = Room([Gpu(f"GPU-{n}", 80 * GIB) for n in range(gpus)], int(gib * GIB), host * GIB)
        monkeypatch.setattr(collecting, "find_room", lambda *_: room if gpus else None)
        path = tmp_path / "program.py"
        path.write_text(dedent(program))
        options = CollectOptions(ranks, max(gpus, 1), shown=(), **more)
        output = tmp_path / f"bare-{gpus}-{gib}.parquet"
        report = collect(ProgramCall(str(path), ()), output, options)
        logs = [report.log_dir / f"rank-{rank:04d}.log" for rank in range(ranks)]
        return report, [log.read_text().split() for log in logs]

    return run


def test_ranks_that_take_turns_on_a_gpu_do_what_they_would_without(run, stopper, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")
    plain, wanted = run(0, 0)
    assert plain.gpu is None
    roomy, printed = run(1, 64)
    assert [line[2] for line in printed] == [line[2] for line in wanted]
    assert (roomy.gpu.moved_out, roomy.gpu.moved_in) == (0, 0)
    tight, printed = run(1, 8)
    assert [line[2] for line in printed] == [line[2] for line in wanted]
    assert {tuple(line[:2]) for line in printed} == {("4", "GPU-0")}
    assert tight.gpu.moved_out >= 3
    assert tight.gpu.moved_in >= 3
    assert stopper.most_away in (2, 3)
    graphs = [open_trace(one.output).collect() for one in (plain, roomy, tight)]
    assert graphs[0].equals(graphs[1])
    assert graphs[0].equals(graphs[2])


def test_ranks_of_two_gpus_take_turns_on_each(run):
    report, printed = run(2, 4)
    assert [line[1] for line in printed] == ["GPU-0", "GPU-1", "GPU-0", "GPU-1"]
    assert report.gpu.gpus == 2
    assert report.gpu.moved_out >= 2
    assert report.most_running == 2


def test_a_job_that_only_mirrors_is_one_of_gpus_too(run):
    program = """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(64))
        """
    report, _ = run(1, 64, ranks=2, program=program, mirror_above=16)
    assert report.mirrored == 2
    assert not ran_on_cpus(open_trace(report.output).header)


def test_near_ranks_first_takes_few_moves(run):
    report, _ = run(1, 8, ranks=6)
    assert report.gpu.moved_out <= report.context_switches


def test_without_room_on_the_host_it_ends_with_what_is_missing(run, stopper):
    with pytest.raises(SwapError, match="of host memory"):
        run(1, 4, host=1)
    assert stopper.away == set()


def test_a_rank_that_sleeps_lets_others_in(run, tmp_path, monkeypatch):
    program = """
    import os, time, torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        while not os.path.exists(os.environ["MARK"]):
            time.sleep(0.1)
    else:
        open(os.environ["MARK"], "w").close()
    dist.barrier()
    print(0, 0, 0)
    """
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    report, _ = run(1, 4, ranks=2, program=program)
    assert report.gpu.moved_out >= 1


@pytest.mark.gpu
def test_on_a_gpu_ranks_give_the_losses_of_a_run_without_room_problems(tmp_path: Path, repo: Path):
    losses = {}
    for name, options in {"roomy": [], "tight": ["--gpu-memory", "2"]}.items():
        command = [sys.executable, "-m", "prismreplay.cli", "collect", "--world-size", "4"]
        command += ["--devices", "1", "-o", str(tmp_path / f"{name}.parquet"), "--json", *options]
        program = [str(repo / "examples/train_gpt.py"), "--tp", "2", "--results"]
        done = subprocess.run(
            [*command, "--", *program, str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=False,
            env=with_paths(os.environ, repo),
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)["gpu"]
        assert (report["moved_out"] > 0) == (name == "tight"), report
        files = sorted((tmp_path / name).glob("rank-*.json"))
        read = [json.loads(file.read_text())["losses"] for file in files]
        losses[name] = [[float.fromhex(loss) for loss in one] for one in read]
    assert len(losses["tight"]) == 4
    for one, other in zip(losses["roomy"], losses["tight"], strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.gpu
def test_torch_of_this_machine_has_cuda():
    assert torch.version.cuda is not None
