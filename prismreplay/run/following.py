"""Following a running program along its graph: which node is this operation?

The graph of a job says what each rank communicates, in order. Of a sandbox rank the program
says it again, and this finds the place of each operation: what the graph calls it, in which step
it is, and which data belong to it. A program that does something else is refused at once, with its
own line. One that runs for more steps than the graph has repeats the last one; one that runs for
fewer skips to what comes after them.

A further step may make collectives that the last one lacks and an earlier one has: a checkpoint's
barrier every hundred steps. The plan has no time for these: virtual ranks are there already. A
further step without one of the last step's operations is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

from prismreplay.errors import MismatchError, PlanError
from prismreplay.plan import OpKey
from prismreplay.run.channels import (
    AFTER,
    Channel,
    Node,
    channel_key,
    channels_of,
    fits,
    may_vary,
)
from prismreplay.runtime.operations import MESSAGES, Call, Op
from prismtrace.schema import LOCAL_KINDS, ProcessGroup
from prismtrace.spool import TAG
from prismtrace.trace import Trace

__all__ = ["Followed", "GraphFollower", "Placed", "followers_of"]


class Placed(NamedTuple):
    """Where an operation is in the graph.

    `round_` counts repetitions of the last step, 0 in the graph itself. `data_seq` is the number
    under which a recording of the graph's run holds it. `peer` is the partner, also of a receive
    from anyone. `transfer_ns` is how long it takes once all are there. `otherwise`: it seems to
    follow the training, but should the training go on, it is there. `skipping`: the plan does not know
    when it could be, as the program has left steps of the graph out before it, or makes it in a
    step beyond the graph whose last one lacks it.
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


class Followed(NamedTuple):
    """How a rank has followed its graph; see `GraphFollower` for the numbers."""

    repeated: int
    missing: int
    resized: int
    unplanned: int = 0


