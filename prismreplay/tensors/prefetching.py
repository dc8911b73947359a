"""Reads what virtual ranks contribute ahead of its use: disk, then memory, then the operation.

A thread goes through the operations of the sandbox ranks' graphs in their order and reads what the
recording holds of their virtual members, until the pool is full; each operation takes its part out.
What is not there in time is read at once, and counted. What the program leaves out makes room when
later operations need it. What is needed again and again is kept, where it fits, else it is read
again ahead of its next use.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from prismreplay.collect.handover import Parcel
from prismreplay.tensors.recorded import RecordedTensor

__all__ = ["Contribution", "PrefetchReport", "Prefetcher", "Wanted"]

_NICER = 5


class Contribution(NamedTuple):
    """What a rank gave to an operation, and its bytes."""

    entries: tuple[RecordedTensor, ...]
    parcel: Parcel


class Wanted(NamedTuple):
    """Names a contribution: of `rank` to a collective, or what it sent to `receiver`."""

    rank: int
    group: str
    seq: int
    receiver: int | None = None


@dataclass(frozen=True)
class PrefetchReport:
    """How reading ahead went. `misses` had to be read when they were needed."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    read_bytes: int = 0
    peak_bytes: int = 0


class Prefetcher:
    """A pool of contributions, filled by a thread.

    Args:
        load: reads one.
        order: what will be needed, operation by operation.
        most_bytes: that the pool holds; one operation may be larger.
        again: what may then be needed over and over, in this order; up to half of the pool is for
            keeping it.
    """

    def __init__(
        self,
        load: Callable[[Wanted], Contribution],
        order: Iterable[Sequence[Wanted]],
        most_bytes: int,
        again: Sequence[Sequence[Wanted]] = (),
    ) -> None:
        self._load = load
        self._order: Iterator[Sequence[Wanted]] = iter(order)
        self._again = again
        self._recurring = frozenset(wanted for operation in again for wanted in operation)
        self._kept: dict[Wanted, Contribution] = {}
        self._kept_bytes = 0
        self._most_bytes = most_bytes
        self._pool: OrderedDict[Wanted, tuple[int, Contribution]] = OrderedDict()
        self._taken: set[Wanted] = set()
        self._bytes = self._peak = self._read = 0
        self._hits = self._misses = self._evicted = 0
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> PrefetchReport:
        """Read no more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        return PrefetchReport(self._hits, self._misses, self._evicted, self._read, self._peak)

    @property
    def reads(self) -> bool:
        """Whether there is, or may be, something left to read."""
        return self._thread.is_alive()

    def holds(self, wanted: Wanted) -> bool:
        """Whether it has been read already."""
        with self._changed:
            return wanted in self._kept or wanted in self._pool

    def take(self, wanted: Wanted) -> Contribution:
        """A contribution, read ahead or now.

        Raises:
            TensorRecordingError: it is not recorded, or damaged.
        """
        with self._changed:
            kept = self._kept.get(wanted)
            if kept is not None:
                self._hits += 1
                return kept
            found = self._pool.pop(wanted, None)
            if found is not None:
                place, contribution = found
                self._bytes -= contribution.parcel.nbytes
                self._hits += 1
                self._make_room(place)
                self._changed.notify_all()
                return contribution
            self._misses += 1
            self._taken.add(wanted)
            self._drop_oldest()
        contribution = self._load(wanted)
        with self._changed:
            self._read += contribution.parcel.nbytes
            self._keep(wanted, contribution)
        return contribution

    def _keep(self, wanted: Wanted, contribution: Contribution) -> bool:
        """Keep what will be needed again, if there is room."""
        nbytes = contribution.parcel.nbytes
        if wanted not in self._recurring or self._kept_bytes + nbytes > self._most_bytes // 2:
            return False
        if wanted not in self._kept:
            self._kept[wanted] = contribution
            self._kept_bytes += nbytes
            self._peak = max(self._peak, self._bytes + self._kept_bytes)
        return True

    def _make_room(self, place: int) -> None:
        """Operations before this one were left out, if the pool is full."""
        if self._bytes + self._kept_bytes < self._most_bytes:
            return
        for wanted, (other, contribution) in list(self._pool.items()):
            if other >= place - 1:
                break
            del self._pool[wanted]
            self._bytes -= contribution.parcel.nbytes
            self._evicted += 1

    def _drop_oldest(self) -> None:
        """What is needed is not in a full pool: what fills it was left out."""
        if self._bytes + self._kept_bytes < self._most_bytes or not self._pool:
            return
        oldest = next(iter(self._pool.values()))[0]
        self._make_room(oldest + 2)
        self._changed.notify_all()

    def _run(self) -> None:
        with suppress(OSError):
            # Whoever answers ranks goes first where both are on one core.
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + _NICER)
        for place, operation in enumerate(self._in_order()):
            for wanted in operation:
                if not self._read_one(place, wanted):
                    return

    def _in_order(self) -> Iterator[Sequence[Wanted]]:
        yield from self._order
        while self._await_next_round():
            yield from self._again

    def _await_next_round(self) -> bool:
        """Until something is gone that will be needed again; False when nothing is to be read."""
        with self._changed:
            while not self._over and not self._recurring.issubset(self._kept):
                if any(one not in self._kept and one not in self._pool for one in self._recurring):
                    return True
                self._changed.wait()
        return False

    def _read_one(self, place: int, wanted: Wanted) -> bool:
        with self._changed:
            while self._bytes + self._kept_bytes >= self._most_bytes and not self._over:
                self._changed.wait()
            if self._over:
                return False
            if wanted in self._taken:
                self._taken.discard(wanted)
                return True
            if wanted in self._kept or wanted in self._pool:
                return True
        try:
            contribution = self._load(wanted)
        except Exception:  # noqa: BLE001  whoever needs it is told, with its operation
            with self._changed:
                self._recurring -= {wanted}
            return True
        with self._changed:
            self._read += contribution.parcel.nbytes
            if self._keep(wanted, contribution):
                self._taken.discard(wanted)
                return True
            if wanted in self._taken:
                self._taken.discard(wanted)
                return True
            self._pool[wanted] = (place, contribution)
            self._bytes += contribution.parcel.nbytes
            self._peak = max(self._peak, self._bytes + self._kept_bytes)
        return True
