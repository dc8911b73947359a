"""Memory of a GPU that torch's allocator does not know of.

What an emulated rank allocates shall be what the rank allocates on the cluster, to the byte. So
what the emulator itself needs on the GPU comes from the driver, past torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from prismreplay.errors import PluginError

__all__ = ["BufferPool", "outside_tensor"]

Tensor = Any

_LEAST_BYTES = 1 << 20


class _Block:
    """Memory of the driver, by a protocol that torch reads; it is never given back."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def outside_tensor(nbytes: int, device: int) -> Tensor:
    """So many bytes of a GPU, uint8 [nbytes].

    Raises:
        PluginError: the driver has none left.
    """
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # the device's context is this thread's now
        code = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(
            ctypes.byref(address), ctypes.c_size_t(nbytes)
        )
    if code:
        raise PluginError(
            f"no room on the GPU for {nbytes / 1e6:,.0f} MB of the emulator's own: "
            f"cuMemAlloc returned {code}",
            hint="virtual ranks that mirror a rank need none: --tensors builtin:mirror",
        )
    return torch.as_tensor(_Block(address.value, nbytes), device=f"cuda:{device}")


class BufferPool:
    """Buffers for what virtual ranks give: pinned ones of the host, with one each on the GPU.

    Args:
        make: a pair of uint8 tensors of so many bytes: host's, device's.
        is_over: whether the device is past what an event stands for.
    """

    def __init__(
        self, make: Callable[[int], tuple[Tensor, Tensor]], is_over: Callable[[Any], bool]
    ) -> None:
        self._make = make
        self._is_over = is_over
        self._free: list[tuple[Tensor, Tensor]] = []
        self._busy: list[tuple[Any, tuple[Tensor, Tensor]]] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """A pair with room for so many bytes that nobody uses."""
        still = []
        for event, pair in self._busy:
            if self._is_over(event):
                self._free.append(pair)
            else:
                still.append((event, pair))
        self._busy = still
        fitting = [pair for pair in self._free if pair[0].numel() >= nbytes]
        if fitting:
            least = min(fitting, key=lambda pair: int(pair[0].numel()))
            self._free = [pair for pair in self._free if pair is not least]
            return least
        size = _LEAST_BYTES
        while size < nbytes:
            size *= 2
        self.nbytes += size
        return self._make(size)

    def give(self, pair: tuple[Tensor, Tensor], event: Any) -> None:
        """It is free again once the device is past an event."""
        self._busy.append((event, pair))
