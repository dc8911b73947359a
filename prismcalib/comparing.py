"""What became slower from one run to another, and how much of the step that costs.

Operations are compared by class (kind, phase, family of process groups, name), per step and
rank, so that runs of different lengths and sizes can be compared.  The *effect* of a class is
found by propagation: the first run with the times of this class scaled to the second run's.  It
is small where the time disappears in somebody's waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from prismcalib.block_graph import step_model
from prismcalib.chosen_steps import ChosenSteps, chosen_steps
from prismcalib.errors import ComparisonError
from prismcalib.extent import extent_of
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.operations import CLASS_COLUMNS, OperationTable, group_families
from prismcalib.paths import calibrated_trace
from prismcalib.propagation import propagate, propagate_batch
from prismcalib.step_times import step_table_of, typical_ns, warmup_of
from prismcalib.steps import StepModel
from prismcalib.wording import doubts, shared_cores_text
from prismtrace.schema import LOCAL_KINDS
from prismtrace.trace import Source, Trace

__all__ = ["Comparison", "compare", "cut_otherwise"]

# Differences of means that random variation between steps does not make.
_CLEAR = 3.0
# Operations per step and rank; less is a rare one, or rounding.
_FEWEST_ADDED = 0.01
# Numbers of spans that differ by more: computation is cut otherwise, or there is more of it.
_RECUT = 0.05
# Share of both runs' operations whose class the other run lacks.
_STRANGE = 0.3
# Share of the step that neither durations nor idle time explain.
_UNEXPLAINED = 0.05
# A mean size that changes by more, relative to the larger.
_RESIZED = 0.005
_SIZES_TOLD = 4
# Durations of one propagated batch.
_MOST_CELLS = 2**26
# Rows times effects that take minutes; of large runs fewer effects are computed.
_MOST_ROWS = 64 * 10**7
_FEWEST = 10
# Of a large graph, beside it: order, levels, and durations and ends of one propagation.
_RUN_BYTES = 60


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs side by side.

    Attributes:
        step_a_ns, step_b_ns: step times (medians).
        own_effect_ns: change of the step time if all classes took as long as in the second run;
            the rest of the difference lies in gaps, structure, or single operations. Computation
            of which there are more or fewer rows counts by its whole time: it may be cut otherwise.
        gap_effect_ns: the same for idle time before operations.
        classes: kind, phase, group, name (those asked for), then per run, per step and rank:
            count_a, count_b, time_a_ns, time_b_ns (own times), wait_a_ns, wait_b_ns; change_ns
            (of time), ratio (of the mean durations; of whole times where `cut_otherwise`; of a
            rank over its sorts of operations that both runs have; null if in one run only), clear
            (whether the change is larger than the variation between steps; null with fewer than
            three steps, and if ranks shared cores), effect_ns (of the class on the step; null for
            small classes).  Largest
            effect first.
        ranks: the same with ranks as classes, which shows single slow devices that averages
            hide; None if the runs have other ranks.  In effects of ranks every sort of operation
            of a rank changes as that sort did: a slow device does not slow its transfers.
        sizes: communications that carry more or less in the second run: kind, phase, group,
            bytes_a, bytes_b (means), largest change of the mean first.
        looked_at: which steps of the two traces are compared; None: all that were given.
        doubts: what makes the times of one of the runs doubtful.
    """

    step_a_ns: int
    step_b_ns: int
    own_effect_ns: int
    gap_effect_ns: int
    classes: pl.DataFrame
    ranks: pl.DataFrame | None
    sizes: pl.DataFrame
    looked_at: tuple[ChosenSteps, ChosenSteps] | None = None
    doubts: tuple[str, ...] = ()

    @property
    def change_ns(self) -> int:
        """Step time of the second run minus that of the first."""
        return self.step_b_ns - self.step_a_ns

    @property
    def rest_ns(self) -> int:
        """The change that neither explains: single operations, other ones, another order of them."""
        return self.change_ns - self.own_effect_ns - self.gap_effect_ns

    @property
    def only_in_a(self) -> float:
        """Operations per step and rank that the first run has more of, over all classes.

        Per step where ranks make classes.
        """
        return float((self.classes["count_a"] - self.classes["count_b"]).clip(0).sum())

    @property
    def only_in_b(self) -> float:
        """The same of the second run."""
        return float((self.classes["count_b"] - self.classes["count_a"]).clip(0).sum())

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know before one trusts the effects."""
        per = "step of all ranks" if "rank" in self.classes.columns else "step and rank"
        sizes = (
            f"{' '.join(filter(None, (kind, phase, group and f'of {group}')))} carries "
            f"{after:,.0f} bytes in B, {before:,.0f} in A (means)"
            for kind, phase, group, before, after in self.sizes.head(_SIZES_TOLD).rows()
        )
        added = (
            f"{more:.4g} operations per {per} exist only in {run}: effects are those of longer or "
            "shorter operations, not of more or fewer (of computation those of more or less time)"
            for run, more in (("A", self.only_in_a), ("B", self.only_in_b))
            if more >= _FEWEST_ADDED
        )
        return *self.doubts, *sizes, *added, *self._names_differ(), *self._unexplained()

    def _names_differ(self) -> Iterator[str]:
        """Classes of other names may hold the same operations."""
        if "name" not in self.classes.columns:
            return
        other = self.classes.filter(pl.col("ratio").is_null())
        strange = [float(other[f"count_{run}"].sum()) for run in "ab"]
        whole = [float(self.classes[f"count_{run}"].sum()) for run in "ab"]
        if all(few > _STRANGE * of for few, of in zip(strange, whole, strict=True)):
            yield (
                "much of both runs has names that the other one lacks: compare without names, "
                "`--by kind --by phase --by group`"
            )

    def _unexplained(self) -> Iterator[str]:
        """Effects need not add up to the change, nor have its sign."""
        share = self.rest_ns / max(self.step_a_ns, 1)
        if abs(share) > _UNEXPLAINED and abs(self.rest_ns) > abs(self.change_ns) / 2:
            yield (
                f"{share:+.1%} of the step comes neither from longer or shorter operations nor from "
                "idle time of whole classes: single operations changed otherwise than their class, or "
                "B does other things, or in another order (`prismtrace diff` says whether the graphs "
                "are the same). Effects are what A's order of operations makes of B's times, and need "
                "not have the sign of the change; what each run waits for says its `prismcalib "
                "critical-path`"
            )

    def as_dict(self, limit: int | None = None) -> dict[str, Any]:
        """The comparison as JSON values, with the first `limit` classes."""
        shown = self.classes if limit is None else self.classes.head(limit)
        looked_at = self.looked_at or ()
        return {
            **{
                f"steps_looked_at_{run}": chosen.as_dict()
                for run, chosen in zip("ab", looked_at, strict=False)
            },
            "step_a_ns": self.step_a_ns,
            "step_b_ns": self.step_b_ns,
            "change_ns": self.change_ns,
            "own_effect_ns": self.own_effect_ns,
            "gap_effect_ns": self.gap_effect_ns,
            "rest_ns": self.rest_ns,
            "only_in_a": self.only_in_a,
            "only_in_b": self.only_in_b,
            "notes": list(self.notes),
            "classes": shown.to_dicts(),
            "sizes": self.sizes.to_dicts(),
            "ranks": None if self.ranks is None else self.ranks.head(limit or 10**9).to_dicts(),
        }


def compare(
    a: Source,
    b: Source,
    *,
    by: Sequence[str] = CLASS_COLUMNS,
    effects: int = 30,
    steps: str = "auto",
) -> Comparison:
    """Compare two calibrated traces.

    Args:
        a: the run to compare with.
        b: the run that became slower, or faster.
        by: what makes a class, some of kind, phase, group, name and rank.
        effects: for how many classes to compute the effect: those whose time changed most;
            fewer in runs of more than 20 million rows, ten from 64 million on.
        steps: which to look at in each of them, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: a trace is not calibrated.
        ComparisonError: no class occurs in both, or `by` names something else.
    """
    by = list(dict.fromkeys(by))  # what is named twice counts once
    if not by or set(by) - {*CLASS_COLUMNS, "rank"}:
        raise ComparisonError(
            f"cannot compare by {', '.join(by) or 'nothing'}",
            hint=f"use some of {', '.join(CLASS_COLUMNS)}, rank",
        )
    with (
        chosen_steps(calibrated_trace(a), steps) as (trace_a, looked_at_a),
        chosen_steps(calibrated_trace(b), steps) as (trace_b, looked_at_b),
    ):
        found = _compared([trace_a, trace_b], by, effects)
    return replace(found, looked_at=(looked_at_a, looked_at_b))


def _compared(traces: Sequence[Trace], by: Sequence[str], effects: int) -> Comparison:
    tables = [OperationTable(trace) for trace in traces]
    sorts, rank_sorts = _sorts(by), _sorts(["rank"])
    sums = [_sums(table, {tuple(by), ("rank",), sorts, rank_sorts}) for table in tables]
    classes = _classes(sums, list(by))
    if not classes["ratio"].is_not_null().any():
        raise ComparisonError(
            "no class of operations occurs in both runs",
            where=", ".join(by),
            hint="compare by fewer properties, for instance --by kind",
        )
    model = _Model.of(traces[0])
    effects = max(min(effects, _FEWEST), min(effects, _MOST_ROWS // max(model.graph.rows, 1)))
    gaps = [side.gap_ns / side.rank_steps for side in sums]
    ranks = None
    if np.array_equal(tables[0].layout.ranks, tables[1].layout.ranks):
        ranks = _over_sorts(_classes(sums, ["rank"]), _classes(sums, list(rank_sorts)))
        scaled = _scaled(ranks, ["rank"], sums, rank_sorts, tables[0], model)
        ranks = _with_effects(ranks, model, scaled, effects)
    if by == ["rank"] and ranks is not None:
        classes = ranks.drop("effect_ns")
    scaled = _scaled(classes, list(by), sums, sorts, tables[0], model)
    if any(shared_cores_text(trace.header) for trace in traces):
        # Who got the cores when is another chance in each run, which steps of one do not show.
        unknown = pl.lit(None, pl.Boolean).alias("clear")
        classes = classes.with_columns(unknown)
        ranks = None if ranks is None else ranks.with_columns(unknown)
    return Comparison(
        step_a_ns=_step_ns(tables[0]),
        step_b_ns=_step_ns(tables[1]),
        own_effect_ns=model.effect_of_classes(scaled[0]),
        gap_effect_ns=model.effect_of_gaps(gaps[1] / gaps[0] if gaps[0] else 1.0),
        classes=_with_effects(classes, model, scaled, effects),
        ranks=ranks,
        sizes=_sizes(traces),
        doubts=tuple(_doubts(*(doubts(trace.header) for trace in traces))),
    )


def _doubts(a: Sequence[str], b: Sequence[str]) -> Iterator[str]:
    """Of which run they are; what is true of both is told once."""
    for text in dict.fromkeys((*a, *b)):
        runs = [run for run, texts in (("A", a), ("B", b)) if text in texts]
        yield f"{' and '.join(runs)}: {text}"


def cut_otherwise(by: Sequence[str]) -> pl.Expr:
    """Of classes: computation in more or fewer rows, which counts by its whole time."""
    if "kind" not in by:
        return pl.lit(value=False)
    count_a, count_b = pl.col("count_a"), pl.col("count_b")
    apart = (count_a - count_b).abs() > _RECUT * pl.max_horizontal(count_a, count_b)
    return pl.col("kind").is_in([kind.value for kind in LOCAL_KINDS]) & apart


def _sizes(traces: Sequence[Trace]) -> pl.DataFrame:
    """`Comparison.sizes`."""
    by = ["kind", "phase", "group"]
    sides = []
    for trace, side in zip(traces, "ab", strict=True):
        family = pl.col("group").replace_strict(
            group_families(trace.header), default=None, return_dtype=pl.String
        )
        known = trace.nodes.filter(pl.col("bytes").is_not_null() & pl.col("group").is_not_null())
        sums = known.group_by(by).agg(pl.col("bytes").sum(), count=pl.len())
        named = sums.collect(engine="streaming").with_columns(
            pl.col("kind", "phase").cast(pl.String), group=family
        )
        totals = named.group_by(by).agg(pl.col("bytes", "count").sum())
        sides.append(totals.select(*by, (pl.col("bytes") / pl.col("count")).alias(f"bytes_{side}")))
    change = (pl.col("bytes_b") - pl.col("bytes_a")).abs()
    return (
        sides[0]
        .join(sides[1], on=by, nulls_equal=True)
        .filter(change > _RESIZED * pl.max_horizontal("bytes_a", "bytes_b"))
        .sort(change, *by, descending=[True, False, False, False])
    )


def _sorts(by: Sequence[str]) -> tuple[str, ...]:
    """By what times are scaled: ranks do several things, and not all of them change alike."""
    if "rank" not in by:
        return tuple(by)
    # Names of all ranks' operations are too many where a run is large.
    return (*by, *(name for name in ("kind", "phase", "group") if name not in by))


def _step_ns(table: OperationTable) -> int:
    """The step time of a run."""
    extent = extent_of(table.layout.trace, table.layout)
    steps = step_table_of(table.layout, extent.begin_ns, extent.end_ns)
    return typical_ns(steps["duration_ns"].to_numpy(), warmup_of(table.header))


@dataclass(frozen=True, eq=False)
class _Sums:
    """What one pass over a run counts.

    Attributes:
        ranks, steps: how many there are.
        rank_steps: in how many steps of ranks the operations took place, at least 1.
        gap_ns: idle time before all operations.
        per_step: by the properties of a class: these, step_number, count, time, wait.
    """

    ranks: int
    steps: int
    rank_steps: int
    gap_ns: float
    per_step: dict[tuple[str, ...], pl.DataFrame]


def _sums(table: OperationTable, keys: set[tuple[str, ...]]) -> _Sums:
    parts: dict[tuple[str, ...], list[pl.DataFrame]] = {by: [] for by in keys}
    steps, rank_steps, gap_ns = [], 0, 0
    for some in table:
        turns = some.select("rank", "step_number").unique()
        steps.append(turns.select("step_number").unique())
        rank_steps += turns.height
        gap_ns += int(some["gap_ns"].sum())
        for by, found in parts.items():
            found.append(
                some.group_by(*by, "step_number", maintain_order=True).agg(
                    count=pl.len().cast(pl.Int64),
                    time=pl.col("own_ns").sum(),
                    wait=pl.col("wait_ns").sum(),
                )
            )
    return _Sums(
        ranks=max(len(table.layout.ranks), 1),
        steps=max(pl.concat(steps).n_unique(), 1),
        rank_steps=max(rank_steps, 1),
        gap_ns=float(gap_ns),
        per_step={
            by: pl.concat(found)
            .group_by(*by, "step_number", maintain_order=True)
            .agg(pl.col("count", "time", "wait").sum())
            for by, found in parts.items()
        },
    )


def _classes(sums: list[_Sums], by: list[str]) -> pl.DataFrame:
    """All classes of both runs, largest change of time first; `Comparison` tells the columns."""
    sides = [_one_side(run, by, side) for run, side in zip(sums, "ab", strict=True)]
    both = sides[0].join(
        sides[1], on=by, how="full", coalesce=True, nulls_equal=True, maintain_order="left_right"
    )
    mean_a = pl.col("time_a_ns") / pl.col("count_a")
    mean_b = pl.col("time_b_ns") / pl.col("count_b")
    noise = (pl.col("noise_a") + pl.col("noise_b")).sqrt()
    whole = pl.col("time_b_ns") / pl.col("time_a_ns")
    ratio = pl.when(cut_otherwise(by)).then(whole).otherwise(mean_b / mean_a)
    return (
        both.with_columns(
            ratio=pl.when(mean_a > 0).then(ratio).otherwise(None),
            change_ns=pl.col("time_b_ns").fill_null(0) - pl.col("time_a_ns").fill_null(0),
        )
        .with_columns(clear=pl.col("change_ns").abs() > _CLEAR * noise)
        .with_columns(
            pl.col("count_a", "count_b").fill_null(0),
            pl.col("^(time|wait)_._ns$").fill_null(0).round().cast(pl.Int64),
            pl.col("change_ns").round().cast(pl.Int64),
        )
        .select(
            *by,
            *("count_a", "count_b", "time_a_ns", "time_b_ns", "wait_a_ns", "wait_b_ns"),
            *("change_ns", "ratio", "clear"),
        )
        .sort(pl.col("change_ns").abs(), descending=True, maintain_order=True)
    )


def _over_sorts(ranks: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """The ranks with ratios over what they do in both runs: ranks may do other things in one."""
    both = parts.filter(pl.col("ratio").is_not_null() & (pl.col("time_a_ns") > 0))
    scaled = (pl.col("time_a_ns") * pl.col("ratio")).sum() / pl.col("time_a_ns").sum()
    ratios = both.group_by("rank").agg(ratio=scaled)
    return (
        ranks.drop("ratio")
        .join(ratios, on="rank", how="left", maintain_order="left")
        .select(ranks.columns)
    )


def _one_side(run: _Sums, by: list[str], side: str) -> pl.DataFrame:
    """Count, time and wait of every class of a run, per step and rank; spread over the steps."""
    ranks, steps = 1 if "rank" in by else run.ranks, run.steps
    per_step = run.per_step[tuple(by)].with_columns(pl.col("count", "time", "wait") / ranks)
    # Steps in which the class does not occur count as well.
    sums = pl.col("time").sum()
    squares = (pl.col("time") ** 2).sum()
    variance = ((squares - sums**2 / steps) / max(steps - 1, 1)).clip(lower_bound=0)
    return per_step.group_by(*by, maintain_order=True).agg(
        (pl.col("count").sum() / steps).alias(f"count_{side}"),
        (sums / steps).alias(f"time_{side}_ns"),
        (pl.col("wait").sum() / steps).alias(f"wait_{side}_ns"),
        (variance / steps if steps >= 3 else pl.lit(None, pl.Float64)).alias(f"noise_{side}"),
    )


def _scaled(
    classes: pl.DataFrame,
    by: list[str],
    sums: list[_Sums],
    sorts: tuple[str, ...],
    table: OperationTable,
    model: _Model,
) -> tuple[Int64Array, Int32Array]:
    """Durations of the first run at the level of the second, and the number of every row's class.

    Levels are those of each of the sorts, which are the classes or parts of them.
    """
    numbers = classes.select(*by, number=pl.int_range(pl.len(), dtype=pl.Int32))
    parts = classes if sorts == tuple(by) else _classes(sums, list(sorts))
    levels = parts.select(*sorts, "ratio").join(
        numbers, on=by, how="left", nulls_equal=True, maintain_order="left"
    )
    scaled = np.empty(model.graph.rows, np.int64)
    number = np.empty(model.graph.rows, np.int32)
    first = 0
    for some in table:
        own = some.select(sorts).join(
            levels, on=list(sorts), how="left", nulls_equal=True, maintain_order="left"
        )
        part = slice(first, first + own.height)
        ratio = own["ratio"].fill_null(1.0).to_numpy()
        scaled[part] = np.rint(model.graph.duration_ns[part] * ratio)
        number[part] = own["number"].to_numpy()
        first += own.height
    return scaled, number


def _with_effects(
    classes: pl.DataFrame, model: _Model, scaled: tuple[Int64Array, Int32Array], effects: int
) -> pl.DataFrame:
    """The classes with their effect on the step, largest first."""
    found = model.effects(*scaled, min(effects, classes.height))
    column = pl.Series(found + [None] * (classes.height - len(found)), dtype=pl.Int64)
    return classes.with_columns(
        effect_ns=pl.when(pl.col("ratio").is_not_null()).then(column).otherwise(None)
    ).sort(
        pl.col("effect_ns").abs().fill_null(-1),
        pl.col("change_ns").abs(),
        descending=True,
        maintain_order=True,
    )


@dataclass(frozen=True, eq=False)
class _Model:
    """The first run, ready to be propagated with other durations."""

    graph: Graph
    steps: StepModel
    order: Int32Array
    baseline: float

    @classmethod
    def of(cls, trace: Trace) -> _Model:
        steps = step_model(trace, also=_RUN_BYTES)
        model = cls(steps.graph, steps, propagate(steps.graph).order, 0.0)
        return replace(model, baseline=model.step_times([steps.graph.duration_ns])[0])

    def step_times(self, columns: list[Int64Array], lags: Int64Array | None = None) -> list[float]:
        """Step time for each set of durations."""
        batch = propagate_batch(
            self.graph,
            columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1),
            lag_ns=lags,
            steps=self.steps.number,
            order=self.order,
        )
        return self.steps.typical_each(batch)

    def effect_of_classes(self, scaled: Int64Array) -> int:
        """Change of the step time if all rows take these times."""
        return round(self.step_times([scaled])[0] - self.baseline)

    def effect_of_gaps(self, ratio: float) -> int:
        """Change of the step time if all gaps are scaled."""
        if self.graph.dep_lag_ns is None:
            return 0
        product = self.graph.dep_lag_ns * ratio
        lags = np.rint(product, out=product).astype(np.int64)
        del product
        return round(self.step_times([self.graph.duration_ns], lags[:, None])[0] - self.baseline)

    def effects(self, scaled: Int64Array, number: Int32Array, count: int) -> list[int]:
        """Change of the step time by each of the classes 0 to count - 1 alone."""
        found: list[float] = []
        width = max(1, _MOST_CELLS // max(self.graph.rows, 1))
        for first in range(0, count, width):
            some = range(first, min(first + width, count))
            found += self.step_times(
                [np.where(number == one, scaled, self.graph.duration_ns) for one in some]
            )
        return [round(time - self.baseline) for time in found]
