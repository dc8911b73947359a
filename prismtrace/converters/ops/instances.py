"""Which operations of different ranks belong together, and how long they really transferred.

Operations are matched by order: the k-th operation of a group on one rank is the k-th on all
its ranks, the k-th send to a neighbour is its k-th receive.  Every count is checked step by
step, so that a log that lacks rows is refused rather than matched wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prismtrace.converters.ops.grid import Int64Array, IntArray, RankGrid
from prismtrace.converters.ops.linking import P2P_STREAM, stream_of_rows
from prismtrace.converters.ops.mapping import Scope
from prismtrace.converters.ops.reading import Operations
from prismtrace.errors import AlignmentError
from prismtrace.schema import Kind, Phase, ProcessGroup

__all__ = ["Instances", "match_operations"]


@dataclass(frozen=True, eq=False)
class Members:
    """Rows that are members of sync instances, m of them.

    Attributes:
        rows: int64[m], ascending.
        group, seq: int32[m], int64[m].
        peer: int32[m]; none for collectives.
        transfer_ns: int64[m], time from the arrival of the last member to the row's end; below
            0 where the row ended earlier.
    """

    rows: Int64Array
    group: IntArray
    seq: Int64Array
    peer: IntArray | None
    transfer_ns: Int64Array


@dataclass(frozen=True, eq=False)
class Instances:
    """The sync instances of a log.

    Attributes:
        groups: the process groups.
        members: every row is in at most one of these.
        matched: instances by sort.
    """

    groups: tuple[ProcessGroup, ...]
    members: tuple[Members, ...]
    matched: dict[str, int]

    @property
    def early_ends(self) -> int:
        """How many rows ended before the last member started."""
        return sum(int((found.transfer_ns < 0).sum()) for found in self.members)

    def columns(self, begin: int, end: int) -> dict[str, IntArray]:
        """Columns group, seq, peer and transfer_ns of a range of rows; -1 where they have none."""
        size = end - begin
        group, peer = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        seq, transfer = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
        for found in self.members:
            here = slice(*np.searchsorted(found.rows, (begin, end)))
            rows = found.rows[here] - begin
            group[rows] = found.group[here]
            seq[rows] = found.seq[here]
            transfer[rows] = np.maximum(found.transfer_ns[here], 0)
            if found.peer is not None:
                peer[rows] = found.peer[here]
        return {"group": group, "seq": seq, "peer": peer, "transfer_ns": transfer}


def match_operations(operations: Operations) -> Instances:
    """Match communications across ranks.

    Raises:
        AlignmentError: ranks of a group, or the two ends of a link, logged different operations.
    """
    book = _Groups(operations)
    talking = np.array(
        [rule.kind.is_communication and not rule.kind.is_p2p for rule in operations.rules]
    )
    collectives, instances = _match_collectives(
        operations, np.flatnonzero(talking[operations.operation]), book
    )
    members = [collectives]
    stream = stream_of_rows(operations)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        sends, receives = (
            np.flatnonzero(stream == P2P_STREAM[kind, phase]) for kind in (Kind.SEND, Kind.RECV)
        )
        if len(sends) or len(receives):
            members += _match_pairs(operations, phase, sends, receives, book)
    return Instances(
        groups=book.table(),
        members=tuple(members),
        matched={"collective": instances, "p2p": sum(len(ends.rows) for ends in members[1::2])},
    )


class _Groups:
    """Numbers the groups that are used; members stay in grid order."""

    def __init__(self, operations: Operations) -> None:
        self.grid: RankGrid = operations.grid
        self.numbers: dict[str, int] = {}
        self.found: list[ProcessGroup] = []

    def add(self, name: str, desc: str, ranks: Int64Array) -> int:
        """The number of a group, made when first asked for."""
        if name not in self.numbers:
            self.numbers[name] = len(self.found)
            members = tuple(int(rank) for rank in ranks)
            self.found.append(
                ProcessGroup(id=self.numbers[name], name=name, desc=desc, ranks=members)
            )
        return self.numbers[name]

    def of_scope(self, scope: Scope) -> Int64Array:
        """int64[R], the group of each rank; -1 for ranks that have none in this scope."""
        grid = self.grid
        number = np.full(grid.ranks, -1, np.int64)
        for rank in range(grid.ranks):
            stage, dp, tp = int(grid.stage[rank]), int(grid.dp[rank]), int(grid.tp[rank])
            lane = f"_tp_{tp}" if grid.tp_size > 1 else ""
            at = grid.at
            if scope is Scope.WORLD:
                number[rank] = self.add("world", "all ranks", np.arange(grid.ranks))
            elif scope is Scope.DP:
                number[rank] = self.add(
                    f"dp_{stage}{lane}", f"data parallel, stage {stage}", at[stage, :, tp]
                )
            elif scope is Scope.PP:
                number[rank] = self.add(
                    f"pp_{dp}{lane}", f"pipeline of replica {dp}", at[:, dp, tp]
                )
            elif scope is Scope.TP and grid.tp_size > 1:
                number[rank] = self.add(
                    f"tp_{stage}_{dp}", f"tensor parallel, stage {stage}, replica {dp}",
                    at[stage, dp, :],
                )  # fmt: skip
            elif scope is Scope.PP_ENDS and stage in (0, grid.pp_size - 1):
                ends = at[[0, -1], dp, tp] if grid.pp_size > 1 else at[:, dp, tp]
                number[rank] = self.add(
                    f"embedding_{dp}{lane}", f"first and last stage of replica {dp}", ends
                )
        return number

    def table(self) -> tuple[ProcessGroup, ...]:
        """All groups, by number."""
        return tuple(self.found)


def _group_of(operations: Operations, rows: Int64Array, book: _Groups) -> IntArray:
    """int32[m], the group of every collective, or -1.

    A tensor-parallel collective of a log with one rank a team has no partners in it.
    """
    rank = operations.rank_of(rows)
    code = operations.operation[rows]
    group = np.full(len(rows), -1, np.int32)
    used = np.unique(code)
    scopes = {
        int(number): operations.rules[number].scope
        for number in used
        if operations.rules[number].kind.is_communication
    }
    if operations.grid.pp_size > 1 or Scope.PP in scopes.values():
        book.of_scope(Scope.PP)
    book.of_scope(Scope.DP)
    for number, scope in scopes.items():
        if scope is None:
            continue
        chosen = np.flatnonzero(code == number)
        group[chosen] = book.of_scope(scope)[rank[chosen]]
        lost = np.flatnonzero(group[chosen] < 0)
        if scope is Scope.PP_ENDS and len(lost):
            raise AlignmentError(
                "a rank between the first and the last stage logged an operation of these two",
                where=operations.place(int(rows[chosen[lost[0]]])),
                hint="check the scope of the operation, or which column holds the stage",
            )
    return group


def _occurrence(key: IntArray) -> Int64Array:
    """How often each value occurred before, in the order of the array."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    start = np.repeat(first, np.diff(first, append=len(ordered)))
    number = np.empty(len(key), np.int64)
    number[order] = np.arange(len(key)) - start
    return number


