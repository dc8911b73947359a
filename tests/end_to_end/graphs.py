"""Are two traces the same graph?"""

from __future__ import annotations

from pathlib import Path

import polars as pl

import prismtrace as pt
from prismtrace import schema

# What a node is, apart from when it ran and where that is known from.
STRUCTURE = (
    "rank", "index", "kind", "stream", "batch", "step", "microbatch", "chunk", "phase",
    "group", "seq", "peer", "bytes", "dtype", "reduce_op", "deps",
)  # fmt: skip
HEADER = ("world_size", "ranks", "axes", "groups", "streams", "steps")


def describe_difference(one: Path, other: Path) -> str | None:
    """The first thing in which the structure of two traces differs; None if nothing does."""
    left, right = pt.open(one), pt.open(other)
    for name in HEADER:
        values = [getattr(trace.header, name) for trace in (left, right)]
        if values[0] != values[1]:
            return f"header.{name}: {values[0]} | {values[1]}"
    tables = [
        trace.nodes.select(*STRUCTURE).sort("rank", "index").collect() for trace in (left, right)
    ]
    for rank in left.header.ranks:
        mine, theirs = (table.filter(pl.col("rank") == rank) for table in tables)
        if mine.equals(theirs, null_equal=True):
            continue
        pairs = zip(mine.iter_rows(named=True), theirs.iter_rows(named=True), strict=False)
        for row, (a, b) in enumerate(pairs):
            if a != b:
                columns = [name for name in STRUCTURE if a[name] != b[name]]
                return f"rank {rank}, node {row}: {columns} differ\n  {a}\n  {b}"
        return f"rank {rank}: {len(mine)} | {len(theirs)} nodes"
    return None


def communications(trace: Path) -> int:
    """Number of communication nodes: a graph without any proves nothing."""
    kinds = [kind.value for kind in schema.Kind if kind.is_communication]
    return pt.open(trace).nodes.filter(pl.col("kind").is_in(kinds)).collect().height
