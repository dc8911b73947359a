"""Blocks of ranks of one job as one trace: groups, streams and clocks get common numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import polars as pl

from prismtrace.headers import CUT_BEFORE
from prismtrace.schema import ClockDomain, ProcessGroup, TraceHeader
from prismtrace.trace import Trace, node_schema

__all__ = ["Names", "in_order", "joined_header", "joined_ranks", "renamed"]


@dataclass
class Names:
    """Groups, streams and clocks of several headers, each numbered once."""

    groups: dict[tuple[tuple[int, ...], str, int], ProcessGroup] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    clocks: dict[tuple[object, ...], ClockDomain] = field(default_factory=dict)

    def take(self, header: TraceHeader) -> tuple[dict[int, int], dict[int, int]]:
        """Numbers of a header's groups and streams -> those of the result."""
        groups: dict[int, int] = {}
        times: dict[tuple[tuple[int, ...], str], int] = {}
        for group in header.groups:
            same = times[group.ranks, group.name] = times.get((group.ranks, group.name), -1) + 1
            key = (group.ranks, group.name, same)
            if key not in self.groups:
                self.groups[key] = group.model_copy(update={"id": self._free(group.id)})
            groups[group.id] = self.groups[key].id
        labels = header.streams
        streams = {n: self.streams.setdefault(label, self._next(n)) for n, label in labels.items()}
        for domain in header.clock:
            alone = () if domain.host is not None else domain.ranks
            about = (domain.host, domain.source, domain.offset_ns, domain.uncertainty_ns, alone)
            known = self.clocks.get(about)
            ranks = sorted({*domain.ranks, *(known.ranks if known else ())})
            number = known.id if known else len(self.clocks)
            self.clocks[about] = domain.model_copy(update={"id": number, "ranks": tuple(ranks)})
        return groups, streams

    def _free(self, wanted: int) -> int:
        taken = {group.id for group in self.groups.values()}
        return wanted if wanted not in taken else max(taken) + 1

    def _next(self, wanted: int) -> int:
        taken = set(self.streams.values())
        return wanted if wanted not in taken else max(taken) + 1


def joined_ranks(pieces: list[Trace]) -> Trace:
    """Blocks of ranks as one trace, its rows in order."""
    pieces = sorted(pieces, key=lambda piece: min(piece.header.ranks, default=0))
    names = Names()
    frames = []
    for piece in pieces:
        groups, streams = names.take(piece.header)
        frames.append(renamed(piece.nodes, groups, streams))
    headers = [piece.header for piece in pieces]
    apart = all(max(a.ranks, default=0) < min(b.ranks, default=0) for a, b in pairwise(headers))
    return Trace(joined_header(headers, names), in_order(frames, apart=apart))


def renamed(nodes: pl.LazyFrame, groups: dict[int, int], streams: dict[int, int]) -> pl.LazyFrame:
    """Rows with other numbers of groups and streams; those that mean nothing stay."""
    changes = {}
    for name, numbers in (("group", groups), ("stream", streams)):
        if any(old != new for old, new in numbers.items()):
            changes[name] = _replaced(name, numbers)
    return nodes.with_columns(**changes)


def _replaced(name: str, numbers: dict[int, int]) -> pl.Expr:
    """Like `Expr.replace`, but block by block: for that one, Polars holds all rows in memory."""
    return pl.col(name).map_batches(
        lambda block: block.replace(numbers),
        return_dtype=node_schema()[name],
        is_elementwise=True,
    )


def in_order(frames: list[pl.LazyFrame], *, apart: bool = False) -> pl.LazyFrame:
    """Rows of all frames in the order of their ids; every frame is in order.

    `apart`: those of each frame come after all of the one before.
    """
    if apart:
        return pl.concat(frames, how="diagonal")
    columns = list(dict.fromkeys(name for f in frames for name in f.collect_schema().names()))
    types = {name: t for f in frames for name, t in f.collect_schema().items()}
    whole = [
        frame.with_columns(
            pl.lit(None, types[name]).alias(name)
            for name in columns
            if name not in frame.collect_schema()
        ).select(columns)
        for frame in frames
    ]
    joined = whole[0]
    for frame in whole[1:]:
        joined = joined.merge_sorted(frame, key="id")
    return joined


def joined_header(headers: Sequence[TraceHeader], names: Names) -> TraceHeader:
    """What the pieces say together; the first one speaks for what is not joined."""
    policies: dict[str, int] = {}
    for header in headers:
        for name, number in header.policies.items():
            policies[name] = policies.get(name, 0) + number
    symmetry = {r: like for header in headers for r, like in (header.symmetry or {}).items()}
    return headers[0].model_copy(
        update={
            "ranks": tuple(sorted({rank for header in headers for rank in header.ranks})),
            "groups": tuple(sorted(names.groups.values(), key=lambda group: group.id)),
            "streams": {n: label for label, n in sorted(names.streams.items(), key=lambda x: x[1])},
            "clock": tuple(names.clocks.values()),
            "steps": tuple(sorted({step for header in headers for step in header.steps})),
            "symmetry": symmetry or None,
            "sources": tuple(dict.fromkeys(text for h in headers for text in h.sources)),
            "policies": policies,
            "extra": _extra(headers),
        }
    )


def _extra(headers: Sequence[TraceHeader]) -> dict[str, Any]:
    """That of the first, and which steps do not follow the one before them."""
    cut = {step: ahead for h in headers for step, ahead in h.extra.get(CUT_BEFORE, {}).items()}
    for before, after in pairwise(headers):
        if not before.steps or not after.steps or before.steps == after.steps:
            continue
        last, first = before.steps[-1], after.steps[0]
        if cut.get(str(first), first - 1) == last:
            cut.pop(str(first), None)
        else:
            cut.setdefault(str(first), first - 1)
    extra = {name: value for name, value in headers[0].extra.items() if name != CUT_BEFORE}
    return {**extra, CUT_BEFORE: cut} if cut else extra
