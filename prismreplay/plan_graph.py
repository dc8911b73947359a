"""What a plan is compiled from: the graph of all ranks, and the rows of the sandbox ranks.

Of a trace too large for a table only the graph's arrays are held, and of its rows those of the
sandbox ranks (see `prismcalib.block_graph`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.block_graph import graph_from_blocks
from prismcalib.block_picker import BlockPicker
from prismcalib.blocks import HeldTable, Layout, Tables, is_large
from prismcalib.build import graph_from_trace
from prismcalib.edits import Draft, Edit
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.predicates import RowPicker
from prismtrace.trace import Trace, instance_columns

__all__ = ["JobGraph"]

_PASS_BYTES = 75
"""Memory a row that compiling takes, beside the graph: its order, labels, and what they say."""


@dataclass(frozen=True, eq=False, kw_only=True)
class JobGraph:
    """A job's graph of n rows, and what is known of the rows of its sandbox ranks.

    Attributes:
        graph: of all ranks.
        mine: bool[n], rows of sandbox ranks.
        steps: their numbers, first to last.
        period_ns: what the last step takes, from the end of the one before.
    """

    graph: Graph
    mine: NDArray[np.bool_]
    steps: tuple[int, ...]
    period_ns: int
    _numbers: Int64Array
    _rows: pl.DataFrame

    @classmethod
    def of(cls, trace: Trace, sandbox: Sequence[int], edits: Sequence[Edit] = ()) -> Self:
        """Load a calibrated trace.

        Args:
            trace: of all ranks.
            sandbox: global ranks.
            edits: changes of durations.

        Raises:
            MergeInputError, CoverageError, TooLargeError: see `prismcalib.graph_from_trace`.
            ScenarioError: an edit does not fit the trace.
        """
        picker: RowPicker
        tables: Tables
        if is_large(trace):
            layout = Layout.of(trace)
            graph = graph_from_blocks(layout, also=_PASS_BYTES)
            mine = np.zeros(layout.total, np.bool_)
            places = np.flatnonzero(np.isin(layout.ranks, list(sandbox)))
            for place in places:
                mine[layout.bounds[place] : layout.bounds[place + 1]] = True
            numbers = np.flatnonzero(mine)
            rows = layout.rows_at(numbers, _columns())
            picker, tables = BlockPicker(layout), layout
        else:
            graph, table = graph_from_trace(trace)
            mine = table["rank"].is_in(list(sandbox)).to_numpy()
            numbers = np.flatnonzero(mine)
            rows = table.filter(pl.Series(mine)).select(_columns())
            picker, tables = RowPicker(table, trace.header), HeldTable(table)
        steps, period_ns = _steps(tables)
        return cls(
            graph=_edited(graph, picker, edits),
            mine=mine,
            steps=steps,
            period_ns=period_ns,
            _numbers=numbers,
            _rows=rows,
        )

    def sandbox_rows(self, numbers: Int64Array | Int32Array) -> pl.DataFrame:
        """Names and transfers of these rows of sandbox ranks: columns as in `Plan.operations`."""
        return self._rows[np.searchsorted(self._numbers, numbers)]


def _columns() -> list[str | pl.Expr]:
    return [
        "rank",
        *instance_columns(),
        pl.col("kind").cast(pl.String),
        "step",
        pl.col("transfer_ns").fill_null(pl.col("dur_ns")),
        pl.col("transfer_source").cast(pl.String),
    ]


def _edited(graph: Graph, picker: RowPicker, edits: Sequence[Edit]) -> Graph:
    if not edits:
        return graph
    draft = Draft.of(picker, graph)
    for edit in edits:
        edit.apply(draft)
    return replace(draft.graph, duration_ns=draft.duration_ns)


def _steps(tables: Tables) -> tuple[tuple[int, ...], int]:
    """Numbers of all steps, and from the end of the last but one to the end of the last."""
    found, first = [], []
    for table in tables.tables(["step", "start_ns", "dur_ns"]):
        ends = table.select("step", end=pl.col("start_ns") + pl.col("dur_ns")).drop_nulls()
        found.append(ends.group_by("step").agg(pl.col("end").max()))
        first.append(table["start_ns"].min())
    every: list[tuple[int, Any]] = (
        pl.concat(found).group_by("step").agg(pl.col("end").max()).sort("step").rows()
    )
    if not every:
        return (), 0
    begin = every[-2][1] if len(every) > 1 else pl.Series(first).min()
    return tuple(step for step, _ in every), max(0, every[-1][1] - begin)
