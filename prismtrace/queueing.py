"""When communications that a program put into a queue really began, and its sends ended."""

from __future__ import annotations

import polars as pl

from prismtrace.blocks import INSTANCE_KEY
from prismtrace.schema import Kind
from prismtrace.trace import instance_columns

__all__ = ["begun_later"]


def begun_later(rows: pl.LazyFrame) -> pl.DataFrame:
    """Communications that began after the program issued them, with the time they began.

    One begins when those ahead of it on its stream are over: the program's call only puts it into
    the queue. But never after a member of it has ended, somewhere: then the backend ran it beside
    the one ahead. A send is over when its receiver has the data: that its program sees so only
    when it waits, which may be at the end of a step, keeps no other send back.

    Args:
        rows: of a recorder that notes as start when a communication was issued.

    Returns:
        Columns rank, index, start_ns, dur_ns of the rows that change.
    """
    seen = pl.col("start_ns") + pl.col("dur_ns")
    queue = ["rank", "stream"]
    ahead = pl.col("end_ns").cum_max().shift(1).over(queue)
    before_batch = pl.col("ahead_ns").first().over([*queue, "batch"])
    free = pl.when(pl.col("batch").is_null()).then("ahead_ns").otherwise(before_batch)
    first_end = (
        pl.when(pl.col("seq").is_null())
        .then("seen_ns")
        .otherwise(pl.col("seen_ns").min().over(INSTANCE_KEY))
    )
    sent = pl.max_horizontal("first_ns", "start_ns")
    end = pl.when(pl.col("kind") == Kind.SEND.value).then(sent).otherwise("seen_ns")
    return (
        rows.filter(pl.col("group").is_not_null() & pl.col("start_ns").is_not_null())
        .select(
            *("rank", "index", "stream", "batch", "kind", "start_ns"),
            *instance_columns(),
            seen_ns=seen,
        )
        .collect()
        .with_columns(first_ns=first_end)
        .with_columns(end_ns=end)
        .with_columns(ahead_ns=ahead)
        .with_columns(free_ns=free)
        .with_columns(
            begun_ns=pl.when(pl.col("free_ns").is_null())
            .then("start_ns")
            .otherwise(pl.max_horizontal(pl.min_horizontal("free_ns", "first_ns"), "start_ns"))
        )
        .filter((pl.col("begun_ns") > pl.col("start_ns")) | (pl.col("end_ns") < pl.col("seen_ns")))
        .select("rank", "index", start_ns="begun_ns", dur_ns=pl.col("end_ns") - pl.col("begun_ns"))
    )
