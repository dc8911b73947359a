"""How fast and in how much memory Nsight Systems exports are converted.

    python benchmarks/nsys.py                  1.3 million rows
    python benchmarks/nsys.py --repeats 10     a quicker look

A recorded export of two processes (PRISM_TEST_DATA, default ../shared/data) is repeated, shifted in
time. Rows are those of the tables of events: kernels, copies, sets, runtime calls,
synchronizations, NVTX ranges. Everything was measured in fresh processes: rows/s of CPU time
(user and system, all threads, so: a core) of a whole conversion, writing included, and the peak
of the process above its own after the imports. For comparison, SQLite alone: fetching the
columns that are used, of all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from convert import cpu_seconds  # beside this script

REPO = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("PRISM_TEST_DATA") or REPO.parent / "shared" / "data") / "nsys"
SOURCE = DATA / "mfu_2gpu_before.sqlite"
TABLES = (
    *(f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME")),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "NVTX_EVENTS",
)
WINDOW_NS = 400_000_000
NUMBERS = 100_000  # more than the window has correlations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40, help="how often the recorded rows occur")
    parser.add_argument("--task", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, *arguments = options.task
        print(json.dumps({"convert": convert_once, "fetch": fetch_once}[task](*arguments)))
        return
    if not SOURCE.is_file():
        sys.exit(f"no recorded export at {SOURCE}; set PRISM_TEST_DATA")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sqlite"
        rows = repeat(path, options.repeats)
        print(f"{rows:,} rows, {path.stat().st_size / 1e6:.0f} MB")
        for title, *task in (
            ("communication grain", "convert", "communication"),
            ("kernel grain", "convert", "kernel"),
            ("SQLite alone", "fetch"),
        ):
            report(title, rows, path.stat().st_size, *task, str(path))


def report(title: str, rows: int, size: int, *task: str) -> None:
    command = [sys.executable, __file__, "--task", *task]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    cpu_s, peak = found["cpu_s"], found["peak"]
    print(
        f"{title:22} {cpu_s:6.2f} s {rows / cpu_s:12,.0f} rows/s, peak {peak / 1e6:6.1f} MB"
        f" = {peak / size:4.2f} x the file",
        flush=True,
    )


def convert_once(grain: str, path: str) -> dict[str, float]:
    """Convert in this process; one before warms up what is imported lazily."""
    from prismtrace.converters import convert

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run.parquet"
        convert(SOURCE, output)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = cpu_seconds()
        convert(path, output, grain=grain)
        spent = cpu_seconds() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"cpu_s": spent, "peak": peak * 1024}


def fetch_once(path: str) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with closing(sqlite3.connect(path)) as connection:
        for table in TABLES:
            ranges = "globalTid, text, textId"
            columns = ranges if table.startswith("NVTX") else "correlationId"
            cursor = connection.execute(f"SELECT start, end, {columns} FROM {table}")
            while cursor.fetchmany(64 * 1024):
                pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"cpu_s": time.process_time() - start, "peak": peak * 1024}


def repeat(target: Path, repeats: int) -> int:
    """Write the recorded rows over and over, each time later and with other correlations."""
    shutil.copyfile(SOURCE, target)
    total = 0
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        numbers = [(k,) for k in range(1, repeats)]
        connection.execute("CREATE TEMP TABLE again (k INTEGER)")
        connection.executemany("INSERT INTO again VALUES (?)", numbers)
        for table in TABLES:
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            listed = ", ".join(f'"{name}"' for name in names)
            shifted = {
                "start": f'"start" + {WINDOW_NS} * k',
                "end": f'"end" + {WINDOW_NS} * k',
                "correlationId": f'"correlationId" + {NUMBERS} * k',
            }
            values = ", ".join(shifted.get(name, f'"{name}"') for name in names)
            connection.execute(f"CREATE TEMP TABLE source AS SELECT * FROM {table}")
            connection.execute(
                f"INSERT INTO {table} ({listed}) SELECT {values} FROM again CROSS JOIN source"
                " ORDER BY k"
            )
            connection.execute("DROP TABLE source")
            total += connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        connection.commit()
    return total


if __name__ == "__main__":
    main()