def _match_collectives(
    operations: Operations, rows: Int64Array, book: _Groups
) -> tuple[Members, int]:
    """The members of collectives, and how many instances these are."""
    group = _group_of(operations, rows, book)
    rows, group = rows[group >= 0], group[group >= 0]
    groups = len(book.found)
    seq = _occurrence(operations.rank_of(rows) * np.int64(groups) + group)
    # The instances of a group have consecutive numbers.
    longest = np.zeros(groups, np.int64)
    np.maximum.at(longest, group, seq + 1)
    base = np.concatenate([[0], np.cumsum(longest)])
    instance = base[group] + seq
    size = np.array([len(found.ranks) for found in book.found], np.int64)
    present = np.bincount(instance, minlength=base[-1])
    expected = np.repeat(size, longest)
    first = np.full(base[-1], -1, np.int64)
    first[instance[::-1]] = rows[::-1]
    like = first[instance]
    differs = (operations.operation[rows] != operations.operation[like]) | (
        operations.step_of(rows) != operations.step_of(like)
    )
    wrong = np.flatnonzero(present != expected)
    if differs.any():
        at = int(differs.argmax())
        _refuse_different(operations, int(rows[at]), int(like[at]), book.found[group[at]])
    if len(wrong):
        row = int(first[wrong[0]])
        _refuse_fewer(operations, row, book.found[group[np.searchsorted(rows, row)]])
    arrival = np.full(base[-1], np.iinfo(np.int64).min)
    np.maximum.at(arrival, instance, operations.start_ns[rows])
    transfer = operations.end_ns[rows] - arrival[instance]
    return Members(rows, group, seq, None, transfer), int(base[-1])


