"""The role of a rank whose true run is recorded: torch's own backend performs everything.

Where devices compute, times are those at which they did (`prismreplay.runtime.device_time`), on the
host's clock. Else they are the host's, of `time.perf_counter_ns()`. Then a communication starts when the program issues
it, and ends

- when the wait for it returns, if the program waits at once (all that torch calls synchronous);
- when the backend's thread says that it is complete, if it is asynchronous (gloo's collectives);
- when the wait for it returns, if the backend does not say: gloo's sends and receives. One that
  the program waits for late then seems to last until the wait.

A communication of CUDA tensors starts when the device reaches the place where the program issued
it. It ends

- when the stream of the program goes on that waits for it, if the program waits at once: torch
  then runs it on that very stream;
- else when its own stream is past it. Where that cannot be seen (`Timeline.ends_at_wait`), the
  wait tells, as above.

What runs ahead of a communication on its group delays its start: `prismtrace.assemble`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from prismreplay.runtime.annotations import make_recorder
from prismreplay.runtime.cuda_streams import CudaDevices
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.exits import before_exit
from prismreplay.runtime.graph_recorder import GraphRecorder
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op
from prismreplay.runtime.process_group import living
from prismreplay.runtime.shelves import Kept, Shelf, found_by_backend
from prismreplay.runtime.works import RealBatch
from prismtrace.ranks import format_ranks
from prismtrace.recorder import SpanWriter
from prismtrace.spool import SPOOL_SUFFIX

__all__ = ["FACTORY", "SPOOLS_VARIABLE", "RecordRole", "on_device", "start"]

Tensor = Any

FACTORY = "prismreplay.runtime.recording:start"
"""What `prismreplay.runtime.bootstrap` calls in each rank."""
SPOOLS_VARIABLE = "PRISMREPLAY_SPOOLS"
"""Folder that the ranks write their spools into."""

_now = time.perf_counter_ns


def start(rank: int, world_size: int) -> tuple[RecordRole, GraphRecorder]:
    """Begin to record this rank, until its process ends."""
    path = Path(os.environ[SPOOLS_VARIABLE]) / f"rank-{rank:05d}{SPOOL_SUFFIX}"
    # Where devices compute, the host's cores are seldom what ranks wait for.
    facts = {} if torch.cuda.is_available() else {"cores": format_ranks(_cores())}
    writer = SpanWriter(path, rank=rank, world_size=world_size, facts=facts)
    timeline = Timeline(CudaDevices(), writer) if torch.cuda.is_available() else None
    clock = _now if timeline is None else None
    recorder = make_recorder(writer, clock=clock, timeline=timeline, cuda=timeline is not None)
    role = RecordRole(recorder, timeline)
    atexit.register(role.let_go)
    # Whichever comes first; processes that multiprocessing starts have no atexit.
    atexit.register(recorder.finish)
    multiprocessing.util.Finalize(None, recorder.finish, exitpriority=100)
    before_exit(lambda code: recorder.finish() if code == 0 else writer.flush())
    _note_failure(recorder)
    return role, recorder


def _cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _note_failure(recorder: GraphRecorder) -> None:
    """A program that an exception ends has not finished its last step."""
    show = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        recorder.fail(f"{kind.__name__}: {error}")
        show(kind, error, trace)

    sys.excepthook = failed


class RecordRole:
    """Has torch's own backend perform every operation, and tells the recorder when it ran."""

    wants_real_groups = True

    def __init__(self, recorder: GraphRecorder, timeline: Timeline | None = None) -> None:
        self._recorder = recorder
        self._timeline = timeline
        self._running: set[int] = set()
        self._shelves: dict[str, Shelf] = {}

    def join(self, group: Group) -> None:
        """Nothing to do: the backend has joined."""

    def let_go(self) -> None:
        """The process ends: have the threads of groups that are idle end first.

        See `PrismProcessGroup.let_go`. A group that is not idle may have lost its partners, and
        would wait for them for as long as its timeout is.
        """
        if not self._running:
            for group in tuple(living):
                if "nccl" not in group.backends.values():
                    group.let_go()

    def submit(
        self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: Callable[[], Any]
    ) -> _Recorded:
        """See `prismreplay.runtime.roles.Role`."""
        token, begin = self._recorder.latest
        work = call()
        done = _Recorded(self._recorder, token, begin, op, work, self._running)
        timeline = self._timeline
        if timeline is not None and on_device(op, inputs, outputs):
            done.on_device = True
            if timeline.ready():
                self._put_beside(timeline, done, (inputs, outputs))
        elif _is_asynchronous(op, call):
            done.watch()
        return done

    def _put_beside(self, timeline: Timeline, done: _Recorded, tensors: Any) -> None:
        """See the end of what runs beside the program, and keep its tensors as the backend would."""
        op, work = done.op, done.work
        queue: tuple[str, frozenset[int | None] | None] = (op.group.key, None)
        shelf = self._shelves.get(op.group.key)
        if shelf is None:
            shelf = self._shelves[op.group.key] = Shelf()
        if type(work) is RealBatch:
            self._put_batch(timeline, shelf, done, tensors)
            return
        shelf.issued()
        # Whoever waits for a barrier blocks.
        if work is None or op.call is Call.BARRIER:
            return
        inputs, outputs = tensors
        device = (inputs or outputs)[0].device.index
        if op.call in MESSAGES:
            queue = op.group.key, frozenset((op.peer, op.group.global_rank))
        else:
            done.kept = shelf.keep(tensors, found_by_backend(work))
        timeline.follow(done.token, work, queue, device)

    def _put_batch(self, timeline: Timeline, shelf: Shelf, done: _Recorded, tensors: Any) -> None:
        """As `_put_beside`, for one of several operations that will be launched as one."""
        group, batch = done.op.group, done.work
        batch.members.append((done, tensors))
        if len(batch.members) > 1:
            return
        inputs, outputs = tensors
        device = (inputs or outputs)[0].device.index

        def launched(handle: Any) -> None:
            shelf.issued()
            found = None if handle is None else found_by_backend(handle)
            for one, its_tensors in batch.members:
                if found is not None and one.op.call not in MESSAGES:
                    one.kept = shelf.keep(its_tensors, found)
            tokens = [one.token for one, _ in batch.members]
            timeline.follow_all(tokens, handle, (group.key, None), device)
            batch.members.clear()

        batch.when_launched.append(launched)

    def make_store(self, namespace: str) -> NoReturn:
        """Torch keeps its own stores."""
        raise NotImplementedError(namespace)


