"""Step times of a job without launch delays, for any durations of its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from prismcalib.blocks import Tables
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.launch_delays import OwnDelays, delays_put_back
from prismcalib.propagation import Engine, pick_engine, propagate, propagate_batch
from prismcalib.step_times import (
    begins_of_cut,
    counted_steps,
    cut_before,
    step_durations,
    step_table,
    warmup_of,
)
from prismcalib.steps import step_numbers
from prismtrace.schema import TraceHeader

__all__ = ["Timeline", "labelled"]

# What the durations of the scenarios of one batch may take.
_BATCH_BYTES = 2**28
_MOST_SCENARIOS = 64


@dataclass(frozen=True, eq=False)
class Timeline:
    """A graph without launch delays, and how it is cut into steps.

    Attributes:
        graph: no lags, no releases.
        order: int32[n], an order of completion.
        step: int32[n], position of the step of each row, -1: in none.
        steps: their numbers.
        warmup: how many first steps do not count.
        separate: nothing leads from one step to another, so all of them start at time 0.
        cut: positions of the steps that start at time 0 in any case.
        ahead_ns: by position, how long some rank is in such a step before it begins, for the others
            are not done with the one before. That one is cut out, so nothing else tells.
    """

    graph: Graph
    order: Int32Array
    step: Int32Array
    steps: tuple[int | None, ...]
    warmup: int
    separate: bool
    cut: tuple[int, ...]
    ahead_ns: Mapping[int, int]
    engine: Engine

    @classmethod
    def of(cls, graph: Graph, nodes: Tables, header: TraceHeader, engine: Engine) -> Timeline:
        """Take the launch delays out of a graph and find its steps."""
        bare = replace(graph, dep_lag_ns=None, release_ns=None)
        # Dozens of propagations follow: what compiling costs is paid once.
        chosen = pick_engine(graph.rows, _MOST_SCENARIOS) if engine == "auto" else engine
        given = pl.concat(nodes.tables(["step"]))["step"]
        step = np.zeros(graph.rows, np.int32)
        steps: tuple[int | None, ...] = (None,)
        if given.count():
            step = step_numbers(given)
            steps = tuple(given.drop_nulls().unique().sort().to_list())
        numbers = [number for number in steps if number is not None]
        return cls(
            graph=bare,
            order=propagate(bare, chosen).order,
            step=step,
            steps=steps,
            warmup=min(warmup_of(header), len(steps) - 1),
            separate=_separate(graph, step),
            cut=cut_before(header, numbers),
            ahead_ns=_ahead(nodes, header, numbers),
            engine=chosen,
        )

    def step_ns(self, durations: Int64Array, graph: Graph | None = None) -> Int64Array:
        """int64[K, S], times of the steps that count, with durations int64[n, K].

        `graph`: with some of the launch delays; by default without.
        """
        timing = propagate_batch(
            self.graph if graph is None else graph,
            durations,
            steps=self.step,
            order=self.order,
            engine=self.engine,
        )
        own = range(len(self.steps)) if self.separate else self.cut
        if own and timing.step_end_ns is not None:
            begins = {place: timing.begin_ns + self.ahead_ns.get(place, 0) for place in own}
            times = step_durations(timing.begin_ns, timing.step_end_ns, cut=begins)
            return counted_steps(times, self.warmup)
        return counted_steps(timing.step_ns, self.warmup)

    def mean_step_ns(
        self, scenarios: Sequence[Callable[[], Int64Array]]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """float64[K], mean step time of K sets of durations int64[n], as many at once as fit."""
        blocks = []
        for first in range(0, len(scenarios), self.width):
            some = scenarios[first : first + self.width]
            durations = np.empty((self.graph.rows, len(some)), np.int64)
            for column, make in enumerate(some):
                durations[:, column] = make()
            blocks.append(self.step_ns(durations).mean(axis=1))
        return np.concatenate(blocks)

    def delays(self, graph: Graph, nodes: Tables) -> tuple[OwnDelays, ...]:
        """What the launch delays of single ranks cost; `graph` has those of all."""
        rank = labelled(nodes, pl.col("rank").alias("label"))
        laid_out = bool(self.cut) or (self.separate and len(self.steps) > 1)
        actual = self.graph.duration_ns[:, None]
        return delays_put_back(
            graph, rank, lambda some: float(self.step_ns(actual, some).mean()), starts=not laid_out
        )

    @property
    def width(self) -> int:
        """Scenarios to propagate at once."""
        return max(2, min(_MOST_SCENARIOS, _BATCH_BYTES // (8 * self.graph.rows)))

    def observed_ns(self, nodes: Tables, header: TraceHeader) -> Int64Array:
        """int64[S], the same steps as the trace has them, launch delays included."""
        start, end = pl.col("start_ns").min(), pl.col("end_ns").max()
        ends = (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns")
        parts = pl.concat(
            table.group_by("step").agg(start, end)
            for table in nodes.tables(["step", "start_ns", ends])
        )
        bounds = parts.drop_nulls("step").group_by("step").agg(start, end).sort("step")
        times = step_table(bounds, header, *parts.select(start, end).row(0))["duration_ns"]
        return counted_steps(times.to_numpy(), self.warmup)


def _ahead(nodes: Tables, header: TraceHeader, steps: Sequence[int]) -> dict[int, int]:
    """By position of the steps that are cut: from the first start in it to when it begins."""
    if not cut_before(header, steps):
        return {}
    first = pl.col("start_ns").min()
    parts = pl.concat(
        table.group_by("step").agg(first) for table in nodes.tables(["step", "start_ns"])
    )
    of_step = dict(parts.drop_nulls().group_by("step").agg(first).rows())
    firsts = {place: of_step[step] for place, step in enumerate(steps)}
    begins = begins_of_cut(header, steps, firsts)
    return {place: max(begin - firsts[place], 0) for place, begin in begins.items()}


def _separate(graph: Graph, step: Int32Array) -> bool:
    if (step < 0).any():
        return False
    owner = np.repeat(step, np.diff(graph.dep_offsets))
    if (step[graph.dep_rows] != owner).any() or graph.wait_rows is not None:
        return False
    member = graph.instance >= 0
    some = np.zeros(graph.instances, np.int32)
    some[graph.instance[member]] = step[member]
    return bool((some[graph.instance[member]] == step[member]).all())


def labelled(nodes: Tables, label: pl.Expr) -> Int32Array:
    """int32[n], the column `label` of all tables."""
    return np.concatenate([table["label"].to_numpy() for table in nodes.tables([label])])
