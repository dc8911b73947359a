"""Stretches of steps of one job as one trace: the later nodes and instances are numbered on."""

from __future__ import annotations

import polars as pl

from prismtrace.errors import JoinError
from prismtrace.headers import CUT_BEFORE
from prismtrace.rank_blocks import Names, in_order, joined_header, renamed
from prismtrace.ranks import format_ranks
from prismtrace.schema import INDEX_BITS
from prismtrace.trace import Trace, instance_columns, node_ids, node_schema

__all__ = ["followed"]

_COUNTER = ("group", "src_rank", "dst_rank")


def followed(before: Trace, after: Trace) -> tuple[Trace, int]:
    """Both stretches as one trace, and how many edges lead from one to the other.

    None does where steps are missing between them: how long those took is in no step; nor between
    sampled steps, which were laid out one behind the other.
    """
    names = Names()
    names.take(before.header)
    groups, streams = names.take(after.header)
    if len(names.clocks) != len(before.header.clock):
        raise JoinError(
            "the steps were recorded by different clocks",
            where=f"steps {format_ranks(before.header.steps)} and "
            f"{format_ranks(after.header.steps)}",
            hint="join what one run recorded on the same hosts",
        )
    last = _by_stream(before.nodes, last=True)
    later = renamed(after.nodes, groups, streams)
    first = _by_stream(later, last=False)
    _require_later(last, first, after)
    counts = before.nodes.group_by("rank").agg(shift=pl.col("index").max() + 1).collect()
    shift = dict(counts.iter_rows())
    later = _numbered_on(later, before.nodes)
    later = _placed_on(later, shift)
    header = joined_header([before.header, after.header], names)
    linked = 0
    follows = str(after.header.steps[0]) not in header.extra.get(CUT_BEFORE, {})
    if follows and not header.extra.get("sampled_steps"):
        links = _links(last, first, shift)
        later, linked = _linked(later, links), links.height
    return Trace(header, in_order([before.nodes, later])), linked


def _by_stream(nodes: pl.LazyFrame, *, last: bool) -> pl.DataFrame:
    """The last (or first) row of every rank and stream, and when the rank ends (or begins)."""
    order = pl.col("index").arg_max() if last else pl.col("index").arg_min()
    return (
        nodes.group_by("rank", "stream")
        .agg(
            pl.col("index", "batch").get(order),
            end=(pl.col("start_ns") + pl.col("dur_ns")).max(),
            begin=pl.col("start_ns").min(),
        )
        .sort("rank", "stream")
        .collect(engine="streaming")
    )


def _require_later(last: pl.DataFrame, first: pl.DataFrame, after: Trace) -> None:
    """On no stream of a rank may the later steps begin before the earlier ones end."""
    both = last.join(first, on=["rank", "stream"], suffix="_later")
    early = both.filter(pl.col("begin_later") < pl.col("end"))
    if early.height:
        rank, by = early["rank"][0], early["end"][0] - early["begin_later"][0]
        raise JoinError(
            f"steps {format_ranks(after.header.steps)} begin before those ahead of them end: on "
            f"rank {rank} by {by} ns",
            where=str(after.paths[0]) if after.paths else "a trace",
            hint="join pieces of one run, whose times go on",
        )


def _numbered_on(later: pl.LazyFrame, before: pl.LazyFrame) -> pl.LazyFrame:
    """Instances counted on, where their numbers do not do so already."""

    def spans(nodes: pl.LazyFrame) -> pl.DataFrame:
        members = nodes.filter(pl.col("seq").is_not_null()).select(*instance_columns())
        return (
            members.group_by(*_COUNTER)
            .agg(low=pl.col("seq").min(), high=pl.col("seq").max())
            .collect(engine="streaming")
        )

    both = spans(before).join(spans(later), on=list(_COUNTER), suffix="_later")
    moved = both.filter(pl.col("low_later") <= pl.col("high")).select(
        *_COUNTER, _shift=pl.col("high") + 1 - pl.col("low_later")
    )
    if moved.is_empty():
        return later
    key = [column for column in instance_columns() if column.meta.output_name() in _COUNTER]
    named = [column.alias(f"_{column.meta.output_name()}") for column in key]
    return (
        later.with_columns(named)
        .join(
            moved.lazy(),
            left_on=[f"_{name}" for name in _COUNTER],
            right_on=list(_COUNTER),
            how="left",
            maintain_order="left",
        )
        .with_columns(seq=pl.col("seq") + pl.col("_shift").fill_null(0))
        .drop("_shift", *(f"_{name}" for name in _COUNTER))
    )


def _placed_on(later: pl.LazyFrame, shift: dict[int, int]) -> pl.LazyFrame:
    """Rows with their indices and ids moved behind those of the earlier steps."""

    def moved(ids: pl.Series) -> pl.Series:
        return ids + _shifts(ids // (1 << INDEX_BITS), shift).cast(pl.Int64)

    def elsewhere(block: pl.Series) -> pl.Series:
        # Most blocks of most jobs: edges stay within ranks.
        return block.list.eval(pl.element().map_batches(moved)) if block.list.len().sum() else block

    index = pl.col("index") + pl.col("rank").map_batches(
        lambda block: _shifts(block, shift), return_dtype=pl.Int32, is_elementwise=True
    )
    return later.with_columns(
        index=index,
        id=node_ids(pl.col("rank"), index),
        xdeps=pl.col("xdeps").map_batches(
            elsewhere, return_dtype=node_schema()["xdeps"], is_elementwise=True
        ),
    )


def _shifts(rank: pl.Series, shift: dict[int, int]) -> pl.Series:
    """By how much indices of ranks move; a block at a time, Polars would hold all rows for it."""
    return rank.replace_strict(shift, default=0, return_dtype=pl.Int32)


def _links(last: pl.DataFrame, first: pl.DataFrame, shift: dict[int, int]) -> pl.DataFrame:
    """Columns rank, stream, index, batch, back: first rows and the distance of what is ahead."""
    both = first.join(last, on=["rank", "stream"], suffix="_ahead", maintain_order="left")
    index = pl.col("index") + pl.col("rank").replace_strict(shift, default=0, return_dtype=pl.Int32)
    return both.select("rank", index=index, _back=(index - pl.col("index_ahead")).cast(pl.UInt32))


def _linked(later: pl.LazyFrame, links: pl.DataFrame) -> pl.LazyFrame:
    """Rows with an edge to the row ahead on their stream, for the first of each stream."""
    back = pl.col("_back")
    lags = pl.concat_list(pl.lit([0], dtype=pl.List(pl.Int64)), "lag_ns")
    return (
        later.join(links.lazy(), on=["rank", "index"], how="left", maintain_order="left")
        .with_columns(
            deps=pl.when(back.is_null()).then("deps").otherwise(pl.concat_list(back, "deps")),
            lag_ns=pl.when(back.is_null()).then("lag_ns").otherwise(lags),
        )
        .drop("_back")
    )
