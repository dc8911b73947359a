"""How much does the step time vary?  Steps of the run, shuffled per rank and propagated again.

A rank's computation and gaps of one step belong together (a slow step is slow throughout), but
ranks are late at different times, and a synchronous job waits for the slowest at every turn.
So one *draw* gives every rank, for each step of the window, all times of one of its own steps,
chosen at random, and propagates the window; that the median of every operation would give the
step time is not assumed, and is not true.

How sure one can be of the result is found by bootstrap: the steps that draws choose from are
themselves drawn, with replacement, again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.errors import CalibError
from prismcalib.graph import Graph, Int64Array
from prismcalib.propagation import Engine, pick_engine, propagate, propagate_batch
from prismcalib.step_times import warmup_of
from prismcalib.steps import StepModel
from prismtrace.console import counted
from prismtrace.schema import TraceHeader

__all__ = ["Quantile", "StepSpread", "resample_steps", "why_not_resampled"]

_LEVELS = (0.05, 0.50, 0.95)
_CONFIDENCE = 0.90
# Draws per propagated batch: twice the block of the engine.
_BATCH = 32
# Rows times draws that take some seconds; large traces are drawn less often.
_MOST_ROWS = 2 * 10**8
_FEWEST_DRAWS = 16
# Rows whose times, drawn many times, take neither minutes nor all memory.
_LARGEST = 20_000_000


@dataclass(frozen=True)
class Quantile:
    """A quantile of the step time, and the interval that holds it with 90 % confidence."""

    level: float
    ns: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True)
class StepSpread:
    """What resampling whole steps found.

    Attributes:
        observed_steps: steps that draws choose from: those after the warm-up.
        draws: windows propagated for the quantiles, and as many again for the intervals.
        simulated_steps: steps in them, without the warm-up; the first of each window is left
            out too if there are three or more that are chained: it does not follow a step.
        quantiles: p5, p50, p95.
    """

    observed_steps: int
    draws: int
    simulated_steps: int
    quantiles: tuple[Quantile, ...]

    def as_dict(self) -> dict[str, Any]:
        """The spread as JSON values."""
        return {
            "observed_steps": self.observed_steps,
            "draws": self.draws,
            "simulated_steps": self.simulated_steps,
            "confidence": _CONFIDENCE,
            **{
                f"p{round(100 * quantile.level)}": {
                    "step_ns": quantile.ns,
                    "low_ns": quantile.low_ns,
                    "high_ns": quantile.high_ns,
                }
                for quantile in self.quantiles
            },
        }


def why_not_resampled(rows: pl.DataFrame, warmup: int = 0) -> str | None:
    """What keeps whole steps of a node table from being exchanged; None if nothing does."""
    if rows.height > _LARGEST:
        return f"{rows.height} operations are too many to resample"
    steps = rows.filter(pl.col("step").is_not_null()).select(
        "rank",
        step=pl.col("step").rank("dense"),
        kind=pl.col("kind").to_physical(),
        place=pl.int_range(pl.len()).over("rank", "step"),
    )
    count = int(steps["step"].n_unique())
    if count - warmup < 2:
        after = f" after the warm-up ({counted(warmup, 'step')})" if warmup else ""
        return f"the trace has no two steps to draw from{after}"
    shapes = steps.group_by("rank", "place").agg(pl.len(), pl.col("kind").n_unique())
    if (shapes["len"] != count).any():
        return "steps differ in their number of operations, so they cannot be exchanged"
    if (shapes["kind"] != 1).any():
        return "steps differ in their operations, so they cannot be exchanged"
    return None


def resample_steps(
    graph: Graph,
    rows: pl.DataFrame,
    *,
    header: TraceHeader,
    draws: int = 200,
    seed: int = 0,
    engine: Engine = "auto",
) -> StepSpread:
    """Quantiles of the step time.

    Args:
        graph: of a calibrated trace.
        rows: its node table in the graph's order.
        header: of the trace.
        draws: how many windows to propagate, from 1 on; fewer for very large traces.
        seed: the same seed gives the same answer.
        engine: see `prismcalib.propagate`.

    Raises:
        CalibError: the steps cannot be exchanged, see `why_not_resampled`.
    """
    warmup = warmup_of(header)
    obstacle = why_not_resampled(rows, warmup) or ("no draws were asked for" if draws < 1 else None)
    if obstacle:
        raise CalibError(obstacle)
    pool = _StepPool.of(rows)
    model = StepModel.of(graph, rows, header)
    draws = max(min(draws, _MOST_ROWS // (2 * graph.rows)), min(draws, _FEWEST_DRAWS))
    chosen: Engine = pick_engine(graph.rows, 2 * draws) if engine == "auto" else engine
    random = np.random.default_rng(seed)
    shape = (draws, pool.ranks, pool.steps)
    free = random.integers(warmup, pool.steps, shape)
    found = _step_times(model, pool, free, chosen)

    # Every replicate draws from its own selection of the observed steps.
    replicates = min(25, draws)
    per = draws // replicates
    selection = random.integers(warmup, pool.steps, (replicates, pool.steps - warmup))
    picks = random.integers(0, pool.steps - warmup, (replicates, per, pool.ranks, pool.steps))
    limited = selection[np.arange(replicates)[:, None, None, None], picks]
    again = _step_times(model, pool, limited.reshape(-1, pool.ranks, pool.steps), chosen)
    again = again.reshape(replicates, -1)
    tails = ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2)
    quantiles = []
    for level in _LEVELS:
        value = float(np.quantile(found, level))
        low, high = np.quantile(np.quantile(again, level, axis=1), tails)
        # The interval is about the quantile: it holds it.
        bounds = round(min(float(low), value)), round(max(float(high), value))
        quantiles.append(Quantile(level, round(value), *bounds))
    return StepSpread(pool.steps - warmup, draws, found.size, tuple(quantiles))


@dataclass(frozen=True, eq=False)
class _StepPool:
    """Which row stands in for which when a rank repeats another step.

    Attributes:
        ranks, steps: R and S.
        movable: int64[m], rows that belong to a step, by rank, step and place.
        rank_of, step_of: int64[m], rank and step number of these rows.
        first: int64[m], position in `movable` of the row's counterpart in the rank's first step.
        stride: int64[m], rows of the rank per step.
    """

    ranks: int
    steps: int
    movable: Int64Array
    rank_of: Int64Array
    step_of: Int64Array
    first: Int64Array
    stride: Int64Array

    @classmethod
    def of(cls, rows: pl.DataFrame) -> _StepPool:
        table = rows.select(
            row=pl.int_range(pl.len()),
            rank=pl.col("rank").rank("dense").cast(pl.Int64) - 1,
            step=pl.col("step").rank("dense").cast(pl.Int64) - 1,
        )
        ordered = table.filter(pl.col("step").is_not_null()).sort("rank", "step", "row")
        ranks, steps = ordered["rank"].n_unique(), ordered["step"].n_unique()
        rank_of = ordered["rank"].rank("dense").cast(pl.Int64).to_numpy() - 1
        size = np.bincount(rank_of) // steps
        base = np.append([0], np.cumsum(size * steps))[rank_of]
        stride = size[rank_of]
        return cls(
            ranks=ranks,
            steps=steps,
            movable=ordered["row"].to_numpy(),
            rank_of=rank_of,
            step_of=ordered["step"].to_numpy(),
            first=base + (np.arange(len(base)) - base) % stride,
            stride=stride,
        )

    def sources(self, choice: NDArray[np.int64]) -> Int64Array:
        """int64[m], rows whose times the movable rows get; choice: int64[R, S]."""
        chosen = choice[self.rank_of, self.step_of]
        return self.movable[self.first + chosen * self.stride]


def _step_times(
    model: StepModel, pool: _StepPool, choices: NDArray[np.int64], engine: Engine
) -> NDArray[np.int64]:
    """Step times of all draws, int64[draws, S or fewer]."""
    graph = model.graph
    order = propagate(graph, engine).order
    parts = []
    for durations, lags in _draws(graph, pool, choices):
        batch = propagate_batch(
            graph, durations, lag_ns=lags, steps=model.number, order=order, engine=engine
        )
        parts.append(model.durations(batch))
    times = np.concatenate(parts)
    first = 1 if pool.steps > 2 and not model.apart else 0
    return times[:, max(first, model.warmup) :]


def _draws(
    graph: Graph, pool: _StepPool, choices: NDArray[np.int64]
) -> Iterator[tuple[Int64Array, Int64Array | None]]:
    """Durations and lags of all draws, batch by batch."""
    offsets, counts = graph.dep_offsets, np.diff(graph.dep_offsets)
    batch = max(1, min(_BATCH, 2**27 // max(graph.rows, 1)))
    # Dependencies of the movable rows: owner's position among them, and place within the row.
    owner = np.repeat(np.arange(len(pool.movable)), counts[pool.movable])
    ends = np.cumsum(counts[pool.movable])
    place = np.arange(len(owner)) - np.repeat(ends - counts[pool.movable], counts[pool.movable])
    edges = offsets[pool.movable][owner] + place
    for begin in range(0, len(choices), batch):
        several = choices[begin : begin + batch]
        durations = np.repeat(graph.duration_ns[:, None], len(several), axis=1)
        lags = None
        if graph.dep_lag_ns is not None:
            lags = np.repeat(graph.dep_lag_ns[:, None], len(several), axis=1)
        for column, choice in enumerate(several):
            source = pool.sources(choice)
            durations[pool.movable, column] = graph.duration_ns[source]
            if lags is None or graph.dep_lag_ns is None:
                continue
            # The first step of a window depends on less than the others: it keeps its lags.
            alike = (counts[source] == counts[pool.movable])[owner]
            found = np.where(alike, offsets[source][owner] + place, edges)
            lags[edges, column] = graph.dep_lag_ns[found]
        yield durations, lags
