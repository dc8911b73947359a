"""Values in groups: extremes and medians, exact for whole numbers of 64 bits.

Not with floats: times since 1970 in nanoseconds need more than their 53 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Groups", "group_max", "group_min", "numbered"]

Int64Array = NDArray[np.int64]


class Groups:
    """Who is in which group, prepared once for medians of values that change.

    Args:
        number: int[m], group of each member.
        count: how many groups there are, if more than these numbers tell.
    """

    def __init__(self, number: NDArray[Any], count: int = 0) -> None:
        sizes = np.bincount(number, minlength=count)
        self.number = number
        self.sizes = sizes
        # Groups of one size are the rows of one table, and numpy takes medians of rows at once.
        self._order = np.lexsort((number, sizes[number]))
        groups = np.argsort(sizes, kind="stable")
        first = np.flatnonzero(np.diff(sizes[groups], prepend=0))
        self._tables = np.split(groups, first)[1:]

    def median(self, values: Int64Array) -> Int64Array:
        """int64 of each group: its median, mean of the middle two rounded down; 0 if empty."""
        result = np.zeros(len(self.sizes), np.int64)
        ordered = values[self._order]
        begin = 0
        for groups in self._tables:
            size = int(self.sizes[groups[0]])
            table = ordered[begin : begin + size * len(groups)].reshape(-1, size)
            begin += table.size
            middle = (size - 1) // 2, size // 2
            table.partition(middle, axis=1)
            low, high = table[:, middle[0]], table[:, middle[1]]
            result[groups] = low + (high - low) // 2
        return result


def numbered(instance: NDArray[Any]) -> NDArray[np.intp]:
    """int[m]: the same groups, by numbers without holes and in the same order.

    Args:
        instance: int[m], not below 0, and not far above the number of operations that there are.
    """
    present = np.bincount(instance) > 0
    result: NDArray[np.intp] = (np.cumsum(present) - 1)[instance]
    return result


def group_max(number: NDArray[Any], values: Int64Array) -> Int64Array:
    """Largest value of each group; groups are numbered 0 .. without holes."""
    result = np.full(int(number.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(result, number, values)
    return result


def group_min(number: NDArray[Any], values: Int64Array) -> Int64Array:
    """Smallest value of each group; groups are numbered 0 .. without holes."""
    return -group_max(number, -values)
