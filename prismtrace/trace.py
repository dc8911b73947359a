"""Open, look at and write traces.

    import prismtrace as pt

    trace = pt.open("run.parquet")        # or a folder, or "part-*.parquet"
    trace.header.world_size
    trace.nodes.filter(pl.col("kind") == "all_reduce").collect()

A trace is one Parquet file, or several that hold blocks of ranks and carry the same header.
Opening reads no rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import polars as pl

from prismtrace.beside import Part, chosen_rows
from prismtrace.errors import (
    InputFileError,
    ValidationError,
)
from prismtrace.group_names import group_labels
from prismtrace.headers import METADATA_KEY, PathLike, read_header, read_headers, trace_files
from prismtrace.output import atomic_output
from prismtrace.ranks import format_ranks, name_ranks, parse_ranks
from prismtrace.reading import reading
from prismtrace.schema import (
    CALIBRATED_COLUMNS,
    INDEX_BITS,
    P2P_KINDS,
    ColumnType,
    EdgeKind,
    ProcessGroup,
    TraceHeader,
    TraceKind,
    column_types,
    nullable_columns,
)

__all__ = [
    "METADATA_KEY",
    "GroupTable",
    "PathLike",
    "Source",
    "Trace",
    "node_schema",
    "open_trace",
    "read_header",
    "read_headers",
    "trace_files",
    "write",
]

BESIDE_KEY = "prismtrace_beside"
"""Key of the list of files that the columns of this file belong to; see `scan_nodes`."""

GAP_COLUMN = "gap_ns"
"""In such a file: the lag of all dependencies of a row, instead of a list of them."""

_SHOWN_GROUPS = 6

ROW_GROUP_ROWS = 256 * 1024
"""Small enough that reading one rank of a big trace skips most of the file."""


@cache
def node_schema() -> pl.Schema:
    """Polars types of the node table's columns, in order."""
    return pl.Schema({name: _polars_type(kind) for name, kind in column_types().items()})


def _polars_type(column: ColumnType) -> pl.DataType:
    if column.values is not None:
        return pl.Enum([member.value for member in column.values])
    if column.name.startswith("List("):
        return pl.List(_polars_type(ColumnType(column.name[5:-1])))
    kind: type[pl.DataType] = getattr(pl, column.name)
    return kind()


@dataclass(frozen=True)
class GroupTable:
    """The process groups of a `header`: one after the other, or as a table."""

    header: TraceHeader

    def __repr__(self) -> str:
        """How many, and the first of them: the header says much more than was asked for."""
        groups = self.header.groups
        shown = ", ".join(f"{group.id}: {group.name!r}" for group in groups[:_SHOWN_GROUPS])
        more = f", ... {len(groups) - _SHOWN_GROUPS} more" if len(groups) > _SHOWN_GROUPS else ""
        return f"<{len(groups)} process groups: {shown}{more}; as a table: .df>"

    def __iter__(self) -> Iterator[ProcessGroup]:
        return iter(self.header.groups)

    def __len__(self) -> int:
        return len(self.header.groups)

    @property
    def df(self) -> pl.DataFrame:
        """Columns id, name, desc, label, size, ranks (List(Int64), in group-rank order).

        `label` is what tables and messages call it: its name, or where that is a bare number
        its description and ranks.
        """
        groups, labels = self.header.groups, group_labels(self.header.groups)
        return pl.DataFrame(
            {
                "id": [group.id for group in groups],
                "name": [group.name for group in groups],
                "desc": [group.desc for group in groups],
                "label": [labels[group.id] for group in groups],
                "size": [len(group.ranks) for group in groups],
                "ranks": [list(group.ranks) for group in groups],
            },
            schema={
                "id": pl.Int32,
                "name": pl.String,
                "desc": pl.String,
                "label": pl.String,
                "size": pl.Int32,
                "ranks": pl.List(pl.Int64),
            },
        )


