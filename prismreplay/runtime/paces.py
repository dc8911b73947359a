"""Marks at the times at which they would be, were parts of the program faster. No torch in here."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from prismreplay.runtime.device_clock import Mark

__all__ = ["Paces"]


class Paces:
    """Where the time of a rank begins to count more or less than it is."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Mark, float]] = []
        self._since: list[int] = []
        """On the clock of the machine; ascending."""
        self._there: list[int] = []
        """What the time is then."""
        self._pace: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._waiting or self._since)

    def add(self, mark: Mark, pace: float) -> None:
        """From a mark on, time counts `pace` times as much."""
        self._waiting.append((mark, pace))

    def apply(self, marks: Sequence[Mark]) -> None:
        """Change the times of marks that have just got theirs; those that change the pace are
        among them, or were before.
        """
        known = len(self._waiting)
        for at, (mark, pace) in enumerate(self._waiting):
            if mark.ns is None:
                known = at
                break
            since = max([mark.ns, *self._since[-1:]])
            self._there.append(self.time_of(since))
            self._since.append(since)
            self._pace.append(pace)
        del self._waiting[:known]
        for mark in marks:
            if mark.ns is not None:
                mark.ns = self.time_of(mark.ns)

    def time_of(self, ns: int) -> int:
        """What counts at a time of the machine."""
        at = bisect_right(self._since, ns) - 1
        if at < 0:
            return ns
        return self._there[at] + round((ns - self._since[at]) * self._pace[at])
