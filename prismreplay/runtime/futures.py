"""Futures that are completed by whoever waits for them, and never block by being asked for.

`Work.get_future()` is called by `DistributedDataParallel` right after it has issued a bucket's
reduction, and by communication hooks. Waiting there would serialise backward and
communication: the graph would show a job without overlap. But DDP waits for its futures in
C++, at the end of backward, where none of our code runs. So the first future asked for within a
backward pass queues one callback with the autograd engine; callbacks run in the order in which
they were queued and DDP queues its own when the last bucket is ready, hence later. Ours waits
for all futures handed out, in order: the waits happen, and are recorded, where DDP has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

__all__ = ["FutureQueue", "PendingFuture", "gather_futures"]

Tensor = Any


class PendingFuture(torch.futures.Future):  # type: ignore[misc]
    """A future whose Python methods wait for the communication behind it.

    Args:
        finish: waits for it; has called `complete` by the time it returns.
        outputs: the tensors that will be its value, for the devices they are on.
        ready: whether `finish` would not block.
    """

    def __init__(
        self,
        finish: Callable[[], Any],
        outputs: Sequence[Tensor] = (),
        *,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(devices=_devices_of(outputs))
        self._finish: Callable[[], Any] | None = finish
        self._ready = ready
        self._followers: list[Callable[[], None]] = []
        self._complete = False

    def complete(self, value: Any) -> None:
        """Set the value and run what was attached with `then`; later calls do nothing."""
        if not self._complete:
            self._complete = True
            self.set_result(value)
            self._follow()

    def fail(self, error: BaseException) -> None:
        """As `complete`, with an error instead of a value."""
        if not self._complete:
            self._complete = True
            self.set_exception(error)
            self._follow()

    def _follow(self) -> None:
        self._finish = self._ready = None
        followers, self._followers = self._followers, []
        for follower in followers:
            follower()

    @property
    def is_last(self) -> bool:
        """Whether nothing was attached that runs once it is complete."""
        return not self._followers

    def finish(self) -> None:
        """Wait for the communication and complete this future."""
        if not self._complete and self._finish is not None:
            self._finish()

    def done(self) -> bool:
        """True once a wait would not block."""
        if not self._complete and self._ready is not None and self._ready():
            self.finish()
        return bool(super().done())

    def wait(self) -> Any:
        """Block until complete, then give the value or raise the error."""
        self.finish()
        return super().wait()

    def value(self) -> Any:
        """As `wait`."""
        self.finish()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> PendingFuture:
        """A future of ``callback(self)``, called as soon as this one is complete."""
        child = PendingFuture(self.finish, ready=self.done)

        def follow() -> None:
            try:
                value = callback(self)
            except Exception as error:  # noqa: BLE001  whoever waits for the child gets it
                child.fail(error)
            else:
                child.complete(value)

        self._when_complete(follow)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call ``callback(self)`` as soon as this one is complete."""
        self._when_complete(lambda: callback(self))

    def _when_complete(self, follower: Callable[[], None]) -> None:
        if self._complete:
            follower()
        else:
            self._followers.append(follower)


def _devices_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Devices that streams may have to wait on."""
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    return sorted(devices, key=str) if len(devices) > 1 else list(devices)


class FutureQueue:
    """Futures that C++ code may be going to wait for, in the order they were handed out.

    Args:
        together: entered around waits that follow each other with nothing in between.
    """

    def __init__(self, together: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._together = together
        self._waiting: list[PendingFuture] = []
        self._backward_tasks: set[int] = set()
        self._collecting = 0

    def hand_out(self, future: PendingFuture) -> None:
        """Within a backward pass: see to it that `future` is complete at the end of the pass."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001  no public way to ask
        if task >= 0 and torch._C._current_autograd_node() is None:  # noqa: SLF001
            # A callback at the end of the pass: DDP with a static graph issues everything there
            # in its first iteration, and waits right after, in C++.
            future.finish()
        elif task >= 0:
            self._waiting.append(future)
            if task not in self._backward_tasks:
                self._backward_tasks.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(  # noqa: SLF001
                    lambda: self._end_of_backward(task)
                )
        elif self._collecting:
            self._waiting.append(future)

    def finish_all(self) -> None:
        """Wait for all of them, in order."""
        waiting = self._waiting
        while waiting:
            alike = next((at for at, each in enumerate(waiting) if not each.is_last), len(waiting))
            with self._together() if alike > 1 else nullcontext():
                for future in waiting[: max(alike, 1)]:
                    waiting.remove(future)
                    future.finish()

    def _end_of_backward(self, task: int) -> None:
        self._backward_tasks.discard(task)
        self.finish_all()

    def collect(self, make: Callable[[], Any]) -> PendingFuture:
        """A future that C++ made from ours, as one that can be waited for from Python.

        Args:
            make: calls C++ code that asks for futures and combines them into its result.
        """
        self._collecting += 1
        try:
            native = make()
        finally:
            self._collecting -= 1

        def finish() -> None:
            self.finish_all()
            try:
                wrapped.complete(native.wait())
            except Exception as error:  # noqa: BLE001
                wrapped.fail(error)

        wrapped = PendingFuture(finish)
        return wrapped


def gather_futures(futures: Sequence[Any]) -> PendingFuture | None:
    """`torch.futures.collect_all` where some are ours; None where none is."""
    if not any(isinstance(future, PendingFuture) for future in futures):
        return None

    def finish() -> None:
        for future in futures:
            with suppress(Exception):  # each future keeps its own error
                future.wait()
        gathered.complete(list(futures))

    gathered = PendingFuture(finish, ready=lambda: all(future.done() for future in futures))
    return gathered
