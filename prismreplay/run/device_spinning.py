"""The pace of a rank's GPU in named pieces of its program (`--spin`); see `prismreplay.run.spinning`.

A `DevicePace` stands in for the rank's clock there:

    pace = DevicePace(timeline, kernels)
    spinner = Spinner(options.spins, recorder.position, pace)

What a piece takes is measured by the GPU, on the stream that is current where the piece begins.

- Slower (a factor above 1): behind the piece, the stream is kept busy for as long as is missing.
  Time passes for real, also for what runs beside it.
- Faster: a GPU cannot be. The rank's clock is set back instead: the plan on the device counts the
  rank's later arrivals as so much earlier (`Advancer.owe`), and the trace has the piece, and all that
  comes later, at the times at which they would have been (`Timeline.run_at`). What runs beside such a piece
  and ends in it seems shorter, too.

Communication takes the time that it takes: roles enter `at_its_own_pace` around operations on the
program's stream, and around waits. What C++ code does later, such as the backward pass of what a
piece has computed, is none of the piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from prismreplay.runtime.device_clock import StreamKey

__all__ = ["DevicePace", "PaceKernels", "Pacing", "SpinKernels"]

Note = Any


class Pacing(Protocol):
    """What an `Advancer` is asked for."""

    def arrive(self, program: None, stream: int) -> int:
        """Note when a stream gets here; returns a ticket."""

    def owe(self, begin: int, end: int, share: float, stream: int) -> None:
        """Count a share of the time between two tickets as not spent."""


class _Stretching(Protocol):
    """What a `Stretcher` is asked for."""

    def note(self, stream: int) -> int: ...

    def stretch(self, note: int, more: float, stream: int) -> None: ...


class SpinKernels(Protocol):
    """What is launched around pieces; see `PaceKernels`."""

    def begin(self, pace: float, stream: StreamKey) -> Note:
        """A piece begins on a stream."""

    def end(self, note: Note, pace: float, stream: StreamKey) -> None:
        """It ends."""


class PaceKernels:
    """On a GPU.

    Args:
        handle: the driver's handle of a stream.
        stretching: makes a `Stretcher`, when the first piece is slower.
        pacing: the rank's `Advancer`; None without a plan.
    """

    def __init__(self, handle: Any, stretching: Any, pacing: Any) -> None:
        self._handle = handle
        self._make, self._pacing = stretching, pacing
        self._stretching: _Stretching | None = None

    def begin(self, pace: float, stream: StreamKey) -> Note:
        """See `SpinKernels`."""
        handle = self._handle(stream)
        if pace > 1.0:
            self._stretching = self._stretching or self._make()
            return self._stretching.note(handle)
        pacing: Pacing | None = self._pacing()
        return None if pacing is None else pacing.arrive(None, handle)

    def end(self, note: Note, pace: float, stream: StreamKey) -> None:
        """See `SpinKernels`."""
        handle = self._handle(stream)
        if pace > 1.0:
            assert self._stretching is not None  # noqa: S101  a piece has begun
            self._stretching.stretch(note, pace - 1.0, handle)
            return
        pacing: Pacing | None = self._pacing()
        if pacing is not None and note is not None:
            pacing.owe(note, pacing.arrive(None, handle), 1.0 - pace, handle)


class _Timeline(Protocol):
    """What a `Timeline` is asked for."""

    def ready(self) -> bool: ...

    def here(self) -> StreamKey: ...

    def run_at(self, pace: float, stream: StreamKey) -> None: ...


class DevicePace:
    """In place of a `RunClock` for a `Spinner`.

    Args:
        timeline: of the rank.
        kernels: what is launched.
    """

    def __init__(self, timeline: _Timeline, kernels: SpinKernels) -> None:
        self._timeline = timeline
        self._kernels = kernels
        self._pace = 1.0
        self._piece: tuple[Note, StreamKey] | None = None

    @property
    def pace(self) -> float:
        """Time that counts over time that passes."""
        return self._pace

    def run_at(self, pace: float) -> None:
        """Go on at another pace, on the current stream."""
        self._end()
        self._pace = pace
        if pace != 1.0 and self._timeline.ready():
            stream = self._timeline.here()
            if pace < 1.0:
                self._timeline.run_at(pace, stream)
            self._piece = self._kernels.begin(pace, stream), stream

    @contextmanager
    def at_its_own_pace(self) -> Iterator[None]:
        """What is no computation of the program takes the time that it takes."""
        pace = self._pace
        if pace == 1.0:
            yield
            return
        self.run_at(1.0)
        try:
            yield
        finally:
            self.run_at(pace)

    def _end(self) -> None:
        if self._piece is None:
            return
        (note, stream), self._piece = self._piece, None
        if not self._timeline.ready():
            return  # a graph is captured: what began before it stays as it is
        self._kernels.end(note, self._pace, stream)
        if self._pace < 1.0:
            self._timeline.run_at(1.0, stream)
