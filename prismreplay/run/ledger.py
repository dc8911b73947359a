"""Numbers that the processes of a run share: memory that all of them have mapped.

Sandbox ranks that communicate with each other over a real backend do not pass through the hub.
So each notes here when it arrived, and with how much debt (`prismreplay.run.clock`): a rank that
was kept waiting by another one's debt takes over its share of it.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

__all__ = ["Arrival", "Ledger"]

_HEAD = 8
_ORIGIN, _PORT = 0, 1
_SLOTS = 4096
"""Operations that are remembered; older ones are overwritten."""
_FIELDS = 3  # tag, machine time, debt
_WORD = 8
_SLOTS_BYTES = 64 << 20
"""Of memory that is taken only where it is written to."""


class Arrival(NamedTuple):
    """When a rank arrived: the machine's time, and the rank's debt. In ns."""

    machine_ns: int
    debt_ns: int


class Ledger:
    """Made before ranks are forked; words are written and read whole."""

    def __init__(self, sandbox: Sequence[int]) -> None:
        self._place = {rank: number for number, rank in enumerate(sandbox)}
        self._width = len(sandbox) * _FIELDS
        self._memory = mmap.mmap(-1, (_HEAD + _SLOTS * self._width) * _WORD)
        self._words = memoryview(self._memory).cast("q")
        self.machine: Callable[[], int] = time.monotonic_ns
        """The clock that the ranks share; on other hosts than the first, that one's."""
        self.slots: mmap.mmap | None = None
        """Where ranks on several GPUs tell each other's GPUs when they arrive."""

    def share_slots(self) -> None:
        """Make room for times that GPUs tell each other; before ranks are forked."""
        self.slots = mmap.mmap(-1, _SLOTS_BYTES)

    @property
    def origin_ns(self) -> int:
        """When all ranks are let go, on the machine's clock."""
        return self._words[_ORIGIN]

    @origin_ns.setter
    def origin_ns(self, time_ns: int) -> None:
        self._words[_ORIGIN] = time_ns

    @property
    def store_port(self) -> int:
        """Where the store for real groups listens."""
        return self._words[_PORT]

    @store_port.setter
    def store_port(self, port: int) -> None:
        self._words[_PORT] = port

    def arrive(self, rank: int, operation: str, arrival: Arrival) -> None:
        """Note that a rank is at an operation, named alike on all its members."""
        tag, at = self._find(rank, operation)
        # The tag last: who finds it finds the rest.
        self._words[at] = 0
        self._words[at + 1], self._words[at + 2] = arrival
        self._words[at] = tag

    def arrivals(self, ranks: Sequence[int], operation: str) -> list[Arrival]:
        """Those of the ranks that have arrived."""
        found = []
        for rank in ranks:
            tag, at = self._find(rank, operation)
            if self._words[at] == tag:
                found.append(Arrival(self._words[at + 1], self._words[at + 2]))
        return found

    def close(self) -> None:
        """Give the memory back here."""
        self._words.release()
        self._memory.close()

    def _find(self, rank: int, operation: str) -> tuple[int, int]:
        digest = hashlib.blake2b(operation.encode(), digest_size=7).digest()
        tag = int.from_bytes(digest, "little") | 1
        slot = (tag >> 1) % _SLOTS
        return tag, _HEAD + slot * self._width + self._place[rank] * _FIELDS
