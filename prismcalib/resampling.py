"""How much does the step time vary?  Steps of the run, shuffled per rank and propagated again.

A rank's computation and gaps of one step belong together (a slow step is slow throughout), but
ranks are late at different times, and a synchronous job waits for the slowest at every turn.
So one *draw* gives every rank, for each step of the window, all times of one of its own steps,
chosen at random, and propagates the window; that the median of every operation would give the
step time is not assumed, and is not true. How long a communication transfers is no property of a
rank: all its members take that from one step, else each would wait for the slowest of several.

Only steps of the same operations can be exchanged. The first ones are often unlike the others:
DDP cuts its buckets anew after the first step, optimizers make their state. Such steps, and
those of the warm-up, keep their times and do not count.

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
from prismcalib.graph import Graph, Int32Array, Int64Array
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
    """A quantile of the step time, and the interval that holds it with 90 % confidence.

    Attributes:
        level: which quantile, between 0 and 1.
        ns: its value.
        low_ns, high_ns: the interval.
    """

    level: float
    ns: int
    low_ns: int
    high_ns: int


@dataclass(frozen=True)
class StepSpread:
    """What resampling whole steps found.

    Attributes:
        observed_steps: steps that draws choose from: those alike after the warm-up.
        draws: windows propagated for the quantiles, and as many again for the intervals.
        simulated_steps: of the steps in them those that are drawn; the first of each window is
            left out if there are three or more that are chained: it does not follow a step.
        quantiles: p5, p50, p95.
        unlike_steps: steps after the warm-up that have other operations.
    """

    observed_steps: int
    draws: int
    simulated_steps: int
    quantiles: tuple[Quantile, ...]
    unlike_steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The spread as JSON values."""
        return {
            "observed_steps": self.observed_steps,
            "unlike_steps": self.unlike_steps,
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
    found = _exchangeable(rows, warmup)
    return found if isinstance(found, str) else None


def _exchangeable(rows: pl.DataFrame, warmup: int) -> list[int] | str:
    """Numbers of the steps that draws choose from, or what keeps steps from being exchanged."""
    if rows.height > _LARGEST:
        return f"{rows.height} operations are too many to resample"
    count = rows["step"].drop_nulls().n_unique()
    after = f" after the warm-up ({counted(warmup, 'step')})" if warmup else ""
    if count - warmup < 2:
        return f"the trace has no two steps to draw from{after}"
    alike = _alike(rows, warmup)
    if len(alike) < 2:
        return f"no two steps{after} have the same operations, so they cannot be exchanged"
    return alike


def _alike(rows: pl.DataFrame, warmup: int) -> list[int]:
    """Numbers of the steps after the warm-up that have the same operations: most of them."""
    shapes = (
        rows.filter(pl.col("step").is_not_null())
        .select(
            step=pl.col("step").rank("dense") - 1,
            shape=pl.struct(
                "rank",
                kind=pl.col("kind").to_physical(),
                place=pl.int_range(pl.len()).over("rank", "step"),
            ).hash(),
        )
        .group_by("step")
        # A sum of hashes does not depend on the order of ranks.
        .agg(pl.col("shape").sum(), pl.len())
        .filter(pl.col("step") >= warmup)
        .group_by("shape", "len")
        .agg(pl.col("step").sort())
        .sort(pl.col("step").list.len(), pl.col("step").list.last())
    )
    return [] if shapes.is_empty() else [int(step) for step in shapes["step"][-1]]


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
    alike = _exchangeable(rows, warmup)
    if isinstance(alike, str):
        raise CalibError(alike)
    if draws < 1:
        raise CalibError("no draws were asked for")
    pool = _StepPool.of(rows, alike, graph)
    model = StepModel.of(graph, rows, header)
    draws = max(min(draws, _MOST_ROWS // (2 * graph.rows)), min(draws, _FEWEST_DRAWS))
    chosen: Engine = pick_engine(graph.rows, 2 * draws) if engine == "auto" else engine
    random = np.random.default_rng(seed)
    shape = (draws, pool.ranks, pool.steps)
    free = random.integers(0, pool.steps, shape)
    found = _step_times(model, pool, free, chosen)

    # Every replicate draws from its own selection of the observed steps.
    replicates = min(25, draws)
    per = draws // replicates
    selection = random.integers(0, pool.steps, (replicates, pool.steps))
    picks = random.integers(0, pool.steps, (replicates, per, pool.ranks, pool.steps))
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
    unlike = int(rows["step"].drop_nulls().n_unique()) - warmup - pool.steps
    return StepSpread(pool.steps, draws, found.size, tuple(quantiles), unlike)


@dataclass(frozen=True, eq=False)
class _StepPool:
    """Which row stands in for which when a rank repeats another step.

    Attributes:
        ranks, steps: R and S, of the steps that can be exchanged.
        numbers: which of all steps these are, from 0.
        movable: int64[m], rows that belong to one of them, by rank, step and place.
        rank_of, step_of: int64[m], rank and step number of these rows.
        drawn_by: int64[m], the rank whose choice decides how long the row takes: its own, and of
            a communication the first of its members.
        first: int64[m], position in `movable` of the row's counterpart in the rank's first step.
        stride: int64[m], rows of the rank per step.
    """

    ranks: int
    steps: int
    numbers: Int64Array
    movable: Int64Array
    rank_of: Int64Array
    step_of: Int64Array
    drawn_by: Int64Array
    first: Int64Array
    stride: Int64Array

    @classmethod
    def of(cls, rows: pl.DataFrame, alike: list[int], graph: Graph) -> _StepPool:
        table = rows.select(
            row=pl.int_range(pl.len()),
            rank=pl.col("rank").rank("dense").cast(pl.Int64) - 1,
            step=pl.col("step").rank("dense").cast(pl.Int64) - 1,
        )
        ordered = (
            table.filter(pl.col("step").is_in(alike))
            .with_columns(pl.col("step").rank("dense").cast(pl.Int64) - 1)
            .sort("rank", "step", "row")
        )
        ranks, steps = ordered["rank"].n_unique(), len(alike)
        rank_of = ordered["rank"].rank("dense").cast(pl.Int64).to_numpy() - 1
        size = np.bincount(rank_of) // steps
        base = np.append([0], np.cumsum(size * steps))[rank_of]
        stride = size[rank_of]
        movable = ordered["row"].to_numpy()
        return cls(
            ranks=ranks,
            steps=steps,
            numbers=np.array(alike, np.int64),
            movable=movable,
            rank_of=rank_of,
            step_of=ordered["step"].to_numpy(),
            drawn_by=_first_members(rank_of, graph.instance[movable]),
            first=base + (np.arange(len(base)) - base) % stride,
            stride=stride,
        )

    def sources(self, choice: NDArray[np.int64], rank_of: Int64Array) -> Int64Array:
        """int64[m], rows whose times the movable rows get if `rank_of` chose; choice: int64[R, S]."""
        chosen = choice[rank_of, self.step_of]
        return self.movable[self.first + chosen * self.stride]


def _first_members(rank_of: Int64Array, instance: Int32Array) -> Int64Array:
    """int64[m]: the lowest rank of the instance of every row, or its own."""
    member = instance >= 0
    lowest = np.full(int(instance.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, instance[member], rank_of[member])
    result = rank_of.copy()
    result[member] = lowest[instance[member]]
    return result


def _step_times(
    model: StepModel, pool: _StepPool, choices: NDArray[np.int64], engine: Engine
) -> NDArray[np.int64]:
    """Times of the exchanged steps in all draws, int64[draws, S or fewer]."""
    graph = model.graph
    order = propagate(graph, engine).order
    parts = []
    for durations, lags in _draws(graph, pool, choices):
        batch = propagate_batch(
            graph, durations, lag_ns=lags, steps=model.number, order=order, engine=engine
        )
        parts.append(model.durations(batch))
    times = np.concatenate(parts)
    first = 1 if model.number.max() > 1 and not model.apart else 0
    return times[:, pool.numbers[pool.numbers >= first]]


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
            durations[pool.movable, column] = graph.duration_ns[pool.sources(choice, pool.drawn_by)]
            source = pool.sources(choice, pool.rank_of)
            if lags is None or graph.dep_lag_ns is None:
                continue
            # The first step of a window depends on less than the others: it keeps its lags.
            alike = (counts[source] == counts[pool.movable])[owner]
            found = np.where(alike, offsets[source][owner] + place, edges)
            lags[edges, column] = graph.dep_lag_ns[found]
        yield durations, lags
