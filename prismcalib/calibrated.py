"""The result of merging slices: a table that is put together block by block when it is read.

What was measured stays in the files it came from; what was computed lies in arrays of the
whole job.  A block of ranks joins both.  So the table of a job of any size can be filtered,
or written, with a few million rows in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.assembly import Assembly
from prismcalib.errors import MergeInputError
from prismcalib.graph import Graph, Int64Array
from prismcalib.lists import lists_like, lists_of
from prismcalib.made_table import made_table
from prismcalib.propagation import Timing
from prismcalib.rows import ABSENT, in_order, list_lengths, whole_rank_rows
from prismcalib.steady import chain_steps
from prismtrace.output import atomic_output
from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.schema import TraceHeader, TransferSource
from prismtrace.trace import (
    BESIDE_KEY,
    GAP_COLUMN,
    METADATA_KEY,
    ROW_GROUP_ROWS,
    Trace,
    node_schema,
    scan_nodes,
)

__all__ = ["Calibrated", "Piece", "write_beside"]

_OBSERVED = {"start_ns": "x_observed_start_ns", "dur_ns": "x_observed_dur_ns"}
_SPREAD = "x_spread_ns"
_BLOCK_ROWS = 1_000_000
_SOURCES = pl.Series([source.value for source in TransferSource])


@dataclass(frozen=True)
class Piece:
    """Where rows of some ranks lie.

    Attributes:
        path: the file; None if it is not one file that can be named.
        nodes: its table.
        ranks: the ranks taken from it, ascending.
        rename: makes the rows those of another rank; None: they stay as they are.
        observed: whether its times are observed ones, else they are null in the result.
        own: whether it has observed times of its own (an earlier result).
    """

    path: Path | None
    nodes: pl.LazyFrame
    ranks: tuple[int, ...]
    rename: Callable[[pl.DataFrame], pl.DataFrame] | None = None
    observed: bool = True
    own: bool = False

    def read(self, ranks: Sequence[int], columns: Sequence[str] | None = None) -> pl.DataFrame:
        """All rows of some of its ranks, in (rank, index) order."""
        nodes = self.nodes if self.rename else whole_rank_rows(self.nodes, ranks)
        if columns is not None:
            nodes = nodes.select(columns)
        with reading([] if self.path is None else [self.path]):
            table = nodes.collect()
        return self.rename(table) if self.rename else table


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Rows from files and times from arrays; ranks ascending.

    Attributes:
        header: of the result.
        pieces: together hold every rank once.
        assembly: where the rows of a rank are in the arrays.
        graph, timing, slack: of the whole job.
        critical: bool[n].
        chained: whether steps may have been chained that the files do not chain.
    """

    header: TraceHeader
    pieces: tuple[Piece, ...]
    assembly: Assembly
    graph: Graph
    timing: Timing
    slack: Int64Array
    critical: NDArray[np.bool_]
    synced: NDArray[np.bool_]
    chained: bool

    @cached_property
    def schema(self) -> pl.Schema:
        """Columns of the result and their types."""
        schema = dict(node_schema())
        for piece in self.pieces:
            for name, dtype in piece.nodes.collect_schema().items():
                schema.setdefault(name, dtype)
        schema |= dict.fromkeys(_OBSERVED.values(), pl.Int64())
        if self.assembly.spread is not None:
            schema[_SPREAD] = pl.Int64()
        return pl.Schema(schema)

    def table(self) -> pl.LazyFrame:
        """The node table; read block by block, only the columns that are asked for."""
        return made_table(self.blocks, self.schema)

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[pl.DataFrame]:
        """Blocks of whole ranks, in order."""
        names = list(self.schema) if columns is None else list(columns)
        for piece, ranks in self._turns():
            yield self._block(piece, ranks, names)

    def _owners(self) -> Iterator[tuple[Piece, list[int]]]:
        """Ranks in order, neighbours of one piece together."""
        owner = {rank: number for number, piece in enumerate(self.pieces) for rank in piece.ranks}
        for number, ranks in groupby(self.assembly.ranks, key=owner.__getitem__):
            yield self.pieces[number], list(ranks)

    def _turns(self) -> Iterator[tuple[Piece, list[int]]]:
        """The same, never more than a block of rows at once."""
        for piece, ranks in self._owners():
            pending: list[int] = []
            rows = 0
            for rank in ranks:
                size = self.assembly.count(rank)
                if pending and rows + size > _BLOCK_ROWS:
                    yield piece, pending
                    pending, rows = [], 0
                pending.append(rank)
                rows += size
            yield piece, pending

    def _block(self, piece: Piece, ranks: list[int], names: list[str]) -> pl.DataFrame:
        stored = piece.nodes.collect_schema().names()
        own = set(self._makers(slice(0, 0), pl.DataFrame(), piece))
        needed = set(names) & set(stored) - own
        # What computed columns are made from.
        if set(names) & set(_OBSERVED.values()) and not piece.own:
            needed |= set(_OBSERVED)
        if self.chained and "deps" in names:
            needed |= {"rank", "step", "deps", "lag_ns"}
        if "lag_ns" in names and self.graph.dep_lag_ns is not None:
            needed |= {"deps", *(("rank", "step", "lag_ns") if self.chained else ())}
        # Something to count rows by; rank and index are the cheapest, and tell the order.
        needed |= {"rank", "index"}
        if piece.rename:
            needed |= {"id", "group", "peer", "kind"}
        table = piece.read(ranks, [name for name in stored if name in needed])
        if not piece.rename and not _ordered(table):
            table = table.sort("rank", "index", maintain_order=True)
        if self.chained:
            table, _ = chain_steps(table)
        first = self.assembly.base[ranks[0]]
        makers = self._makers(slice(first, first + table.height), table, piece)
        computed = [make().alias(name) for name, make in makers.items() if name in names]
        table = table.with_columns(computed)
        absent = [
            pl.lit(None, self.schema[name]).alias(name)
            for name in names
            if name not in table.columns
        ]
        return (
            table.with_columns(absent)
            .select(names)
            .cast(
                {
                    name: self.schema[name]
                    for name in names
                    if name in self.schema
                    and name in table.columns
                    and table.schema[name] != self.schema[name]
                }
            )
        )

    def _makers(
        self, part: slice, table: pl.DataFrame, piece: Piece
    ) -> dict[str, Callable[[], pl.Series]]:
        """How to make each computed column of some rows; `table` holds stored columns of them."""
        start, end = self.timing.start_ns[part], self.timing.end_ns[part]
        synced = pl.Series(self.synced[part])
        transfer = self.graph.duration_ns[part]

        def of_members(values: pl.Series) -> pl.Series:
            nothing = pl.Series([None], dtype=values.dtype)
            return values.zip_with(synced, nothing.new_from_index(0, len(values)))

        makers: dict[str, Callable[[], pl.Series]] = {
            "start_ns": lambda: pl.Series(start),
            "dur_ns": lambda: pl.Series(end - start),
            "transfer_ns": lambda: of_members(pl.Series(transfer)),
            "wait_ns": lambda: of_members(pl.Series(end - start - transfer)),
            "transfer_source": lambda: self._sources(part),
            "slack_ns": lambda: pl.Series(self.slack[part]),
            "critical": lambda: pl.Series(self.critical[part]),
            "lag_ns": lambda: self._lags(part, table),
            GAP_COLUMN: lambda: pl.Series(self._gaps(part)),
        }
        if self.assembly.spread is not None:
            spread = self.assembly.spread
            makers[_SPREAD] = lambda: pl.Series(spread[part])
        for name, kept in _OBSERVED.items():
            if not piece.observed:
                makers[kept] = lambda: pl.Series([None], dtype=pl.Int64).new_from_index(
                    0, len(start)
                )
            elif not piece.own:
                makers[kept] = lambda name=name: table[name]  # type: ignore[misc]
        return makers

    def _sources(self, part: slice) -> pl.Series:
        codes = self.assembly.source[part]
        dtype = node_schema()["transfer_source"]
        names = pl.concat([_SOURCES, pl.Series([None], dtype=pl.String)]).cast(dtype)
        place = np.where(codes == ABSENT, len(_SOURCES), codes)
        return names.gather(pl.Series(place.astype(np.uint32)))

    def _gaps(self, part: slice) -> Int64Array:
        """Lag of the first dependency of every row; 0 without dependencies."""
        offsets = self.graph.dep_offsets[part.start : part.stop + 1]
        gaps = np.zeros(part.stop - part.start, np.int64)
        dependent = offsets[1:] > offsets[:-1]
        if self.graph.dep_lag_ns is not None:
            gaps[dependent] = self.graph.dep_lag_ns[offsets[:-1][dependent]]
        return gaps

    def _lags(self, part: slice, table: pl.DataFrame) -> pl.Series:
        lags = self.graph.dep_lag_ns
        if lags is None:
            return pl.Series([None], dtype=pl.List(pl.Int64)).new_from_index(0, table.height)
        offsets = self.graph.dep_offsets[part.start : part.stop + 1]
        values = lags[offsets[0] : offsets[-1]]
        counts = np.diff(offsets)
        lagged = np.zeros(len(counts), np.bool_)
        lagged[np.repeat(np.arange(len(counts)), counts)[values != 0]] = True
        deps = table["deps"]
        same = np.array_equal(list_lengths(deps), counts)
        lists = lists_like(deps, values) if same else lists_of(counts, values)
        if lagged.all():
            return lists
        empty = pl.Series([None], dtype=pl.List(pl.Int64)).new_from_index(0, len(lists))
        return lists.zip_with(pl.Series(lagged), empty)

    # Writing ----------------------------------------------------------------------------

    def write_columns(self, path: str | os.PathLike[str]) -> None:
        """Write only what was computed; `prismtrace.open` joins it with the files it belongs to.

        Raises:
            MergeInputError: rows of the result lie in no file.
            OutputError: the file cannot be written.
        """
        target = Path(path).absolute()
        names = [*_COMPUTED]
        if self.graph.dep_lag_ns is None or self.assembly.lags_are_gaps:
            names.remove("lag_ns")
        if self.graph.dep_lag_ns is not None and self.assembly.lags_are_gaps:
            names.append(GAP_COLUMN)
        if self.chained:
            names.append("deps")
        if self.assembly.spread is not None:
            names.append(_SPREAD)
        files = [self._file_entry(piece, ranks, target) for piece, ranks in self._owners()]
        schema = pl.Schema({name: self.schema.get(name, pl.Int64()) for name in names})
        table = made_table(lambda _: self.blocks(names), schema)
        _stream(path, self.header, table, files)

    def _file_entry(self, piece: Piece, ranks: list[int], target: Path) -> dict[str, object]:
        if piece.path is None or piece.rename is not None:
            raise MergeInputError(
                "ranks that stand for others have no file of their own to write columns beside",
                where=str(target),
                hint="leave out --columns-only, or fold them instead of unfolding",
            )
        with reading([piece.path]):
            rows = piece.nodes.select(pl.len()).collect().item()
        return {
            "path": os.path.relpath(piece.path.absolute(), target.parent),
            "rows": rows,
            "ranks": format_ranks(ranks),
        }


