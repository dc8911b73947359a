"""Clock offsets between hosts or ranks of one execution.

All members of a collective finish at nearly the same moment, but start whenever they arrive.
So the ends of matched operations tell how clocks differ; starts say nothing.  Measured ends
within one host agree within some tens of microseconds.

The method (`prismcalib.relations`): medians of end differences.  Only operations with members in
several domains say anything: those within a host are often a thousand times as many and would
outvote them.  An offset no larger than the typical spread of ends that remains is
noise, not a clock, and is set to 0: ranks of one host keep the times they were recorded with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.errors import ClockError
from prismcalib.graph import Int64Array
from prismcalib.grouped import Groups, group_max, group_min, numbered
from prismcalib.relations import Relations, across_domains

__all__ = [
    "ClockFit",
    "Spread",
    "end_spreads",
    "fit_offsets",
    "worst_group",
]


@dataclass(frozen=True)
class Spread:
    """How far the ends of the members of one operation lie apart, over many operations.

    Attributes:
        median_ns, p95_ns, max_ns: half of the operations, 95 % and all lie within these.
    """

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
        relations = Relations(instance[used], domain[used], tier[used], domains, reference)
        if relations.reached.all():
            break
    else:
        raise ClockError(
            "some clocks share no matched operation with the rest, so nothing tells how they "
            "differ",
            hint="check that these ranks belong to the same run; "
            "--clock keep trusts the clocks as they are",
            domains=tuple(np.flatnonzero(~relations.reached).tolist()),
        )
    offset = relations.offsets(end_ns[used])
    members = np.flatnonzero(used)
    if domains > 1:
        members = members[across_domains(instance[members], domain[members])]
    operation = Groups(numbered(instance[members]))
    noise = _noise(operation, domain[members], end_ns[members], offset)
    offset[np.abs(offset) <= noise] = 0
    uncertainty = _uncertainty(operation, domain[members], end_ns[members], offset)
    return ClockFit(offset, uncertainty, used)


def end_spreads(instance: NDArray[Any], end_ns: Int64Array) -> Int64Array:
    """int64[k]: of each of the k distinct operations, latest minus earliest end."""
    number = numbered(instance)
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


def _noise(
    operation: Groups, domain: NDArray[Any], end: Int64Array, offset: Int64Array
) -> Int64Array:
    """int64[D]: typical (median) end spread of the operations that a domain takes part in."""
    aligned, number = end + offset[domain], operation.number
    spread = group_max(number, aligned) - group_min(number, aligned)
    return _per_domain(domain, spread[number], 0.5, len(offset))


def _uncertainty(
    operation: Groups, domain: NDArray[Any], end: Int64Array, offset: Int64Array
) -> Int64Array:
    """int64[D]: see `ClockFit`."""
    aligned = end + offset[domain]
    distance = np.abs(operation.median(aligned)[operation.number] - aligned)
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
