"""What traces of a true and of an emulated run of a rank have in common, and what not."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARMUP = 2
"""Steps that are unlike the others: DDP cuts its buckets anew before the second."""
LOCAL = ("compute", "memcpy")


@dataclass
class Pieces:
    """A rank's step, cut where communications are issued.

    Attributes:
        reached: communication -> when the program's work before it was done, ns since the step
            began; in order.
        before: communication -> computation since the one before it, ns.
        after: computation after the last one.
    """

    reached: dict[Hashable, int] = field(default_factory=dict)
    before: dict[Hashable, int] = field(default_factory=dict)
    after: int = 0

    @property
    def computation(self) -> int:
        """Of the whole step."""
        return sum(self.before.values()) + self.after

    def merged(self, kept: set[Hashable]) -> list[int]:
        """Computation before each of these communications, and after the last one."""
        found, since = [], 0
        for name, time_ns in self.before.items():
            since += time_ns
            if name in kept:
                found.append(since)
                since = 0
        return [*found, since + self.after]


def compare_pieces(true: Path, emulated: Path, rank: int) -> dict[str, Any]:
    """Computation of a rank in two traces, step by step, cut by the communications of both.

    What the program does between two communications is one piece, however many rows it is: waits
    and recorded events cut it further. `durations` is the median of: differences of pieces, over
    the true step's computation; `starts` of: differences of when communications were reached, since the step
    began, over the time to the last one. `computation` is by how much more the emulated step computes.
    `left_out` counts communications of either run that the other does not have in that step, or in
    another order; what is before them counts to the next piece.
    """
    ours, theirs = pieces_of(true, rank), pieces_of(emulated, rank)
    steps = [step for step in sorted(set(ours) & set(theirs)) if step >= WARMUP]
    durations, starts, more, compared, left_out = [], [], [], 0, 0
    for step in steps:
        one, other = ours[step], theirs[step]
        names = in_both(one, other)
        left_out += len(one.before) + len(other.before) - 2 * len(names)
        pairs = list(zip(one.merged(set(names)), other.merged(set(names)), strict=True))
        compared += len(pairs)
        busy = max(1, one.computation)
        durations.append(sum(abs(left - right) for left, right in pairs) / busy)
        more.append(other.computation / busy - 1)
        length = max((one.reached[name] for name in names), default=0) or 1
        starts += [abs(one.reached[name] - other.reached[name]) / length for name in names]
    return {
        "steps": len(steps),
        "pieces": compared,
        "left_out": left_out,
        **{
            name: statistics.median(found) if found else None
            for name, found in (
                ("durations", durations), ("starts", starts), ("computation", more)
            )
        },
    }  # fmt: skip


def in_both(one: Pieces, other: Pieces) -> list[Hashable]:
    """Communications of both, as long as they come in one order."""
    common, last = [], -1
    places = {name: place for place, name in enumerate(other.before)}
    for name in one.before:
        place = places.get(name, -1)
        if place > last:
            common.append(name)
            last = place
    return common


def pieces_of(path: Path, rank: int) -> dict[int, Pieces]:
    """A rank's steps.

    A communication is known by its kind, the ranks of its group, its partner, and how many of these
    there were in the step: numbers of groups and of operations may differ from trace to trace.
    """
    import polars as pl

    from prismtrace.trace import open_trace

    trace = open_trace(path)
    groups = {group.id: group.ranks for group in trace.header.groups}
    rows = (
        trace.nodes.filter((pl.col("rank") == rank) & pl.col("step").is_not_null())
        .sort("index")  # as the program did it
        .select("step", pl.col("kind").cast(pl.String), "group", "peer", "start_ns", "dur_ns")
        .collect()
    )
    found: dict[int, Pieces] = defaultdict(Pieces)
    seen: dict[int, Counter[Hashable]] = defaultdict(Counter)
    begun: dict[int, int] = {}
    over: dict[int, int] = {}
    for step, kind, group, peer, start, length in rows.iter_rows():
        pieces = found[step]
        if kind in LOCAL:
            begun.setdefault(step, start)
            over[step] = start + length
            pieces.after += length if kind == LOCAL[0] else 0
            continue
        what = (kind, groups.get(group), peer)
        name = (*what, seen[step][what])
        seen[step][what] += 1
        # Its own start may be later: others may be ahead of it.
        origin = begun.setdefault(step, start)
        pieces.reached[name] = over.get(step, origin) - origin
        pieces.before[name], pieces.after = pieces.after, 0
    return dict(found)


def transfers(path: Path, rank: int) -> dict[str, float]:
    """Ms that a rank's communications transfer in a typical step, by kind, in a merged trace."""
    import polars as pl

    frame = (
        pl.scan_parquet(path)
        .filter(
            (pl.col("rank") == rank)
            & pl.col("transfer_ns").is_not_null()
            & (pl.col("step") >= WARMUP)
        )
        .group_by("step", pl.col("kind").cast(pl.String))
        .agg(pl.col("transfer_ns").sum())
        .collect()
    )
    steps: dict[str, list[int]] = defaultdict(list)
    for _, kind, time_ns in frame.iter_rows():
        steps[kind].append(time_ns)
    return {kind: statistics.median(found) / 1e6 for kind, found in sorted(steps.items())}
