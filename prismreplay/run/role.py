"""The role of a sandbox rank: it communicates with virtual ranks as if they were there.

Groups with virtual members go through the hub: a rank hands its inputs over, gets the outputs as
soon as they are known, and holds until the operation ends in the virtual world. Groups of sandbox
ranks only are real ones of torch's own backend, and take as long as they take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from prismreplay.collect.client import CollectRole, Connection, fill
from prismreplay.collect.handover import Files, Parcel, ParcelWriter, Place, Span
from prismreplay.collect.messages import pack_op
from prismreplay.run.clock import RunClock
from prismreplay.run.contention import Contention
from prismreplay.run.holding import Holder
from prismreplay.run.ledger import Arrival, Ledger
from prismreplay.run.marks import RankSummary
from prismreplay.run.real_group import gloo_group
from prismreplay.run.small_groups import SmallGroups, SmallWork
from prismreplay.runtime.graph_recorder import GraphRecorder
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op
from prismreplay.runtime.roles import Pending

__all__ = ["SandboxRole"]

Tensor = Any

_PASSED_ON = (Call.SEND, Call.BROADCAST)
"""Other ranks get the very bytes of these, perhaps later than the one that gave them goes on."""


class SandboxRole(CollectRole):
    """What becomes of a sandbox rank's communications.

    Args:
        connection: to the hub.
        place: where bytes are kept on their way.
        rank: global rank.
        sandbox: all sandbox ranks.
        clock: the rank's.
        ledger: what the ranks share.
        recorder: of this rank, which has issued an operation just before it is submitted.
        real_groups: have torch's backend perform what sandbox ranks do among themselves.
        assistants: processes that play virtual ranks in real groups.
        check: compare what small groups give with the exact results.
        contends: whether communication with virtual ranks takes processor time; the hub knows how
            much.
    """

    def __init__(
        self,
        connection: Connection,
        place: Place,
        *,
        rank: int,
        sandbox: Sequence[int],
        clock: RunClock,
        ledger: Ledger,
        recorder: GraphRecorder,
        real_groups: bool = True,
        assistants: int = 0,
        check: bool = False,
        contends: bool = False,
    ) -> None:
        super().__init__(connection, place, lambda: recorder.position.step)
        self.connection = connection
        self.holder = Holder(clock.machine)
        self.rank = rank
        self._sandbox = frozenset(sandbox)
        self.clock = clock
        self.ledger = ledger
        self.recorder = recorder
        self._makes_groups = real_groups
        self.checks = check
        self._small = SmallGroups(rank, self._sandbox, assistants, ledger, check=check)
        self._real: set[str] = set()
        self.contention = Contention()
        self._contends = contends
        self.files = Files(place)
        """What this rank gave and the hub is done with."""
        self.taken: list[int] = []
        """Answers that this rank has taken the results of, as the hub does not know yet."""
        self._costs: dict[Hashable, tuple[int, int]] = {}

    def make_real_group(self, group: Group, backends: dict[str, str]) -> Any:
        """A group of torch's own, if all members are sandbox ranks and its backend is here.

        With assistants, a small one is made here for groups that have virtual members, too.
        """
        if backends.get("cpu") != "gloo":
            # A stand-in would refuse what the backend can do; the hub does it all.
            return None
        if self._small.wants(group):
            self._connection.tell(("assist", group.key, group.ranks))
            self._small.make(group)
        if not (self._makes_groups and self._sandbox.issuperset(group.ranks)):
            return None
        self._real.add(group.key)
        return gloo_group(f"real/{group.key}", group.rank, group.size, self.ledger.store_port)

    def tell_summary(self, spun: int = 0) -> None:
        """Tell the hub how this rank's times went, at its end; `spun` ranges had another pace."""
        clock, holds = self.clock, self.holder.report()
        summary = RankSummary(
            rank=self.rank,
            holds=holds.holds,
            hold_median_ns=holds.median_ns,
            hold_p99_ns=holds.p99_ns,
            hold_worst_ns=holds.worst_ns,
            late_answers=clock.late_answers,
            late_ns=clock.late_ns,
            handing_ns=clock.handing_ns,
            debt_ns=clock.debt_ns,
            spun=spun,
            contended_ns=self.contention.taken_ns,
        )
        self._connection.tell(("over", tuple(summary)))
        for moved in self._small.summaries():
            self._connection.tell(("moved", tuple(moved)))

    def submit(
        self,
        op: Op,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        call: Callable[[], Any],
    ) -> Pending:
        """See `prismreplay.runtime.roles.Role`."""
        with self.clock.at_its_own_pace(), self.contention.paused():
            return self._submit(op, inputs, outputs, call)

    def _submit(
        self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: Callable[[], Any]
    ) -> Pending:
        begun = time.monotonic_ns()
        token, issued_ns = self.recorder.latest
        if op.group.key in self._real:
            with self._lock:
                self._connection.tell(("real", pack_op(op, self._step())))
            self.clock.handed_over(time.monotonic_ns() - begun)
            return _RealPending(self, op, token, issued_ns, call)
        files = None if op.call in _PASSED_ON else self.files
        writer = ParcelWriter(self._place, files, sum(spec.nbytes for spec in op.inputs))
        for tensor in inputs:
            writer.put_tensor(tensor)
        parcel = writer.finish()
        self._small.announce(op, self.clock.debt_ns)
        with self._lock:
            self._tickets += 1
            ticket = self._tickets
            packed = pack_op(op, self._step())
            taken, self.taken = tuple(self.taken), []
            message = ("enter", ticket, packed, parcel.data, issued_ns, taken)
            self._connection.tell(message, parcel.file)
        if files is None:
            parcel.close()
        small = self._small.start(op, ticket, outputs, self.clock.debt_ns)
        if self._contends:
            self.contention.begin(ticket, *self._cost_ns(op, small is not None))
        self.clock.handed_over(time.monotonic_ns() - begun)
        return _HubPending(self, ticket, token, outputs, small, parcel)

    def _cost_ns(self, op: Op, plays: bool) -> tuple[int, int]:
        """Processor time of an operation, and how long that is under way.

        Less what a small group takes for it if one `plays`.
        """
        key = op.call, op.group.key, op.payload_bytes, op.dtype
        if key not in self._costs:
            packed = pack_op(op, self._step())
            cost_ns, span_ns = self._connection.ask("cost", packed, plays)[0][2:]
            self._costs[key] = int(cost_ns), int(span_ns)
        return self._costs[key]


