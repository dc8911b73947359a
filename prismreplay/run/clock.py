"""The time of a sandbox rank: the machine's, less what the emulator itself has cost.

Handing tensors over, or an answer that comes after the operation's virtual end, makes a rank late
without any counterpart on the cluster. Such delays are the rank's *debt*. Its clock shows the
machine's time minus the debt, arrivals are stamped with it and ends are held to it, so delays do
not ratchet up: what a delay holds up in the virtual world is held up by nothing.

A clock can also run at another *pace*, to see what a faster or slower piece of the program would
change: at pace 0.8, what takes 10 ms counts as 8.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["RunClock"]


class RunClock:
    """A clock that can be set back. All sandbox ranks share the machine's clock beneath.

    Attributes:
        debt_ns: by how much it is behind, as of the last change of pace.
        late_ns: part of the debt that comes from answers after their time.
        late_answers: how many there were.
        handing_ns: part that handing tensors over has taken.
    """

    def __init__(self, machine: Callable[[], int] = time.monotonic_ns) -> None:
        self.machine = machine
        self.debt_ns = 0
        self.late_ns = 0
        self.late_answers = 0
        self.handing_ns = 0
        self._pace = 1.0
        self._paced_since = 0

    def now(self) -> int:
        """Nanoseconds, as a rank on the cluster would see them."""
        machine = self.machine()
        if self._pace == 1.0:
            return machine - self.debt_ns
        return machine - self.debt_ns - self._gained(machine)

    def late(self, delay_ns: int) -> None:
        """An answer was that much too late; at its own pace."""
        self.late_ns += delay_ns
        self.late_answers += delay_ns > 0
        self.debt_ns += delay_ns

    def handed_over(self, cost_ns: int) -> None:
        """Handing tensors over has taken so long; at its own pace."""
        self.handing_ns += cost_ns
        self.debt_ns += cost_ns

    def take_over(self, debt_ns: int) -> None:
        """Another rank's debt has held this one up."""
        self.debt_ns += debt_ns

    @property
    def pace(self) -> float:
        """Its time over the machine's."""
        return self._pace

    def run_at(self, pace: float) -> None:
        """Go on at another pace."""
        machine = self.machine()
        if self._pace != 1.0:
            self.debt_ns += self._gained(machine)
        self._pace, self._paced_since = pace, machine

    @contextmanager
    def at_its_own_pace(self) -> Iterator[None]:
        """What is no computation of the program takes the time that it takes."""
        if self._pace == 1.0:
            yield
            return
        pace = self._pace
        self.run_at(1.0)
        try:
            yield
        finally:
            self.run_at(pace)

    def _gained(self, machine: int) -> int:
        return round((machine - self._paced_since) * (1.0 - self._pace))
