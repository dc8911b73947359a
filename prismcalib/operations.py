"""The operations of a trace as comparisons see them: what each is, and what time is its own."""

from __future__ import annotations

import polars as pl

from prismtrace.schema import LOCAL_KINDS, TraceHeader, TraceKind
from prismtrace.trace import Trace

__all__ = ["CLASS_COLUMNS", "group_families", "operations", "place_in_step", "step_number"]

CLASS_COLUMNS = ("kind", "phase", "group", "name")
"""What makes two operations the same class."""


def step_number() -> pl.Expr:
    """Steps counted from 0 within each rank, whatever they are called; 0 outside of steps."""
    return (pl.col("step").rank("dense").over("rank").cast(pl.Int32) - 1).fill_null(0)


def place_in_step() -> pl.Expr:
    """Number of the operation among those of its rank and step, from 0."""
    return pl.int_range(pl.len(), dtype=pl.Int32).over("rank", "step")


def group_families(header: TraceHeader) -> dict[int, str]:
    """What groups are called without their number: tp_3 and tp_4 are both tp."""
    names = {}
    for group in header.groups:
        family = group.name.rstrip("0123456789").rstrip("_-. ")
        names[group.id] = family or group.desc or f"groups of {len(group.ranks)}"
    return names


def operations(trace: Trace) -> pl.DataFrame:
    """One row per node, in (rank, index) order.

    Columns rank, step_number, in_step (true for all if there are no steps), place, kind, phase, group (see `group_families`), name, local
    (computation or copy), own_ns (duration, of communications their transfer; null for a
    communication whose waiting is unknown), wait_ns, gap_ns (idle time before it).
    """
    merged = trace.header.kind == TraceKind.CALIBRATED
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    own = pl.col("transfer_ns").fill_null(pl.col("dur_ns"))
    gap = pl.col("lag_ns").list.max().fill_null(0)
    in_step = pl.col("step").is_not_null()
    return (
        trace.nodes.sort("rank", "index", maintain_order=True)
        .select(
            "rank",
            pl.col("kind", "phase", "name").cast(pl.String),
            pl.col("group").replace_strict(
                group_families(trace.header), default=None, return_dtype=pl.String
            ),
            step_number=step_number(),
            place=place_in_step(),
            local=local,
            own_ns=own if merged else pl.when(local).then("dur_ns").otherwise(None),
            wait_ns=pl.col("wait_ns").fill_null(0) if merged else pl.lit(0, pl.Int64),
            gap_ns=gap,
            in_step=in_step | ~in_step.any(),
        )
        .collect()
    )
