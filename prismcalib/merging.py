"""A recorded run becomes one consistent timeline across all ranks (slices: `prismcalib.slices`).

    observed times  --clocks-->  aligned times  --split-->  durations, lags  --propagate-->  times

Every step explains itself in the report: clock offsets and what they leave unexplained, idle
gaps that were kept as lags, observations that contradict the graph and were clamped.  Without
clamps propagation gives back the aligned times exactly; a clamp can only make rows later.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
import polars as pl

from prismcalib.alignment import Alignment, align_clocks
from prismcalib.build import (
    lag_column,
    require_all_members,
    require_all_ranks,
    require_table_memory,
    sorted_rows,
    structure_graph,
)
from prismcalib.calibrated import write_beside
from prismcalib.errors import CalibError, MergeInputError
from prismcalib.graph import Graph, Int64Array
from prismcalib.measuring import Clocks
from prismcalib.merge_result import Amount, MergeReport, MergeResult
from prismcalib.paths import inner_idle
from prismcalib.propagation import Engine, Timing, critical_steps, propagate, slack
from prismcalib.rows import FARTHEST_NS
from prismcalib.slices import SliceOptions, merge_slices
from prismcalib.waiting import WaitRules, apply_wait_rules, ready_times, waiting_rows
from prismtrace.console import counted
from prismtrace.schema import LOCAL_KINDS, TraceHeader, TraceKind, TransferSource
from prismtrace.trace import (
    Trace,
    node_schema,
    open_trace,
    read_header,
    trace_files,
)

__all__ = ["DEFAULT_MAX_RESIDUAL_NS", "merge"]

DEFAULT_MAX_RESIDUAL_NS = 10_000_000
"""Largest median spread of the ends of one operation that `merge` accepts.

