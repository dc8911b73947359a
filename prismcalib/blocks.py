"""Traces that do not fit into memory, block of ranks by block of ranks.

Rows are numbered through the whole trace in (rank, index) order, as those of a graph are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import polars as pl

from prismcalib.errors import MergeInputError
from prismcalib.graph import Int32Array, Int64Array
from prismcalib.rows import in_order
from prismtrace.beside import Part
from prismtrace.reading import reading
from prismtrace.trace import Trace

__all__ = [
    "BLOCK_ROWS",
    "BY_BLOCKS",
    "LARGE_ROWS",
    "Block",
    "HeldTable",
    "Layout",
    "Tables",
    "is_large",
]

LARGE_ROWS = 10_000_000
"""More rows than this are not held as a table: that takes about 300 bytes a row."""

BY_BLOCKS = "by_blocks"
"""In `TraceHeader.extra` in memory: cut out of a larger trace, to be read as that is read."""

BLOCK_ROWS = 2_000_000
"""Rows of a block, unless one rank has more."""


def is_large(trace: Trace) -> bool:
    """Whether the rows of a trace are too many to hold as a table."""
    if BY_BLOCKS in trace.header.extra:
        return True
    if trace.parts:
        return Layout.of(trace).total > LARGE_ROWS
    return int(trace.nodes.select(pl.len()).collect().item()) > LARGE_ROWS


@dataclass(frozen=True, eq=False)
class Block:
    """Some neighbouring ranks.

    Attributes:
        first, last: numbers of the first rank and of the one after the last.
        row: number of the first row.
        nodes: rows in (rank, index) order, the columns asked for.
    """

    first: int
    last: int
    row: int
    nodes: pl.DataFrame

    @property
    def part(self) -> slice:
        """The block's rows among all rows."""
        return slice(self.row, self.row + self.nodes.height)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the rows of every rank lie.

    Attributes:
        trace: the trace.
        ranks: int32[R], ascending.
        bounds: int64[R + 1], the rows of rank number i are `bounds[i]` to `bounds[i + 1] - 1`.
    """

    trace: Trace
    ranks: Int32Array
    bounds: Int64Array

    @classmethod
    def of(cls, trace: Trace) -> Layout:
        """Count the rows of every rank.

        Raises:
            MergeInputError: there are none.
        """
        with reading(trace.paths):
            if trace.parts:
                counted = [(rank, n) for part in trace.parts for rank, n in _counts(part)]
            else:
                sizes = trace.nodes.group_by("rank").len().sort("rank")
                counted = sizes.collect(engine="streaming").rows()
        if not counted:
            raise MergeInputError(
                "the trace has no rows",
                where=", ".join(str(path) for path in trace.paths[:3]) or None,
                hint="nothing was recorded, or every event was filtered out when it was converted",
            )
        ranks, sizes_of = (np.array(column) for column in zip(*counted, strict=True))
        return cls(trace, ranks.astype(np.int32), np.append([0], np.cumsum(sizes_of)))

    @property
    def total(self) -> int:
        """Number of rows."""
        return int(self.bounds[-1])

    @property
    def rows(self) -> Int64Array:
        """int64[R], rows of every rank."""
        return np.diff(self.bounds)

    @cached_property
    def columns(self) -> list[str]:
        """Names of the node table's columns."""
        return self.trace.nodes.collect_schema().names()

    def read(
        self, first: int, last: int, columns: Sequence[str | pl.Expr] | None = None
    ) -> pl.DataFrame:
        """Rows of rank numbers first to last - 1, in (rank, index) order."""
        wanted = [*(self.columns if columns is None else columns)]
        # To tell the order by.
        keys = [pl.col("rank").alias("_rank"), pl.col("index").alias("_index")]
        with reading(self.trace.paths):
            tables = [nodes.select(*wanted, *keys).collect() for nodes in self._stored(first, last)]
        table = tables[0] if len(tables) == 1 else pl.concat(tables)
        if not in_order(table["_rank"].to_numpy(), table["_index"].to_numpy()):
            table = table.sort("_rank", "_index", maintain_order=True)
        return table.drop("_rank", "_index")

    def blocks(
        self,
        columns: Sequence[str | pl.Expr] | None = None,
        *,
        block_rows: int | None = None,
        ranks_at_once: int = 2**31,
        step: int = 1,
    ) -> Iterator[Block]:
        """All rows in order, as many whole ranks at once as fit, in multiples of `step`."""
        cuts = self.cuts(block_rows or BLOCK_ROWS, ranks_at_once, step)
        for first, last in pairwise(cuts):
            nodes = self.read(first, last, columns)
            yield Block(first, last, int(self.bounds[first]), nodes)

    def tables(self, columns: Sequence[str | pl.Expr]) -> Iterator[pl.DataFrame]:
        """Some columns of all rows, block by block."""
        for block in self.blocks(columns):
            yield block.nodes

    def cuts(self, block_rows: int, ranks_at_once: int = 2**31, step: int = 1) -> list[int]:
        """Rank numbers at which blocks begin, and R."""
        cuts = [0]
        for line in range(0, len(self.ranks), step):
            end = min(line + step, len(self.ranks))
            rows = self.bounds[end] - self.bounds[cuts[-1]]
            if line > cuts[-1] and (rows > block_rows or end - cuts[-1] > ranks_at_once):
                cuts.append(line)
        return [*cuts, len(self.ranks)]

    def rows_at(
        self, numbers: Int64Array | Int32Array, columns: Sequence[str | pl.Expr] | None = None
    ) -> pl.DataFrame:
        """The rows of these numbers, in the order given."""
        wanted, back = np.unique(numbers, return_inverse=True)
        place = np.searchsorted(self.bounds, wanted, side="right") - 1
        found = [self.read(0, 1, columns).clear()]
        first = 0
        while first < len(wanted):
            # Ranks that lie near each other are read together.
            begin = int(place[first])
            limit = self.bounds[begin] + BLOCK_ROWS
            last = first + 1
            while last < len(wanted) and (
                place[last] <= place[last - 1] + 8 and self.bounds[place[last] + 1] <= limit
            ):
                last += 1
            table = self.read(begin, int(place[last - 1]) + 1, columns)
            found.append(table[wanted[first:last] - self.bounds[begin]])
            first = last
        return pl.concat(found)[back.ravel()]

    def row_of(self, rank: int, index: int) -> int:
        """Number of a row whose rank counts its rows from 0."""
        return int(self.bounds[np.searchsorted(self.ranks, rank)]) + index

    def _stored(self, first: int, last: int) -> Iterator[pl.LazyFrame]:
        if not self.trace.parts:
            low, high = int(self.ranks[first]), int(self.ranks[last - 1])
            yield self.trace.nodes.filter(pl.col("rank").is_between(low, high))
            return
        at = offset = 0
        for part in self.trace.parts:
            size = len(part.ranks)
            begin, end = max(first, at), min(last, at + size)
            if begin < end:
                yield part.rows(offset, begin - at, end - at)
            at, offset = at + size, offset + int(part.counts.sum())


@dataclass(frozen=True, eq=False)
class HeldTable:
    """All rows of a trace in memory, in order; asked like a `Layout`."""

    rows: pl.DataFrame

    @property
    def columns(self) -> list[str]:
        """Names of its columns."""
        return self.rows.columns

    @property
    def total(self) -> int:
        """Number of rows."""
        return self.rows.height

    def tables(self, columns: Sequence[str | pl.Expr]) -> Iterator[pl.DataFrame]:
        """Some columns of all rows, at once."""
        yield self.rows.select(columns)


Tables = HeldTable | Layout
"""Node tables of whole ranks that together are those of a trace, in order."""


def _counts(part: Part) -> Iterator[tuple[int, int]]:
    return zip(part.ranks, part.counts.tolist(), strict=True)
