"""Clocks of one execution that run at different speeds.

Over a short window a clock is off by a constant; over minutes even good clocks part by
milliseconds.  The rate is a straight line through the medians of the first and the last third
of what the offsets leave unexplained: as robust as the offsets, and exact for exact data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.clocks import group_max, group_median, group_min, thin_out
from prismcalib.graph import Int64Array

__all__ = ["Drift", "fit_drift"]

# Below, no clock drifts visibly: 50 ppm of a second are the noise of the ends.
_LEAST_WINDOW_NS = 10**9
_LEAST_OPERATIONS = 30
_ROUNDS = 50


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
    offset_ns: Int64Array,
    reference: int,
) -> Drift:
    """Estimate rates from the ends of matched operations, as in `clocks.fit_offsets`.

    A rate stays 0 unless it explains more, over the window, than the ends vary anyway.
    """
    domains = len(offset_ns)
    nothing = Drift.none(domains)
    instance, domain, end_ns = thin_out(instance, domain, end_ns, domains)
    counts = np.bincount(domain, minlength=domains)
    if not len(end_ns) or counts.min() < _LEAST_OPERATIONS:
        return nothing
    low, high = group_min(domain, end_ns), group_max(domain, end_ns)
    window = high - low
    if window.min() < _LEAST_WINDOW_NS:
        return nothing
    number = np.unique(instance, return_inverse=True)[1].ravel()
    center = low + window // 2
    order = np.lexsort((end_ns, domain))
    first = np.cumsum(counts) - counts
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - first[domain[order]]
    third = counts[domain] // 3
    early, late = place < third, place >= counts[domain] - third

    def ends(values: Int64Array, chosen: NDArray[np.bool_]) -> Int64Array:
        return group_median(domain[chosen], values[chosen])

    span = (ends(end_ns, late) - ends(end_ns, early)).astype(np.float64)
    rate = np.zeros(domains)
    for _ in range(_ROUNDS):
        aligned = end_ns + offset_ns[domain] + Drift(rate, center).shift(domain, end_ns)
        left = group_median(number, aligned)[number] - aligned
        change = (ends(left, late) - ends(left, early)) / np.maximum(span, 1)
        change -= change[reference]
        if not rate.any():
            # Most clocks of most jobs: nothing to see, once the line itself is taken away.
            flat = left - Drift(change, center).shift(domain, end_ns)
            if not _stands_out(domain, flat, change * window).any():
                return nothing
        rate += change
        if (np.abs(change) * window).max() < 1:
            break
    aligned = end_ns + offset_ns[domain] + Drift(rate, center).shift(domain, end_ns)
    left = group_median(number, aligned)[number] - aligned
    rate[~_stands_out(domain, left, rate * window)] = 0
    return Drift(rate, center)


def _stands_out(
    domain: NDArray[Any], left: Int64Array, effect: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """bool[D]: whether an effect, in ns, is larger than what the ends vary anyway."""
    # A constant that is left is the offset's business.
    around = np.abs(left - group_median(domain, left)[domain])
    return np.abs(effect) > 4 * group_median(domain, around)
