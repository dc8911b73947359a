"""How much smaller do traces get, how fast, and how much faster is what comes after?

    python benchmarks/coarsen.py               a merged job of about a million rows
    python benchmarks/coarsen.py --steps 2     a smaller one
    python benchmarks/coarsen.py --trace merged.parquet

Measured: CPU and wall time of `prismcalib.coarsen` in process, sizes and errors, and the time of
propagating 16 scenarios on either grain.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prismcalib import synth
from prismcalib.build import graph_from_trace
from prismcalib.coarsening import Coarse, Grain, coarsen
from prismcalib.merging import merge
from prismcalib.propagation import propagate, propagate_batch
from prismtrace.trace import Trace, open_trace, write

_SCENARIOS = 16


def made_up_run(steps: int) -> Trace:
    """32 ranks with four kernels a block; 74 thousand rows a step."""
    spec = synth.JobSpec(
        pp=4, tp=4, dp=2, microbatches=8, layers_per_stage=8, steps=steps, kernels_per_block=4
    )
    return merge(synth.generate(spec)).trace


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Result, CPU and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def propagation_s(trace: Trace) -> float:
    """CPU seconds of 16 scenarios on a trace."""
    graph, _ = graph_from_trace(trace)
    order = propagate(graph, "array").order
    durations = np.repeat(graph.duration_ns[:, None], _SCENARIOS, axis=1)
    propagate_batch(graph, durations, order=order, engine="array")
    return min(
        timed(lambda: propagate_batch(graph, durations, order=order, engine="array"))[1]
        for _ in range(3)
    )


def measure(trace: Trace, grain: Grain, folder: Path) -> dict[str, Any]:
    """Numbers of one grain."""
    coarse: Coarse
    coarse, cpu, wall = timed(lambda: coarsen(trace, grain=grain))
    target = folder / f"{grain}.parquet"
    coarse.write(target)
    report = coarse.report
    return {
        **report.as_dict(),
        "cpu_s": round(cpu, 3),
        "wall_s": round(wall, 3),
        "rows_per_cpu_s": round(report.rows_before / cpu),
        "bytes_written": target.stat().st_size,
        "scenarios_cpu_s": round(propagation_s(coarse.trace), 4),
    }


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, help="calibrated trace; default: a made-up job")
    parser.add_argument("--steps", type=int, default=14)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = open_trace(arguments.trace) if arguments.trace else made_up_run(arguments.steps)
        write(trace, folder / "fine.parquet")
        trace = open_trace(folder / "fine.parquet")
        # Compile before anything is timed.
        coarsen(made_up_run(1))
        result: dict[str, Any] = {
            "fine_bytes": (folder / "fine.parquet").stat().st_size,
            "scenarios": _SCENARIOS,
            "fine_scenarios_cpu_s": round(propagation_s(trace), 4),
        }
        grains: tuple[Grain, ...] = ("exact", "microbatch")
        for grain in grains:
            result[grain] = measure(trace, grain, folder)
        result["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        json.dump(result, sys.stdout, indent=2)
        print()


if __name__ == "__main__":
    main()
