"""How fast are what-ifs?  Many versions of one run, in process and as a whole command.

    python benchmarks/whatif.py                  22 scenarios of 117 thousand operations
    python benchmarks/whatif.py --trace merged.parquet --scenarios 48

Measured: CPU and wall time of `prismcalib.what_if` once everything is loaded, from the trace in
memory to step times and critical paths, and its parts; then the command in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

from prismcalib import synth
from prismcalib.build import graph_from_trace
from prismcalib.edits import Edit, Scale
from prismcalib.merging import merge
from prismcalib.propagation import critical_steps, propagate, propagate_batch
from prismcalib.whatif import what_if
from prismtrace.trace import Trace, open_trace, write


def made_up_run() -> Trace:
    """16 ranks, 117 thousand operations, merged."""
    spec = synth.JobSpec(pp=4, tp=2, dp=2, microbatches=8, layers_per_stage=6, steps=16)
    return merge(synth.generate(spec)).trace


def questions(rows: pl.DataFrame, count: int) -> dict[str, list[Edit]]:
    """A faster kind, a faster rank, a slower rank, ... : every scenario edits other rows."""
    kinds = sorted(rows["kind"].cast(pl.String).unique())
    ranks = sorted(rows["rank"].unique())
    named: dict[str, list[Edit]] = {}
    for kind in kinds:
        for factor in (0.5, 0.0):
            named[f"{kind} x {factor}"] = [Scale(f"kind = '{kind}'", factor)]
    number = 0
    while len(named) < count:
        rank = ranks[number % len(ranks)]
        factor = 0.9 - 0.1 * (number // len(ranks))
        named[f"rank {rank} x {factor:.1f}"] = [
            Scale(f"rank = {rank} and kind = 'compute'", factor)
        ]
        number += 1
    return dict(list(named.items())[:count])


def best(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least CPU and wall seconds of several runs."""
    cpu = wall = float("inf")
    for _ in range(repeats):
        begun = time.process_time(), time.perf_counter()
        work()
        cpu = min(cpu, time.process_time() - begun[0])
        wall = min(wall, time.perf_counter() - begun[1])
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a merged trace; default: made up")
    parser.add_argument("--scenarios", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    trace = made_up_run() if options.trace is None else open_trace(options.trace)
    trace = Trace(header=trace.header, nodes=trace.collect().lazy(), paths=trace.paths)
    graph, rows = graph_from_trace(trace)
    named = questions(rows, options.scenarios)
    durations = np.repeat(graph.duration_ns[:, None], len(named), axis=1)
    timing = propagate(graph, "array")
    steps = rows["step"].rank("dense").fill_null(0).cast(pl.Int32).to_numpy() - 1

    def one_by_one() -> None:
        for _ in named:
            critical_steps(graph, propagate(graph, "array"), "array")

    def batch() -> None:
        propagate_batch(graph, durations, steps=steps, order=timing.order, engine="array")

    works: dict[str, Callable[[], object]] = {
        "what_if, all of it": lambda: what_if(trace, named, engine="array"),
        "of it: graph from the trace": lambda: graph_from_trace(trace),
        "of it: propagation of all scenarios": batch,
        "instead: one propagation and path each": one_by_one,
        "what_if and the text of every path": lambda: what_if(
            trace, named, engine="array"
        ).as_dict(),
    }
    result: dict[str, float] = {"rows": graph.rows, "deps": len(graph.dep_rows)}
    result["scenarios"] = len(named)
    for name, work in works.items():
        work()
        cpu, wall = best(work, options.repeats)
        result[f"{name}, CPU s"], result[f"{name}, wall s"] = cpu, wall

    with tempfile.TemporaryDirectory() as folder:
        path, file = Path(folder) / "run.parquet", Path(folder) / "scenarios.json"
        write(trace, path)
        entries = [
            {"name": name, "edits": [{"scale": edit.by, "where": edit.where} for edit in edits]}
            for name, edits in named.items()
        ]
        file.write_text(json.dumps({"scenario": entries}))
        command = [
            sys.executable, "-m", "prismcalib.cli", "what-if", str(path),
            "--scenarios", str(file), "--json",
        ]  # fmt: skip

        def whole() -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        whole()
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        _, result["whole command, wall s"] = best(whole, options.repeats)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime
        result["whole command, CPU s"] = used / options.repeats
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:50} {value:12,.3f}".replace(".000", "    "))


if __name__ == "__main__":
    main()
