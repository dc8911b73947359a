"""List columns from flat values, without a Python object per row."""

from __future__ import annotations

import numpy as np
import polars as pl

from prismcalib.graph import Int64Array

__all__ = ["lists_like", "lists_of"]


def lists_like(template: pl.Series, values: Int64Array) -> pl.Series:
    """List(Int64) with as many entries per row as the list column `template` has (no nulls).

    The inner values are swapped in one go, which takes a nanosecond per row.
    """
    template = template.rechunk()
    calls: list[int] = []

    def swap(inner: pl.Series) -> pl.Series:
        calls.append(len(inner))
        return pl.Series(values[: len(inner)])

    inner = pl.element().map_batches(swap, return_dtype=pl.Int64, is_elementwise=True)
    result = template.list.eval(inner)
    if calls != [len(values)]:
        # How often Polars calls, and with what, is its own business.
        return lists_of(template.list.len().cast(pl.Int64).to_numpy(), values)
    return result


def lists_of(counts: Int64Array, values: Int64Array) -> pl.Series:
    """List(Int64) of `counts[i]` entries in row i."""
    owner = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
    grouped = (
        pl.DataFrame({"row": owner, "values": values})
        .group_by("row", maintain_order=True)
        .agg("values")
    )
    every = pl.DataFrame({"row": np.arange(len(counts), dtype=np.uint32)})
    joined = every.join(grouped, on="row", how="left", maintain_order="left")["values"]
    return joined.fill_null(pl.Series([[]], dtype=pl.List(pl.Int64)))
