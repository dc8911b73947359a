"""CUDA as the recorder sees it: events and streams of torch, and hooks on the program's own.

Nothing here touches a device before the program has.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from typing import Any

import torch

from prismreplay.errors import PluginError
from prismreplay.runtime.device_clock import StreamKey
from prismreplay.runtime.lanes import Lanes

__all__ = ["CudaDevices", "current_stream", "watch_streams"]

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the legacy default stream does not wait for it
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_DRIVERS_CONNECTIONS = 8
_MOST_CONNECTIONS = 32
_DEPENDENCIES = "_prismreplay_after"


# Found once: every mark asks. Builds for CPUs have none of them.
_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # noqa: SLF001
_stream_of: Any = getattr(torch._C, "_cuda_getCurrentStream", None)  # noqa: SLF001
_set_stream: Any = getattr(torch._C, "_cuda_setStream", None)  # noqa: SLF001
_captures: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)  # noqa: SLF001


def _is_in_use() -> bool:
    """Whether the program uses a device."""
    global _in_use  # noqa: PLW0603  once it does, it always will
    _in_use = _in_use or torch.cuda.is_initialized()
    return _in_use


def _forget_use() -> None:
    """A process that is forked off, such as a data loader's worker, cannot use what its parent does."""
    global _in_use  # noqa: PLW0603
    _in_use = False


_in_use = False
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_use)


def current_stream() -> StreamKey | None:
    """This thread's current stream; None while the program uses no device."""
    if not (_in_use or _is_in_use()):
        return None
    return _stream_of(_device())  # type: ignore[no-any-return]


def _key(stream: Any) -> StreamKey:
    return (stream.stream_id, stream.device_index, stream.device_type)


class CudaDevices:
    """See `prismreplay.runtime.device_clock.Devices`."""

    host_ns = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        self._streams: dict[StreamKey, Any] = {}
        # Past the hooks that `watch_streams` puts into torch's classes.
        self._record = torch._C._CudaEventBase.record  # noqa: SLF001
        self._blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() in _YES

    def ready(self) -> bool:
        """A device is in use, and the current stream is not being captured into a graph."""
        return (_in_use or _is_in_use()) and not _captures()

    def current(self) -> StreamKey:
        """The current stream of this thread."""
        return _stream_of(_device())  # type: ignore[no-any-return]

    def new_event(self) -> Any:
        """A CUDA event with timing."""
        return torch.cuda.Event(enable_timing=True)

    def record(self, event: Any, stream: StreamKey) -> None:
        """Put an event into a stream."""
        there = self._streams.get(stream)
        if there is None:
            there = self._streams[stream] = torch.cuda.Stream(
                stream_id=stream[0], device_index=stream[1], device_type=stream[2]
            )
        self._record(event, there)

    def done(self, event: Any) -> bool:
        """Whether the device is past it."""
        return bool(event.query())

    def elapsed_ns(self, earlier: Any, later: Any) -> float:
        """As the device's clock has it: CUDA counts in half microseconds or finer."""
        return float(earlier.elapsed_time(later)) * 1e6

    def private_stream(self, device: int) -> StreamKey:
        """A stream of the driver's: those of torch's pool are handed out several times.

        Raises:
            PluginError: the driver refuses.
        """
        handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # the device's context is this thread's now
            code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
            if code:
                raise PluginError(
                    f"the driver makes no stream: cuStreamCreate returned {code}",
                    where=f"cuda:{device}",
                    hint="has the GPU memory left, and no error of an earlier kernel? nvidia-smi "
                    "shows the former, CUDA_LAUNCH_BLOCKING=1 the latter",
                )
            stream = torch.cuda.ExternalStream(handle.value, device=device)
        key = _key(stream)
        self._streams[key] = stream
        return key

    def connections(self) -> int:
        """What the driver was told, before it started; 1 has all streams wait for each other."""
        if self._blocking:
            return 0
        try:
            said = int(os.environ.get(_CONNECTIONS, _DRIVERS_CONNECTIONS))
        except ValueError:
            return _DRIVERS_CONNECTIONS
        return min(said, _MOST_CONNECTIONS)

    def after(self, work: Any, stream: StreamKey) -> None:
        """Have a stream wait for a communication."""
        device = _device()
        before = _stream_of(stream[1])
        _switch(stream)  # past the hooks
        try:
            work.wait()
        finally:
            _switch(before)
            if device != stream[1]:
                torch._C._cuda_setDevice(device)  # noqa: SLF001

    def memory(self, device: int) -> tuple[int, int]:
        """What the caching allocator has given out, and the most it had."""
        there = torch._C._cuda_memoryStats(device)["allocated_bytes"]["all"]  # noqa: SLF001
        return there["current"], there["peak"]


def _switch(stream: StreamKey) -> None:
    _set_stream(stream_id=stream[0], device_index=stream[1], device_type=stream[2])


_YES = ("1", "y", "yes", "t", "true")


def watch_streams(lanes: Lanes) -> None:
    """Tell a recorder's lanes which stream the program puts work into, and which wait for which.

    Hooks on Python's `torch.cuda` only: what C++ does (autograd's engine) is not seen. Nor is what
    other threads do than the calling one and autograd's, such as one that loads data.
    """
    program = threading.get_ident()

    def is_program() -> bool:
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        return bool(threading.get_ident() == program or in_backward)

    set_stream, event = torch.cuda.set_stream, torch.cuda.Event
    record, wait = event.record, event.wait

    @functools.wraps(set_stream)
    def switch(stream: Any) -> None:
        before = current_stream()
        if stream is None or before in (None, _key(stream)) or not is_program():
            set_stream(stream)
            return
        lanes.leave(before)
        set_stream(stream)
        lanes.find()

    @functools.wraps(record)
    def put(self: Any, stream: Any = None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream()
        if _is_cuda(stream) and is_program():
            setattr(self, _DEPENDENCIES, lanes.event_recorded(_key(stream)))
        record(self, stream)

    @functools.wraps(wait)
    def hold(self: Any, stream: Any = None) -> None:
        if stream is None:
            stream = torch.cuda.current_stream()
        known = getattr(self, _DEPENDENCIES, None)
        if not known or not _is_cuda(stream) or not is_program():
            wait(self, stream)
            return
        lanes.wait_for_event(_key(stream), known, lambda: wait(self, stream))

    torch.cuda.set_stream = switch
    event.record, event.wait = put, hold


def _is_cuda(stream: Any) -> bool:
    return isinstance(stream, torch.cuda.Stream)
