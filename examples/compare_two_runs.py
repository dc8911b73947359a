"""Compare two runs: Tuesday's steps are slower than Monday's.  Why?

Two things changed: the optimizer takes longer on all ranks, and rank 6 got a slower GPU.
Operations are compared class by class; what a class costs the step is found by propagation.
"""

import prismcalib
from prismcalib import synth

shape = {"pp": 2, "tp": 2, "dp": 2, "microbatches": 8, "steps": 4}
monday = synth.JobSpec(**shape, seed=4)
tuesday = synth.JobSpec(**shape, seed=5, mean_ns={"optimizer": 5_000_000}, stragglers={6: 1.1})
runs = [prismcalib.merge(synth.generate(job)).trace for job in (monday, tuesday)]

found = prismcalib.compare(*runs)
print(f"step {found.step_a_ns / 1e6:.2f} -> {found.step_b_ns / 1e6:.2f} ms")
print(f"difference {found.change_ns / 1e6:+.2f} ms\n")

print("classes whose times changed by more than steps vary anyway:")
for row in found.classes.filter("clear").head(3).iter_rows(named=True):
    print(
        f"  {row['name']:15} {row['time_a_ns'] / 1e6:6.2f} -> {row['time_b_ns'] / 1e6:6.2f} ms"
        f" (x {row['ratio']:.2f}), effect on the step {row['effect_ns'] / 1e6:+.2f} ms"
    )

# Averages over all ranks hide a single slow one; a comparison by rank does not.
print("\nranks:")
for row in found.ranks.head(3).iter_rows(named=True):
    print(f"  rank {row['rank']}: x {row['ratio']:.2f}, effect {row['effect_ns'] / 1e6:+.2f} ms")

# Is it the device?  Operation by operation, and against the scatter between ranks.
print("\ndevices that stand out:")
for finding in prismcalib.device_health(*runs).findings:
    print(f"  rank {finding.rank}: {finding.above:.0%} slower than the others; {finding.verdict}")
