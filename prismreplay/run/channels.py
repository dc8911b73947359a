"""Channels of a rank's graph: where its communications stand in order, and which one is next.

Collectives of a group are one channel, messages to a partner in it another, and so are all that are
received in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

from prismreplay.runtime.operations import MESSAGES, Call, Op
from prismtrace.schema import DType

__all__ = ["AFTER", "Channel", "Node", "channel_key", "channels_of", "fits", "may_vary"]

AFTER = -1
_UNEVEN = (
    Call.ALL_GATHER,
    Call.REDUCE_SCATTER,
    Call.ALL_TO_ALL,
    Call.ALL_TO_ALL_SINGLE,
    Call.SEND,
    Call.RECV,
)
"""Calls whose sizes need not be the same on all members, or in every run."""


class Node(NamedTuple):
    """A communication of the rank in the graph."""

    kind: str
    seq: int
    peer: int | None
    bytes: int
    step: int | None
    transfer_ns: int
    source: str | None


@dataclass
class Channel:
    """Operations of one kind of place, in the order in which the program makes them.

    `last` is where the last step begins and ends; behind it is what follows the training. `done`
    operations of steps and `after` of those that follow were made. `ended` are those that follow
    and were made once, though the training may have gone on then; `beside` counts operations
    that the plan has no place for.
    """

    nodes: list[Node]
    last: tuple[int, int]
    done: int = 0
    after: int = 0
    beside: int = 0
    ended: set[int] = field(default_factory=set)

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
            yield following[0], AFTER
        if self.done >= end > begin:
            again, offset = divmod(self.done + doubtful - end, end - begin)
            yield begin + offset, again + 1
        for number in following:
            yield number, AFTER

    def lacking(self, op: Op, candidates: Sequence[tuple[int, int]]) -> Node | None:
        """What the graph calls a collective that its last step lacks, if it has one like it.

        Args:
            op: that none of the `candidates` fits exactly, in a step beyond the graph.
            candidates: nodes that it may be instead, as `fits` has it.
        """
        nodes, (begin, end) = self.nodes, self.last
        like = [number for number, node in enumerate(nodes) if _is_like(node, op)]
        if op.call in MESSAGES or not like or any(begin <= one < end for one in like):
            return None
        found = like[-1]
        if candidates:
            # Or is it the last step's with another size? By what came next when it was there.
            last = {(node.kind, node.bytes) for node in nodes[begin:end]}
            later = ((node.kind, node.bytes) for node in nodes[found + 1 :])
            expected = nodes[candidates[-1][0]]
            if next((one for one in later if one in last), None) != (expected.kind, expected.bytes):
                return None
        return nodes[found]

    def take(self, number: int, round_: int) -> None:
        """The next operation is this candidate."""
        if round_ == AFTER:
            self.after = number + 1 - self.last[1]
        else:
            self.done += 1


def may_vary(op: Op) -> bool:
    """Whether the graph's number of bytes says nothing about this run's.

    Members of lists may be uneven, objects travel as bytes, and of a message the partner was told
    its size before.
    """
    return op.call in _UNEVEN or op.dtype is DType.UINT8


def fits(node: Node, op: Op) -> bool:
    """Whether an operation may be the graph's, whatever its size."""
    if node.kind != op.kind.value:
        return False
    other = op.peer if op.call in MESSAGES else op.root
    return other is None or node.peer is None or node.peer == other


def _is_like(node: Node, op: Op) -> bool:
    return fits(node, op) and (node.bytes == op.payload_bytes or may_vary(op))


def channel_key(group: int, call: Call, peer: int | None) -> Hashable:
    """All receives of a group are in one: one from anyone may stand among others."""
    if call is Call.SEND:
        return group, "send", peer
    return group, "recv" if call is Call.RECV else "all", None


def channels_of(rows: pl.DataFrame) -> dict[Hashable, Channel]:
    """Those of one rank's communications, in order; columns as the fields of `Node`, from `kind`."""
    found: dict[Hashable, list[Node]] = defaultdict(list)
    for _, _, kind, group, seq, peer, size, step, transfer, source in rows.iter_rows():
        call = Call(kind) if kind in ("send", "recv") else Call.ALL_REDUCE
        found[channel_key(group, call, peer)].append(
            Node(kind, seq, peer, size or 0, step, transfer or 0, source)
        )
    last = rows["step"].drop_nulls().max()
    return {key: Channel(nodes, _last_step(nodes, last)) for key, nodes in found.items()}


def _last_step(nodes: Sequence[Node], last: object) -> tuple[int, int]:
    """Where operations of the last step begin and end; the end of all steps if it has none."""
    of_last = [
        number for number, node in enumerate(nodes) if node.step == last and last is not None
    ]
    if of_last:
        return of_last[0], of_last[-1] + 1
    of_steps = [number for number, node in enumerate(nodes) if node.step is not None]
    end = of_steps[-1] + 1 if of_steps else len(nodes)
    return end, end
