"""Traces with fewer rows: exact contraction, or one computation and one communication a unit.

    exact        rows of one kind and stream that follow each other, with nothing from elsewhere
                 in between, become one.  Every row that remains keeps its times.
    microbatch   operations of one group, one after the other within a microbatch (a tensor group
                 between two pipeline boundaries), become one as well: each rank computes, then
                 the group meets once.  All times stay the same as long as ranks arrive as they
                 did; `CoarsenReport` states how far off they may be otherwise.

Rows are merged only within a step, microbatch, model chunk and phase.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.build import graph_from_trace
from prismcalib.contraction import Net, contract, net_of
from prismcalib.errors import CoarsenError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.lists import lists_of
from prismcalib.propagation import Timing, critical_arrays, propagate, propagate_batch, slack
from prismcalib.waiting import waiting_rows
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, Kind, TraceHeader, TraceKind
from prismtrace.trace import Trace, node_ids, node_schema, open_trace, write_nodes

__all__ = ["Coarse", "CoarsenReport", "Grain", "coarsen"]

Grain = Literal["exact", "microbatch"]

_PLACE = ("rank", "step", "microbatch", "chunk", "phase")
_PROBES = 4
_SLOWER = 1.1


@dataclass(frozen=True, kw_only=True)
class CoarsenReport:
    """What `coarsen` did; times in ns.

    Attributes:
        grain: exact or microbatch.
        rows_before, rows_after; deps_before, deps_after; instances_before, instances_after:
            sizes.
        largest_error_ns: largest difference of the end of any row to before.
        length_error_ns: difference of the length of the whole timeline.
        uneven_ns: largest difference between ranks in the computation that one operation was
            made to follow: an end is off by so much at most, for every such operation, when
            ranks arrive otherwise than they did.
        probed_error: largest relative difference in length when the computation of one rank is
            a tenth slower, tried for some ranks; None if nothing was tried.
    """

    grain: str
    rows_before: int
    rows_after: int
    deps_before: int
    deps_after: int
    instances_before: int
    instances_after: int
    largest_error_ns: int = 0
    length_error_ns: int = 0
    uneven_ns: int = 0
    probed_error: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Coarse:
    """A trace made coarser, and what that did."""

    header: TraceHeader
    nodes: pl.DataFrame
    report: CoarsenReport

    @property
    def trace(self) -> Trace:
        """The result as a trace."""
        return Trace(header=self.header, nodes=self.nodes.lazy())

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as one Parquet file.

        Raises:
            OutputError: the file cannot be written.
        """
        write_nodes(self.header, self.nodes.lazy(), path)


def coarsen(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    grain: Grain = "exact",
) -> Coarse:
    """Merge rows of a trace that need not be told apart.

    Merged rows last from the start of the first to the end of the last; `x_busy_ns` is the part
    of it that was spent in rows, `x_rows` their number, `x_first_index` the index of the first
    in the original trace.  Other `x_` columns are those of the first row.

    Args:
        source: a calibrated trace; with `exact` also a recorded one, or a bare graph.
        grain: see the module.

    Raises:
        CoarsenError: a slice, or a trace without a common timeline where one is needed.
        MergeInputError: rows of the trace contradict each other.
    """
    trace = source if isinstance(source, Trace) else open_trace(source)
    _require_kind(trace, grain)
    graph, rows = graph_from_trace(trace)
    start = rows["start_ns"].fill_null(0).to_numpy()
    end = start + rows["dur_ns"].fill_null(0).to_numpy()
    fine = _net(graph, rows, start, end)
    group = _fusable(graph, rows) if grain == "microbatch" else None
    net = contract(fine, group=group)
    coarse = _graph(net, graph)
    timing = _timing(coarse, net, trace.header.kind)
    report = _report(grain, graph, coarse, net, timing, rows)
    nodes = _nodes(rows, net, coarse, timing, trace.header)
    header = trace.header.model_copy(
        update={"extra": {**trace.header.extra, "coarsen": report.as_dict()}}
    )
    return Coarse(header, nodes, report)


def _require_kind(trace: Trace, grain: Grain) -> None:
    where = ", ".join(str(path) for path in trace.paths) or None
    kind = trace.header.kind
    if kind == TraceKind.SLICE:
        raise CoarsenError(
            "a slice must keep its rows: merging finds them again by their index",
            where=where,
            hint="merge the slices first and make the result coarser",
        )
    if grain == "microbatch" and kind != TraceKind.CALIBRATED:
        raise CoarsenError(
            f"whom a rank waited for cannot be told from a {kind} trace",
            where=where,
            hint="run `prismcalib merge` on it first, or use --grain exact",
        )


