"""Operation-level logs: how fast they convert, and how fast stragglers are found in them.

    python benchmarks/ops.py                    the public job SE, 107 thousand operations
    python benchmarks/ops.py --rows 10000000    besides, its steps repeated to ten million

Measured: the conversion to a table in memory and to a file, in this process and as a command;
of the longer log what each row costs that the shorter has not, that is without start-up; what `prismcalib.find_stragglers`
takes with everything loaded, once as the publisher's analyser does it (kinds, stages,
replicas) and once with ranks and groups; and both commands in fresh processes.

Needs the public data set in PRISM_TEST_DATA (default ../shared/data beside the checkout).
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import polars as pl

from prismcalib.stragglers import BY, By, find_stragglers
from prismtrace.converters import convert
from prismtrace.converters.ops.convert import operations_trace
from prismtrace.trace import ROW_GROUP_ROWS, open_trace

PUBLISHED: tuple[By, ...] = ("kind", "stage", "replica")


def timed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least CPU and wall seconds of several runs, threads of this process included."""
    cpu = wall = float("inf")
    for _ in range(repeats):
        began_cpu, began = time.process_time(), time.perf_counter()
        work()
        cpu = min(cpu, time.process_time() - began_cpu)
        wall = min(wall, time.perf_counter() - began)
    return cpu, wall


def command(*words: object, repeats: int = 3) -> tuple[float, float]:
    """Least CPU and wall seconds of a command in a process of its own."""
    runs = [run_command(*words) for _ in range(repeats)]
    return min(cpu for cpu, _ in runs), min(wall for _, wall in runs)


def run_command(*words: object) -> tuple[float, float]:
    """CPU and wall seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall


def show(name: str, times: tuple[float, float], rows: int = 0) -> None:
    cpu, wall = times
    rate = (
        f"  {rows / cpu / 1e6:6.2f} M rows/s of CPU  {rows / wall / 1e6:6.2f} M rows/s"
        if rows
        else ""
    )
    print(f"{name:<52} {cpu:7.3f} s CPU {wall:7.3f} s wall{rate}")


def repeated(source: Path, rows: int, folder: Path) -> Path:
    """The same steps again under other numbers, until there are `rows` rows."""
    table = pl.read_parquet(source)
    stride = int(table["step"].max()) + 1
    times = max(1, round(rows / table.height))
    path = folder / "log.parquet"
    pl.concat(
        [table.with_columns(pl.col("step") + number * stride) for number in range(times)]
    ).write_parquet(path, compression="zstd", compression_level=1)
    return path


def conversions(source: Path, folder: Path, repeats: int) -> tuple[int, tuple[float, float]]:
    """Rows of a log, and what the command takes to convert it."""
    rows = pl.scan_parquet(source).select(pl.len()).collect().item()
    print(f"convert {rows:,} rows")
    out = folder / "out.parquet"
    whole = command("-m", "prismtrace.cli", "convert", source, "-o", out, repeats=repeats)
    show("  command", whole, rows)
    show(
        "  read, link and match, in process",
        timed(lambda: operations_trace([source]), repeats),
        rows,
    )
    show("  the same, with the table", timed(lambda: table(source), repeats), rows)
    show("  the same, written as Parquet", timed(lambda: convert(source, out), repeats), rows)
    written = pl.read_parquet(out)
    show("  only writing a table that is there", timed(lambda: write(written, out), repeats), rows)
    return rows, whole


def table(source: Path) -> pl.DataFrame:
    return operations_trace([source])[0].collect()


def write(rows: pl.DataFrame, path: Path) -> None:
    rows.lazy().sink_parquet(
        path, compression="zstd", compression_level=1, row_group_size=ROW_GROUP_ROWS
    )


def stragglers(source: Path, folder: Path, repeats: int) -> None:
    converted = folder / "trace.parquet"
    convert(source, converted)
    trace = open_trace(converted)
    find_stragglers(trace)  # loads and compiles
    for name, by in (("kinds, stages, replicas", PUBLISHED), ("ranks and groups as well", BY)):
        report = find_stragglers(trace, by=by)
        count = 2 + 2 * sum(map(len, report.parts.values()))
        work = timed(lambda by=by: find_stragglers(trace, by=by), repeats)
        show(f"  {name}: {count} simulations", work)
    words = ("-m", "prismcalib.cli", "stragglers", converted, "--json")
    chosen = [word for name in PUBLISHED for word in ("--by", name)]
    show("  command, kinds, stages, replicas", command(*words, *chosen))
    show("  command, everything", command(*words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, help="also convert a log of so many rows")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    home = os.environ.get("PRISM_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared/data"
    source = Path(home) / "ops" / "straggler" / "trace-SE.parquet"
    if not source.exists():
        sys.exit(f"no data at {source}; set PRISM_TEST_DATA")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, whole = conversions(source, folder, arguments.repeats)
        if arguments.rows:
            longer = repeated(source, arguments.rows, folder)
            more, longest = conversions(longer, folder, arguments.repeats)
            rest = (longest[0] - whole[0], longest[1] - whole[1])
            show("  command, without start-up", rest, more - rows)
        print("stragglers of SE")
        stragglers(source, folder, arguments.repeats)


if __name__ == "__main__":
    main()
