"""What every rank does when, in cells of a few ranks by a short time: the far view of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismcalib.report.coverage import FloatArray

__all__ = ["LEVELS", "Grid", "GridShape", "GridWriter", "grid_shapes"]

LEVELS = 15
"""Shares are stored as 0 to LEVELS: finer shades of colour cannot be told apart."""

_MOST_LINES = 1024
_MOST_BINS = 8192
_FEWEST_BINS = 64


@dataclass(frozen=True)
class GridShape:
    """How fine a grid is.

    Attributes:
        ranks_per_line: neighbours that share a line.
        bins: into how many equal parts the window is divided.
    """

    ranks_per_line: int
    bins: int

    def lines(self, ranks: int) -> int:
        """Number of lines for so many ranks."""
        return -(-ranks // self.ranks_per_line)


@dataclass(frozen=True, eq=False)
class Grid:
    """Shares of time.

    Attributes:
        shape: of the grid.
        shares: uint8[parts, lines, bins], in 15ths (`LEVELS`) of a cell; the rest of it is a gap.
    """

    shape: GridShape
    shares: NDArray[np.uint8]

    def coarser(self) -> Grid:
        """The same with half as many bins, as long as they are not few."""
        if self.shape.bins <= _FEWEST_BINS:
            return self
        pairs = self.shares.astype(np.uint16).reshape(*self.shares.shape[:2], -1, 2).sum(axis=3)
        shape = GridShape(self.shape.ranks_per_line, self.shape.bins // 2)
        return Grid(shape, ((pairs + 1) // 2).clip(0, LEVELS).astype(np.uint8))


def grid_shapes(ranks: int, cells: int) -> tuple[GridShape, ...]:
    """Grids of at most about `cells` cells each; the first has the most bins.

    One grid, unless there are so many ranks that a line each would leave few bins: then a
    second one has a line per rank.
    """
    ranks_per_line = -(-ranks // _MOST_LINES)
    lines = -(-ranks // ranks_per_line)
    fine = GridShape(ranks_per_line, _bins(cells // lines))
    if ranks_per_line == 1:
        return (fine,)
    return fine, GridShape(1, min(fine.bins, _bins(cells // ranks)))


def _bins(most: int) -> int:
    """A power of two, so that every grid's bins are whole bins of the finest."""
    return int(min(_MOST_BINS, max(_FEWEST_BINS, 2 ** (max(most, 1).bit_length() - 1))))


class GridWriter:
    """Fills a grid block by block."""

    def __init__(self, shape: GridShape, ranks: int, parts: int) -> None:
        self.grid = Grid(shape, np.zeros((parts, shape.lines(ranks), shape.bins), np.uint8))

    def add(self, first: int, times: FloatArray, window_ns: int) -> None:
        """Add the ranks from number `first` on, which begins a line.

        Args:
            first: number of the first rank.
            times: float64[parts, ranks, bins], in ns; bins may be finer than the grid's.
            window_ns: length of all bins together.
        """
        shape = self.grid.shape
        parts, ranks, bins = times.shape
        coarse = times.reshape(parts, ranks, shape.bins, bins // shape.bins).sum(axis=3)
        starts = np.arange(0, ranks, shape.ranks_per_line)
        sums = np.add.reduceat(coarse, starts, axis=1)
        members = np.diff(np.append(starts, ranks))
        share = sums / (members[:, None] * max(window_ns, 1) / shape.bins)
        line = first // shape.ranks_per_line
        self.grid.shares[:, line : line + len(starts)] = np.rint(share * LEVELS).clip(0, LEVELS)
