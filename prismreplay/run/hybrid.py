"""The state of a run whose world is partly virtual. No input or output in here.

Sandbox ranks are processes that say what they communicate; the other ranks are played: what
they contribute comes from `VirtualMembers`, and when they would have arrived from the plan. An
answer goes out once both are known: the outputs, and when the operation ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prismreplay.collect.coordinator import Coordinator, Performer
from prismreplay.collect.handover import Parcel, Place
from prismreplay.collect.matching import Request
from prismreplay.collect.questions import Question, Sent
from prismreplay.errors import DeadlockError
from prismreplay.plan import PlannedWorld
from prismreplay.run.assistants import Assistants
from prismreplay.run.device_shares import share_of
from prismreplay.run.following import Followed, GraphFollower, Placed
from prismreplay.run.timekeeping import Entry, Released, Timekeeper
from prismreplay.run.virtual_members import VirtualMembers
from prismreplay.runtime.operations import MESSAGES, Call, Op
from prismreplay.tensors.store_log import StoreReplay
from prismtrace.errors import PrismError
from prismtrace.ranks import format_ranks

__all__ = ["GroupUse", "HybridCoordinator", "World"]

_BARRIER = "store_based_barrier_key"


@dataclass
class World:
    """What a run knows of its virtual ranks.

    Attributes:
        followers: of the sandbox ranks.
        members: what virtual ranks contribute.
        keeper: when operations end.
        planned: when virtual ranks arrive; None: they are always there.
        store: what virtual ranks did with the key-value store; None: nobody knows.
        place: where tensors are kept on their way.
        check: called with each operation of a sandbox rank, its place, and its inputs.
    """

    followers: Mapping[int, GraphFollower | Followed]
    members: VirtualMembers
    keeper: Timekeeper
    planned: PlannedWorld | None = None
    store: StoreReplay | None = None
    place: Place = field(default_factory=Place)
    check: Callable[[int, Op, Placed, Parcel], None] | None = None


@dataclass
class GroupUse:
    """What became of a process group. `ranks` are all members, `sandbox` those that run.

    `real_operations` of its `operations` were performed by the real backend.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    sandbox: tuple[int, ...]
    operations: int = 0
    real_operations: int = 0
    nbytes: int = 0
    transfer_sources: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, eq=False)
class _Open:
    """An operation of which outputs or end are not known yet."""

    request: Request
    data_seq: int
    released: Released | None = None
    result: Any = None


