"""How large a calibrated trace is, without holding it."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

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


def extent_of(trace: Trace) -> Extent:
    """Ranks, rows and window of a trace, from one streaming pass over three columns.

    Raises:
        MergeInputError: there are no rows, or rows lack times.
    """
    sizes = (
        trace.nodes.group_by("rank")
        .agg(
            rows=pl.len(),
            begin=pl.col("start_ns").min(),
            end=(pl.col("start_ns") + pl.col("dur_ns")).max(),
            untimed=pl.col("start_ns").null_count() + pl.col("dur_ns").null_count(),
        )
        .sort("rank")
        .collect(engine="streaming")
    )
    where = ", ".join(str(path) for path in trace.paths[:3]) or None
    if not sizes.height or sizes["untimed"].sum():
        raise MergeInputError(
            "rows without times" if sizes.height else "the trace has no rows",
            where=where,
            hint="run `prismcalib merge` again: a calibrated trace has the times of all rows",
        )
    begin, end = sizes.select(pl.col("begin").min(), pl.col("end").max()).row(0)
    return Extent(
        ranks=sizes["rank"].to_numpy(),
        rows=sizes["rows"].cast(pl.Int64).to_numpy(),
        begin_ns=begin,
        end_ns=end,
    )
