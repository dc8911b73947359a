"""The column of dependencies, made from pairs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["lists_by_owner"]


def lists_by_owner(
    owner: npt.NDArray[np.integer], values: npt.NDArray[np.integer], count: int
) -> pl.Series:
    """A column of `count` lists: those of `values` that stand beside an owner, in their order.

    Polars makes a series of every list when it is given Python lists; this is a hundred times
    as fast.

    Args:
        owner: row of each value, ascending.
        values: as many.
        count: number of rows.
    """
    keys = pl.Series("owner", owner).set_sorted()
    lists = (
        pl.DataFrame([keys, pl.Series("value", values)])
        .group_by("owner", maintain_order=True)
        .agg("value")
        .get_column("value")
    )
    filled = np.zeros(count, dtype=np.bool_)
    filled[owner] = True
    place = pl.when(pl.Series(filled)).then(pl.Series(np.cumsum(filled) - 1))
    return lists.gather(pl.select(place).to_series()).fill_null([])
