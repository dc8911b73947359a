"""Following a running program along its graph: which node is this operation?

The graph of a job says what each rank communicates, in order. Of a sandbox rank the program
says it again, and this finds the place of each operation: what the graph calls it, in which step
it is, and which data belong to it. A program that does something else is refused at once, with its
own line. One that runs for more steps than the graph has repeats the last one; one that runs for
fewer skips to what comes after them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

from prismreplay.errors import MismatchError, PlanError
from prismreplay.plan import OpKey
from prismreplay.runtime.operations import MESSAGES, Call, Op
from prismtrace.schema import LOCAL_KINDS, DType, ProcessGroup
from prismtrace.spool import TAG
from prismtrace.trace import Trace

__all__ = ["Followed", "GraphFollower", "Placed", "followers_of"]

_AFTER = -1
_UNEVEN = (
    Call.ALL_GATHER,
    Call.REDUCE_SCATTER,
    Call.ALL_TO_ALL,
    Call.ALL_TO_ALL_SINGLE,
    Call.SEND,
    Call.RECV,
)
"""Calls whose sizes need not be the same on all members, or in every run."""


class _Node(NamedTuple):
    """A communication of the rank in the graph."""

    kind: str
    seq: int
    peer: int | None
    bytes: int
    step: int | None
    transfer_ns: int
    source: str | None


class Placed(NamedTuple):
    """Where an operation is in the graph.

    `round_` counts repetitions of the last step, 0 in the graph itself. `data_seq` is the number
    under which a recording of the graph's run holds it. `peer` is the partner, also of a receive
    from anyone. `transfer_ns` is how long it takes once all are there. `otherwise`: it seems to
    follow the training, but should the training go on, it is there. `skipping`: the program has
    left steps of the graph out before it, so that the plan does not know when it could be.
    """

    key: OpKey
    round_: int
    data_seq: int
    peer: int | None
    step: int | None
    transfer_ns: int
    transfer_source: str | None
    otherwise: Placed | None = None
    skipping: bool = False


@dataclass
class _Channel:
    """Operations of one kind of place, in the order in which the program makes them.

    `last` is where the last step begins and ends; behind it is what follows the training. `done`
    operations of steps and `after` of those that follow were made.
    """

    nodes: list[_Node]
    last: tuple[int, int]
    done: int = 0
    after: int = 0

    def candidates(self, doubtful: int) -> Iterator[tuple[int, int]]:
        """Nodes that the next operation may be, likeliest first, with their rounds.

        Those that follow the last step have round -1. If the training goes on, so many
        `doubtful` operations that seemed to follow it were its next ones.
        """
        begin, end = self.last
        following = range(end + self.after, len(self.nodes))
        if self.done < end:
            yield self.done, 0
        elif following:
            yield following[0], _AFTER
        if self.done >= end > begin:
            again, offset = divmod(self.done + doubtful - end, end - begin)
            yield begin + offset, again + 1
        for number in following:
            yield number, _AFTER

    def take(self, number: int, round_: int) -> None:
        """The next operation is this candidate."""
        if round_ == _AFTER:
            self.after = number + 1 - self.last[1]
        else:
            self.done += 1


class Followed(NamedTuple):
    """How a rank has followed its graph; see `GraphFollower` for the numbers."""

    repeated: int
    missing: int
    resized: int


@dataclass
class GraphFollower:
    """Follows one rank.

    Attributes:
        rank: global rank.
        repeated: operations of steps that the graph does not have.
        resized: operations that carried another number of bytes than in the graph, where that
            may be so: uneven lists, objects, messages, and steps that the graph does not have.
    """

    rank: int
    groups: dict[tuple[tuple[int, ...], str], int]
    channels: dict[Hashable, _Channel]
    repeated: int = 0
    resized: int = 0
    _doubtful: list[tuple[_Channel, int]] = field(default_factory=list)
    _messages: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)

    def place(self, op: Op) -> Placed:
        """Find the node of the operation that the program makes now.

        Raises:
            PlanError: the graph has another one there, or none.
            MismatchError: the graph has a collective there that carries other sizes.
        """
        group = self.groups.get((op.group.ranks, op.group.label))
        if group is None:
            raise self._unlike(op, "there is no such group in the graph")
        channel = self.channels.get(_channel_key(group, op.call, op.peer))
        if channel is None:
            raise self._unlike(op, "the graph has none in this group")
        nodes, done = channel.nodes, channel.done
        if done < channel.last[1] and not self._doubtful:
            # As it nearly always is: the next one.
            node = nodes[done]
            if node.bytes == op.payload_bytes and _fits(node, op):
                channel.done = done + 1
                return self._placed(group, node, 0, op)
        doubtful = sum(one is channel for one, _ in self._doubtful)
        candidates = list(channel.candidates(doubtful))
        fitting = [one for one in candidates if _fits(nodes[one[0]], op)]
        if not fitting:
            first = next(iter(candidates), None)
            has = "the graph ends there" if first is None else f"it is {nodes[first[0]].kind} there"
            raise self._unlike(op, has)
        exact = [one for one in fitting if nodes[one[0]].bytes == op.payload_bytes]
        number, round_ = (exact or fitting)[0]
        if not exact:
            if round_ <= 0 and not _may_vary(op):
                raise self._other_size(op, nodes[number].bytes)
            self.resized += 1
        placed = self._placed(group, nodes[number], max(0, round_), op)
        again = next((one for one in fitting if one[1] > 0), None)
        if round_ == _AFTER and again is not None:
            self._doubtful.append((channel, channel.after))
            placed = placed._replace(otherwise=_moved(placed, nodes[again[0]], again[1]))
        if round_ == _AFTER and channel.done < channel.last[1]:
            placed = placed._replace(skipping=True)
        channel.take(number, round_)
        if round_ > 0:
            self.repeated += 1
            self._go_on()
        return placed

    def coming(self, op: Op, count: int) -> Iterator[_Node]:
        """Nodes of the next operations like the one that was placed last: of its group, or messages
        that go its way. If the program goes on beyond the graph, those of the last step again.
        """
        group = self.groups.get((op.group.ranks, op.group.label))
        channel = self.channels.get(_channel_key(group or 0, op.call, op.peer))
        if group is None or channel is None:
            return
        begin, end = channel.last
        for number in range(channel.done, channel.done + count):
            if number < end:
                yield channel.nodes[number]
            elif end > begin:
                yield channel.nodes[begin + (number - end) % (end - begin)]

    @property
    def missing(self) -> int:
        """Operations of the graph that the program has not made."""
        return sum(max(0, len(one.nodes) - one.done - one.after) for one in self.channels.values())

    def _go_on(self) -> None:
        """The training goes on beyond the graph: so did what seemed to come after it."""
        for channel, after in self._doubtful:
            channel.after = min(channel.after, after)
            channel.done += 1
        self._doubtful.clear()

    def _placed(self, group: int, node: _Node, round_: int, op: Op) -> Placed:
        sender, receiver, data_seq = -1, -1, node.seq
        if op.call in MESSAGES:
            if node.peer is None:
                raise self._unlike(op, "the graph does not know its sender")
            ends = (self.rank, node.peer) if op.call is Call.SEND else (node.peer, self.rank)
            sender, receiver = ends
            count = self._messages[group, *ends, op.tag]
            self._messages[group, *ends, op.tag] = count + 1
            if not round_:
                data_seq = op.tag * TAG + count
        return Placed(
            key=OpKey(group, node.seq, sender, receiver),
            round_=round_,
            data_seq=data_seq,
            peer=node.peer,
            step=node.step,
            transfer_ns=node.transfer_ns,
            transfer_source=node.source,
        )

    def _unlike(self, op: Op, has: str) -> PlanError:
        number = "" if op.seq is None else f" as operation {op.seq}"
        name = op.group.desc or op.group.name
        return PlanError(
            f"rank {self.rank} makes {op.call.value} of {op.payload_bytes:,} bytes{number} of "
            f"group {name!r}: {has}",
            where=op.site or None,
            hint="the program does something else than when its graph was made; collect it again "
            "with the same arguments",
        )

    def _other_size(self, op: Op, has: int) -> MismatchError:
        number = "" if op.seq is None else f", operation {op.count}"
        other = next((one for one in op.group.ranks if one != self.rank), self.rank)
        at = f" at {op.site}" if op.site else ""
        return MismatchError(
            f"ranks {self.rank} and {other} disagree on the size of {op.call.value}: "
            f"{op.payload_bytes:,} bytes on rank {self.rank}{at}, {has:,} bytes on rank {other} in "
            "the graph",
            where=f"group {op.group.desc or op.group.name!r}{number}",
            hint="a true backend would hang here, or mix up data; if all ranks are to do so now, "
            "collect the graph again with the same arguments",
        )


def _may_vary(op: Op) -> bool:
    """Whether the graph's number of bytes says nothing about this run's.

    Members of lists may be uneven, objects travel as bytes, and of a message the partner was told
    its size before.
    """
    return op.call in _UNEVEN or op.dtype is DType.UINT8


def _fits(node: _Node, op: Op) -> bool:
    if node.kind != op.kind.value:
        return False
    other = op.peer if op.call in MESSAGES else op.root
    return other is None or node.peer is None or node.peer == other


def _moved(placed: Placed, node: _Node, round_: int) -> Placed:
    return placed._replace(key=placed.key._replace(seq=node.seq), round_=round_, step=node.step)


def _channel_key(group: int, call: Call, peer: int | None) -> Hashable:
    # All receives of a group together: one from anyone may stand among others.
    if call is Call.SEND:
        return group, "send", peer
    return group, "recv" if call is Call.RECV else "all", None


def followers_of(trace: Trace, ranks: Sequence[int]) -> dict[int, GraphFollower]:
    """Those of some ranks of a job's graph, calibrated or bare."""
    local = [kind.value for kind in LOCAL_KINDS]
    rows = (
        trace.nodes.filter(pl.col("rank").is_in(list(ranks)))
        .select(
            "rank", "index", pl.col("kind").cast(pl.String), "group", "seq", "peer", "bytes",
            "step", pl.coalesce("transfer_ns", "dur_ns", pl.lit(0)).alias("transfer_ns"),
            pl.col("transfer_source").cast(pl.String),
        )
        .filter(~pl.col("kind").is_in(local) & pl.col("seq").is_not_null())
        .sort("rank", "index")
        .collect()
    )  # fmt: skip
    groups = _groups_by_name(trace.header.groups)
    return {
        rank: GraphFollower(rank, groups, _channels(rows.filter(pl.col("rank") == rank)))
        for rank in ranks
    }


