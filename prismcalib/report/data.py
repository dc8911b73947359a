"""All numbers of a report, and nothing about how they look."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from prismcalib.blocks import Layout
from prismcalib.chosen_steps import ChosenSteps, chosen_steps, told
from prismcalib.errors import MergeInputError
from prismcalib.extent import Extent, extent_of
from prismcalib.lateness import Lateness, find_late_ranks
from prismcalib.paths import CriticalPath, calibrated_trace, require_partners
from prismcalib.prediction import Prediction, path_basis, predict
from prismcalib.report.conclusion import Conclusion, conclude, peaks_note
from prismcalib.report.grids import Grid
from prismcalib.report.scan import scan
from prismcalib.report.tables import (
    Memory,
    Pipeline,
    groups_table,
    memory_of,
    pipeline_of,
    ranks_table,
    traffic_table,
)
from prismcalib.stages import pipeline_stages
from prismcalib.step_times import step_table, typical_ns, warmup_of
from prismcalib.trail import marked_path
from prismcalib.wording import RankNames
from prismtrace.schema import TraceHeader
from prismtrace.trace import Trace

if TYPE_CHECKING:
    from prismcalib.stragglers import StragglerReport

__all__ = ["Memory", "Pipeline", "RunSummary", "describe_run"]

CELLS = 2**21
"""Cells of a grid: about 2 bytes each on the page before compression."""

STRAGGLER_ROWS = 2_000_000
"""Simulating stragglers needs the whole graph in memory: some 500 bytes a row."""

RESAMPLED_ROWS = 200_000
"""Resampling steps propagates the graph hundreds of times."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunSummary:
    """What a report says; times in ns, shares between 0 and 1.

    Attributes:
        header: of the trace.
        extent: ranks, rows, window.
        conclusion: what it all means, in a sentence, and what else is worth knowing.
        path: the critical path.
        steps: step (null: the whole window), duration_ns.
        ranks: rank, stage (null without a pipeline), rows, compute_ns, inner_idle_ns,
            transfer_ns (not hidden behind computation), wait_ns, gap_ns: together the window;
            hidden_ns (transfers behind computation), overlap (hidden share of all transfers, null
            without any), path_share, peers_ns (median compute_ns of the other ranks of its stage,
            or of all; null without any), excess (compute_ns against it), peak_bytes.
        pipeline: None where the trace shows none.
        kinds: kind, rows, dur_ns, over all ranks.
        traffic: communication per family of groups and kind: family, kind, groups, operations,
            unmatched, wait_ns and transfer_ns (means per member), bytes (mean per member),
            wait_share (of its members' time).
        groups: group, name (its label), ranks, members, operations, wait_ns, transfer_ns (means
            per member), total_wait_ns, last_rank and last_share (which rank arrives last most
            often; null for send and recv), largest total wait first.
        basis: share of the critical path that rests on each kind of knowledge.
        sources: transfer_source, rows, transfer_ns of all communication.
        stragglers: what uneven ranks cost, and likely causes; None where `stragglers_absent` says
            why.
        stragglers_absent: empty, or why nothing was simulated.
        late: whom the others wait for; None where stragglers are absent for the trace's size.
        prediction: quantiles of the step time, and what estimated transfers leave open; None for
            traces of more than 200,000 rows.
        memory: None if the trace does not tell.
        virtual_rows: rows that no real rank measured.
        grids: what every rank does when.
        looked_at: which steps of the trace it is about; None: all that was given.
        peaks_left_out: rank, peak_bytes, shown_bytes (in the steps shown; null if unknown): ranks
            that hold most in what was left out.
    """

    header: TraceHeader
    extent: Extent
    conclusion: Conclusion
    path: CriticalPath
    steps: pl.DataFrame
    ranks: pl.DataFrame
    pipeline: Pipeline | None
    kinds: pl.DataFrame
    traffic: pl.DataFrame
    groups: pl.DataFrame
    basis: dict[str, float]
    sources: pl.DataFrame
    stragglers: StragglerReport | None
    stragglers_absent: str
    late: Lateness | None
    prediction: Prediction | None
    memory: Memory | None
    virtual_rows: int
    grids: tuple[Grid, ...]
    looked_at: ChosenSteps | None = None
    peaks_left_out: pl.DataFrame | None = None

    @property
    def step_ns(self) -> int:
        """The step time: median over the steps after the warm-up."""
        return typical_ns(self.steps["duration_ns"].to_numpy(), self.warmup)

    @property
    def warmup(self) -> int:
        """How many first steps do not count in the step time."""
        return warmup_of(self.header)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as JSON values; grids are left out."""
        header, pipeline, memory = self.header, self.pipeline, self.memory
        peaks = self.peaks_left_out
        return {
            **told(self.looked_at),
            "memory_peaks_left_out": [] if peaks is None else peaks.to_dicts(),
            "conclusion": {"headline": self.conclusion.headline, "notes": self.conclusion.notes},
            "world_size": header.world_size,
            "rows": int(self.extent.rows.sum()),
            "window_ns": self.extent.window_ns,
            "step_ns": self.step_ns,
            "warmup_steps": self.warmup,
            "steps": self.steps.to_dicts(),
            "critical_path": self.path.as_dict(),
            "ranks": self.ranks.to_dicts(),
            "pipeline": None
            if pipeline is None
            else {
                "stages": pipeline.stage_table.to_dicts(),
                "microbatches": pipeline.microbatches,
                "chunks": pipeline.chunks,
                "bubble": pipeline.bubble,
                "least_bubble": pipeline.least_bubble,
            },
            "kinds": self.kinds.to_dicts(),
            "traffic": self.traffic.to_dicts(),
            "groups": self.groups.to_dicts(),
            "basis": self.basis,
            "transfer_sources": self.sources.to_dicts(),
            "stragglers": None if self.stragglers is None else self.stragglers.as_dict(),
            "stragglers_absent": self.stragglers_absent,
            "waited_for": None if self.late is None else self.late.ranks.to_dicts(),
            "prediction": None if self.prediction is None else self.prediction.as_dict(),
            "memory": None
            if memory is None
            else dict(zip(memory.names, memory.levels.max(axis=1).tolist(), strict=True)),
            "virtual_rows": self.virtual_rows,
            "axes": header.axes,
            "sources": header.sources,
            "policies": header.policies,
            "clocks": [
                {"ranks": domain.ranks, **domain.model_dump(mode="json", exclude={"ranks"})}
                for domain in header.clock
            ],
        }


def describe_run(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    cells: int = CELLS,
    straggler_rows: int = STRAGGLER_ROWS,
    on_rows: Callable[[int], None] | None = None,
    steps: str = "auto",
) -> RunSummary:
    """Read a calibrated trace block by block and count everything a report says.

    Args:
        source: a calibrated trace, or where it is.
        cells: how fine the grids are.
        straggler_rows: simulate stragglers only in traces of at most so many rows.
        on_rows: is told how many more rows have been read.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: the trace is not calibrated, rows lack times, or the critical path is not
            marked.
        CoverageError, MissingMemberError: it lacks ranks that others communicate with.
        StepError: steps that are not in it.
    """
    whole = calibrated_trace(source)
    with chosen_steps(whole, steps, marks=True) as (trace, looked_at):
        summary = _described(trace, cells, straggler_rows, on_rows)
        return about_steps(summary, whole, looked_at)


def about_steps(summary: RunSummary, whole: Trace, looked_at: ChosenSteps) -> RunSummary:
    """The summary of some steps of a trace with what is to be said of the others."""
    if looked_at.everything:
        return replace(summary, looked_at=looked_at)
    level = pl.max_horizontal("mem_bytes", "mem_peak_bytes")
    shown = summary.ranks.select("rank", shown_bytes="peak_bytes")
    peaks = (
        whole.nodes.group_by("rank")
        .agg(peak_bytes=level.max())
        .collect(engine="streaming")
        .join(shown, on="rank", how="left")
        .filter(pl.col("peak_bytes") > pl.col("shown_bytes").fill_null(0))
        .sort("peak_bytes", "rank", descending=[True, False])
    )
    note = peaks_note(peaks, RankNames.of(summary.header))
    conclusion = replace(summary.conclusion, notes=(*summary.conclusion.notes, *note))
    return replace(summary, looked_at=looked_at, peaks_left_out=peaks, conclusion=conclusion)


def _described(
    trace: Trace, cells: int, straggler_rows: int, on_rows: Callable[[int], None] | None
) -> RunSummary:
    header = trace.header
    layout = Layout.of(trace)
    extent = extent_of(trace, layout)
    if int(extent.rows.sum()) > RESAMPLED_ROWS:
        require_partners(trace)
    counted = scan(layout, extent, cells=cells, on_rows=on_rows)
    path = marked_path(layout, extent)
    stage_of = pipeline_stages(header, counted.pairs)
    ranks = ranks_table(counted.ranks, path, stage_of)
    pipeline = None if stage_of is None else pipeline_of(stage_of, ranks, counted, extent)
    traffic = traffic_table(counted, header, extent)
    rows = int(extent.rows.sum())
    stragglers, absent = _stragglers(trace, rows, straggler_rows)
    return RunSummary(
        header=header,
        extent=extent,
        conclusion=conclude(path, ranks, pipeline, traffic, header),
        path=path,
        steps=step_table(counted.step_ends, header, extent.begin_ns, extent.end_ns),
        ranks=ranks,
        pipeline=pipeline,
        kinds=counted.kinds.with_columns(pl.col("kind").cast(pl.String)),
        traffic=traffic,
        groups=groups_table(counted, header),
        basis=path_basis(path),
        sources=counted.sources.with_columns(pl.col("transfer_source").cast(pl.String)),
        stragglers=stragglers,
        stragglers_absent=absent,
        late=find_late_ranks(trace) if rows <= straggler_rows else None,
        prediction=predict(trace, steps="all") if rows <= RESAMPLED_ROWS else None,
        memory=memory_of(counted.memory_bytes, extent, pipeline),
        virtual_rows=counted.virtual_rows,
        grids=counted.grids,
    )


def _stragglers(trace: Trace, rows: int, most_rows: int) -> tuple[StragglerReport | None, str]:
    """What uneven ranks cost, or why that was left out."""
    if rows > most_rows:
        return None, (
            f"{rows:,} rows are more than a report simulates ({most_rows:,}): "
            "run `prismcalib stragglers` on this trace"
        )
    from prismcalib.stragglers import find_stragglers

    try:
        return find_stragglers(trace, by=("rank", "stage", "kind"), limit=24, steps="all"), ""
    except MergeInputError as error:
        return None, error.message