# --- contraction ------------------------------------------------------------------------


def _net(graph: Graph, rows: pl.DataFrame, start: Int64Array, end: Int64Array) -> Net:
    kind = rows["kind"].cast(pl.String)
    local = kind.is_in([member.value for member in LOCAL_KINDS]) & rows["batch"].is_null()
    keys = rows.select(_PLACE)
    numbered = keys.unique(maintain_order=True).with_row_index("place")
    place = keys.join(numbered, on=_PLACE, how="left", maintain_order="left", nulls_equal=True)[
        "place"
    ]
    return net_of(
        graph,
        start,
        end,
        mergeable=local.to_numpy() & ~waiting_rows(graph),
        place=place.cast(pl.Int32).to_numpy(),
        sort=rows["kind"].to_physical().cast(pl.Int32).to_numpy(),
        lane=rows["stream"].cast(pl.Int32).to_numpy(),
    )


def _fusable(graph: Graph, rows: pl.DataFrame) -> Int32Array:
    """int32[G], the process group of instances that may be fused with others; -1: it may not."""
    kind = rows["kind"].cast(pl.String)
    alone = kind.is_in([member.value for member in P2P_KINDS]) | rows["batch"].is_not_null()
    member = graph.instance >= 0
    group = np.full(graph.instances, -1, np.int32)
    group[graph.instance[member]] = rows["group"].fill_null(-1).to_numpy()[member]
    group[graph.instance[member & alone.to_numpy()]] = -1
    return group


def _graph(net: Net, fine: Graph) -> Graph:
    """The contracted graph; rows without dependencies are released when they started."""
    counts = np.bincount(net.owner, minlength=len(net))
    used = np.zeros(fine.instances, np.bool_)
    used[net.instance[net.instance >= 0]] = True
    number = np.append(np.cumsum(used) - 1, [-1]).astype(np.int32)  # index -1: no instance
    waits: dict[str, Any] = {}
    if fine.wait_offsets is not None and fine.wait_rows is not None:
        owner = net.home[np.repeat(np.arange(fine.rows), np.diff(fine.wait_offsets))]
        order = np.argsort(owner, kind="stable")
        waits["wait_rows"] = net.home[fine.wait_rows][order]
        waits["wait_offsets"] = np.append([0], np.cumsum(np.bincount(owner, minlength=len(net))))
    first = int(net.start.min()) if len(net) else 0
    return Graph(
        duration_ns=net.duration,
        dep_offsets=np.append([0], np.cumsum(counts)),
        dep_rows=net.dep.astype(np.int32),
        dep_lag_ns=net.lag if net.lag.any() else None,
        instance=number[net.instance],
        instance_size=fine.instance_size[used],
        release_ns=np.where(counts == 0, net.start, first),
        **waits,
    )


def _timing(coarse: Graph, net: Net, kind: TraceKind) -> Timing:
    """Propagated times of a calibrated trace; of others those of the first and last parts."""
    if kind == TraceKind.CALIBRATED:
        return propagate(coarse)
    return Timing(
        start_ns=net.start,
        end_ns=net.end,
        duration_ns=net.duration,
        order=np.empty(0, np.int32),
    )


def _report(
    grain: Grain, fine: Graph, coarse: Graph, net: Net, timing: Timing, rows: pl.DataFrame
) -> CoarsenReport:
    length = int(net.end.max() - net.start.min()) if len(net) else 0
    probed = None
    if grain == "microbatch" and coarse.instances < fine.instances:
        probed = _probe(fine, coarse, net, rows)
    return CoarsenReport(
        grain=grain,
        rows_before=fine.rows,
        rows_after=coarse.rows,
        deps_before=len(fine.dep_rows),
        deps_after=len(coarse.dep_rows),
        instances_before=fine.instances,
        instances_after=coarse.instances,
        largest_error_ns=int(np.abs(timing.end_ns - net.end).max(initial=0)),
        length_error_ns=abs(timing.makespan_ns - length),
        uneven_ns=net.uneven_ns,
        probed_error=probed,
    )


