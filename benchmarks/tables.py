"""How fast traces are compared, asked, cut and joined, and how much memory that takes.

    python benchmarks/tables.py               256 ranks, 2 steps, 0.7 million rows
    python benchmarks/tables.py --ranks 1024 --steps 8    10 million rows, some minutes

Each task runs in a fresh process on a made-up job, once; CPU time is user plus system of all
threads, the peak is above that of the process after its imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kineto_read import high_water_mark  # beside this script

SQL = "SELECT kind, phase, COUNT(*) AS n, SUM(dur_ns) AS ns FROM nodes GROUP BY kind, phase"
TASKS = ("diff", "query", "query one rank", "slice-out ranks", "slice-out step", "concat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        print(json.dumps(measure(options.task[0], Path(options.task[1]))))
        return
    from synth import spec_of  # beside this script

    from prismcalib import synth

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synth.write_job(spec_of(options.ranks, options.steps), folder / "run.parquet")
        for task in TASKS:
            command = [sys.executable, __file__, "--task", task, name]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found = json.loads(done.stdout)
            print(
                f"{task:16} {found['rows']:11,} rows {found['cpu_s']:6.2f} s CPU"
                f" {found['rows'] / found['cpu_s'] / 1e6:6.2f} M rows/s,"
                f" {found['wall_s']:6.2f} s, peak {found['peak'] / 1e6:5.0f} MB",
                flush=True,
            )


def measure(task: str, folder: Path) -> dict[str, float]:
    import polars as pl

    import prismtrace as pt

    trace = pt.open(folder / "run.parquet")
    rows = trace.nodes.select(pl.len()).collect().item()
    half = len(trace.header.ranks) // 2
    calls = {
        "diff": lambda: pt.diff(trace, trace),
        "query": lambda: pt.query(trace, SQL).collect(engine="streaming"),
        "query one rank": lambda: pt.query(
            trace, f"{SQL.replace('GROUP', 'WHERE rank = 1 GROUP')}"
        ).collect(engine="streaming"),
        "slice-out ranks": lambda: [
            pt.slice_out(trace, folder / f"half{n}.parquet", ranks=range(n * half, (n + 1) * half))
            for n in (0, 1)
        ],
        "slice-out step": lambda: pt.slice_out(
            trace, folder / "step.parquet", steps=trace.header.steps[:1]
        ),
        "concat": lambda: pt.concat([folder / f"half{n}.parquet" for n in (0, 1)], folder / "x"),
    }
    before = high_water_mark()
    cpu, start = time.process_time(), time.monotonic()
    calls[task]()
    return {
        "rows": rows,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.monotonic() - start,
        "peak": high_water_mark() - before,
    }


if __name__ == "__main__":
    main()
