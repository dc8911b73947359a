"""The critical path of a calibrated trace of any size, from the rows that `merge` marked.

`critical` marks the row by which the path reaches each step. Where the path changes ranks
inside a communication it leaves by another member, which is looked up.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from prismcalib.errors import MergeInputError
from prismcalib.extent import Extent
from prismcalib.paths import CriticalPath, cut_path
from prismtrace.schema import LOCAL_KINDS
from prismtrace.trace import Trace, instance_columns

__all__ = ["marked_path"]

_KEYS = ["group", "seq", "src_rank", "dst_rank"]


def marked_path(
    trace: Trace, extent: Extent, critical: pl.DataFrame, last: pl.DataFrame
) -> CriticalPath:
    """The path, equal to `prismcalib.critical_path(trace)` without reading the whole trace.

    Args:
        trace: calibrated.
        extent: of the trace.
        critical: rows marked critical, all columns.
        last: the one row that ends last; the path ends with it.

    Raises:
        MergeInputError: no row is marked.
    """
    if not critical.height:
        raise MergeInputError(
            "no row of the trace is marked as critical",
            where=", ".join(str(path) for path in trace.paths[:3]) or "trace",
            hint="run `prismcalib merge` again: it marks the critical path",
        )
    end = pl.col("start_ns") + pl.col("dur_ns")
    reached = critical.sort("start_ns", end, "rank", "index")
    left = _leaving_rows(trace, reached, last)
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


def _leaving_rows(trace: Trace, reached: pl.DataFrame, last: pl.DataFrame) -> pl.DataFrame:
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
    ranks = hops["rank"]
    members = (
        trace.nodes.filter(
            pl.col("rank").is_between(ranks.min(), ranks.max())
            & pl.col("rank").is_in(ranks.unique().implode())
            & pl.col("seq").is_not_null()
        )
        .with_columns(*instance_columns()[2:])
        .join(hops.lazy(), on=[*_KEYS, "rank"], how="inner")
        .collect(engine="streaming")
        .unique("step_number", keep="first", maintain_order=True)
    )
    found = members.drop("src_rank", "dst_rank").select("step_number", *reached.columns)
    stay = reached.with_columns(step_number=steps["step_number"]).select(found.columns)
    return (
        pl.concat([found, stay.join(found, on="step_number", how="anti")])
        .sort("step_number")
        .drop("step_number")
    )