class HybridCoordinator(Coordinator):
    """A `Coordinator` of the sandbox ranks.

    Args:
        sandbox: ranks that run.
        world_size: ranks of the job.
        performer: makes results.
    """

    def __init__(self, sandbox: Sequence[int], world_size: int, performer: Performer) -> None:
        self.sandbox = tuple(sandbox)
        self._virtual = frozenset(range(world_size)) - set(sandbox)
        # Collectives wait for nobody who does not run.
        absent = dict.fromkeys(self._virtual, self.sandbox[0])
        super().__init__(sandbox, len(self.sandbox), performer, stands_for=absent)
        self.uses: dict[str, GroupUse] = {}
        self._open: dict[tuple[int, int], _Open] = {}
        self._barriers: set[str] = set()
        self._ends: dict[tuple[int, int], Released] = {}
        self._places: dict[int, Placed] = {}
        self._world: World
        self.assistants: Assistants | None = None
        """Who play virtual members in real groups, if anybody does."""

    def begin_in(self, world: World) -> None:
        """Say what the virtual ranks are, before any rank begins."""
        self._world = world

    def enter(self, rank: int, ticket: int, op: Op, inputs: Parcel, issued_ns: int) -> None:
        """A sandbox rank has issued an operation.

        Raises:
            PlanError: the graph has no such operation.
            MismatchError: another sandbox rank issued something that does not fit.
            TensorRulesError, TensorRecordingError: what virtual ranks contribute.
        """
        world = self._world
        placed, issued = self._place(rank, op), op
        if op.call is Call.RECV and op.peer is None:
            # Whoever sent in the graph sends here.
            op = replace(op, peer=placed.peer, seq=placed.data_seq)
        if world.check is not None:
            world.check(rank, op, placed, inputs)
        self._note_use(op, placed)
        if self.assistants is not None:
            self.assistants.entered(rank, ticket, issued)
        self._give(rank, ticket, op, placed, inputs)
        self._release(world.keeper.enter(self._entry(rank, ticket, op, placed, issued_ns)))

    def note_real(self, rank: int, op: Op) -> None:
        """A sandbox rank has issued an operation that a real backend performs.

        Raises:
            PlanError: the graph has no such operation.
        """
        self._note_use(op, self._place(rank, op)).real_operations += 1

    def note_place(self, rank: int, placed: Placed) -> None:
        """Where the next operation is that a rank issues which follows its graph itself."""
        self._places[rank] = placed

    def share_for(self, rank: int, op: Op, *, ahead: bool = False) -> Parcel:
        """What virtual members give a rank that computes results itself.

        Whoever asks `ahead` may err: then there is nothing in it.

        Raises:
            TensorRulesError, TensorRecordingError: what virtual ranks contribute.
        """
        virtual = [place for place, one in enumerate(op.group.ranks) if one in self._virtual]
        try:
            share = share_of(self._world.members, rank, op, virtual, self._world.place)
        except PrismError:
            if not ahead:
                raise
            return Parcel(None, None, 0)
        self.counts.supplied += 1
        return share

    def note_followed(
        self, rank: int, followed: Sequence[int], uses: Sequence[Sequence[Any]]
    ) -> None:
        """What a rank that follows its graph itself has told at its end.

        Args:
            rank: global rank.
            followed: a `Followed`.
            uses: keys of groups, each with the fields of a `GroupUse`.
        """
        self._world.followers = {**self._world.followers, rank: Followed(*followed)}
        for key, *fields in uses:
            use = GroupUse(*fields)
            known = self.uses.get(key)
            if known is None:
                self.uses[key] = use
                continue
            known.operations += use.operations
            known.real_operations += use.real_operations
            known.nbytes += use.nbytes
            known.transfer_sources.update(use.transfer_sources)

    def _place(self, rank: int, op: Op) -> Placed:
        known = self._places.pop(rank, None)
        if known is not None:
            return known
        follower: Any = self._world.followers[rank]
        placed: Placed = follower.place(op)
        return placed

    def ask_store(
        self,
        rank: int,
        number: int,
        op: str,
        args: tuple[Any, ...],
        site: str = "",
        helpers: int = 0,
    ) -> None:
        """A sandbox rank uses the store; virtual ranks have done before what they did then."""
        if self._play_store(rank, op, args):
            self._retry_store()
        super().ask_store(rank, number, op, args, site, helpers)

    def deadlock(self) -> DeadlockError:
        """What to say when it is stuck."""
        found = super().deadlock()
        unknown = [entry for entry in self._world.keeper.waiting if entry.boundary]
        if unknown:
            ranks = sorted({entry.ticket[0] for entry in unknown})
            found.report += (
                f"\nranks {format_ranks(ranks)} wait for virtual ranks that, in the plan, wait for "
                "operations that no sandbox rank has issued"
            )
            beyond = [one for one in self._world.followers.values() if one.repeated]
            if beyond:
                found.report += (
                    "\nthe run is beyond the steps of the graph and repeats its last one: collect as "
                    "many steps as are run, or run no more than were collected"
                )
        if self._store.waiting and self._world.store is None:
            found.report += (
                "\nvirtual ranks set keys of the store only as they were recorded to: "
                "collect --record-tensors"
            )
        return found

    def _play_store(self, rank: int, op: str, args: tuple[Any, ...]) -> bool:
        replay = self._world.store
        if replay is not None:
            entries = [(one.operation, one.arguments) for one in replay.before(rank, op, args)]
        elif op == "add" and _BARRIER in str(args[0]) and args[0] not in self._barriers:
            # All that torch itself counts in the store: members of the world at a barrier.
            self._barriers.add(args[0])
            entries = [("add", (args[0], len(self._virtual)))]
        else:
            return False
        for operation, arguments in entries:
            self._store.play(operation, arguments)
        return bool(entries)

    # --- data -------------------------------------------------------------------------

    def _give(self, rank: int, ticket: int, op: Op, placed: Placed, inputs: Parcel) -> None:
        """See to it that the operation gets its outputs; it may have them at once."""
        seen = replace(op, seq=placed.data_seq)
        if self._virtual_members(op):
            supplied = self._world.members.supplied(rank, seen, inputs)
            if supplied is not None:
                self.counts.supplied += 1
                self._answer_alone(rank, ticket, op, supplied)
                return
        if op.call is Call.SEND:
            # Its bytes are kept: nobody waits for the receiver to have taken them.
            self._answer_alone(rank, ticket, op, (Parcel(b"", None, 0), ()))
            if op.peer in self._virtual:
                self.counts.messages += 1
                return
        elif op.peer in self._virtual:
            self.counts.messages += 1
            self._answer_alone(rank, ticket, op, self._world.members.message(rank, seen))
            return
        sends = op.call is Call.SEND
        request, complete = self._matcher.arrive(rank, ticket, op, inputs)
        if not sends:
            self._await(request, ticket, placed.data_seq)
        if complete:
            self._complete(request)

    def _await(self, request: Request, ticket: int, data_seq: int) -> None:
        self._ranks[request.rank].requests[ticket] = request
        self._open[request.rank, ticket] = _Open(request, data_seq)

    def _answer_alone(self, rank: int, ticket: int, op: Op, result: Any) -> None:
        request = self._matcher.alone(rank, ticket, op, None)
        request.source = op.peer
        self._await(request, ticket, 0)
        self._finish(request, result)

    def _complete(self, last: Request) -> None:
        if last.op.call in MESSAGES or self._virtual.isdisjoint(last.op.group.ranks):
            super()._complete(last)
            return
        self.counts.collectives += 1
        members = last.instance.requests
        seen = replace(last.op, seq=self._open[last.rank, last.ticket].data_seq)
        ordered = [
            members.get(rank) or self._world.members.contribution(rank, last.rank, seen)
            for rank in last.op.group.ranks
        ]
        results = self._performer.perform(ordered)
        if self.assistants is not None:
            self.assistants.performed(list(members.values()), results[0])
        for request, result in zip(ordered, results, strict=True):
            if members.get(request.rank) is request:
                self._finish(request, result)

    # --- both together ----------------------------------------------------------------

    def _finish(self, request: Request, result: tuple[Any, Sequence[Any]]) -> None:
        """The outputs are known; the rank gets them once it is known when the operation ends."""
        waiting = self._open.get((request.rank, request.ticket))
        if waiting is None or waiting.request is not request:
            return  # a send that has been answered
        waiting.result = result
        self._settle(waiting)

    def _release(self, released: Sequence[Released]) -> None:
        for one in released:
            if self.assistants is not None:
                self.assistants.released(one)
            # A rank that has ended waits for nothing.
            waiting = self._open.get(one.ticket)
            if waiting is not None:
                waiting.released = one
                self._settle(waiting)

    def _settle(self, waiting: _Open) -> None:
        if waiting.released is None or waiting.result is None:
            return
        ticket = waiting.released.ticket
        del self._open[ticket]
        self._ends[ticket] = waiting.released
        super()._finish(waiting.request, waiting.result)

    def _answer(self, question: Question) -> Sent:
        sent = super()._answer(question)
        if question.request is None:
            return sent
        released = self._ends.pop((question.rank, question.request.ticket))
        ready_ns = None if released.is_known else released.ready_ns
        message = (*sent.message, released.arrived_ns, released.end_ns, ready_ns)
        return Sent(sent.rank, message, sent.parcel)

    # --- time -------------------------------------------------------------------------

    def _entry(self, rank: int, ticket: int, op: Op, placed: Placed, issued_ns: int) -> Entry:
        planned, boundary = self._world.planned, self._virtual_members(op)
        if planned is not None:
            boundary = (
                boundary
                and not placed.skipping
                and planned.is_boundary(placed.key, rank, placed.round_)
            )
        p2p = op.call in MESSAGES
        if not p2p:
            partners = tuple(one for one in op.group.ranks if one in self._ranks)
        elif op.call is Call.RECV and op.peer in self._ranks:
            partners = (op.peer,)
        else:
            partners = ()
        return Entry(
            ticket=(rank, ticket),
            placed=placed,
            queue=op.queue,
            batch=op.batch,
            issued_ns=issued_ns,
            waits_for=partners,
            boundary=boundary,
        )

    def _virtual_members(self, op: Op) -> bool:
        """Whether virtual ranks take part."""
        if op.call in MESSAGES:
            return op.peer in self._virtual
        return not self._virtual.isdisjoint(op.group.ranks)

    def _note_use(self, op: Op, placed: Placed) -> GroupUse:
        use = self.uses.get(op.group.key)
        if use is None:
            members = op.group.ranks
            use = self.uses[op.group.key] = GroupUse(
                op.group.label,
                op.group.desc,
                members,
                tuple(rank for rank in members if rank in self._ranks),
            )
        use.operations += 1
        use.nbytes += op.payload_bytes
        use.transfer_sources[placed.transfer_source or "none"] += 1
        return use
