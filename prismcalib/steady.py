"""Steps, chained one behind the other; how long they take: `prismcalib.step_times`.

A rank begins a step when it has ended the step before.  Usually the rows say so themselves;
where a recording has no edge across the boundary, `chain_steps` adds it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.graph import Int64Array
from prismcalib.rows import NODE_COLUMNS, Rows, list_lengths, list_values, runs

__all__ = ["chain_steps", "step_views"]


def chain_steps(table: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Let rows that depend on nothing wait for the rank's step before; returns how many.

    `table` holds whole ranks in (rank, index) order.  Rows of a rank's first step stay as
    they are.
    """
    rank, step = table["rank"].to_numpy(), table["step"].fill_null(-1).to_numpy()
    if not len(step) or step.max() <= step[0] == step.min():
        return table, 0
    counts = list_lengths(table["deps"])
    free = np.flatnonzero((counts == 0) & (step >= 0))
    bounds = runs(rank)
    firsts = np.array([first for first, _ in bounds])
    lowest = np.minimum.reduceat(np.where(step < 0, np.iinfo(step.dtype).max, step), firsts)
    first_step = lowest[np.searchsorted(firsts, free, side="right") - 1]
    free = free[step[free] > first_step]
    if not len(free):
        return table, 0
    last_rows = _last_rows(rank, step, counts, list_values(table["deps"]), free)
    added = pl.DataFrame(
        {
            "row": free,
            "added": [sorted(int(row - last) for last in last_rows[row]) for row in free.tolist()],
        },
        schema={"row": pl.UInt32, "added": pl.List(pl.UInt32)},
    )
    chained = (
        table.with_row_index("row")
        .join(added, on="row", how="left", maintain_order="left")
        .with_columns(
            deps=pl.coalesce("added", "deps"),
            lag_ns=pl.when(pl.col("added").is_null()).then("lag_ns"),
        )
        .drop("row", "added")
    )
    return chained, len(free)


def _last_rows(
    rank: NDArray[np.int32],
    step: NDArray[np.int32],
    counts: Int64Array,
    distance: Int64Array,
    free: NDArray[np.int64],
) -> dict[int, list[int]]:
    """Of every row in `free`, the rows of its rank's step before that nothing of it follows."""
    owner = np.repeat(np.arange(len(rank)), counts)
    followed = np.zeros(len(rank), np.bool_)
    dep = owner - distance
    followed[dep[step[dep] == step[owner]]] = True
    key = np.flatnonzero((np.diff(rank, prepend=-1) != 0) | (np.diff(step, prepend=-2) != 0))
    result: dict[int, list[int]] = {}
    known: dict[int, list[int]] = {}
    for row in free.tolist():
        block = int(np.searchsorted(key, row, side="right")) - 1
        before = block - 1
        while before > 0 and step[key[before]] < 0:
            before -= 1
        if before not in known:
            rows = np.arange(key[before], key[before + 1])
            known[before] = rows[~followed[rows]].tolist()
        result[row] = known[before]
    return result


def step_views(rows: Rows) -> list[tuple[Int64Array, Rows]]:
    """Every step of some ranks as if it were all they did: row numbers, and the rows.

    Edges that come from outside the step are left out; sequence numbers stay.
    """
    counts = np.diff(rows.offsets)
    owner = np.repeat(np.arange(len(rows)), counts)
    inside = rows.step[owner - rows.distance] == rows.step[owner]
    kept = np.bincount(owner[inside], minlength=len(rows))
    views = []
    for number in np.unique(rows.step[rows.step >= 0]).tolist():
        chosen = np.flatnonzero(rows.step == number)
        edges = inside & (rows.step[owner] == number)
        first = np.flatnonzero(np.diff(rows.rank[chosen], prepend=-1))
        begin = np.repeat(first, np.diff(np.append(first, len(chosen))))
        view = replace(
            rows,
            **{name: getattr(rows, name)[chosen] for name in NODE_COLUMNS},
            offsets=np.concatenate([[0], np.cumsum(kept[chosen])]),
            distance=rows.distance[edges],
            lags=None if rows.lags is None else rows.lags[edges],
            far_row=rows.far_row[:0],
            far_id=rows.far_id[:0],
            far_lag=rows.far_lag[:0],
        )
        index = (np.arange(len(chosen)) - begin).astype(np.int32)
        views.append((chosen, replace(view, index=index)))
    return views
