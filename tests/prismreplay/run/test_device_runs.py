"""Whole runs of ranks on a GPU that is no GPU: operations are computed where their tensors are."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import polars as pl
import pytest

pytest.importorskip("torch")

from prismcalib.merging import merge
from prismcalib.slices import SliceOptions as MergeOptions
from prismreplay.collect.collecting import CollectOptions, collect
from prismreplay.collect.gpus import Gpu
from prismreplay.collect.programs import ProgramCall
from prismreplay.errors import PlanError, RankFailedError
from prismreplay.plan import compile_plan
from prismreplay.run import device_ranks, device_role, running
from prismreplay.run.options import RunOptions, Timing
from prismreplay.run.results import report_of
from prismreplay.run.running import run_sandbox
from prismreplay.slicing import running as slicing_running
from prismreplay.slicing.progress import Execution
from prismreplay.slicing.task import SliceTask
from prismreplay.tensors.choices import read_choices
from prismtrace.trace import open_trace
from tests.prismreplay.run.fake_streams import FakeNccl, FakePacing, FakeStreams, NoDevices

pytestmark = [
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore:Attempted to get default timeout"),
]

RANKS = 4

PROGRAM = """
    import os, warnings
    import torch
    import torch.distributed as dist
    warnings.simplefilter("ignore")  # this torch may be without NCCL
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl")
    ops = dist.ReduceOp
    pair = dist.new_subgroups(2)[0]
    found = []

    def tell(name, *tensors):
        text = " ".join(f"{float(t.double().sum()):.9g}" for t in tensors)
        print(name, text, *(list(t.shape) for t in tensors), flush=True)

    for step in range(2):
        with torch.profiler.record_function(f"step {step}"):
            x = torch.arange(12, dtype=torch.float32) * (rank + 1) + step
            for how in (ops.SUM, ops.AVG, ops.MAX, ops.MIN, ops.PRODUCT):
                y = x.clone()
                dist.all_reduce(y, op=how)
                tell(f"all_reduce {how}", y)
            y = x.clone()
            work = dist.all_reduce(y, group=pair, async_op=True)
            work.wait()
            tell("pair", y)
            y = x.clone()
            dist.broadcast(y, src=step)
            tell("broadcast", y)
            y = x.clone()
            dist.reduce(y, dst=1)
            if rank == 1:
                tell("reduce", y)
            whole = torch.empty(48)
            dist.all_gather_into_tensor(whole, x)
            tell("all_gather_into_tensor", whole, whole[:12])
            mine = whole[rank * 12 : (rank + 1) * 12]
            dist.all_gather_into_tensor(whole, mine)
            tell("all_gather in place", whole)
            parts = [torch.empty(12) for _ in range(size)]
            dist.all_gather(parts, x)
            tell("all_gather", *parts)
            out = torch.empty(3)
            dist.reduce_scatter_tensor(out, x)
            tell("reduce_scatter_tensor", out)
            dist.reduce_scatter(out, list((x * 2).chunk(4)), op=ops.AVG)
            tell("reduce_scatter", out)
            out = torch.empty(12)
            dist.all_to_all_single(out, x)
            tell("all_to_all_single", out)
            splits = [1 + (rank + other) % 2 for other in range(size)]
            rows = torch.arange(sum(splits) * 2, dtype=torch.float64).view(-1, 2) + rank
            got = torch.empty(sum(splits), 2, dtype=torch.float64)
            dist.all_to_all_single(got, rows, splits, splits)
            tell("all_to_all_single, uneven", got, got[:1])
            outs = list(torch.empty(12).chunk(4))
            dist.all_to_all(outs, list(x.chunk(4)))
            tell("all_to_all", *outs)
            part = torch.empty(3)
            dist.scatter(part, list(x.chunk(4)) if rank == 0 else None, src=0)
            tell("scatter", part)
            gathered = [torch.empty(12) for _ in range(size)] if rank == 1 else None
            dist.gather(x, gathered, dst=1)
            if rank == 1:
                tell("gather", *gathered)
            y = torch.empty(12)
            ops_ = [
                dist.P2POp(dist.isend, x, (rank + 1) % size),
                dist.P2POp(dist.irecv, y, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(ops_):
                work.wait()
            tell("batch", y)
            if rank == 0:
                dist.send(x, 1)
            if rank == 1:
                dist.recv(y, 0)
                tell("recv", y)
            objects = [None] * size
            dist.all_gather_object(objects, "x" * (rank + 1))
            print("objects", objects, flush=True)
            flag = torch.tensor([rank % 2 == 0])
            counts = torch.tensor([rank, 7])
            dist.all_reduce(counts)
            tell("integers", counts)
            dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A collected job, with its tensors, and what its ranks printed."""
    folder = tmp_path_factory.mktemp("job")
    program = folder / "program.py"
    program.write_text(dedent(PROGRAM))
    call = ProgramCall(str(program), ())
    options = CollectOptions(RANKS, 2, shown=(), tensors=read_choices(record="all"))
    report = collect(call, folder / "bare.parquet", options)
    return folder, call, [_printed(report.log_dir, rank) for rank in range(RANKS)]


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(n)`: so many GPUs that are this machine's processor."""

    import torch

    if torch.version.cuda is not None and not torch.cuda.is_available():
        pytest.skip("torch is built for GPUs and there is none: it asks the driver")

    def make(count=1):
        gpus = tuple(Gpu(f"GPU-{number}", 1 << 30) for number in range(count))
        monkeypatch.setattr(running, "visible_gpus", lambda: gpus)
        monkeypatch.setattr(running, "require_cuda_asleep", lambda _: None)
        monkeypatch.setattr(device_ranks, "make_devices", lambda: (NoDevices(), FakeStreams()))
        monkeypatch.setattr(device_ranks, "make_pacing", FakePacing)
        monkeypatch.setattr(device_role, "real_group", FakeNccl)
        monkeypatch.setattr(device_ranks, "is_on_device", lambda op, _: op.group.backend == "nccl")

    make()
    return make


def _printed(folder: Path, rank: int) -> list[str]:
    return (folder / f"rank-{rank:04d}.log").read_text().splitlines()


def _run(job, output, sandbox, *tensors, **more):
    folder, call, _ = job
    options = RunOptions(sandbox=sandbox, tensors=read_choices(tensors=tensors), shown=(), **more)
    return run_sandbox(call, open_trace(folder / "bare.parquet"), output, options)


def test_with_recorded_tensors_results_are_the_job_s(job, tmp_path):
    folder, _, wanted = job
    for rank in (0, 1, 3):
        outcome = _run(job, tmp_path / f"run{rank}.parquet", (rank,), str(folder / "bare.tensors"))
        assert _printed(outcome.log_dir, rank) == wanted[rank]
        told = outcome.devices[rank]
        assert told.operations > 40
        assert told.fetched > 20
        assert told.fetched_late < told.fetched - 5, "what comes again is asked for ahead"
        assert told.mirrored == 0
        assert told.peak_allocated_bytes == 150
        (mark, *_) = outcome.marks
        assert mark.peak_resident_bytes == 200


def test_the_trace_is_the_graph_with_times(job, tmp_path):
    outcome = _run(job, tmp_path / "run.parquet", (1,), str(job[0] / "bare.tensors"))
    columns = ["index", "kind", "group", "seq", "peer", "bytes", "step", "deps"]
    bare = open_trace(job[0] / "bare.parquet").collect()
    wanted = bare.filter(bare["rank"] == 1).select(columns)
    found = open_trace(outcome.output).collect()
    assert found.select(columns).equals(wanted)
    assert found["dur_ns"].null_count() == 0
    followed = outcome.world.followers[1]
    assert (followed.missing, followed.repeated, followed.resized) == (0, 0, 0)
    uses = {use.desc or use.name: use for use in outcome.coordinator.uses.values()}
    assert sum(use.operations for use in uses.values()) == outcome.devices[1].operations
    assert all(use.real_operations == 0 for use in uses.values())


def test_without_tensors_others_do_as_the_rank_does(job, tmp_path):
    outcome = _run(job, tmp_path / "run.parquet", (1,))
    told, wanted = _printed(outcome.log_dir, 1), job[2][1]
    assert outcome.devices[1].mirrored > 20
    assert outcome.devices[1].fetched == 0
    assert len(told) == len(wanted)
    lines = dict(line.split(" ", 1) for line in told if not line.startswith("all_reduce"))
    own = sum(range(12)) * 2 + 12  # of the last step
    assert lines["pair"].startswith(f"{2 * own} ")
    assert "'xx', 'xx', 'xx', 'xx'" in lines["objects"]


def test_a_program_that_does_something_else_is_refused_at_its_line(job, tmp_path):
    folder, _, _ = job
    program = tmp_path / "other.py"
    program.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('nccl')\ndist.barrier()\n"
    )
    other = folder, ProgramCall(str(program), ()), None
    with pytest.raises(PlanError, match="makes barrier"):
        _run(other, tmp_path / "run.parquet", (1,))


def test_ranks_that_share_a_gpu_are_refused(job, tmp_path):
    with pytest.raises(PlanError, match="share a GPU"):
        _run(job, tmp_path / "run.parquet", (0, 1), "builtin:mirror")


@pytest.mark.parametrize("sandbox", [(0, 1), (0, 2), (1, 2, 3)])
def test_several_sandbox_ranks_communicate_among_themselves(job, gpu, tmp_path, sandbox):
    gpu(len(sandbox))
    folder, _, wanted = job
    outcome = _run(job, tmp_path / "run.parquet", sandbox, str(folder / "bare.tensors"))
    for rank in sandbox:
        assert _printed(outcome.log_dir, rank) == wanted[rank]
    real = {use.ranks for use in outcome.coordinator.uses.values() if use.real_operations}
    assert real == {ranks for ranks in [(0, 1), (2, 3)] if set(ranks) <= {*sandbox}}


def test_several_sandbox_ranks_stand_for_the_others_too(job, gpu, tmp_path):
    gpu(2)
    outcome = _run(job, tmp_path / "run.parquet", (0, 2))
    lines = [_printed(outcome.log_dir, rank) for rank in (0, 2)]
    sums = [line for line in lines[0] if line.startswith("all_reduce RedOpType.SUM")]
    # Of ranks 0 and 2: 1 + 3 times the numbers, twice.
    assert float(sums[0].split()[2]) == 2 * 4 * sum(range(12))
    assert sums == [line for line in lines[1] if line.startswith("all_reduce RedOpType.SUM")]


def test_a_rank_that_runs_out_of_memory_does_so_on_the_cluster_too(job, tmp_path):
    program = tmp_path / "large.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 80 GiB')\n"
    )
    other = job[0], ProgramCall(str(program), ()), None
    with pytest.raises(RankFailedError, match="out of memory") as failed:
        _run(other, tmp_path / "run.parquet", (1,))
    assert "on the cluster" in failed.value.hint


