"""Is a faster all-reduce worth it?  What the job gains, not what the operation gains.

Somebody offers all-reduces that are 1.5, 2 or 4 times as fast.  Adding up what a profiler shows
answers nothing: more than half of the time inside of all-reduces is waiting for each other, which
stays, and every one that gets shorter also shortens what other pipeline stages wait for.
"""

import polars as pl

import prismcalib
from prismcalib import synth

job = synth.JobSpec(pp=4, tp=4, dp=2, microbatches=8, steps=3, seed=2)
run = prismcalib.merge(synth.generate(job)).trace

answer = prismcalib.what_if(
    run,
    {
        f"{speed:g} x faster": [prismcalib.Scale("kind = 'all_reduce'", 1 / speed)]
        for speed in (1.5, 2, 4)
    }
    | {"free": [prismcalib.SetDuration("kind = 'all_reduce'", 0)]},
)
before = answer.baseline
print(f"step {before.step_ns / 1e6:.2f} ms")

# What a profiler shows: time inside of all-reduces, as a share of the ranks' time.
inside = run.nodes.filter(pl.col("kind") == "all_reduce").select("dur_ns", "transfer_ns")
total = inside.sum().collect().row(0, named=True)
window = job.world_size * before.length_ns
print(f"in all-reduces: {total['dur_ns'] / window:.1%} of the ranks' time")
print(f"of it without waiting: {total['transfer_ns'] / window:.1%}\n")

print("all-reduces     step      gain")
for scenario in answer.scenarios:
    gain = -scenario.delta_ns / before.step_ns
    print(f"{scenario.name:12} {scenario.step_ns / 1e6:7.2f} ms {gain:6.1%}")

print("\nwhat the job waits for then, if all-reduces were free:")
for row in answer.scenarios[-1].critical_path.shares("kind").head(3).iter_rows(named=True):
    print(f"  {row['kind']:14} {row['share']:6.1%}")
