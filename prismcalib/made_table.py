"""Node tables that are made block by block when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import polars as pl
from polars.io.plugins import register_io_source

__all__ = ["made_table"]


def made_table(
    blocks: Callable[[list[str] | None], Iterator[pl.DataFrame]], schema: pl.Schema
) -> pl.LazyFrame:
    """A lazy table of what `blocks` makes.

    Args:
        blocks: is given the columns that are needed (None: all) and yields tables with at
            least these, in the order of the rows.
        schema: of the tables.
    """

    def read(
        with_columns: list[str] | None,
        predicate: pl.Expr | None,
        n_rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        del batch_size
        left = n_rows
        wanted = None if with_columns is None else list(with_columns)
        if wanted is not None and predicate is not None:
            wanted = list(dict.fromkeys([*wanted, *predicate.meta.root_names()]))
        for block in blocks(wanted):
            part = block if predicate is None else block.filter(predicate)
            part = part if with_columns is None else part.select(with_columns)
            if left is not None:
                part = part.head(left)
                left -= part.height
            yield part
            if left == 0:
                return

    return register_io_source(read, schema=schema)
