"""What communication takes of a rank's own processor, where the backend runs on it as gloo does.

In a true run the backend's threads share the rank's cores with the program: what they need, the
computation beside them does not get. A virtual communication needs nothing, so a rank would
compute faster than in truth. Here a thread takes as much, from a table that `comm-bench` measured
(`cpu_ns`), while the program computes. What the emulator itself takes, such as handing tensors over,
is no time of the virtual world: the thread pauses. Nor does it run while the program waits:
what the backend would have done then is only counted.

A backend mostly waits for other ranks, so it takes its time bit by bit while a transfer lasts, and
what is left of that when the program has nothing more to compute costs the program nothing. The
thread keeps to that pace.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prismreplay.runtime.operations import MESSAGES, Op
from prismtrace.schema import Kind

if TYPE_CHECKING:
    from prismcalib.comm_table import CommTable, Operation

__all__ = ["Contention", "ProcessorCosts"]

_PIECE_BYTES = 1 << 19
"""Copied in one go: some 50 us, in which the thread does not hear that it has to pause."""
_PORTION_NS, _REST_NS = 300_000, 1_000_000
"""So much comes together before the thread takes it; it rests that long in between, at most."""
_AT_A_TIME = 2
"""Operations that the backend has under way at once."""


class ProcessorCosts:
    """Processor time of operations, in ns.

    Args:
        table: with `cpu_ns`; operations that it does not say anything about take none.
    """

    def __init__(self, table: CommTable) -> None:
        self._table = table
        self._hosts: dict[str, dict[int, int]] = {}
        """By kind and members, on how few hosts that was measured."""
        for operation, _ in table.measured():
            fewest = self._hosts.setdefault(operation.kind, {})
            hosts = fewest.get(operation.ranks, operation.hosts)
            fewest[operation.ranks] = min(hosts, operation.hosts)

    def of(self, op: Op, members: int) -> int:
        """Of one rank, in a group of so many members.

        A group that is not in the table takes as long as the nearest smaller one, by the bytes that
        a rank moves in each. On how many hosts its members are makes no difference to a rank.
        """
        operation, factor = self._nearest(op, members)
        return 0 if operation is None else round(self._table.cpu_ns(operation) * factor)

    def span_ns(self, op: Op, members: int) -> int:
        """How long the operation itself takes; 0 if the table does not say."""
        operation, factor = self._nearest(op, members)
        found = None if operation is None else self._table.estimate(operation)
        return 0 if found is None else round(found.time_ns * factor)

    def _nearest(self, op: Op, members: int) -> tuple[Operation | None, float]:
        """An operation of the table, and how much larger the one asked for is."""
        from prismcalib.comm_logs import bus_factor
        from prismcalib.comm_table import Operation

        kind, count = op.kind, members
        if op.call in MESSAGES:
            kind, count = Kind.SEND, 2
        measured = self._hosts.get(kind, {})
        if not measured or count < 2 or (op.dtype is None and kind != Kind.BARRIER):
            return None, 1.0
        near = max((one for one in measured if one <= count), default=min(measured))
        dtype = None if op.dtype is None else op.dtype.value
        operation = Operation(kind, dtype, near, measured[near], op.payload_bytes)
        return operation, bus_factor(kind, count) / bus_factor(kind, near)


@dataclass(slots=True)
class _Owed:
    """Of an operation: what is left of its cost, and from when on it takes how long, in ns."""

    number: int
    left_ns: int
    cost_ns: int
    begins_ns: int
    span_ns: int

    def due_ns(self, now_ns: int) -> int:
        """What it would have taken by now, less what it has; negative if that is more."""
        elapsed = now_ns - self.begins_ns
        share = 1.0 if elapsed >= self.span_ns else max(0, elapsed) / self.span_ns
        return round(self.cost_ns * share) - self.cost_ns + self.left_ns


class Contention:
    """Takes processor time beside the program, for one rank.

    Args:
        cpu_ns: of the calling thread.
        work: something that takes a thread tens of microseconds, without the interpreter's lock.
        clock: that operations last by.
    """

    def __init__(
        self,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        work: Callable[[], object] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._cpu_ns = cpu_ns
        self._work = work
        self._clock = clock
        self._owed: deque[_Owed] = deque()
        self._ends: deque[int] = deque([0] * _AT_A_TIME, maxlen=_AT_A_TIME)
        """When the latest operations end, as far as can be known when they begin."""
        self._changed = threading.Condition()
        self._pauses = 0
        self._started = False
        self._is_taking = False
        self._resumed_ns = -_PORTION_NS
        self.taken_ns = 0
        self.waived_ns = 0

    def begin(self, number: int, cost_ns: int, span_ns: int = 0) -> None:
        """An operation begins.

        Args:
            number: grows.
            cost_ns: processor time that it takes.
            span_ns: how long it is under way, once those before it leave room for it.
        """
        if cost_ns <= 0:
            return
        if not self._started:
            self._started = True
            threading.Thread(target=self._take, name="contention", daemon=True).start()
        with self._changed:
            begins = max(self._clock(), self._ends[0])
            self._ends.append(begins + span_ns)
            self._owed.append(_Owed(number, cost_ns, cost_ns, begins, span_ns))
            self._changed.notify()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here is not the program."""
        self._pauses += 1
        try:
            yield
        finally:
            self._resumed_ns = self._clock()
            self._pauses -= 1

    def waited(self, number: int, elapsed_ns: int) -> int:
        """The program waits for an operation, for `elapsed_ns` at least.

        Returns:
            How much longer the backend needs for it and all before it, in ns.
        """
        with self._changed:
            self.waived_ns += self._pay(max(0, elapsed_ns))
            longer = 0
            while self._owed and self._owed[0].number <= number:
                longer += self._owed.popleft().left_ns
            self.waived_ns += longer
            return longer

    def _take(self) -> None:
        work = self._work or _copying()
        before = self._cpu_ns()
        while True:
            with self._changed:
                while not self._owed or (rest := self._rest_ns()):
                    self._changed.wait(rest / 1e9 if self._owed else None)
                    before = self._cpu_ns()
            work()
            now = self._cpu_ns()
            with self._changed:
                self.taken_ns += now - before
                self._pay(now - before)
            before = now

    def _rest_ns(self) -> int:
        """For how long the backend would take nothing worth while; 0 if it would now."""
        now = self._clock()
        if self._pauses or now - self._resumed_ns < _PORTION_NS:
            # Between waits that follow each other the program does not compute either.
            return _REST_NS
        due = sum(one.due_ns(now) for one in self._owed)
        if due >= _PORTION_NS or (due > 0 and self._is_taking):
            self._is_taking = True
            return 0
        self._is_taking = False
        ends = max(one.begins_ns + one.span_ns for one in self._owed)
        return 0 if ends <= now else min(_REST_NS, ends - now)

    def _pay(self, time_ns: int) -> int:
        """Take so much off what is owed, first things first; how much of it was owed."""
        left = time_ns
        while self._owed and left:
            paid = min(left, self._owed[0].left_ns)
            self._owed[0].left_ns -= paid
            left -= paid
            if not self._owed[0].left_ns:
                self._owed.popleft()
        return time_ns - left


def _copying() -> Callable[[], object]:
    """Copies memory as a socket would; `ctypes` gives the interpreter's lock up meanwhile."""
    source, target = (ctypes.create_string_buffer(_PIECE_BYTES) for _ in range(2))
    return lambda: ctypes.memmove(target, source, _PIECE_BYTES)