@dataclass(frozen=True)
class Trace:
    """A header and a lazily read node table, sorted by (rank, index).

    Attributes:
        header: what is known about the job.
        nodes: the rows, read when they are collected.  All columns of `Node` are there, null where
            the files lack them, followed by the extra columns (``x_…``).
        paths: the files; none if the trace was made in memory.
        parts: where its rows lie, in order, if its columns lie in two files.
    """

    header: TraceHeader
    nodes: pl.LazyFrame
    paths: tuple[Path, ...] = ()
    parts: tuple[Part, ...] = ()

    def __repr__(self) -> str:
        """The trace in a line: a header may list thousands of groups."""
        header = self.header
        files = f", {len(self.paths)} files, the first {self.paths[0]}" if self.paths else ""
        files = f", {self.paths[0]}" if len(self.paths) == 1 else files
        return (
            f"<{header.kind} Trace, {name_ranks(header.ranks)} of {header.world_size}, "
            f"{len(header.groups)} process groups{files}>"
        )

    @classmethod
    def open(cls, source: PathLike | Sequence[PathLike]) -> Trace:
        """Open a file, a folder, a glob pattern or a list of files, as `prismtrace.open` does."""
        return open_trace(source)

    @property
    def groups(self) -> GroupTable:
        """The process groups, to go through; `.df` is a table."""
        return GroupTable(self.header)

    def ranks(self, ranks: Iterable[int]) -> Trace:
        """The same trace with the rows of some ranks only (pruned by Parquet statistics)."""
        wanted = sorted(set(ranks))
        return replace(self, nodes=self.nodes.filter(pl.col("rank").is_in(wanted)), parts=())

    def collect(self) -> pl.DataFrame:
        """All rows, in (rank, index) order.

        Raises:
            InputFileError: pages of a file are damaged.
            ValidationError: a column holds a value that the format does not know.
        """
        with reading(self.paths):
            return self.nodes.collect()

    def edges(self) -> pl.DataFrame:
        """Both kinds of edges: columns src, dst (node ids), kind, lag_ns.

        Directional edges come from `deps` and `xdeps`. A sync instance of N members is shown
        as a star of N − 1 edges from its lowest id.
        """
        rows = self.nodes.select(
            "id", "kind", "group", "seq", "peer", "rank", "deps", "xdeps", "lag_ns"
        ).collect()
        return pl.concat([directional_edges(rows), sync_edges(rows)])


Source = Trace | PathLike | Sequence[PathLike]
"""A trace that is open, or where it is."""

_EDGE_SCHEMA = {
    "src": pl.Int64,
    "dst": pl.Int64,
    "kind": pl.Enum([kind.value for kind in EdgeKind]),
    "lag_ns": pl.Int64,
}


def directional_edges(rows: pl.DataFrame) -> pl.DataFrame:
    """Edges that `deps` and `xdeps` of some rows stand for; columns as in `Trace.edges`."""
    local = pl.col("deps").list.len()
    remote = pl.col("xdeps").list.len().fill_null(0)
    lags = (
        pl.when(pl.col("lag_ns").is_null())
        .then(pl.lit(0, dtype=pl.Int64).repeat_by(local + remote))
        .otherwise(pl.col("lag_ns"))
    )
    same_rank = rows.select(src="deps", dst="id", lag_ns=lags.list.head(local))
    other_rank = rows.select(src="xdeps", dst="id", lag_ns=lags.list.tail(remote))
    return (
        pl.concat(
            [
                _explode_edges(same_rank).with_columns(src=pl.col("dst") - pl.col("src")),
                _explode_edges(other_rank),
            ]
        )
        .sort("dst", maintain_order=True)
        .select("src", "dst", kind=pl.lit(EdgeKind.DIRECTIONAL.value), lag_ns="lag_ns")
        .cast(_EDGE_SCHEMA)  # type: ignore[arg-type]
    )


def _explode_edges(lists: pl.DataFrame) -> pl.DataFrame:
    return (
        lists.filter(pl.col("src").list.len() > 0)
        .explode("src", "lag_ns", empty_as_null=False, keep_nulls=False)
        .cast({"src": pl.Int64})
    )


def instance_columns() -> list[pl.Expr]:
    """Expressions that identify a sync instance: group, seq, sender and receiver (−1 if none).

    Rows with a null `seq` or `group` belong to no instance.
    """
    kind = pl.col("kind").cast(pl.String)
    p2p = kind.is_in([member.value for member in P2P_KINDS])
    sender = pl.when(kind == "send").then(pl.col("rank")).otherwise(pl.col("peer"))
    receiver = pl.when(kind == "send").then(pl.col("peer")).otherwise(pl.col("rank"))
    return [
        pl.col("group"),
        pl.col("seq"),
        pl.when(p2p).then(sender).otherwise(pl.lit(-1)).alias("src_rank"),
        pl.when(p2p).then(receiver).otherwise(pl.lit(-1)).alias("dst_rank"),
    ]


