"""Handles of communications as the program sees them: `torch.distributed.Work`.

torch's C++ code reaches `wait` and `get_future` of these through its own trampoline; everything
else is called from Python only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Work

from prismreplay.runtime.futures import FutureQueue, PendingFuture
from prismreplay.runtime.operations import Call, Op
from prismreplay.runtime.roles import GraphObserver, Pending

__all__ = ["Batch", "JointWork", "PrismWork", "RealBatch", "RealDone"]

Tensor = Any
NO_TIMEOUT = timedelta(0)


class Batch:
    """Operations launched together; while it is open, waiting for one of them does nothing.

    That is how NCCL behaves: inside its coalescing block nothing has been launched yet.
    """

    __slots__ = ("number", "open", "real", "works")

    def __init__(self, number: int, real: RealBatch | None = None) -> None:
        self.number = number
        self.open = True
        self.works: list[Any] = []
        self.real = real


class PrismWork(Work):  # type: ignore[misc]
    """One communication that was handed to the run's role."""

    def __init__(
        self,
        op: Op,
        pending: Pending,
        token: int,
        observer: GraphObserver,
        outputs: Sequence[Tensor],
        futures: FutureQueue,
        batch: Batch | None = None,
    ) -> None:
        super().__init__()
        self.op = op
        self._pending = pending
        self._release: Callable[[], None] | None = getattr(pending, "release", None)
        self._token = token
        self._observer = observer
        self._outputs = outputs
        self._futures = futures
        self._batch = batch
        self._finished = False
        self._failure: BaseException | None = None
        self._future: PendingFuture | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002  the run decides
        """Block until the outputs are filled in."""
        if not self._finished:
            self._finish(self._pending.wait)
        elif self._release is not None:
            self._release()
        return True

    def leave_batch(self) -> None:
        """The batch is launched. It holds this: a circle would keep tensors for long."""
        self._batch = None

    def _wait_by_future(self) -> None:
        if not self._finished:
            self._finish(getattr(self._pending, "wait_by_future", self._pending.wait))

    def _finish(self, wait: Callable[[], None]) -> None:
        if self._batch is not None and self._batch.open:
            return
        if self._failure is not None:
            raise self._failure
        self._observer.waiting(self._token)
        try:
            wait()
        except BaseException as failure:
            self._failure = failure
            raise
        self._finished = True
        self._observer.waited(self._token, self._sender())
        if self._future is not None:
            self._future.complete(list(self._outputs))

    def _sender(self) -> int | None:
        anyone = self.op.call is Call.RECV and self.op.peer is None
        return self._pending.source if anyone else None

    def synchronize(self) -> None:
        """As `wait`: torch has the current stream wait here."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True once the outputs are there; asking counts as waiting when they are."""
        if not self._finished and self._failure is None and self._pending.done():
            self._wait_by_future()
        return self._finished

    def is_success(self) -> bool:
        """True when it has completed without an error."""
        return self._finished

    def exception(self) -> BaseException | None:
        """What went wrong, if anything did."""
        return self._failure

    def result(self) -> list[Tensor]:
        """The output tensors."""
        self._wait_by_future()
        return list(self._outputs)

    def source_rank(self) -> int:
        """Rank within the group that a receive came from, once it is complete."""
        source = self.op.peer if self.op.peer is not None else self._pending.source
        if source is None:
            message = "the sender is known once the receive is complete"
            raise RuntimeError(message)
        return self.op.group.ranks.index(source)

    _source_rank = source_rank

    def get_future(self) -> PendingFuture:
        """A future of the output tensors; it does not make anyone wait by being asked for."""
        if self._future is None:
            self._future = PendingFuture(
                self._wait_by_future, self._outputs, ready=self.is_completed
            )
            if self._finished:
                self._future.complete(list(self._outputs))
            else:
                self._futures.hand_out(self._future)
        return self._future


class JointWork(Work):  # type: ignore[misc]
    """Several communications that are waited for as one."""

    def __init__(self, works: Sequence[Any], futures: FutureQueue) -> None:
        super().__init__()
        self._works = tuple(works)
        self._futures = futures
        self._future: PendingFuture | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:  # noqa: ARG002
        """Wait for all of them, in the order of their launch."""
        for work in self._works:
            work.wait()
        if self._future is not None:
            self._future.complete(self.result())
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True when all of them are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True when all of them have completed without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error, if any."""
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[Tensor]:
        """All output tensors, in the order of the launch."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> PendingFuture:
        """A future of all output tensors."""
        if self._future is None:
            outputs = [tensor for work in self._works for tensor in work._outputs]  # noqa: SLF001
            self._future = PendingFuture(self.wait, outputs, ready=self.is_completed)
            self._futures.hand_out(self._future)
        return self._future


class RealBatch:
    """Stands for each operation of a batch on the real backend, which gives one Work for all."""

    def __init__(self) -> None:
        self.work: Any = None
        self.when_launched: list[Callable[[Any], None]] = []
        """Called with the work, once it is there."""
        self.members: list[Any] = []
        """What the role needs of its operations until then."""

    def launched(self, work: Any) -> None:
        """The backend has launched the batch; None if it is over for the program."""
        self.work = work
        for call in self.when_launched:
            call(work)
        self.when_launched.clear()

    def wait(self) -> bool:
        """Wait for the whole batch."""
        return self.work is None or bool(self.work.wait())

    def is_completed(self) -> bool:
        """True when the whole batch is complete."""
        return self.work is None or bool(self.work.is_completed())


class RealDone:
    """Result of an operation that the real backend performs at once (`monitored_barrier`)."""

    def wait(self) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True
