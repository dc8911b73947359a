"""`prismreplay record` on a GPU: what devices did is in the trace, when they did it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent

import polars as pl
import pytest

import prismcalib
import prismtrace as pt

pytestmark = pytest.mark.gpu

BEGIN = """
import json, os, signal, sys, time
signal.alarm(120)
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
if torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
    # Ranks that share a GPU: NCCL takes them for hosts. It works, at times that mean nothing.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
SLEEP = 20_000_000
tensor = torch.ones(1 << 20, device="cuda")
dist.all_reduce(tensor)
torch.cuda.synchronize()
def measure_sleep():
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(); torch.cuda._sleep(SLEEP); end.record(); torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e6
# A GPU that had nothing to do is slow at first: until it takes as long as the time before.
sleep_ns, before, until = measure_sleep(), 0.0, time.monotonic() + 5
while abs(sleep_ns - before) > 0.005 * sleep_ns and time.monotonic() < until:
    busy = torch.ones(1 << 26, device="cuda")
    for _ in range(200):
        busy.mul_(1.0)
    before, sleep_ns = sleep_ns, measure_sleep()
busy = None
"""
END = """
torch.cuda.synchronize()
sleep_ns = (sleep_ns + measure_sleep()) / 2
if rank == 0:
    print("TOLD", json.dumps({"sleep_ns": sleep_ns}))
