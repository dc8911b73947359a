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

from prismcalib.graph import Int64Array
from prismcalib.grouped import Groups, group_max, group_min, numbered
from prismcalib.relations import Relations, across_domains, thin_out

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
    ends = _Ends.of(instance[kept], domain[kept], end_ns[kept], tier[kept], domains, reference)
    window, center = _windows(ends.domain.number, ends.end_ns, domains)
    if window.max() < _LEAST_WINDOW_NS:
        return nothing
    early, late = (ends.only(third) for third in _thirds(ends, offset_ns))
    span = (late.medians() - early.medians()).astype(np.float64)
    drift = Drift(np.zeros(domains), center)
    # Operations of two pairs of domains do not lie at the same times of a third, so a line is
    # as wrong as these are apart, until what is left of it is next to nothing.
    known = early.relations.reached & late.relations.reached & (span > 0)
    for turn in range(_ROUNDS):
        apart = late.offsets(drift) - early.offsets(drift)
        change = np.where(known, apart / np.maximum(span, 1), 0.0)
        drift = Drift(drift.rate + change, center)
        if (np.abs(change) * window).max() < _EXACT_NS:
            break
        # Most clocks of most jobs: nothing to see.
        if turn == 0 and not _visible(ends, drift, window).any():
            return nothing
    return Drift(np.where(_visible(ends, drift, window), drift.rate, 0.0), center)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Ends of m members of operations across D domains, and what depends on who these are.

    Attributes:
        instance, domain, end_ns, tier: of each, as of `fit_offsets`; domain: groups of members.
        relations: of the domains by these operations.
    """

    instance: NDArray[Any]
    domain: Groups
    end_ns: Int64Array
    tier: NDArray[Any]
    reference: int
    relations: Relations

    @classmethod
    def of(
        cls,
        instance: NDArray[Any],
        domain: NDArray[Any],
        end_ns: Int64Array,
        tier: NDArray[Any],
        domains: int,
        reference: int,
    ) -> _Ends:
        """Ends of some members."""
        relations = Relations(instance, domain, tier, domains, reference)
        return cls(instance, Groups(domain, domains), end_ns, tier, reference, relations)

    def only(self, chosen: NDArray[np.bool_]) -> _Ends:
        """Some of the members."""
        members = self.instance[chosen], self.domain.number[chosen], self.end_ns[chosen]
        domains = len(self.domain.sizes)
        return _Ends.of(*members, self.tier[chosen], domains, self.reference)

    def offsets(self, drift: Drift) -> Int64Array:
        """int64[D], once a drift is taken away."""
        steady = self.end_ns + drift.shift(self.domain.number, self.end_ns)
        return self.relations.offsets(steady)

    def medians(self) -> Int64Array:
        """int64[D], typical end of each domain; 0 where there are none."""
        return self.domain.median(self.end_ns)


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
    number = numbered(ends.instance)
    time = Groups(number).median(ends.end_ns + offset_ns[ends.domain.number])
    part = (int(time.max()) - int(time.min())) // 3
    return (time <= time.min() + part)[number], (time >= time.max() - part)[number]


def _visible(ends: _Ends, drift: Drift, window_ns: Int64Array) -> NDArray[np.bool_]:
    """bool[D]: whether a drift moves ends by more than they vary without it."""
    domain, operation = ends.domain.number, Groups(numbered(ends.instance))
    # Offsets of clocks that drift were compromises, so not those.
    shift = ends.offsets(drift)[domain] + drift.shift(domain, ends.end_ns)
    steady = ends.end_ns + shift
    around = np.abs(operation.median(steady)[operation.number] - steady)
    domains = len(ends.domain.sizes)
    pairs = np.unique(operation.number.astype(np.int64) * domains + domain)
    operations = np.bincount(pairs % domains, minlength=domains)
    # Of a few distances the median may be next to nothing by chance.
    few = np.maximum(1.0, _FEW / np.maximum(operations, 1))
    noise = few * ends.domain.median(around)
    long = (window_ns >= _LEAST_WINDOW_NS) & (operations >= _LEAST_OPERATIONS)
    return long & (np.abs(drift.rate) * window_ns > 4 * noise)
