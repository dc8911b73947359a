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
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.blocks import Layout, is_large
from prismcalib.build import graph_from_trace, require_table_memory
from prismcalib.coarse_rows import Timeline, coarse_rows, sequence_numbers
from prismcalib.contraction import contract
from prismcalib.errors import CoarsenError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.net import Net, net_of
from prismcalib.propagation import Timing, propagate, propagate_batch
from prismcalib.waiting import waiting_rows
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, TraceHeader, TraceKind
from prismtrace.trace import Trace, open_trace, write_nodes

__all__ = ["Coarse", "CoarsenReport", "Grain", "coarsen"]

Grain = Literal["exact", "microbatch"]
"""What becomes one row.

`exact`: rows of one kind and stream that follow each other, with nothing from elsewhere in between;
every row that remains keeps its times. `microbatch`: operations of one group, one after the other
within a microbatch, as well; times stay as long as ranks arrive as they did.
"""

_PLACE = ("rank", "step", "microbatch", "chunk", "phase")
_PROBES = 4
# Durations of one propagated batch.
_MOST_CELLS = 2**26
_SLOWER = 1.1
# Measured at the peak, all rows in memory.
_ROW_BYTES = 1400


@dataclass(frozen=True, kw_only=True)
class CoarsenReport:
    """What `coarsen` did; times in ns.

    Attributes:
        grain: exact or microbatch.
        rows_before, rows_after: rows of the trace.
        deps_before, deps_after: its dependencies.
        instances_before, instances_after: its sync instances.
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
    """A trace made coarser, and what that did.

    Attributes:
        header: of the trace.
        table: its rows, read when they are collected.
        report: what was done.
    """

    header: TraceHeader
    table: pl.LazyFrame
    report: CoarsenReport

    @cached_property
    def nodes(self) -> pl.DataFrame:
        """All rows in memory."""
        return self.table.collect()

    @property
    def trace(self) -> Trace:
        """The result as a trace."""
        return Trace(header=self.header, nodes=self.table)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as one Parquet file.

        Raises:
            OutputError: the file cannot be written.
        """
        write_nodes(self.header, self.table, path)


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
        grain: `exact` or `microbatch`.

    Raises:
        CoarsenError: a slice, or a trace without a common timeline where one is needed.
        MergeInputError: rows of the trace contradict each other.
    """
    trace = source if isinstance(source, Trace) else open_trace(source)
    _require_kind(trace, grain)
    if trace.header.kind == TraceKind.CALIBRATED and is_large(trace):
        from prismcalib.block_coarsening import coarsen_by_blocks

        done = coarsen_by_blocks(Layout.of(trace), grain)
        if done is not None:
            return done
    require_table_memory(trace, _ROW_BYTES)
    graph, rows = graph_from_trace(trace)
    start = rows["start_ns"].fill_null(0).to_numpy()
    end = start + rows["dur_ns"].fill_null(0).to_numpy()
    fine = fine_net(graph, rows, start, end, waiting_rows(graph))
    group = fusable(graph, rows) if grain == "microbatch" else None
    net = contract(fine, group=group)
    coarse = coarse_graph(net, graph)
    timing = _timing(coarse, net, trace.header.kind)
    probed = probe(graph, coarse, net, rows["rank"].to_numpy()) if grain != "exact" else None
    report = coarsen_report(grain, Sizes.of(graph), coarse, net, timing, probed)
    timeline = Timeline.of(coarse, timing, trace.header.kind)
    table = coarse_rows(rows, net.home, net.head, timeline, sequence_numbers(rows[net.head]))
    return Coarse(noted(trace.header, report), table.lazy(), report)


def noted(header: TraceHeader, report: CoarsenReport) -> TraceHeader:
    """The header with what was done to the trace."""
    return header.model_copy(update={"extra": {**header.extra, "coarsen": report.as_dict()}})


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


def fine_net(
    graph: Graph,
    rows: pl.DataFrame,
    start: Int64Array,
    end: Int64Array,
    waiting: NDArray[np.bool_],
) -> Net:
    """Rows of whole ranks as they are; `waiting` bool[n]: matched communications."""
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
        mergeable=local.to_numpy() & ~waiting,
        place=place.cast(pl.Int32).to_numpy(),
        sort=rows["kind"].to_physical().cast(pl.Int32).to_numpy(),
        lane=rows["stream"].cast(pl.Int32).to_numpy(),
    )


def fusable(graph: Graph, rows: pl.DataFrame) -> Int32Array:
    """int32[G], the process group of instances that may be fused with others; -1: it may not."""
    kind = rows["kind"].cast(pl.String)
    alone = kind.is_in([member.value for member in P2P_KINDS]) | rows["batch"].is_not_null()
    member = graph.instance >= 0
    group = np.full(graph.instances, -1, np.int32)
    group[graph.instance[member]] = rows["group"].fill_null(-1).to_numpy()[member]
    group[graph.instance[member & alone.to_numpy()]] = -1
    return group


def coarse_graph(net: Net, fine: Graph) -> Graph:
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


class Sizes(NamedTuple):
    """Of a graph."""

    rows: int
    deps: int
    instances: int

    @classmethod
    def of(cls, graph: Graph) -> Sizes:
        """Count."""
        return cls(graph.rows, len(graph.dep_rows), graph.instances)


def coarsen_report(
    grain: Grain, fine: Sizes, coarse: Graph, net: Net, timing: Timing, probed: float | None
) -> CoarsenReport:
    """Sizes and errors; `probed`: see `probe`."""
    after = Sizes.of(coarse)
    length = int(net.end.max() - net.start.min()) if len(net) else 0
    return CoarsenReport(
        grain=grain,
        rows_before=fine.rows,
        rows_after=after.rows,
        deps_before=fine.deps,
        deps_after=after.deps,
        instances_before=fine.instances,
        instances_after=after.instances,
        largest_error_ns=int(np.abs(timing.end_ns - net.end).max(initial=0)),
        length_error_ns=abs(timing.makespan_ns - length),
        uneven_ns=net.uneven_ns,
        probed_error=probed,
    )


def probe(fine: Graph, coarse: Graph, net: Net, rank: Int32Array) -> float | None:
    """How far lengths are apart when one rank's computation is slower, in both graphs alike.

    None if no operations were fused. `rank`: int32[n] of the fine graph.
    """
    if coarse.instances == fine.instances:
        return None
    ranks = np.unique(rank)
    tried = ranks[np.linspace(0, len(ranks) - 1, min(_PROBES, len(ranks))).astype(np.int64)]
    lengths = []
    for graph, of_rank in ((fine, rank), (coarse, rank[net.position])):
        local = ~waiting_rows(graph)
        order = propagate(graph).order
        width = max(1, _MOST_CELLS // max(graph.rows, 1))
        found = []
        for some in (tried[first : first + width] for first in range(0, len(tried), width)):
            slower = local[:, None] & (of_rank[:, None] == some)
            duration = np.repeat(graph.duration_ns[:, None], len(some), axis=1)
            duration[slower] = np.rint(duration[slower] * _SLOWER)
            found.append(propagate_batch(graph, duration, order=order).makespan_ns)
        lengths.append(np.concatenate(found))
    before, after = lengths
    return float((np.abs(after - before) / np.maximum(before, 1)).max())
