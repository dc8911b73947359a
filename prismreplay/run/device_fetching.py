"""What virtual members give a rank on a GPU, asked of the hub before it is needed.

The graph says which operations a group has next, and earlier ones of their size what they look
like. So from the second step on, the hub has made a share, and sent it, by the time that the
program issues the operation. Otherwise the host waits for the answer, and with it, perhaps, the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from prismreplay.collect.handover import Parcel
from prismreplay.collect.messages import Message, pack_op
from prismreplay.run.following import GraphFollower, Placed
from prismreplay.runtime.operations import Call, Op

__all__ = ["Fetcher"]

_AHEAD = 8
"""Operations of a group that are asked for ahead."""
_MOST_BYTES = 512 << 20
"""Of answers that are on their way."""

_Key = tuple[str, Call, int | None, int | None]


class _Asking(Protocol):
    """What a `Connection` is asked for."""

    def begin_asking(self, name: str, *fields: Any) -> int: ...

    def answer(self, request: int) -> tuple[Message, int | None]: ...


class _Asked(NamedTuple):
    """A question to the hub that is not answered yet, as far as this rank has looked."""

    request: int
    op: Op
    nbytes: int


class Fetcher:
    """Asks the hub.

    Args:
        connection: to it.
        follower: knows what comes next.
        step: the training step that the program is in.

    Attributes:
        fetched: shares that were needed.
        late: of these, those that had not been asked for ahead.
        waited_ns: what all of them have kept the host.
    """

    def __init__(
        self, connection: _Asking, follower: GraphFollower, step: Callable[[], int | None]
    ) -> None:
        self.fetched = self.late = 0
        self.waited_ns = 0
        self._connection = connection
        self._follower = follower
        self._step = step
        self._asked: dict[_Key, _Asked] = {}
        self._bytes = 0
        self._seen: dict[tuple[str, Call, int], Op] = {}

    def fetch(self, op: Op, placed: Placed) -> Parcel:
        """The virtual members' part of an operation that the program issues now."""
        begun = time.monotonic_ns()
        self.fetched += 1
        op = replace(op, seq=placed.data_seq)
        if op.call is Call.RECV and op.peer is None:
            op = replace(op, peer=placed.peer)
        parcel = self._take(op)
        if parcel is None:
            self.late += 1
            request = self._connection.begin_asking("virtual", pack_op(op, self._step()), False)
            parcel = _parcel(*self._connection.answer(request))
        self._seen[op.group.key, op.call, op.payload_bytes] = op
        self._ask_ahead(op)
        self.waited_ns += time.monotonic_ns() - begun
        return parcel

    def _take(self, op: Op) -> Parcel | None:
        """What was asked for ahead, if it is this."""
        asked = self._asked.pop(_key(op), None)
        if asked is None:
            return None
        self._bytes -= asked.nbytes
        message, file = self._connection.answer(asked.request)
        parcel = _parcel(message, file)
        if message[2] is None and file is None:
            return None  # the hub could not make it then: it will say why
        return parcel if _is_alike(op, asked.op) else None

    def _ask_ahead(self, op: Op) -> None:
        for node in self._follower.coming(op, _AHEAD):
            like = self._seen.get((op.group.key, op.call, node.bytes))
            if like is None or node.kind != op.kind.value:
                continue
            peer = node.peer if op.call is Call.RECV else op.peer
            coming = replace(like, seq=node.seq, peer=peer)
            key = _key(coming)
            nbytes = sum(spec.nbytes for spec in coming.outputs)
            if key in self._asked or self._bytes + nbytes > _MOST_BYTES:
                continue
            packed = pack_op(coming, self._step())
            request = self._connection.begin_asking("virtual", packed, True)
            self._asked[key] = _Asked(request, coming, nbytes)
            self._bytes += nbytes


def _key(op: Op) -> _Key:
    return op.group.key, op.call, op.peer, op.seq


def _is_alike(one: Op, other: Op) -> bool:
    """Whether they get the same share."""
    return (
        one.outputs == other.outputs
        and one.inputs == other.inputs
        and one.output_splits == other.output_splits
        and one.input_splits == other.input_splits
        and (one.reduce_op, one.premul_factor, one.root)
        == (other.reduce_op, other.premul_factor, other.root)
    )


def _parcel(message: Message, file: int | None) -> Parcel:
    _, _, data, nbytes = message
    return Parcel(data, file, nbytes)
