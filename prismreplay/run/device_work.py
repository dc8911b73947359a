"""Operations of a rank on its GPU: put into streams as NCCL does, waited for by streams.

An operation that the program does not wait for at once runs on a stream of its group (of messages:
of the pair of ranks) that waits for what the program had put into its own before; `wait` has the
stream that is current then wait for its end. All others run on the program's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from prismreplay.run.device_spinning import DevicePace
from prismreplay.run.device_streams import Streams
from prismreplay.run.following import Placed
from prismreplay.runtime.device_clock import Mark, StreamKey
from prismreplay.runtime.operations import MESSAGES, Call, Op
from prismreplay.runtime.shelves import Kept, Shelf

__all__ = ["DeviceWork", "Launcher", "is_asynchronous"]

Tensor = Any

_NOTHING = nullcontext()


def is_asynchronous(op: Op, call: Callable[[], Any]) -> bool:
    """Whether the program goes on while it runs: messages always, else as its options say."""
    if op.call in MESSAGES:
        return True
    for one in getattr(call, "args", ()):
        if not getattr(one, "asyncOp", True):
            return False
    named = getattr(call, "keywords", None)
    return not named or all(getattr(one, "asyncOp", True) for one in named.values())


class DeviceWork:
    """An operation that the rank performs itself; see `prismreplay.runtime.roles.Pending`."""

    __slots__ = (
        "_launcher", "asynchronous", "end", "inputs", "kept", "op", "outputs", "placed", "scratch",
        "source", "stream", "token", "waited",
    )  # fmt: skip

    def __init__(
        self,
        launcher: Launcher,
        op: Op,
        token: int,
        placed: Placed,
        tensors: tuple[Sequence[Tensor], Sequence[Tensor]],
        *,
        asynchronous: bool,
    ) -> None:
        self.source = placed.peer
        self.op = op
        self.token = token
        self.placed = placed
        self.inputs, self.outputs = tensors
        self.asynchronous = asynchronous
        self.end: Mark | None = None
        self.stream: StreamKey | None = None
        self.scratch: Any = None
        """Memory of torch's allocator that the backend would have for it."""
        self.kept: Kept | None = None
        self.waited = False
        self._launcher = launcher

    def wait(self) -> None:
        """Have the current stream wait; of a barrier, the host."""
        self.wait_by_future()
        self.release()

    def wait_by_future(self) -> None:
        """As `wait`; the tensors stay for now, as the backend keeps them then."""
        if not self.waited:
            self.waited = True
            self._launcher.wait(self)

    def release(self) -> None:
        """Let go of the tensors."""
        if self.kept is not None:
            self.kept.release()

    def done(self) -> bool:
        """True once the device is past it."""
        return self.end is None or self._launcher.is_past(self.end)

    def forget_tensors(self) -> None:
        """They are needed no more to launch it."""
        self.inputs = self.outputs = ()
        self.scratch = None


class _Timeline(Protocol):
    def began(self, index: int) -> Mark | None: ...

    def end_in(self, those: Iterable[int], stream: StreamKey) -> Mark: ...


class Launcher:
    """Puts operations into streams.

    Args:
        streams: of the rank's device.
        timeline: is told where operations end that have a stream of their own. Streams wait for
            the marks that it has put there anyway.
        perform: puts the kernels of operations into a stream, which need not be current.
        pace: of the program; communication takes the time that it takes. None: there is but one.
    """

    def __init__(
        self,
        streams: Streams,
        timeline: _Timeline,
        perform: Callable[[Sequence[DeviceWork], StreamKey], None],
        pace: DevicePace | None = None,
    ) -> None:
        self.streams = streams
        self._pace = pace
        self._timeline = timeline
        self._perform = perform
        self._queues: dict[Any, StreamKey] = {}
        self._events: list[Any] = []
        self._shelves: dict[str, Shelf] = {}

    def launch(self, works: Sequence[DeviceWork]) -> None:
        """Start operations, as one."""
        current, shelf = self.streams.current(), self._shelf(works[0].op)
        shelf.issued()
        if not any(work.asynchronous for work in works):
            with self._at_its_own_pace():
                self._perform(works, current)
            for work in works:
                # It runs before whatever uses this memory next, as that does so in this stream.
                work.forget_tensors()
            return
        stream = self._stream_of(works[0].op)
        self._let_begin(works, stream, current)
        self._perform(works, stream)
        end = self._timeline.end_in([work.token for work in works], stream)
        if end.event is None:  # the timeline has put nothing there
            end = Mark(end.host_ns, stream, self.streams.new_event())
            self.streams.record(end.event, stream)
        over = partial(self.is_past, end)
        for work in works:
            work.end, work.stream = end, stream
            if work.op.call in MESSAGES:
                self.streams.lend(stream, (*work.inputs, *work.outputs))
            else:
                work.kept = shelf.keep((work.inputs, work.outputs, work.scratch), over)
            work.forget_tensors()

    def _let_begin(
        self, works: Sequence[DeviceWork], stream: StreamKey, current: StreamKey
    ) -> None:
        """Have a stream wait for what the program has put into its current one."""
        begin: Any = None
        if works[0].op.batch is None and (mark := self._timeline.began(works[0].token)) is not None:
            begin = mark.event if mark.stream == current else None
        if begin is not None:
            self.streams.wait(stream, begin)
            return
        own = self._events.pop() if self._events else self.streams.new_event()
        self.streams.record(own, current)
        self.streams.wait(stream, own)
        # Events that streams wait for can be recorded again at once: waits were told before.
        self._events.append(own)

    def is_past(self, end: Mark) -> bool:
        """Whether the device is past the end of an operation."""
        event = end.event  # taken off it once it is known when that was
        return event is None or self.streams.done(event)

    def wait(self, work: DeviceWork) -> None:
        """Have the current stream wait for an operation; of a barrier, the host."""
        current = self.streams.current()
        if work.end is not None and work.stream != current:
            event = work.end.event
            if event is not None:
                with self._at_its_own_pace():
                    self.streams.wait(current, event)
        if work.op.call is Call.BARRIER:
            self.streams.synchronize(current)

    def _at_its_own_pace(self) -> AbstractContextManager[None]:
        return _NOTHING if self._pace is None else self._pace.at_its_own_pace()

    def _stream_of(self, op: Op) -> StreamKey:
        """One a group; of messages outside of batches, one a pair of ranks in it."""
        key: Any = op.group.key
        if op.peer is not None and op.batch is None:
            key = key, frozenset((op.peer, op.group.global_rank))
        found = self._queues.get(key)
        if found is None:
            found = self._queues[key] = self.streams.new_stream()
        return found

    def _shelf(self, op: Op) -> Shelf:
        shelf = self._shelves.get(op.group.key)
        if shelf is None:
            shelf = self._shelves[op.group.key] = Shelf(looks=True)
        return shelf
