"""Pieces of a stream that take longer than they do, by a kernel that keeps the stream busy.

What a piece has taken is measured by the device: a note before it, and the kernel behind it reads
how long ago that was. Nothing synchronises, and no memory comes from torch's allocator.
"""

from __future__ import annotations

import ctypes
from typing import Any

from prismreplay.errors import PluginError
from prismreplay.plugin.device import kernel, require_device
from prismreplay.plugin.driver_memory import DriverMemory

__all__ = ["Stretcher"]

_NOTES = 4096
"""Pieces that may be under way; a power of two."""
LONGEST_NS = 60_000_000_000


class Stretcher:
    """Of one device.

    Args:
        device: its number; by default the current one.

    Raises:
        PluginUnavailableError: there is no device that can do it.
    """

    def __init__(self, device: int | None = None) -> None:
        self.device = require_device(device)
        self._memory = DriverMemory(self.device)
        self._notes = self._memory.on_device(8 * _NOTES + 8)
        self._spent = self._notes + 8 * _NOTES
        self._next = 0
        self._launch = self._memory.launcher()
        # Loading a kernel later may have to wait for all that run.
        self.stretch(self.note(self._memory.stream), 0.0, self._memory.stream)
        self._memory.synchronize(self._memory.stream)

    def note(self, stream: int) -> int:
        """Note when a stream, given by the driver's handle, gets here; returns the note."""
        number = self._next & (_NOTES - 1)
        self._next += 1
        self._run("note", [ctypes.c_uint64(self._notes + 8 * number)], stream)
        return number

    def stretch(self, note: int, more: float, stream: int) -> None:
        """Keep the stream busy for `more` times as long as it has taken since a note on it."""
        self._run(
            "stretch",
            [
                ctypes.c_uint64(self._notes + 8 * note),
                ctypes.c_double(more),
                ctypes.c_uint64(LONGEST_NS),
                ctypes.c_uint64(self._spent),
            ],
            stream,
        )

    def close(self) -> None:
        """Give the memory back, once the device has done all."""
        self._memory.close()

    def _run(self, entry: str, values: list[Any], stream: int) -> None:
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
        handle = kernel("pace", entry, self.device).address
        status = self._launch(handle, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None)
        if status:
            raise PluginError(
                f"kernel pace.{entry} cannot be launched: the driver returned {status}",
                hint="an error of an earlier kernel shows here, too; CUDA_LAUNCH_BLOCKING=1",
            )