def _groups_by_name(groups: Sequence[ProcessGroup]) -> dict[tuple[tuple[int, ...], str], int]:
    return {(tuple(group.ranks), group.name): group.id for group in groups}


def _channels(rows: pl.DataFrame) -> dict[Hashable, _Channel]:
    found: dict[Hashable, list[_Node]] = defaultdict(list)
    for _, _, kind, group, seq, peer, size, step, transfer, source in rows.iter_rows():
        call = Call(kind) if kind in ("send", "recv") else Call.ALL_REDUCE
        found[_channel_key(group, call, peer)].append(
            _Node(kind, seq, peer, size or 0, step, transfer or 0, source)
        )
    last = rows["step"].drop_nulls().max()
    return {key: _Channel(nodes, _last_step(nodes, last)) for key, nodes in found.items()}


def _last_step(nodes: Sequence[_Node], last: object) -> tuple[int, int]:
    """Where operations of the last step begin and end; the end of all steps if it has none."""
    of_last = [
        number for number, node in enumerate(nodes) if node.step == last and last is not None
    ]
    if of_last:
        return of_last[0], of_last[-1] + 1
    of_steps = [number for number, node in enumerate(nodes) if node.step is not None]
    end = of_steps[-1] + 1 if of_steps else len(nodes)
    return end, end
