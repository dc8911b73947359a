"""What does a report cost, in time, memory and bytes?

    python benchmarks/report.py                     64 and 1 024 ranks
    python benchmarks/report.py --ranks 8192        ten million rows: minutes, 8 GB to make them
    python benchmarks/report.py --trace aligned.parquet

Makes a job (8 pipeline stages, tensor groups of 8), merges it, then writes its report in a fresh
process. Generation and merge do not count.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prismcalib import synth
from prismcalib.merging import merge


def make(ranks: int, microbatches: int, path: Path) -> None:
    spec = synth.JobSpec(
        pp=8,
        tp=8 if ranks >= 64 else 1,
        dp=max(ranks // 64, 1),
        microbatches=microbatches,
        layers_per_stage=4,
        stragglers={ranks // 3: 1.2},
        launch_gap_ns=2000,
    )
    merge(synth.generate(spec)).write(path)


def measure(path: Path, page: Path) -> None:
    """In a fresh process: print rows, seconds, bytes."""
    from prismcalib.report import write_report

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    summary = write_report(path, page)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = int(summary.extent.rows.sum())
    print(
        f"{len(summary.extent.ranks):6,} ranks {rows:12,} rows  {cpu:7.2f} s CPU ({wall:.2f} s)  "
        f"{cpu / rows * 1e6:6.2f} us/row  {(peak - before) / 1024:7,.0f} MiB above imports  "
        f"page {page.stat().st_size / 1e6:5.2f} MB"
        + ("" if summary.stragglers is None else "  (stragglers simulated)"),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--measure", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        traces = list(options.trace)
        if not traces:
            for ranks in options.ranks:
                traces.append(Path(folder) / f"{ranks}.parquet")
                call = [
                    sys.executable,
                    "-c",
                    f"import report, pathlib; report.make({ranks}, {options.microbatches}, pathlib.Path({str(traces[-1])!r}))",
                ]
                subprocess.run(call, check=True, cwd=Path(__file__).parent)
        for trace in traces:
            page = Path(folder) / "report.html"
            subprocess.run([sys.executable, __file__, "--measure", trace, page], check=True)


if __name__ == "__main__":
    main()
