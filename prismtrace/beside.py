"""Traces whose columns lie in two places: computed ones in a file of their own, beside the rest.

Joined side by side such a trace cannot be searched by the statistics of its files, so every
look at a few ranks would read all of it.  A `Part` knows where the rows of its ranks lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["Part", "chosen_rows"]


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of some ranks: those of one file, next to rows of the file of computed columns.

    Attributes:
        ranks: ascending; their rows lie in this order in both files.
        source: all rows of the one file.
        columns: all rows of the other one, of which the parts hold one stretch each.
        join: both side by side, as node table; is given equally many rows of each.
    """

    ranks: tuple[int, ...]
    source: pl.LazyFrame
    columns: pl.LazyFrame
    join: Callable[[pl.LazyFrame, pl.LazyFrame], pl.LazyFrame]

    @cached_property
    def _rank_of_rows(self) -> NDArray[np.int32]:
        column: NDArray[np.int32] = self.source.select("rank").collect()["rank"].to_numpy()
        return column

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64[R], rows of each of `ranks`."""
        here = self._rank_of_rows
        rows = np.bincount(here, minlength=max(self.ranks) + 1)
        return rows[list(self.ranks)].astype(np.int64)

    @cached_property
    def _begin(self) -> int | None:
        """Where in `source` the rows of `ranks` begin, if they lie together, in order."""
        here = self._rank_of_rows
        total = int(self.counts.sum())
        if not total:
            return None
        begin = int(np.isin(here, self.ranks).argmax())
        together = np.array_equal(here[begin : begin + total], np.repeat(self.ranks, self.counts))
        return begin if together else None

    def rows(self, offset: int, first: int, last: int) -> pl.LazyFrame:
        """Rows of `ranks[first:last]`; `offset`: where the part begins in `columns`."""
        before, count = int(self.counts[:first].sum()), int(self.counts[first:last].sum())
        beside = self.columns.slice(offset + before, count)
        if self._begin is not None:
            return self.join(self.source.slice(self._begin + before, count), beside)
        return self.join(chosen_rows(self.source, self.ranks[first:last]), beside)


def chosen_rows(nodes: pl.LazyFrame, ranks: Sequence[int]) -> pl.LazyFrame:
    """Rows of some ranks; a range first, since Parquet statistics prune on it."""
    rank = pl.col("rank")
    chosen = nodes.filter(rank.is_between(min(ranks), max(ranks)))
    if max(ranks) - min(ranks) + 1 > len(ranks):
        chosen = chosen.filter(rank.is_in(list(ranks)))
    return chosen
