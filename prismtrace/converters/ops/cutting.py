"""Parts of a log: consecutive rows that are worked on at once, several in parallel.

A part is small enough for its arrays to stay in the processor's cache and large enough for
numpy to spend its time outside the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from prismtrace.converters.ops.grid import Int64Array

__all__ = ["cut_into_parts", "threads"]

PART_ROWS = 256 * 1024


def cut_into_parts(begins: Int64Array) -> list[range]:
    """Ranges of units that hold about `PART_ROWS` rows each, or one unit.

    Args:
        begins: int64[units + 1], the first row of every unit, and the number of rows.
    """
    number = begins[:-1] // PART_ROWS
    first = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
    return [range(*ends) for ends in zip(first, [*first[1:], len(number)], strict=True)]


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    """A thread for every processor; what has not begun when the block fails is not done."""
    with ThreadPoolExecutor(_processors()) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
