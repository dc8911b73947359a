"""Streams and events of a GPU as the role of a sandbox rank needs them; tests have others.

All of it goes past the hooks that the recorder has in torch: what the emulator does is no part of the
program's graph, and no mode that the program is in sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from prismreplay.run.outside_memory import outside_tensor
from prismreplay.runtime.cuda_streams import CudaDevices
from prismreplay.runtime.device_clock import StreamKey

__all__ = ["CudaStreams", "Streams"]

Event = Any
Tensor = Any


class Streams(Protocol):
    """Of the one device that a rank computes on."""

    def current(self) -> StreamKey:
        """The program's current stream, on this thread."""

    def new_stream(self) -> StreamKey:
        """One that nobody else has."""

    def new_event(self) -> Event:
        """An event that was recorded nowhere yet."""

    def record(self, event: Event, stream: StreamKey) -> None:
        """Put an event into a stream."""

    def wait(self, stream: StreamKey, event: Event) -> None:
        """Have a stream wait for an event."""

    def done(self, event: Event) -> bool:
        """Whether the device is past it."""

    def lend(self, stream: StreamKey, tensors: Iterable[Tensor]) -> None:
        """A stream uses tensors, also when the program gives them up: nobody gets them meanwhile."""

    def using(self, stream: StreamKey | None) -> Any:
        """A context in which work goes into a stream (None: the current one), unseen."""

    def synchronize(self, stream: StreamKey) -> None:
        """Have the host wait for a stream."""

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """Bytes of pinned host memory and of the device, neither of torch's device allocator."""

    def outside(self, nbytes: int) -> Tensor:
        """Bytes of the device that are not torch's."""

    def scratch(self, elements: int, dtype: Any) -> Tensor:
        """Memory of torch's own, as the backend takes it for some operations."""

    def noise(self, tensor: Tensor) -> None:
        """Fill a tensor with numbers from nowhere, and leave the program's generators alone."""

    def uniform(self, tensor: Tensor, low: float, high: float) -> None:
        """The same, with numbers from `low` on, below `high`."""

    def handle(self, stream: StreamKey) -> int:
        """What the driver calls a stream."""

    def allocations(self) -> int:
        """How often memory was taken from torch's allocator."""

    def memory(self) -> tuple[int, int, int]:
        """Reserved by torch's allocator, the most reserved, and the most allocated, in bytes."""


class CudaStreams:
    """See `Streams`.

    Args:
        devices: of the rank's timeline.
    """

    def __init__(self, devices: CudaDevices) -> None:
        self._devices = devices
        base = torch._C._CudaEventBase  # noqa: SLF001  past the hooks
        self._record, self._wait = base.record, base.wait
        self._known: dict[StreamKey, Any] = {}
        self._handles: dict[StreamKey, int] = {}
        self._generator: Any = None

    def current(self) -> StreamKey:
        """See `Streams`."""
        return self._devices.current()

    def new_stream(self) -> StreamKey:
        """See `Streams`."""
        return self._devices.private_stream(self._device())

    def new_event(self) -> Event:
        """See `Streams`."""
        return torch.cuda.Event()

    def record(self, event: Event, stream: StreamKey) -> None:
        """See `Streams`."""
        self._record(event, self._stream(stream))

    def wait(self, stream: StreamKey, event: Event) -> None:
        """See `Streams`."""
        self._wait(event, self._stream(stream))

    def done(self, event: Event) -> bool:
        """See `Streams`."""
        return bool(event.query())

    def lend(self, stream: StreamKey, tensors: Iterable[Tensor]) -> None:
        """See `Streams`."""
        there = self._stream(stream)
        for tensor in tensors:
            tensor.record_stream(there)

    @contextmanager
    def using(self, stream: StreamKey | None) -> Iterator[None]:
        """See `Streams`."""
        cuda = torch._C  # noqa: SLF001
        before: Any = None
        if stream is not None:
            before = cuda._cuda_getCurrentStream(stream[1])  # noqa: SLF001
        with cuda.DisableTorchFunction(), cuda._DisableTorchDispatch(), torch.no_grad():  # noqa: SLF001
            if stream is None or before == stream:
                yield
                return
            _switch(stream)
            try:
                yield
            finally:
                _switch(before)

    def synchronize(self, stream: StreamKey) -> None:
        """See `Streams`."""
        self._stream(stream).synchronize()

    def buffers(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See `Streams`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), self.outside(nbytes)

    def outside(self, nbytes: int) -> Tensor:
        """See `Streams`."""
        return outside_tensor(nbytes, self._device())

    def scratch(self, elements: int, dtype: Any) -> Tensor:
        """See `Streams`."""
        return torch.empty(elements, dtype=dtype, device=f"cuda:{self._device()}")

    def noise(self, tensor: Tensor) -> None:
        """See `Streams`."""
        if tensor.dtype not in _RANDOM:
            tensor.zero_()
            return
        tensor.normal_(generator=self._own_generator())

    def uniform(self, tensor: Tensor, low: float, high: float) -> None:
        """See `Streams`."""
        if tensor.is_floating_point():
            tensor.uniform_(low, high, generator=self._own_generator())
        else:
            tensor.random_(int(low), max(int(high), int(low) + 1), generator=self._own_generator())

    def handle(self, stream: StreamKey) -> int:
        """See `Streams`."""
        found = self._handles.get(stream)
        if found is None:
            found = self._handles[stream] = int(self._stream(stream).cuda_stream)
        return found

    def allocations(self) -> int:
        """See `Streams`."""
        if not torch.cuda.is_initialized():
            return 0
        stats = torch._C._cuda_memoryStats(self._device())  # noqa: SLF001
        return int(stats["allocation"]["all"]["allocated"])

    def memory(self) -> tuple[int, int, int]:
        """See `Streams`."""
        if not torch.cuda.is_initialized():
            return 0, 0, 0
        stats = torch._C._cuda_memoryStats(self._device())  # noqa: SLF001
        reserved, allocated = stats["reserved_bytes"]["all"], stats["allocated_bytes"]["all"]
        return reserved["current"], reserved["peak"], allocated["peak"]

    def _own_generator(self) -> Any:
        if self._generator is None:
            self._generator = _generator(self._device())
        return self._generator

    @staticmethod
    def _device() -> int:
        return int(torch._C._cuda_getDevice())  # noqa: SLF001

    def _stream(self, key: StreamKey) -> Any:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = torch.cuda.Stream(
                stream_id=key[0], device_index=key[1], device_type=key[2]
            )
        return found


_RANDOM = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _generator(device: int) -> Any:
    """One of our own; the class in torch may have been replaced (`show_gpus`)."""
    made = torch._C.Generator(device=torch.device("cuda", device))  # noqa: SLF001
    made.manual_seed(20_240_229)
    return made


def _switch(stream: StreamKey) -> None:
    torch._C._cuda_setStream(  # noqa: SLF001
        stream_id=stream[0], device_index=stream[1], device_type=stream[2]
    )
