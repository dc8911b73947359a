"""Cut a node table into blocks of rows that fit in memory, whatever its size."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from prismtrace.trace import instance_columns

__all__ = ["BLOCK_ROWS", "INSTANCE_KEY", "instance_blocks", "rank_blocks"]

BLOCK_ROWS = 500_000
"""About this many rows are in memory at once: 10 to 100 MB, by the columns asked for."""

INSTANCE_KEY = ("group", "seq", "src_rank", "dst_rank")
"""Columns that together name a sync instance."""


def rank_blocks(nodes: pl.LazyFrame, columns: list[str]) -> Iterator[pl.DataFrame]:
    """The rows in blocks of whole ranks, ranks ascending, rows in the order of the table."""
    counts = nodes.group_by("rank").len().drop_nulls().sort("rank").collect(engine="streaming")
    block = (pl.col("len").cum_sum() - pl.col("len")) // BLOCK_ROWS
    for part in counts.with_columns(block=block).partition_by("block", maintain_order=True):
        # A range rather than a list of ranks: Parquet statistics prune on it.
        first, last = part["rank"][0], part["rank"][-1]
        yield nodes.filter(pl.col("rank").is_between(first, last)).select(columns).collect()


def instance_blocks(nodes: pl.LazyFrame, columns: list[str]) -> Iterator[pl.DataFrame]:
    """Members of sync instances in blocks of whole instances.

    Each block has `columns` and the columns of `INSTANCE_KEY`. Rows without `seq` or `group`
    are members of no instance.
    """
    members = nodes.filter(pl.col("seq").is_not_null() & pl.col("group").is_not_null())
    rows = members.select(pl.len()).collect(engine="streaming").item()
    blocks = -(-rows // BLOCK_ROWS)
    others = [name for name in columns if name not in INSTANCE_KEY]
    for number in range(blocks):
        part = members
        if blocks > 1:
            spread = pl.col("seq").cast(pl.Int64) + pl.col("group").cast(pl.Int64)
            part = members.filter(spread % blocks == number)
        yield part.select(*others, *instance_columns()).collect()
