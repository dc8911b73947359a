"""How much of a stretch of time a set of spans covers, for many ranks at once.

The ranks of a block are laid out one after another on one axis, so that one sort and one
search serve all of them: rank number i (from 0) owns the positions `i * stride` to
`i * stride + window`, with `stride > window`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Int64Array

__all__ = ["Coverage", "FloatArray", "cover"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Coverage:
    """k disjoint stretches in ascending order.

    Attributes:
        begin, length: int64[k].
        share: float64[k], the part of each stretch that a second measure counts (the idle
            part of a span); None if there is no such measure.
    """

    begin: Int64Array
    length: Int64Array
    share: FloatArray | None = None

    def up_to(self, positions: Int64Array) -> tuple[Int64Array, FloatArray | None]:
        """Covered length before each position, and the same of the second measure."""
        total = np.concatenate([[0], np.cumsum(self.length)])
        after = np.searchsorted(self.begin, positions, side="right")
        last = np.maximum(after - 1, 0)
        if not len(self.begin):
            nothing = np.zeros(positions.shape, np.int64)
            return nothing, None if self.share is None else nothing.astype(np.float64)
        inside = np.minimum(positions - self.begin[last], self.length[last])
        inside[after == 0] = 0
        covered = total[last] + inside
        if self.share is None:
            return covered, None
        weighted = np.concatenate([[0.0], np.cumsum(self.length * self.share)])
        return covered, weighted[last] + inside * self.share[last]

    def per_cell(self, edges: Int64Array) -> tuple[Int64Array, FloatArray | None]:
        """Covered length between neighbouring edges.

        Args:
            edges: int64[lanes, cells + 1], ascending positions.

        Returns:
            int64[lanes, cells], and float64 of the same shape for the second measure.
        """
        covered, weighted = self.up_to(edges.ravel())
        cells = np.diff(covered.reshape(edges.shape), axis=1)
        if weighted is None:
            return cells, None
        return cells, np.diff(weighted.reshape(edges.shape), axis=1)


def cover(begin: Int64Array, end: Int64Array, share: FloatArray | None = None) -> Coverage:
    """The union of spans; where several overlap, the one that began first counts its share.

    Args:
        begin, end: int64[n], positions.
        share: float64[n], between 0 and 1.
    """
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reached = np.maximum.accumulate(end)
    if len(begin):
        begin = np.maximum(begin, np.concatenate([[begin[0]], reached[:-1]]))
    length = end - begin
    kept = length > 0
    return Coverage(
        begin=begin[kept],
        length=length[kept],
        share=None if share is None else share[order][kept],
    )