TIMED = """
    import os, time, warnings
    import torch
    import torch.distributed as dist
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl")
    x, y = torch.ones(4), torch.empty(4)
    host = dist.new_group(backend="gloo")
    for step in range(4):
        with torch.profiler.record_function(f"step {step}"):
            time.sleep(0.01 * (rank + 1))
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            time.sleep(0.005)
            dist.all_reduce(torch.ones(1), group=host)
            there, back = dist.P2POp(dist.isend, x, 1 - rank % 2 + rank // 2 * 2), None
            back = dist.P2POp(dist.irecv, y, 1 - rank % 2 + rank // 2 * 2)
            for work in dist.batch_isend_irecv([there, back]):
                work.wait()
    dist.destroy_process_group()
"""


@pytest.fixture
def timed_job(tmp_path):
    """A job of four ranks, each slower than the one before, collected."""
    program = tmp_path / "timed.py"
    program.write_text(dedent(TIMED))
    call = ProgramCall(str(program), ())
    options = CollectOptions(RANKS, 2, shown=(), tensors=read_choices(record="all"))
    collect(call, tmp_path / "bare.parquet", options)
    return tmp_path, call, None


def _tensors(folder):
    """GPU ranks mirror; what the host's group carries comes from the recording."""
    rules = folder / "mirror.toml"
    rules.write_text('[[rule]]\ngroup = "0"\nproduce = "mirror"\n')
    return [str(rules), str(folder / "bare.tensors")]