def _probe(fine: Graph, coarse: Graph, net: Net, rows: pl.DataFrame) -> float:
    """How far lengths are apart when one rank's computation is slower, in both graphs alike."""
    rank = rows["rank"].to_numpy()
    ranks = np.unique(rank)
    tried = ranks[np.linspace(0, len(ranks) - 1, min(_PROBES, len(ranks))).astype(np.int64)]
    lengths = []
    for graph, of_rank in ((fine, rank), (coarse, rank[net.position])):
        local = ~waiting_rows(graph)
        slower = local[:, None] & (of_rank[:, None] == tried)
        duration = np.where(
            slower, graph.duration_ns[:, None] * _SLOWER, graph.duration_ns[:, None]
        )
        lengths.append(propagate_batch(graph, np.rint(duration).astype(np.int64)).makespan_ns)
    before, after = lengths
    return float((np.abs(after - before) / np.maximum(before, 1)).max())


# --- table ------------------------------------------------------------------------------


def _nodes(
    rows: pl.DataFrame, net: Net, coarse: Graph, timing: Timing, header: TraceHeader
) -> pl.DataFrame:
    """The node table of the contracted graph, in its order."""
    merged = _merged(rows, net)
    rank = merged["rank"].to_numpy()
    first = np.append(True, rank[1:] != rank[:-1]) if len(rank) else np.zeros(0, np.bool_)
    begin = np.flatnonzero(first)
    index = np.arange(len(rank)) - np.repeat(begin, np.diff(np.append(begin, len(rank))))
    table = merged.with_columns(index=pl.Series(index, dtype=pl.Int32))
    ids = table.select(id=node_ids(pl.col("rank"), pl.col("index")))["id"]
    table = table.with_columns(ids, *_edge_columns(coarse, rank, ids.to_numpy()))
    table = _numbered(table)
    if header.kind != TraceKind.BARE:
        table = table.with_columns(
            start_ns=pl.Series(timing.start_ns), dur_ns=pl.Series(timing.end_ns - timing.start_ns)
        )
    if header.kind == TraceKind.CALIBRATED:
        table = table.with_columns(*_calibrated_columns(coarse, timing))
    extra = [name for name in table.columns if name not in node_schema()]
    return table.select(*node_schema(), *extra)


def _merged(rows: pl.DataFrame, net: Net) -> pl.DataFrame:
    """One row for each of the net: that of its head, and what the parts have in common."""
    busy = pl.col("dur_ns") if "x_busy_ns" not in rows.columns else pl.col("x_busy_ns")
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    fine = rows.with_columns(
        home=pl.Series(net.home),
        x_busy_ns=pl.when(local).then(busy.fill_null(pl.col("dur_ns"))),
        x_rows=pl.lit(1, pl.Int32) if "x_rows" not in rows.columns else pl.col("x_rows"),
        x_first_index=pl.col("index")
        if "x_first_index" not in rows.columns
        else pl.col("x_first_index"),
    )
    head = fine[net.head].drop("home")
    parts = np.bincount(net.home, minlength=len(net))
    several = parts[net.home] > 1
    if not several.any():
        return head
    shared = _common(fine.filter(pl.Series(several)))
    whole = pl.DataFrame({"home": np.arange(len(net), dtype=np.int32)}).join(
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


def _numbered(table: pl.DataFrame) -> pl.DataFrame:
    """Sequence numbers without the gaps that fused operations leave, the same on all ranks."""
    p2p = pl.col("kind").cast(pl.String).is_in([kind.value for kind in P2P_KINDS])
    numbered = (
        table.filter(pl.col("seq").is_not_null() & ~p2p)
        .select("group", "seq")
        .unique()
        .sort("group", "seq")
        .with_columns(new=pl.col("seq").min().over("group") + pl.int_range(pl.len()).over("group"))
    )
    found = table.select("group", "seq", p2p=p2p).join(
        numbered, on=["group", "seq"], how="left", maintain_order="left"
    )
    seq = pl.when(found["p2p"]).then(found["seq"]).otherwise(found["new"])
    return table.with_columns(seq=seq.cast(pl.Int64))


def _calibrated_columns(coarse: Graph, timing: Timing) -> list[pl.Series]:
    synced = pl.Series(waiting_rows(coarse))
    nothing = pl.Series([None], dtype=pl.Int64).new_from_index(0, coarse.rows)
    critical = np.zeros(coarse.rows, np.bool_)
    critical[critical_arrays(coarse, timing)[0]] = True
    return [
        pl.Series(coarse.duration_ns).zip_with(synced, nothing).alias("transfer_ns"),
        pl.Series(timing.wait_ns).zip_with(synced, nothing).alias("wait_ns"),
        pl.Series("slack_ns", slack(coarse, timing)),
        pl.Series("critical", critical),
    ]
