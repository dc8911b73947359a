"""Predict twice the data parallel: 8 ranks were measured, how long is a step of 16?

What the larger job does is known, how long that takes is not.  Assumed, and nothing else:
  1. a new rank computes as long as the measured rank that has its place in another replica;
  2. transfers of groups that stay as they are take as long as before;
  3. transfers of groups that grow from K to L ranks take as long as on a ring of the same
     bandwidth: (1 - 1 / L) / (1 - 1 / K) times as long.  They are marked `reduced`.
"""

import tempfile

import polars as pl

import prismcalib
import prismtrace as pt
from prismcalib import synth

shape = {"pp": 2, "tp": 2, "microbatches": 8, "steps": 6}
small = prismcalib.merge(synth.generate(synth.JobSpec(**shape, dp=2, seed=9))).trace

# The larger job as it really is (assumption 3 holds in it); predicted from its structure only.
ring = {"dp reduce_scatter": 2_250_000, "dp all_gather": 1_350_000}
truth = prismcalib.merge(synth.generate(synth.JobSpec(**shape, dp=4, seed=10, mean_ns=ring))).trace
twins = {rank: rank - 4 for rank in range(16) if rank % 8 >= 4}  # replicas 2 and 3 like 0 and 1
header = synth.bare_graph(truth).header.model_copy(update={"symmetry": twins})
bare = pt.Trace(header, synth.bare_graph(truth).nodes)


def axes(trace: pt.Trace, size: str) -> pl.LazyFrame:
    """Of every rank its groups, what they are to it (tp, pp, dp, world), and their sizes."""
    table = trace.groups.df.lazy().explode("ranks").rename({"ranks": "rank", "id": "group"})
    return table.select("rank", "group", pl.col("size").alias(size), axis="desc")


# The measured ranks become a slice of the larger job: other numbers, other groups.
rank, peer = (pl.col(name) // 4 * 8 + pl.col(name) % 4 for name in ("rank", "peer"))
ids = rank.cast(pl.Int64) * 2**32 + pl.col("index")
longer = (1 - 1 / pl.col("L")) / (1 - 1 / pl.col("K"))
rows = small.nodes.join(axes(small, "K"), on=["rank", "group"], how="left").drop("group")
rows = rows.with_columns(rank=rank, peer=peer, id=ids)
rows = rows.join(axes(bare, "L"), on=["rank", "axis"], how="left").with_columns(
    transfer_ns=(pl.col("transfer_ns") * longer).round().cast(pl.Int64),
    transfer_source=pl.when(longer > 1).then(pl.lit("reduced")).otherwise("transfer_source"),
)
real = pt.SliceInfo(index=0, real_ranks=tuple(set(range(16)) - set(twins)))
header = header.model_copy(update={"kind": pt.TraceKind.SLICE, "slice": real})
nodes = rows.select(list(bare.nodes.collect_schema())).sort("rank", "index")
with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
    pt.write(pt.Trace(header, nodes), file.name)
    # The run was warm from its first step on.
    options = prismcalib.SliceOptions(bare=bare, unfold=True, warmup=0)
    predicted = prismcalib.predict(prismcalib.merge([file.name], slices=options).trace)

low, middle, high = (quantile.ns / 1e6 for quantile in predicted.spread.quantiles)
before_ms, true_ms = (prismcalib.predict(job, draws=0).step_ns / 1e6 for job in (small, truth))
print(f"8 ranks, measured: {before_ms:.1f} ms")
print(f"16 ranks, new ones in step with their twins: {predicted.step_ns / 1e6:.1f} ms")
print(f"16 ranks, each as at a time of its own: {middle:.1f} ms (p5 {low:.1f}, p95 {high:.1f})")
print(f"16 ranks, the truth: {true_ms:.1f} ms; predicted {middle / true_ms - 1:+.1%}")
print("rests on:", ", ".join(f"{what} {part:.1%}" for what, part in predicted.basis.items()))