def _sliced(job, local):
    """All slices of a job, merged."""
    folder, call, _ = job
    bare = open_trace(folder / "bare.parquet")
    files = []
    for number in range(RANKS):
        task = SliceTask(
            program=call,
            execution=Execution(index=number, ranks=(number,), repeat=0),
            graph=tuple(bare.paths),
            output=folder / f"slice-{number:04d}.parquet",
            log_dir=folder / f"logs{number}",
            world_size=RANKS,
            local_world_size=RANKS,
            tensors=read_choices(tensors=_tensors(folder)),
            fingerprint={},
            gpus=("GPU-0",),
        )
        outcome = slicing_running.perform(task)
        assert outcome.mixed_operations == outcome.nodes - _local(outcome.output)
        assert len(outcome.step_ns) == local
        files.append(outcome.output)
    merged = merge(files, slices=MergeOptions(bare=bare))
    merged.write(folder / "calibrated.parquet")
    return open_trace(folder / "calibrated.parquet")


def _local(path):
    return open_trace(path).collect().filter(pl.col("kind").is_in(["compute", "memcpy"])).height


def test_sandbox_ranks_on_two_gpus_tell_each_other_when_they_arrive(timed_job, gpu, tmp_path):
    calibrated = _sliced(timed_job, 4)
    gpu(2)
    tensors = read_choices(tensors=_tensors(timed_job[0]))
    outcome = run_sandbox(
        timed_job[1],
        calibrated,
        tmp_path / "run.parquet",
        RunOptions(sandbox=(0, 2), shown=(), tensors=tensors),
        lambda: Timing(compile_plan(calibrated, (0, 2))),
    )
    report = report_of(outcome, calibrated, timed=True)
    assert [one.device["holds"] for one in report.ranks] == [12, 12]
    assert report.step_ns > 40e6


