"""How large a calibrated trace is, without holding it."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from prismcalib.blocks import Layout
from prismcalib.errors import MergeInputError
from prismcalib.graph import Int32Array, Int64Array
from prismtrace.trace import Trace

__all__ = ["Extent", "extent_of"]


@dataclass(frozen=True, eq=False)
class Extent:
    """How large a trace is.

    Attributes:
        ranks: int32[R], ranks that have rows, ascending.
        rows: int64[R].
        begin_ns, end_ns: first start and last end.
    """

    ranks: Int32Array
    rows: Int64Array
    begin_ns: int
    end_ns: int

    @property
    def window_ns(self) -> int:
        """From the first start to the last end."""
        return self.end_ns - self.begin_ns


def extent_of(trace: Trace, layout: Layout | None = None) -> Extent:
    """Ranks, rows and window of a trace, from one pass over two columns.

    Args:
        trace: the trace.
        layout: of the trace, if it is known already.

    Raises:
        MergeInputError: there are no rows, or rows lack times.
    """
    layout = layout or Layout.of(trace)
    begin, last = pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("dur_ns")).max()
    untimed = pl.col("start_ns").null_count() + pl.col("dur_ns").null_count()
    times = pl.concat(
        block.nodes.select(begin=begin, end=last, untimed=untimed)
        for block in layout.blocks(["start_ns", "dur_ns"])
    )
    if times["untimed"].sum():
        raise MergeInputError(
            "rows without times",
            where=", ".join(str(path) for path in trace.paths[:3]) or None,
            hint="run `prismcalib merge` again: a calibrated trace has the times of all rows",
        )
    first, end = times.select(pl.col("begin").min(), pl.col("end").max()).row(0)
    return Extent(ranks=layout.ranks, rows=layout.rows, begin_ns=first, end_ns=end)
