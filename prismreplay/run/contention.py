"""What communication takes of a rank's own processor, where the backend runs on it as gloo does.

In a true run the backend's threads share the rank's cores with the program: what they need, the
computation beside them does not get. A virtual communication needs nothing, so a rank would
compute faster than in truth. Here a thread takes as much, from a table that `comm-bench` measured
(`cpu_ns`), while the program computes. What the emulator itself takes, such as handing tensors over,
is no time of the virtual world: the thread pauses. Nor does it run while the program waits:
what the backend would have done then is only counted.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prismreplay.runtime.operations import Call, Op
from prismtrace.schema import Kind

if TYPE_CHECKING:
    from prismcalib.comm_table import CommTable

__all__ = ["Contention", "ProcessorCosts"]

_PIECE_BYTES = 1 << 19
"""Copied in one go: some 50 us, in which the thread does not hear that it has to pause."""


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
        from prismcalib.comm_logs import bus_factor
        from prismcalib.comm_table import Operation

        kind, count = op.kind, members
        if op.call in (Call.SEND, Call.RECV):
            kind, count = Kind.SEND, 2
        measured = self._hosts.get(kind, {})
        if not measured or count < 2 or op.dtype is None:
            return 0
        near = max((one for one in measured if one <= count), default=min(measured))
        operation = Operation(kind, op.dtype.value, near, measured[near], op.payload_bytes)
        found = self._table.cpu_ns(operation)
        return round(found * bus_factor(kind, count) / bus_factor(kind, near))


class Contention:
    """Takes processor time beside the program, for one rank.

    Args:
        cpu_ns: of the calling thread.
        work: something that takes a thread tens of microseconds, without the interpreter's lock.
    """

    def __init__(
        self,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        work: Callable[[], object] | None = None,
    ) -> None:
        self._cpu_ns = cpu_ns
        self._work = work
        self._owed: deque[list[int]] = deque()
        """Number of an operation, and what is left of it, in ns."""
        self._changed = threading.Condition()
        self._pauses = 0
        self._started = False
        self.taken_ns = 0
        self.waived_ns = 0

    def begin(self, number: int, cost_ns: int) -> None:
        """An operation begins that takes so long; `number` grows."""
        if cost_ns <= 0:
            return
        if not self._started:
            self._started = True
            threading.Thread(target=self._take, name="contention", daemon=True).start()
        with self._changed:
            self._owed.append([number, cost_ns])
            self._changed.notify()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in here is not the program."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if self._owed and not self._pauses:
                with self._changed:
                    self._changed.notify()

    def waited(self, number: int, elapsed_ns: int) -> int:
        """The program waits for an operation, for `elapsed_ns` at least.

        Returns:
            How much longer the backend needs for it and all before it, in ns.
        """
        with self._changed:
            self.waived_ns += self._pay(max(0, elapsed_ns))
            longer = 0
            while self._owed and self._owed[0][0] <= number:
                longer += self._owed.popleft()[1]
            self.waived_ns += longer
            return longer

    def _take(self) -> None:
        work = self._work or _copying()
        before = self._cpu_ns()
        while True:
            with self._changed:
                while self._pauses or not self._owed:
                    self._changed.wait()
                    before = self._cpu_ns()
            work()
            now = self._cpu_ns()
            with self._changed:
                self.taken_ns += now - before
                self._pay(now - before)
            before = now

    def _pay(self, time_ns: int) -> int:
        """Take so much off what is owed, first things first; how much of it was owed."""
        left = time_ns
        while self._owed and left:
            paid = min(left, self._owed[0][1])
            self._owed[0][1] -= paid
            left -= paid
            if not self._owed[0][1]:
                self._owed.popleft()
        return time_ns - left


def _copying() -> Callable[[], object]:
    """Copies memory as a socket would; `ctypes` gives the interpreter's lock up meanwhile."""
    source, target = (ctypes.create_string_buffer(_PIECE_BYTES) for _ in range(2))
    return lambda: ctypes.memmove(target, source, _PIECE_BYTES)
