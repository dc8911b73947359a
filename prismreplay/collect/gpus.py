"""The GPUs of this machine, looked at without starting CUDA.

Ranks are forked, and CUDA does not survive a fork: the process that they are forked from must not
have called it. NVML, the driver's library for monitoring, may be called: it says which GPUs there
are, how much of their memory is taken, and, outside containers, by which process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prismreplay.errors import SwapError
from prismtrace.schema import TraceHeader

__all__ = ["DEVICES", "Gpu", "Nvml", "find_gpus", "ran_on_cpus", "require_cuda_asleep"]

DEVICES = "devices"
"""In `TraceHeader.extra`, of jobs that were collected where there are GPUs: cpus if they use none."""

_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_UNKNOWN_BYTES = (1 << 64) - 1
_UUID_CHARACTERS = 96
_CUDA_NOT_INITIALIZED = 3


@dataclass(frozen=True)
class Gpu:
    """One GPU that ranks may use.

    `token` names it in CUDA_VISIBLE_DEVICES; `total_bytes` is its memory, of which `taken_bytes`
    were in use before any rank ran.
    """

    token: str
    total_bytes: int
    taken_bytes: int = 0


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """What the driver's monitoring library says.

    Args:
        library: libnvidia-ml, as ctypes loads it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handles: dict[str, Any] = {}
        self.works = library.nvmlInit_v2() == _SUCCESS

    @classmethod
    def load(cls) -> Nvml | None:
        """None where there is no driver, or one that does not work."""
        try:
            found = cls(ctypes.CDLL("libnvidia-ml.so.1"))
        except OSError:
            return None
        return found if found.works else None

    def count(self) -> int:
        """GPUs of the machine, visible or not."""
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
            return 0
        return count.value

    def memory(self, token: str) -> tuple[int, int] | None:
        """Bytes in all and bytes in use of the GPU that `token` names; None if there is none."""
        handle = self._handle(token)
        memory = _Memory()
        if handle is None or (
            self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != _SUCCESS
        ):
            return None
        return memory.total, memory.used

    def processes(self, token: str) -> dict[int, int]:
        """Bytes that processes have on a GPU, by pid.

        Empty in most containers: the driver does not know their pids.
        """
        handle = self._handle(token)
        if handle is None:
            return {}
        ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        room = 64
        while True:
            count, found = ctypes.c_uint(room), (_Process * room)()
            code = ask(handle, ctypes.byref(count), found)
            if code == _INSUFFICIENT_SIZE and room < 1 << 16:
                room = max(2 * room, count.value)
                continue
            if code != _SUCCESS:
                return {}
            return {one.pid: one.used for one in found[: count.value] if one.used != _UNKNOWN_BYTES}

    def _handle(self, token: str) -> Any:
        """NVML's handle of a GPU: its number, its UUID or the beginning of that."""
        if token not in self._handles:
            self._handles[token] = self._find(token)
        return self._handles[token]

    def _find(self, token: str) -> Any:
        handle = ctypes.c_void_p()
        if token.isdecimal():
            code = self._library.nvmlDeviceGetHandleByIndex_v2(int(token), ctypes.byref(handle))
            return handle if code == _SUCCESS else None
        by_uuid = self._library.nvmlDeviceGetHandleByUUID
        if by_uuid(token.encode(), ctypes.byref(handle)) == _SUCCESS:
            return handle
        name = ctypes.create_string_buffer(_UUID_CHARACTERS)
        for number in range(self.count()):
            other = self._find(str(number))
            asked = other and self._library.nvmlDeviceGetUUID(other, name, _UUID_CHARACTERS)
            if asked == _SUCCESS and name.value.startswith(token.encode()):
                return other
        return None


def find_gpus(nvml: Nvml | None, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; empty without a driver.

    As CUDA does: what follows a name that is wrong is not visible, and of names that are
    repeated, nothing is.
    """
    if nvml is None:
        return ()
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        tokens = [str(number) for number in range(nvml.count())]
    else:
        tokens = [token.strip() for token in visible.split(",")]
    if len(set(tokens)) != len(tokens):
        return ()
    found = []
    for token in tokens:
        memory = nvml.memory(token) if token else None
        if memory is None:
            break
        found.append(Gpu(token, *memory))
    return tuple(found)


def ran_on_cpus(header: TraceHeader) -> bool:
    """Whether a job uses no GPU, though there were some when it was collected."""
    return bool(header.extra.get(DEVICES) == "cpus")


def require_cuda_asleep(after: str) -> None:
    """See to it that this process can still be forked, `after` something was done.

    Raises:
        SwapError: CUDA runs in it; forked ranks could not use a GPU.
    """
    try:
        # Only if something has loaded it already.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALIZED:
        raise SwapError(
            "CUDA was started in the process that ranks are forked from",
            where=f"after {after}",
            hint="is there a sitecustomize, or a plugin of torch, that calls torch.cuda? Switch it "
            "off for this run",
        )
