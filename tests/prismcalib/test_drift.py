import numpy as np
import pytest

from prismcalib import synth
from prismcalib.drift import Drift, fit_drift
from prismcalib.merging import merge

EPOCH_NS = 1_700_000_000_000_000_000


def ends(rates_ppm, *, seconds, noise_ns=0, count=300, seed=2):
    """Ends of operations of all domains, whose clocks run too fast by the rates."""
    draw = np.random.default_rng(seed)
    true = np.sort(draw.integers(0, int(seconds * 1e9), count))
    clocks = [
        true + np.rint(true * rate * 1e-6).astype(np.int64) + draw.integers(0, noise_ns + 1, count)
        for rate in rates_ppm
    ]
    instance = np.tile(np.arange(count), len(rates_ppm))
    domain = np.repeat(np.arange(len(rates_ppm)), count)
    return instance, domain, np.concatenate(clocks) + EPOCH_NS


def fit(members, domains):
    tier = np.zeros(len(members[0]), np.int32)
    return fit_drift(*members, tier, np.zeros(domains, np.int64), 0)


def test_rates_are_found():
    rates = [0, 20, -35]
    found = fit(ends(rates, seconds=60), 3)
    assert np.allclose(found.rate * 1e6, [0, -20, 35], atol=0.01)


def test_rates_are_found_in_noise():
    found = fit(ends([0, 20], seconds=60, noise_ns=40_000), 2)
    assert abs(found.rate[1] * 1e6 + 20) < 0.3


def test_rates_count_from_the_reference():
    found = fit(ends([10, 30], seconds=60), 2)
    assert found.rate[0] == 0
    assert abs(found.rate[1] * 1e6 + 20) < 0.01


def test_nothing_is_read_into_noise_or_short_windows():
    assert not fit(ends([0, 1], seconds=2, noise_ns=40_000), 2).rate.any()
    assert not fit(ends([0, 50], seconds=0.5), 2).rate.any()
    assert not fit(ends([0, 50], seconds=60, count=5), 2).rate.any()


@pytest.mark.parametrize("count", [8, 16, 30, 100])
def test_few_operations_suffice_if_the_line_stands_out(count):
    found = fit(ends([0, 50], seconds=60, noise_ns=40_000, count=count), 2)
    assert abs(found.rate[1] * 1e6 + 50) < 2


@pytest.mark.parametrize("count", [6, 10, 20, 30, 60])
def test_chance_makes_no_line_of_a_few_operations(count):
    found = [
        fit(ends([0, 0], seconds=60, noise_ns=40_000, count=count, seed=seed), 2).rate.any()
        for seed in range(50)
    ]
    assert sum(found) <= 2


def test_operations_within_a_host_do_not_outvote_those_between_hosts():
    across = ends([0, 50], seconds=60, count=30)
    alone = ends([0], seconds=60, count=3000, seed=3)
    # Two ranks of the second host, which agree exactly.
    within = np.tile(alone[0] + 30, 2), np.ones(6000, np.int64), np.tile(alone[2], 2)
    members = tuple(np.concatenate(both) for both in zip(across, within, strict=True))
    assert abs(fit(members, 2).rate[1] * 1e6 + 50) < 0.01


def test_rates_are_found_along_a_chain():
    # Stages of a pipeline: each shares operations with its neighbours only.
    rates = [0, 40, -30, 20, 90, -60, 10, 35]
    parts = []
    for stage in range(len(rates) - 1):
        instance, domain, end = ends(rates[stage : stage + 2], seconds=60, count=40, seed=stage)
        parts.append((instance + 40 * stage, domain + stage, end))
    found = fit(tuple(np.concatenate(column) for column in zip(*parts, strict=True)), 8)
    assert np.allclose(found.rate * 1e6, [-rate for rate in rates], atol=0.02)


def test_a_clock_that_shares_operations_only_early_keeps_its_pace():
    instance, domain, end = ends([0, 20, 70], seconds=60, count=90)
    order = np.argsort(end[domain == 0])
    kept = (domain != 2) | (order.argsort()[instance] < 30)
    found = fit((instance[kept], domain[kept], end[kept]), 3)
    assert found.rate[2] == 0
    assert abs(found.rate[1] * 1e6 + 20) < 0.01


def test_shift_is_zero_at_the_center():
    drift = Drift(np.array([0, 1e-3]), np.array([0, EPOCH_NS]))
    domain = np.array([0, 1, 1])
    times = np.array([EPOCH_NS, EPOCH_NS, EPOCH_NS + 1_000_000])
    assert drift.shift(domain, times).tolist() == [0, 0, 1000]


def test_a_long_slice_with_drifting_clocks_is_aligned(tmp_path):
    # 50 steps of 60 ms: clocks part by up to 0.6 ms, the ends of one operation by 5 us.
    spec = synth.JobSpec(pp=1, tp=2, dp=2, microbatches=4, steps=50)
    run = synth.generate(spec)
    paths = synth.cut_into_slices(
        run, tmp_path, 4, ranks_per_clock=2, drift_ppm=200, virtual="none", seed=4
    )
    report = merge(paths).report
    true_ns = int(synth.step_ends_ns(spec)[-1])
    # The reference clock itself runs up to 200 ppm wrong, which nobody can see.
    assert abs(report.propagated_ns - true_ns) < 300e-6 * true_ns
    assert report.clamped_ns < 0.001 * report.wait_ns
