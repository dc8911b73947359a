"""The step time that a calibrated trace implies, and what that number rests on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from prismcalib.blocks import Layout, is_large
from prismcalib.build import graph_from_trace
from prismcalib.chosen_steps import ChosenSteps, chosen_steps, told
from prismcalib.computing import covered_ns
from prismcalib.estimates import EstimateRange, estimate_range
from prismcalib.paths import CriticalPath, calibrated_trace, inner_idle, stored_path
from prismcalib.resampling import StepSpread, resample_steps, why_not_resampled
from prismcalib.step_times import counted_steps, step_table, typical_ns, warmup_of
from prismtrace.schema import LOCAL_KINDS, TraceHeader
from prismtrace.trace import Trace

__all__ = ["IDLE_RECORDED", "Prediction", "path_basis", "predict", "rank_times"]


@dataclass(frozen=True, eq=False)
class Prediction:
    """Step times, and where each rank spends the time: exposed (not hidden) communication, idle, ...

    Attributes:
        window_ns: last end minus first start over all ranks.
        steps: step, duration_ns; a step lasts from the end of the step before (the first: from
            the first start) to its own last end over all ranks.  One row with step null for
            the whole window if the trace has no steps.
        warmup: how many first steps do not count (see `merge --warmup`).
        ranks: rank, compute_ns (computing and copying), inner_idle_ns (idle inside
            spans, between their kernels), transfer_ns (transferring and nothing else), wait_ns
            (only waiting for other ranks), gap_ns (idle between spans: nothing at all); they add
            up to the window.  transfer_ns + wait_ns is the exposed communication of the rank,
            that which no computation hides; inner_idle_ns + gap_ns is all its idle time.
        basis: share of the critical path that rests on each kind of knowledge, largest
            first; the shares add up to 1.
        spread: quantiles of the step time from resampled steps.
        why_no_spread: why there is none.
        estimates: how far the step time may be off because of transfers that were not measured;
            None if all were.
        looked_at: which steps of the trace it is about; None: all that was given.
    """

    window_ns: int
    steps: pl.DataFrame
    ranks: pl.DataFrame
    basis: dict[str, float]
    spread: StepSpread | None = None
    why_no_spread: str | None = None
    estimates: EstimateRange | None = None
    warmup: int = 0
    looked_at: ChosenSteps | None = None

    @property
    def step_ns(self) -> int:
        """The predicted step time: median over the steps after the warm-up."""
        return typical_ns(self.steps["duration_ns"].to_numpy(), self.warmup)

    @property
    def counted_ns(self) -> tuple[int, ...]:
        """Durations of the steps after the warm-up."""
        return tuple(counted_steps(self.steps["duration_ns"].to_numpy(), self.warmup).tolist())

    def as_dict(self) -> dict[str, Any]:
        """The prediction as JSON values."""
        return {
            **told(self.looked_at),
            "step_ns": self.step_ns,
            "min_step_ns": min(self.counted_ns),
            "max_step_ns": max(self.counted_ns),
            "warmup_steps": self.warmup,
            "window_ns": self.window_ns,
            "steps": self.steps.to_dicts(),
            "ranks": self.ranks.to_dicts(),
            "basis": self.basis,
            "spread": None if self.spread is None else self.spread.as_dict(),
            "why_no_spread": self.why_no_spread,
            "estimates": None if self.estimates is None else self.estimates.as_dict(),
        }


def predict(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    draws: int = 200,
    seed: int = 0,
    steps: str = "auto",
) -> Prediction:
    """Step time of a calibrated trace, how it varies, exposed communication and idle of each rank.

    Args:
        source: a calibrated trace.
        draws: how many windows of resampled steps to propagate, if there are several steps; 0:
            none.
        seed: the same seed gives the same quantiles.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: the trace is not calibrated.
        CoverageError, MissingMemberError: it lacks ranks that others communicate with.
        StepError: steps that are not in it.
    """
    with chosen_steps(calibrated_trace(source), steps) as (trace, looked_at):
        return replace(_prediction(trace, draws, seed), looked_at=looked_at)


def _prediction(trace: Trace, draws: int, seed: int) -> Prediction:
    if is_large(trace):
        from prismcalib.block_prediction import predict_by_blocks

        return predict_by_blocks(Layout.of(trace), draws)
    graph, rows = graph_from_trace(trace)
    path = stored_path(graph, rows, trace.header)
    nodes = rows.select(
        "rank",
        "step",
        "kind",
        "start_ns",
        "wait_ns",
        end_ns=pl.col("start_ns") + pl.col("dur_ns"),
        inner_idle_ns=inner_idle(rows.columns),
    )
    warmup = warmup_of(trace.header)
    obstacle = why_not_resampled(rows, warmup) if draws else "no draws were asked for"
    return Prediction(
        window_ns=path.length_ns,
        steps=_steps(nodes, trace.header),
        ranks=rank_times(nodes, path.length_ns),
        basis=path_basis(path),
        spread=None
        if obstacle
        else resample_steps(graph, rows, header=trace.header, draws=draws, seed=seed),
        why_no_spread=obstacle,
        estimates=estimate_range(graph, rows, trace.header, path),
        warmup=warmup,
    )


def _steps(nodes: pl.DataFrame, header: TraceHeader) -> pl.DataFrame:
    bounds = (
        nodes.filter(pl.col("step").is_not_null())
        .group_by("step")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        .sort("step")
    )
    whole = nodes.select(pl.col("start_ns").min(), pl.col("end_ns").max())
    return step_table(bounds, header, *whole.row(0))


def rank_times(nodes: pl.DataFrame, window_ns: int) -> pl.DataFrame:
    """`Prediction.ranks`, from all rows of some ranks.

    Columns of `nodes`: rank, kind, start_ns, end_ns, wait_ns, inner_idle_ns.
    """
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    ready = pl.col("start_ns") + pl.col("wait_ns").fill_null(0)
    spans = {
        "occupied": nodes.select("rank", "end_ns", begin_ns="start_ns"),
        "active": nodes.select("rank", "end_ns", begin_ns=ready),
        "local": nodes.filter(local).select("rank", "end_ns", begin_ns="start_ns"),
    }
    table = nodes.group_by("rank").agg(inner=pl.col("inner_idle_ns").sum()).sort("rank")
    for name, part in spans.items():
        table = table.join(
            covered_ns(part).rename({"covered_ns": name}),
            on="rank",
            how="left",
            maintain_order="left",
        )
    inner = pl.min_horizontal("inner", "local")
    return table.fill_null(0).select(
        "rank",
        compute_ns=pl.col("local") - inner,
        inner_idle_ns=inner,
        transfer_ns=pl.col("active") - pl.col("local"),
        wait_ns=pl.col("occupied") - pl.col("active"),
        gap_ns=window_ns - pl.col("occupied"),
    )


BEFORE_PATH = "before the path starts"
"""In `Prediction.basis`: the part of the window that the path does not cover."""

IDLE_RECORDED = "idle, as recorded"
"""In `Prediction.basis`: idle time on the path, inside spans and between them."""


def path_basis(path: CriticalPath) -> dict[str, float]:
    """Shares of the path by what is known about it, largest first; they add up to 1."""
    local = pl.col("kind").is_in([kind.value for kind in LOCAL_KINDS])
    known = (
        path.segments.with_columns(
            source=pl.when(local)
            .then(pl.lit("computation, measured"))
            .when(pl.col("transfer_source").is_null())
            .then(pl.lit("communication without partners, as recorded"))
            .otherwise(pl.lit("transfer, ") + pl.col("transfer_source"))
        )
        .group_by("source")
        .agg(pl.col("busy_ns").sum() - pl.col("inner_idle_ns").sum())
        .rows()
    )
    idle = path.gap_ns + path.inner_idle_ns
    times = {**dict(known), IDLE_RECORDED: idle, BEFORE_PATH: path.lead_in_ns}
    length = max(path.length_ns, 1)
    shares = {name: time / length for name, time in times.items() if time}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))
