"""Which operations of different ranks belong together, and whether they fit.

Collectives of a group meet by their number in it. A send meets the receive that waits longest for
its (group, sender, receiver, tag); on NCCL the tag does not count, as there. Everything is
compared when it arrives: the program is stopped at the first operation that does not fit, while
the ranks' lines are known. Of two members that differ nobody can tell which is right; who matches
for a run in which others still compute has a third one decide. No torch and no input or output in
here.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prismreplay.collect.agreement import (
    at_site,
    differ,
    mismatch_of,
    require_fit_in_pairs,
    require_message_fits,
)
from prismreplay.collect.usual_order import UsualOrder
from prismreplay.errors import MismatchError
from prismreplay.runtime.operations import Call, Group, Op
from prismtrace.ranks import format_ranks

__all__ = ["Instance", "Matcher", "Request"]


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
    disputed: bool = False
    """Whether its first two members differ."""

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

    Ranks in `stands_for` do not run; collectives do not wait for them. A `patient` one takes an
    operation that differs from the only one before it, if there are members to come, and notes the
    `dispute`.
    """

    def __init__(
        self, stands_for: Mapping[int, int] | None = None, *, patient: bool = False
    ) -> None:
        self.dispute: MismatchError | None = None
        """What is wrong as far as it is known, unless a third member tells more."""
        self._patient = patient
        self._numbers = 0
        self._usual = UsualOrder()
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
            f"{format_ranks(group.ranks)} on rank {rank}{at_site(site)}, "
            f"{format_ranks(first.ranks)} on rank {other}{at_site(where)}",
            where=f"group {group.called}",
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
            self._usual.note(op)
        request = Request(rank, ticket, op, inputs, instance)
        self._require_fit(request)
        instance.requests[rank] = request
        if instance.complete:
            del started[op.seq]
        return request, instance.complete

    def _require_fit(self, new: Request) -> None:
        """Refuse a member of a collective that differs from those that are there, or note it."""
        instance, there = new.instance, new.instance.requests
        # What one of them has, all have, unless they are disputed.
        first = next(iter(there.values()), new)
        if instance.disputed or differ(new.op, first.op):
            error = self._explained(mismatch_of([new, *there.values()]), new)
            if len(there) > 1 or len(instance.ranks) == 2 or not self._patient:
                raise error
            instance.disputed = True
            self.dispute = self.dispute or error
            return
        try:
            require_fit_in_pairs(new, there.values())
        except MismatchError as error:
            raise self._explained(error, new) from None

    def _explained(self, error: MismatchError, new: Request) -> MismatchError:
        """The same with what its members have probably done."""
        there = {**new.instance.requests, new.rank: new}
        later: dict[int, list[Op]] = defaultdict(list)
        for number, instance in sorted(self._collectives[new.op.group.key].items()):
            for rank, request in instance.requests.items():
                if number > (new.op.seq or 0):
                    later[rank].append(request.op)
        guess = self._usual.guess({rank: one.op for rank, one in there.items()}, later)
        if not guess:
            return error
        return MismatchError(f"{error.message}; {guess}", where=error.where, hint=error.hint)

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
        require_message_fits(send, receive)
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
