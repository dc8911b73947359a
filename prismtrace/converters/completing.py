"""Second pass of a conversion: what matching found goes into the nodes of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import polars as pl

from prismtrace.converters.groups import GroupKey
from prismtrace.converters.placing import Assignment
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.schema import Kind
from prismtrace.trace import node_ids

__all__ = ["complete_nodes", "one_after_another"]


def complete_nodes(
    trace: RankTrace,
    assignment: Assignment,
    ids: Mapping[GroupKey, int],
    streams: Mapping[str, int],
    folder: Path,
) -> Path:
    """Add id, rank, group, seq and partner to one rank's nodes; the file of the whole.

    It takes the place of the nodes' file where that one is in `folder`; else it is kept.
    """
    whole = folder / f"{trace.rank}.whole.parquet"
    if trace.nodes.parent == folder:
        whole = trace.nodes
    lost = [
        comm.kind.is_p2p and peer is None
        for comm, peer in zip(trace.comms.comm, assignment.peer, strict=True)
    ]
    matched = pl.DataFrame(
        {
            "index": pl.Series(trace.comms.index, dtype=pl.Int32),
            "group": [None if key is None else ids[key] for key in assignment.group],
            "seq": assignment.seq,
            "peer": assignment.peer,
            "nbytes": assignment.nbytes,
            "lost": lost,
        },
        schema_overrides={
            "group": pl.Int32,
            "seq": pl.Int64,
            "peer": pl.Int32,
            "nbytes": pl.Int64,
            "lost": pl.Boolean,
        },
    )
    nodes = pl.read_parquet(trace.nodes, glob=False).join(
        matched, on="index", how="left", maintain_order="left"
    )
    rank = pl.lit(trace.rank, dtype=pl.Int32)
    nodes.with_columns(
        id=node_ids(rank, pl.col("index")),
        rank=rank,
        real=pl.lit(value=True),
        stream=pl.col("stream").replace_strict(dict(streams), return_dtype=pl.Int16),
        bytes=pl.coalesce("nbytes", "bytes"),
        kind=pl.when(pl.col("lost").fill_null(value=False))
        .then(pl.lit(Kind.OTHER_COMM.value))
        .otherwise(pl.col("kind")),
    ).drop("nbytes", "lost").write_parquet(whole, compression="lz4")
    return whole


def one_after_another(paths: Sequence[Path]) -> pl.LazyFrame:
    """Rows of all files in their order; columns that only some have are null in the others.

    Files with the same columns are one scan: a thousand scans take 0.2 MB each.
    """
    scans = [
        pl.scan_parquet(list(alike), glob=False) for _, alike in groupby(paths, key=_columns_of)
    ]
    return pl.concat(scans, how="diagonal")


def _columns_of(path: Path) -> pl.Schema:
    """Names and types; a name with [ or * in it is a name."""
    return pl.scan_parquet(path, glob=False).collect_schema()
