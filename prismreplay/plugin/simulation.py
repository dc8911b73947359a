"""A schedule, performed on sets: who contributed to which element, and who raced with whom.

Values are bit masks of members. Reducing two demands that no member is in both, so a result of
all ones has every contribution exactly once. Links hold a bounded number of messages, as the
device's do, and programs that wait for each other are found.

Programs exchange messages in order over links that only they use, and each does one thing after
another. So what each of them receives does not depend on how fast the others are; only memory
that two programs of a role share could be touched in another order. With `races`, accesses carry
vector clocks, and two of which neither is known to come first are refused, if one writes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prismreplay.plugin.moves import Move, Part, Role, Schedule, Span

__all__ = ["Memory", "ScheduleError", "simulate"]

Memory = dict[Role, list[int]]
Clock = tuple[int, ...]


class ScheduleError(AssertionError):
    """A schedule that is wrong: a contribution twice, programs that wait for each other, a race."""


def simulate(
    schedule: Schedule,
    source: Mapping[Role, Sequence[int]],
    *,
    slots: int = 1,
    shared: bool = False,
    races: bool = False,
    reduce: Callable[[int, int], int] | None = None,
) -> Memory:
    """What each role's `data` holds afterwards.

    Args:
        schedule: which.
        source: per role its contribution, an integer per element.
        slots: messages that a link holds. A message is a whole span here.
        shared: `data` is the same memory as `source`, where the schedule allows that.
        races: look for accesses without an order.
        reduce: of two values; None unites masks that have no member in common.

    Raises:
        ScheduleError: the schedule is wrong.
    """
    if shared and not schedule.in_place:
        raise ScheduleError(f"{schedule.name} is not made for one memory")
    state = _State(schedule, source, shared, reduce or _united, _Watch() if races else None)
    queues: list[deque[tuple[list[int], Clock]]] = [deque() for _ in schedule.links]
    clocks: list[list[int]] = [[0] * len(schedule.programs) for _ in schedule.programs]
    at = [0] * len(schedule.programs)
    sent = [False] * len(schedule.programs)
    going = True
    while going:
        going = False
        for number, program in enumerate(schedule.programs):
            while at[number] < len(program.moves):
                move, clock = program.moves[at[number]], clocks[number]
                if move.send_link is not None and not sent[number]:
                    queue = queues[move.send_link]
                    if len(queue) >= slots:
                        break
                    clock[number] += 1
                    values = state.read(program.role, move.send, move.send_part, number, clock)
                    queue.append((values, tuple(clock)))
                    sent[number] = going = True
                if move.receive_link is not None:
                    if not queues[move.receive_link]:
                        break
                    values, theirs = queues[move.receive_link].popleft()
                    clock[:] = map(max, clock, theirs)
                    clock[number] += 1
                    state.keep(program.role, move, values, number, clock)
                at[number] += 1
                sent[number] = False
                going = True
    stuck = [
        f"{program} in move {at[number]} of {len(program.moves)}"
        for number, program in enumerate(schedule.programs)
        if at[number] < len(program.moves)
    ]
    if stuck or any(queues):
        raise ScheduleError(f"{schedule.name} does not end: {'; '.join(stuck) or 'unread sends'}")
    return state.data


def _united(one: int, other: int) -> int:
    if one & other:
        raise ScheduleError(f"a contribution is added twice: {one:b} and {other:b}")
    return one | other


@dataclass
class _State:
    schedule: Schedule
    source: Mapping[Role, Sequence[int]]
    shared: bool
    reduce: Callable[[int, int], int]
    watch: _Watch | None

    def __post_init__(self) -> None:
        counts = self.schedule.data_counts
        if self.shared:
            self.data = {role: list(values) for role, values in self.source.items()}
            self.source = self.data
        else:
            self.data = {role: [0] * counts[role] for role in self.schedule.roles}

    def read(self, role: Role, span: Span, part: Part, program: int, clock: list[int]) -> list[int]:
        if part is Part.IDENTITY:
            return [0] * span.count
        memory = self.source if part is Part.SOURCE else self.data
        values = list(memory[role][span.at : span.at + span.count])
        if len(values) != span.count:
            raise ScheduleError(f"{self.schedule.name} reads beyond {part.name} of {role}")
        self._seen(role, span, part, program, clock, write=False)
        return values

    def keep(
        self, role: Role, move: Move, values: list[int], program: int, clock: list[int]
    ) -> None:
        span = move.receive
        if len(values) != span.count:
            raise ScheduleError(f"{len(values)} elements sent, {span.count} expected")
        if move.own is not None:
            own = self.read(role, Span(move.own, span.count), move.own_part, program, clock)
            values = list(map(self.reduce, values, own))
        if span.at + span.count > len(self.data[role]):
            raise ScheduleError(f"{self.schedule.name} writes beyond the data of {role}")
        self._seen(role, span, Part.DATA, program, clock, write=True)
        self.data[role][span.at : span.at + span.count] = values

    def _seen(
        self, role: Role, span: Span, part: Part, program: int, clock: list[int], *, write: bool
    ) -> None:
        if self.watch is not None:
            part = Part.DATA if self.shared else part
            for element in range(span.at, span.at + span.count):
                self.watch.seen((role, part, element), program, clock, write=write)


class _Watch:
    """The last write of each element and the reads since, as (program, its own time)."""

    def __init__(self) -> None:
        self._writes: dict[tuple[Role, Part, int], tuple[int, int]] = {}
        self._reads: dict[tuple[Role, Part, int], dict[int, int]] = {}

    def seen(
        self, place: tuple[Role, Part, int], program: int, clock: list[int], *, write: bool
    ) -> None:
        before = [self._writes[place]] if place in self._writes else []
        reads = self._reads.setdefault(place, {})
        if write:
            before += reads.items()
        for other, time in before:
            if clock[other] < time:
                raise ScheduleError(f"programs {other} and {program} race for {place}")
        if write:
            self._writes[place] = (program, clock[program])
            reads.clear()
        else:
            reads[program] = clock[program]
