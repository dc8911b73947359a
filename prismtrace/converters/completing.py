"""Second pass of a conversion: what matching found goes beside the nodes of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import polars as pl

from prismtrace.converters.groups import GroupKey
from prismtrace.converters.placing import Assignment
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.schema import Kind
from prismtrace.trace import node_ids

__all__ = ["complete_nodes", "one_after_another"]


def complete_nodes(
    traces: Sequence[RankTrace],
    assignments: Mapping[int, Assignment],
    ids: Mapping[GroupKey, int],
    streams: Mapping[str, int],
    folder: Path,
) -> pl.LazyFrame:
    """The nodes of all ranks with id, rank, group, seq and partner.

    The files of the ranks stay as they are. What is new goes into files in `folder`, with as
    many rows: side by side they are the whole, and only that is written.
    """
    nodes = one_after_another([trace.nodes for trace in traces])
    matched = (_matched(trace, assignments[trace.rank], ids) for trace in traces)
    return (
        pl.concat([nodes, pl.scan_parquet(_written(matched, folder), glob=False)], how="horizontal")
        .with_columns(
            id=node_ids(pl.col("rank"), pl.col("index")),
            real=pl.lit(value=True),
            stream=_numbered(pl.col("stream"), streams),
            bytes=pl.coalesce("nbytes", "bytes"),
            kind=pl.when(pl.col("lost"))
            .then(pl.lit(Kind.OTHER_COMM.value))
            .otherwise(pl.col("kind")),
        )
        .drop("nbytes", "lost")
    )


def _numbered(label: pl.Expr, numbers: Mapping[str, int]) -> pl.Expr:
    """Numbers 0, 1, … of labels, in one pass: Polars looks values up only with all rows at hand."""
    labels = pl.Enum(sorted(numbers, key=numbers.__getitem__))
    return label.cast(labels).to_physical().cast(pl.Int16)


def _written(frames: Iterable[pl.DataFrame], folder: Path) -> list[Path]:
    """Frames one after the other; small ones share a file, since each takes memory to scan."""
    paths: list[Path] = []
    waiting: list[pl.DataFrame] = []
    rows = 0

    def write() -> None:
        paths.append(folder / f"matched-{len(paths)}.parquet")
        pl.concat(waiting).write_parquet(paths[-1], compression="lz4")
        waiting.clear()

    for frame in frames:
        waiting.append(frame)
        rows += frame.height
        if rows >= _FILE_ROWS:
            write()
            rows = 0
    if waiting:
        write()
    return paths


_FILE_ROWS = 1 << 16


def _matched(trace: RankTrace, assignment: Assignment, ids: Mapping[GroupKey, int]) -> pl.DataFrame:
    """What matching found for a rank, a row for each of its nodes; `index` counts these."""
    place = trace.comms.index
    lost = np.zeros(trace.rows, dtype=np.bool_)
    lost[place] = [
        peer is None and comm.kind.is_p2p
        for comm, peer in zip(trace.comms.comm, assignment.peer, strict=True)
    ]
    columns: dict[str, tuple[list[int | None], type[pl.DataType]]] = {
        "group": ([None if key is None else ids[key] for key in assignment.group], pl.Int32),
        "seq": (assignment.seq, pl.Int64),
        "peer": (assignment.peer, pl.Int32),
        "nbytes": (assignment.nbytes, pl.Int64),
    }
    return pl.DataFrame(
        [
            pl.Series("rank", [trace.rank], dtype=pl.Int32).new_from_index(0, trace.rows),
            pl.Series("lost", lost),
            *(
                pl.Series(name, [None], dtype=dtype)
                .new_from_index(0, trace.rows)
                .scatter(place, pl.Series(values, dtype=dtype))
                for name, (values, dtype) in columns.items()
            ),
        ]
    )


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
