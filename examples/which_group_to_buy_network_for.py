"""Which groups to buy network for?  Twice the bandwidth goes where the job gains most.

Tensor, pipeline and data parallel groups of a job use links of their own.  The data parallel
groups of this one transfer most, but behind the computation of the layers that are still to come.
"""

import polars as pl

import prismcalib
from prismcalib import synth

job = synth.JobSpec(
    pp=2,
    tp=2,
    dp=4,
    microbatches=4,
    layers_per_stage=4,
    steps=3,
    seed=3,
    mean_ns={"dp reduce_scatter": 3_500_000, "dp all_gather": 400_000},
)
run = prismcalib.merge(synth.generate(job)).trace
what = {"tp": "tensor", "pp": "pipeline", "dp": "data"}

answer = prismcalib.what_if(
    run, {family: [prismcalib.Scale(f"group_name LIKE '{family}%'", 0.5)] for family in what}
)
before = answer.baseline

# Time of transfers alone, per rank and step; `groups.df` tells which group is which.
names = run.groups.df.select(group="id", family=pl.col("name").str.strip_chars("_0123456789"))
per_step = job.world_size * job.steps
transfers = dict(
    run.nodes.join(names.lazy(), on="group")
    .group_by("family")
    .agg(pl.col("transfer_ns").sum() / per_step)
    .collect()
    .iter_rows()
)

# Above 100 %: a transfer that every microbatch needs also makes the pipeline fill and drain faster.
print(f"step {before.step_ns / 1e6:.2f} ms; with twice the bandwidth for one sort of group:\n")
print("groups            transfers each   gain of the job   gain per ms saved")
for scenario in sorted(answer.scenarios, key=lambda scenario: scenario.delta_ns):
    each, gain = transfers[scenario.name] / 1e6, -scenario.delta_ns / 1e6
    print(f"{what[scenario.name]:16} {each:11.2f} ms {gain:14.2f} ms {gain / (each / 2):14.0%}")

best = min(answer.scenarios, key=lambda scenario: scenario.delta_ns)
print(f"\nbuy for the {what[best.name]} parallel groups: {-best.delta_ns / before.step_ns:.1%}")
