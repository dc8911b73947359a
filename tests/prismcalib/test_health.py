import numpy as np
import polars as pl
import pytest

from prismcalib import synth
from prismcalib.errors import ComparisonError
from prismcalib.health import device_health, weighted_median
from prismcalib.merging import merge
from prismtrace.trace import Trace

SHAPE = {"pp": 2, "tp": 1, "dp": 4, "layers_per_stage": 2, "steps": 3}


def run(**changes):
    return synth.generate(synth.JobSpec(**{**SHAPE, "seed": 1, **changes}))


def test_a_down_clocked_device_is_found():
    expected, observed = run(), run(seed=2, stragglers={5: 1.25}, steps=5)
    health = device_health(expected, observed)
    (finding,) = health.findings
    assert finding.rank == 5
    assert 0.2 < finding.above < 0.3
    assert finding.slowed_share > 0.9
    assert "down-clocked" in finding.verdict
    assert health.usual_ratio == pytest.approx(1, abs=0.03)
    assert health.compared == 1
    assert health.ranks.filter("flagged")["rank"].to_list() == [5]
    assert health.ranks["transfer_ratio"].null_count() == 8
    assert health.as_dict()["findings"][0]["rank"] == 5


def test_units_that_ran_apart_are_put_together():
    expected, observed = run(), run(seed=2, stragglers={4: 1.25, 5: 1.25}, steps=5)
    units = [part(observed, first, first + 1) for first in (0, 2, 4, 6)]
    health = device_health(expected, *units)
    assert sorted(finding.rank for finding in health.findings) == [4, 5]
    assert {finding.unit for finding in health.findings} == {"ranks 4-5"}
    assert health.ranks["unit"].to_list()[:3] == ["ranks 0-1", "ranks 0-1", "ranks 2-3"]
    whole = device_health(expected, observed)
    assert whole.ranks["unit"].null_count() == 8
    assert whole.ranks.drop("unit").equals(health.ranks.drop("unit"))
    with pytest.raises(ComparisonError, match="rank 4 was observed twice"):
        device_health(expected, *units, units[2])


def part(trace, *ranks):
    """What a run of these ranks alone writes."""
    header = trace.header.model_copy(update={"ranks": ranks})
    nodes = trace.nodes.filter(pl.col("rank").is_in(ranks))
    return Trace(header=header, nodes=nodes, paths=(f"ranks {ranks[0]}-{ranks[-1]}",))


def test_merged_traces_tell_transfers_too():
    expected, observed = (merge(run(seed=seed)).trace for seed in (1, 2))
    health = device_health(expected, observed)
    assert health.findings == ()
    assert health.ranks["transfer_ratio"].is_between(0.8, 1.2).all()


def test_equal_runs_do_not_differ():
    health = device_health(run(), run())
    assert health.usual_ratio == 1
    assert health.findings == ()
    assert (health.ranks["above"] == 0).all()


def test_all_devices_slower_is_no_rank_standing_out():
    everywhere = dict.fromkeys(range(8), 1.2)
    health = device_health(run(), run(stragglers=everywhere))
    assert health.findings == ()
    assert health.usual_ratio == pytest.approx(1.2, rel=0.01)


def test_two_slow_devices_of_eight():
    health = device_health(run(), run(seed=3, stragglers={1: 1.3, 6: 1.15}))
    assert [finding.rank for finding in health.findings] == [1, 6]


def test_some_slow_operations_are_not_a_slow_device():
    expected = run()
    rows = expected.collect()
    slow = (pl.col("rank") == 2) & pl.col("name").cast(pl.String).str.contains("attn")
    nodes = rows.with_columns(
        dur_ns=pl.when(slow).then((pl.col("dur_ns") * 1.6).cast(pl.Int64)).otherwise("dur_ns")
    )
    observed = Trace(header=expected.header, nodes=nodes.lazy())
    health = device_health(expected, observed, slower=0.0)
    findings = {finding.rank: finding for finding in health.findings}
    # The weighted median of the rank does not move much; if it stands out, then not as a device.
    assert set(findings) <= {2}
    for finding in findings.values():
        assert "not the device's clock" in finding.verdict
        assert "attn" in finding.slowest


def test_two_ranks_are_held_against_the_expectation():
    shape = {"pp": 1, "dp": 2}
    health = device_health(run(**shape), run(**shape, stragglers={1: 1.2}))
    assert [finding.rank for finding in health.findings] == [1]


def test_what_is_refused(make_run):
    with pytest.raises(ComparisonError, match="bare"):
        device_health(synth.bare_graph(run(steps=1)), run())
    with pytest.raises(ComparisonError, match="share"):
        device_health(run(), make_run().trace)


def test_weighted_median():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0])
    assert weighted_median(values, weights) == 2
    assert weighted_median(values, np.array([5.0, 1.0, 1.0])) == 3
    assert weighted_median(values, np.array([1.0, 9.0, 1.0])) == 1
