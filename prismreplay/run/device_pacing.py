"""Ends of operations on a GPU: streams are held until operations end in the virtual world.

The host looks an operation up in the plan and launches what the GPU then does by itself
(`prismreplay.plugin.advancing`): note when the stream gets there, find out when all members are there,
hold the stream until the transfer is over. What the rank computes in place of the backend goes
between arrival and hold, and hides in the transfer.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from prismreplay.plan import Plan
from prismreplay.plugin.advance_code import Code
from prismreplay.run.device_plan import DevicePlan, Program
from prismreplay.run.device_work import DeviceWork
from prismreplay.run.following import Placed
from prismreplay.run.marks import DeviceSummary

__all__ = ["Held", "Pacing", "PlanPacer", "device_plan_of"]

_LOOK_EVERY = 4096
"""Launches after which it is read how earlier ones went; the device keeps four times as many."""


class Pacing(Protocol):
    """What an `Advancer` is asked for; see there."""

    def begin(self, origin_ns: int) -> None:
        """Count times from a moment of the host's monotonic clock."""

    def prepare(self, codes: Iterable[Code]) -> None:
        """Get codes ready that will be launched."""

    def arrive(self, program: Program | None, stream: int) -> int:
        """Note that a stream gets to an operation; its ticket."""

    def launch(
        self, program: Program | None, stream: int, *, ticket: int | None = None, owes: bool = False
    ) -> int:
        """Hold a stream until an operation ends; its ticket."""

    def records(self) -> Iterable[Any]:
        """How operations went that are over: objects with lateness_ns."""

    def check(self) -> None:
        """Raise if one has waited in vain."""

    def release(self) -> None:
        """Hold nothing any more."""


def device_plan_of(plan: Plan, rank: int) -> DevicePlan:
    """That of one sandbox rank, to be pickled: without polars, which does not survive a fork."""
    made = DevicePlan(plan, rank)
    # What a rank asks it for is in it beside these.
    made.plan = made._names.plan = None  # type: ignore[assignment]  # noqa: SLF001
    return made


class Held(NamedTuple):
    """Operations that have arrived and whose stream is not held yet."""

    programs: Sequence[Program]
    tickets: Sequence[int | None]
    stream: int
    owes: bool


@dataclass
class PlanPacer:
    """Holds the streams of a rank.

    Attributes:
        plan: the rank's.
        origin_ns: when the run began, on the host's monotonic clock.
        make: makes what launches, at the first operation: the program uses its GPU by then.
        starting_ns: what that has taken.
    """

    plan: DevicePlan
    origin_ns: int
    make: Callable[[DevicePlan], Pacing]
    starting_ns: int = 0
    _pacing: Pacing | None = None
    _late: list[int] = field(default_factory=list)
    _launched: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def arrive(self, works: Sequence[DeviceWork], stream: int, *, computes: bool) -> Held | None:
        """Operations that are launched as one get to the front of a stream.

        Args:
            works: of one launch.
            stream: the driver's handle of it.
            computes: something is put into the stream before `hold`.
        """
        pacing = self.pacing
        pacing.check()
        programs = self._programs(works, stream)
        if not programs:
            return None
        tickets: list[int | None] = [None] * len(programs)
        if computes or len(programs) > 1:
            tickets = [pacing.arrive(program, stream) for program in programs]
        return Held(programs, tickets, stream, not any(work.asynchronous for work in works))

    def hold(self, held: Held) -> None:
        """Hold the stream until all of them end."""
        pacing = self.pacing
        for program, ticket in zip(held.programs, held.tickets, strict=True):
            pacing.launch(program, held.stream, ticket=ticket, owes=held.owes)
        with self._lock:
            self._launched += len(held.programs)
            if self._launched >= _LOOK_EVERY:
                self._launched = 0
                self._look(pacing)

    def summarize(self, summary: DeviceSummary) -> DeviceSummary:
        """How well ends were met, once the device has done all; what starting took is taken off.

        Raises:
            PluginTimeoutError: an operation has waited in vain.
        """
        if self._pacing is None:
            return summary
        summary = summary._replace(issuing_ns=max(0, summary.issuing_ns - self.starting_ns))
        self._pacing.check()
        with self._lock:
            self._look(self._pacing)
        met = sorted(self._late)
        if not met:
            return summary
        late = [one for one in met if one > _LATE_NS]
        return summary._replace(
            holds=len(met),
            hold_median_ns=round(statistics.median(met)),
            hold_p99_ns=met[(len(met) - 1) * 99 // 100],
            hold_worst_ns=met[-1],
            late=len(late),
            late_ns=sum(late),
        )

    @property
    def pacing(self) -> Pacing:
        """What launches; made at the first operation, or by asking for it."""
        return self._pacing or self._begin()

    def release(self) -> None:
        """Somebody has failed: no stream is held any more."""
        if self._pacing is not None:
            self._pacing.release()

    def _begin(self) -> Pacing:
        begun = time.monotonic_ns()
        made = self.make(self.plan)
        made.prepare(self.plan.prepare())
        # Compiling and loading kernels has no counterpart on the cluster.
        self.starting_ns = time.monotonic_ns() - begun
        made.begin(self.origin_ns + self.starting_ns)
        self._pacing = made
        return made

    def _programs(self, works: Sequence[DeviceWork], stream: int) -> list[Program]:
        """What the device does for those that virtual ranks take part in."""
        plan = self.plan
        with self._lock:
            places = [
                one
                for one in (work.placed for work in works)
                if not one.skipping and plan.is_boundary(one.key, one.round_)
            ]
            if len(places) > 1:
                rounds = {one.round_ for one in places}
                if len(rounds) == 1 and not any(one.otherwise for one in places):
                    # One waits for what others of the batch have begun.
                    return [plan.batch([(one.key, one.round_) for one in places], queue=stream)]
            return [self._program(one, stream) for one in places]

    def _program(self, placed: Placed, stream: int) -> Program:
        again = placed.otherwise
        return self.plan.program(
            placed.key,
            placed.round_,
            queue=stream,
            otherwise=None if again is None else (again.key, again.round_),
        )

    def _look(self, pacing: Pacing) -> None:
        """Read how operations went."""
        self._late += [one.lateness_ns for one in pacing.records()]


_LATE_NS = 20_000
"""A hold that ends later than this was not held at all: its time had passed."""
