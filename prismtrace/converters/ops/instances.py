"""Which operations of different ranks belong together, and how long they really transferred.

Operations are matched by order: the k-th operation of a group on one rank is the k-th on all
its ranks, the k-th send to a neighbour is its k-th receive.  Every count is checked step by
step, so that a log that lacks rows is refused rather than matched wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prismtrace.converters.ops.grid import Int64Array, IntArray, RankGrid
from prismtrace.converters.ops.mapping import Scope
from prismtrace.converters.ops.reading import Operations
from prismtrace.errors import AlignmentError
from prismtrace.schema import Phase, ProcessGroup

__all__ = ["Instances", "match_operations"]


@dataclass(frozen=True, eq=False)
class Instances:
    """The sync instances of a log.

    Attributes:
        groups: the process groups.
        group, seq, peer: int64[n], -1 where a row has none.
        transfer_ns: int64[n], time from the arrival of the last member to the row's end, not
            below 0; -1 for rows in no instance.
        early_ends: rows that ended before the last member started.
        matched: instances by sort.
    """

    groups: tuple[ProcessGroup, ...]
    group: Int64Array
    seq: Int64Array
    peer: Int64Array
    transfer_ns: Int64Array
    early_ends: int
    matched: dict[str, int]


def match_operations(operations: Operations, streams: list[Int64Array]) -> Instances:
    """Match communications across ranks.

    Args:
        operations: the rows.
        streams: rows of each stream, as `linking.rows_of_streams` returns them.

    Raises:
        AlignmentError: ranks of a group, or the two ends of a link, logged different operations.
    """
    book = _Groups(operations)
    group = np.full(operations.rows, -1, np.int64)
    seq = np.full(operations.rows, -1, np.int64)
    peer = np.full(operations.rows, -1, np.int64)
    ready = np.full(operations.rows, -1, np.int64)
    talking = np.array(
        [rule.kind.is_communication and not rule.kind.is_p2p for rule in operations.rules]
    )
    collectives = np.flatnonzero(talking[operations.operation])
    collectives = _grouped(operations, collectives, book, group)
    instances = _match_collectives(operations, collectives, group, seq, ready, book)
    pairs = 0
    for phase, send_rows, recv_rows in (
        (Phase.FORWARD, streams[2], streams[3]),
        (Phase.BACKWARD, streams[4], streams[5]),
    ):
        pairs += _match_pairs(
            operations, phase, send_rows, recv_rows, (group, seq, peer, ready), book
        )
    matched = ready >= 0
    transfer = np.where(matched, operations.end_ns - ready, -1)
    early = matched & (transfer < 0)
    transfer[early] = 0
    return Instances(
        groups=book.table(),
        group=group,
        seq=seq,
        peer=peer,
        transfer_ns=transfer,
        early_ends=int(early.sum()),
        matched={"collective": instances, "p2p": pairs},
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


def _grouped(
    operations: Operations, rows: Int64Array, book: _Groups, group: Int64Array
) -> Int64Array:
    """Set the group of collectives; returns the rows that have one.

    A tensor-parallel collective of a log with one rank a team has no partners in it.
    """
    rank = operations.rank[rows]
    code = operations.operation[rows]
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
        group[rows[chosen]] = book.of_scope(scope)[rank[chosen]]
        lost = np.flatnonzero(group[rows[chosen]] < 0)
        if scope is Scope.PP_ENDS and len(lost):
            raise AlignmentError(
                "a rank between the first and the last stage logged an operation of these two",
                where=operations.place(int(rows[chosen[lost[0]]])),
                hint="check the scope of the operation, or which column holds the stage",
            )
    return rows[group[rows] >= 0]


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
    operations: Operations,
    rows: Int64Array,
    group: Int64Array,
    seq: Int64Array,
    ready: Int64Array,
    book: _Groups,
) -> int:
    if not len(rows):
        return 0
    rank = operations.rank[rows]
    groups = len(book.found)
    seq[rows] = _occurrence(rank * groups + group[rows])
    # The instances of a group have consecutive numbers.
    longest = np.zeros(groups, np.int64)
    np.maximum.at(longest, group[rows], seq[rows] + 1)
    base = np.concatenate([[0], np.cumsum(longest)])
    instance = base[group[rows]] + seq[rows]
    size = np.array([len(found.ranks) for found in book.found])
    present = np.bincount(instance, minlength=base[-1])
    expected = np.repeat(size, longest)
    first = np.full(base[-1], -1, np.int64)
    first[instance[::-1]] = rows[::-1]
    like = first[instance]
    differs = (operations.operation[rows] != operations.operation[like]) | (
        operations.step[rows] != operations.step[like]
    )
    wrong = np.flatnonzero(present != expected)
    if differs.any() or len(wrong):
        _refuse_collectives(operations, rows, group, like, differs, first, wrong, book)
    arrival = np.full(base[-1], np.iinfo(np.int64).min)
    np.maximum.at(arrival, instance, operations.start_ns[rows])
    ready[rows] = arrival[instance]
    return int(base[-1])


def _refuse_collectives(
    operations: Operations,
    rows: Int64Array,
    group: Int64Array,
    like: Int64Array,
    differs: IntArray,
    first: Int64Array,
    wrong: IntArray,
    book: _Groups,
) -> None:
    """Name the first place at which the ranks of a group stop to agree."""
    hint = "the log lacks rows of some rank, or an operation has the wrong scope"
    if differs.any():
        at = int(differs.argmax())
        raise AlignmentError(
            "ranks of one group logged different operations in the same place",
            where=f"group={book.found[int(group[rows[at]])].name}: "
            f"{operations.place(int(rows[at]))} against {operations.place(int(like[at]))}",
            hint=hint,
        )
    row = int(first[wrong[0]])
    raise AlignmentError(
        "some ranks of a group logged fewer operations than others",
        where=f"group={book.found[int(group[row])].name}: only some have {operations.place(row)}",
        hint=hint,
    )


def _match_pairs(
    operations: Operations,
    phase: Phase,
    sends: Int64Array,
    receives: Int64Array,
    columns: tuple[Int64Array, Int64Array, Int64Array, Int64Array],
    book: _Groups,
) -> int:
    if not len(sends) and not len(receives):
        return 0
    group, seq, peer, ready = columns
    grid = operations.grid
    if grid.pp_size == 1:
        raise AlignmentError(
            "sends and receives along the pipeline, but there is only one stage",
            where=operations.place(int((*sends, *receives)[0])),
            hint="say with --columns which column holds the stage",
        )
    direction = 1 if phase is Phase.FORWARD else -1
    downstream = grid.at[(grid.stage + direction) % grid.pp_size, grid.dp, grid.tp]
    upstream = grid.at[(grid.stage - direction) % grid.pp_size, grid.dp, grid.tp]
    sender = operations.rank[sends]
    receiver = operations.rank[receives]
    _require_both_ends(operations, phase, sends, receives, upstream)

    of_rank = _pipeline_groups(operations, phase, book)
    for rows, rank, other in ((sends, sender, downstream), (receives, receiver, upstream)):
        group[rows] = of_rank[rank]
        peer[rows] = other[rank]
        # Rows are in order of rank and time: the k-th of a rank is k behind its first.
        first = np.searchsorted(rank, np.arange(grid.ranks))
        seq[rows] = np.arange(len(rows)) - first[rank]
    # Both lists in the order (receiver, seq).
    first = np.searchsorted(receiver, np.arange(grid.ranks))
    place = first[downstream[sender]] + seq[sends]
    partner = receives[place]
    last = np.maximum(operations.start_ns[sends], operations.start_ns[partner])
    ready[sends] = last
    ready[partner] = last
    return len(sends)


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
    sent, received = (
        np.bincount(operations.segment[rows], minlength=operations.segments).reshape(shape)
        for rows in (sends, receives)
    )
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
