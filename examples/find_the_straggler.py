"""Find the straggler: which rank makes everybody slow, and what would the step be without it?

A job on 16 ranks: 2 pipeline stages x 4 replicas x 2 tensor ranks.  The GPU of rank 5 is 25 %
too slow.  On the timeline every rank looks equally slow, since each waits for the others.
"""

import prismcalib
from prismcalib import synth

job = synth.JobSpec(pp=2, tp=2, dp=4, microbatches=8, steps=3, seed=1, stragglers={5: 1.25})
run = prismcalib.merge(synth.generate(job)).trace

# How long a rank takes for a step says nothing: all take equally long.
steps = prismcalib.predict(run, draws=0)
print(f"step {steps.step_ns / 1e6:.1f} ms")
for row in steps.ranks.head(8).iter_rows(named=True):
    shares = {name: row[f"{name}_ns"] / steps.window_ns for name in ("compute", "wait")}
    print(f"  rank {row['rank']}: computes {shares['compute']:.0%}, waits {shares['wait']:.0%}")

# Rank 5 computes most and waits least, so it is a suspect.  Whether the step would be shorter
# without it is another question; the answer comes from propagating the graph once more.
report = prismcalib.find_stragglers(run)
print(f"\nall ranks like their peers: step {report.ideal_ns.mean() / 1e6:.1f} ms")
print("what the step would save if one rank were like its peers:")
for part in report.parts["rank"][:3]:
    print(f"  rank {part.name}: {part.saves:.1%}")

print("\nwhat it looks like:")
for cause in report.causes:
    print(f"  {cause.kind}, {cause.where}: {cause.evidence}")
    print(f"  advice: {cause.advice}")
