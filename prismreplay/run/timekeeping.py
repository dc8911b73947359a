"""When do the operations of sandbox ranks end? No input or output in here.

Sandbox ranks say when they issued an operation, on their own clocks (`prismreplay.run.clock`).
It *arrives* when what is ahead of it in its queue has ended: a group's collectives run one after
another (over gloo two at a time), and so do messages to or from one partner. It is *ready* once all
members have arrived, virtual ones as the plan says, and ends after its transfer.

Without a plan (slices) virtual members are always there, and transfers take no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prismreplay.plan import OpKey, PlannedWorld
from prismreplay.run.following import Placed
from prismtrace.schema import TransferSource

__all__ = ["Entry", "Released", "Timekeeper"]

Ticket = tuple[int, int]
"""A rank, and its number for the operation."""

_KEPT_ROUNDS = 2
_KNOWN = frozenset(
    (
        TransferSource.MEASURED,
        TransferSource.TABLE,
        TransferSource.RING,
        TransferSource.MODEL,
    )
)
_MOST_MEETINGS = 100_000  # that may still be asked about; far more than can be under way


class Released(NamedTuple):
    """When an operation of a rank began (all before it in its queue had ended) and ends.

    All members are there at `ready_ns`; `is_known` if how long it takes then is more than a guess.
    """

    ticket: Ticket
    arrived_ns: int
    end_ns: int
    ready_ns: int
    is_known: bool


@dataclass(eq=False)
class Entry:
    """An operation that a sandbox rank has issued.

    Attributes:
        ticket: whose it is.
        placed: where it is in the graph.
        queue: operations of one queue run one after another.
        batch: those of one batch side by side.
        issued_ns: by the rank's clock.
        waits_for: sandbox ranks that it waits for, when no virtual ones take part.
        boundary: whether virtual ranks take part.
    """

    ticket: Ticket
    placed: Placed
    queue: Hashable
    batch: int | None
    issued_ns: int
    waits_for: tuple[int, ...]
    boundary: bool
    ahead: Sequence[Entry] = ()
    arrived_ns: int | None = None
    end_ns: int | None = None


@dataclass
class _Queue:
    ahead: list[Entry] = field(default_factory=list)
    tail: list[Entry] = field(default_factory=list)
    batch: int | None = None

    def enter(self, entry: Entry) -> None:
        """As `prismreplay.runtime.graph_recorder` does it."""
        if entry.batch is None or entry.batch != self.batch:
            self.ahead, self.tail, self.batch = self.tail, [], entry.batch
        self.tail.append(entry)
        entry.ahead = tuple(self.ahead)


_Meeting = tuple[OpKey, int]


class Timekeeper:
    """Keeps the time of a run.

    Args:
        world: the virtual ranks; None: they are always there.
        origin_ns: when the run began, by the sandbox ranks' clocks.
        transfer_ns: of an operation; by default what the graph says, nothing without a world.
    """

    def __init__(
        self,
        world: PlannedWorld | None,
        origin_ns: int,
        transfer_ns: Callable[[Entry], int] | None = None,
    ) -> None:
        self._world = world
        self._origin_ns = origin_ns
        self._transfer_ns = transfer_ns or self._planned_transfer
        self._queues: dict[tuple[int, Hashable], _Queue] = defaultdict(_Queue)
        self._queued: list[Entry] = []
        self._waiting: list[Entry] = []
        self._met: dict[_Meeting, dict[int, int]] = defaultdict(dict)
        self._after: set[tuple[OpKey, int]] = set()
        self._round = 0

    @property
    def waiting(self) -> list[Entry]:
        """Operations whose end is not known yet."""
        return [*self._queued, *self._waiting]

    def enter(self, entry: Entry) -> list[Released]:
        """A rank has issued an operation; gives those whose ends are known now.

        Raises:
            PlanError: the plan does not know it.
        """
        self._queues[entry.ticket[0], entry.queue].enter(entry)
        self._queued.append(entry)
        return self._advance()

    def _advance(self) -> list[Released]:
        released: list[Released] = []
        moved = True
        while moved:
            moved = False
            for entry in list(self._queued):
                ends = [one.end_ns for one in entry.ahead]
                if any(end is None for end in ends):
                    continue
                self._queued.remove(entry)
                entry.ahead = ()
                self._arrive(entry, max([entry.issued_ns, *(end for end in ends if end)]))
                self._waiting.append(entry)
                moved = True
            for entry in list(self._waiting):
                ready = self._ready_ns(entry)
                if ready is None or entry.arrived_ns is None:
                    continue
                self._waiting.remove(entry)
                entry.end_ns = ready + self._transfer_ns(entry)
                known = self._is_known(entry)
                released.append(
                    Released(entry.ticket, entry.arrived_ns, entry.end_ns, ready, known)
                )
                moved = True
        return released

    def _arrive(self, entry: Entry, time_ns: int) -> None:
        entry.arrived_ns = time_ns
        if not entry.boundary or self._world is None:
            self._met[entry.placed.key, entry.placed.round_][entry.ticket[0]] = time_ns
            if len(self._met) > _MOST_MEETINGS:
                for meeting in list(self._met)[: _MOST_MEETINGS // 2]:
                    del self._met[meeting]
            return
        rank = entry.ticket[0]
        if entry.placed.otherwise is None:
            self._tell_world(entry.placed, rank, time_ns)
            return
        # What follows the training depends on the one, what goes on with it on the other.
        self._tell_world(entry.placed.otherwise, rank, time_ns)
        if (entry.placed.key, rank) not in self._after:
            self._after.add((entry.placed.key, rank))
            self._tell_world(entry.placed, rank, time_ns)

    def _tell_world(self, placed: Placed, rank: int, time_ns: int) -> None:
        if self._world is None:
            return
        self._world.arrived(placed.key, rank, time_ns - self._origin_ns, placed.round_)
        if placed.round_ > self._round:
            self._round = placed.round_
            self._world.forget(self._round - _KEPT_ROUNDS)

    def _ready_ns(self, entry: Entry) -> int | None:
        placed, rank = entry.placed, entry.ticket[0]
        if entry.boundary and self._world is not None:
            found = [
                self._world.ready_ns(place.key, rank, place.round_)
                for place in (placed.otherwise, placed)
                if place is not None
            ]
            ready = next((one for one in found if one is not None), None)
            if ready is None or entry.arrived_ns is None:
                return None
            # What was taken for the end before has an earlier time than this.
            return max(ready + self._origin_ns, entry.arrived_ns)
        met = self._met[placed.key, placed.round_]
        if any(other not in met for other in entry.waits_for):
            return None
        return max(met[other] for other in (rank, *entry.waits_for))

    def _is_known(self, entry: Entry) -> bool:
        if self._transfer_ns != self._planned_transfer:
            return True
        return self._world is not None and entry.placed.transfer_source in _KNOWN

    def _planned_transfer(self, entry: Entry) -> int:
        if self._world is None:
            return 0
        placed = entry.placed
        if not entry.boundary:
            return placed.transfer_ns
        return self._world.transfer_ns(placed.key, entry.ticket[0], placed.round_)