@dataclass
class GraphFollower:
    """Follows one rank.

    Attributes:
        rank: global rank.
        repeated: operations of steps that the graph does not have.
        resized: operations that carried another number of bytes than in the graph, where that
            may be so: uneven lists, objects, messages, and steps that the graph does not have.
        unplanned: operations of steps that the graph does not have whose last step lacks them.
        last_step: of the graph; None: it has none.
    """

    rank: int
    groups: dict[tuple[tuple[int, ...], str], int]
    channels: dict[Hashable, Channel]
    repeated: int = 0
    resized: int = 0
    unplanned: int = 0
    last_step: int | None = None
    _doubtful: list[tuple[Channel, int, bool]] = field(default_factory=list)
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
        channel = self.channels.get(channel_key(group, op.call, op.peer))
        if channel is None:
            raise self._unlike(op, "the graph has none in this group")
        nodes, done = channel.nodes, channel.done
        if done < channel.last[1] and not self._doubtful:
            # As it nearly always is: the next one.
            node = nodes[done]
            if node.bytes == op.payload_bytes and fits(node, op):
                channel.done = done + 1
                return self._placed(group, node, 0, op)
        doubtful = sum(one is channel and counts for one, _, counts in self._doubtful)
        candidates = list(channel.candidates(doubtful))
        fitting = [one for one in candidates if fits(nodes[one[0]], op)]
        exact = [one for one in fitting if nodes[one[0]].bytes == op.payload_bytes]
        if not exact and self._is_beyond and (not fitting or not may_vary(op)):
            fitting = [one for one in fitting if one[1] > 0] or fitting
            lacking = channel.lacking(op, fitting)
            if lacking is not None:
                self.unplanned += 1
                return _beside(channel, self._placed(group, lacking, 1, op))
        if not fitting:
            expected = [one for one in candidates if one[1] > 0] or candidates
            has = (
                f"it is {nodes[expected[0][0]].kind} there" if expected else "the graph ends there"
            )
            raise self._unlike(op, has)
        return self._take(channel, group, op, fitting, exact)

    def _take(
        self,
        channel: Channel,
        group: int,
        op: Op,
        fitting: Sequence[tuple[int, int]],
        exact: Sequence[tuple[int, int]],
    ) -> Placed:
        """The likeliest of the nodes that fit an operation is it."""
        nodes = channel.nodes
        number, round_ = (exact or fitting)[0]
        again = next((one for one in fitting if one[1] > 0), None)
        if again is not None and number in channel.ended:
            number, round_ = again
        if nodes[number].bytes != op.payload_bytes:
            if round_ <= 0 and not may_vary(op):
                raise self._other_size(op, nodes[number].bytes)
            self.resized += 1
        placed = self._placed(group, nodes[number], max(0, round_), op)
        if round_ == AFTER:
            self._doubtful.append((channel, channel.after, again is not None))
            if again is not None:
                placed = placed._replace(otherwise=_moved(placed, nodes[again[0]], again[1]))
            elif number in channel.ended:
                if op.call in MESSAGES:
                    raise self._unlike(op, "what follows the last step was made before")
                placed = _beside(channel, placed)
            else:
                channel.ended.add(number)
            if channel.done < channel.last[1]:
                placed = placed._replace(skipping=True)
        channel.take(number, round_)
        if round_ > 0:
            self.repeated += 1
            self._go_on()
        return placed

    def coming(self, op: Op, count: int) -> Iterator[Node]:
        """Nodes of the next operations like the one that was placed last: of its group, or messages
        that go its way. If the program goes on beyond the graph, those of the last step again.
        """
        group = self.groups.get((op.group.ranks, op.group.label))
        channel = self.channels.get(channel_key(group or 0, op.call, op.peer))
        if group is None or channel is None:
            return
        begin, end = channel.last
        for number in range(channel.done, channel.done + count):
            if number < end:
                yield channel.nodes[number]
            elif end > begin:
                yield channel.nodes[begin + (number - end) % (end - begin)]

    @property
    def followed(self) -> Followed:
        """How the rank has followed its graph so far."""
        return Followed(self.repeated, self.missing, self.resized, self.unplanned)

    @property
    def missing(self) -> int:
        """Operations of the graph that the program has not made."""
        return sum(max(0, len(one.nodes) - one.done - one.after) for one in self.channels.values())

    @property
    def _is_beyond(self) -> bool:
        """Whether the program has made all steps of the graph, and may make more."""
        channels = self.channels.values()
        return self.last_step is not None and all(one.done >= one.last[1] for one in channels)

    @property
    def _step(self) -> int:
        """In which further step the program is, if it is beyond the graph."""
        rounds = [
            (one.done + sum(other is one and counts for other, _, counts in self._doubtful) - end)
            // (end - begin)
            for one in self.channels.values()
            for begin, end in [one.last]
            if end > begin
        ]
        return (self.last_step or 0) + max(rounds, default=0) + 1

    def _go_on(self) -> None:
        """The training goes on beyond the graph: so did what seemed to come after it."""
        for channel, after, counts in self._doubtful:
            channel.after = min(channel.after, after)
            channel.done += counts
            self.unplanned += not counts
        self._doubtful.clear()

    def _placed(self, group: int, node: Node, round_: int, op: Op) -> Placed:
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
        text = f"rank {self.rank} makes {op.call.value} of {op.payload_bytes:,} bytes{number} of "
        text += f"group {op.group.called}"
        if self._is_beyond:
            # Or the program makes, at its end, what it did not make then: the same answer.
            return PlanError(
                f"{text} in step {self._step}: {has}. The graph ends with step {self.last_step}, "
                "which further steps repeat",
                where=op.site or None,
                hint="collect as many steps as are run; or run no more than were collected, or "
                "such as communicate like the last one",
            )
        return PlanError(
            f"{text}: {has}",
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
            where=f"group {op.group.called}{number}",
            hint="a true backend would hang here, or mix up data; if all ranks are to do so now, "
            "collect the graph again with the same arguments",
        )


def _beside(channel: Channel, placed: Placed) -> Placed:
    """An operation that the plan has no place for: each is another, as rounds are."""
    channel.beside += 1
    return placed._replace(round_=channel.beside, skipping=True)


def _moved(placed: Placed, node: Node, round_: int) -> Placed:
    return placed._replace(key=placed.key._replace(seq=node.seq), round_=round_, step=node.step)


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
    followers = {}
    for rank in ranks:
        mine = rows.filter(pl.col("rank") == rank)
        steps = mine["step"].drop_nulls().to_list()
        followers[rank] = GraphFollower(
            rank, groups, channels_of(mine), last_step=max(steps, default=None)
        )
    return followers


def _groups_by_name(groups: Sequence[ProcessGroup]) -> dict[tuple[tuple[int, ...], str], int]:
    return {(tuple(group.ranks), group.name): group.id for group in groups}
