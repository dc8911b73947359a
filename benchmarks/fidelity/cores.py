"""Which cores ranks run on: a physical one each, and another for gloo's threads where there is one.

gloo's threads must not share a core with each other's interrupters: its event loop does not wait for
a lock that a thread in the middle of a send holds, it asks again and again. When the loop has just
taken the core from that thread, it keeps it for a scheduler's slice (3 to 4 ms), in which nothing
happens. With SCHED_BATCH threads do not take the core from each other.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LOOP_SECONDS = 0.25
_SLOWER = 0.85
"""Of its pace alone: a core that is slower than this shares something with others that are busy."""


# --- of a rank -----------------------------------------------------------------------------


def cores_of(rank: int) -> tuple[int, ...]:
    """Those that FIDELITY_CORES gives a rank, as in `0:4,1:5+6`; none if it does not say."""
    pairs = (pair.split(":") for pair in os.environ.get("FIDELITY_CORES", "").split(",") if pair)
    found = {int(number): value for number, value in pairs}.get(rank)
    return () if found is None else tuple(map(int, found.split("+")))


def stay_on(cores: Sequence[int]) -> None:
    """Keep the calling thread, and what it will start, on the first of a rank's cores."""
    os.sched_setaffinity(0, cores[:1])


def part_threads(cores: Sequence[int], program: int) -> None:
    """Move all threads of this process but the program's to a rank's second core, if it has one.

    With FIDELITY_POLICY `batch` they do not interrupt each other.

    Args:
        cores: the rank's.
        program: the native id of the program's thread.
    """
    if len(cores) < 2:
        return
    batch = os.environ.get("FIDELITY_POLICY") == "batch"
    for number in [int(task.name) for task in Path("/proc/self/task").iterdir()]:
        if number == program:
            continue
        # Threads end.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(number, cores[1:])
            if batch:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))


def keep_threads_apart(cores: Sequence[int], interval: float = 0.1) -> None:
    """As `part_threads`, again and again; the calling thread is the program's."""
    stay_on(cores)
    if len(cores) < 2:
        return
    program = threading.get_native_id()

    def part() -> None:
        while True:
            part_threads(cores, program)
            time.sleep(interval)

    threading.Thread(target=part, name="parting", daemon=True).start()


# --- of a machine --------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """The cores of a machine.

    Attributes:
        firsts: one of every physical core.
        seconds: of each of `firsts` the other thread of the same physical core; empty: there is none.
        found: how that is known.
    """

    firsts: tuple[int, ...]
    seconds: tuple[int, ...]
    found: dict[str, object]

    def of_ranks(self, ranks: int, *, one_each: bool = False) -> list[tuple[int, ...]]:
        """Cores of each rank: the program's, then that of gloo's threads, if there is one."""
        firsts = self.firsts[:ranks]
        if one_each or len(firsts) < ranks:
            count = len(firsts)
            return [(firsts[rank % count],) for rank in range(ranks)]
        if len(self.firsts) >= 2 * ranks:
            return list(zip(firsts, self.firsts[ranks : 2 * ranks], strict=True))
        if self.seconds:
            return list(zip(firsts, self.seconds, strict=False))
        return [(core,) for core in firsts]

    def paired(self, most: int) -> list[tuple[int, ...]]:
        """As many programs' cores as there can be (`most`), each with one for gloo's threads."""
        if self.seconds:
            return list(zip(self.firsts, self.seconds, strict=True))[:most]
        half = min(most, len(self.firsts) // 2)
        return self.of_ranks(half)


def look_at(cores: Sequence[int]) -> Cores:
    """Which cores are threads of one physical core: from the system, else measured."""
    told = {core: _siblings(core) & set(cores) for core in cores}
    found: dict[str, object] = {"cores": len(cores)}
    if any(len(one) > 1 for one in told.values()):
        pairs = sorted({(min(one), max(one)) for one in told.values()})
        found["threads of one core"] = "as the system says"
        return _cores_of(cores, dict(pairs), found)
    if len(cores) < 4:
        found["threads of one core"] = "none, as the system says"
        return Cores(tuple(cores), (), found)
    paces = _measure(cores)
    found["pace of a core"] = paces
    half = len(cores) // 2
    if paces["first half"] < _SLOWER * paces["every other"]:
        found["threads of one core"] = "neighbours, as measured"
        return _cores_of(cores, dict(zip(cores[::2], cores[1::2], strict=False)), found)
    if paces["every other"] < _SLOWER * paces["first half"]:
        found["threads of one core"] = "i and i + half, as measured"
        return _cores_of(cores, dict(zip(cores[:half], cores[half:], strict=False)), found)
    if paces["all"] < _SLOWER * min(paces["first half"], paces["every other"]):
        # They share something, in pairs that are not known, or that change.
        found["threads of one core"] = "not to be seen, but all are slower than half of them"
        return _cores_of(cores, dict(zip(cores[:half], cores[half:], strict=False)), found)
    found["threads of one core"] = "none, as measured"
    return Cores(tuple(cores), (), found)


def _cores_of(cores: Sequence[int], pairs: dict[int, int], found: dict[str, object]) -> Cores:
    firsts = [core for core in cores if core in pairs]
    return Cores(tuple(firsts), tuple(pairs[core] for core in firsts), found)


def _siblings(core: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        text = path.read_text()
    except OSError:
        return {core}
    ends = [list(map(int, part.split("-"))) for part in text.strip().split(",") if part]
    return {core}.union(*(range(one[0], one[-1] + 1) for one in ends))


def _measure(cores: Sequence[int]) -> dict[str, float]:
    """Paces, of a core's pace alone, when some of them or all are busy."""
    alone = statistics.median(_loops([core])[0] for core in cores[:: max(1, len(cores) // 3)][:3])
    half = len(cores) // 2
    groups = {"first half": cores[:half], "every other": cores[::2][:half], "all": cores}
    return {
        name: round(statistics.median(_loops(group)) / max(1, alone), 2)
        for name, group in groups.items()
    }


def _loops(cores: Sequence[int]) -> list[int]:
    """How many products each core does, all at once."""
    begin = time.monotonic() + 0.05 + 0.005 * len(cores)
    pipes = []
    for core in cores:
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            _loop(core, begin, into)
        os.close(into)
        pipes.append((pid, out))
    counts = []
    for pid, out in pipes:
        with os.fdopen(out) as stream:
            counts.append(int(stream.read() or 0))
        os.waitpid(pid, 0)
    return counts


def _loop(core: int, begin: float, into: int) -> None:
    """In a process of its own."""
    try:
        signal.alarm(10)
        import torch

        torch.set_num_threads(1)
        os.sched_setaffinity(0, {core})
        left, right = torch.ones((64, 64)), torch.ones((64, 64))
        count = 0
        while time.monotonic() < begin:
            torch.mm(left, right)
        while time.monotonic() < begin + _LOOP_SECONDS:
            for _ in range(10):
                torch.mm(left, right)
            count += 1
        os.write(into, str(count).encode())
    finally:
        os._exit(0)
