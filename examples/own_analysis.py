"""An analysis of your own: a trace is a Polars table, one row per operation.

For how much of a step has a pipeline stage nothing to do (the bubble)?  Which messages between
stages come late?  Where no command answers your question, a few lines of Polars do.
"""

import polars as pl

import prismcalib
from prismcalib import synth

job = synth.JobSpec(pp=4, tp=2, dp=2, microbatches=8, steps=2, seed=7)
run = prismcalib.merge(synth.generate(job)).trace  # of a file: prismtrace.open("aligned.parquet")

# The header knows axes and process groups; here, ranks of a stage have consecutive numbers.
axes, world_size = run.header.axes, run.header.world_size
print(f"{world_size} ranks, axes {axes}")

# `nodes` is lazy: of a file only the columns and ranks that a query needs are read.
end_ns = pl.col("start_ns") + pl.col("dur_ns")
nodes = run.nodes.with_columns(stage=pl.col("rank") // (world_size // axes["pp"]), end_ns=end_ns)

# From the first forward of any stage to the last backward of any: what a stage computes, alone
# or with its tensor group.  In profiler traces a compute row is a span of many kernels, and
# `x_busy_ns` is `dur_ns` without the idle time between them.
span_ns = pl.col("end_ns").max().over("step") - pl.col("start_ns").min().over("step")
bubbles = (
    nodes.filter(pl.col("phase").is_in(["forward", "backward"]))
    .with_columns(span_ns=span_ns)
    .filter(pl.col("kind").is_in(["compute", "all_reduce"]))
    .group_by("stage", "rank", "step")
    .agg(busy=pl.col("dur_ns").sum() / pl.col("span_ns").first())
    .group_by("stage")
    .agg(bubble=1 - pl.col("busy").mean())
    .sort("stage")
    .collect()
)
print("\nshare of forward and backward in which a stage has nothing to do:")
for stage, bubble in bubbles.iter_rows():
    print(f"  stage {stage}: {bubble:.1%}")
ideal = (axes["pp"] - 1) / (job.microbatches + axes["pp"] - 1)
print(f"  equal stages, messages that take no time: {ideal:.1%}")

# wait_ns lasts until the last member of a communication has arrived, transfer_ns is the rest.
received = nodes.filter(pl.col("kind") == "recv").group_by("stage", "name")
late = received.agg(pl.col("wait_ns", "transfer_ns").mean()).sort("wait_ns", descending=True)
print("\nmessages waited for longest, on average:")
for row in late.head(3).collect().iter_rows(named=True):
    waited, moved = row["wait_ns"] / 1e6, row["transfer_ns"] / 1e6
    print(f"  stage {row['stage']}, {row['name']}: {waited:.2f} ms, then {moved:.2f} ms transfer")
