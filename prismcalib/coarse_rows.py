"""The node table of a contracted trace, from rows of the original one and the new timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.lists import lists_of
from prismcalib.propagation import Timing, critical_arrays, slack
from prismcalib.waiting import waiting_rows
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, Kind, TraceKind
from prismtrace.trace import node_ids, node_schema

__all__ = ["Timeline", "coarse_rows", "collectives", "sequence_numbers"]


@dataclass(frozen=True, eq=False)
class Timeline:
    """A contracted graph and the columns that its propagation gives.

    Attributes:
        graph: of n rows, for its edges and durations.
        kind: of the trace.
        start_ns, end_ns: int64[n].
        synced: bool[n], matched communications.
        slack_ns, critical: int64[n] and bool[n] of a calibrated trace, else empty.
    """

    graph: Graph
    kind: TraceKind
    start_ns: Int64Array
    end_ns: Int64Array
    synced: NDArray[np.bool_]
    slack_ns: Int64Array
    critical: NDArray[np.bool_]

    @classmethod
    def of(cls, graph: Graph, timing: Timing, kind: TraceKind) -> Timeline:
        """With the critical path and the slack of a calibrated trace."""
        late, critical = np.empty(0, np.int64), np.empty(0, np.bool_)
        if kind == TraceKind.CALIBRATED:
            late = slack(graph, timing)
            critical = np.zeros(graph.rows, np.bool_)
            critical[critical_arrays(graph, timing)[0]] = True
        synced = waiting_rows(graph)
        return cls(graph, kind, timing.start_ns, timing.end_ns, synced, late, critical)

    def cut(self, part: slice) -> Timeline:
        """Some whole ranks of it."""
        arrays = {
            name: getattr(self, name)[part]
            for name in ("start_ns", "end_ns", "synced", "slack_ns", "critical")
        }
        return replace(self, graph=self.graph.cut(part), **arrays)


def coarse_rows(
    rows: pl.DataFrame,
    home: Int32Array,
    head: Int32Array,
    timeline: Timeline,
    numbers: pl.DataFrame,
) -> pl.DataFrame:
    """The node table of whole ranks of a contracted trace, in its order.

    Args:
        rows: N rows of the original trace, all columns.
        home: int32[N], the row that each became part of.
        head: int32[n], the original row that says what a row is like.
        timeline: of the n rows.
        numbers: see `sequence_numbers`.
    """
    merged = _merged(rows, home, head)
    rank = merged["rank"].to_numpy()
    first = np.append(True, rank[1:] != rank[:-1]) if len(rank) else np.zeros(0, np.bool_)
    begin = np.flatnonzero(first)
    index = np.arange(len(rank)) - np.repeat(begin, np.diff(np.append(begin, len(rank))))
    table = merged.with_columns(index=pl.Series(index, dtype=pl.Int32))
    ids = table.select(id=node_ids(pl.col("rank"), pl.col("index")))["id"]
    table = table.with_columns(ids, *_edge_columns(timeline.graph, rank, ids.to_numpy()))
    table = _numbered(table, numbers)
    if timeline.kind != TraceKind.BARE:
        start, end = timeline.start_ns, timeline.end_ns
        table = table.with_columns(start_ns=pl.Series(start), dur_ns=pl.Series(end - start))
    if timeline.kind == TraceKind.CALIBRATED:
        table = table.with_columns(*_calibrated_columns(timeline))
    extra = [name for name in table.columns if name not in node_schema()]
    return table.select(*node_schema(), *extra)


def _merged(rows: pl.DataFrame, home: Int32Array, head_rows: Int32Array) -> pl.DataFrame:
    """One row for each head: what it is like, and what the parts have in common."""
    busy = pl.col("dur_ns") if "x_busy_ns" not in rows.columns else pl.col("x_busy_ns")
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    fine = rows.with_columns(
        home=pl.Series(home),
        x_busy_ns=pl.when(local).then(busy.fill_null(pl.col("dur_ns"))),
        x_rows=pl.lit(1, pl.Int32) if "x_rows" not in rows.columns else pl.col("x_rows"),
        x_first_index=pl.col("index")
        if "x_first_index" not in rows.columns
        else pl.col("x_first_index"),
    )
    head = fine[head_rows].drop("home")
    parts = np.bincount(home, minlength=len(head_rows))
    several = parts[home] > 1
    if not several.any():
        return head
    shared = _common(fine.filter(pl.Series(several)))
    whole = pl.DataFrame({"home": np.arange(len(head_rows), dtype=np.int32)}).join(
        shared, on="home", how="left", maintain_order="left"
    )
    many = pl.Series(parts > 1)
    names = [name for name in shared.columns if name != "home"]
    return head.with_columns(
        head[name].zip_with(~many, whole[name].cast(head.schema[name])) for name in names
    )


def _common(parts: pl.DataFrame) -> pl.DataFrame:
    """What rows that became one have in common, by `home`."""
    by_index = pl.col("index").arg_min()
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])

    def same(name: str) -> pl.Expr:
        column = pl.col(name)
        return pl.when(column.n_unique() == 1).then(column.first())

    kind = pl.col("kind").cast(pl.String)
    name = pl.col("name").cast(pl.String)
    first, last = name.first(), name.last()
    size = pl.col("bytes")
    return (
        parts.sort("home", "index", maintain_order=True)
        .group_by("home", maintain_order=True)
        .agg(
            kind=pl.when(kind.n_unique() == 1)
            .then(kind.first())
            .otherwise(pl.lit(Kind.OTHER_COMM.value)),
            name=pl.when(name.n_unique() == 1).then(first).otherwise(first + " ... " + last),
            bytes=pl.when(local.any() | size.is_null().any()).then(None).otherwise(size.sum()),
            dtype=same("dtype"),
            reduce_op=same("reduce_op"),
            transfer_source=pl.col("transfer_source").max(),
            real=pl.col("real").all(),
            mem_bytes=pl.col("mem_bytes").drop_nulls().last(),
            mem_peak_bytes=pl.col("mem_peak_bytes").max(),
            x_busy_ns=pl.when(local.any()).then(pl.col("x_busy_ns").sum()),
            x_rows=pl.col("x_rows").sum(),
            x_first_index=pl.col("x_first_index").get(by_index),
            **_observed(parts.columns),
        )
    )


def _observed(columns: Sequence[str]) -> dict[str, pl.Expr]:
    """Observed times of merged rows reach from the first start to the last end."""
    start, dur = "x_observed_start_ns", "x_observed_dur_ns"
    if not {start, dur} <= set(columns):
        return {}
    end = (pl.col(start) + pl.col(dur)).max()
    return {start: pl.col(start).min(), dur: end - pl.col(start).min()}


def _edge_columns(coarse: Graph, rank: NDArray[Any], ids: Int64Array) -> list[pl.Series]:
    """Columns deps, xdeps and lag_ns."""
    counts = np.diff(coarse.dep_offsets)
    owner = np.repeat(np.arange(coarse.rows), counts)
    dep = coarse.dep_rows.astype(np.int64)
    near = rank[dep] == rank[owner]
    # Within a row edges from other ranks come last, as lag_ns has it.
    order = np.lexsort((dep, ~near, owner))
    near, dep, owner = near[order], dep[order], owner[order]
    lags = np.zeros(len(dep), np.int64) if coarse.dep_lag_ns is None else coarse.dep_lag_ns[order]
    own = np.bincount(owner[near], minlength=coarse.rows)
    far = counts - own
    deps = lists_of(own, owner[near] - dep[near]).cast(pl.List(pl.UInt32)).alias("deps")
    nothing = pl.Series("xdeps", [None], dtype=pl.List(pl.Int64)).new_from_index(0, coarse.rows)
    xdeps = nothing
    if far.any():
        xdeps = lists_of(far, ids[dep[~near]]).zip_with(pl.Series(far > 0), nothing).alias("xdeps")
    lagged = np.zeros(coarse.rows, np.bool_)
    lagged[owner[lags != 0]] = True
    lag = lists_of(counts, lags).zip_with(pl.Series(lagged), nothing).alias("lag_ns")
    return [deps, xdeps, lag]


def sequence_numbers(heads: pl.DataFrame) -> pl.DataFrame:
    """group, seq, new: numbers without the gaps that fused operations leave, alike on all ranks.

    `heads`: rows of the trace that are left, at least their columns kind, group and seq.
    """
    return (
        collectives(heads)
        .sort("group", "seq")
        .with_columns(new=pl.col("seq").min().over("group") + pl.int_range(pl.len()).over("group"))
    )


def collectives(heads: pl.DataFrame) -> pl.DataFrame:
    """group, seq of all communications but send and recv, each once."""
    return heads.filter(pl.col("seq").is_not_null() & ~_P2P).select("group", "seq").unique()


_P2P = pl.col("kind").cast(pl.String).is_in([kind.value for kind in P2P_KINDS])


def _numbered(table: pl.DataFrame, numbers: pl.DataFrame) -> pl.DataFrame:
    found = table.select("group", "seq", p2p=_P2P).join(
        numbers, on=["group", "seq"], how="left", maintain_order="left"
    )
    seq = pl.when(found["p2p"]).then(found["seq"]).otherwise(found["new"])
    return table.with_columns(seq=seq.cast(pl.Int64))


def _calibrated_columns(timeline: Timeline) -> list[pl.Series]:
    rows = len(timeline.synced)
    synced = pl.Series(timeline.synced)
    nothing = pl.Series([None], dtype=pl.Int64).new_from_index(0, rows)
    transfer = timeline.graph.duration_ns
    wait = timeline.end_ns - timeline.start_ns - transfer
    return [
        pl.Series(transfer).zip_with(synced, nothing).alias("transfer_ns"),
        pl.Series(wait).zip_with(synced, nothing).alias("wait_ns"),
        pl.Series("slack_ns", timeline.slack_ns),
        pl.Series("critical", timeline.critical),
    ]