Measured: below 0.05 ms between GPUs of a host; about 3 ms between gloo processes that share
two cores, since a process notices the end only when it is scheduled.  Whether the picture is
*consistent* is checked much more sharply, see `prismcalib.alignment`."""

# No training step lasts a day; a span of one is a broken clock or a unit mix-up.
_LONGEST_NS = 24 * 3600 * 10**9

# Measured at the peak of merging a recorded run.
_ROW_BYTES = 750

_OBSERVED = {"start_ns": "x_observed_start_ns", "dur_ns": "x_observed_dur_ns"}


@dataclass(frozen=True, eq=False)
class _Split:
    """Durations and lags that explain aligned times."""

    graph: Graph
    lags: Int64Array
    overlaps: Int64Array
    early_ends: Int64Array


def merge(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    engine: Engine = "auto",
    clock: Literal["align", "keep"] = "align",
    max_residual_ns: int = DEFAULT_MAX_RESIDUAL_NS,
    rules: WaitRules | None = None,
    slices: SliceOptions | None = None,
    warmup: int | None = None,
    verify: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> MergeResult:
    """Put all ranks of a job on one timeline and split waiting from transfer.

    Args:
        source: a recorded trace, or a calibrated one made from it, whose observed times are
            used again; or the files of a slicing campaign. Slices are read from their files
            while the result is written, several at once: write those that are in memory with
            `prismtrace.write` first. (`SliceOptions` takes a bare graph or base in memory.)
        engine: see `prismcalib.propagate`.
        clock: `align` estimates offsets from the ends of matched operations, `keep` trusts
            the clocks as they are.
        max_residual_ns: refuse data whose ends disagree more than this (median).
        rules: who waits for whom; by default everybody for everybody.
        slices: what to do with slices; without, the defaults of `SliceOptions`.
        warmup: first steps that are not typical: kept, and left out by analyses. None: not said;
            those of slices, and of runs that `prismreplay` recorded, leave out one.
        verify: propagate with the other engines as well and compare.
        advance: called with 1 for every slice file that is done.

    Raises:
        MergeInputError: inputs that do not belong together, rows without times, or times that
            cannot be.
        StructureError: slices differ from the bare graph or from each other.
        CoverageError: ranks of the job are absent.
        MissingMemberError: an operation lacks members.
        ClockError: clocks cannot be related, or the result would contradict itself.
        CycleError: operations wait for each other in a circle.
    """
    rules = rules or WaitRules()
    files = _slice_files(source)
    if files is not None:
        options = slices or SliceOptions()
        calibrated, campaign_report = merge_slices(
            files,
            options if warmup is None else replace(options, warmup=warmup),
            engine=engine,
            clocks=Clocks(clock == "keep", max_residual_ns),
            rules=rules,
            check=_verify if verify else None,
            advance=advance,
        )
        return MergeResult(
            calibrated.header, calibrated.table(), campaign_report, calibrated.write_columns
        )
    if slices is not None and (slices.base is not None or slices.bare is not None):
        raise MergeInputError(
            "a bare graph or an earlier result goes with slices, but this is a whole run",
            hint="leave out --bare and --base",
        )
    sources = () if slices is None else (slices.ranks_per_host, slices.comm_table)
    if any(source is not None for source in sources):
        raise MergeInputError(
            "every transfer of a whole run was measured: it needs no other source",
            hint="leave out --comm-table and --ranks-per-host",
        )
    trace = source if isinstance(source, Trace) else open_trace(source)
    rows = _observed(trace)
    require_all_ranks(rows, trace.header)
    graph = structure_graph(rows, trace.header)
    require_all_members(graph, rows, trace.header)
    _require_more_steps(warmup, trace)
    _require_matches(graph, rows, trace)

    alignment = align_clocks(
        graph, rows, trace.header, keep=clock == "keep", max_residual_ns=max_residual_ns
    )
    split = _split(apply_wait_rules(graph, rows, trace.header, rules), alignment)
    timing = propagate(split.graph, engine)
    late = slack(split.graph, timing, engine)
    if verify:
        _verify(split.graph, timing, late)

    steps = critical_steps(split.graph, timing)
    report = _report(rows, graph.instances, split, timing, steps, alignment)
    header = rules.note_in(_header(trace.header, report, alignment, warmup))
    nodes = _nodes(rows, split, timing, late, steps, alignment.origin_ns)
    return MergeResult(
        header,
        nodes.lazy(),
        report,
        partial(write_beside, header, nodes, trace),
        merged_again=trace.header.kind == TraceKind.CALIBRATED,
    )


def _unmatched(rows: pl.DataFrame) -> pl.DataFrame:
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    return rows.filter(~local & pl.col("seq").is_null())


def _require_matches(graph: Graph, rows: pl.DataFrame, trace: Trace) -> None:
    """Several ranks that communicate, and nothing that relates them: no common timeline.

    Raises:
        MergeInputError: no communication of the trace is matched.
    """
    lost = _unmatched(rows).height
    if rows["rank"].n_unique() > 1 and not graph.instances and lost:
        raise MergeInputError(
            f"none of the {lost} communications is matched with its partners: nothing says who "
            "waited for whom",
            where=", ".join(str(path) for path in trace.paths) or None,
            hint="the trace can be looked at (info, export) but has no common timeline; "
            "`prismtrace convert --unmatched keep` made it so, and `prismreplay record` of the job "
            "gives one that has",
        )


def _require_more_steps(warmup: int | None, trace: Trace) -> None:
    """Steps have to remain behind the warm-up.

    Raises:
        MergeInputError: the run has no more steps than that.
    """
    steps = len(trace.header.steps)
    if warmup and warmup >= steps:
        raise MergeInputError(
            f"a warm-up of {counted(warmup, 'step')} leaves nothing of a run "
            + (f"that has {steps}" if steps else "whose steps are not marked"),
            where=_place(trace),
            hint="say fewer with --warmup, or leave it out",
        )


def _slice_files(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Sequence[str | os.PathLike[str]] | None:
    """The files of a slicing campaign; None if the source is a whole run."""
    parts = (TraceKind.SLICE, TraceKind.BARE)
    if isinstance(source, Trace):
        return source.paths if source.paths and source.header.kind in parts else None
    if not isinstance(source, str | os.PathLike) and any(isinstance(one, Trace) for one in source):
        raise MergeInputError(
            "a list of traces in memory cannot be merged",
            hint="slices are read from files: write each with `prismtrace.write`, pass the paths",
        )
    files = trace_files(source)
    return files if read_header(files[0]).kind in parts else None


def _observed(trace: Trace) -> pl.DataFrame:
    """Sorted rows whose start_ns and dur_ns are the observed ones."""
    kind = trace.header.kind
    if kind not in (TraceKind.RECORDED, TraceKind.CALIBRATED):
        raise MergeInputError(
            f"a {kind} trace in memory cannot be merged",
            where=_place(trace),
            hint="write it to a file and merge that",
        )
    require_table_memory(trace, _ROW_BYTES)
    rows = sorted_rows(trace)
    if kind == TraceKind.CALIBRATED:
        if trace.header.extra.get("merge", {}).get("from") == "slices":
            raise MergeInputError(
                "the calibrated trace was made from slices, whose observed times have no common "
                "clock",
                where=_place(trace),
                hint="merge the slices again, or new slices with this trace as --base",
            )
        if not set(_OBSERVED.values()) <= set(rows.columns):
            raise MergeInputError(
                "the calibrated trace does not hold the observed times it was made from",
                where=_place(trace),
                hint="merge the recorded trace instead",
            )
        rows = rows.with_columns(**{name: pl.col(kept) for name, kept in _OBSERVED.items()})
    else:
        rows = rows.with_columns(**{kept: pl.col(name) for name, kept in _OBSERVED.items()})
    _check_times(rows)
    return rows


def _check_times(rows: pl.DataFrame) -> None:
    near = pl.col("start_ns").is_between(-FARTHEST_NS, FARTHEST_NS)
    window = pl.col("start_ns").max().over("rank") - pl.col("start_ns").min().over("rank")
    problems = {
        "has no start or duration": pl.col("start_ns").is_null() | pl.col("dur_ns").is_null(),
        "has a negative duration": pl.col("dur_ns") < 0,
        "lasts longer than a day": pl.col("dur_ns") > _LONGEST_NS,
        # Before the window, whose difference must not overflow.
        "starts more than 146 years from the zero of its clock": ~near,
        "is on a rank whose rows lie more than a day apart": window > _LONGEST_NS,
    }
    for problem, rule in problems.items():
        broken = rows.select("rank", "index", broken=rule.fill_null(value=False))
        broken = broken.filter("broken")
        if broken.height:
            rank, index, _ = broken.row(0)
            more = f", and {broken.height - 1} more" if broken.height > 1 else ""
            raise MergeInputError(
                f"a row {problem}{more}",
                where=f"rank={rank} index={index}",
                hint="look at the time units and clocks of the source, then convert it again",
            )


def _split(graph: Graph, alignment: Alignment) -> _Split:
    """Find durations, transfers and lags that reproduce the aligned times.

    Times count from the first aligned start.
    """
    start, end = alignment.start_ns, alignment.end_ns
    ready = ready_times(graph, start)
    early_ends = np.maximum(ready - end, 0)

    counts = np.diff(graph.dep_offsets)
    dependent = np.flatnonzero(counts)
    owner = np.repeat(np.arange(graph.rows), counts)
    dep_end = end[graph.dep_rows]
    lags = np.zeros(len(dep_end), np.int64)
    overlaps = np.zeros(graph.rows, np.int64)
    if len(dependent):
        last_end = start.copy()
        last_end[dependent] = np.maximum.reduceat(dep_end, graph.dep_offsets[dependent])
        gap = start - last_end
        overlaps = np.maximum(-gap, 0)
        # The first dependency that ends last is the one the row waited for.
        binding = np.flatnonzero(dep_end == last_end[owner])
        binding = binding[np.diff(owner[binding], prepend=-1) > 0]
        lags[binding] = np.maximum(gap[owner[binding]], 0)
    return _Split(
        graph=replace(
            graph,
            duration_ns=np.maximum(end - ready, 0),
            dep_lag_ns=lags,
            release_ns=np.where(counts == 0, start, 0),
        ),
        lags=lags,
        overlaps=overlaps,
        early_ends=early_ends,
    )


def _verify(graph: Graph, timing: Timing, late: Int64Array) -> None:
    engines: tuple[Engine, ...] = ("networkx", "python", "array")
    for engine in engines:
        other = propagate(graph, engine)
        same = (
            np.array_equal(other.start_ns, timing.start_ns)
            and np.array_equal(other.end_ns, timing.end_ns)
            and np.array_equal(slack(graph, other, engine), late)
        )
        if not same:
            raise CalibError(
                f"the {engine} engine gives other times: this is a bug in prismcalib",
                hint="please report it with the trace",
            )


def _report(
    rows: pl.DataFrame,
    instances: int,
    split: _Split,
    timing: Timing,
    steps: list[tuple[int, int]],
    alignment: Alignment,
) -> MergeReport:
    member = waiting_rows(split.graph)
    gaps = [
        int(timing.start_ns[reached] - timing.end_ns[left])
        for (_, left), (reached, _) in pairwise(steps)
    ]
    inside, inside_on_path = _idle_inside(rows, steps)
    return MergeReport(
        ranks=rows["rank"].n_unique(),
        rows=rows.height,
        instances=instances,
        unmatched=_unmatched(rows).height,
        clock=alignment.report,
        recorded_ns=int(alignment.end_ns.max()) - int(alignment.start_ns.min()),
        propagated_ns=timing.makespan_ns,
        lags=Amount.of(split.lags),
        lags_on_critical_path=Amount.of(np.array(gaps, np.int64)),
        overlap_clamps=Amount.of(split.overlaps),
        transfer_clamps=Amount.of(split.early_ends),
        most_delayed_ns=int((timing.start_ns - alignment.start_ns).max()),
        wait_ns=int(timing.wait_ns.sum()),
        transfer_ns=int(split.graph.duration_ns[member].sum()),
        idle_inside=inside,
        idle_inside_on_critical_path=inside_on_path,
        overlaps_by_kind=_by_kind(rows, split.overlaps),
    )


def _by_kind(rows: pl.DataFrame, overlaps: Int64Array) -> dict[str, int]:
    """`MergeReport.overlaps_by_kind`."""
    late = rows.select(pl.col("kind").cast(pl.String), ns=pl.Series(overlaps)).filter(
        pl.col("ns") > 0
    )
    sums = (
        late.group_by("kind").agg(pl.col("ns").sum()).sort("ns", "kind", descending=[True, False])
    )
    return dict(sums.iter_rows())


def _idle_inside(
    rows: pl.DataFrame, steps: list[tuple[int, int]]
) -> tuple[Amount | None, Amount | None]:
    """Idle time that no lag holds, and the critical part; spans of computation last as observed."""
    if "x_busy_ns" not in rows.columns:
        return None, None
    inside = rows.select(ns=inner_idle(rows.columns))["ns"].to_numpy()
    critical = np.unique([reached for reached, _ in steps])
    return Amount.of(inside), Amount.of(inside[critical])


def _header(
    header: TraceHeader, report: MergeReport, alignment: Alignment, warmup: int | None
) -> TraceHeader:
    if warmup is None:
        warmup = header.extra.get("merge", {}).get("warmup")
    said = {} if warmup is None else {"warmup": warmup}
    policies = {
        "merge.overlap-clamped": report.overlap_clamps.count,
        "merge.transfer-clamped": report.transfer_clamps.count,
        "merge.unmatched-kept": report.unmatched,
    }
    return header.model_copy(
        update={
            "kind": TraceKind.CALIBRATED,
            "clock": alignment.domains,
            # Replaced, not added to: merging a calibrated trace again changes nothing.
            "policies": {**header.policies, **policies},
            "extra": {**header.extra, "merge": {**report.as_dict(), **said}},
        }
    )


def _nodes(
    rows: pl.DataFrame,
    split: _Split,
    timing: Timing,
    late: Int64Array,
    steps: list[tuple[int, int]],
    origin_ns: int,
) -> pl.DataFrame:
    member = pl.Series(waiting_rows(split.graph))
    critical = np.zeros(rows.height, np.bool_)
    critical[[reached for reached, _ in steps]] = True

    def of_members(values: object) -> pl.Expr:
        return pl.when(member).then(pl.lit(values)).otherwise(None)

    source = node_schema()["transfer_source"]
    return rows.with_columns(
        start_ns=timing.start_ns + origin_ns,
        dur_ns=timing.end_ns - timing.start_ns,
        transfer_ns=of_members(pl.Series(split.graph.duration_ns)),
        transfer_source=of_members(TransferSource.MEASURED.value).cast(source),
        wait_ns=of_members(pl.Series(timing.wait_ns)),
        lag_ns=lag_column(split.graph, split.lags, rows["deps"]),
        slack_ns=late,
        critical=critical,
    )


def _place(trace: Trace) -> str | None:
    return ", ".join(str(path) for path in trace.paths) or None
