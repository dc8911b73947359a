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

    Polars makes a series of every list when it is given Python lists.
    """
    grouped = (
        pl.DataFrame({"owner": owner, "value": values})
        .group_by("owner", maintain_order=True)
        .agg("value")
    )
    every = pl.DataFrame({"owner": np.arange(count)})
    joined = every.join(grouped, on="owner", how="left", maintain_order="left")
    return joined.get_column("value").fill_null([])
