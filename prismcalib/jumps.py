"""Clocks that were set anew while they were read: ends part by one step, not by a line.

Looked for along the pairs of clocks by which offsets were found. Of two clocks that run evenly, the
ends of common operations part along a line; a step in that line that outlasts it and stands out
from what the ends vary is a clock that was set, as time daemons do. Or it is the network: a
collective may change its way, and its members then end in another order for the rest of the run.
A clock moves all that its ranks do, so the step must be in every sort of operation that would
show it, a sort being one kind in one group (sends and receives apart). Where there is a
single sort nothing tells the two apart: so steps are reported, and no time is changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Int64Array
from prismcalib.relations import Relations

__all__ = ["Jump", "find_jumps"]

# Less is no harm to speak of, and a time daemon sets clocks by more.
_LEAST_NS = 200_000
_STANDS_OUT = 8
_FEW = 60
# On each side, of every sort that counts.
_LEAST_OPERATIONS = 5
_MOST_OPERATIONS = 512
# Of the operations on a side: those that lie nearer to the other side's line.
_MOST_ASTRAY = 0.02
# A median of five passes steps on and leaves out members that were late once or twice in a row.
_SMOOTH = 5

Float64Array = NDArray[np.float64]


@dataclass(frozen=True)
class Jump:
    """A clock that was set.

    Attributes:
        domain: number of the clock.
        size_ns: how much later its times are afterwards; negative: earlier.
        after_ns, before_ns: between these ends, on the common clock, it was set.
        sorts: sorts of operations that show it; of one, nothing tells it from a network that
            changed.
    """

    domain: int
    size_ns: int
    after_ns: int
    before_ns: int
    sorts: int


@dataclass(frozen=True)
class _Step:
    """A step in the ends of one sort of operations."""

    size_ns: float
    noise_ns: float
    after_ns: int
    before_ns: int


@dataclass(frozen=True, eq=False)
class _Series:
    """How far the ends of operations of one sort lie apart on two clocks, in the order of time."""

    sort: int
    time_ns: Int64Array
    apart_ns: Int64Array


def find_jumps(
    relations: Relations,
    end_ns: Int64Array,
    aligned_ns: Int64Array,
    sort: NDArray[Any],
    reference: int,
) -> tuple[Jump, ...]:
    """Clocks that were set, by time; of each pair of clocks the largest step counts.

    Args:
        relations: of the clocks, by all operations that they have in common.
        end_ns: int64[m], ends of the m members, each on its own clock.
        aligned_ns: int64[m], the same on the common clock, as well as that is known.
        sort: int[m], of each member: kind and group in one number.
        reference: the clock that is least suspected.
    """
    lines, found = [], []
    for pair in relations.tree():
        apart = end_ns[pair.child_members] - end_ns[pair.parent_members]
        for members in (pair.parent_members, pair.child_members):
            # A clock that was set back puts its own times out of order, but not those of others.
            series = _series(aligned_ns[members], apart, sort[members])
            steps = [step for each in series if (step := _step_in(each)) is not None]
            if steps:
                found.append(min(steps, key=lambda step: step.noise_ns))
                break
        lines.append((pair.parent, pair.child, series))
    found.sort(key=lambda step: step.after_ns)
    jumps: list[Jump] = []
    while found:
        # Steps that may be one event: times of a clock that was set are off by as much.
        latest = found[0].before_ns + abs(found[0].size_ns)
        same = [step for step in found if step.after_ns < latest]
        found = found[len(same) :]
        step = min(same, key=lambda step: step.noise_ns)
        sizes = _who(lines, step, relations.reached, reference)
        sorts = _confirmed(sizes, step, relations, (end_ns, aligned_ns, sort))
        jumps += [
            Jump(domain, round(size), step.after_ns, step.before_ns, sorts)
            for domain, size in sizes.items()
            if sorts
        ]
    return tuple(jumps)


def _who(
    lines: list[tuple[int, int, list[_Series]]],
    step: _Step,
    reached: NDArray[np.bool_],
    reference: int,
) -> dict[int, float]:
    """The clocks that account for steps between pairs, and by how much each was set.

    As few as can be; the reference is none of them if in doubt.
    """
    total = np.zeros(len(reached))
    for parent, child, series in lines:
        sizes = [size for each in series if (size := _size_at(each, step)) is not None]
        size = float(np.median(sizes)) if sizes else 0.0
        total[child] = total[parent] + (size if abs(size) > abs(step.size_ns) / 2 else 0.0)
    level = np.rint(total / step.size_ns).astype(np.int64)
    # Of equally many the first counts.
    others = reached & (np.arange(len(reached)) != reference)
    usual = Counter([int(level[reference]), *level[others].tolist()]).most_common(1)[0][0]
    total -= np.median(total[reached & (level == usual)])
    return {int(one): float(total[one]) for one in np.flatnonzero(reached & (level != usual))}


def _confirmed(
    sizes: dict[int, float],
    step: _Step,
    relations: Relations,
    members: tuple[Int64Array, Int64Array, NDArray[Any]],
) -> int:
    """How many sorts of operations show the steps between clocks that were set and others.

    0 if any sort does not: then the operations have changed, and no clock.
    """
    end_ns, aligned_ns, sort = members
    votes: Counter[int] = Counter()
    for pair in relations.pairs_of(sizes):
        apart = end_ns[pair.child_members] - end_ns[pair.parent_members]
        ahead = pair.parent_members
        for series in _series(aligned_ns[ahead], apart, sort[ahead]):
            size = _size_at(series, step)
            if size is not None:
                wrong = abs(size - sizes[pair.child]) > abs(step.size_ns) / 4
                votes[series.sort] += -1 if wrong else 1
    return len(votes) if all(vote > 0 for vote in votes.values()) else 0


def _series(time: Int64Array, apart: Int64Array, sort: NDArray[Any]) -> list[_Series]:
    """The differences of two clocks by sort of operation; those with enough of them."""
    result = []
    for each in np.unique(sort):
        mine = np.flatnonzero(sort == each)
        if len(mine) >= 2 * _LEAST_OPERATIONS:
            mine = mine[np.argsort(time[mine], kind="stable")]
            mine = mine[:: -(-len(mine) // _MOST_OPERATIONS)]
            result.append(_Series(int(each), time[mine], apart[mine]))
    return result


def _step_in(series: _Series) -> _Step | None:
    """The largest step of one series, if it is one."""
    time, apart = series.time_ns, series.apart_ns
    values = (apart - apart[0]).astype(np.float64)
    smooth = np.median(
        np.lib.stride_tricks.sliding_window_view(np.pad(values, _SMOOTH // 2, "edge"), _SMOOTH),
        axis=1,
    )
    side = _LEAST_OPERATIONS
    changes = np.abs(np.diff(smooth))
    at = int(np.argmax(changes[side - 1 : len(values) - side])) + side
    if changes[at - 1] < _LEAST_NS / 2:
        return None
    size, rest = _levels(time, values, at)
    noise = float(np.median(np.abs(rest)))
    toward = np.sign(size) * rest * np.where(np.arange(len(rest)) < at, 1, -1)
    astray = toward > abs(size) / 2
    if (
        abs(size) < max(_LEAST_NS, _STANDS_OUT * max(1.0, _FEW / len(values)) * noise)
        or changes[at - 1] < abs(size) / 2
        or max(astray[:at].mean(), astray[at:].mean()) > _MOST_ASTRAY
    ):
        return None
    return _Step(size, noise, int(time[at - 1]), int(time[at]))


def _levels(time: Int64Array, values: Float64Array, at: int) -> tuple[float, Float64Array]:
    """The step between both sides, and float64[n], what is left of the values."""
    before = np.arange(len(time)) < at
    slope = _slope(time, values, before, ~before)
    flat = values - slope * (time - time[at])
    low, high = float(np.median(flat[:at])), float(np.median(flat[at:]))
    return high - low, np.concatenate([flat[:at] - low, flat[at:] - high])


def _slope(
    time: Int64Array, values: NDArray[Any], early: NDArray[np.bool_], late: NDArray[np.bool_]
) -> float:
    """Slope of the longer of two sides, by medians of its first and its last third."""
    side = max(early, late, key=lambda part: np.ptp(time[part]))
    x, y = time[side] - time[0], values[side] - values[0]
    third = max(len(x) // 3, 1)
    span = float(np.median(x[-third:]) - np.median(x[:third]))
    return float(np.median(y[-third:]) - np.median(y[:third])) / span if span > 0 else 0.0


def _size_at(series: _Series, step: _Step) -> float | None:
    """What step a series has at the time of another one; None if it is too noisy to say."""
    time, apart = series.time_ns, series.apart_ns
    early, late = time <= step.after_ns, time >= step.before_ns
    if min(early.sum(), late.sum()) < _LEAST_OPERATIONS:
        return None
    flat = (apart - apart[0]) - _slope(time, apart, early, late) * (time - step.after_ns)
    low, high = float(np.median(flat[early])), float(np.median(flat[late]))
    rest = np.concatenate([flat[early] - low, flat[late] - high])
    return high - low if np.median(np.abs(rest)) <= abs(step.size_ns) / 4 else None
