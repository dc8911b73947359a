import numpy as np
import pytest

from prismcalib.clocks import Spread, end_spreads, fit_offsets
from prismcalib.errors import ClockError

EPOCH_NS = 1_700_000_000_000_000_000


def operations(pairs, errors, *, noise_ns=0, repeats=40, seed=3):
    """Ends of operations between the given sets of domains, in clocks that are off by errors."""
    draw = np.random.default_rng(seed)
    instance, domain, end = [], [], []
    number = 0
    for _ in range(repeats):
        for members in pairs:
            true_end = EPOCH_NS + number * 1_000_000
            for member in members:
                instance.append(number)
                domain.append(member)
                end.append(true_end + errors[member] + int(draw.integers(0, noise_ns + 1)))
            number += 1
    return np.array(instance, int), np.array(domain, int), np.array(end, int)


def fit(members, domains, tier=None, reference=0):
    instance, domain, end = members
    tier = np.zeros(len(instance), np.int32) if tier is None else tier
    return fit_offsets(instance, domain, end, tier, domains, reference)


def test_exact_offsets_are_found_to_the_nanosecond():
    errors = [0, 11_000_000_017, -EPOCH_NS, 123_456]
    found = fit(operations([(0, 1, 2, 3)], errors), 4)
    assert found.offset_ns.tolist() == [-error for error in errors]
    assert found.uncertainty_ns.tolist() == [0] * 4
    assert found.used.all()


def test_offsets_travel_along_chains_of_groups():
    # As in a pipeline: no operation joins all, neighbours share pairs.
    errors = [5_000_000 * n**2 for n in range(8)]
    found = fit(operations([(n, n + 1) for n in range(7)], errors), 8)
    assert found.offset_ns.tolist() == [-error for error in errors]


def test_offsets_are_recovered_within_the_noise():
    errors = [0, 3_000_000, -7_000_000, 500_000]
    noise = 40_000
    found = fit(operations([(0, 1, 2, 3), (0, 1), (2, 3)], errors, noise_ns=noise, repeats=200), 4)
    assert np.abs(found.offset_ns + errors).max() < noise / 4
    assert (found.uncertainty_ns <= noise).all()
    assert (found.uncertainty_ns > 0).all()


def test_the_reference_keeps_its_clock():
    errors = [0, 3_000_000, -7_000_000]
    found = fit(operations([(0, 1, 2)], errors), 3, reference=2)
    assert found.offset_ns.tolist() == [-7_000_000, -10_000_000, 0]


def test_late_members_do_not_move_their_clock():
    instance, domain, end = operations([(0, 1, 2)], [0, 3_000_000, 0])
    end[1::15] += 400_000_000
    assert fit((instance, domain, end), 3).offset_ns.tolist() == [0, -3_000_000, 0]


def test_an_offset_within_the_noise_is_no_clock_error():
    errors = [0, 9_000, -4_000]
    found = fit(operations([(0, 1, 2)], errors, noise_ns=40_000), 3)
    assert found.offset_ns.tolist() == [0, 0, 0]


def test_unconnected_clocks_are_named():
    with pytest.raises(ClockError) as caught:
        fit(operations([(0, 1), (2, 3)], [0] * 5), 5)
    assert caught.value.domains == (2, 3, 4)
    with pytest.raises(ClockError) as caught:
        fit(operations([], []), 2)
    assert caught.value.domains == (1,)


def test_one_clock_needs_nothing():
    assert fit(operations([], []), 1).offset_ns.tolist() == [0]


def test_worse_evidence_is_used_only_where_better_is_absent():
    members = operations([(0, 1), (1, 2)], [0, 1_000_000, 2_000_000])
    # The ends of the second operations are off by much: a buffered send.
    second = members[0] % 2 == 1
    members[2][second & (members[1] == 1)] -= 50_000_000
    tier = np.where(second, 1, 0)
    with_both = fit(members, 3, tier)
    assert with_both.offset_ns.tolist()[1] == -1_000_000
    assert with_both.used.all()
    better = fit((members[0][~second], members[1][~second], members[2][~second]), 2)
    assert better.offset_ns.tolist() == [0, -1_000_000]
    # Three clocks that good evidence connects do not look at the bad.
    members = operations([(0, 1, 2), (0, 2)], [0, 1_000_000, 2_000_000])
    second = members[0] % 2 == 1
    members[2][second & (members[1] == 2)] -= 50_000_000
    found = fit(members, 3, np.where(second, 1, 0))
    assert found.offset_ns.tolist() == [0, -1_000_000, -2_000_000]
    assert found.used.tolist() == (~second).tolist()


def test_long_traces_are_thinned_out_without_losing_rare_domains():
    errors = [0, 3_000_000, -5_000_000]
    long = operations([(0, 1)], errors, repeats=30_000)
    rare = operations([(1, 2)], errors, repeats=3, seed=4)
    members = (
        np.concatenate([long[0], rare[0] + 10**6]),
        np.concatenate([long[1], rare[1]]),
        np.concatenate([long[2], rare[2]]),
    )
    assert fit(members, 3).offset_ns.tolist() == [0, -3_000_000, 5_000_000]


def test_spreads():
    ends = np.array([10, 14, 100, 90, 100])
    spreads = end_spreads(np.array([7, 7, 3, 3, 3]), ends)
    assert sorted(spreads.tolist()) == [4, 10]
    assert Spread.of(spreads) == Spread(median_ns=7, p95_ns=10, max_ns=10)
    assert Spread.of(np.empty(0, np.int64)) is None
    assert end_spreads(np.empty(0, np.int32), np.empty(0, np.int64)).tolist() == []