_LACKS_ROWS = "the log lacks rows of some rank, or an operation has the wrong scope"


def _refuse_different(operations: Operations, row: int, like: int, group: ProcessGroup) -> None:
    raise AlignmentError(
        "ranks of one group logged different operations in the same place",
        where=f"group={group.name}: {operations.place(row)} against {operations.place(like)}",
        hint=_LACKS_ROWS,
    )


def _refuse_fewer(operations: Operations, row: int, group: ProcessGroup) -> None:
    raise AlignmentError(
        "some ranks of a group logged fewer operations than others",
        where=f"group={group.name}: only some have {operations.place(row)}",
        hint=_LACKS_ROWS,
    )


def _match_pairs(
    operations: Operations, phase: Phase, sends: Int64Array, receives: Int64Array, book: _Groups
) -> list[Members]:
    """The sending and the receiving members of a phase."""
    grid = operations.grid
    if grid.pp_size == 1:
        raise AlignmentError(
            "sends and receives along the pipeline, but there is only one stage",
            where=operations.place(int((sends if len(sends) else receives)[0])),
            hint="say with --columns which column holds the stage",
        )
    direction = 1 if phase is Phase.FORWARD else -1
    downstream = grid.at[(grid.stage + direction) % grid.pp_size, grid.dp, grid.tp]
    upstream = grid.at[(grid.stage - direction) % grid.pp_size, grid.dp, grid.tp]
    sender, receiver = operations.rank_of(sends), operations.rank_of(receives)
    _require_both_ends(operations, phase, sends, receives, upstream)
    # Rows are in order of rank and time: the k-th of a rank is k behind its first.
    sent, received = (np.searchsorted(rank, np.arange(grid.ranks)) for rank in (sender, receiver))
    send_seq = np.arange(len(sends)) - sent[sender]
    receive_seq = np.arange(len(receives)) - received[receiver]
    partner = receives[received[downstream[sender]] + send_seq]
    sender_of = sends[sent[upstream[receiver]] + receive_seq]
    of_rank = _pipeline_groups(operations, phase, book).astype(np.int32)

    def ends(
        rows: Int64Array, others: Int64Array, rank: IntArray, seq: Int64Array, peers: Int64Array
    ) -> Members:
        ready = np.maximum(operations.start_ns[rows], operations.start_ns[others])
        transfer = operations.end_ns[rows] - ready
        return Members(rows, of_rank[rank], seq, peers.astype(np.int32)[rank], transfer)

    return [
        ends(sends, partner, sender, send_seq, downstream),
        ends(receives, sender_of, receiver, receive_seq, upstream),
    ]


def _pipeline_groups(operations: Operations, phase: Phase, book: _Groups) -> Int64Array:
    """int64[R], the group for sends and receives of a phase.

    With two stages and several chunks both phases use both directions of the same link, and
    would share their sequence numbers: then gradients get a group of their own.
    """
    grid = operations.grid
    if grid.pp_size != 2 or int(operations.chunk.max()) == 0 or phase is Phase.FORWARD:
        return book.of_scope(Scope.PP)
    number = np.full(grid.ranks, -1, np.int64)
    for rank in range(grid.ranks):
        dp, tp = int(grid.dp[rank]), int(grid.tp[rank])
        lane = f"_tp_{tp}" if grid.tp_size > 1 else ""
        number[rank] = book.add(
            f"pp_{dp}{lane}_gradients", f"pipeline of replica {dp}, gradients", grid.at[:, dp, tp]
        )
    return number


def _require_both_ends(
    operations: Operations,
    phase: Phase,
    sends: Int64Array,
    receives: Int64Array,
    upstream: Int64Array,
) -> None:
    """In every step a rank receives as many messages as its neighbour sent."""
    shape = (operations.grid.ranks, len(operations.steps))
    sent, received = (operations.counts(rows).reshape(shape) for rows in (sends, receives))
    differ = np.argwhere(received != sent[upstream])
    if len(differ):
        rank, step = map(int, differ[0])
        raise AlignmentError(
            f"{received[rank, step]} {phase} receives, but {sent[upstream[rank], step]} {phase} "
            "sends of the neighbour stage",
            where=f"{operations.place_of(rank, step)}, "
            f"neighbour rank={operations.grid.source[upstream[rank]]}",
            hint="the log lacks rows, or stages are mapped wrongly",
        )
