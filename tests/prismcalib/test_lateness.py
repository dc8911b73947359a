"""Whom the others wait for."""

import polars as pl

from prismcalib import merge, synth
from prismcalib.lateness import Lateness, find_late_ranks


def late(**changes):
    spec = synth.JobSpec(pp=1, tp=1, dp=4, layers_per_stage=2, microbatches=2, steps=2, **changes)
    result = merge(synth.generate(spec))
    return result, find_late_ranks(result.trace)


def test_a_straggler_causes_the_waiting():
    result, found = late(stragglers={2: 1.5})
    assert found.ranks["rank"][0] == 2
    assert found.ranks["share"][0] > 0.8
    assert found.sentence.startswith("rank 2 arrives last in ")
    assert found.ranks["caused_ns"].sum() == found.wait_ns == result.report.wait_ns


def test_nobody_waits_when_all_are_alike():
    _, found = late(jitter=0.0, step_jitter=0.0, comm_jitter=0.0, end_spread_ns=0)
    assert found.wait_ns == 0
    assert found.sentence == "nobody waits for anybody"
    assert found.instances > 0


def test_waiting_that_nobody_in_particular_causes():
    ranks = pl.DataFrame({"rank": range(10), "last": [1] * 10, "caused_ns": [10] * 10})
    found = Lateness(10, 100, ranks.with_columns(share=pl.lit(0.1)))
    assert found.sentence == (
        "who arrives last is spread over 10 ranks, rank 0 causes the largest part of the waiting "
        "(10%)"
    )
