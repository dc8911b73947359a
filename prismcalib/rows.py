"""Rows of trace files as plain arrays, block by block: what a merge of large jobs works on.

A `Rows` holds whole ranks in (rank, index) order.  Absent values are -1 (255 in enum codes), so
that no array needs a mask; enum codes are positions in `Kind`, `DType`, `TransferSource`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.errors import MergeInputError
from prismcalib.graph import Int32Array, Int64Array
from prismtrace.beside import chosen_rows
from prismtrace.group_names import group_labels
from prismtrace.ranks import format_ranks
from prismtrace.reading import reading
from prismtrace.schema import P2P_KINDS, Kind, TraceHeader
from prismtrace.trace import node_schema

__all__ = [
    "ABSENT",
    "COLUMNS",
    "FARTHEST_NS",
    "KINDS",
    "NODE_COLUMNS",
    "Rows",
    "UInt8Array",
    "absent_text",
    "check_times",
    "groups_lacking",
    "in_order",
    "list_lengths",
    "list_values",
    "ranks_text",
    "read_rows",
    "rows_of",
    "runs",
    "whole_rank_rows",
]

UInt8Array = NDArray[np.uint8]

KINDS = tuple(Kind)
ABSENT = 255
"""Code of an absent enum value."""

_SEND = KINDS.index(Kind.SEND)
_P2P = np.array([kind in P2P_KINDS for kind in KINDS])

# No training step lasts a day; a span of one is a broken clock or a unit mix-up.
_LONGEST_NS = 24 * 3600 * 10**9

FARTHEST_NS = 2**62 - 2 * _LONGEST_NS
"""Starts farther from 0 are refused: differences of any two times fit into 64 bits."""

_CHECK_HINT = "run `prismtrace validate` on the file: it lists every rule that is broken"

COLUMNS = (
    "rank", "index", "real", "kind", "group", "seq", "peer", "bytes", "dtype", "step",
    "start_ns", "dur_ns", "transfer_ns", "transfer_source", "deps", "xdeps", "lag_ns",
)  # fmt: skip
"""Columns that `rows_of` reads."""


NODE_COLUMNS = (
    "rank", "index", "kind", "group", "seq", "peer", "bytes", "dtype", "step",
    "start", "dur", "transfer", "source",
)  # fmt: skip
"""Attributes of `Rows` that have one entry per row."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """n rows with e directional edges from the same rank.

    Attributes:
        rank, index, peer, step: int32[n].
        kind, dtype, source: uint8[n], codes.
        group: int32[n], *position* of the process group in the header.
        seq, bytes, start, dur, transfer: int64[n].
        offsets: int64[n + 1]; row i depends on the rows `i - distance[offsets[i]:offsets[i + 1]]`.
        distance: int32[e].
        lags: int64[e], or None if no edge has a lag.
        far_row, far_id, far_lag: edges from other ranks: row, id of the node it depends on, lag.
    """

    rank: Int32Array
    index: Int32Array
    kind: UInt8Array
    group: Int32Array
    seq: Int64Array
    peer: Int32Array
    bytes: Int64Array
    dtype: UInt8Array
    step: Int32Array
    start: Int64Array
    dur: Int64Array
    transfer: Int64Array
    source: UInt8Array
    offsets: Int64Array
    distance: Int32Array
    lags: Int64Array | None
    far_row: Int64Array
    far_id: Int64Array
    far_lag: Int64Array

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def member(self) -> NDArray[np.bool_]:
        """bool[n], whether the row is a member of a sync instance."""
        return (self.seq >= 0) & (self.group >= 0)

    @property
    def rank_runs(self) -> list[tuple[int, int, int]]:
        """Of every rank: rank, first row, row after its last."""
        return [(int(self.rank[first]), first, last) for first, last in runs(self.rank)]

    @property
    def p2p_ends(self) -> tuple[Int64Array, Int64Array]:
        """Sender and receiver of every row; -1 where the row is not point to point."""
        sends = self.kind == _SEND
        p2p = _P2P[self.kind]
        sender = np.where(p2p, np.where(sends, self.rank, self.peer), -1)
        receiver = np.where(p2p, np.where(sends, self.peer, self.rank), -1)
        return sender.astype(np.int64), receiver.astype(np.int64)

    def cut(self, first: int, last: int) -> Rows:
        """Rows first .. last - 1, which must be whole ranks."""
        low, high = int(self.offsets[first]), int(self.offsets[last])
        far = (self.far_row >= first) & (self.far_row < last)
        return replace(
            self,
            **{name: getattr(self, name)[first:last] for name in NODE_COLUMNS},
            offsets=self.offsets[first : last + 1] - low,
            distance=self.distance[low:high],
            lags=None if self.lags is None else self.lags[low:high],
            far_row=self.far_row[far] - first,
            far_id=self.far_id[far],
            far_lag=self.far_lag[far],
        )

    def label(self, row: int, header: TraceHeader) -> str:
        """A row in error texts: `rank 3 index 12 all_reduce group=tp_0 seq=5 bytes=64`."""
        text = f"rank {self.rank[row]} index {self.index[row]} {KINDS[self.kind[row]]}"
        if self.group[row] >= 0:
            labels = group_labels(header.groups)
            text += f" group={labels[header.groups[self.group[row]].id]}"
        for name in ("seq", "peer", "bytes"):
            value = getattr(self, name)[row]
            if value >= 0:
                text += f" {name}={value}"
        deps = self.distance[self.offsets[row] : self.offsets[row + 1]]
        return f"{text} deps={sorted((self.index[row] - deps).tolist())}"


def runs(values: NDArray[np.generic]) -> list[tuple[int, int]]:
    """First and past-the-last position of every run of equal neighbours."""
    if not len(values):
        return []
    cuts = np.flatnonzero(values[1:] != values[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(values)]
    return list(pairwise(bounds))


def whole_rank_rows(nodes: pl.LazyFrame, ranks: Sequence[int] | None) -> pl.LazyFrame:
    """Rows of some ranks (None: all)."""
    return nodes if ranks is None else chosen_rows(nodes, sorted(set(ranks)))


def read_rows(
    nodes: pl.LazyFrame,
    header: TraceHeader,
    where: str,
    *,
    ranks: Sequence[int] | None = None,
) -> Rows:
    """Read whole ranks of one file; see `rows_of`."""
    with reading([Path(where)]):
        table = whole_rank_rows(nodes, ranks).select(COLUMNS).collect()
    return rows_of(table, header, where)


def rows_of(table: pl.DataFrame, header: TraceHeader, where: str, *, partial: bool = False) -> Rows:
    """The rows of a table that holds whole ranks; with `partial`, any rows, their edges left out.

    Raises:
        MergeInputError: rows do not count up from 0 within each rank, an edge points outside
            its rank, a group is unknown; `where` and the row are named.
    """
    table = _sorted(table)
    if partial:
        none = {name: pl.lit(None, node_schema()[name]) for name in ("deps", "xdeps", "lag_ns")}
        table = table.with_columns(**none)
    rank, index = _ints(table, "rank", np.int32), _ints(table, "index", np.int32)
    first = np.append(True, rank[1:] != rank[:-1]) if len(rank) else np.zeros(0, np.bool_)
    expected = np.where(first, 0, np.roll(index, 1) + 1)
    if not partial and (index != expected).any():
        bad = int((index != expected).argmax())
        raise MergeInputError(
            f"the rows of rank {rank[bad]} do not count up one by one from 0: "
            f"index {index[bad]} where {expected[bad]} is due",
            where=where,
            hint="the file was cut, or written by something else than this toolkit; " + _CHECK_HINT,
        )
    counts, distance = list_lengths(table["deps"]), list_values(table["deps"], pl.Int32)
    outside = (distance < 1) | (distance > np.repeat(index, counts))
    if outside.any():
        bad = int(np.repeat(np.arange(len(rank)), counts)[outside.argmax()])
        raise MergeInputError(
            "a node depends on a node that is not in the trace",
            where=f"{where} rank={rank[bad]} index={index[bad]}",
            hint=_CHECK_HINT,
        )
    far = list_lengths(table["xdeps"])
    lags, far_lags = _lags(table, counts, far, where)
    return Rows(
        rank=rank,
        index=index,
        kind=_codes(table, "kind"),
        group=_group_positions(table, header, where),
        seq=_ints(table, "seq", np.int64),
        peer=_ints(table, "peer", np.int32),
        bytes=_ints(table, "bytes", np.int64),
        dtype=_codes(table, "dtype"),
        step=_ints(table, "step", np.int32),
        start=_ints(table, "start_ns", np.int64),
        dur=_ints(table, "dur_ns", np.int64),
        transfer=_ints(table, "transfer_ns", np.int64),
        source=_codes(table, "transfer_source"),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        distance=distance,
        lags=lags,
        far_row=np.repeat(np.arange(len(rank)), far),
        far_id=list_values(table["xdeps"]),
        far_lag=far_lags,
    )


def check_times(table: pl.DataFrame, where: str) -> None:
    """Refuse rows without times, or with times that cannot be.

    Raises:
        MergeInputError: names the first such row.
    """
    problem, broken = _wrong_times(table)
    if broken is None:
        return
    rank, index = table.select("rank", "index").row(int(broken.arg_max() or 0))
    more = f", and {broken.sum() - 1} more" if broken.sum() > 1 else ""
    raise MergeInputError(
        f"a row {problem}{more}",
        where=f"{where} rank={rank} index={index}",
        hint="look at the time units and clocks of the source, then make the file again",
    )


def _wrong_times(table: pl.DataFrame) -> tuple[str, pl.Series | None]:
    """What is wrong with the times of which rows (bool[n])."""
    start, dur = table["start_ns"], table["dur_ns"]
    if start.null_count() or dur.null_count():
        return "has no start or duration", start.is_null() | dur.is_null()
    if not len(table):
        return "", None
    lasting, times = dur.to_numpy(), start.to_numpy()
    if lasting.min() < 0:
        return "has a negative duration", dur < 0
    if lasting.max() > _LONGEST_NS:
        return "lasts longer than a day", dur > _LONGEST_NS
    rank = table["rank"].to_numpy()
    for first, last in runs(rank):
        window = times[first:last]
        if float(window.max()) - float(window.min()) > _LONGEST_NS:
            text = "is on a rank whose rows lie more than a day apart"
            return text, pl.Series(rank == rank[first])
    if times.min() < -FARTHEST_NS or times.max() > FARTHEST_NS:
        text = "starts more than 146 years from the zero of its clock"
        return text, ~start.is_between(-FARTHEST_NS, FARTHEST_NS)
    return "", None


def list_lengths(lists: pl.Series) -> Int64Array:
    """int64[n], entries of every list; 0 for null."""
    if lists.null_count() == len(lists):
        return np.zeros(len(lists), np.int64)
    return lists.list.len().fill_null(0).cast(pl.Int64).to_numpy()


def list_values(lists: pl.Series, dtype: type[pl.DataType] = pl.Int64) -> NDArray[Any]:
    """The entries of all lists in a row, int64 or as the type given."""
    if lists.null_count() == len(lists):
        return np.empty(0, np.int32 if dtype == pl.Int32 else np.int64)
    flat = lists.explode(empty_as_null=False, keep_nulls=False)
    return flat.cast(dtype).to_numpy()


def _sorted(table: pl.DataFrame) -> pl.DataFrame:
    if in_order(table["rank"].to_numpy(), table["index"].to_numpy()):
        return table
    return table.sort("rank", "index", maintain_order=True)


def in_order(rank: NDArray[Any], index: NDArray[Any]) -> bool:
    """Whether rows are in (rank, index) order, none twice."""
    later = (rank[1:] > rank[:-1]) | ((rank[1:] == rank[:-1]) & (index[1:] > index[:-1]))
    return bool(later.all())


def _ints(table: pl.DataFrame, name: str, dtype: type[np.signedinteger]) -> NDArray:  # type: ignore[type-arg]
    column = table[name]
    if column.null_count() == len(column):
        return np.full(len(column), -1, dtype)
    if column.null_count():
        column = column.fill_null(-1)
    return column.to_numpy().astype(dtype, copy=False)


def _codes(table: pl.DataFrame, name: str) -> UInt8Array:
    column = table[name]
    if column.null_count() == len(column):
        return np.full(len(column), ABSENT, np.uint8)
    if column.dtype != node_schema()[name]:
        column = column.cast(pl.String).cast(node_schema()[name])
    return column.to_physical().fill_null(ABSENT).to_numpy().astype(np.uint8, copy=False)


def _group_positions(table: pl.DataFrame, header: TraceHeader, where: str) -> Int32Array:
    given = _ints(table, "group", np.int32)
    if not len(given) or given.max() < 0:
        return given
    ids = np.array([group.id for group in header.groups], np.int64)
    position = np.full(max(int(given.max()), int(ids.max(initial=-1))) + 2, -1, np.int32)
    position[ids] = np.arange(len(ids), dtype=np.int32)
    # Absent groups are -1, the last place, which stays -1.
    result: Int32Array = position[given]
    unknown = (result < 0) & (given >= 0)
    if unknown.any():
        bad = int(unknown.argmax())
        rank, index = table.select("rank", "index").row(bad)
        raise MergeInputError(
            f"a communication names a group of id {given[bad]}, which the header does not list",
            where=f"{where} rank={rank} index={index}",
            hint=_CHECK_HINT,
        )
    return result


def _lags(
    table: pl.DataFrame, near: Int64Array, far: Int64Array, where: str
) -> tuple[Int64Array | None, Int64Array]:
    """Lags of the edges from the same rank (None if all are 0), and of those from others."""
    far_lags = np.zeros(int(far.sum()), np.int64)
    lists = table["lag_ns"]
    if lists.null_count() == len(lists):
        return None, far_lags
    given = lists.is_not_null().to_numpy()
    lengths = list_lengths(lists)
    wrong = given & (lengths != near + far)
    if wrong.any():
        rank, index = table.select("rank", "index").row(int(wrong.argmax()))
        raise MergeInputError(
            "lag_ns and deps differ in length",
            where=f"{where} rank={rank} index={index}",
            hint=_CHECK_HINT,
        )
    values = list_values(lists)
    if far.any():
        # Within a row the lags of deps come before those of xdeps.
        owner = np.repeat(np.arange(len(given)), lengths)
        begin = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        remote = np.arange(len(values)) - begin[owner] >= near[owner]
        far_lags[np.repeat(given, far)] = values[remote]
        values = values[~remote]
    lags = np.zeros(int(near.sum()), np.int64)
    lags[np.repeat(given, near)] = values
    return lags if lags.any() else None, far_lags


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks for people: `0-7, 9`."""
    return format_ranks(sorted(ranks)).replace(",", ", ")


_MOST_LISTED = 1_000_000


def absent_text(present: Iterable[int], world_size: int) -> str:
    """The ranks of a world that are not present, for people: `0-7, 9`."""
    here = sorted(present)
    if world_size <= _MOST_LISTED:
        return ranks_text(set(range(world_size)) - set(here))
    # A broken header may name any size: nothing is done per absent rank.
    gaps = [(low + 1, high - 1) for low, high in pairwise([-1, *here, world_size])]
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in gaps if low <= high]
    return ", ".join(texts[:20]) + (", ..." if len(texts) > 20 else "")


def groups_lacking(present: set[int], header: TraceHeader) -> str:
    """Labels of the groups with ranks that are not present, for people; at most five."""
    labels = group_labels(header.groups)
    groups = [labels[group.id] for group in header.groups if not set(group.ranks) <= present]
    return ", ".join(groups[:5]) + (f" and {len(groups) - 5} more" if len(groups) > 5 else "")
