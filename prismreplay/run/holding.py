"""Wait until a point in time, to a few microseconds, without burning a core all the while.

The kernel wakes a sleeper late: by its timer slack (50 us unless told otherwise), and by
whatever else runs. So we ask for the least slack, sleep to shortly before the deadline, and
spin the rest. How much is slept less adapts to how late the wake-ups were; how late the
deadlines were met is kept, since an emulation is as true as its holds are.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Holder", "Lateness"]

_PR_SET_TIMERSLACK = 29
_LEAST_MARGIN_NS, _MOST_MARGIN_NS = 20_000, 2_000_000
_KEPT_ERRORS = 1_000_000


@dataclass(frozen=True)
class Lateness:
    """By how much deadlines were missed, in nanoseconds.

    `holds` counts the deadlines that lay ahead when `hold_until` was called; `late_calls` those
    that had passed already, by `called_late_ns` altogether: time that the emulator itself cost.
    """

    holds: int
    median_ns: int
    p99_ns: int
    worst_ns: int
    late_calls: int
    called_late_ns: int


class Holder:
    """Holds for one thread."""

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._margin_ns = 200_000
        self._errors = array("q")
        self._late_calls = self._called_late_ns = 0
        # Of the calling thread only; without it, wake-ups are later and margins longer.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def hold_until(self, deadline_ns: int) -> int:
        """Return at the deadline, or at once if it has passed; by how much it is late, in ns."""
        now = self._clock()
        if now >= deadline_ns:
            self._late_calls += 1
            self._called_late_ns += now - deadline_ns
            return now - deadline_ns
        spare = deadline_ns - now - self._margin_ns
        if spare > 0:
            self._sleep(spare / 1e9)
            woken = self._clock()
            self._adapt(woken - (now + spare))
            now = woken
        while now < deadline_ns:
            now = self._clock()
        late = now - deadline_ns
        if len(self._errors) < _KEPT_ERRORS:
            self._errors.append(late)
        return late

    def _adapt(self, overslept_ns: int) -> None:
        """Twice the usual oversleep: longer at once after a late wake-up, shorter slowly."""
        wanted = min(max(2 * overslept_ns, _LEAST_MARGIN_NS), _MOST_MARGIN_NS)
        if wanted > self._margin_ns:
            self._margin_ns = wanted
        else:
            self._margin_ns += (wanted - self._margin_ns) // 16

    def report(self) -> Lateness:
        """How well deadlines were met so far."""
        errors = sorted(self._errors)
        last = len(errors) - 1
        return Lateness(
            holds=len(errors),
            median_ns=errors[last // 2] if errors else 0,
            p99_ns=errors[last * 99 // 100] if errors else 0,
            worst_ns=errors[-1] if errors else 0,
            late_calls=self._late_calls,
            called_late_ns=self._called_late_ns,
        )
