"""What recording costs a training step: nothing recorded, `prismreplay record`, torch's profiler.

    python benchmarks/record_overhead.py [--steps 30] [--repeats 5]

Two ranks train a small GPT over gloo, one thread each, about 100 ms a step (DDP, some ten buckets).
The three ways take turns, each in processes of its own; of every run the median step counts. On
a machine that others use, the wall time of a step varies more than recording costs; the CPU time
of a step and the cost of one operation, measured without partners, say more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("none", "record", "profiler")


def train(way: str, steps: int, folder: str) -> None:
    """One rank: trains, and writes wall and CPU time of each step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layer = nn.TransformerEncoderLayer(192, 4, 768, batch_first=True, dropout=0.0)
    parts = [nn.Embedding(256, 192), nn.TransformerEncoder(layer, 6), nn.Linear(192, 256)]
    model = DistributedDataParallel(nn.Sequential(*parts), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (2, 65))

    def step() -> None:
        logits = model(tokens[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    profiler = None
    if way == "profiler":
        cpu = torch.profiler.ProfilerActivity.CPU
        profiler = torch.profiler.profile(activities=[cpu])
    for _ in range(3):
        step()
    if profiler is not None:
        profiler.start()
    wall, cpu_time = [], []
    for _ in range(steps):
        begun, used = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - begun)
        cpu_time.append(time.process_time() - used)
    if profiler is not None:
        profiler.stop()
    Path(folder, f"{rank}.json").write_text(json.dumps({"wall": wall, "cpu": cpu_time}))
    dist.destroy_process_group()


def run(way: str, steps: int) -> dict[str, float]:
    """Median wall and CPU time of a step in ms, in a run of its own."""
    from prismreplay.collect.logs import RankLogs
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.local_ranks import run_ranks
    from prismreplay.record import assemble_spools, record_spools

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = ProgramCall(__file__, ("--train", way, "--steps", str(steps), "--folder", name))
        if way == "record":
            record_spools([], folder / "spools", program=program, ranks=2)
            made = assemble_spools(folder / "spools", folder / "out.parquet")
            nodes = made.nodes / 2 / (steps + 3)
        else:
            logs = RankLogs(folder / "logs", 2, (0,))
            logs.prepare()
            run_ranks(program, 2, {**os.environ, "OMP_NUM_THREADS": "1"}, logs)
            nodes = 0.0
        both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {
        "wall": statistics.mean(statistics.median(one["wall"]) for one in both) * 1000,
        "cpu": statistics.mean(statistics.median(one["cpu"]) for one in both) * 1000,
        "nodes": nodes,
    }


def one_operation(count: int = 3000) -> None:
    """CPU time of an operation, gloo's threads included, plain and recorded, on one rank."""
    import torch
    import torch.distributed as dist

    from prismreplay.runtime import recording
    from prismreplay.runtime.installing import install

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[recording.SPOOLS_VARIABLE] = folder

        def start() -> None:
            store = dist.HashStore()
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)

        tensor = torch.ones(1)

        def blocking() -> None:
            dist.all_reduce(tensor)

        def asynchronous() -> None:
            dist.all_reduce(tensor, async_op=True).wait()

        def through_future() -> None:
            dist.all_reduce(tensor, async_op=True).get_future().wait()

        def best(call) -> float:
            times = []
            for _ in range(7):
                begun = time.process_time()
                for _ in range(count // 7):
                    call()
                times.append((time.process_time() - begun) / (count // 7))
            return min(times) * 1e6

        calls = (blocking, asynchronous, through_future)
        start()
        plain = [best(call) for call in calls]
        dist.destroy_process_group()
        install(*recording.start(rank=0, world_size=1))
        start()
        recorded = [best(call) for call in calls]
        dist.destroy_process_group()
        for call, before, after in zip(calls, plain, recorded, strict=True):
            name = call.__name__.replace("_", " ")
            print(f"  {name:<16} {before:6.1f} -> {after:6.1f} us: {after - before:+.1f}")


def one_span(count: int = 200_000) -> None:
    """What a span costs whoever records it, in CPU time of its thread."""
    import prismtrace

    with tempfile.TemporaryDirectory() as folder, prismtrace.SpanWriter(f"{folder}/0.spool") as it:
        times = []
        for _ in range(5):
            begun = time.thread_time()
            for at in range(count // 5):
                it.span("work", at, at + 1, step=3)
            times.append((time.thread_time() - begun) / (count // 5))
    print(f"SpanWriter.span: {min(times) * 1e9:.0f} ns at best, {max(times) * 1e9:.0f} ns at worst")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.steps, options.folder)
        return
    one_span()
    print("one all_reduce of 4 bytes, one rank, CPU time:")
    sys.stdout.flush()
    one_operation()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            found[way].append(run(way, options.steps))
    print("two ranks, ms a step:    wall (lowest - highest)        CPU (lowest - highest)")
    for way, runs in found.items():
        columns = []
        for clock in ("wall", "cpu"):
            values = [each[clock] for each in runs]
            base = statistics.median(each[clock] for each in found["none"])
            middle = statistics.median(values)
            columns.append(
                f"{middle:7.2f} ({min(values):.2f} - {max(values):.2f}) {middle / base - 1:+6.1%}"
            )
        print(f"  {way:<10} {'   '.join(columns)}")
    print(f"  nodes a step and rank: {found['record'][0]['nodes']:.0f}")


if __name__ == "__main__":
    main()
