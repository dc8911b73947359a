"""Timed holds on a CUDA stream: what comes after them starts at a given time of the device.

The device's clock is `%globaltimer`, in nanoseconds; on an H200 it steps by 32. A hold that is
measured from a stamp on the same stream ends within a step or two; one that is told a duration
starts counting only when its kernel runs, several microseconds after it was launched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prismreplay.errors import PluginError
from prismreplay.plugin.device import Kernel, kernel, require_device

__all__ = ["DeviceHolder"]

Tensor = Any
Stream = Any


class DeviceHolder:
    """Stamps and holds on one device.

    Args:
        device: its number; by default the current one.
        limit_ns: no hold lasts longer, whatever its target says.

    Raises:
        PluginUnavailableError: there is no device that can hold.
    """

    def __init__(self, device: int | None = None, *, limit_ns: int = 60_000_000_000) -> None:
        self.device = require_device(device)
        self._limit = np.uint64(limit_ns)

    def times(self, count: int) -> Tensor:
        """Room for so many times, int64 [count], on the device."""
        import torch

        return torch.zeros(count, dtype=torch.int64, device=f"cuda:{self.device}")

    def stamp(self, at: Tensor, *, stream: Stream = None) -> None:
        """Write the time to the first element of `at` when the stream gets here."""
        self._kernel("stamp").launch((1,), 1, self._address(at, 1), stream=stream)

    def hold_for(
        self, duration_ns: int, *, seen: Tensor | None = None, stream: Stream = None
    ) -> None:
        """Hold the stream for so long, from when the kernel starts.

        `seen` is int64 [2]: when the hold ended, and 1 if its limit ended it.
        """
        self._kernel("hold_for").launch(
            (1,), 1, np.uint64(duration_ns), self._limit, self._seen(seen), stream=stream
        )

    def hold_until(
        self, target_ns: int, *, seen: Tensor | None = None, stream: Stream = None
    ) -> None:
        """Hold the stream until a time of the device; not at all if that has passed."""
        self._kernel("hold_until").launch(
            (1,), 1, np.uint64(target_ns), self._limit, self._seen(seen), stream=stream
        )

    def hold_after(
        self,
        stamps: Tensor,
        duration_ns: int,
        *,
        seen: Tensor | None = None,
        stream: Stream = None,
    ) -> None:
        """Hold the stream until so long after the latest of `stamps`, int64 [count].

        The stamps are read when the hold starts: other streams must have made theirs by then.
        A negative duration ends it before, as to make up for the time that a launch takes.
        """
        self._kernel("hold_after").launch(
            (1,),
            1,
            self._address(stamps, 1),
            np.int32(stamps.numel()),
            np.int64(duration_ns),
            self._limit,
            self._seen(seen),
            stream=stream,
        )

    def _kernel(self, entry: str) -> Kernel:
        return kernel("hold", entry, self.device)

    def _seen(self, seen: Tensor | None) -> int:
        return 0 if seen is None else self._address(seen, 2)

    def _address(self, tensor: Tensor, count: int) -> int:
        import torch

        good = (
            tensor.dtype == torch.int64
            and tensor.is_cuda
            and tensor.device.index == self.device
            and tensor.is_contiguous()
            and tensor.numel() >= count
        )
        if not good:
            raise PluginError(
                f"times are contiguous int64 tensors of {count} or more on cuda:{self.device}; "
                f"this is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
                hint=f"torch.zeros({count}, dtype=torch.int64, device='cuda:{self.device}')",
            )
        return int(tensor.data_ptr())
