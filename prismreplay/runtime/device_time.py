"""When a device reached what the host has told it to do, without waiting for it. No torch in here.

A program runs ahead of its devices: it puts work into streams and goes on. A `Timeline` puts an
event of its own (a *mark*) between the pieces of work, asks at the ends of steps which of them
are behind the devices already, and tells the writer when that was, on the host's clock
(`clock_line`). Nothing is asked of a stream within a step, and nobody waits but the last words of
a program that ends. Where no device is in use, a mark is the host's time.

A communication that the program does not wait for at once runs on a stream of the backend. A
stream of ours that has nothing else to do, its *follower*, waits for it there; then comes its mark.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from prismreplay.runtime.device_clock import DeviceClock, Devices, Mark, StreamKey
from prismreplay.runtime.paces import Paces
from prismtrace.recorder import SpanWriter
from prismtrace.spool import TIMED

__all__ = ["Mark", "StreamKey", "Timeline"]

PAIR_EVERY_NS = 500_000_000
"""Clocks drift apart by some microseconds in that time."""
LONGEST_NS = 4_000_000_000
"""Time since an event is a 32-bit float, in ms: later, it is off by more than half a microsecond."""
MOST_MARKS = 4096
"""Marks that wait for their time; then the next pair of stamps is taken at once."""
MEMORY_SHARE = 2000
"""Asking the allocator may take one part in so many of the time."""
LAST_WORDS_S = 6.0
"""How long the end of a program waits for its devices: they may never be done."""


class _Communication:
    """One that is not told yet. `bound` is when a stream that waits for it went on."""

    __slots__ = ("begin", "bound", "end", "index", "parked")

    def __init__(self, index: int, begin: Mark) -> None:
        self.index = index
        self.begin = begin
        self.end: Mark | None = None
        self.bound: Mark | None = None
        self.parked = False


class _Batch:
    """Marks and spans of some time, all of which are told once the streams are past `fences`."""

    __slots__ = ("after", "fences", "marks", "spans")

    def __init__(
        self, marks: list[Mark], spans: list[Any], fences: list[Mark], after: dict[int, int]
    ) -> None:
        self.marks = marks
        self.spans = spans
        self.fences = fences
        self.after = after


class Timeline:
    """Tells a writer the times of nodes that it has written without.

    Calls come from one thread at a time, except `ended`.

    Args:
        devices: where marks go.
        writer: of this rank.
    """

    def __init__(self, devices: Devices, writer: SpanWriter) -> None:
        self._seam = devices
        self._writer = writer
        self._devices: dict[int, DeviceClock] = {}
        self._marks: list[Mark] = []
        self._spans: list[Any] = []
        self._last: dict[StreamKey, Mark] = {}
        self._batches: deque[_Batch] = deque()
        self._waiting = 0
        self._open: dict[int, _Communication] = {}
        self._lock = threading.Lock()
        self._followers: dict[Hashable, StreamKey | None] = {}
        self._ends: dict[int, int] = {}
        self._paired_ns = 0
        self._memory_ns = 0
        self._memory_every_ns = 0
        self._peak = -1
        self._paces = Paces()
        self._broken = False
        self.ends_at_wait = 0
        self.host_times = 0

    # Marks ----------------------------------------------------------------------------------

    def mark(self, stream: StreamKey | None = None) -> Mark:
        """Put a mark into a stream, by default the current one."""
        now = self._seam.host_ns()
        if self._broken or not self._seam.ready():
            return Mark(now)
        key = self._seam.current() if stream is None else stream
        try:
            if now - self._paired_ns > LONGEST_NS:
                self._take_pairs()  # there was no end of a step
            device = self._devices.get(key[1]) or self._begin(key[1])
            event = device.event()
            self._seam.record(event, key)
        except RuntimeError:
            # A failed kernel shows in whatever is asked next: the program will hear of it.
            self._broken = True
            return Mark(now)
        mark = Mark(now, key, event, device.anchor)
        self._marks.append(mark)
        self._last[key] = mark
        return mark

    def _begin(self, number: int) -> DeviceClock:
        device = self._devices[number] = DeviceClock(self._seam, number)
        self._paired_ns = self._seam.host_ns()
        return device

    def ready(self) -> bool:
        """Whether a device may be asked something: one is in use, and no graph is captured."""
        return self._seam.ready()

    def here(self) -> StreamKey:
        """The current stream."""
        return self._seam.current()

    def run_at(self, pace: float, stream: StreamKey) -> None:
        """From here on in a stream, time counts so many times as much: to see what would change."""
        self._paces.add(self.mark(stream), pace)

    # Spans ----------------------------------------------------------------------------------

    def segment(self, index: int, stream: int, begin: Mark | None, end: Mark) -> None:
        """A computation was written: it lasts from mark to mark on the writer's stream."""
        self._spans.append((index, stream, begin or end, end))
        if end.stream is not None and end.host_ns - self._memory_ns >= self._memory_every_ns:
            self._note_memory(index, end.stream[1])

    def communication(self, index: int, begin: Mark) -> None:
        """A communication was written that the program issued at a mark."""
        if len(self._marks) >= MOST_MARKS:
            self.settle()  # a program without steps
        entry = self._open[index] = _Communication(index, begin)
        self._spans.append(entry)

    def follow(self, index: int, work: Any, queue: Hashable, device: int) -> None:
        """Mark the end of a communication on the backend's stream.

        The backend gives its references to the tensors up once a stream waits, and ours does so
        early: whoever calls this keeps them (`prismreplay.runtime.shelves`). Call it while `ready`.

        Args:
            index: of the communication.
            work: torch's handle; None when it runs on the program's own stream.
            queue: those of one queue run one after another.
            device: that performs it.
        """
        self.follow_all((index,), work, queue, device)

    def follow_all(self, those: Sequence[int], work: Any, queue: Hashable, device: int) -> None:
        """As `follow`, for several that were launched as one."""
        if work is None or self._broken:
            return
        follower = self._follower(queue, device)
        if follower is None:
            self.ends_at_wait += len(those)
            return
        try:
            self._seam.after(work, follower)
        except RuntimeError:
            return  # the program's own wait will say so
        mark = self.mark(follower)
        for index in those:
            entry = self._open.get(index)
            if entry is not None:
                entry.end = mark

    def began(self, index: int) -> Mark | None:
        """Where the program issued a communication; None once it has waited for that."""
        entry = self._open.get(index)
        return None if entry is None else entry.begin

    def end_in(self, those: Iterable[int], stream: StreamKey) -> Mark:
        """A stream of ours performs communications; all that they take was put there."""
        mark = self.mark(stream)
        for index in those:
            entry = self._open.get(index)
            if entry is not None:
                entry.end = mark
        return mark

    def _follower(self, queue: Hashable, device: int) -> StreamKey | None:
        key = (queue, device)
        if key not in self._followers:
            # Each follower stands beside a stream of the backend; the program and the clock have
            # one, too. With fewer connections a stream that waits would hold up another.
            there = sum(found is not None for found in self._followers.values())
            fits = 2 * (there + 1) + 2 <= self._seam.connections()
            self._followers[key] = self._seam.private_stream(device) if fits else None
        return self._followers[key]

    def waited(self, index: int, mark: Mark) -> None:
        """A stream of the program waits for a communication, and went on at a mark."""
        with self._lock:
            entry = self._open.pop(index, None)
            if entry is None:
                return
            if entry.end is None:
                entry.end = mark
            else:
                entry.bound = mark
            if entry.parked:
                self._spans.append(entry)
                entry.parked = False

    def ended(self, index: int, host_ns: int) -> None:
        """The backend says that a communication of the host is complete; on any thread."""
        with self._lock:
            entry = self._open.get(index)
            if entry is not None and entry.end is None:
                entry.end = Mark(host_ns)
                if entry.parked:
                    self._spans.append(entry)
                    entry.parked = False

    def _note_memory(self, index: int, device: int) -> None:
        """What the allocator holds, as often as is cheap; the peak where it has risen."""
        begun = self._seam.host_ns()
        held, peak = self._seam.memory(device)
        self._memory_ns = self._seam.host_ns()
        self._memory_every_ns = MEMORY_SHARE * (self._memory_ns - begun)
        if peak > self._peak:
            self._writer.amend(index, mem_bytes=held, mem_peak_bytes=peak)
        else:
            self._writer.amend(index, mem_bytes=held)
        # A program that resets its peak may see a lower one.
        self._peak = peak

    # Telling --------------------------------------------------------------------------------

    def settle(self) -> None:
        """A step is over: tell what the devices are past by now."""
        if self._devices and not self._seam.ready():
            return  # asking anything would break the capture of a graph
        try:
            self._close_batch()
            self._take_pairs()
            self._drain()
        except RuntimeError:
            self._broken = True

    def _take_pairs(self) -> None:
        now = self._seam.host_ns()
        due = now - self._paired_ns >= PAIR_EVERY_NS or self._waiting > MOST_MARKS
        if due and self._devices and self._seam.ready():
            self._paired_ns = now
            for device in self._devices.values():
                device.pair()

    def _close_batch(self) -> None:
        if not self._marks and not self._spans:
            return
        after = {number: device.anchor.number for number, device in self._devices.items()}
        with self._lock:
            batch = _Batch(self._marks, self._spans, list(self._last.values()), after)
            self._marks, self._spans, self._last = [], [], {}
        self._waiting += len(batch.marks)
        self._batches.append(batch)

    def _drain(self, *, finally_: bool = False) -> None:
        placed = {number: device.place() for number, device in self._devices.items()}
        while self._batches:
            batch = self._batches[0]
            # A later pair of stamps makes times exact; at the end there may be none.
            if any(placed[one] + finally_ <= last for one, last in batch.after.items()):
                return
            if not all(self._seam.done(fence.event) for fence in batch.fences):
                return
            self._batches.popleft()
            self._waiting -= len(batch.marks)
            for number, device in self._devices.items():
                alone = len(self._devices) == 1
                device.resolve(batch.marks if alone else _of_device(batch.marks, number))
            if self._paces:
                self._paces.apply(batch.marks)
            self._tell(batch.spans)

    def _tell(self, spans: list[Any]) -> None:
        for span in spans:
            if isinstance(span, _Communication):
                self._tell_communication(span)
                continue
            index, stream, begin, end = span
            earliest = self._ends.get(stream)
            start = begin.ns if begin.ns is not None else end.ns
            start = start if earliest is None else max(start, earliest)
            over = max(end.ns, start)
            self._ends[stream] = over
            self._writer.timed(index, start, over)

    def _tell_communication(self, entry: _Communication) -> None:
        with self._lock:
            if entry.end is None:
                entry.parked = True
                return
        if entry.end.ns is None or entry.begin.ns is None:
            # Its end lies in a later batch.
            (self._batches[0].spans if self._batches else self._spans).append(entry)
            return
        self._open.pop(entry.index, None)
        start, end = entry.begin.ns, entry.end.ns
        if entry.bound is not None and entry.bound.ns is not None:
            # Its follower and the program's stream went on at one moment, seen by two events.
            end = min(end, entry.bound.ns)
        self._writer.timed(entry.index, start, max(start, end))

    # The end --------------------------------------------------------------------------------

    def close(self) -> None:
        """The program is over: wait for its devices, but not for ever, and tell the rest."""
        try:
            if self._devices and not self._broken and self._seam.ready():
                for device in self._devices.values():
                    device.pair()
            self._close_batch()
            until = time.monotonic() + LAST_WORDS_S
            self._drain(finally_=True)
            while self._batches and not self._broken and time.monotonic() < until:
                time.sleep(0.001)
                self._drain(finally_=True)
        except RuntimeError:
            self._broken = True
        self._give_up()
        if self._devices:
            residual = max(device.line.residual_ns for device in self._devices.values())
            self._writer.add_fact({"residual_ns": residual})
        for name in ("host_times", "ends_at_wait"):
            if getattr(self, name):
                self._writer.add_fact({name: getattr(self, name)})

    def _give_up(self) -> None:
        """What the devices did not reach has the host's times."""
        self._close_batch()
        while self._batches:
            batch = self._batches.popleft()
            for mark in batch.marks:
                if mark.ns is None:
                    self.host_times += 1
                    mark.ns, mark.event = mark.host_ns, None
            self._tell(batch.spans)
        self._tell(list(self._spans))
        for entry in self._open.values():
            # Nobody saw its end.
            start = entry.begin.ns if entry.begin.ns is not None else entry.begin.host_ns
            self._writer.add((TIMED, entry.index, start, None))
        self._open.clear()


def _of_device(marks: list[Mark], number: int) -> list[Mark]:
    return [mark for mark in marks if mark.stream is not None and mark.stream[1] == number]
