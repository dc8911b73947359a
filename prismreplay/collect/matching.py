"""Which operations of different ranks belong together, and whether they fit.

Collectives of a group meet by their number in it. A send meets the receive that waits longest for
its (group, sender, receiver, tag); on NCCL the tag does not count, as there. Everything is
compared when it arrives: the program is stopped at the first operation that does not fit, while
both ranks' lines are known. No torch and no input or output in here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prismreplay.errors import MismatchError
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.ranks import format_ranks
from prismtrace.schema import DType

__all__ = ["Form", "Instance", "Matcher", "Request", "form_of", "require_same_form"]

_P2P = (Call.SEND, Call.RECV)
_REDUCING = (
    Call.ALL_REDUCE,
    Call.REDUCE,
    Call.REDUCE_SCATTER,
    Call.REDUCE_SCATTER_SINGLE,
)
_ROOTED = (Call.BROADCAST, Call.REDUCE, Call.GATHER, Call.SCATTER)


@dataclass(slots=True, eq=False)
class Request:
    """An operation that a rank submitted. `inputs` are its bytes, as the transport has them."""

    rank: int
    ticket: int
    op: Op
    inputs: Any
    instance: Instance
    waits: bool = True
    """Whether the rank will ask for the result."""
    done: bool = False
    source: int | None = None
    """For a receive: who sent."""
    result: Any = None
    """Once done: what the rank gets, as the transport has it."""


@dataclass(slots=True, eq=False)
class Instance:
    """Operations that belong together. `requests` are the members that are there, by rank."""

    number: int
    ranks: tuple[int, ...]
    requests: dict[int, Request] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Members that have not come yet, in group order."""
        return [rank for rank in self.ranks if rank not in self.requests]

    @property
    def complete(self) -> bool:
        """True when all members are there."""
        return len(self.requests) == len(self.ranks)


_Pair = tuple[str, int, int, int]  # group key, sender, receiver, tag


class Matcher:
    """The operations that still lack partners.

    Ranks in `stands_for` do not run; collectives do not wait for them.
    """

    def __init__(self, stands_for: Mapping[int, int] | None = None) -> None:
        self._numbers = 0
        self._absent = frozenset(stands_for or ())
        self._groups: dict[str, tuple[Group, int, str]] = {}
        self._collectives: dict[str, dict[int, Instance]] = defaultdict(dict)
        self._sends: dict[_Pair, deque[Request]] = defaultdict(deque)
        self._receives: dict[_Pair, deque[Request]] = defaultdict(deque)
        self._anyone: dict[tuple[str, int, int], deque[Request]] = defaultdict(deque)

    def join(self, rank: int, group: Group, site: str = "") -> None:
        """Take note of a group that `rank` made at `site`.

        Groups of one rank are private: programs make them without the others.

        Raises:
            MismatchError: another rank has other members in its group of that name.
        """
        if group.size == 1:
            return
        first, other, where = self._groups.setdefault(group.key, (group, rank, site))
        if first.ranks == group.ranks:
            return
        raise MismatchError(
            f"ranks {rank} and {other} disagree on the members of a group: "
            f"{format_ranks(group.ranks)} on rank {rank}{_at(site)}, "
            f"{format_ranks(first.ranks)} on rank {other}{_at(where)}",
            where=f"group {group.name!r}",
            hint="every rank must make all groups, also those that it is no member of, in the "
            "same order",
        )

    def arrive(self, rank: int, ticket: int, op: Op, inputs: Any) -> tuple[Request, bool]:
        """Take an operation in; True when it completes its instance, which is then forgotten.

        Raises:
            MismatchError: it does not fit what another member did.
        """
        if op.call is Call.SEND:
            return self._send(rank, ticket, op, inputs)
        if op.call is Call.RECV:
            return self._receive(rank, ticket, op, inputs)
        return self._collective(rank, ticket, op, inputs)

    def alone(self, rank: int, ticket: int, op: Op, inputs: Any) -> Request:
        """An operation that is answered without its partners."""
        request = Request(rank, ticket, op, inputs, self._new((rank,)))
        request.instance.requests[rank] = request
        return request

    def unreceived(self) -> int:
        """Messages that were sent and not received."""
        return sum(map(len, self._sends.values()))

    def _new(self, ranks: tuple[int, ...]) -> Instance:
        self._numbers += 1
        return Instance(self._numbers, ranks)

    def _collective(self, rank: int, ticket: int, op: Op, inputs: Any) -> tuple[Request, bool]:
        started = self._collectives[op.group.key]
        if op.seq is None:
            raise ValueError("a collective needs a number")
        instance = started.get(op.seq)
        if instance is None:
            ranks = op.group.ranks
            if self._absent:
                ranks = tuple(one for one in ranks if one not in self._absent)
            instance = started[op.seq] = self._new(ranks)
        request = Request(rank, ticket, op, inputs, instance)
        for other in instance.requests.values():
            _compare(request, other)
            if op.call not in _PAIRWISE:
                break  # what holds against one holds against all
        instance.requests[rank] = request
        if instance.complete:
            del started[op.seq]
        return request, instance.complete

    def _send(self, rank: int, ticket: int, op: Op, inputs: Any) -> tuple[Request, bool]:
        pair = _pair(op, rank, _peer(op))
        anyone = self._anyone[pair[0], pair[2], pair[3]]
        waiting = self._receives[pair]
        # Of the receives that this message may answer, the one that was posted first.
        heads = [queue for queue in (waiting, anyone) if queue]
        queue = min(heads, key=lambda queue: queue[0].instance.number, default=None)
        if queue is None:
            instance = self._new((rank, pair[2]))
            request = Request(rank, ticket, op, inputs, instance)
            instance.requests[rank] = request
            self._sends[pair].append(request)
            return request, False
        receive = queue.popleft()
        request = Request(rank, ticket, op, inputs, receive.instance)
        self._meet(request, receive)
        return request, True

    def _receive(self, rank: int, ticket: int, op: Op, inputs: Any) -> tuple[Request, bool]:
        if op.peer is None:
            sent = self._first_sent(op, rank)
        else:
            sent = self._sends.get(_pair(op, op.peer, rank))
        if sent:
            message = sent.popleft()
            request = Request(rank, ticket, op, inputs, message.instance)
            self._meet(message, request)
            return request, True
        members = (rank,) if op.peer is None else (op.peer, rank)
        request = Request(rank, ticket, op, inputs, self._new(members))
        request.instance.requests[rank] = request
        if op.peer is None:
            _, _, receiver, tag = _pair(op, rank, rank)
            self._anyone[op.group.key, receiver, tag].append(request)
        else:
            self._receives[_pair(op, op.peer, rank)].append(request)
        return request, False

    def _first_sent(self, op: Op, rank: int) -> deque[Request] | None:
        queues = (self._sends.get(_pair(op, other, rank)) for other in op.group.ranks)
        arrived = [queue for queue in queues if queue]
        return min(arrived, key=lambda queue: queue[0].instance.number, default=None)

    def _meet(self, send: Request, receive: Request) -> None:
        _compare_pair(send, receive)
        instance = send.instance = receive.instance
        instance.ranks = (send.rank, receive.rank)
        instance.requests = {send.rank: send, receive.rank: receive}
        receive.source = send.rank


