"""Steps of a run as propagation sees them: chained, or apart.

Usually the end of one step lets the next begin, and a step lasts from the end of the one before
to its own.  Traces of sampled steps have nothing that leads from one to the next: their steps
are held at the times they were recorded at, and whatever made them shorter would not move the
next one.  Such steps are laid side by side instead, each beginning at 0.

How long they take is said once, in `prismcalib.step_times`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.propagation import BatchTiming
from prismcalib.step_times import (
    begins_of_cut,
    counted_steps,
    cut_before,
    laid_out,
    step_durations,
    typical_ns,
    warmup_of,
)
from prismtrace.schema import TraceHeader

__all__ = ["StepModel", "step_numbers"]


@dataclass(frozen=True, eq=False)
class StepModel:
    """A graph and the steps of its rows.

    Attributes:
        graph: to propagate; if the steps are apart, each of them begins at 0.
        number: int32[n], step of every row counted from 0; -1: in no step.
        apart: whether nothing leads from one step to another.
        warmup: how many first steps do not count.
        cut: positions of steps that follow none in the trace, and when those begin; of steps
            that are not apart.
    """

    graph: Graph
    number: Int32Array
    apart: bool
    warmup: int = 0
    cut: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, rows: pl.DataFrame, header: TraceHeader) -> StepModel:
        """Find the steps of a node table in the graph's order."""
        warmup = warmup_of(header)
        number = step_numbers(rows["step"])
        release = graph.release_ns
        names = rows["step"].drop_nulls().unique().sort().to_list()
        cut = cut_before(header, names)
        if release is None or not _apart(graph, number):
            firsts = {} if release is None else _first_releases(graph, release, number, cut)
            begins = begins_of_cut(header, names, firsts)
            return cls(graph, number, apart=False, warmup=warmup, cut=begins)
        free = np.diff(graph.dep_offsets) == 0
        begin = np.full(int(number.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(begin, number[free], release[free])
        if laid_out(header):
            # A step begins where it was laid, which may be before its first operation.
            ends = np.zeros(len(begin), np.int64)
            np.maximum.at(ends, number, (rows["start_ns"] + rows["dur_ns"]).to_numpy())
            laid = np.minimum(begin, np.append([0], np.maximum.accumulate(ends)[:-1]))
            # Where the step before was cut out, nobody knows where it was laid.
            laid[list(cut)] = begin[list(cut)]
            begin = laid
        # Rows that depend on something are released early enough anyway.
        shifted = np.where(free, release - begin[number], 0)
        return cls(replace(graph, release_ns=shifted), number, apart=True, warmup=warmup)

    def durations(self, batch: BatchTiming) -> Int64Array:
        """int64[K, S], duration of every step; of the whole window (S = 1) without steps."""
        if self.apart and batch.step_end_ns is not None:
            return batch.step_end_ns
        if batch.step_end_ns is None or not batch.step_end_ns.shape[1]:
            return batch.makespan_ns[:, None]
        return step_durations(batch.begin_ns, batch.step_end_ns, cut=self.cut)

    def typical_ns(self, times_ns: Int64Array) -> int:
        """The step time, of int64[S] from `durations`."""
        return typical_ns(times_ns, self.warmup)

    def typical_each(self, batch: BatchTiming) -> list[float]:
        """The step time of each of K propagations."""
        counted = counted_steps(self.durations(batch), self.warmup)
        return [float(median) for median in np.median(counted, axis=1)]


def step_numbers(step: pl.Series) -> Int32Array:
    """int32[n]: steps counted from 0, whatever they are called; -1: none."""
    names = step.drop_nulls().unique().sort().to_numpy()
    if not len(names):
        return np.full(len(step), -1, np.int32)
    number = np.searchsorted(names, step.fill_null(names[0]).to_numpy()).astype(np.int32)
    if step.null_count():
        number[step.is_null().to_numpy()] = -1
    return number


def _first_releases(
    graph: Graph, release: Int64Array, number: Int32Array, steps: Sequence[int]
) -> dict[int, int]:
    """When some steps begin; those that something leads to are left out."""
    free = np.diff(graph.dep_offsets) == 0
    starts = {step: release[free & (number == step)] for step in steps}
    return {step: int(some.min()) for step, some in starts.items() if len(some)}


def _apart(graph: Graph, number: Int32Array) -> bool:
    """Whether all rows are in one of several steps, and nothing connects two steps."""
    if not graph.rows or number.min() < 0 or number.max() == 0:
        return False
    free = np.diff(graph.dep_offsets) == 0
    # Quick answer for chained steps: all but the first depend on something.
    if len(np.unique(number[free])) <= number.max():
        return False
    owner = np.repeat(number, np.diff(graph.dep_offsets))
    if (owner != number[graph.dep_rows]).any():
        return False
    member = graph.instance >= 0
    step_of = np.zeros(graph.instances, np.int32)
    step_of[graph.instance[member]] = number[member]
    if (step_of[graph.instance[member]] != number[member]).any():
        return False
    if graph.wait_offsets is None or graph.wait_rows is None:
        return True
    waiting = np.repeat(number, np.diff(graph.wait_offsets))
    return not (waiting != number[graph.wait_rows]).any()
