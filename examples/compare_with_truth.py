"""Is what the demo emulated true? Losses, parameters, the graph, and, with enough cores, the time.

python examples/compare_with_truth.py demo-out
"""

import json
import os
import sys
from pathlib import Path

import polars as pl

import prismtrace as pt

STRUCTURE = ["rank", "index", "kind", "group", "seq", "peer", "bytes", "dtype", "step", "deps"]
WARMUP = 1

folder = Path(sys.argv[1])
run = json.loads((folder / "emulation/run.json").read_text())["report"]
true = pt.open(folder / "true.parquet")
right = []

for path in sorted((folder / "emulated").glob("rank-*.json")):
    rank = int(path.stem.partition("-")[2])
    if rank not in run["sandbox"]:
        continue
    emulated, real = (
        json.loads((folder / of / path.name).read_text()) for of in ("emulated", "true")
    )
    right += [emulated == real]
    losses = ", ".join(f"{float.fromhex(loss):.4f}" for loss in real["losses"])
    same = "the same, bit for bit" if right[-1] else "DIFFERENT"
    print(f"rank {rank}: losses {losses}; losses and parameters {same}")

bare = pt.open(folder / "emulation/bare.parquet")
graphs = [trace.nodes.select(STRUCTURE).sort("rank", "index").collect() for trace in (bare, true)]
right += [graphs[0].equals(graphs[1])]
same = "the same" if right[-1] else "DIFFERENT"
print(f"graph: {len(graphs[1]):,} nodes of {true.header.world_size} ranks, {same}")

ranks, cores = true.header.world_size, len(os.sched_getaffinity(0))
if cores < ranks:
    print(f"step time: not compared, for {ranks} true ranks share {cores} cores")
else:
    end = (pl.col("start_ns") + pl.col("dur_ns")).max()
    ends = true.nodes.drop_nulls("step").group_by("step").agg(end=end).sort("step").collect()
    real_ns = ends["end"].diff()[WARMUP:].median()
    apart = run["step_ns"] / real_ns - 1
    print(f"step time: {real_ns / 1e6:.1f} ms, emulated {apart:+.1%}")
sys.exit(0 if all(right) else 1)
