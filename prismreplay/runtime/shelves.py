"""Tensors that torch's backend keeps for communications beside the program. No torch in here.

NCCL's backend holds the tensors of an asynchronous operation until the program has a stream wait
for it. Where the program waits by a future only (`DistributedDataParallel`), or never, the backend
gives them up when the program communicates next in that group, once a thread of it that looks ten
times a second has found the operation complete. So old buckets of gradients are there for a while
beside new ones, and count in the peak of a program's memory.

A stream of ours that waits for an operation, to see its end, makes the backend give them up early.
A `Shelf` holds them for as long as the backend would have: the program's peak is its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Kept", "Shelf"]

LOOK_EVERY_NS = 100_000_000


class Kept:
    """Tensors of one operation; `release` them when the program itself waits for it."""

    __slots__ = ("_complete", "tensors")

    def __init__(self, tensors: Any, complete: Callable[[], bool]) -> None:
        self.tensors = tensors
        self._complete = complete

    def release(self) -> None:
        """The program waits for the operation."""
        self.tensors = None
        # It belongs to the backend's handle, which has the outputs.
        self._complete = _is_over

    def is_over(self) -> bool:
        """Whether nobody needs them any more."""
        if self.tensors is None:
            return True
        try:
            return self._complete()
        except RuntimeError:
            return True  # the device is out of order: the program will hear of it


def _is_over() -> bool:
    return True


class Shelf:
    """What is kept for one group.

    Args:
        may_ask: whether an operation can be asked if it is complete: not while the program
            captures a graph.
        clock: in ns.
    """

    def __init__(
        self,
        may_ask: Callable[[], bool] = lambda: True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._may_ask = may_ask
        self._clock = clock
        self._kept: deque[Kept] = deque()
        self._looked_ns = clock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tensors: Any, complete: Callable[[], bool]) -> Kept:
        """Keep an operation's tensors; `complete` says whether it is over."""
        kept = Kept(tensors, complete)
        self._kept.append(kept)
        return kept

    def issued(self) -> None:
        """The program communicates in this group: give up what the backend would have."""
        kept = self._kept
        while kept and kept[0].tensors is None:
            kept.popleft()
        now = self._clock()
        if not kept or now - self._looked_ns < LOOK_EVERY_NS or not self._may_ask():
            return
        self._looked_ns = now
        while kept and kept[0].is_over():
            kept.popleft().release()
