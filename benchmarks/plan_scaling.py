"""What does a plan cost to compile, and at run time, as the world grows?

    python benchmarks/plan_scaling.py                   64 to 1 024 ranks
    python benchmarks/plan_scaling.py --ranks 8192      19 million rows
    python benchmarks/plan_scaling.py --microbatches 8 --steps 2 --replicas --ranks 64 --ranks 8192
    python benchmarks/plan_scaling.py --trace merged.parquet --sandbox 0-7

Makes a job and merges it (not counted; `--keep` finds it again), then compiles a plan in a fresh
process and lets sandbox ranks arrive at all their operations, as a run does. What should not
grow with the world: vertices, edges, and microseconds per operation. With `--replicas` all worlds
have the same pipeline and differ in the number of its replicas only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from merge_slices import GROWTH, SIZES, campaign, run

from prismcalib import synth

MEASURED = """
import json, resource, sys, time
from prismreplay.plan import OpKey, compile_plan
from prismcalib import synth, merge
from prismtrace.ranks import parse_ranks
from prismtrace.trace import open_trace

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

# Compiles the compiled parts where they are not in numba's cache yet.
compile_plan(merge(synth.generate(synth.JobSpec())).trace, [0])
path, sandbox = sys.argv[1], parse_ranks(sys.argv[2])
before, cpu, wall = peak(), time.process_time(), time.perf_counter()
plan = compile_plan(open_trace(path), sandbox)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
# In an order in which they can happen: that of the vertices.
names = ("vertex", "group", "seq", "src_rank", "dst_rank", "rank", "arrival")
seen, events = set(), []
for vertex, group, seq, src, dst, rank, arrival in plan.operations.select(names).iter_rows():
    key = OpKey(group, seq, src, dst)
    if (key, rank) not in seen:
        seen.add((key, rank))
        events.append((key, rank))
best = None
for _ in range(20):
    world = plan.world()
    begin = time.process_time_ns()
    for number, (key, rank) in enumerate(events):
        world.arrived(key, rank, number * 1000)
        world.ready_ns(key, rank)
    took = time.process_time_ns() - begin
    best = took if best is None else min(best, took)
print(json.dumps({
    "cpu_s": cpu, "wall_s": wall, "base_mib": before, "peak_mib": peak(),
    "operations": len(events), "vertices": plan.boundary.vertices, "edges": plan.boundary.edges,
    "us_per_operation": best / 1000 / max(1, len(events)),
}))
"""


def measure(trace: Path, sandbox: str) -> dict[str, float]:
    """Cost of one plan, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, os.fspath(trace), sandbox],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def merged(options: argparse.Namespace, world: int, scratch: str) -> Path:
    """The calibrated trace of a made-up job; made if it is not there."""
    shape = {"pp": 4, "tp": 8, "dp": world // 32} if options.replicas else SIZES[world]
    size = {**shape, **GROWTH, "microbatches": options.microbatches, "steps": options.steps}
    name = f"{world}-" + "-".join(str(number) for number in size.values())
    folder = (options.keep or Path(scratch)) / name
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "merged.parquet"
    if not trace.exists():
        spec = synth.JobSpec(**size, launch_gap_ns=2000, memory=False)
        ranks = max(world // 64, 8)
        slices = sorted(folder.glob("slice-*.parquet")) or campaign(spec, folder, ranks)
        run(["merge", *map(os.fspath, slices), "-o", os.fspath(trace), "--json", "--columns-only"])
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=SIZES, action="append")
    parser.add_argument("--microbatches", type=int, default=GROWTH["microbatches"])
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--replicas", action="store_true", help="the same pipeline in all worlds")
    parser.add_argument("--trace", type=Path, help="this calibrated trace instead")
    parser.add_argument("--sandbox", action="append", help="sandbox ranks; default: 0, and 0-7")
    parser.add_argument("--keep", type=Path, help="make (or find) the jobs in this folder")
    options = parser.parse_args()
    print("  ranks sandbox    wall s   CPU s  peak MiB  operations  vertices   edges  us/operation")
    with tempfile.TemporaryDirectory() as scratch:
        for world in options.ranks or (64, 256, 1024):
            trace = options.trace or merged(options, world, scratch)
            for sandbox in options.sandbox or ("0", "0-7"):
                cost = measure(trace, sandbox)
                print(
                    f"{'' if options.trace else world:7} {sandbox:8} {cost['wall_s']:8.2f} "
                    f"{cost['cpu_s']:7.2f} {cost['peak_mib']:9.0f} {cost['operations']:11,.0f} "
                    f"{cost['vertices']:9,.0f} {cost['edges']:7,.0f} "
                    f"{cost['us_per_operation']:13.2f}",
                    flush=True,
                )
            if options.trace:
                break


if __name__ == "__main__":
    main()
