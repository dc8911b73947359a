"""Clock offsets between hosts or ranks of one execution.

All members of a collective finish at nearly the same moment, but start whenever they arrive.
So the ends of matched operations tell how clocks differ; starts say nothing.  Measured ends
within one host agree within some tens of microseconds.

The method: a spanning tree over the clock domains, whose edges are medians of end differences,
gives first offsets; a few rounds of alternating medians then fit all operations together.
Medians, because a member that is late by chance must not move its clock.  Only operations with
members in several domains say anything: those within a host are often a thousand times as many
and would outvote them.  An offset no larger than the typical spread of ends that remains is
noise, not a clock, and is set to 0: ranks of one host keep the times they were recorded with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.errors import ClockError
from prismcalib.graph import Int64Array

__all__ = [
    "ClockFit",
    "Spread",
    "across_domains",
    "end_spreads",
    "fit_offsets",
    "group_max",
    "group_median",
    "group_min",
    "solve_offsets",
    "thin_out",
    "worst_group",
]

_ROUNDS = 20
# Offsets need some hundred operations per pair of domains, not millions.
_MOST_PER_DOMAIN = 512


@dataclass(frozen=True)
class Spread:
    """How far the ends of the members of one operation lie apart, over many operations."""

    median_ns: int
    p95_ns: int
    max_ns: int

    @classmethod
    def of(cls, values_ns: Int64Array) -> Spread | None:
        """Summary of the values; None if there are none."""
        if not len(values_ns):
            return None
        middle, high = np.percentile(values_ns, [50, 95])
        return cls(round(middle), round(high), int(values_ns.max()))


@dataclass(frozen=True, eq=False)
class ClockFit:
    """Offsets of D clock domains.

    Attributes:
        offset_ns: int64[D], to be added to the times of a domain.
        uncertainty_ns: int64[D], 95th percentile of the distance between a member's end and
            the middle of its operation, after correction.
        used: bool[m], the members whose ends were compared.
    """

    offset_ns: Int64Array
    uncertainty_ns: Int64Array
    used: NDArray[np.bool_]


def fit_offsets(
    instance: NDArray[Any],
    domain: NDArray[Any],
    end_ns: Int64Array,
    tier: NDArray[Any],
    domains: int,
    reference: int = 0,
) -> ClockFit:
    """Estimate one offset per clock domain; the reference domain gets 0.

    Args:
        instance: int[m], operation of each of m members.
        domain: int[m], clock domain of each member, in 0 .. domains - 1.
        end_ns: int64[m], end of each member in its own clock.
        tier: int[m], how well the ends of this kind of operation agree, 0 best.  Worse tiers
            are used only where better ones do not connect all domains.
        domains: D.
        reference: the domain whose clock is kept.

    Raises:
        ClockError: some domains share no operation with the others, even through others;
            `domains` lists them.
    """
    for worst in sorted({0, *np.unique(tier).tolist()}):
        used = tier <= worst
        members = instance[used], domain[used], end_ns[used]
        offset, reached = solve_offsets(*members, tier[used], domains, reference)
        if reached.all():
            break
    else:
        raise ClockError(
            "some clocks share no matched operation with the rest, so nothing tells how they "
            "differ",
            hint="check that these ranks belong to the same run; "
            "--clock keep trusts the clocks as they are",
            domains=tuple(np.flatnonzero(~reached).tolist()),
        )
    if domains > 1:
        across = across_domains(instance[used], domain[used])
        members = instance[used][across], domain[used][across], end_ns[used][across]
    offset[np.abs(offset) <= _noise(*members, offset)] = 0
    return ClockFit(offset, _uncertainty(*members, offset), used)


def across_domains(instance: NDArray[Any], domain: NDArray[Any]) -> NDArray[np.bool_]:
    """bool[m]: whether the operation of the member has members in several domains."""
    if not len(instance):
        return np.zeros(0, np.bool_)
    number = np.unique(instance, return_inverse=True)[1].ravel()
    numbered = domain.astype(np.int64)
    several: NDArray[np.bool_] = group_max(number, numbered) > group_min(number, numbered)
    return several[number]


def solve_offsets(
    instance: NDArray[Any],
    domain: NDArray[Any],
    end_ns: Int64Array,
    tier: NDArray[Any],
    domains: int,
    reference: int,
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Offsets int64[D] by all the operations given, and bool[D], which domains these relate.

    Arguments as of `fit_offsets`.  Nothing is taken for noise; what is not related gets 0.
    """
    across = across_domains(instance, domain)
    instance, domain, end_ns = instance[across], domain[across], end_ns[across]
    tree, reached = _span(_edges(instance, domain, end_ns, tier[across]), domains, reference)
    kept = thin_out(instance, domain, domains)
    offset = _refine(instance[kept], domain[kept], end_ns[kept], tree, reference)
    return np.where(reached, offset, 0), reached


