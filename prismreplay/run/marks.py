"""What a sandbox rank tells of itself, apart from what it communicates."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "CORE_WAIT_BOUND",
    "DeviceSummary",
    "Memory",
    "RankSummary",
    "StepMark",
    "core_times",
    "core_wait",
]

CORE_WAIT_BOUND = 0.1
"""Share of their time that ranks may wait for a core before times are called into doubt."""

_PAGE = os.sysconf("SC_PAGESIZE")


class StepMark(NamedTuple):
    """The end of a step on a rank. Times in ns on the machine's clock, sizes in bytes.

    Until then its main thread was `on_core_ns` on a core, and `queued_ns` ready for one that others
    had.
    """

    rank: int
    step: int
    end_ns: int
    debt_ns: int
    late_ns: int
    handing_ns: int
    resident_bytes: int
    peak_resident_bytes: int
    allocated_bytes: int
    on_core_ns: int = 0
    queued_ns: int = 0


def core_times() -> tuple[int, int]:
    """`on_core_ns` and `queued_ns` of this process's main thread; zeros where the kernel is silent."""
    try:
        on_core, queued = Path("/proc/self/schedstat").read_text(encoding="ascii").split()[:2]
    except (OSError, ValueError):
        return 0, 0
    return int(on_core), int(queued)


def core_wait(marks: Iterable[StepMark]) -> float:
    """Share of the time in which ranks could have computed that they waited for a core.

    The first step of each does not count where there are others.
    """
    of_rank: dict[int, list[StepMark]] = {}
    for mark in marks:
        of_rank.setdefault(mark.rank, []).append(mark)
    on_core = queued = 0
    for listed in of_rank.values():
        first, last = listed[0], listed[-1]
        before = (first.on_core_ns, first.queued_ns) if len(listed) > 1 else (0, 0)
        on_core += last.on_core_ns - before[0]
        queued += last.queued_ns - before[1]
    return queued / max(1, queued + on_core)


class RankSummary(NamedTuple):
    """A rank at its end: how well operations' ends were met, and its debt, in ns.

    `spun` ranges of the program had another pace; see `prismreplay.run.spinning`. For
    `contended_ns` the program had to share its processor with communication; see
    `prismreplay.run.contention`.
    """

    rank: int
    holds: int
    hold_median_ns: int
    hold_p99_ns: int
    hold_worst_ns: int
    late_answers: int
    late_ns: int
    handing_ns: int
    debt_ns: int
    spun: int = 0
    contended_ns: int = 0


class DeviceSummary(NamedTuple):
    """A rank that computed on a GPU, at its end. Times in ns, sizes in bytes.

    `operations` on the GPU took `issuing_ns` of the host, the median one `issuing_median_ns`;
    `mirrored` of them had nothing but the rank's own numbers to go by; for `fetched` ones the hub
    was asked, for `fetched_late` of these not ahead of time, which kept the host for `fetching_ns`
    in all. `hold_*_ns` say by how much ends of operations were missed that lay ahead, `late` ones
    had passed when the GPU got to them, by `late_ns` in all. Peaks are since the program last reset
    them, and `allocations` were made of torch's allocator; `outside_bytes` of the GPU are the
    emulator's own, beside torch's.
    """

    rank: int
    operations: int = 0
    issuing_ns: int = 0
    issuing_median_ns: int = 0
    mirrored: int = 0
    fetched: int = 0
    fetched_late: int = 0
    fetching_ns: int = 0
    holds: int = 0
    hold_median_ns: int = 0
    hold_p99_ns: int = 0
    hold_worst_ns: int = 0
    late: int = 0
    late_ns: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocations: int = 0
    outside_bytes: int = 0


class Memory:
    """What this process's memory holds; on a GPU, its allocator's numbers take the place of these.

    `peak_resident_bytes` is since the last call where the kernel lets us reset it, else since the
    beginning; `allocated_bytes` is what the C library has given out.
    """

    def __init__(self) -> None:
        self._info = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo
        self._resets = True
        self.reset()

    def read(self) -> tuple[int, int, int]:
        """resident_bytes, peak_resident_bytes, allocated_bytes; begins a new peak."""
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
        peak = resident
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) * 1024
        allocated = 0
        if self._info is not None:
            found = self._info()
            allocated = int(found.uordblks) + int(found.hblkhd)
        self.reset()
        return resident, max(peak, resident), allocated

    def reset(self) -> None:
        """Begin a new peak."""
        if not self._resets:
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self._resets = False


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip
