"""Fits of latency and bandwidth: true values are found, errors are stated, nothing is made up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from prismcalib.comm_model import fit_comm_model
from prismcalib.comm_table import Operation

SIZES = [2**k for k in range(10, 29, 3)]


def operation(kind="all_reduce", ranks=8, hosts=1, size=1024):
    return Operation(kind, "float32", ranks, hosts, size)


def ring(kind, ranks, size, alpha=3_000.0, gb_per_s=200.0):
    twice = 2 if kind == "all_reduce" else 1
    return alpha * twice * (ranks - 1) + size * twice * (ranks - 1) / ranks / gb_per_s


def test_true_values_are_found():
    samples = [(operation(size=size), ring("all_reduce", 8, size)) for size in SIZES]
    fits = fit_comm_model(samples).fits
    assert [(fit.link, fit.kind) for fit in fits] == [
        ("within a host", None),
        ("within a host", "all_reduce"),
    ]
    # With one number of ranks, ring and tree differ in alpha only.
    for fit in fits:
        assert fit.gb_per_s == pytest.approx(200, rel=1e-3)
        assert fit.residual < 1e-6
        assert fit.samples == len(SIZES)


@pytest.mark.parametrize("slope", [0.0, -0.02])
def test_times_that_do_not_grow_with_the_bytes_tell_no_bandwidth(slope):
    samples = [
        (operation(size=size), 42_000.0 * (1 + slope * place)) for place, size in enumerate(SIZES)
    ]
    model = fit_comm_model(samples)
    assert {fit.gb_per_s for fit in model.fits} == {None}
    assert json.loads(json.dumps(model.fits[0].as_dict()))["gb_per_s"] is None
    found = model.estimate(operation(size=SIZES[-1] // 2))
    assert found.time_ns == pytest.approx(42_000, rel=0.1)
    # Larger ones may take any time.
    assert model.estimate(operation(size=4 * SIZES[-1])) is None


def test_ring_or_tree_is_told_from_several_sizes_of_groups():
    samples = [
        (operation(ranks=ranks, size=size), ring("all_reduce", ranks, size))
        for size in SIZES
        for ranks in (2, 4, 8, 32)
    ]
    model = fit_comm_model(samples)
    assert {fit.form for fit in model.fits} == {"ring"}
    assert model.fits[0].alpha_ns == pytest.approx(3_000, rel=1e-3)
    found = model.estimate(operation(ranks=16, size=2**20))
    assert found.time_ns == pytest.approx(ring("all_reduce", 16, 2**20), rel=1e-3)
    assert not found.extrapolated

    def tree(ranks, size):
        return 2 * 5_000 * math.ceil(math.log2(ranks)) + 2 * size * (ranks - 1) / ranks / 100

    samples = [
        (operation(ranks=ranks, size=size), tree(ranks, size))
        for size in SIZES
        for ranks in (2, 4, 8, 32)
    ]
    fit = fit_comm_model(samples).fits[0]
    assert fit.form == "tree"
    assert fit.alpha_ns == pytest.approx(5_000, rel=1e-3)


def test_links_are_apart_and_kinds_share_what_they_have_in_common():
    samples = [(operation(size=size), ring("all_reduce", 8, size)) for size in SIZES]
    samples += [
        (operation("all_gather", 16, 2, size), ring("all_gather", 16, size, 8_000, 40))
        for size in SIZES
    ]
    model = fit_comm_model(samples)
    slow = model.estimate(operation("reduce_scatter", 16, 2, 2**26))
    assert slow.time_ns == pytest.approx(ring("reduce_scatter", 16, 2**26, 8_000, 40), rel=0.01)
    fast = model.estimate(operation("reduce_scatter", 8, 1, 2**26))
    assert fast.time_ns == pytest.approx(ring("reduce_scatter", 8, 2**26), rel=0.01)


def test_noise_shows_in_residual_and_interval():
    random = np.random.default_rng(0)
    sizes = [2**k for k in range(8, 30)]
    samples = [
        (operation(size=size), ring("all_reduce", 8, size) * math.exp(random.normal(0, 0.1)))
        for size in sizes
    ]
    model = fit_comm_model(samples)
    fit = model.fits[0]
    assert 0.05 < fit.residual < 0.15
    assert fit.error >= fit.residual
    inside = [
        found.low * found.time_ns <= ring("all_reduce", 8, size) <= found.high * found.time_ns
        for size in sizes
        for found in [model.estimate(operation(size=size))]
    ]
    assert all(inside)


def test_beyond_what_was_measured_the_interval_is_wider():
    random = np.random.default_rng(1)
    samples = [
        (operation(size=size), ring("all_reduce", 8, size) * math.exp(random.normal(0, 0.1)))
        for size in SIZES
    ]
    model = fit_comm_model(samples)
    inside, more_ranks = model.estimate(operation()), model.estimate(operation(ranks=64))
    larger = model.estimate(operation(size=2**32))
    assert not inside.extrapolated
    for beyond in (more_ranks, larger):
        assert beyond.extrapolated
        assert beyond.high == pytest.approx(inside.high**2)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(operation(), 100.0)] * 5,
        [(operation(size=size), 100.0) for size in (8, 16)],
        [(operation("barrier", size=size), 100.0) for size in SIZES],
        [(operation("other_comm", size=size), 100.0) for size in SIZES],
        [(operation(size=0), 100.0)] * 5,
    ],
)
def test_too_little_to_fit(samples):
    model = fit_comm_model(samples)
    assert model.fits == ()
    assert model.estimate(operation()) is None


def test_what_has_no_model():
    model = fit_comm_model([(operation(size=s), ring("all_reduce", 8, s)) for s in SIZES])
    assert model.estimate(operation(hosts=2)) is None
    assert model.estimate(operation("barrier")) is None
    assert model.estimate(operation(size=0)) is None
    assert model.estimate(operation("send", ranks=2)) is not None


def test_flat_times_have_no_bandwidth_to_speak_of():
    model = fit_comm_model([(operation(size=size), 20_000.0) for size in (8, 64, 512, 4096)])
    assert model.estimate(operation(size=100)).time_ns == pytest.approx(20_000, rel=0.01)
