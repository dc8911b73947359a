"""From what a rank does, in program order, to the nodes of its graph. No torch in here.

The process group and the hooks of `prismreplay.runtime.annotations` call a `GraphRecorder`; it
hands rows to a `prismtrace.SpanWriter`. Collecting and recording use the same one, so their
graphs can be compared: all structure follows from the order of events, never from times.

Events cut the program into segments, each a node that computes: a communication is issued, a
wait begins or ends, a step, microbatch, chunk or phase begins or ends. In a range that the program
names as a copy between device and host, segments are nodes that copy. There is no segment

- between issuing a communication and waiting for it when one call of torch.distributed does both,
- between the operations of a batch, nor between waits for operations of one batch,
- between waits that follow each other within one function of torch's, as at the end of backward.

A communication depends on the segment before it and on what is ahead of it in its queue: each
group has one for collectives (two over gloo, which runs two at a time) and, for p2p, one for every
partner and direction (an exchange in which both sides receive first would be a cycle otherwise). A
segment depends on the segment before it and on all that was waited for since.

A program that puts work into several streams of a device has as many *lanes* of segments. A
lane waits for what its own stream waits for: communications, and segments of other lanes before
an event that the program has recorded there.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from prismreplay.runtime.device_clock import StreamKey
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.lanes import Lane, Lanes
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op
from prismreplay.runtime.program_position import Place, ProgramPosition
from prismtrace.recorder import SpanWriter
from prismtrace.schema import Kind
from prismtrace.spool import COMPUTE, NODE, TAG

__all__ = ["GraphRecorder", "calling_frames"]

_RUNTIME = str(Path(__file__).parent)
_C10D = ("distributed_c10d.py", "c10d_logger.py")
_MEMCPY = Kind.MEMCPY.value
_NO_COMMUNICATION = (None,) * 6
"""Group, seq, peer, bytes, dtype and reduction."""


def calling_frames() -> Sequence[Hashable]:
    """Which calls of functions of torch.distributed this is in, innermost first.

    Those that block wait for what they, or a function that they call, have issued.
    """
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  the only way to look at callers
    while frame is not None and frame.f_code.co_filename.startswith(_RUNTIME):
        frame = frame.f_back
    calls = []
    while frame is not None and frame.f_code.co_filename.endswith(_C10D):
        # A later frame may lie where an earlier one was, but not of a function that waits for
        # what another call has issued: there is none.
        calls.append((id(frame), frame.f_code))
        frame = frame.f_back
    return calls


class GraphRecorder:
    """A `GraphObserver` that writes the nodes of one rank.

    Events come from one thread at a time, except `completed`.

    Args:
        writer: of this rank.
        clock: now, in ns, for a graph with times; None for a bare graph.
        callers: see `calling_frames`.
        in_backward: whether this thread is in a backward pass that no hook announced.
        timeline: in place of `clock`, where devices compute; it tells the writer times later.
        current_stream: the stream that the program puts work into now; None: it has but one.

    Attributes:
        position: where the program is, for hooks to move.
        lanes: the streams that it puts work into, for hooks to tell.
        latest: token and time of the operation that was issued last.
    """

    def __init__(
        self,
        writer: SpanWriter,
        *,
        clock: Callable[[], int] | None = None,
        callers: Callable[[], Sequence[Hashable]] = calling_frames,
        in_backward: Callable[[], bool] | None = None,
        timeline: Timeline | None = None,
        current_stream: Callable[[], StreamKey | None] | None = None,
    ) -> None:
        self.position = ProgramPosition(
            cut=self._cut,
            in_backward=in_backward,
            named=self._forget_steps,
            step_over=self._step_over,
        )
        self.latest: tuple[int, int] = (-1, 0)
        self._writer = writer
        self._timeline = timeline
        self._clock: Callable[[], Any] = clock or _no_clock
        if timeline is not None:
            self._clock = timeline.mark
        self._callers = callers
        self._next = 0
        first = Lane(writer.stream("program"), self._clock())
        self.lanes = Lanes(first, self, writer, timeline, current_stream)
        self._last: tuple[str, int, int | None, Sequence[Hashable]] = ("begin", -1, None, ())
        """The last event: what, which node, its batch, in which calls."""
        self._groups: dict[str, tuple[int, Group, str]] = {}
        self._queues: dict[Hashable, _Queue] = {}
        self._received: Counter[tuple[str, int, int]] = Counter()
        self._from_anyone: dict[int, Op] = {}
        self._batches: dict[int, int] = {}
        self._first_of_step = 0
        self._together: list[int] | None = None
        """Operations waited for, while the program does nothing in between."""
        self._finished = False
        if clock is not None or timeline is not None:
            writer.add_fact({"queued": True})
        if timeline is not None:
            writer.add_fact({"timed_later": True})

    # Communications -----------------------------------------------------------------------

    def joined(self, group: Group) -> None:
        """See `prismreplay.runtime.roles.GraphObserver`."""
        number = self._writer.group(group.label, group.ranks, desc=group.desc)
        self._groups[group.key] = (number, group, group.desc)

    def issued(self, op: Op) -> int:
        """See `prismreplay.runtime.roles.GraphObserver`; the token is the node's index."""
        now = self._mark()
        what, _, batch, _ = self._last
        if what != "issued" or op.batch is None or op.batch != batch:
            self._end_segment(now)
        index = self._number()
        seq, peer = op.seq, op.root
        if op.call in MESSAGES:
            peer = op.peer
            seq = self._number_received(op, index) if op.call is Call.RECV else seq
        step, microbatch, chunk, phase = self.position.place_of(op)
        stream, deps = self._enqueue(op, index)
        self._writer.add(
            (
                NODE, index, op.kind.value, self.position.note, stream, op.batch,
                step, microbatch, chunk, phase, self._groups[op.group.key][0], seq, peer,
                op.payload_bytes, op.dtype, op.reduce_op,
                now if self._timeline is None else None, None, deps,
            )
        )  # fmt: skip
        if self._timeline is not None:
            self._timeline.communication(index, now)
        if op.batch is not None:
            self._batches[index] = op.batch
        self._last = ("issued", index, op.batch, self._callers())
        self.latest = (index, now if isinstance(now, int) else getattr(now, "host_ns", 0))
        self._begin_segment(now)
        return index

    def waiting(self, token: int) -> None:
        """See `prismreplay.runtime.roles.GraphObserver`."""
        what, last, batch, where = self._last
        if (
            what == "issued"
            and last == token
            and where
            and any(call in where for call in self._callers()[:1])
        ):
            return
        if what == "waited" and batch is not None and batch == self._batches.get(token):
            return
        if self._together:
            return
        self._end_segment(self._mark())

    def waited(self, token: int, source: int | None = None) -> None:
        """See `prismreplay.runtime.roles.GraphObserver`."""
        op = self._from_anyone.pop(token, None)
        if op is not None and source is not None:
            seq = self._next_received(op, source)
            self._writer.amend(token, peer=source, seq=seq)
        self.lanes.find()
        self.lanes.current.waited.append(token)
        self._last = ("waited", token, self._batches.pop(token, None), ())
        if self._together is None:
            self._go_on((token,))
        else:
            self._together.append(token)

    @contextmanager
    def waits_together(self) -> Iterator[None]:
        """The program waits for several operations and does nothing in between."""
        those: list[int] = []
        self._together = those
        try:
            yield
        finally:
            self._together = None
            if those:
                self._go_on(those)

    def _go_on(self, tokens: Sequence[int]) -> None:
        """The program goes on after it has waited."""
        now = self._mark()
        if self._timeline is not None:
            for token in tokens:
                self._timeline.waited(token, now)
        self._begin_segment(now)

    def completed(self, token: int, start_ns: int, end_ns: int) -> None:
        """See `prismreplay.runtime.roles.GraphObserver`; any thread may call it."""
        if self._timeline is None:
            self._writer.timed(token, start_ns, end_ns)
        else:
            self._timeline.ended(token, end_ns)

    def fail(self, reason: str) -> None:
        """The program failed: what it did last is not a whole step."""
        self._writer.add_fact({"failed": reason})

    def finish(self) -> None:
        """The program is over: end its last segment and the spool."""
        if self._finished:
            return
        self._finished = True
        self._end_segment(self._clock())
        self.lanes.end_others()
        for number, group, desc in self._groups.values():
            if group.desc != desc:
                self._writer.describe_group(number, desc=group.desc)
        if self.position.uncertain:
            # Counted, a step begins once an optimizer has stepped; after the last one it is none.
            self._writer.add_fact({"steps_until": self._first_of_step})
        if self._timeline is not None:
            self._timeline.close()
        self._writer.close()

    def _mark(self) -> Any:
        """Now, in the stream that the program puts work into."""
        stream = self.lanes.find()
        return self._clock() if self._timeline is None else self._timeline.mark(stream)

    # Segments -----------------------------------------------------------------------------

    def _end_segment(self, now: Any) -> None:
        """The program does something: what it did since the last event is a node."""
        self.position.settle()
        self._add_segment(self.position.place(), now)

    def _cut(self, place: Place) -> None:
        """The program moves on from a place."""
        now = self._mark()
        self._add_segment(place, now)
        self.moved()
        self._begin_segment(now)

    def moved(self) -> None:
        """What comes next is not about the operation that was issued or waited for last."""
        self._last = ("moved", -1, None, ())

    def begin_segment(self) -> None:
        """The program begins with something in its current lane."""
        self._begin_segment(self._clock())

    def end_segment(self, lane: Lane, now: Any) -> None:
        """What it did there is a node."""
        self._add_segment(self.position.place(), now, lane)

    def _begin_segment(self, now: Any) -> None:
        lane = self.lanes.current
        lane.since = now
        lane.note = self.position.note
        lane.open = True

    def _add_segment(self, place: Place, now: Any, lane: Lane | None = None) -> None:
        lane = lane or self.lanes.current
        index = self._number()
        step, microbatch, chunk, phase = place
        previous = [] if lane.segment is None else [lane.segment]
        deps = [index - earlier for earlier in (*previous, *lane.waited)]
        since, duration = lane.since, None
        if self._timeline is not None:
            since = None
        elif now is not None and since is not None:
            duration = now - since
        name, place = lane.note or phase, (step, microbatch, chunk, phase)
        self._writer.add(
            (
                NODE, index, _MEMCPY, name, lane.number, None, *place, *_NO_COMMUNICATION,
                since, duration, deps,
            )
            if self.position.copying
            else (COMPUTE, index, name, lane.number, *place, since, duration, deps)
        )  # fmt: skip
        if self._timeline is not None:
            self._timeline.segment(index, lane.number, lane.since, now)
        lane.segment = index
        lane.waited.clear()

    def _number(self) -> int:
        index = self._next
        self._next = index + 1
        return index

    def _forget_steps(self) -> None:
        self._writer.add_fact({"steps_from": self._next})

    def _step_over(self) -> None:
        self._first_of_step = self._next
        if self._timeline is not None:
            self._timeline.settle()
        if not self._writer.background:
            self._writer.flush()

    # Queues -------------------------------------------------------------------------------

    def _enqueue(self, op: Op, index: int) -> tuple[int, list[int]]:
        """Stream of a communication, and distances back to what it depends on."""
        key = op.queue
        queue = self._queues.get(key)
        if queue is None:
            number = self._groups[op.group.key][0]
            stream = self._writer.stream(_label(op), group=number)
            queue = self._queues[key] = _Queue(stream)
        if op.batch is None or op.batch != queue.batch:
            queue.ahead = queue.tail
            queue.tail = []
            queue.batch = op.batch
        queue.tail.append(index)
        before = self.lanes.current.segment
        earlier = queue.ahead if before is None else [before, *queue.ahead]
        return queue.stream, [index - each for each in earlier]

    def _number_received(self, op: Op, index: int) -> int | None:
        """Number of a receive; one from anyone has none until its sender is known."""
        if op.peer is None:
            self._from_anyone[index] = op
            return None
        return self._next_received(op, op.peer)

    def _next_received(self, op: Op, source: int) -> int:
        key = (op.group.key, source, op.tag)
        count = self._received[key]
        self._received[key] = count + 1
        return op.tag * TAG + count


class _Queue:
    """Communications that run one after another.

    `ahead` is what the next ones wait for; `tail` the last one, or those of the last batch.
    """

    __slots__ = ("ahead", "batch", "stream", "tail")

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.ahead: list[int] = []
        self.tail: list[int] = []
        self.batch: int | None = None


def _label(op: Op) -> str:
    """What to call a queue, after its group: partners by their distance in the group."""
    if op.call not in MESSAGES:
        return f"queue {op.queue_number + 1}" if op.queue_number else ""
    if op.peer is None:
        return f"{op.call.value} from anyone"
    size = op.group.size
    distance = (op.group.ranks.index(op.peer) - op.group.rank) % size
    return f"{op.call.value} {distance if distance <= size // 2 else distance - size:+d}"


def _no_clock() -> None:
    return None