def _ordered(table: pl.DataFrame) -> bool:
    return in_order(table["rank"].to_numpy(), table["index"].to_numpy())


# Without wait_ns, the difference of dur_ns and transfer_ns: reading adds it.
_COMPUTED = (
    "start_ns", "dur_ns", "transfer_ns", "transfer_source", "slack_ns", "critical", "lag_ns",
)  # fmt: skip


def write_beside(
    header: TraceHeader, nodes: pl.DataFrame, trace: Trace, path: str | os.PathLike[str]
) -> None:
    """Write the computed columns of all `nodes`, whose other columns are in the trace's files.

    Raises:
        MergeInputError: the trace lies in no files, or its files are not in order.
        OutputError: the file cannot be written.
    """
    target = Path(path).absolute()
    with reading(trace.paths):
        tables = [
            (file, scan_nodes(file).select("rank", "index").collect()) for file in trace.paths
        ]
    if not tables or not all(_ordered(table) for _, table in tables):
        raise MergeInputError(
            "columns can be written only beside files whose rows are in order of rank and index",
            where=str(path),
            hint="leave out --columns-only",
        )
    owner = {rank: at for at, (_, table) in enumerate(tables) for rank in table["rank"].unique()}
    files = [
        {
            "path": os.path.relpath(tables[at][0].absolute(), target.parent),
            "rows": tables[at][1].height,
            "ranks": format_ranks(list(ranks)),
        }
        for at, ranks in groupby(sorted(owner), key=owner.__getitem__)
    ]
    columns = nodes.select(_COMPUTED)
    _stream(path, header, columns.lazy(), files)


def _stream(
    path: str | os.PathLike[str],
    header: TraceHeader,
    table: pl.LazyFrame,
    files: list[dict[str, object]],
) -> None:
    beside = {"files": files, "observed": _OBSERVED}
    metadata = {METADATA_KEY: header.model_dump_json(), BESIDE_KEY: json.dumps(beside)}
    with atomic_output(path) as temporary:
        table.sink_parquet(
            temporary,
            compression="zstd",
            compression_level=1,
            row_group_size=ROW_GROUP_ROWS,
            metadata=metadata,
            maintain_order=True,
        )