def sync_edges(rows: pl.DataFrame) -> pl.DataFrame:
    """Stars of the sync instances among some rows; columns as in `Trace.edges`."""
    members = rows.filter(pl.col("seq").is_not_null() & pl.col("group").is_not_null())
    hub = pl.col("id").min().over(["group", "seq", "src_rank", "dst_rank"])
    return (
        members.select("id", *instance_columns())
        .with_columns(hub=hub)
        .filter(pl.col("id") != pl.col("hub"))
        .sort("hub", "id")
        .select(
            src="hub",
            dst="id",
            kind=pl.lit(EdgeKind.SYNC.value),
            lag_ns=pl.lit(0, dtype=pl.Int64),
        )
        .cast(_EDGE_SCHEMA)  # type: ignore[arg-type]
    )


# --- reading --------------------------------------------------------------------------


def open_trace(source: PathLike | Sequence[PathLike], *, exact: bool = True) -> Trace:
    """Open a trace: one file, a folder of files, a glob pattern or a list of files.

    `source` names them; several files hold blocks of ranks. With `exact` false, integers and
    texts that do not fit the format's types stay as they are: `validate` counts them, where
    reading them would fail at the first.

    Raises:
        InputFileError: nothing there, or a file is unreadable or truncated.
        SourceFormatError: a Parquet file without a PrismTrace header.
        FormatVersionError: written by another major version.
        ValidationError: the header or the columns break the format, or the files do not
            carry the same header.
    """
    paths = trace_files(source)
    headers = read_headers(paths)
    for path, header in zip(paths[1:], headers[1:], strict=True):
        if header != headers[0]:
            raise ValidationError(
                f"files of one trace carry different headers: {_difference(headers[0], header)}",
                where=f"{paths[0]} and {path}",
                hint=_how_to_combine(headers[0], header),
            )
    files = [_scan(path, exact=exact) for path in paths]
    if len(files) == 1:
        ((nodes, parts),) = files
        return Trace(header=headers[0], nodes=nodes, paths=tuple(paths), parts=parts)
    how: Literal["diagonal", "diagonal_relaxed"] = "diagonal" if exact else "diagonal_relaxed"
    nodes = pl.concat([nodes for nodes, _ in files], how=how)
    return Trace(header=headers[0], nodes=nodes, paths=tuple(paths))


def _how_to_combine(one: TraceHeader, other: TraceHeader) -> str:
    """What to do with files of different headers, instead of opening them as one trace."""
    if TraceKind.SLICE in (one.kind, other.kind):
        return "open them one by one, or combine slices of one job with `prismcalib merge`"
    return (
        "take them one by one; pieces of one run are joined by `prismtrace concat`, different runs "
        "are compared by `prismtrace diff` and `prismcalib compare`"
    )


def _difference(one: TraceHeader, other: TraceHeader) -> str:
    """Which fields of two headers differ, with their values where these are short."""
    told = []
    for name in TraceHeader.model_fields:
        values = [getattr(header, name) for header in (one, other)]
        if name == "ranks":
            values = [format_ranks(value) for value in values]
        if values[0] != values[1]:
            texts = [str(value) for value in values]
            short = max(map(len, texts)) <= _SHORT
            told.append(f"{name} ({texts[0]} and {texts[1]})" if short else name)
    return ", ".join(told)


_SHORT = 40


def scan_nodes(path: Path) -> pl.LazyFrame:
    """The node table of one file, lazily, with the columns of `node_schema`; see `open_trace`.

    A file may hold only some columns (a merge writes the computed ones).  It lists the files
    with the others; these are joined side by side, row by row.
    """
    return _scan(path)[0]


def _scan(path: Path, *, exact: bool = True) -> tuple[pl.LazyFrame, tuple[Part, ...]]:
    """The node table of a file, and where its rows lie if it holds only some of the columns."""
    frame = pl.scan_parquet(path, glob=False)
    try:
        found = frame.collect_schema()
        beside = pl.read_parquet_metadata(path).get(BESIDE_KEY)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputFileError(
            "not a readable Parquet file",
            where=str(path),
            hint="copy it again, or write it again from its sources",
        ) from error
    if beside is None:
        return conform(frame, found, where=str(path), exact=exact), ()

    def join(sources: pl.LazyFrame, columns: pl.LazyFrame) -> pl.LazyFrame:
        joined = _joined(sources, columns, found)
        return conform(joined, joined.collect_schema(), where=str(path), exact=exact)

    parts = [
        Part(ranks, nodes, frame, join)
        for ranks, nodes in _beside_files(found, json.loads(beside), path)
    ]
    chosen = [chosen_rows(part.source, part.ranks) for part in parts]
    return join(pl.concat(chosen, how="diagonal"), frame), tuple(parts)


