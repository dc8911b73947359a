"""Made-up training jobs whose true timeline is known, and what measuring them leaves behind.

    from prismcalib import synth

    spec = synth.JobSpec(pp=4, tp=2, dp=2, microbatches=8, stragglers={5: 1.3})
    run = synth.generate(spec)                             # a recorded trace, in memory
    bare = synth.bare_graph(run)                           # its structure
    slices = synth.cut_into_slices(run, "slices", 4)       # four ranks at a time, own clocks
    synth.write_job(big_spec, "job", ranks_per_file=128)   # 8 192 ranks, streaming

How times come about (nothing else happens, so a campaign without noise tells everything):

* an operation starts when the last of its dependencies has ended, plus a gap that is its own
  (`JobSpec.launch_gap_ns`; 0 by default) and is the same whichever dependency was last;
* the first operation of every rank starts at 0;
* a computation lasts its duration; a communication lasts from its start until its last member
  has started, plus a transfer of its own, which differs little between members.
"""

from prismcalib.synth.campaign import bare_graph, cut_into_slices
from prismcalib.synth.job import generate, step_ends_ns, write_job
from prismcalib.synth.spec import MEAN_NS, JobSpec

__all__ = [
    "MEAN_NS",
    "JobSpec",
    "bare_graph",
    "cut_into_slices",
    "generate",
    "step_ends_ns",
    "write_job",
]
