"""How a job of a thousand ranks is converted: speed, memory, more cores, a cluster.

    python benchmarks/cluster.py                     1 024 ranks (about five minutes)
    python benchmarks/cluster.py --ranks 64 256      a quicker look
    python benchmarks/cluster.py --write FOLDER      only write the profiler files

The profiler files are made here, one per rank, as torch 2.5 would write them: a job of tensor
(8) and data parallelism on true time, in which each collective ends on all its members at once.
Every conversion runs in a fresh process, and its result is compared with the first one's.
Printed are events/s of wall and of CPU time, the peak of the process that matches and writes,
and that of the largest worker, both without what Python and its modules take.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from kineto_read import high_water_mark  # beside this script

TP = 8
LAYERS, MICROBATCHES, STEPS = 16, 8, 2
SLOT_US = 400
BASE_NS = 1_719_853_884_000_000_000
EPOCH_US = 1_719_900_000_000_000 - BASE_NS // 1000
RING = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
WAYS = {
    "one process": (1, False, False),
    "two processes": (2, False, False),
    "two, resumable": (2, True, False),
    "Dask, two workers": (1, False, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--task", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(convert_once(*options.task)))
        return
    most = max(options.ranks)
    if options.write:
        for rank in range(most):
            write_rank(options.write, rank, most)
        return
    with tempfile.TemporaryDirectory() as name:
        for ranks in options.ranks:
            folder = Path(name) / str(ranks)
            sizes = [write_rank(folder, rank, ranks) for rank in range(ranks)]
            print(f"{ranks} ranks, {sum(sizes) / 1e6:,.0f} MB uncompressed", flush=True)
            first = ""
            for title, (jobs, resume, dask) in WAYS.items():
                if ranks < most and title != "one process":
                    continue
                found = task(folder, jobs, resume, dask)
                first = first or found["digest"]
                report(title, found, same=found["digest"] == first)


def report(title: str, found: dict[str, Any], *, same: bool) -> None:
    print(
        f"  {title:18} {found['events']:10,} events {found['wall_s']:6.1f} s"
        f" {found['events'] / found['wall_s']:9,.0f} events/s"
        f" ({found['events'] / found['cpu_s']:,.0f} per CPU second),"
        f" peak {found['peak'] / 1e6:,.0f} MB, worker {found['worker'] / 1e6:,.0f} MB,"
        f" {'same bytes' if same else 'OTHER BYTES'}",
        flush=True,
    )


def task(folder: Path, jobs: int, resume: bool, dask: bool) -> dict[str, Any]:
    words = [str(folder), str(jobs), str(int(resume)), str(int(dask))]
    command = [sys.executable, __file__, "--task", *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def convert_once(folder: str, jobs: str, resume: str, dask: str) -> dict[str, Any]:
    import resource
    from contextlib import nullcontext

    from prismtrace.converters import convert

    def spent() -> float:
        both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in both)

    output = Path(folder).parent / "run.parquet"
    convert(Path(folder) / "rank0.json.gz", output)  # imports, warm
    before = high_water_mark()
    cluster: Any = nullcontext()
    if int(dask):
        from distributed import LocalCluster

        cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    cpu = spent()
    with cluster as started:
        start = time.monotonic()
        done = convert(
            folder,
            output,
            jobs=int(jobs),
            resume=bool(int(resume)),
            dask=started.scheduler_address if started else None,
        )
        wall = time.monotonic() - start
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "events": done.events,
        "wall_s": wall,
        "cpu_s": spent() - cpu,
        "peak": high_water_mark() - before,
        "worker": max(0, worker - before),
        "digest": hashlib.blake2b(output.read_bytes()).hexdigest(),
    }


# --- the job ------------------------------------------------------------------------------------


def write_rank(folder: Path, rank: int, world: int) -> int:
    """Write one rank's file; returns its uncompressed size."""
    folder.mkdir(parents=True, exist_ok=True)
    tensor = list(range(rank // TP * TP, rank // TP * TP + TP))
    data = list(range(rank % TP, world, TP))
    groups = {
        "0": ("default_pg", list(range(world))),
        f"1.{tensor[0]}": ("TENSOR", tensor),
        f"2.{data[0]}": ("DATA", data),
    }
    document = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": world,
            "pg_count": len(groups),
            "pg_config": [
                {"pg_name": name, "pg_desc": desc, "pg_size": len(ranks), "ranks": ranks}
                for name, (desc, ranks) in groups.items()
            ],
        },
        "host_name": f"host{rank // TP}",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": list(events(rank, tensor, data)),
    }
    text = json.dumps(document).encode()
    with gzip.open(folder / f"rank{rank}.json.gz", "wb", compresslevel=1) as file:
        file.write(text)
    return len(text)


def events(rank: int, tensor: list[int], data: list[int]) -> Iterator[dict[str, Any]]:
    """A slot of time per layer; a rank gets to its collective early or late within it."""
    random = Random(rank)
    correlation, now = 0, EPOCH_US
    for step in range(STEPS):
        begin = now
        for _ in range(2 * MICROBATCHES * LAYERS):
            busy = 0.0
            for name in ("gemm", "gemm", "attention"):
                correlation += 1
                yield from launched(
                    f"{name}_kernel", now + busy, random.uniform(60, 90), correlation
                )
                busy += 90 + random.random()  # of a microsecond
            correlation += 1
            end = now + SLOT_US - 10
            yield from collective("allreduce", tensor, "1", "TENSOR", now + busy, end, correlation)
            now += SLOT_US
        for kind in ("_reduce_scatter_base", "_allgather_base"):
            correlation += 1
            arrival = now + random.uniform(0, 100)
            yield from collective(kind, data, "2", "DATA", arrival, now + 390, correlation)
            now += SLOT_US
        yield event("user_annotation", f"ProfilerStep#{step + 5}", begin - 15, now - begin, 100)


def launched(
    name: str, ts: float, dur: float, correlation: int, stream: int = 7, **args: Any
) -> Iterator[dict[str, Any]]:
    yield event("cpu_op", "aten::op", ts - 12, 5, 100)
    yield event("cuda_runtime", "cudaLaunchKernel", ts - 10, 2, 100, correlation=correlation)
    yield event("kernel", name, ts, dur, stream, correlation=correlation, stream=stream, **args)


def collective(
    kind: str, ranks: list[int], group: str, desc: str, ts: float, end: float, correlation: int
) -> Iterator[dict[str, Any]]:
    args = {
        "Collective name": kind,
        "In msg nelems": 1 << 20,
        "Out msg nelems": 1 << 20,
        "Group size": len(ranks),
        "dtype": "BFloat16",
        "Process Group Name": f"{group}.{ranks[0]}",
        "Process Group Description": desc,
        "Process Group Ranks": str(ranks),
    }
    yield event("cpu_op", "record_param_comms", ts - 11, 4, 100, **args)
    yield from launched(
        RING.format("AllReduce_Sum_bf16" if kind == "allreduce" else kind.title().replace("_", "")),
        ts,
        end - ts,
        correlation,
        20,
        **args,
    )


def event(cat: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> dict[str, Any]:
    pid = 0 if cat == "kernel" else 5000
    times = {"ts": round(ts, 3), "dur": round(dur, 3)}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}


if __name__ == "__main__":
    main()
