"""Which ranks are real together: every rank once, members of a group together where they fit.

A transfer is measured only when all members of its group are real. So groups are put together
in the order of how much hangs on them: tensor-parallel ones first, whose operations nothing
hides, then those that communicate most often.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from prismreplay.runtime.axes import axis_of
from prismtrace.reading import reading
from prismtrace.schema import P2P_KINDS, ProcessGroup
from prismtrace.trace import Trace

__all__ = ["Ties", "rotate", "ties_of", "whole_groups"]


@dataclass(frozen=True)
class Ties:
    """Ranks that communicate with each other, and how often each of them does."""

    ranks: tuple[int, ...]
    operations: int
    axis: str | None = None

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts what should be kept together first to the front."""
        return self.axis != "tp", -self.operations, len(self.ranks), self.ranks


def ties_of(trace: Trace) -> tuple[Ties, ...]:
    """Who communicates with whom in a job: groups by their collectives, pairs by their p2p."""
    p2p = pl.col("kind").cast(pl.String).is_in([kind.value for kind in P2P_KINDS])
    columns = ("rank", "group", "peer")
    with reading(trace.paths):
        rows = trace.nodes.filter(pl.col("group").is_not_null())
        collectives = rows.filter(~p2p).group_by("group").agg(pl.len(), pl.col("rank").n_unique())
        messages = rows.filter(p2p & pl.col("peer").is_not_null()).group_by(columns).len()
        counted, pairs = pl.collect_all([collectives, messages])
    groups = {group.id: group for group in trace.header.groups}
    found: dict[tuple[tuple[int, ...], str | None], int] = {}
    for number, count, members in counted.iter_rows():
        group = groups[number]
        key = tuple(sorted(group.ranks)), axis_of(group.name, group.desc)
        found[key] = found.get(key, 0) + count // max(1, members)
    for rank, number, peer, count in pairs.iter_rows():
        group = groups[number]
        axis = axis_of(group.name, group.desc)
        key = (min(rank, peer), max(rank, peer)), axis if len(group.ranks) == 2 else None
        # Both ends have rows of the same messages.
        found[key] = found.get(key, 0) + count
    ties = [Ties(ranks, count, axis) for (ranks, axis), count in found.items()]
    return tuple(sorted(ties, key=lambda one: one.order))


def rotate(
    ranks: Iterable[int], sandbox_size: int, ties: Sequence[Ties] = ()
) -> tuple[tuple[int, ...], ...]:
    """Parts of `ranks` with at most `sandbox_size` each; every rank is in one of them.

    Args:
        ranks: global ranks to be measured.
        sandbox_size: ranks that are real at a time.
        ties: see `ties_of`.

    Raises:
        ValueError: no rank fits.
    """
    if sandbox_size < 1:
        raise ValueError("a sandbox holds at least one rank")
    chosen = sorted(set(ranks))
    home = {rank: rank for rank in chosen}
    together = {rank: [rank] for rank in chosen}
    for tie in sorted(ties, key=lambda one: one.order):
        _gather([rank for rank in tie.ranks if rank in home], home, together, sandbox_size)
    return _packed(sorted(together.values()), sandbox_size)


def _gather(
    members: Sequence[int], home: dict[int, int], together: dict[int, list[int]], most: int
) -> None:
    """Put members of a group together, as many as fit, in group order."""
    if not members:
        return
    current = home[members[0]]
    for rank in members[1:]:
        other = home[rank]
        if other == current:
            continue
        if len(together[current]) + len(together[other]) > most:
            current = other
            continue
        low, high = min(current, other), max(current, other)
        joined = together.pop(high)
        together[low] = sorted(together[low] + joined)
        home.update(dict.fromkeys(joined, low))
        current = low


def _packed(clusters: Sequence[list[int]], most: int) -> tuple[tuple[int, ...], ...]:
    """Few parts out of clusters: large ones first, each into the first part with room for it."""
    parts: list[list[int]] = []
    open_parts: list[list[int]] = []
    for cluster in sorted(clusters, key=lambda ranks: (-len(ranks), ranks)):
        part = next((part for part in open_parts if len(part) + len(cluster) <= most), None)
        if part is None:
            part = []
            parts.append(part)
            open_parts.append(part)
        part += cluster
        if len(part) == most:
            open_parts.remove(part)
    return tuple(sorted(tuple(sorted(part)) for part in parts))


def whole_groups(
    rotation: Sequence[Sequence[int]], groups: Iterable[ProcessGroup]
) -> tuple[list[ProcessGroup], list[ProcessGroup]]:
    """Groups of several ranks that are real as a whole in some part, and those that are not."""
    part_of = {rank: number for number, part in enumerate(rotation) for rank in part}
    whole: list[ProcessGroup] = []
    split: list[ProcessGroup] = []
    for group in groups:
        if len(group.ranks) < 2:
            continue
        places = {part_of.get(rank, -1 - rank) for rank in group.ranks}
        (whole if len(places) == 1 else split).append(group)
    return whole, split
