"""The streams of a device that a program puts work into. No torch in here.

A program begins in the default stream; what it does there is its first *lane*, which is always
open: it comes back to it. Other lanes are open while the program is in them. Hooks
(`prismreplay.runtime.cuda_streams`) tell when it changes streams, records an event in one or has
one wait for an event. What C++ code does about streams is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from prismreplay.runtime.device_clock import StreamKey
from prismreplay.runtime.device_time import Timeline
from prismtrace.recorder import SpanWriter

__all__ = ["Lane", "Lanes"]

_DEFAULT = 0
"""Number of every device's default stream."""


class Lane:
    """Segments that follow each other in a stream.

    `number` is the writer's of the stream; `segment` the last one; `waited` what was waited for
    since it ended; `since` when the one that is `open` began, in which the program may have put
    work; `note` its name.
    """

    __slots__ = ("note", "number", "open", "segment", "since", "waited")

    def __init__(self, number: int, since: Any) -> None:
        self.number = number
        self.since = since
        self.open = True
        self.segment: int | None = None
        self.waited: list[int] = []
        self.note: str | None = None


class _Recorder(Protocol):
    def moved(self) -> None: ...

    def begin_segment(self) -> None: ...

    def end_segment(self, lane: Lane, now: Any) -> None: ...


class Lanes:
    """All lanes of a rank.

    Args:
        first: where the program begins.
        recorder: makes nodes of segments.
        writer: of the rank.
        timeline: of its devices; None for a graph without times.
        current_stream: the one that the program puts work into now, None while it uses no
            device; without, there is but one lane.

    Attributes:
        current: where the program puts work now.
    """

    def __init__(
        self,
        first: Lane,
        recorder: _Recorder,
        writer: SpanWriter,
        timeline: Timeline | None = None,
        current_stream: Callable[[], StreamKey | None] | None = None,
    ) -> None:
        self.current = self._first = first
        self._recorder = recorder
        self._writer = writer
        self._timeline = timeline
        self._current_stream = current_stream
        self._lanes: dict[StreamKey, Lane] = {}
        self._others = 0

    def find(self) -> StreamKey | None:
        """The stream that the program puts work into; hooks need not have seen it change."""
        if self._current_stream is None:
            return None
        stream = self._current_stream()
        if stream is None:
            return None
        lane = self._lanes.get(stream) or self._of(stream)
        if lane is not self.current:
            self.current = lane
            if not lane.open:
                self._recorder.begin_segment()
        return stream

    def _of(self, stream: StreamKey) -> Lane:
        lane = self._lanes.get(stream)
        if lane is None:
            if stream[0] == _DEFAULT and self._first not in self._lanes.values():
                lane = self._first
            else:
                self._others += 1
                lane = Lane(self._writer.stream(f"program, stream {self._others}"), None)
                lane.open = False
            self._lanes[stream] = lane
        return lane

    def leave(self, stream: StreamKey | None) -> None:
        """The program is about to put work into another stream than `stream`."""
        self.find()
        if self.current is not self._first and stream is not None:
            self._end(self.current, stream)
            self.current.open = False
        self._recorder.moved()

    def event_recorded(self, stream: StreamKey) -> tuple[int, ...]:
        """The program is about to record an event in a stream.

        Returns what whoever waits for the event depends on, for `wait_for_event`.
        """
        self.find()
        lane = self._of(stream)
        if lane.open:
            self._end(lane, stream)
        known = () if lane.segment is None else (lane.segment,)
        return (*known, *lane.waited)

    def wait_for_event(
        self, stream: StreamKey, known: tuple[int, ...], wait: Callable[[], None]
    ) -> None:
        """Have a stream wait for an event that `event_recorded` has announced."""
        self.find()
        lane = self._of(stream)
        if lane.segment in known:
            wait()  # for nothing that is not behind it
            return
        if lane.open:
            self._end(lane, stream)
        wait()
        lane.waited += [index for index in known if index not in lane.waited]
        if lane.open:
            lane.since = self._time_in(stream)

    def end_others(self) -> None:
        """The program is over: end the first lane, if the program has never come back to it."""
        if self._first is not self.current:
            # When it left, nobody has noted: what it did there last has no length.
            self._recorder.end_segment(self._first, self._first.since)

    def _end(self, lane: Lane, stream: StreamKey) -> None:
        """End a lane's segment, and begin another."""
        now = self._time_in(stream)
        self._recorder.end_segment(lane, now)
        lane.since = now
        self._recorder.moved()

    def _time_in(self, stream: StreamKey) -> Any:
        return None if self._timeline is None else self._timeline.mark(stream)
