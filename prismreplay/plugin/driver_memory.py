"""Memory, streams and launches of the driver's own: nothing of it shows in torch's allocator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismreplay.errors import PluginError, PluginUnavailableError

__all__ = ["DriverMemory"]


class DriverMemory:
    """What one device's kernels of ours read and write. Everything begins as zeros.

    Args:
        device: its number.

    Raises:
        PluginUnavailableError: cuda-python is missing.
    """

    def __init__(self, device: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise PluginUnavailableError(
                "cuda-python is not installed", hint="pip install 'prismllm-toolkit[cuda]'"
            ) from error
        self._driver: Any = driver
        self.device = device
        self._device: list[int] = []
        self._pinned: list[int] = []
        self._registered: list[int] = []
        self._streams: list[int] = []

    @property
    def stream(self) -> int:
        """A stream that only we use and that waits for no other."""
        if not self._streams:
            flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._streams.append(int(self._ask("cuStreamCreate", flags)))
        return self._streams[0]

    def on_device(self, size_bytes: int) -> int:
        """Address of new memory of the device."""
        size_bytes = max(8, size_bytes)
        address = int(self._ask("cuMemAlloc", size_bytes))
        self._device.append(address)
        self.clear(address, size_bytes)
        return address

    def clear(self, address: int, size_bytes: int) -> None:
        """Fill memory of the device with zeros."""
        self._ask("cuMemsetD8Async", address, 0, size_bytes, self.stream)
        self.synchronize(self.stream)

    def fetch(self, address: int, there: NDArray[np.int64]) -> None:
        """Copy memory of the device to pinned memory of the host, past all streams of others."""
        self._ask("cuMemcpyDtoHAsync", there.ctypes.data, address, there.nbytes, self.stream)
        self.synchronize(self.stream)

    def pinned(self, words: int) -> tuple[int, NDArray[np.int64]]:
        """New memory of the host that the device can use: its address there, and its words."""
        flags = self._driver.CU_MEMHOSTALLOC_PORTABLE | self._driver.CU_MEMHOSTALLOC_DEVICEMAP
        host = int(self._ask("cuMemHostAlloc", 8 * words, flags))
        self._pinned.append(host)
        there = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(host))
        there[:] = 0
        return int(self._ask("cuMemHostGetDevicePointer", host, 0)), there

    def register(self, address: int, size_bytes: int) -> int:
        """The device's address of memory that several processes have mapped."""
        driver = self._driver
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        self._ask("cuMemHostRegister", address, size_bytes, flags)
        self._registered.append(address)
        return int(self._ask("cuMemHostGetDevicePointer", address, 0))

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has done all."""
        self._ask("cuStreamSynchronize", stream)

    def launcher(self) -> Callable[..., int]:
        """`cuLaunchKernel` itself: what one call costs, each operation of a program pays."""
        found = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
        found.restype = ctypes.c_int
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        found.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        return found

    def close(self) -> None:
        """Give all of it back, once the device is done with it."""
        if self._device or self._pinned:
            self._ask("cuCtxSynchronize")
        for name, addresses in (
            ("cuMemFree", self._device),
            ("cuMemFreeHost", self._pinned),
            ("cuMemHostUnregister", self._registered),
            ("cuStreamDestroy", self._streams),
        ):
            while addresses:
                self._ask(name, addresses.pop())

    def _ask(self, name: str, *arguments: Any) -> Any:
        """Call the driver in the device's context, which is torch's."""
        import torch

        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()
            status, *values = getattr(self._driver, name)(*arguments)
        if int(status):
            raise PluginError(
                f"{name} failed on device {self.device}: {status.name}",
                hint="an error of an earlier kernel shows here, too",
            )
        return values[0] if values else None
