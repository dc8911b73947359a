"""What the kernel says about ranks: how much they compute, and how much memory they take."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["IdleWatch", "MemoryWatch", "cpu_seconds"]

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@dataclass
class IdleWatch:
    """Finds running ranks that do not compute: they sleep, or wait for files or other processes.

    Args:
        patience: seconds without processor time after which a rank counts as idle.
    """

    patience: float = 2.0
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)

    def idle(self, running: Iterable[tuple[int, int]], now: float) -> list[int]:
        """Those of the (rank, pid) that have not computed for long enough."""
        current = {}
        idle = []
        for rank, pid in running:
            used = cpu_seconds(pid)
            before, since = self._seen.get(rank, (-1.0, now))
            # A sleeping process still wakes up now and then.
            if used - before > 0.02 * self.patience:
                before, since = used, now
            current[rank] = (before, since)
            if now - since >= self.patience:
                idle.append(rank)
        self._seen = current
        return idle

    def forget(self, rank: int) -> None:
        """`rank` has just been heard of."""
        self._seen.pop(rank, None)


@dataclass
class MemoryWatch:
    """The most memory that all ranks took together, sampled.

    A sample costs milliseconds a rank in the kernel, so the time until the next is as long as
    keeps the share below 2 %.
    """

    peak_bytes: int = 0
    look: bool = True
    """Whether to look at all."""
    _next: float = 0.0

    def sample(self, pids: Iterable[int], now: float) -> None:
        """Look, unless it is too early; shared pages count in parts (PSS)."""
        if now < self._next or not self.look:
            return
        begun = time.perf_counter()
        self.peak_bytes = max(self.peak_bytes, sum(map(_proportional_bytes, pids)))
        self._next = now + max(0.5, 50 * (time.perf_counter() - begun))


def _proportional_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
