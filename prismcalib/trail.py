"""The critical path of a calibrated trace of any size, from the rows that `merge` marked.

`critical` marks the row by which the path reaches each step. Where the path changes ranks
inside a communication it leaves by another member, which is looked up.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from prismcalib.blocks import Layout
from prismcalib.errors import MergeInputError
from prismcalib.extent import Extent
from prismcalib.graph import Int64Array
from prismcalib.paths import CriticalPath, cut_path
from prismtrace.schema import LOCAL_KINDS
from prismtrace.trace import instance_columns

__all__ = ["marked_path", "marked_rows"]

# Ranks nearer than this are read together, at most so many at once.
_APART = 8
_RANKS_AT_ONCE = 128

_KEYS = ["group", "seq", "src_rank", "dst_rank"]


def marked_path(layout: Layout, extent: Extent) -> CriticalPath:
    """The path, equal to `prismcalib.critical_path(trace)` without holding the whole trace.

    Args:
        layout: of a calibrated trace.
        extent: of the trace.

    Raises:
        MergeInputError: no row is marked.
    """
    trace = layout.trace
    numbers, last_row = marked_rows(layout, extent.end_ns)
    if not len(numbers):
        raise MergeInputError(
            "no row of the trace is marked as critical",
            where=", ".join(str(path) for path in trace.paths[:3]) or "trace",
            hint="a piece that was cut out keeps the marks of the whole: ask about the whole trace, "
            "or run `prismcalib merge` on the piece, which marks its own path",
        )
    end = pl.col("start_ns") + pl.col("dur_ns")
    critical = layout.rows_at(numbers)
    reached = critical.sort("start_ns", end, "rank", "index")
    left = _leaving_rows(layout, reached, layout.rows_at(np.array([last_row])))
    starts = reached["start_ns"].to_numpy()
    ends = left.select(end).to_series().to_numpy()
    # A row that was not found among the members leaves its own end, which may lie too late.
    ends = np.append(np.minimum(ends[:-1], starts[1:]), ends[-1:])
    local = left["kind"].cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    matched = ~local & left["transfer_ns"].is_not_null() & left["seq"].is_not_null()
    return cut_path(
        left,
        trace.header,
        reached_start_ns=starts,
        left_end_ns=ends,
        transfers=matched.to_numpy(),
        reached_rank=reached["rank"].to_numpy(),
        first_start_ns=extent.begin_ns,
        length_ns=extent.window_ns,
    )


def marked_rows(layout: Layout, end_ns: int) -> tuple[Int64Array, int]:
    """Numbers of the rows marked critical, and of the first one that ends last."""
    found, last = [np.empty(0, np.int64)], -1
    for block in layout.blocks(["critical", "start_ns", "dur_ns"]):
        marked = block.nodes["critical"].fill_null(value=False).to_numpy()
        found.append(np.flatnonzero(marked) + block.row)
        if last < 0:
            ends = block.nodes["start_ns"].to_numpy() + block.nodes["dur_ns"].to_numpy()
            if (ends == end_ns).any():
                last = block.row + int((ends == end_ns).argmax())
    return np.concatenate(found), last


def _leaving_rows(layout: Layout, reached: pl.DataFrame, last: pl.DataFrame) -> pl.DataFrame:
    """The row by which the path leaves each step, all columns.

    It has the rank of the row reached next: dependencies stay within a rank.
    """
    steps = reached.select(
        *instance_columns(),
        step_number=pl.int_range(pl.len()),
        rank=pl.col("rank").shift(-1, fill_value=last["rank"][0]),
        same=pl.col("rank") == pl.col("rank").shift(-1, fill_value=last["rank"][0]),
    )
    hops = steps.filter(~pl.col("same") & pl.col("seq").is_not_null()).drop("same")
    if not hops.height:
        return reached
    members = _members(layout, hops)
    found = layout.rows_at(members["row"].to_numpy()).with_columns(members["step_number"])
    stay = reached.with_columns(step_number=steps["step_number"]).select(found.columns)
    return (
        pl.concat([found, stay.join(found, on="step_number", how="anti")])
        .sort("step_number")
        .drop("step_number")
    )


def _members(layout: Layout, hops: pl.DataFrame) -> pl.DataFrame:
    """step_number and row (its number in the trace) of the members that the path leaves by."""
    numbers = np.searchsorted(layout.ranks, hops["rank"].unique().sort().to_numpy())
    names = ["kind", "peer", "group", "seq", "rank"]
    parts = []
    for near in np.split(numbers, np.flatnonzero(np.diff(numbers) > _APART) + 1):
        for some in np.array_split(near, -(-len(near) // _RANKS_AT_ONCE)):
            first = int(some[0])
            table = layout.read(first, int(some[-1]) + 1, names)
            parts.append(
                table.with_row_index("row", offset=0)
                .with_columns(row=pl.col("row").cast(pl.Int64) + int(layout.bounds[first]))
                .filter(pl.col("seq").is_not_null())
                .with_columns(*instance_columns()[2:])
                .join(hops, on=[*_KEYS, "rank"], how="inner")
                .select("step_number", "row")
            )
    members = pl.concat(parts).sort("step_number", "row")
    return members.unique("step_number", keep="first", maintain_order=True)
