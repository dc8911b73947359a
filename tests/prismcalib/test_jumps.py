from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismcalib import synth
from prismcalib.clocks import fit_offsets
from prismcalib.drift import fit_drift
from prismcalib.errors import ClockError
from prismcalib.jumps import find_jumps
from prismcalib.merging import merge
from prismcalib.relations import Relations
from prismtrace.schema import ClockDomain

EPOCH_NS = 1_700_000_000_000_000_000
WINDOW_NS = 20 * 10**9


def job(seed, *, clocks=3, count=60, sorts=2, noise_ns=20_000, ppm=50.0):
    """Members of operations of all clocks (sort 0) and of neighbours (others) as columns."""
    draw = np.random.default_rng(seed)
    true = np.sort(draw.integers(0, WINDOW_NS, count * sorts))
    rows = [
        (number, clock, number % sorts, time)
        for number, time in enumerate(true.tolist())
        for clock in (
            range(clocks)
            if number % sorts == 0
            else np.arange(2) + (number // sorts) % (clocks - 1)
        )
    ]
    instance, clock, sort, time = np.array(rows, np.int64).T
    rate = draw.uniform(-ppm, ppm, clocks) * 1e-6
    origin = draw.integers(-(10**9), 10**9, clocks)
    late = draw.standard_normal(len(time)) * noise_ns
    end = EPOCH_NS + time + np.rint(time * rate[clock] + late).astype(np.int64) + origin[clock]
    return instance, clock, sort, end, time


def jumps_in(instance, clock, sort, end):
    tier, clocks = np.zeros(len(end), np.int32), int(clock.max()) + 1
    fit = fit_offsets(instance, clock, end, tier, clocks)
    drift = fit_drift(instance, clock, end, tier, fit.offset_ns, 0)
    aligned = end + fit.offset_ns[clock] + drift.shift(clock, end)
    relations = Relations(instance, clock, tier, clocks, 0)
    return find_jumps(relations, end, aligned - EPOCH_NS, sort, 0)


def set_anew(job, which, at_ns, size_ns):
    instance, clock, sort, end, time = job
    return instance, clock, sort, end + np.where((clock == which) & (time > at_ns), size_ns, 0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    clocks=st.integers(2, 6),
    which=st.integers(0, 5),
    sorts=st.integers(1, 3),
    at=st.floats(0.2, 0.8),
    size_ns=st.integers(1_000_000, 50_000_000),
    back=st.booleans(),
)
def test_a_clock_that_is_set_is_found(seed, clocks, which, sorts, at, size_ns, back):
    which %= clocks
    made = job(seed, clocks=clocks, sorts=sorts)
    at_ns, size_ns = round(at * WINDOW_NS), -size_ns if back else size_ns
    (jump,) = jumps_in(*set_anew(made, which, at_ns, size_ns))
    # Of two clocks nothing tells which was set: not the reference.
    turned = clocks == 2 and which == 0
    assert jump.domain == (1 if turned else which)
    assert abs(jump.size_ns - (-size_ns if turned else size_ns)) < 150_000
    origin = int(made[3][0] - EPOCH_NS - made[4][0])
    slack = abs(size_ns) + WINDOW_NS // 20
    assert jump.after_ns - slack < at_ns + origin < jump.before_ns + slack


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    clocks=st.integers(2, 6),
    count=st.sampled_from([6, 12, 25, 60]),
    sorts=st.integers(1, 3),
    noise_ns=st.sampled_from([0, 2_000, 40_000, 2_000_000]),
    ppm=st.sampled_from([0.0, 50.0]),
)
def test_none_is_found_where_clocks_run_evenly(seed, clocks, count, sorts, noise_ns, ppm):
    made = job(seed, clocks=clocks, count=count, sorts=sorts, noise_ns=noise_ns, ppm=ppm)
    assert jumps_in(*made[:4]) == ()


def test_a_collective_that_changes_its_way_is_no_clock():
    instance, clock, sort, end, time = job(1)
    moved = (clock == 2) & (sort == 0) & (time > WINDOW_NS // 2)
    assert jumps_in(instance, clock, sort, end + np.where(moved, 1_000_000, 0)) == ()


def test_of_one_sort_nothing_tells_which_it_was():
    made = set_anew(job(1, sorts=1), 2, WINDOW_NS // 2, 1_000_000)
    assert [(jump.domain, jump.sorts) for jump in jumps_in(*made)] == [(2, 1)]


def test_late_members_are_no_jump():
    instance, clock, sort, end, _ = job(3)
    late = np.random.default_rng(4).random(len(end)) < 0.1
    assert jumps_in(instance, clock, sort, end + np.where(late, 30_000_000, 0)) == ()


def test_a_clock_that_is_steered_for_a_while_is_no_jump():
    instance, clock, sort, end, time = job(5)
    steered = np.clip(time - WINDOW_NS // 3, 0, WINDOW_NS // 3) * (clock == 1) * 500e-6
    assert jumps_in(instance, clock, sort, end + steered.astype(np.int64)) == ()


@pytest.mark.parametrize("size_ns", [3_000_000, -3_000_000])
def test_merge_tells_of_it(size_ns):
    run = synth.generate(synth.JobSpec(pp=2, tp=2, dp=2, microbatches=4, steps=6))
    ranks = run.header.ranks
    clocks = tuple(ClockDomain(id=i, ranks=ranks[2 * i : 2 * i + 2]) for i in range(4))
    middle = int(run.collect()["start_ns"].median())
    late = (pl.col("rank") >= 6) & (pl.col("start_ns") > middle)
    nodes = run.nodes.with_columns(
        start_ns=pl.col("start_ns") + pl.when(late).then(size_ns).otherwise(0)
    )
    header = run.header.model_copy(update={"clock": clocks})
    clock = merge(replace(run, header=header, nodes=nodes)).report.clock
    (jump,) = clock.jumps
    assert (jump.ranks, jump.sorts > 1) == ("6-7", True)
    assert abs(jump.size_ns - size_ns) < 100_000
    assert jump.after_ns - abs(size_ns) < middle < jump.before_ns + abs(size_ns)
    assert ("forward" if size_ns > 0 else "back") in str(jump)


@pytest.mark.parametrize("size_ns", [1_000_000, -1_000_000, 5 * 10**9])
def test_a_merge_that_is_refused_names_it(make_run, size_ns):
    run = make_run(steps=30, noise_ns=5_000).trace
    late = (pl.col("rank") == 1) & (pl.col("index") >= 75)
    nodes = run.nodes.with_columns(
        start_ns=pl.col("start_ns") + pl.when(late).then(size_ns).otherwise(0)
    )
    with pytest.raises(ClockError, match="ended before another started") as caught:
        merge(replace(run, nodes=nodes))
    way = "forward" if size_ns > 0 else "back"
    assert caught.value.hint.startswith(f"the clock of ranks 1 seems to have been set {way} by ")
    assert "slice-out" in caught.value.hint
