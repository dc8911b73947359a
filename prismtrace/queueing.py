"""When communications that a program put into a queue really began."""

from __future__ import annotations

import polars as pl

from prismtrace.blocks import INSTANCE_KEY
from prismtrace.trace import instance_columns

__all__ = ["begun_later"]


def begun_later(rows: pl.LazyFrame) -> pl.DataFrame:
    """Communications that began after the program issued them, with the time they began.

    One begins when those ahead of it on its stream are over: the program's call only puts it into
    the queue. But never after a member of it has ended, somewhere: then the backend ran it beside
    the one ahead.

    Args:
        rows: of a recorder that notes as start when a communication was issued.

    Returns:
        Columns rank, index, start_ns, dur_ns of the rows that change.
    """
    end = pl.col("start_ns") + pl.col("dur_ns")
    queue = ["rank", "stream"]
    ahead = pl.col("end_ns").cum_max().shift(1).over(queue)
    before_batch = pl.col("ahead_ns").first().over([*queue, "batch"])
    free = pl.when(pl.col("batch").is_null()).then("ahead_ns").otherwise(before_batch)
    first_end = (
        pl.when(pl.col("seq").is_null())
        .then("end_ns")
        .otherwise(pl.col("end_ns").min().over(INSTANCE_KEY))
    )
    return (
        rows.filter(pl.col("group").is_not_null() & pl.col("start_ns").is_not_null())
        .select("rank", "index", "stream", "batch", "start_ns", *instance_columns(), end_ns=end)
        .collect()
        .with_columns(ahead_ns=ahead)
        .with_columns(begun_ns=pl.min_horizontal(free, first_end), free_ns=free)
        .filter(pl.col("free_ns").is_not_null() & (pl.col("begun_ns") > pl.col("start_ns")))
        .select("rank", "index", start_ns="begun_ns", dur_ns=pl.col("end_ns") - pl.col("begun_ns"))
    )