def end_spreads(instance: NDArray[Any], end_ns: Int64Array) -> Int64Array:
    """int64[k]: of each of the k distinct operations, latest minus earliest end."""
    if not len(instance):
        return np.empty(0, np.int64)
    number = np.unique(instance, return_inverse=True)[1]
    return group_max(number, end_ns) - group_min(number, end_ns)


# Of few operations the median says little: one late process moves it.
_FEW = 5
_LENIENCE = 10


def worst_group(
    spreads_ns: Int64Array, group: NDArray[Any], limit_ns: int
) -> tuple[int, int, int] | None:
    """The group whose operations agree worst, if their median spread exceeds the limit.

    A median over all operations hides a wrong clock when most operations stay within a host;
    in the groups that reach across hosts every operation shows it.  Groups of few operations
    may exceed the limit tenfold.

    Returns:
        Its number, the median spread, how many operations it has; None if all keep the limit.
    """
    order = np.lexsort((spreads_ns, group))
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    count = np.diff(np.append(first, len(order)))
    median = spreads_ns[order[first + (count - 1) // 2]]
    limit_ns = min(limit_ns, np.iinfo(np.int64).max // _LENIENCE)
    excess = median - limit_ns * np.where(count < _FEW, _LENIENCE, 1)
    if not len(excess) or excess.max() <= 0:
        return None
    worst = int(excess.argmax())
    return int(group[order[first[worst]]]), int(median[worst]), int(count[worst])


def group_max(number: NDArray[Any], values: Int64Array) -> Int64Array:
    """Largest value of each group; groups are numbered 0 .. without holes."""
    result = np.full(int(number.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(result, number, values)
    return result


def group_min(number: NDArray[Any], values: Int64Array) -> Int64Array:
    """Smallest value of each group; groups are numbered 0 .. without holes."""
    return -group_max(number, -values)


@dataclass(frozen=True, eq=False)
class _Edges:
    """Pairs of domains that share operations, best first."""

    first: Int64Array
    second: Int64Array
    # To be added to the clock of `second` to get that of `first`.
    offset: Int64Array


def _edges(
    instance: NDArray[Any], domain: NDArray[Any], end: Int64Array, tier: NDArray[Any]
) -> _Edges:
    """Compare every member with the first member of its operation."""
    order = np.argsort(instance, kind="stable")
    hub = np.flatnonzero(np.diff(instance[order], prepend=-1))
    hub_of = order[np.repeat(hub, np.diff(np.append(hub, len(order))))]
    first, second = domain[hub_of].astype(np.int64), domain[order].astype(np.int64)
    delta = end[hub_of] - end[order]
    flip = first > second
    first, second = np.where(flip, second, first), np.where(flip, first, second)
    delta = np.where(flip, -delta, delta)
    apart = first != second
    pairs = np.stack([first[apart], second[apart]])
    if not pairs.size:
        return _Edges(*(np.empty(0, np.int64) for _ in range(3)))
    names, number, counts = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    number = number.ravel()
    best_tier = group_min(number, tier[order][apart].astype(np.int64))
    rank = np.lexsort((names[1], names[0], -counts, best_tier))
    offset = group_median(number, delta[apart])
    return _Edges(names[0][rank], names[1][rank], offset[rank])


def _span(edges: _Edges, domains: int, reference: int) -> tuple[Int64Array, NDArray[np.bool_]]:
    """Offsets along a spanning tree of the best edges, and which domains it reaches."""
    root = list(range(domains))

    def find(domain: int) -> int:
        while root[domain] != domain:
            root[domain] = root[root[domain]]
            domain = root[domain]
        return domain

    neighbours: list[list[tuple[int, int]]] = [[] for _ in range(domains)]
    columns = (edges.first.tolist(), edges.second.tolist(), edges.offset.tolist())
    for first, second, offset in zip(*columns, strict=True):
        a, b = find(first), find(second)
        if a != b:
            root[a] = b
            neighbours[first].append((second, offset))
            neighbours[second].append((first, -offset))
    result = np.zeros(domains, np.int64)
    reached = np.zeros(domains, np.bool_)
    reached[reference] = True
    queue = [reference]
    for domain in queue:
        for other, offset in neighbours[domain]:
            if not reached[other]:
                reached[other] = True
                result[other] = result[domain] + offset
                queue.append(other)
    return result, reached


def thin_out(instance: NDArray[Any], domain: NDArray[Any], domains: int) -> NDArray[np.bool_]:
    """bool[m]: members of every k-th operation, so that a fit stays quick on long traces."""
    number = np.unique(instance, return_inverse=True)[1]
    step = -(-len(instance) // (_MOST_PER_DOMAIN * domains))
    kept: NDArray[np.bool_] = number % step == 0 if step > 1 else np.ones(len(instance), np.bool_)
    # Never at the price of a domain that has few operations.
    return kept | np.isin(instance, instance[np.bincount(domain)[domain] <= _MOST_PER_DOMAIN])


def _refine(
    instance: NDArray[Any],
    domain: NDArray[Any],
    end: Int64Array,
    offset: Int64Array,
    reference: int,
) -> Int64Array:
    """Alternate between the middle of each operation and the offset of each domain."""
    if not len(instance):
        return offset
    number = np.unique(instance, return_inverse=True)[1]
    for _ in range(_ROUNDS):
        aligned = end + offset[domain]
        correction = np.zeros_like(offset)
        moved = group_median(domain, group_median(number, aligned)[number] - aligned)
        correction[: len(moved)] = moved
        correction -= correction[reference]
        offset = offset + correction
        if not correction.any():
            break
    return offset


def _noise(
    instance: NDArray[Any], domain: NDArray[Any], end: Int64Array, offset: Int64Array
) -> Int64Array:
    """int64[D]: typical (median) end spread of the operations that a domain takes part in."""
    aligned = end + offset[domain]
    number = np.unique(instance, return_inverse=True)[1]
    spread = group_max(number, aligned) - group_min(number, aligned)
    return _per_domain(domain, spread[number], 0.5, len(offset))


def _uncertainty(
    instance: NDArray[Any], domain: NDArray[Any], end: Int64Array, offset: Int64Array
) -> Int64Array:
    """int64[D]: see `ClockFit`."""
    aligned = end + offset[domain]
    number = np.unique(instance, return_inverse=True)[1]
    distance = np.abs(group_median(number, aligned)[number] - aligned)
    return _per_domain(domain, distance, 0.95, len(offset))


def _per_domain(domain: NDArray[Any], values: Int64Array, share: float, domains: int) -> Int64Array:
    """The value that `share` of those of a domain do not exceed; 0 without values."""
    order = np.lexsort((values, domain))
    counts = np.bincount(domain, minlength=domains)
    filled = counts > 0
    position = np.cumsum(counts) - counts + np.ceil((counts - 1) * share).astype(np.int64)
    result = np.zeros(domains, np.int64)
    result[filled] = values[order[position[filled]]]
    return result


def group_median(number: NDArray[Any], values: Int64Array) -> Int64Array:
    """Exact integer median of each group, the mean of the middle two rounded down; 0 if empty.

    Not with floats: times since 1970 in nanoseconds need more than their 53 bits.
    """
    order = np.lexsort((values, number))
    counts = np.bincount(number)
    first = np.cumsum(counts) - counts
    filled = counts > 0
    low = values[order[(first + (counts - 1) // 2)[filled]]]
    high = values[order[(first + counts // 2)[filled]]]
    result = np.zeros(len(counts), np.int64)
    result[filled] = low + (high - low) // 2
    return result
