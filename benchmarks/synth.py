"""How fast are made-up jobs written, and how much memory does it take?

    python benchmarks/synth.py                          64 ranks, 0.6 million rows
    python benchmarks/synth.py --ranks 8192 --steps 8   80 million rows, some minutes

Each task runs in a fresh process: the job as a recorded trace, the same job cut into slices,
and, for comparison, writing the rows of one file with Polars and nothing else.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prismcalib import synth
from prismcalib.synth.assembly import Job

TASKS = ("job", "bare", "slices", "slices without virtual ranks", "polars alone")


def spec_of(ranks: int, steps: int) -> synth.JobSpec:
    """Pipeline, tensor and data axes for a number of ranks; 1 220 to 1 350 rows a step."""
    tp, pp = min(8, ranks // 4), {64: 4, 512: 8}.get(ranks, 16 if ranks >= 1024 else 2)
    return synth.JobSpec(
        pp=pp, tp=tp, dp=ranks // tp // pp, microbatches=32, layers_per_stage=4, steps=steps
    )


def run(task: str, spec: synth.JobSpec, folder: Path, block: int) -> int:
    """Do a task; returns how many rows it wrote."""
    if task in ("job", "bare"):
        kind = "recorded" if task == "job" else "bare"
        synth.write_job(spec, folder, block, kind=kind)
        return Job(spec).rows
    virtual = "early" if task == "slices" else "none"
    paths = synth.cut_into_slices(spec, folder, block, virtual=virtual, noise=0.02)
    import polars as pl

    return sum(pl.scan_parquet(path).select(pl.len()).collect().item() for path in paths)


def rewrite(spec: synth.JobSpec, folder: Path, block: int) -> None:
    """Time the mere writing of one file whose rows are in memory."""
    from prismtrace.trace import open_trace, write_nodes

    small = synth.JobSpec(
        **{**vars(spec), "dp": max(1, block // spec.tp), "pp": 1, "microbatches": 32}
    )
    path = synth.write_job(small, folder, block)[0]
    trace = open_trace(path)
    rows = trace.collect()
    begin = time.process_time()
    write_nodes(trace.header, rows.lazy(), folder / "again.parquet")
    used = time.process_time() - begin
    print(f"{rows.height:11,} rows {used:26.2f} s CPU {used / rows.height * 1e9:6.0f} ns/row")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64, help="64, 512, 1024, 4096 or 8192")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--block", type=int, default=128, help="ranks per file or slice")
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--folder", type=Path, help="keep the files of the last task here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    spec = spec_of(options.ranks, options.steps)
    block = min(options.block, options.ranks)
    if options.child and options.task == ["polars alone"]:
        rewrite(spec, options.folder, block)
        return
    if options.child:
        begin, used = time.perf_counter(), time.process_time()
        rows = run(options.task[0], spec, options.folder, block)
        wall, cpu = time.perf_counter() - begin, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        size = sum(path.stat().st_size for path in options.folder.iterdir())
        print(
            f"{rows:11,} rows {wall:7.2f} s wall {cpu:7.2f} s CPU {cpu / rows * 1e9:6.0f} ns/row "
            f"peak {peak:5.2f} GiB {size / rows:5.1f} B/row on disk"
        )
        return
    print(f"{spec.world_size} ranks = pp {spec.pp} x tp {spec.tp} x dp {spec.dp}")
    for task in options.task or TASKS:
        folder = options.folder or Path(tempfile.mkdtemp(prefix="synth-"))
        print(f"{task:29}", end=" ", flush=True)
        again = [sys.executable, __file__, "--child", "--task", task, "--folder", str(folder)]
        again += ["--ranks", str(options.ranks), "--steps", str(options.steps)]
        subprocess.run([*again, "--block", str(options.block)], check=True)
        if options.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