def _peer(op: Op) -> int:
    if op.peer is None:
        raise ValueError("a send needs a receiver")
    return op.peer


def _pair(op: Op, sender: int, receiver: int) -> _Pair:
    return op.group.key, sender, receiver, 0 if "nccl" in op.group.backend else op.tag


# --- what must agree -------------------------------------------------------------------


def _compare(new: Request, old: Request) -> None:
    """Refuse `new` if it cannot be the same collective as `old`."""
    for what, of in _AGREE:
        mine, others = of(new.op), of(old.op)
        if mine != others:
            raise _between(what, new, old, mine, others)
    check = _PAIRWISE.get(new.op.call)
    if check is not None:
        for giver, taker in ((new, old), (old, new)):
            check(giver, taker)


class Form(NamedTuple):
    """What all members of a collective have alike, in the order of `_AGREE`, and who said so."""

    alike: tuple[object, ...]
    site: str


def form_of(op: Op) -> Form:
    """What other members of this collective must have, too, also where they are made to differ.

    Not so sizes that depend on what a rank was given: of lists that may be uneven, and of
    objects, which travel as bytes.
    """
    uneven = op.call is Call.REDUCE_SCATTER or DType.UINT8 in (op.dtype, *_dtypes(op))
    alike = tuple(None if uneven and of is _sizes else of(op) for _, of in _AGREE)
    return Form(alike, op.site)


def require_same_form(rank: int, op: Op, other: int, form: Form) -> None:
    """Two members of a collective that are answered one by one make the same one.

    Args:
        rank: who made `op`.
        op: a collective.
        other: another member.
        form: what it made, see `form_of`.

    Raises:
        MismatchError: they differ.
    """
    mine = form_of(op)
    for (what, _), ours, others in zip(_AGREE, mine.alike, form.alike, strict=True):
        if ours != others:
            raise _mismatch(what, op, (rank, ours, op.site), (other, others, form.site))


def _root(op: Op) -> int | None:
    return op.root if op.call in _ROOTED else None


def _reduction(op: Op) -> str | None:
    if op.call not in _REDUCING or op.reduce_op is None:
        return None
    factor = "" if op.premul_factor is None else f" by {op.premul_factor}"
    return f"{op.reduce_op.value}{factor}"


