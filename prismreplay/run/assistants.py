"""Assistants: processes that play virtual ranks in real groups with sandbox ranks.

Each plays all virtual members of some groups. The hub tells it which groups there are and, once
all sandbox members have issued an operation, when the last member is there in the virtual world:
then the assistant starts its part. What it sends are zeros, as results come from the hub; in a
checking run, what makes the small group's all_reduces give these results, too
(`prismreplay.run.compensation`), so that the ranks can compare.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from prismreplay.collect.forking import fork
from prismreplay.collect.handover import Parcel, ParcelWriter, Place, torch_dtype
from prismreplay.collect.matching import Request
from prismreplay.collect.messages import Channel, Message
from prismreplay.errors import RankFailedError
from prismreplay.run.compensation import contribution
from prismreplay.run.holding import Holder
from prismreplay.run.ledger import Arrival, Ledger
from prismreplay.run.real_group import gloo_group
from prismreplay.run.reduced import (
    Buffers,
    Step,
    assistants_steps,
    is_reducible,
    members_of,
    perform,
)
from prismreplay.run.timekeeping import Released
from prismreplay.runtime.operations import MESSAGES, Call, Op, TensorSpec
from prismtrace.schema import ReduceOp

__all__ = ["Assistant", "Assistants", "name_of", "operation_tag", "participant", "start_assistant"]

_COLLECTIVES = 1 << 28
"""Tags below are those of messages."""
_LOOK_AHEAD_NS = 1_000_000
"""Shortly before an operation starts, an assistant listens no more and waits for its time."""


def participant(number: int) -> int:
    """What the ledger calls an assistant."""
    return -1 - number


def name_of(op: Op, rank: int) -> str:
    """Of an operation in a small group, alike for all that take part; `rank` issued it."""
    if op.call in MESSAGES:
        return f"reduced {op.group.key} {rank} {op.call.value} {op.peer} {op.seq}"
    return f"reduced {op.group.key} {op.seq}"


def operation_tag(op: Op, ticket: int) -> int:
    """For the messages of an operation."""
    return ticket if op.call in MESSAGES else _COLLECTIVES + (op.seq or 0) % _COLLECTIVES


# --- in the hub ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Assistant:
    """An assistant's process, the hub's end of its socket, and a descriptor that tells its end."""

    number: int
    pid: int
    channel: Channel
    pidfd: int


def start_assistant(number: int, ledger: Ledger, inherited: Iterable[int]) -> Assistant:
    """Fork an assistant; it waits to be told what to do.

    Args:
        number: of this assistant.
        ledger: what the processes of the run share.
        inherited: descriptors that it must not keep.
    """

    def run(channel: Channel) -> int:
        _Player(channel, participant(number), ledger).run()
        return 0

    return Assistant(number, *fork(run, inherited))


@dataclass
class _Instance:
    """An operation that some of its sandbox members have issued."""

    ops: dict[int, Op] = field(default_factory=dict)
    released: int = 0
    contribution: Parcel = field(default_factory=lambda: Parcel(b"", None, 0))


class Assistants:
    """Tells assistants what to do.

    Args:
        assistants: their processes.
        sandbox: ranks that run.
        ledger: what the processes of the run share.
        place: where contributions are kept on their way; None: zeros will do.
    """

    def __init__(
        self,
        assistants: Sequence[Assistant],
        sandbox: Sequence[int],
        ledger: Ledger,
        place: Place | None = None,
    ) -> None:
        self.processes = tuple(assistants)
        self._sandbox = frozenset(sandbox)
        self._ledger = ledger
        self._place = place
        self._groups: dict[str, Assistant] = {}
        self._instances: dict[Any, _Instance] = {}
        self._of_ticket: dict[tuple[int, int | None], Any] = {}

    def join(self, key: str, ranks: Sequence[int]) -> None:
        """A sandbox rank makes the small group of `ranks`; its assistant has to, too."""
        if key not in self._groups:
            chosen = self.processes[len(self._groups) % len(self.processes)]
            self._groups[key] = chosen
            size = len(members_of(ranks, self._sandbox)) + 1
            chosen.channel.send(("group", key, size, self._ledger.store_port))

    def number_of(self, key: str) -> int | None:
        """Which assistant plays in a group; None: none does."""
        found = self._groups.get(key)
        return None if found is None else found.number

    def entered(self, rank: int, ticket: int, op: Op) -> None:
        """A sandbox rank has issued an operation."""
        if op.group.key not in self._groups or not is_reducible(op, self._sandbox):
            return
        key = (rank, ticket) if op.call in MESSAGES else (op.group.key, op.seq)
        self._instances.setdefault(key, _Instance()).ops[rank] = op
        self._of_ticket[rank, ticket] = key

    def performed(self, requests: Sequence[Request], result: tuple[Parcel, Sequence[Any]]) -> None:
        """A collective's result is there: find what virtual members have to add to get it.

        Args:
            requests: of the sandbox members.
            result: of one of them.
        """
        op = requests[0].op
        instance = self._instances.get((op.group.key, op.seq))
        if self._place is None or instance is None or op.call is not Call.ALL_REDUCE:
            return
        parcel, spans = result
        given = [request.inputs.tensors(op.inputs) for request in requests]
        writer = ParcelWriter(self._place)
        for number, (spec, span) in enumerate(zip(op.inputs, spans, strict=True)):
            exact = parcel.part(0 if span is None else span.offset, spec.shape, torch_dtype(spec))
            writer.put_tensor(
                contribution(
                    exact,
                    [tensors[number] for tensors in given],
                    op.reduce_op or ReduceOp.SUM,
                    group_size=op.group.size,
                    factor=op.premul_factor,
                )
            )
        instance.contribution = writer.finish()

    def released(self, one: Released) -> None:
        """It is known when an operation begins: the assistant plays its part then."""
        key = self._of_ticket.pop(one.ticket, None)
        if key is None:
            return
        instance = self._instances[key]
        instance.released += 1
        rank, ticket = one.ticket
        op = instance.ops[rank]
        members = members_of(op.group.ranks, self._sandbox)
        if instance.released == 1:
            steps = assistants_steps(instance.ops, members)
            name = name_of(op, rank)
            debts = [found.debt_ns for found in self._ledger.arrivals(list(instance.ops), name)]
            at_ns = one.ready_ns + max(debts, default=0)
            tag = operation_tag(op, ticket or 0)
            added = instance.contribution
            message = (
                "play", op.group.key, tuple(map(tuple, steps)), at_ns, name, tag, added.data,
                added.nbytes,
            )  # fmt: skip
            self._groups[op.group.key].channel.send(message, added.file)
            added.close()
        if instance.released == (1 if op.call in MESSAGES else len(members)):
            del self._instances[key]

    @staticmethod
    def lost(one: Assistant) -> RankFailedError:
        """What to say about an assistant that has ended."""
        return RankFailedError(
            f"assistant {one.number}, which plays virtual ranks, has ended",
            hint="what it said is above; run with --transport local to do without",
        )

    def stop(self) -> None:
        """End all of them. Never fails."""
        for one in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one.pid, 0)
            one.channel.close()
            with contextlib.suppress(OSError):
                os.close(one.pidfd)


# --- in an assistant -----------------------------------------------------------------------


@dataclass
class _SmallGroup:
    """A group that is being made, or there."""

    size: int
    thread: threading.Thread
    made: Any = None
    last_ns: int = 0


class _Player:
    """The loop of an assistant's process."""

    def __init__(self, channel: Channel, name: int, ledger: Ledger) -> None:
        self._channel = channel
        self._name = name
        self._ledger = ledger
        self._holder = Holder()
        self._groups: dict[str, _SmallGroup] = {}
        self._due: list[tuple[int, int, Message, Parcel]] = []
        self._numbers = itertools.count()
        self._under_way: list[tuple[Any, Any]] = []

    def run(self) -> None:
        """Until the hub is gone."""
        torch.set_num_threads(1)
        while True:
            timeout = None
            if self._due:
                ahead = self._due[0][0] - time.monotonic_ns() - _LOOK_AHEAD_NS
                timeout = max(0.0, ahead / 1e9)
            try:
                if select.select([self._channel], [], [], timeout)[0]:
                    for message, file in self._channel.receive_available():
                        self._hear(message, file)
            except EOFError:
                return
            if self._due and self._due[0][0] - time.monotonic_ns() <= _LOOK_AHEAD_NS:
                at_ns, _, message, added = heapq.heappop(self._due)
                self._holder.hold_until(at_ns)
                self._play(message, added)
            else:
                self._under_way = [one for one in self._under_way if not one[0].is_completed()]

    def _hear(self, message: Message, file: int | None) -> None:
        if message[0] == "group":
            _, key, size, port = message
            # In threads, as sandbox ranks may meet in them in another order.
            thread = threading.Thread(target=self._make, args=(key, size, port), daemon=True)
            self._groups[key] = _SmallGroup(size, thread)
            thread.start()
            return
        group = self._groups[message[1]]
        # Operations of a group keep their order.
        group.last_ns = max(group.last_ns, message[3])
        added = Parcel(message[6], file, message[7])
        heapq.heappush(self._due, (group.last_ns, next(self._numbers), message, added))

    def _make(self, key: str, size: int, port: int) -> None:
        self._groups[key].made = gloo_group(f"reduced/{key}", size - 1, size, port)

    def _play(self, message: Message, added: Parcel) -> None:
        _, key, packed, at_ns, name, tag, _, _ = message
        group = self._groups[key]
        group.thread.join()
        if group.made is None:
            raise RuntimeError(f"no group {key}")
        steps = [Step(*one) for one in packed]
        contributions = []
        if added.nbytes:
            specs = [TensorSpec((step.elements,), step.dtype) for step in steps]
            contributions = added.tensors(specs)
            added.close()
        now = time.monotonic_ns()
        self._ledger.arrive(self._name, name, Arrival(now, now - at_ns))
        self._under_way += perform(steps, group.made, group.size - 1, tag, Buffers(contributions))
