"""Steps of a run as propagation sees them: chained, or apart.

Usually the end of one step lets the next begin, and a step lasts from the end of the one before
to its own.  Traces of sampled steps have nothing that leads from one to the next: their steps
are held at the times they were recorded at, and whatever made them shorter would not move the
next one.  Such steps are laid side by side instead, each beginning at 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.propagation import BatchTiming

__all__ = ["StepModel"]


@dataclass(frozen=True, eq=False)
class StepModel:
    """A graph and the steps of its rows.

    Attributes:
        graph: to propagate; if the steps are apart, each of them begins at 0.
        number: int32[n], step of every row counted from 0; -1: in no step.
        apart: whether nothing leads from one step to another.
    """

    graph: Graph
    number: Int32Array
    apart: bool

    @classmethod
    def of(cls, graph: Graph, rows: pl.DataFrame) -> StepModel:
        """Find the steps of a node table in the graph's order."""
        dense = rows["step"].rank("dense").cast(pl.Int32).fill_null(0)
        number = (dense - 1).to_numpy()
        release = graph.release_ns
        if release is None or not _apart(graph, number):
            return cls(graph, number, apart=False)
        free = np.diff(graph.dep_offsets) == 0
        begin = np.full(int(number.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(begin, number[free], release[free])
        # Rows that depend on something are released early enough anyway.
        shifted = np.where(free, release - begin[number], 0)
        return cls(replace(graph, release_ns=shifted), number, apart=True)

    def durations(self, batch: BatchTiming) -> Int64Array:
        """int64[K, S], duration of every step; of the whole window (S = 1) without steps."""
        if self.apart and batch.step_end_ns is not None:
            return batch.step_end_ns - batch.begin_ns
        if batch.step_end_ns is None or not batch.step_end_ns.shape[1]:
            return batch.makespan_ns[:, None]
        return batch.step_ns


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
