"""A rank's own account of its GPU memory, and what it gives back when others need room."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from prismreplay.collect.messages import Message

__all__ = ["RankMemory", "page_out", "swap_space"]

_WORTH_TELLING_BYTES = 16 << 20
_MADV_PAGEOUT = 21


class RankMemory:
    """What torch's allocator holds in this process, told to the coordinator when it changes."""

    def __init__(self) -> None:
        self._told = (0, 0, 0)

    def note(self) -> Message | None:
        """The message about it; None when there is little new, or CUDA was not used yet."""
        if not torch.cuda.is_initialized():
            return None
        now = _allocator()
        changes = (abs(new - old) for new, old in zip(now, self._told, strict=True))
        if max(changes) < _WORTH_TELLING_BYTES and any(self._told):
            return None
        self._told = now
        return "memory", *now

    def trim(self) -> Message:
        """Give back what the allocator keeps for later; what is left."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._told = _allocator()
        return "trimmed", *self._told

    def spill(self) -> Message:
        """Let the kernel move this process's memory to swap space."""
        return "spilled", page_out()


def _allocator() -> tuple[int, int, int]:
    """Bytes reserved, allocated, and reserved at the most."""
    stats = torch.cuda.memory_stats_as_nested_dict()
    reserved: Any = stats.get("reserved_bytes", {}).get("all", {})
    allocated: Any = stats.get("allocated_bytes", {}).get("all", {})
    # Without anything allocated there is nothing in it.
    return reserved.get("current", 0), allocated.get("current", 0), reserved.get("peak", 0)


def page_out(advise: Callable[[int, int], bool] | None = None) -> int:
    """Let the kernel move this process's own memory to swap space; bytes it was told of.

    Pages that other processes share stay: the kernel leaves them alone.

    Args:
        advise: tells it of one region, by address and size; by default madvise(MADV_PAGEOUT).
    """
    tell = advise or _advise
    told = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        first, _, last = fields[0].partition("-")
        anonymous = len(fields) < 6 or fields[5] == "[heap]"
        if not fields[1].startswith("rw-p") or not anonymous:
            continue
        start, size = int(first, 16), int(last, 16) - int(first, 16)
        if size >= mmap.PAGESIZE and tell(start, size):
            told += size
    return told


def _advise(start: int, size: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_PAGEOUT) == 0)


def swap_space() -> int:
    """Bytes that the kernel can still move to disk; 0 where there is no swap space."""
    limit = _cgroup_swap()
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 0
    free = next(
        (int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("SwapFree:")),
        0,
    )
    return free if limit is None else min(free, limit)


def _cgroup_swap() -> int | None:
    """What the control group still allows; None: any."""
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.swap.max").read_text(encoding="ascii").strip()
        used = (group / "memory.swap.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - int(used))
