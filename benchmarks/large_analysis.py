"""What do the analysis commands cost on a large merged trace?

    python benchmarks/large_analysis.py --keep folder             8 192 ranks, 80 million rows
    python benchmarks/large_analysis.py --ranks 1024 --only report --only what-if

Makes a slicing campaign and merges it (not counted; `--keep` finds it again), then runs every
command in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from merge_slices import COMMAND, SIZES, campaign, run

from prismcalib import synth

HALF = ["--scale", "kind = 'all_reduce'", "0.5"]
SLOW = ["--scale", "rank = 3 and kind = 'compute'", "2"]

COMMANDS = {
    "check": ["check", "{trace}"],
    "critical-path": ["critical-path", "{trace}"],
    "predict": ["predict", "{trace}"],
    "what-if": ["what-if", "{trace}", "--scenario", "half", *HALF, "--scenario", "slow", *SLOW],
    "stragglers": ["stragglers", "{trace}"],
    "compare": ["compare", "{trace}", "{trace}"],
    "health": ["health", "{trace}", "{trace}"],
    "coarsen": ["coarsen", "{trace}", "-o", "{folder}/exact.parquet"],
    "coarsen microbatch": [
        *("coarsen", "{trace}", "--grain", "microbatch", "-o", "{folder}/microbatch.parquet"),
    ],
    "report": ["report", "{trace}", "-o", "{folder}/report.html"],
}


def merged(folder: Path, world: int) -> Path:
    """The merged trace, computed columns beside the slices; made if it is not there."""
    trace = folder / "merged.parquet"
    if not trace.exists():
        size = {"microbatches": 144, "layers_per_stage": 8}
        spec = synth.JobSpec(**SIZES[world], **size, launch_gap_ns=2000, memory=False)
        slices = sorted(folder.glob("slice-*.parquet")) or campaign(spec, folder, world // 64)
        run(["merge", *map(os.fspath, slices), "-o", os.fspath(trace), "--json", "--columns-only"])
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, choices=SIZES, default=8192)
    parser.add_argument("--only", action="append", choices=COMMANDS, help="just this command")
    parser.add_argument("--keep", type=Path, help="make (or find) the merged trace here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trace = merged(options.keep or Path(scratch), options.ranks)
        print("command                wall s   CPU s  peak MiB", flush=True)
        for name in options.only or COMMANDS:
            arguments = [
                part.format(trace=trace, folder=scratch) if "{" in part else part
                for part in COMMANDS[name]
            ]
            done = subprocess.run(
                [sys.executable, "-c", COMMAND, *arguments],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(f"{name}: {done.stderr}")
            cost = json.loads(done.stderr.splitlines()[-1])
            print(
                f"{name:20} {cost['wall_s']:8.1f} {cost['cpu_s']:7.1f} {cost['peak_mib']:9.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
