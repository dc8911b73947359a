"""Marks in the streams of a device, and its clock beside the host's. No torch in here.

`Devices` is the seam: all that is asked of torch and of the driver.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from prismreplay.runtime.clock_line import ClockLine, Pair

__all__ = ["DeviceClock", "Devices", "Mark", "StreamKey"]

StreamKey = tuple[int, int, int]
"""A stream as torch names it: its id, its device's number, its device's type."""
Event = Any

SPIN_NS = 50_000
"""How long the host looks at an event on a stream that has nothing else to do."""
FIRST_SPIN_NS = 200_000_000
TRIES = 3


class Devices(Protocol):
    """What a timeline needs of torch and the driver. Events are made with timing."""

    def host_ns(self) -> int:
        """The host's clock."""

    def ready(self) -> bool:
        """Whether events can be put into the current stream: a device is in use, no capture."""

    def current(self) -> StreamKey:
        """The current stream of this thread."""

    def new_event(self) -> Event:
        """An event that was put nowhere yet."""

    def record(self, event: Event, stream: StreamKey) -> None:
        """Put an event into a stream."""

    def done(self, event: Event) -> bool:
        """Whether the device is past it. RuntimeError when the device is out of order."""

    def elapsed_ns(self, earlier: Event, later: Event) -> float:
        """Time between two events that the device is past."""

    def private_stream(self, device: int) -> StreamKey:
        """A new stream that nobody else gets and that the default stream does not wait for."""

    def connections(self) -> int:
        """How many streams of a device can wait without holding up others."""

    def after(self, work: Any, stream: StreamKey) -> None:
        """Have a stream wait for a communication (a torch Work)."""

    def memory(self, device: int) -> tuple[int, int]:
        """Bytes allocated now, and the most since the program last reset that number."""


class Mark:
    """A place in a stream, or a moment of the host. `ns` is known once the device is past it."""

    __slots__ = ("anchor", "event", "host_ns", "ns", "stream")

    def __init__(
        self,
        host_ns: int,
        stream: StreamKey | None = None,
        event: Event = None,
        anchor: _Anchor | None = None,
    ) -> None:
        self.host_ns = host_ns
        self.stream = stream
        self.event = event
        self.anchor = anchor
        self.ns: int | None = host_ns if event is None else None


class _Anchor:
    """An event on a device's own clock stream; times of marks are counted from one before them."""

    __slots__ = ("device_ns", "earliest_ns", "event", "latest_ns", "number")

    def __init__(self, number: int, event: Event, earliest_ns: int, latest_ns: int | None) -> None:
        self.number = number
        self.event = event
        self.earliest_ns = earliest_ns
        self.latest_ns = latest_ns
        self.device_ns: float | None = None


class DeviceClock:
    """Pool of events, clock stream and anchors of one device."""

    def __init__(self, devices: Devices, number: int) -> None:
        self._devices = devices
        self.number = number
        self.pool: list[Event] = []
        self.made = 0
        self.line = ClockLine()
        self._stream = devices.private_stream(number)
        self._unplaced: deque[_Anchor] = deque()
        self.anchor = self._stamp(FIRST_SPIN_NS, 0)
        self.anchor.device_ns = 0.0
        self._placed = self.anchor
        self._learn(self.anchor)

    def event(self) -> Event:
        """A pooled event, or a new one."""
        if self.pool:
            return self.pool.pop()
        self.made += 1
        return self._devices.new_event()

    def pair(self, spin_ns: int = SPIN_NS) -> None:
        """Take stamps of both clocks; the narrowest of a few tries counts."""
        best = self._stamp(spin_ns, self.anchor.number + 1)
        for _ in range(TRIES - 1):
            if best.latest_ns is None:
                break  # others hold this stream up, too
            best = min(best, self._stamp(spin_ns, best.number), key=_width)
        self.anchor = best
        self._unplaced.append(best)

    def _stamp(self, spin_ns: int, number: int) -> _Anchor:
        now, event = self._devices.host_ns, self._devices.new_event()
        begun = now()
        self._devices.record(event, self._stream)
        while not self._devices.done(event):
            if now() - begun > spin_ns:
                return _Anchor(number, event, begun, None)
        return _Anchor(number, event, begun, now())

    def place(self) -> int:
        """Number of the last anchor that the device is past; earlier ones get their times."""
        while self._unplaced and self._devices.done(self._unplaced[0].event):
            anchor = self._unplaced.popleft()
            passed = self._devices.elapsed_ns(self._placed.event, anchor.event)
            anchor.device_ns = (self._placed.device_ns or 0.0) + passed
            self._placed = anchor
            self._learn(anchor)
        return self._placed.number

    def _learn(self, anchor: _Anchor) -> None:
        if anchor.latest_ns is None:
            if self.line:
                return
            # Better than nothing: the device was too busy to be looked at.
            anchor.latest_ns = self._devices.host_ns()
        half = (anchor.latest_ns - anchor.earliest_ns) // 2
        self.line.add(Pair(round(anchor.device_ns or 0.0), anchor.earliest_ns + half, half))

    def time_of(self, mark: Mark) -> int:
        """The host's time when the device passed a mark."""
        return next(self._times((mark,)))

    def resolve(self, marks: Iterable[Mark]) -> None:
        """Give marks that the device is past their times, and their events back to the pool."""
        give_back = self.pool.append
        for mark, ns in zip(marks, self._times(marks), strict=True):
            mark.ns = ns
            give_back(mark.event)
            mark.event = mark.anchor = None

    def _times(self, marks: Iterable[Mark]) -> Iterator[int]:
        elapsed_ns, line, piece = self._devices.elapsed_ns, self.line, None
        for mark in marks:
            anchor = mark.anchor
            if anchor is None or anchor.device_ns is None:
                yield mark.host_ns
                continue
            at = anchor.device_ns + elapsed_ns(anchor.event, mark.event)
            if piece is None or not piece.low <= at < piece.high:
                piece = line.piece(at)
            passed = round(at) - piece.device_ns
            yield piece.at_host_ns + passed + round(passed * piece.drift)


def _width(anchor: _Anchor) -> float:
    return float("inf") if anchor.latest_ns is None else anchor.latest_ns - anchor.earliest_ns