def _sizes(op: Op) -> tuple[int, ...] | None:
    """Numbers of elements of the tensors that all members have alike."""
    alike = {
        Call.ALL_REDUCE: op.inputs,
        Call.BROADCAST: op.outputs,
        Call.REDUCE: op.inputs,
        Call.ALL_GATHER_SINGLE: op.inputs,
        Call.REDUCE_SCATTER: op.inputs,
        Call.REDUCE_SCATTER_SINGLE: op.inputs,
        Call.GATHER: op.inputs,
        Call.SCATTER: op.outputs,
    }.get(op.call)
    return None if alike is None else tuple(spec.elements for spec in alike)


def _dtypes(op: Op) -> set[DType]:
    return {spec.dtype for spec in (*op.inputs, *op.outputs)}


def _types(op: Op) -> tuple[str, ...] | None:
    if op.call in (Call.ALL_TO_ALL, Call.ALL_TO_ALL_SINGLE, Call.ALL_GATHER):
        specs: tuple[TensorSpec, ...] = (*op.inputs[:1], *op.outputs[:1])
        return tuple(sorted({spec.dtype.value for spec in specs}))
    alike = op.outputs if op.call in (Call.BROADCAST, Call.SCATTER) else op.inputs
    return tuple(spec.dtype.value for spec in alike)


_AGREE = (
    ("operation", lambda op: op.call.value),
    ("root", _root),
    ("reduction", _reduction),
    ("number of elements", _sizes),
    ("element type", _types),
)


def _check_gathered(giver: Request, taker: Request) -> None:
    """all_gather: what one rank gives must fit the place that the other has for it."""
    place = giver.op.group.ranks.index(giver.rank)
    size = giver.op.group.size
    given = [spec.elements for spec in giver.op.inputs]
    room = [spec.elements for spec in taker.op.outputs[place::size]]
    if given != room:
        raise _between("number of elements", giver, taker, tuple(given), tuple(room))


def _check_exchanged(giver: Request, taker: Request) -> None:
    """all_to_all: what one rank sends to the other must be what the other expects."""
    ranks = giver.op.group.ranks
    sent = _elements_for(giver.op.inputs, giver.op.input_splits, ranks, taker.rank)
    expected = _elements_for(taker.op.outputs, taker.op.output_splits, ranks, giver.rank)
    if sent != expected:
        raise _between("elements sent and expected", giver, taker, sent, expected)


def _elements_for(
    specs: tuple[TensorSpec, ...], splits: tuple[int, ...], ranks: tuple[int, ...], rank: int
) -> int:
    place = ranks.index(rank)
    if len(specs) > 1 or len(ranks) == 1:
        return specs[place].elements
    if not splits:
        return specs[0].elements // len(ranks)
    rows = specs[0].shape[0] if specs[0].shape else 1
    return specs[0].elements // rows * splits[place] if rows else 0


_PAIRWISE = {
    Call.ALL_GATHER: _check_gathered,
    Call.ALL_TO_ALL: _check_exchanged,
    Call.ALL_TO_ALL_SINGLE: _check_exchanged,
}


def _compare_pair(send: Request, receive: Request) -> None:
    sent, room = send.op.inputs[0], receive.op.outputs[0]
    if sent.dtype is not room.dtype:
        raise _between("element type", receive, send, room.dtype.value, sent.dtype.value)
    if sent.elements != room.elements:
        raise _between("number of elements", receive, send, room.elements, sent.elements)


def _mismatch(
    what: str, op: Op, mine: tuple[int, object, str], others: tuple[int, object, str]
) -> MismatchError:
    """Two ranks, with what each of them says and its line."""
    (rank, ours, site), (other, theirs, other_site) = mine, others
    name = f"group {op.group.name!r}" + (f" ({op.group.desc})" if op.group.desc else "")
    number = "" if op.seq is None else f", operation {op.count}"
    call = "" if what == "operation" else f" of {op.call.value}"
    return MismatchError(
        f"ranks {rank} and {other} disagree on the {what}{call}: "
        f"{_text(ours)} on rank {rank}{_at(site)}, {_text(theirs)} on rank {other}{_at(other_site)}",
        where=f"{name}{number}",
        hint="all members of a group must make the same communications in the same order",
    )


def _between(what: str, new: Request, old: Request, mine: object, others: object) -> MismatchError:
    return _mismatch(what, new.op, (new.rank, mine, new.op.site), (old.rank, others, old.op.site))


def _at(site: str) -> str:
    return f" at {site}" if site else ""


def _text(value: object) -> str:
    if isinstance(value, tuple):
        if len(value) == 1:
            return str(value[0])
        shown = ", ".join(map(str, value[:8]))
        return f"[{shown}{', ...' if len(value) > 8 else ''}]"
    return "none" if value is None else str(value)
