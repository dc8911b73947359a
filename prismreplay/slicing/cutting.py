"""Some steps of a trace as a trace of their own."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from prismreplay.errors import SliceError
from prismtrace.reading import reading
from prismtrace.schema import TraceHeader
from prismtrace.trace import Trace, node_ids, write_nodes

__all__ = ["cut_to_steps", "steps_only"]


def cut_to_steps(trace: Trace, steps: tuple[int, int], path: Path) -> None:
    """Write the rows from the first to the last step, both included; all ranks must have them.

    Raises:
        SliceError: a rank has no such step.
    """
    header, rows = steps_only(trace, steps)
    write_nodes(header, rows, path)


def steps_only(trace: Trace, steps: tuple[int, int]) -> tuple[TraceHeader, pl.LazyFrame]:
    """Header and rows of some steps. Rows that depend on earlier ones no longer do.

    Graphs as `collect` and `slice` make them: edges of one rank, without lags.

    Raises:
        SliceError: a rank has no such step.
    """
    first, last = steps
    kept = pl.col("step").is_between(first, last)
    with reading(trace.paths):
        bounds = (
            trace.nodes.filter(kept)
            .group_by("rank")
            .agg(begin=pl.col("index").min(), end=pl.col("index").max())
            .collect()
        )
    if bounds.height < len(trace.header.ranks):
        known = ", ".join(map(str, trace.header.steps[:20])) or "none"
        raise SliceError(
            f"not all ranks have steps {first} to {last}",
            where=", ".join(map(str, trace.paths)) or None,
            hint=f"steps of the graph: {known}",
        )
    begin = pl.col("begin")
    rows = (
        trace.nodes.join(bounds.lazy(), on="rank", how="left", maintain_order="left")
        .filter(pl.col("index").is_between(begin, pl.col("end")))
        .with_columns(index=(pl.col("index") - begin).cast(pl.Int32))
        .with_columns(id=node_ids(pl.col("rank"), pl.col("index")))
        .drop("begin", "end")
    )
    return _header(trace.header, first, last), _without_earlier(rows, trace)


def _header(header: TraceHeader, first: int, last: int) -> TraceHeader:
    """That of some steps; they were not begun when the run was."""
    made: dict[str, object] = {"steps": tuple(one for one in header.steps if first <= one <= last)}
    if header.slice is not None:
        made["slice"] = header.slice.model_copy(update={"origin_ns": None})
    return header.model_copy(update=made)


def _without_earlier(rows: pl.LazyFrame, trace: Trace) -> pl.LazyFrame:
    """Without dependencies on rows before the first one that is kept."""
    reach = pl.col("deps").list.max() > pl.col("index")
    with reading(trace.paths):
        crossing = rows.filter(reach).select("id", "index", "deps").collect()
    if not crossing.height:
        return rows
    inside = (
        crossing.explode("deps", empty_as_null=False, keep_nulls=False)
        .filter(pl.col("deps") <= pl.col("index"))
        .group_by("id", maintain_order=True)
        .agg(shorter="deps")
    )
    shorter = crossing.select("id").join(inside, on="id", how="left")
    shorter = shorter.with_columns(
        shorter=pl.col("shorter").fill_null(pl.lit([], dtype=pl.List(pl.UInt32)))
    )
    return (
        rows.join(shorter.lazy(), on="id", how="left", maintain_order="left")
        .with_columns(deps=pl.coalesce("shorter", "deps"))
        .drop("shorter")
    )
