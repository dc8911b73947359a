"""Slices make one timeline: a job of 32 ranks, seen four ranks at a time.

Only four GPUs are at hand, so the job runs eight times, each time with other ranks for real and
the rest played by virtual ranks that are always in time.  Every run has a clock of its own, and
none sees the pipeline's bubbles or what the slow rank 9 does to the others.  Still the slices
hold everything that is needed: own durations, and who waits for whom.
"""

import tempfile
from pathlib import Path

import prismcalib
import prismtrace as pt
from prismcalib import synth

job = synth.JobSpec(pp=4, tp=2, dp=4, microbatches=4, steps=2, seed=6, stragglers={9: 1.4})
true_run = synth.generate(job)
first, second = synth.step_ends_ns(job)
true_ns = int(second - first)


def show(name: str, step_ns: int) -> None:
    """Print a step time and how far it is from the truth."""
    error = step_ns / true_ns - 1
    print(f"{name:28} {step_ns / 1e6:8.2f} ms, {error:+.2%}{' exact' * (step_ns == true_ns)}")


print(f"{'the true step':28} {true_ns / 1e6:8.2f} ms\n")
with tempfile.TemporaryDirectory() as folder:
    paths = synth.cut_into_slices(true_run, Path(folder, "slices"), real_ranks_per_slice=4)
    result = prismcalib.merge(paths)

    for number, seen in enumerate(result.report.executions_seen):
        clock_s = pt.open(paths[number]).collect()["start_ns"].min() / 1e9
        show(f"slice {number}, from {clock_s:13.3f} s", seen.step_ns)
    print()
    show("the best slice by itself", result.report.before_ns)
    show("all slices, aligned", result.report.step_ns)

    merged, truth = result.trace.collect(), true_run.collect()
    same = merged["start_ns"].equals(truth["start_ns"])
    print(f"\nstarts of all {merged.height} operations as in the true run: {same}")

    # Real measurements are not exact: every duration off by 2 % (standard deviation), three runs
    # of every slice, clocks that drift.
    noisy = synth.cut_into_slices(
        true_run, Path(folder, "noisy"), 4, seed=1, noise=0.02, drift_ppm=20, repeats=3
    )
    print()
    show("with noise, aligned", prismcalib.merge(noisy).report.step_ns)
