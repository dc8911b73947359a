"""From a device's clock to the host's: pairs of stamps, and a line through them. No torch in here.

A pair is an event on a stream that has nothing else to do, and the host's time right before it was
put there and right after it was seen to be complete. The device passed it within that interval.
Both clocks run steadily, a few millionths apart: between two pairs a straight line is drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

__all__ = ["ClockLine", "Pair", "Piece"]

_LOOSE = 4
"""A pair that is so many times wider than the median one tells nothing."""


@dataclass(frozen=True)
class Pair:
    """The device's clock showed `device_ns` when the host's was within `host_ns` ± `half_ns`."""

    device_ns: int
    host_ns: int
    half_ns: int


class Piece(NamedTuple):
    """Holds for times of the device from `low` to before `high`; there may be very many."""

    low: float
    high: float
    device_ns: int
    at_host_ns: int
    drift: float

    def host_ns(self, device_ns: int) -> int:
        """The host's time."""
        passed = device_ns - self.device_ns
        return self.at_host_ns + passed + round(passed * self.drift)


@dataclass
class ClockLine:
    """Host times of one device's times.

    Times before the first pair and after the last continue the line beside them.
    """

    _pairs: list[Pair] = field(default_factory=list)
    _good: list[Pair] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def add(self, pair: Pair) -> None:
        """A further pair, later than the ones before."""
        self._pairs.append(pair)
        widths = sorted(each.half_ns for each in self._pairs)
        widest = _LOOSE * widths[len(widths) // 2]
        if pair.half_ns <= widest or not self._good:
            self._good.append(pair)
            self._starts.append(pair.device_ns)

    def __bool__(self) -> bool:
        return bool(self._good)

    @property
    def residual_ns(self) -> int:
        """By how much a host time may be wrong: the median half width of the pairs."""
        widths = sorted(each.half_ns for each in self._good)
        return widths[len(widths) // 2] if widths else 0

    def host_ns(self, device_ns: int) -> int:
        """The host's time at a time of the device; there must be a pair."""
        return self.piece(device_ns).host_ns(device_ns)

    def piece(self, device_ns: float) -> Piece:
        """The straight piece of the line that a time of the device is on."""
        good = self._good
        if len(good) == 1:
            return Piece(-inf, inf, good[0].device_ns, good[0].host_ns, 0.0)
        at = min(max(bisect_right(self._starts, device_ns), 1), len(good) - 1)
        before, after = good[at - 1], good[at]
        length = after.device_ns - before.device_ns
        return Piece(
            -inf if at == 1 else before.device_ns,
            inf if at == len(good) - 1 else after.device_ns,
            before.device_ns,
            before.host_ns,
            (after.host_ns - before.host_ns - length) / length,
        )
