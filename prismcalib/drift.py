"""Clocks of one execution that run at different speeds.

Over a short window a clock is off by a constant; over minutes even good clocks part by
milliseconds.  So offsets are estimated twice, from the operations of the first and of the last
third of the window, and the rate is the line through both: as robust as the offsets, and exact
for exact data.  A few operations suffice if the line stands out from what their ends vary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.clocks import (
    across_domains,
    group_max,
    group_median,
    group_min,
    solve_offsets,
    thin_out,
)
from prismcalib.graph import Int64Array

__all__ = ["Drift", "fit_drift"]

# Below, no clock drifts visibly: 50 ppm of a second are the noise of the ends.
_LEAST_WINDOW_NS = 10**9
# Two in each third: of one, chance makes a line.
_LEAST_OPERATIONS = 6
_FEW = 60
_ROUNDS = 20
# What no end is known better than.
_EXACT_NS = 1000


@dataclass(frozen=True, eq=False)
class Drift:
    """How D clocks run against the reference.

    Attributes:
        rate: float64[D]; `rate * (time - center)` is to be added to a time of the domain.
        center_ns: int64[D], the time of the domain's own clock at which its offset holds.
    """

    rate: NDArray[np.float64]
    center_ns: Int64Array

    @classmethod
    def none(cls, domains: int) -> Drift:
        """All clocks run alike."""
        return cls(np.zeros(domains), np.zeros(domains, np.int64))

    def shift(self, domain: NDArray[Any], times_ns: Int64Array) -> Int64Array:
        """int64[m]: what to add to times of the domains, beside the offset."""
        if not self.rate.any():
            return np.zeros(len(times_ns), np.int64)
        since = (times_ns - self.center_ns[domain]).astype(np.float64)
        return np.asarray(np.rint(self.rate[domain] * since), np.int64)


def fit_drift(
    instance: NDArray[Any],
    domain: NDArray[Any],
    end_ns: Int64Array,
    tier: NDArray[Any],
    offset_ns: Int64Array,
    reference: int,
) -> Drift:
    """Estimate rates from the ends of matched operations, as in `clocks.fit_offsets`.

    A rate stays 0 unless it explains more, over the window, than the ends vary anyway, and
    unless the operations of both thirds relate the domain to the reference.

    Args:
        instance, domain, end_ns, tier, reference: as there.
        offset_ns: int64[D], the offsets found there.
    """
    domains = len(offset_ns)
    nothing = Drift.none(domains)
    across = across_domains(instance, domain)
    if not across.any():
        return nothing
    kept = np.flatnonzero(across)
    kept = kept[thin_out(instance[kept], domain[kept], domains)]
    ends = _Ends(instance[kept], domain[kept], end_ns[kept], tier[kept], domains, reference)
    window, center = _windows(ends.domain, ends.end_ns, domains)
    if window.max() < _LEAST_WINDOW_NS:
        return nothing
    early, late = (ends.only(third) for third in _thirds(ends, offset_ns))
    span = (late.medians() - early.medians()).astype(np.float64)
    drift = Drift(np.zeros(domains), center)
    # Operations of two pairs of domains do not lie at the same times of a third, so a line is
    # as wrong as these are apart, until what is left of it is next to nothing.
    for turn in range(_ROUNDS):
        (before, one), (after, other) = early.offsets(drift), late.offsets(drift)
        known = one & other & (span > 0)
        change = np.where(known, (after - before) / np.maximum(span, 1), 0.0)
        drift = Drift(drift.rate + change, center)
        if (np.abs(change) * window).max() < _EXACT_NS:
            break
        # Most clocks of most jobs: nothing to see.
        if turn == 0 and not _visible(ends, drift, window).any():
            return nothing
    return Drift(np.where(_visible(ends, drift, window), drift.rate, 0.0), center)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Members of operations across domains; columns and numbers as of `fit_offsets`."""

    instance: NDArray[Any]
    domain: NDArray[Any]
    end_ns: Int64Array
    tier: NDArray[Any]
    domains: int
    reference: int

    def only(self, chosen: NDArray[np.bool_]) -> _Ends:
        """Some of the members."""
        return _Ends(
            self.instance[chosen],
            self.domain[chosen],
            self.end_ns[chosen],
            self.tier[chosen],
            self.domains,
            self.reference,
        )

    def offsets(self, drift: Drift) -> tuple[Int64Array, NDArray[np.bool_]]:
        """As of `solve_offsets`, once a drift is taken away."""
        steady = self.end_ns + drift.shift(self.domain, self.end_ns)
        numbers = self.domains, self.reference
        return solve_offsets(self.instance, self.domain, steady, self.tier, *numbers)

    def medians(self) -> Int64Array:
        """int64[D], typical end of each domain; 0 where there are none."""
        return _medians(self.domain, self.end_ns, self.domains)


def _windows(
    domain: NDArray[Any], end_ns: Int64Array, domains: int
) -> tuple[Int64Array, Int64Array]:
    """int64[D] each: from the first to the last end in a domain, and the middle of that."""
    window, center = np.zeros(domains, np.int64), np.zeros(domains, np.int64)
    present = np.unique(domain)
    number = np.searchsorted(present, domain)
    low, high = group_min(number, end_ns), group_max(number, end_ns)
    window[present] = high - low
    center[present] = low + window[present] // 2
    return window, center


def _thirds(ends: _Ends, offset_ns: Int64Array) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool[m] each: members of the operations of the first and of the last third of the time."""
    number = np.unique(ends.instance, return_inverse=True)[1].ravel()
    time = group_median(number, ends.end_ns + offset_ns[ends.domain])
    part = (int(time.max()) - int(time.min())) // 3
    return (time <= time.min() + part)[number], (time >= time.max() - part)[number]


def _medians(domain: NDArray[Any], values: Int64Array, domains: int) -> Int64Array:
    """int64[D], 0 where there are none."""
    result = np.zeros(domains, np.int64)
    found = group_median(domain, values)
    result[: len(found)] = found
    return result


def _visible(ends: _Ends, drift: Drift, window_ns: Int64Array) -> NDArray[np.bool_]:
    """bool[D]: whether a drift moves ends by more than they vary without it."""
    number = np.unique(ends.instance, return_inverse=True)[1].ravel()
    # Offsets of clocks that drift were compromises, so not those.
    shift = ends.offsets(drift)[0][ends.domain] + drift.shift(ends.domain, ends.end_ns)
    steady = ends.end_ns + shift
    around = np.abs(group_median(number, steady)[number] - steady)
    pairs = np.unique(np.stack([ends.domain, number]), axis=1)
    operations = np.bincount(pairs[0], minlength=ends.domains)
    # Of a few distances the median may be next to nothing by chance.
    few = np.maximum(1.0, _FEW / np.maximum(operations, 1))
    noise = few * _medians(ends.domain, around, ends.domains)
    long = (window_ns >= _LEAST_WINDOW_NS) & (operations >= _LEAST_OPERATIONS)
    return long & (np.abs(drift.rate) * window_ns > 4 * noise)