dist.destroy_process_group()
"""


@pytest.fixture
def record(tmp_path, run_command):
    """Record a program; the rows of its trace, the trace, and what it told."""

    def record(text, ranks=1, expect=0):
        path = tmp_path / "program.py"
        path.write_text(BEGIN + dedent(text) + END)
        done = run_command(
            "prismreplay", "record", "--nproc-per-node", ranks, "-o", "run.parquet", "--", path
        )
        assert done.returncode == expect, done.stdout + done.stderr
        trace = pt.open(tmp_path / "run.parquet")
        assert {each.rule for each in pt.validate(trace)} <= {"overlap"}
        told = [line for line in done.stdout.splitlines() if line.startswith("TOLD")]
        return trace.collect(), trace, json.loads(told[0][5:])

    return record


def test_segments_last_as_long_as_their_kernels(record):
    rows, trace, told = record(
        """
        for step in range(4):
            with torch.profiler.record_function(f"step {step}"):
                torch.cuda._sleep(SLEEP)
                dist.all_reduce(tensor)
                torch.cuda._sleep(SLEEP)
                torch.cuda._sleep(SLEEP)
                dist.all_reduce(tensor)
        """
    )
    assert rows["start_ns"].null_count() == 0
    step = rows.filter(step=2)
    long = step.filter(kind="compute").sort("dur_ns")["dur_ns"].to_list()[-2:]
    assert long == pytest.approx([told["sleep_ns"], 2 * told["sleep_ns"]], rel=0.02)
    assert trace.header.clock[0].uncertainty_ns < 100_000
    assert trace.header.policies.get("host-times", 0) == 0
    assert rows["mem_bytes"].drop_nulls().max() >= 1 << 22
    merged = prismcalib.merge(trace).report
    assert abs(merged.difference_ns) <= merged.recorded_ns // 50


def test_the_host_runs_ahead_and_does_not_wait(record):
    rows, _, told = record(
        """
        begun = time.perf_counter_ns()
        works = []
        for step in range(3):
            with torch.profiler.record_function(f"step {step}"):
                for _ in range(10):
                    torch.cuda._sleep(SLEEP)
                    works.append(dist.all_reduce(tensor, async_op=True))
                for work in works:
                    work.wait()
                works.clear()
        issued_ns = time.perf_counter_ns() - begun
        assert issued_ns < 20 * sleep_ns, "recording has waited for the device"
        """
    )
    sleeps = rows.filter(pl.col("step") == 1, pl.col("kind") == "compute").sort("dur_ns")[-9:]
    assert sleeps["dur_ns"].to_list() == pytest.approx([told["sleep_ns"]] * 9, rel=0.02)


def test_what_a_side_stream_does_is_beside_the_program(record):
    rows, trace, told = record(
        """
        side = torch.cuda.Stream()
        for step in range(3):
            with torch.profiler.record_function(f"step {step}"):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(SLEEP)
                torch.cuda._sleep(SLEEP)
                torch.cuda.current_stream().wait_stream(side)
                dist.all_reduce(tensor)
        """
    )
    assert "program, stream 1" in trace.header.streams.values()
    step = rows.filter(step=1)
    both = step.filter(pl.col("kind") == "compute", pl.col("dur_ns") > told["sleep_ns"] / 2)
    assert both.height == 2
    assert both["stream"].n_unique() == 2
    first, second = both.sort("start_ns").rows(named=True)
    assert second["start_ns"] < first["start_ns"] + first["dur_ns"], "they overlap"


def test_ddp_fsdp_and_groups_of_the_host(record):
    rows, trace, _ = record(
        """
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        def layers():
            return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        ddp = nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=1)
        sharded = layers()
        for layer in sharded:
            fully_shard(layer)
        fully_shard(sharded)
        optimizers = [torch.optim.AdamW(each.parameters()) for each in (ddp, sharded)]
        for step in range(4):
            with torch.profiler.record_function(f"step {step}"):
                for model, optimizer in zip((ddp, sharded), optimizers):
                    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                dist.all_reduce(torch.ones(4))  # gloo
                said = [None] * dist.get_world_size()
                dist.all_gather_object(said, {"step": step})
                dist.barrier()
        """,
        ranks=2,
    )
    kinds = set(rows.filter(step=2)["kind"])
    assert {"all_reduce", "all_gather", "reduce_scatter", "barrier"} <= kinds
    assert rows["start_ns"].null_count() == 0
    assert set(rows["phase"].drop_nulls()) >= {"forward", "backward", "optimizer"}
    assert "program, stream 1" in trace.header.streams.values(), "FSDP gathers beside the program"
    rows = rows.filter(rank=0)
    starts = dict(rows.select("index", "start_ns").iter_rows())
    ends = {index: starts[index] + dur for index, dur in rows.select("index", "dur_ns").iter_rows()}
    early = [
        ends[index - back] - starts[index]
        for index, deps in rows.select("index", "deps").iter_rows()
        for back in deps
        if ends[index - back] > starts[index] + trace.header.clock[0].uncertainty_ns
    ]
    assert len(early) <= len(starts) // 20, early


def test_a_captured_graph_does_not_disturb(record):
    rows, _, _ = record(
        """
        graph = torch.cuda.CUDAGraph()
        static = torch.ones(1 << 10, device="cuda")
        with torch.cuda.graph(graph):
            static.add_(1)
            dist.all_reduce(static)
        for step in range(3):
            with torch.profiler.record_function(f"step {step}"):
                graph.replay()
                dist.all_reduce(tensor)
        """
    )
    assert rows.filter(step=1, kind="all_reduce").height == 1


def test_peak_memory_is_that_of_a_plain_run(tmp_path, record):
    # DDP makes new buckets in its second step, while the backend still has the old ones: until its
    # thread has looked, and the program communicates. After pauses it has looked, in each run.
    text = """
    parts = [torch.randn(1 << 20, device="cuda", requires_grad=True) for _ in range(4)]
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=5)
    optimizer = torch.optim.AdamW(model.parameters())
    def tell(step):
        torch.cuda.synchronize()
        time.sleep(0.3)
        held = torch.cuda.memory_stats()
        print("PEAK", step, held["allocated_bytes.all.peak"], held["allocated_bytes.all.current"],
              # What was asked for: blocks may be larger, depending on what was free when.
              held["requested_bytes.all.peak"])
    tell("before")
    torch.cuda.reset_peak_memory_stats()
    for step in range(4):
        with torch.profiler.record_function(f"step {step}"):
            model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            tell(f"{step}, DDP")
            work = [dist.all_reduce(part.detach() * 2, async_op=True) for part in parts]
            sum((part * part).sum() for part in parts).backward()
            for each in work:
                each.wait()
            # By future only, and then the program communicates at once, in its own stream.
            dist.all_reduce(parts[0].detach() * 2, async_op=True).get_future().wait()
            tell(f"{step}, futures")
            dist.all_reduce(tensor)
        tell(step)
    """
    path = tmp_path / "program.py"
    path.write_text(BEGIN + dedent(text) + END)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    plain = [
        subprocess.Popen(
            [sys.executable, path],
            env={**os.environ, **variables, "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for port in ("29777", "29778")
    ]
    try:
        record(text)
        said = [each.communicate(timeout=120)[0] for each in plain]
    finally:
        for each in plain:
            each.kill()
            each.wait()
    log = (tmp_path / "run.logs" / "rank-0000.log").read_text()
    recorded, *true = (
        [line for line in text.splitlines() if line.startswith("PEAK")] for text in (log, *said)
    )
    assert len(recorded) == 13
    assert true[0] == true[1], "two plain runs are not the same"
    assert recorded == true[0]


@pytest.mark.multi_gpu
def test_two_ranks_agree_on_the_time_of_a_collective(record):
    rows, _, told = record(
        """
        big = torch.ones(1 << 26, device="cuda")
        for step in range(4):
            with torch.profiler.record_function(f"step {step}"):
                if rank == 1:
                    torch.cuda._sleep(SLEEP)
                work = dist.all_reduce(big, async_op=True)
                torch.cuda._sleep(10 * SLEEP)
                work.wait()
                ops = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, tensor, 1 - rank)]
                for each in dist.batch_isend_irecv(ops):
                    each.wait()
        """,
        ranks=2,
    )
    step = rows.filter(step=2, kind="all_reduce").sort("rank")
    begun, lasted = step["start_ns"].to_list(), step["dur_ns"].to_list()
    assert begun[1] - begun[0] > 0
    ends = [start + length for start, length in zip(begun, lasted, strict=True)]
    assert abs(ends[0] - ends[1]) < 200_000
    assert max(lasted) < 5 * told["sleep_ns"], "it is over long before the wait"
    assert rows.filter(step=2, kind="send").height == 2
