"""The operations of a trace as comparisons see them: what each is, and what time is its own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import polars as pl

from prismcalib.blocks import Layout, is_large
from prismtrace.group_names import group_family
from prismtrace.schema import LOCAL_KINDS, TraceHeader, TraceKind
from prismtrace.trace import Trace

__all__ = [
    "CLASS_COLUMNS",
    "OperationTable",
    "group_families",
    "operations",
    "place_in_step",
    "step_number",
]

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
    return {group.id: group_family(group) for group in header.groups}


def operations(trace: Trace) -> pl.DataFrame:
    """One row per node, in (rank, index) order; columns see `OperationTable`."""
    return pl.concat(OperationTable(trace))


class OperationTable:
    """The operations of a trace, some whole ranks at a time if it is large.

    Columns rank, step_number, in_step (true for all if there are no steps), place, kind, phase,
    group (see `group_families`), name, local (computation or copy), own_ns (duration, of
    communications their transfer; null for a communication whose waiting is unknown), wait_ns,
    gap_ns (idle time before it).
    """

    def __init__(self, trace: Trace) -> None:
        self.header = trace.header
        self.layout = Layout.of(trace)
        self._held = not is_large(trace)
        self._columns = _columns(trace.header, stepped=self._has_steps())

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """All of them in (rank, index) order."""
        if self._held:
            yield self._whole
            return
        for block in self.layout.blocks(self._columns):
            yield block.nodes

    def of_ranks(self, low: int, high: int) -> pl.DataFrame:
        """Those of the ranks from low to high."""
        if self._held:
            return self._whole.filter(pl.col("rank").is_between(low, high))
        first, last = (int(at) for at in np.searchsorted(self.layout.ranks, [low, high + 1]))
        if first == last:
            return self.layout.read(0, 1, self._columns).clear()
        return self.layout.read(first, last, self._columns)

    @cached_property
    def _whole(self) -> pl.DataFrame:
        return self.layout.read(0, len(self.layout.ranks), self._columns)

    def _has_steps(self) -> bool:
        blocks = self.layout.blocks(["step"])
        return any(block.nodes["step"].count() > 0 for block in blocks)


def _columns(header: TraceHeader, *, stepped: bool) -> list[str | pl.Expr]:
    merged = header.kind == TraceKind.CALIBRATED
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    own = pl.col("transfer_ns").fill_null(pl.col("dur_ns"))
    columns = {
        "step_number": step_number(),
        "place": place_in_step(),
        "local": local,
        "own_ns": own if merged else pl.when(local).then("dur_ns").otherwise(None),
        "wait_ns": pl.col("wait_ns").fill_null(0) if merged else pl.lit(0, pl.Int64),
        "gap_ns": pl.col("lag_ns").list.max().fill_null(0),
        "in_step": pl.col("step").is_not_null() if stepped else pl.lit(value=True),
    }
    family = pl.col("group").replace_strict(
        group_families(header), default=None, return_dtype=pl.String
    )
    return [
        "rank",
        pl.col("kind", "phase", "name").cast(pl.String),
        family.alias("group"),
        *(column.alias(name) for name, column in columns.items()),
    ]
