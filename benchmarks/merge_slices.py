"""How long does merging the slices of a large job take, in which memory?

    python benchmarks/merge_slices.py                        64 ranks to 1 024: growth with the world
    python benchmarks/merge_slices.py --large                8 192 ranks, 80 million rows
    python benchmarks/merge_slices.py --large --full         the same, writing whole traces too
    python benchmarks/merge_slices.py --folded               98 304 ranks, one replica of 768 measured

Makes a slicing campaign (not counted), then merges it with the command, each time in a fresh
process.  The check that matters: the step time of the merged job is that of the job.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from prismcalib import synth
from prismtrace.trace import open_trace, read_header, write_nodes

SIZES = {
    64: {"pp": 4, "tp": 4, "dp": 4},
    256: {"pp": 4, "tp": 8, "dp": 8},
    1024: {"pp": 8, "tp": 8, "dp": 16},
    8192: {"pp": 16, "tp": 8, "dp": 64},
}

# Replicas without any noise are equal, so that one of them tells about all.
REPLICAS = synth.JobSpec(
    pp=16, tp=8, dp=768, microbatches=32, layers_per_stage=4, memory=False,
    jitter=0, step_jitter=0, comm_jitter=0, end_spread_ns=0,
)  # fmt: skip

GROWTH = {"microbatches": 64, "layers_per_stage": 4}

COMMAND = """
import json, resource, sys, time
begin = time.perf_counter()
from prismcalib.cli import app
try:
    app(sys.argv[1:], standalone_mode=False)
finally:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({
        "wall_s": time.perf_counter() - begin,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
    }), file=sys.stderr)
"""


def run(arguments: list[str]) -> tuple[dict[str, float], dict[str, object]]:
    """Cost and report of one `prismcalib` command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stderr.splitlines()[-1]), json.loads(done.stdout)


def campaign(spec: synth.JobSpec, folder: Path, ranks_per_slice: int) -> list[Path]:
    begin = time.perf_counter()
    paths = synth.cut_into_slices(spec, folder, ranks_per_slice)
    size = sum(path.stat().st_size for path in paths) / 1e6
    print(f"# {len(paths)} slices, {size:.0f} MB, made in {time.perf_counter() - begin:.0f} s")
    return paths


def one_replica(folder: Path) -> list[Path]:
    """Slices of the tensor-parallel groups of the first replica; the others are its like."""
    size = REPLICAS.tp * REPLICAS.dp
    begin = time.perf_counter()
    real = [range(first, first + REPLICAS.tp) for first in range(0, REPLICAS.world_size, size)]
    paths = synth.cut_into_slices(REPLICAS, folder, real, virtual="none")
    ranks = range(REPLICAS.world_size)
    like = {rank: rank // size * size + rank % REPLICAS.tp for rank in ranks}
    symmetry = {rank: first for rank, first in like.items() if rank != first}
    for path in paths:
        header = read_header(path).model_copy(update={"symmetry": symmetry})
        write_nodes(header, open_trace(path).collect().lazy(), path)
    print(f"# {len(paths)} slices, made in {time.perf_counter() - begin:.0f} s")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="8 192 ranks instead of the growth")
    parser.add_argument("--folded", action="store_true", help="98 304 ranks in equal replicas")
    parser.add_argument("--full", action="store_true", help="write whole traces as well")
    parser.add_argument("--keep", type=Path, help="make (or find) the campaign here")
    options = parser.parse_args()
    worlds = [8192] if options.large else [64, 256, 1024]
    worlds = [REPLICAS.world_size] if options.folded else worlds
    print("  ranks       rows  wrote     wall s   CPU s  ns/row  peak MiB   B/row  file B/row")
    for world in worlds:
        size = {"microbatches": 144, "layers_per_stage": 8} if world == 8192 else GROWTH
        spec = REPLICAS
        if not options.folded:
            spec = synth.JobSpec(**SIZES[world], **size, launch_gap_ns=2000, memory=False)
        with tempfile.TemporaryDirectory() as scratch:
            folder = options.keep or Path(scratch)
            slices = sorted(folder.glob("slice-*.parquet"))
            if not slices and options.folded:
                slices = one_replica(folder)
            paths = slices or campaign(spec, folder, max(world // 64, 8))
            target = folder / "merged.parquet"
            for wrote in ("columns", "all") if options.full else ("columns",):
                flags = ["--columns-only"] if wrote == "columns" else []
                cost, report = run(
                    ["merge", *map(os.fspath, paths), "-o", os.fspath(target), "--json", *flags]
                )
                rows = int(report["rows"])
                print(
                    f"{world:7d} {rows:10d}  {wrote:7} {cost['wall_s']:8.2f} {cost['cpu_s']:7.2f} "
                    f"{cost['cpu_s'] / rows * 1e9:7.0f} {cost['peak_mib']:9.0f} "
                    f"{cost['peak_mib'] * 2**20 / rows:7.0f} {target.stat().st_size / rows:11.2f}"
                )
            target.unlink()
        truth = int(synth.step_ends_ns(replace(spec, dp=2) if options.folded else spec)[-1])
        assert report["propagated_ns"] == truth, (report["propagated_ns"], truth)


if __name__ == "__main__":
    main()