def test_steps_take_what_the_slowest_virtual_rank_takes(timed_job, tmp_path):
    calibrated = _sliced(timed_job, 4)
    tensors = read_choices(tensors=_tensors(timed_job[0]))
    options = RunOptions(sandbox=(0,), shown=(), tensors=tensors)
    outcome = run_sandbox(
        timed_job[1],
        calibrated,
        tmp_path / "run.parquet",
        options,
        lambda: Timing(compile_plan(calibrated, (0,))),
    )
    report = report_of(outcome, calibrated, timed=True)
    told = report.ranks[0].device
    assert told["holds"] == 12, "those of the host's group, too"
    assert told["mirrored"] == 8
    # Rank 3 computes for 45 ms; all others wait for it.
    assert report.predicted_step_ns > 40e6
    assert report.step_ns > 40e6


def test_large_collectives_need_not_be_performed_to_collect_a_graph(job, tmp_path):
    folder, call, wanted = job
    options = CollectOptions(RANKS, 2, shown=(), mirror_above=40)
    report = collect(call, tmp_path / "bare.parquet", options)
    columns = ["rank", "index", "kind", "group", "seq", "peer", "bytes", "step", "deps"]
    graphs = [
        open_trace(path).collect().select(columns)
        for path in (folder / "bare.parquet", tmp_path / "bare.parquet")
    ]
    assert graphs[0].equals(graphs[1])
    told = _printed(report.log_dir, 2)
    assert [line for line in told if line.startswith(("recv", "integers", "objects"))] == [
        line for line in wanted[2] if line.startswith(("recv", "integers", "objects"))
    ]
    assert told != wanted[2]


HOLDING = """
    import gc, os, warnings
    import torch
    import torch.distributed as dist
    warnings.simplefilter("ignore")
    gc.disable()
    other = int(os.environ["RANK"]) ^ 1
    dist.init_process_group("nccl")

    def count():
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    def communicate():
        x, y = torch.ones(4), torch.empty(4)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        there, back = dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()
        dist.all_gather_object([None] * 4, "text")

    communicate()
    before = count()
    communicate()
    print(count() - before)
    dist.destroy_process_group()
"""


def test_no_tensor_outlives_its_communication(tmp_path):
    program = tmp_path / "holding.py"
    program.write_text(dedent(HOLDING))
    call = ProgramCall(str(program), ())
    options = CollectOptions(RANKS, 2, shown=(), tensors=read_choices(record="all"))
    collect(call, tmp_path / "bare.parquet", options)
    outcome = _run((tmp_path, call, None), tmp_path / "run.parquet", (0,))
    assert _printed(outcome.log_dir, 0) == ["0"]