def _beside_files(
    found: pl.Schema, beside: dict[str, Any], path: Path
) -> Iterator[tuple[tuple[int, ...], pl.LazyFrame]]:
    """Ranks to take from every file listed, and its rows without columns that were made anew."""
    for entry in beside["files"]:
        source = path.parent / entry["path"]
        nodes = scan_nodes(source)
        if nodes.select(pl.len()).collect().item() != entry["rows"]:
            raise ValidationError(
                f"{source.name} has changed since {path.name} was made from it",
                where=str(path),
                hint="merge again",
            )
        kept = nodes.collect_schema().names()
        observed = {name: shown for name, shown in beside["observed"].items() if shown not in kept}
        doubled = [name for name in found if name in kept]
        yield parse_ranks(entry["ranks"]), nodes.rename(observed).drop(doubled, strict=False)


def _joined(sources: pl.LazyFrame, columns: pl.LazyFrame, found: pl.Schema) -> pl.LazyFrame:
    """Both side by side, with what is quickly made from other columns and so is not stored."""
    joined = pl.concat([sources, columns], how="horizontal")
    joined = joined.with_columns(wait_ns=pl.col("dur_ns") - pl.col("transfer_ns"))
    if GAP_COLUMN not in found:
        return joined
    gap = pl.col(GAP_COLUMN)
    lags = pl.when(gap > 0).then(gap.repeat_by(pl.col("deps").list.len()))
    return joined.with_columns(lag_ns=lags).drop(GAP_COLUMN)


def conform(
    frame: pl.LazyFrame, found: pl.Schema, *, where: str, exact: bool = True
) -> pl.LazyFrame:
    """Bring a frame to `node_schema`: order, types, absent nullable columns as nulls.

    With `exact` false, integers of another width and texts of an enum keep their type.

    Raises:
        ValidationError: a required column is missing, a type does not fit, or a column that
            is not part of the format does not start with ``x_``.
    """
    columns: list[pl.Expr] = []
    for name, dtype in node_schema().items():
        if name not in found:
            if name not in nullable_columns():
                raise ValidationError(f"column {name!r} is missing", where=where)
            columns.append(pl.lit(None, dtype=dtype).alias(name))
        elif found[name] == dtype:
            columns.append(pl.col(name))
        elif isinstance(dtype, pl.Enum):
            # A later minor version may append values; text is the common ground.
            text = pl.col(name).cast(pl.String)
            columns.append(text.cast(dtype) if exact else text)
        elif _widens(found[name], dtype):
            cast = exact or found[name] == pl.Null
            columns.append(pl.col(name).cast(dtype) if cast else pl.col(name))
        else:
            raise ValidationError(
                f"column {name!r} has type {found[name]}, expected {dtype}", where=where
            )
    extra = [name for name in found if name not in node_schema()]
    unknown = [name for name in extra if not name.startswith("x_")]
    if unknown:
        raise ValidationError(
            f"unknown column {unknown[0]!r}", where=where, hint="own columns start with x_"
        )
    return frame.select(*columns, *extra)


def _widens(found: pl.DataType, wanted: pl.DataType) -> bool:
    """Types that mean the same to a person: strings for names, any integer width, null."""
    if found == pl.Null:
        return True
    if isinstance(found, pl.List) and isinstance(wanted, pl.List):
        return _widens(found.inner, wanted.inner)  # type: ignore[arg-type]
    if wanted == pl.Categorical:
        return found == pl.String or isinstance(found, pl.Categorical | pl.Enum)
    return found.is_integer() and wanted.is_integer()


# --- writing --------------------------------------------------------------------------


def write(trace: Trace, path: PathLike) -> None:
    """Write a trace as one Parquet file, streaming; an existing file is replaced when whole.

    Calibrated columns are left out when `trace` is not calibrated. Its rows must be in
    (rank, index) order; `validate` checks what was written to `path`.

    Raises:
        OutputError: the file cannot be written.
    """
    write_nodes(trace.header, trace.nodes, path)


def write_nodes(header: TraceHeader, nodes: pl.LazyFrame, path: PathLike) -> None:
    """Write a header and a node table; missing nullable columns are added as nulls."""
    frame = conform(nodes, nodes.collect_schema(), where=str(path))
    if header.kind != "calibrated":
        frame = frame.drop(CALIBRATED_COLUMNS)
    with atomic_output(path) as temporary:
        frame.sink_parquet(
            temporary,
            compression="zstd",
            compression_level=1,
            row_group_size=ROW_GROUP_ROWS,
            metadata={METADATA_KEY: header.model_dump_json()},
            maintain_order=True,
        )


def node_ids(rank: pl.Expr, index: pl.Expr) -> pl.Expr:
    """Node ids from rank and index columns."""
    return rank.cast(pl.Int64) * (1 << INDEX_BITS) + index.cast(pl.Int64)
