"""What the whole run waits for: the critical path through all ranks of a calibrated trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.blocks import Layout, is_large
from prismcalib.build import graph_from_trace, require_own_columns, require_rows_of_ranks
from prismcalib.chosen_steps import ChosenSteps, chosen_steps, numbered_as_whole, told
from prismcalib.errors import CoverageError, MergeInputError
from prismcalib.extent import extent_of
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.propagation import Timing, critical_arrays
from prismcalib.rows import ranks_text
from prismcalib.stall import require_members
from prismcalib.waiting import waiting_rows
from prismcalib.wording import merge_first
from prismtrace.group_names import group_labels
from prismtrace.schema import LOCAL_KINDS, TraceHeader, TraceKind
from prismtrace.trace import Trace, open_trace

__all__ = [
    "CriticalPath",
    "calibrated_trace",
    "critical_path",
    "cut_path",
    "require_partners",
    "stored_path",
]

_SOME_STEPS = 3

ShareColumn = Literal["kind", "rank", "group", "phase", "step"]
"""What shares of a path can be told by."""


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """One longest path, cut into segments.

    A segment is what one row contributes: its computation or transfer, and the idle gap
    between the end of the segment before and its own start.  Lead-in, gaps, computation,
    transfers and unmatched communication add up to the length exactly.

    Attributes:
        length_ns: last end minus first start over all ranks.
        lead_in_ns: from the first start of any rank to the start of the path.
        compute_ns: computation and copies on the path.
        inner_idle_ns: the part of compute_ns in which the device did nothing: gaps between the
            kernels of a span, where the trace tells (`x_busy_ns`).
        transfer_ns: communication on the path, without waiting.
        unmatched_ns: communication whose partners were not recorded, waiting included.
        gap_ns: idle time on the path (launch gaps, host delays).
        hops: how often the path changes ranks.
        segments: id, rank, index, stream, kind, name, group (its label), seq, step, phase,
            transfer_source, start_ns, busy_ns, inner_idle_ns (part of busy_ns), gap_ns (before
            the segment); in time order.
        looked_at: which steps of the trace it is the path of; None: of all that was given.
    """

    length_ns: int
    lead_in_ns: int
    compute_ns: int
    inner_idle_ns: int
    transfer_ns: int
    unmatched_ns: int
    gap_ns: int
    hops: int
    segments: pl.DataFrame
    looked_at: ChosenSteps | None = None

    def shares(self, column: ShareColumn) -> pl.DataFrame:
        """The column, segments, busy_ns, inner_idle_ns, gap_ns, share of the length; largest first."""
        return (
            self.segments.group_by(column, maintain_order=True)
            .agg(pl.len().alias("segments"), pl.col("busy_ns", "inner_idle_ns", "gap_ns").sum())
            .with_columns(
                share=(pl.col("busy_ns") + pl.col("gap_ns")) / max(self.length_ns, 1),
            )
            .sort("share", descending=True, maintain_order=True)
        )

    def longest(self, limit: int) -> pl.DataFrame:
        """The segments that take longest, gaps included."""
        total = pl.col("busy_ns") + pl.col("gap_ns")
        return self.segments.sort(total, descending=True, maintain_order=True).head(limit)

    def start_share(self) -> tuple[float, tuple[int, int]] | None:
        """Share of the path up to the end of the first step, with the job's start; later steps.

        None with fewer than three steps: then the first is much of the run anyway.
        """
        shares = self.shares("step")
        steps = sorted(shares["step"].drop_nulls().to_list())
        if len(steps) < _SOME_STEPS:
            return None
        at_start = pl.col("step").is_null() | (pl.col("step") == steps[0])
        return float(shares.filter(at_start)["share"].sum()), (steps[1], steps[-1])

    def as_dict(self, limit: int = 20) -> dict[str, Any]:
        """The path as JSON values, with the `limit` longest segments."""
        columns: tuple[ShareColumn, ...] = ("kind", "rank", "group", "phase", "step")
        return {
            **told(self.looked_at),
            "length_ns": self.length_ns,
            "lead_in_ns": self.lead_in_ns,
            "compute_ns": self.compute_ns,
            "inner_idle_ns": self.inner_idle_ns,
            "transfer_ns": self.transfer_ns,
            "unmatched_ns": self.unmatched_ns,
            "gap_ns": self.gap_ns,
            "hops": self.hops,
            "segments": self.segments.height,
            "shares": {column: self.shares(column).to_dicts() for column in columns},
            "longest": self.longest(limit).to_dicts(),
        }


def critical_path(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    steps: str = "auto",
) -> CriticalPath:
    """The critical path of a calibrated trace, `source`, in the steps chosen.

    Args:
        source: the trace.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: the trace is not calibrated.
        CoverageError, MissingMemberError: it lacks ranks that others communicate with.
        StepError: steps that are not in it.
    """
    with chosen_steps(calibrated_trace(source), steps) as (trace, looked_at):
        return replace(_path(trace), looked_at=looked_at)


def _path(trace: Trace) -> CriticalPath:
    if is_large(trace):
        return _marked_path(trace)
    return stored_path(*graph_from_trace(trace), trace.header)


def _marked_path(trace: Trace) -> CriticalPath:
    """The same path from the rows that `merge` marked, without holding the trace."""
    from prismcalib.trail import marked_path  # cuts the path with this module's cut_path

    layout = Layout.of(trace)
    extent = extent_of(trace, layout)
    require_rows_of_ranks(set(extent.ranks.tolist()), trace)
    require_partners(trace)
    return marked_path(layout, extent)


def require_partners(trace: Trace) -> None:
    """Refuse a trace of which ranks were cut out, but not their partners, where no graph tells.

    Raises:
        CoverageError: a group has ranks that are there and ranks that are not.
    """
    header = trace.header
    present = {*header.ranks, *(header.symmetry or ())}
    if len(present) == header.world_size:
        return
    labels = group_labels(header.groups)
    used = trace.nodes.select(pl.col("group").unique()).collect(engine="streaming")["group"]
    for group in header.groups:
        if group.id not in used:
            continue
        absent = set(group.ranks) - present
        if absent and len(absent) < len(group.ranks):
            raise CoverageError(
                f"ranks {ranks_text(absent)} of group {labels[group.id]} are not in the trace, and "
                "its other ranks wait for them",
                where=", ".join(str(path) for path in trace.paths[:3]) or "trace",
                hint="ask about the whole trace: what the others wait for is in all ranks",
            )


def calibrated_trace(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Trace:
    """Open the trace; refuse one that has not been merged.

    Raises:
        MergeInputError: the trace is not calibrated, or a column that the toolkit adds holds text.
    """
    trace = source if isinstance(source, Trace) else open_trace(source)
    if trace.header.kind != TraceKind.CALIBRATED:
        raise MergeInputError(
            f"a {trace.header.kind} trace has no common timeline yet",
            where=", ".join(str(path) for path in trace.paths) or None,
            hint=merge_first(trace.header.kind),
        )
    require_own_columns(trace)
    return trace


def _stored_timing(graph: Graph, rows: pl.DataFrame) -> Timing:
    """The timing that `merge` wrote; its order of completion is not stored and left empty."""
    start = rows["start_ns"].to_numpy()
    return Timing(
        start_ns=start,
        end_ns=start + rows["dur_ns"].to_numpy(),
        duration_ns=graph.duration_ns,
        order=np.empty(0, np.int32),
    )


def stored_path(graph: Graph, rows: pl.DataFrame, header: TraceHeader) -> CriticalPath:
    """The critical path of the timing that a calibrated trace holds.

    Raises:
        MissingMemberError: it lacks ranks that others communicate with.
    """
    require_members(graph)
    timing = _stored_timing(graph, rows)
    reached, left = critical_arrays(graph, timing)
    return cut_path(
        rows[left],
        header,
        reached_start_ns=timing.start_ns[reached],
        left_end_ns=timing.end_ns[left],
        transfers=waiting_rows(graph)[left],
        reached_rank=rows["rank"].to_numpy()[reached],
        first_start_ns=int(timing.start_ns.min()),
        length_ns=timing.makespan_ns,
    )


def cut_path(
    rows: pl.DataFrame,
    header: TraceHeader,
    *,
    reached_start_ns: Int64Array,
    left_end_ns: Int64Array,
    transfers: NDArray[np.bool_],
    reached_rank: Int32Array,
    first_start_ns: int,
    length_ns: int,
) -> CriticalPath:
    """The path of k steps as segments.

    Args:
        rows: of the node table, the k rows by which the path leaves.
        header: of the trace.
        reached_start_ns: int64[k], when the path reaches each step.
        left_end_ns: int64[k], when it leaves.
        transfers: bool[k], whether the row is a matched communication.
        reached_rank: int32[k], the rank of the row that the path reaches.
        first_start_ns, length_ns: first start and length of the whole graph.
    """
    busy = left_end_ns - reached_start_ns
    gap = np.concatenate([[0], reached_start_ns[1:] - left_end_ns[:-1]])
    segments = _describe(rows, header, busy).with_columns(
        start_ns=pl.Series(reached_start_ns), busy_ns=pl.Series(busy), gap_ns=pl.Series(gap)
    )
    computes = rows["kind"].cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS]).to_numpy()
    places = np.stack([reached_rank, rows["rank"].to_numpy()], axis=1).ravel()
    return CriticalPath(
        length_ns=length_ns,
        lead_in_ns=int(reached_start_ns[0]) - first_start_ns,
        compute_ns=int(busy[computes].sum()),
        inner_idle_ns=int(segments["inner_idle_ns"].sum()),
        transfer_ns=int(busy[transfers].sum()),
        unmatched_ns=int(busy[~computes & ~transfers].sum()),
        gap_ns=int(gap.sum()),
        hops=int((places[1:] != places[:-1]).sum()),
        segments=segments,
    )


def inner_idle(columns: Sequence[str]) -> pl.Expr:
    """How long the device did nothing within a span; 0 where the trace does not tell."""
    if "x_busy_ns" not in columns:
        return pl.lit(0, dtype=pl.Int64)
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    idle = pl.when(local).then(pl.col("dur_ns") - pl.col("x_busy_ns")).otherwise(0)
    return idle.fill_null(0).clip(lower_bound=0).cast(pl.Int64)


def _describe(rows: pl.DataFrame, header: TraceHeader, busy_ns: Int64Array) -> pl.DataFrame:
    """What the rows are called, with the names of their groups.

    Where `busy_ns` is not the duration in the trace (what-if), idle time inside is scaled.
    """
    names = group_labels(header.groups)
    columns = ["id", "rank", "index", "stream", "kind", "name", "group", "seq", "step", "phase"]
    idle, busy = inner_idle(rows.columns), pl.Series(busy_ns)
    scaled = (idle * (busy / pl.col("dur_ns").clip(lower_bound=1))).round().cast(pl.Int64)
    return (
        numbered_as_whole(rows)
        .select(
            *columns,
            "transfer_source",
            inner_idle_ns=pl.when(busy == pl.col("dur_ns")).then(idle).otherwise(scaled),
        )
        .with_columns(
            pl.col("kind", "name", "phase", "transfer_source").cast(pl.String),
            pl.col("group").replace_strict(names, default=None, return_dtype=pl.String),
        )
    )