def on_device(op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether streams of a device wait for it; gloo has the host wait, also for CUDA tensors."""
    if not (op.group.backend == "undefined" or "nccl" in op.group.backend):
        return False
    moved = inputs or outputs
    # A barrier has no tensors to tell.
    return not moved or bool(moved[0].is_cuda)


def _is_asynchronous(op: Op, call: Callable[[], Any]) -> bool:
    """Whether the program goes on while it runs, and the backend can tell when it is complete."""
    if op.call in MESSAGES:
        return False
    arguments: Sequence[Any] = getattr(call, "args", ())
    return bool(arguments) and bool(getattr(arguments[-1], "asyncOp", True))


class _Recorded:
    """An operation that the backend performs; see `prismreplay.runtime.roles.Pending`."""

    __slots__ = (
        "_begin", "_ended", "_recorder", "_running", "kept", "on_device", "op", "source", "token",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        recorder: GraphRecorder,
        token: int,
        begin: int,
        op: Op,
        work: Any,
        running: set[int],
    ) -> None:
        self.source: int | None = None
        self._recorder = recorder
        self.token = token
        self._begin = begin
        self.op = op
        self.work = work
        self._running = running
        self._ended = False
        self.on_device = False
        """A stream waits for it, not the host."""
        self.kept: Kept | None = None

    def watch(self) -> None:
        """Have the backend's thread say when it is complete."""
        # Some of gloo's have no future, such as coalesced reduce-scatters: then the wait tells.
        with contextlib.suppress(RuntimeError):
            future = self.work.get_future()
            self._running.add(self.token)
            future.add_done_callback(self._end)

    def _end(self, _future: Any = None) -> None:
        if not self._ended:
            self._ended = True
            self._running.discard(self.token)
            self._recorder.completed(self.token, self._begin, _now())

    def release(self) -> None:
        """The program itself waits: the backend needs its tensors no more."""
        if self.kept is not None:
            self.kept.release()
            self.kept = None

    def wait(self) -> None:
        """Block until the outputs are filled in."""
        self.wait_by_future()
        self.release()

    def wait_by_future(self) -> None:
        """As `wait`; the backend goes on keeping what it keeps."""
        if self.work is None:
            return  # on the program's own stream
        self.work.wait()
        if self.on_device:
            return
        self._end()
        if self.op.peer is None and self.op.call is Call.RECV:
            self.source = self.op.group.ranks[self.work._source_rank()]  # noqa: SLF001

    def done(self) -> bool:
        """True once `wait` would not block."""
        return self.work is None or bool(self.work.is_completed())
