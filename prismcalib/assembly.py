"""Blocks of rows, in any order, become one graph over all ranks of a job.

All arrays are made once, in their final size, and every block is copied to its place: rows by
(rank, index).  Nothing is sorted and no table of the whole job exists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np

from prismcalib.errors import MergeInputError, MissingMemberError, StructureError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.instances import Channels, Members, marks, number
from prismcalib.rows import ABSENT, KINDS, Rows, UInt8Array, ranks_text
from prismtrace.schema import INDEX_BITS, Kind

__all__ = ["Assembly", "StepRuns", "Values"]

_BLOCK_ROWS = 1 << 20
_ALL_TO_ALL = KINDS.index(Kind.ALL_TO_ALL)
_RECV, _SEND = KINDS.index(Kind.RECV), KINDS.index(Kind.SEND)


@dataclass(frozen=True, eq=False, kw_only=True)
class Values:
    """What is known of n rows, apart from their structure.

    Attributes:
        duration: int64[n], as in `Graph`.
        source: uint8[n], code of the transfer source; ABSENT for rows that sync with nobody.
        gap: int64[n], idle time after the last dependency, whichever that is; None: zeros.
        release: int64[n], earliest start of rows without dependencies; None: zeros.
        spread: int64[n], largest minus least of several samples; None: there was one.
    """

    duration: Int64Array
    source: UInt8Array
    gap: Int64Array | None = None
    release: Int64Array | None = None
    spread: Int64Array | None = None


@dataclass(frozen=True, eq=False)
class StepRuns:
    """Where steps begin: `row` int64[k], ascending; rows up to the next one are of `step` (or -1)."""

    row: Int64Array
    step: Int32Array

    def ends(self, end_ns: Int64Array) -> dict[int, int]:
        """Last end of every step, over all ranks, in order of the steps."""
        if not len(self.row):
            return {}
        latest = np.maximum.reduceat(end_ns, self.row)
        steps = np.unique(self.step[self.step >= 0])
        return {int(step): int(latest[self.step == step].max()) for step in steps}


@dataclass(frozen=True, eq=False)
class _Edges:
    row: int
    deps: Int32Array
    lags: Int64Array | None


@dataclass(frozen=True, eq=False)
class _Members:
    """Members of instances in some rows: their row in the job, rank, channel, seq, signature."""

    row: Int32Array
    rank: Int32Array
    channel: Int32Array
    seq: Int64Array
    signature: Int32Array

    @classmethod
    def joined(cls, parts: list[_Members]) -> _Members:
        names = [field.name for field in fields(cls)]
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        return cls(**{name: np.concatenate(column) for name, column in columns.items()})


class Assembly:
    """Arrays of a job under construction.

    Args:
        counts: rows of every rank that takes part.
        channels: of the job; decides how many members an instance expects.
    """

    def __init__(self, counts: Mapping[int, int], channels: Channels) -> None:
        ranks = sorted(counts)
        sizes = np.array([counts[rank] for rank in ranks], np.int64)
        self.ranks = ranks
        self.channels = channels
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        self.base = dict(zip(ranks, self._bounds[:-1].tolist(), strict=True))
        self.rows = rows = int(sizes.sum())
        self.duration = np.zeros(rows, np.int64)
        self.source = np.full(rows, ABSENT, np.uint8)
        self.spread: Int64Array | None = None
        self.gaps_ns = 0
        self.lags_are_gaps = True
        """Whether all dependencies of a row have the same lag."""
        self._release: Int64Array | None = None
        self._offsets = np.zeros(rows + 1, np.int64)
        self._members: list[_Members] = []
        self._edges: list[_Edges] = []
        self._far: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        self._runs: list[tuple[Int64Array, Int32Array]] = []

    def place(self, rows: Rows, members: Members, values: Values) -> None:
        """Copy whole ranks to their places."""
        if values.gap is not None:
            self.gaps_ns += int(values.gap.sum())
        member_row = np.empty(len(members.row), np.int32)
        for first, last, target in self._stretches(rows):
            part, goal = slice(first, last), slice(target, target + last - first)
            self.duration[goal] = values.duration[part]
            self.source[goal] = values.source[part]
            here = slice(*np.searchsorted(members.row, [first, last]))
            member_row[here] = members.row[here] + (target - first)
            counts = np.diff(rows.offsets[first : last + 1])
            self._offsets[target + 1 : target + last - first + 1] = counts
            edges = slice(int(rows.offsets[first]), int(rows.offsets[last]))
            owner = np.repeat(np.arange(target, target + last - first, dtype=np.int32), counts)
            lags = None if rows.lags is None else rows.lags[edges]
            self.lags_are_gaps &= lags is None and not len(rows.far_row)
            if values.gap is not None and values.gap[part].any():
                gaps = np.repeat(values.gap[part], counts)
                lags = gaps if lags is None else gaps + lags
            self._edges.append(_Edges(target, owner - rows.distance[edges], lags))
            self._note_optional(values, part, goal)
            changes = np.flatnonzero(
                (np.diff(rows.step[part], prepend=-2) != 0)
                | (np.diff(rows.rank[part], prepend=-1) != 0)
            )
            self._runs.append((changes + target, rows.step[part][changes]))
            far = (rows.far_row >= first) & (rows.far_row < last)
            if far.any():
                shifted = rows.far_row[far] + (target - first)
                self._far.append((shifted, rows.far_id[far], rows.far_lag[far]))
        self._members.append(
            _Members(
                row=member_row,
                rank=rows.rank[members.row],
                channel=self.channels.of(members),
                seq=members.seq,
                signature=signatures(rows, members.row),
            )
        )

    def graph(self, labels: Callable[[int], str]) -> Graph:
        """The graph; afterwards nothing more can be placed.

        Raises:
            MissingMemberError, MergeInputError: members of an instance are absent, or are
                there twice, or are not of its group.
            StructureError: members of one instance differ in kind, bytes or dtype.
        """
        np.cumsum(self._offsets, out=self._offsets)
        instance, size = self._instances(labels)
        dep_rows, lags = self._joined_edges()
        offsets = self._offsets
        if self._far:
            offsets, dep_rows, lags = self._with_far_edges(dep_rows, lags)
        return Graph(
            duration_ns=self.duration,
            dep_offsets=offsets,
            dep_rows=dep_rows,
            dep_lag_ns=lags if lags is not None and lags.any() else None,
            instance=instance,
            instance_size=size,
            release_ns=self._release,
            labels=labels,
        )

    def step_runs(self) -> StepRuns:
        """Where the steps of every rank begin."""
        row = np.concatenate([part for part, _ in self._runs])
        step = np.concatenate([part for _, part in self._runs])
        order = np.argsort(row)
        return StepRuns(row[order], step[order])

    def count(self, rank: int) -> int:
        """Number of rows of a rank."""
        place = bisect_left(self.ranks, rank)
        return int(self._bounds[place + 1] - self._bounds[place])

    def rank_of(self, row: int) -> int:
        """The rank a row belongs to."""
        return self.ranks[int(np.searchsorted(self._bounds, row, side="right")) - 1]

    # Placing ----------------------------------------------------------------------------

    def _stretches(self, rows: Rows) -> Iterator[tuple[int, int, int]]:
        """Ranks that stay neighbours, as one: first row, row after the last, target row."""
        pending: tuple[int, int, int] | None = None
        for rank, first, last in rows.rank_runs:
            target = self.base[rank]
            if pending is not None:
                begin, end, goal = pending
                if end == first and goal + first - begin == target:
                    pending = (begin, last, goal)
                    continue
                yield pending
            pending = (first, last, target)
        if pending is not None:
            yield pending

    def _note_optional(self, values: Values, part: slice, goal: slice) -> None:
        """Copy what most jobs lack; the arrays are made when first needed."""
        if values.release is not None and values.release[part].any():
            if self._release is None:
                self._release = np.zeros(self.rows, np.int64)
            self._release[goal] = values.release[part]
        if values.spread is not None:
            if self.spread is None:
                self.spread = np.zeros(self.rows, np.int64)
            self.spread[goal] = values.spread[part]

    # Edges ------------------------------------------------------------------------------

    def _joined_edges(self) -> tuple[Int32Array, Int64Array | None]:
        total = int(self._offsets[-1])
        deps = np.empty(total, np.int32)
        lagged = any(edges.lags is not None for edges in self._edges)
        lags = np.zeros(total, np.int64) if lagged else None
        while self._edges:
            # Freed one by one, so that edges are never held twice.
            edges = self._edges.pop()
            first = int(self._offsets[edges.row])
            deps[first : first + len(edges.deps)] = edges.deps
            if lags is not None and edges.lags is not None:
                lags[first : first + len(edges.deps)] = edges.lags
        return deps, lags

    def _with_far_edges(
        self, deps: Int32Array, lags: Int64Array | None
    ) -> tuple[Int64Array, Int32Array, Int64Array]:
        """The edges with those between ranks added behind the others of a row."""
        owner = np.concatenate([row for row, _, _ in self._far])
        wanted = np.concatenate([far for _, far, _ in self._far])
        rank, index = wanted >> INDEX_BITS, wanted & ((1 << INDEX_BITS) - 1)
        place = np.searchsorted(self.ranks, rank)
        place = np.minimum(place, len(self.ranks) - 1)
        target = self._bounds[place] + index
        absent = (np.array(self.ranks)[place] != rank) | (target >= self._bounds[place + 1])
        if absent.any():
            row = int(owner[absent.argmax()])
            rank_of_row = self.rank_of(row)
            raise MergeInputError(
                "a node depends on a node that is not in the trace",
                where=f"rank={rank_of_row} index={row - self.base[rank_of_row]}",
                hint="slices of all ranks that this job's ranks depend on are needed",
            )
        near = np.repeat(np.arange(self.rows), np.diff(self._offsets))
        order = np.argsort(np.concatenate([near, owner]), kind="stable")
        far_lags = np.concatenate([lag for _, _, lag in self._far])
        near_lags = np.zeros(len(deps), np.int64) if lags is None else lags
        counts = np.diff(self._offsets) + np.bincount(owner, minlength=self.rows)
        return (
            np.concatenate([[0], np.cumsum(counts)]),
            np.concatenate([deps, target.astype(np.int32)])[order],
            np.concatenate([near_lags, far_lags])[order],
        )

    # Instances --------------------------------------------------------------------------

    def _instances(self, labels: Callable[[int], str]) -> tuple[Int32Array, Int32Array]:
        """Instance of every row, and the members each expects; frees what it used up."""
        members = _Members.joined(self._members)
        self._members = []
        number_of, count = number(members.channel, members.seq, self.channels.count)
        present = np.bincount(number_of, minlength=count)
        if len(present) and not present.all():
            # Sequence numbers that nobody used.
            renumbered = np.cumsum(present > 0) - 1
            number_of = renumbered[number_of]
            count = int(renumbered[-1]) + 1
            present = present[present > 0]
        instance = np.full(self.rows, -1, np.int32)
        instance[members.row] = number_of
        channel_of = np.zeros(count, np.int32)
        channel_of[number_of] = members.channel
        size, total = self.channels.expectations()
        found = np.zeros(count, np.int64)
        for first in range(0, len(number_of), _BLOCK_ROWS):
            part = slice(first, first + _BLOCK_ROWS)
            np.add.at(found, number_of[part], marks(members.rank[part]))
        wrong = np.flatnonzero((present != size[channel_of]) | (found != total[channel_of]))
        if len(wrong):
            rows = np.sort(members.row[number_of == wrong[0]])
            raise self._membership_error(rows, int(channel_of[wrong[0]]), len(wrong), labels)
        _check_signatures(members, number_of, count, labels)
        return instance, size[channel_of]

    def _membership_error(
        self, rows: Int32Array, channel: int, wrong: int, labels: Callable[[int], str]
    ) -> MergeInputError | MissingMemberError:
        ranks = [self.rank_of(int(row)) for row in rows]
        expected = self.channels.expected(channel)
        what = labels(int(rows[0]))
        more = f"; {wrong - 1} more operations are incomplete" if wrong > 1 else ""
        doubled = [rank for rank in sorted(set(ranks)) if ranks.count(rank) > 1]
        if doubled:
            return MergeInputError(
                f"rank {doubled[0]} takes part twice in one operation: {what}{more}",
                hint="run `prismtrace validate` on its slice",
            )
        strangers = sorted(set(ranks) - set(expected))
        if strangers:
            return MergeInputError(
                f"rank {strangers[0]} takes part in an operation of a group it is not in: "
                f"{what}{more}",
                hint="the slices come from jobs with other groups, or ranks were renumbered",
            )
        return MissingMemberError(
            f"an operation is seen on {len(ranks)} of {len(expected)} ranks{more}",
            where=f"{what} missing ranks={ranks_text(set(expected) - set(ranks))}",
            hint="these ranks were measured over a shorter window, or their slice was cut: "
            "measure all ranks over the same steps",
            rows=tuple(int(row) for row in rows),
        )


def _check_signatures(
    members: _Members, number_of: Int64Array, count: int, labels: Callable[[int], str]
) -> None:
    """Members of one operation must agree about what it is."""
    first = np.zeros(count, np.int32)
    first[number_of] = members.signature
    wrong = np.flatnonzero(first[number_of] != members.signature)
    if not len(wrong):
        return
    involved = np.flatnonzero(number_of == number_of[wrong].min())
    involved = involved[np.argsort(members.row[involved])]
    signature = members.signature[involved]
    other = involved[(signature != signature[0]).argmax()]
    raise StructureError(
        "two ranks disagree about one operation: "
        f"{labels(int(members.row[involved[0]]))} | {labels(int(members.row[other]))}",
        hint="the slices come from different jobs or versions of the program",
    )


def signatures(rows: Rows, chosen: Int64Array) -> Int32Array:
    """Of some rows, a number equal for members of one operation.

    It comes from kind, dtype and, unless ranks may differ in it, bytes.
    """
    kind, dtype = rows.kind[chosen], rows.dtype[chosen].astype(np.int64)
    payload = np.where(kind == _ALL_TO_ALL, np.int64(-1), rows.bytes[chosen])
    kind = np.where(kind == _RECV, np.uint8(_SEND), kind).astype(np.int64)
    mixed = (payload + 1) * np.int64(0x2545F4914F6CDD1D) + kind * 256 + dtype
    return (mixed ^ (mixed >> np.int64(32))).astype(np.int32)
