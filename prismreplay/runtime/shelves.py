"""Tensors that torch's backend keeps for communications beside the program. No torch in here.

NCCL's backend holds the tensors of an asynchronous collective until the program has a stream wait
for it. Where the program waits by a future only (`DistributedDataParallel`), or never, the backend
gives them up when the program next communicates in that group, in whatever way, once a thread of
the group that looks ten times a second has found the collective complete. So old buckets of
gradients are there for a while beside new ones, and count in the peak of a program's memory. (Of
messages it keeps nothing: the allocator is told that another stream uses their tensors.)

A stream of ours that waits for a collective, to see its end, makes the backend give them up early.
A `Shelf` holds them for as long as the backend would have: the program's peak is its own. Where
the backend is there, its own thread tells what it has found (`found_by_backend`). Where it is not,
a shelf looks as that thread would, at moments as good as any: when the thread of a true run looks
is chance, and so is what two true runs hold of collectives that ended within the last tenth of a
second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["LOOK_EVERY_NS", "Kept", "Shelf", "found_by_backend"]

LOOK_EVERY_NS = 100_000_000


class Kept:
    """Tensors of one operation; `release` them when the program itself waits for it."""

    __slots__ = ("_complete", "since_ns", "tensors")

    def __init__(self, tensors: Any, complete: Callable[[], bool], since_ns: int = 0) -> None:
        self.tensors = tensors
        self.since_ns = since_ns
        self._complete = complete

    def release(self) -> None:
        """The program waits for the operation."""
        self.tensors = None
        # It may belong to the backend's handle, which has the outputs.
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


def found_by_backend(work: Any) -> Callable[[], bool]:
    """What says whether the backend's thread has found an operation complete.

    It marks the future of the operation's outcome then. Handles that have no such future are
    asked themselves. Asking for the future takes as long as launching the operation: that is left
    until somebody wants to know, who mostly hears "no" of the oldest one.
    """
    asked: list[Callable[[], bool]] = []

    def found() -> bool:
        if not asked:
            try:
                asked.append(work.get_future_result().done)
            except (AttributeError, RuntimeError):
                asked.append(work.is_completed)
        return asked[0]()

    return found


class Shelf:
    """What is kept for one group.

    Args:
        looks: the operations are asked themselves, and found complete ten times a second; without,
            what is kept says what a thread of the backend's has found.
        clock: in ns.
    """

    def __init__(
        self, *, looks: bool = False, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._looks = looks
        self._clock = clock
        self._kept: deque[Kept] = deque()
        self._begun_ns = clock() if looks else 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tensors: Any, complete: Callable[[], bool]) -> Kept:
        """Keep an operation's tensors; `complete` says whether it is over."""
        kept = Kept(tensors, complete, self._clock() if self._looks else 0)
        self._kept.append(kept)
        return kept

    def issued(self) -> None:
        """The program communicates in this group: give up what the backend would have.

        Not for what it puts into a graph that it captures: the backend does nothing then.
        """
        kept = self._kept
        while kept and kept[0].tensors is None:
            kept.popleft()
        if not kept:
            return
        looked_ns = 1
        if self._looks:
            now = self._clock()
            looked_ns = now - (now - self._begun_ns) % LOOK_EVERY_NS
        # What was not there at the last look was not found then. What ended since the last look
        # is taken for found: the look of a true run may have come later.
        while kept and kept[0].since_ns < looked_ns and kept[0].is_over():
            kept.popleft().release()