class _HubPending:
    """An operation that the hub has; see `prismreplay.runtime.roles.Pending`."""

    def __init__(
        self,
        role: SandboxRole,
        ticket: int,
        token: int,
        outputs: Sequence[Tensor],
        small: SmallWork | None,
        given: Parcel,
    ) -> None:
        self.source: int | None = None
        self._role = role
        self._ticket = ticket
        self._token = token
        self._outputs: Sequence[Tensor] | None = outputs
        self._small = small
        self._given = given
        self._arrived_ns = self._end_ns = 0
        self._end_is_known = False
        self._waited = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Get the outputs, then hold until the operation ends."""
        if self._waited:
            return
        self._waited = True
        clock = self._role.clock
        contention = self._role.contention
        with clock.at_its_own_pace(), contention.paused():
            begun = clock.now()
            with self._lock:
                self._fetch()
            longer_ns = contention.waited(self._ticket, self._end_ns - begun)
            if self._end_is_known and longer_ns:
                # The backend has shared the processor with the program, and is not done yet.
                self._end_ns = max(begun, self._end_ns) + longer_ns
            self._role.recorder.completed(self._token, self._arrived_ns, self._end_ns)
            if clock.now() < self._end_ns:
                self._role.holder.hold_until(self._end_ns + clock.debt_ns)
            clock.late(max(0, clock.now() - max(begun, self._end_ns)))

    def done(self) -> bool:
        """True once `wait` would not block."""
        if self._outputs is not None:
            connection = self._role.connection
            if self._small is not None and not self._small.done():
                return False
            if not connection.ask("poll", self._ticket)[0][2]:
                return False
            with self._lock:
                self._fetch()
        return self._role.clock.now() >= self._end_ns

    def _fetch(self) -> None:
        if self._outputs is None:
            return
        answer, file = self._role.connection.ask("wait", self._ticket)
        number, data, nbytes, spans, self.source, *times = answer[1:]
        self._arrived_ns, self._end_ns, ready_ns = times
        # The hub has made the result, so it is done with what this rank gave.
        self._given.files = self._role.files
        self._given.close()
        self._end_is_known = ready_ns is None
        if self._small is not None:
            # Its results are overwritten, its time counts where nothing better is known.
            transfer_ns = self._small.wait()
            if transfer_ns is not None and ready_ns is not None:
                self._end_ns = ready_ns + transfer_ns
                self._end_is_known = True
        parcel = Parcel(data, file, nbytes)
        if self._small is not None and self._role.checks:
            exact = [
                parcel.part(span[0], (output.numel(),), output.dtype)
                for output, span in zip(self._outputs, spans, strict=True)
                if span is not None
            ]
            self._small.compare(exact)
        for output, span in zip(self._outputs, spans, strict=True):
            if span is not None:
                fill(output, parcel, Span(*span))
        parcel.close()
        self._outputs = None
        if file is not None:
            self._role.taken.append(number)


class _RealPending:
    """An operation of sandbox ranks among themselves."""

    def __init__(
        self, role: SandboxRole, op: Op, token: int, issued_ns: int, call: Callable[[], Any]
    ) -> None:
        self.source: int | None = None
        self._role = role
        self._op = op
        self._token = token
        self._issued_ns = issued_ns
        self._ended_ns: int | None = None
        """When the backend was done, on the machine's clock."""
        self._waited = False
        self._name = _name(op, role.rank)
        clock = role.clock
        role.ledger.arrive(
            role.rank,
            self._name,
            Arrival(issued_ns + clock.debt_ns, clock.debt_ns),
        )
        self._work = call()
        if op.call not in MESSAGES:
            # Some have no future: coalesced reduce-scatters of gloo, monitored barriers.
            with suppress(RuntimeError, AttributeError):
                self._work.get_future().add_done_callback(self._note_end)

    def wait(self) -> None:
        """Block until the outputs are filled in."""
        with self._role.clock.at_its_own_pace(), self._role.contention.paused():
            self._wait()

    def _wait(self) -> None:
        clock = self._role.clock
        begun = clock.now()
        self._work.wait()
        if self._waited:
            return
        self._waited = True
        if self._op.peer is None and self._op.call is Call.RECV:
            self.source = self._op.group.ranks[self._work._source_rank()]  # noqa: SLF001
        self._note_end()
        shift = self._shift_ns()
        end_ns = max(self._issued_ns, (self._ended_ns or 0) - shift)
        self._role.recorder.completed(self._token, self._issued_ns, end_ns)
        kept_waiting = (self._ended_ns or 0) > begun + clock.debt_ns
        now = clock.now()
        if now < end_ns:
            # Its partners owe less than this rank, which is ahead of them in the virtual world.
            self._role.holder.hold_until(end_ns + clock.debt_ns)
        elif kept_waiting:
            # What other ranks' debts have held up is no time of the virtual world.
            clock.take_over(max(0, min(now - begun, shift - clock.debt_ns)))

    def done(self) -> bool:
        """True once `wait` would not block."""
        return bool(self._work.is_completed())

    def _note_end(self, _future: Any = None) -> None:
        if self._ended_ns is None:
            self._ended_ns = self._role.clock.machine()

    def _shift_ns(self) -> int:
        """By how much the debts of its members held the operation up."""
        op = self._op
        ranks: Sequence[int] = op.group.ranks
        if op.call in MESSAGES:
            other = op.peer if op.peer is not None else self.source
            ranks = (self._role.rank,) if other is None else (self._role.rank, other)
        found = self._role.ledger.arrivals(ranks, self._name)
        if not found:  # overwritten by a later operation
            return self._role.clock.debt_ns
        return max(one.machine_ns for one in found) - max(
            one.machine_ns - one.debt_ns for one in found
        )


def _name(op: Op, rank: int) -> str:
    """Of an operation, alike on all its members."""
    if op.call is Call.SEND:
        return f"{op.group.key} {rank}>{op.peer} {op.seq}"
    if op.call is Call.RECV:
        return f"{op.group.key} {op.peer}>{rank} {op.seq}"
    return f"{op.group.key} {op.seq}"
