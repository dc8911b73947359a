"""What if?  The step time of a run that was a little different.

    import prismcalib

    answer = prismcalib.what_if("aligned.parquet", [prismcalib.Scale("kind == 'all_reduce'", 0.5)])
    answer.scenarios[0].delta_ns, answer.scenarios[0].critical_path.shares("kind")

All scenarios share one graph: those that change durations only are propagated together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from prismcalib.block_graph import step_model
from prismcalib.block_picker import BlockPicker
from prismcalib.blocks import Layout, is_large
from prismcalib.build import graph_from_trace
from prismcalib.chosen_steps import ChosenSteps, chosen_steps, numbered_as_whole, told
from prismcalib.durations import format_ns
from prismcalib.edits import Draft, Edit, scenario_edits
from prismcalib.errors import PredicateError, ScenarioError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.paths import CriticalPath, calibrated_trace, cut_path
from prismcalib.predicates import RowPicker
from prismcalib.propagation import (
    BatchTiming,
    Engine,
    Timing,
    critical_arrays,
    pick_engine,
    propagate,
    propagate_batch,
)
from prismcalib.step_times import typical_ns
from prismcalib.steps import StepModel
from prismcalib.waiting import WaitRules, waiting_rows
from prismtrace.trace import Trace

__all__ = ["Scenario", "WhatIf", "what_if"]

BASELINE = "as it was"
"""Name of the run without edits."""

_SHOWN = 3  # scenarios in the text of an answer

# Start, end and duration of all rows of all scenarios of one batch: at most about 1.5 GB.
_MOST_CELLS = 2**26
# Beside the graph: order, ranks, and of one scenario durations and times, some of them twice.
_RUN_BYTES = 60


@dataclass(frozen=True, eq=False, repr=False)
class Scenario:
    """One version of the run.

    Attributes:
        name: what the caller calls it.
        edited: how many rows its edits apply to.
        steps_ns: duration of every step, int64[S]; of the whole window if there are no steps.
        warmup: how many first steps do not count in the step time (see `merge --warmup`).
        length_ns: last end minus first start over all ranks; of the step that the critical path
            goes through, if nothing connects the steps.
        delta_ns: its step time minus that of the baseline; negative is faster.
    """

    name: str
    edited: int
    steps_ns: Int64Array
    length_ns: int
    delta_ns: int
    _path: _PathRows
    warmup: int = 0

    def __repr__(self) -> str:
        """The scenario in a line; times of all rows are behind it."""
        return (
            f"<Scenario {self.name!r}: step {format_ns(self.step_ns)}, change "
            f"{format_ns(self.delta_ns)}, {self.edited:,} rows edited>"
        )

    @property
    def step_ns(self) -> int:
        """Step time: median over the steps after the warm-up."""
        return typical_ns(self.steps_ns, self.warmup)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """What this version of the run waits for."""
        return self._path.cut(self.length_ns)

    def as_dict(self, limit: int = 5) -> dict[str, Any]:
        """The scenario as JSON values, with the `limit` longest segments of its path."""
        path = self.critical_path
        return {
            "name": self.name,
            "edited_rows": self.edited,
            "step_ns": self.step_ns,
            "delta_ns": self.delta_ns,
            "steps_ns": self.steps_ns.tolist(),
            "warmup_steps": self.warmup,
            "length_ns": self.length_ns,
            "critical_path": path.as_dict(limit),
        }


@dataclass(frozen=True, eq=False, repr=False)
class WhatIf:
    """The run as it was, and every scenario.

    Attributes:
        baseline: the run as it was.
        scenarios: in the order in which they were given.
        looked_at: which steps of the trace they are about; None: all that was given.
    """

    baseline: Scenario
    scenarios: tuple[Scenario, ...]
    looked_at: ChosenSteps | None = None

    def __repr__(self) -> str:
        """How long a step took, and how many scenarios there are, the first of them in a line."""
        more = len(self.scenarios) - _SHOWN
        shown = ", ".join(map(repr, self.scenarios[:_SHOWN]))
        return f"<WhatIf: step {format_ns(self.baseline.step_ns)} {BASELINE}; {shown}" + (
            f", ... {more} more>" if more > 0 else ">"
        )

    def as_dict(self, limit: int = 5) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            **told(self.looked_at),
            "baseline": self.baseline.as_dict(limit),
            "scenarios": [scenario.as_dict(limit) for scenario in self.scenarios],
        }


def what_if(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    edits: Sequence[Edit] | Mapping[str, Sequence[Edit]],
    *,
    rules: WaitRules | None = None,
    engine: Engine = "auto",
    steps: str = "auto",
) -> WhatIf:
    """Step times and critical paths of edited versions of a run; the trace is not changed.

    Args:
        source: a calibrated trace.
        edits: of one scenario, or lists of edits by the name of the scenario; they apply in
            the order given.
        rules: wait rules of all scenarios, beside those that the trace was merged with.
        engine: see `prismcalib.propagate`.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`; of traces to take
            durations from, the same.

    Raises:
        MergeInputError: the trace is not calibrated.
        StepError: steps that are not in it.
        PredicateError: an edit means no rows, or cannot be understood.
        ScenarioError: no scenario, a factor or duration below 0, or a trace to take durations
            from that does not fit.
    """
    named = scenario_edits(edits, "edited")
    if not named:
        raise ScenarioError("no scenario was given")
    with chosen_steps(calibrated_trace(source), steps) as (trace, looked_at):
        try:
            answer = _answer(trace, named, rules, engine, looked_at)
        except PredicateError as error:
            if not looked_at.everything:
                error.hint = "; ".join(filter(None, (error.hint, looked_at.sentence)))
            raise
        if not looked_at.everything:
            # Paths are cut when they are looked at, from rows that may be gone by then.
            for scenario in (answer.baseline, *answer.scenarios):
                _ = scenario.critical_path
        return replace(answer, looked_at=looked_at)


def _answer(
    trace: Trace,
    named: Mapping[str, list[Edit]],
    rules: WaitRules | None,
    engine: Engine,
    looked_at: ChosenSteps,
) -> WhatIf:
    """The answer of `what_if` for a trace of nothing but the steps looked at."""
    model = _Model.of(trace, engine, len(named), looked_at)
    graph = model.steps.graph
    order = propagate(graph, model.engine).order
    baseline = model.run(graph, [model.draft(graph)], order)[0]
    if rules:
        loose = WaitRules.of(trace.header).joined_with(rules)
        graph = step_model(trace, loose, also=_RUN_BYTES).graph
        order = propagate(graph, model.engine).order
    runs: list[_Run] = []
    width = max(1, _MOST_CELLS // max(graph.rows, 1))
    for some in _some_at_once(named.items(), width):
        drafts = [_edited(model.draft(graph), name, listed) for name, listed in some]
        runs += model.run(graph, drafts, order)

    def scenario(name: str, draft_edited: int, run: _Run) -> Scenario:
        typical = model.steps.typical_ns
        delta = typical(run.steps_ns) - typical(baseline.steps_ns)
        return Scenario(
            name, draft_edited, run.steps_ns, run.length_ns, delta, run.path, model.steps.warmup
        )

    return WhatIf(
        baseline=scenario(BASELINE, 0, baseline),
        scenarios=tuple(
            scenario(name, run.edited, run) for name, run in zip(named, runs, strict=True)
        ),
    )


def _some_at_once(
    named: Iterable[tuple[str, list[Edit]]], count: int
) -> Iterator[list[tuple[str, list[Edit]]]]:
    left = iter(named)
    while some := list(islice(left, count)):
        yield some


def _edited(draft: Draft, name: str, edits: Sequence[Edit]) -> Draft:
    for edit in edits:
        try:
            edit.apply(draft)
        except (PredicateError, ScenarioError) as error:
            place = f"{error.where}, in scenario {name!r}" if error.where else f"scenario {name!r}"
            raise type(error)(error.message, where=place, hint=error.hint) from error
    return draft


@dataclass(frozen=True, eq=False)
class _PathRows:
    """A critical path as row numbers and the times that belong to it; cut only if looked at."""

    picker: RowPicker
    left: Int32Array
    reached_rank: Int32Array
    reached_start_ns: Int64Array
    left_end_ns: Int64Array
    transfers: np.ndarray[tuple[int], np.dtype[np.bool_]]
    first_start_ns: int

    def cut(self, length_ns: int) -> CriticalPath:
        return cut_path(
            self.picker.at(self.left),
            self.picker.header,
            reached_start_ns=self.reached_start_ns,
            left_end_ns=self.left_end_ns,
            transfers=self.transfers,
            reached_rank=self.reached_rank,
            first_start_ns=self.first_start_ns,
            length_ns=length_ns,
        )


@dataclass(frozen=True, eq=False)
class _Run:
    """What propagating one draft gives."""

    edited: int
    steps_ns: Int64Array
    length_ns: int
    path: _PathRows


def _opened(trace: Trace) -> tuple[RowPicker, StepModel]:
    """What finds the rows of a trace, and its graph with its steps."""
    if is_large(trace):
        return BlockPicker(Layout.of(trace)), step_model(trace, also=_RUN_BYTES)
    graph, rows = graph_from_trace(trace)
    return RowPicker(numbered_as_whole(rows), trace.header), StepModel.of(graph, rows, trace.header)


@dataclass(frozen=True, eq=False)
class _Model:
    """A trace ready to be propagated again and again."""

    picker: RowPicker
    steps: StepModel
    engine: Engine
    rank: Int32Array
    looked_at: ChosenSteps

    @classmethod
    def of(cls, trace: Trace, engine: Engine, scenarios: int, looked_at: ChosenSteps) -> _Model:
        picker, steps = _opened(trace)
        rows = steps.graph.rows
        if engine == "auto":
            engine = pick_engine(rows, scenarios + 1)
        rank = np.concatenate([part["rank"].to_numpy() for part in picker.places()])
        return cls(picker, steps, engine, rank, looked_at)

    def draft(self, graph: Graph) -> Draft:
        """Nothing edited yet."""
        return Draft.of(self.picker, graph, self.looked_at, apart=self.steps.apart)

    def run(self, graph: Graph, drafts: Sequence[Draft], order: Int32Array) -> list[_Run]:
        """Propagate all drafts, those with the structure and lags of `graph` together.

        `order`: of completion of the graph.
        """
        together = [number for number, draft in enumerate(drafts) if draft.graph is graph]
        batch = max(1, _MOST_CELLS // max(graph.rows, 1))
        runs: dict[int, _Run] = {}
        for first in range(0, len(together), batch):
            numbers = together[first : first + batch]
            durations = np.stack([drafts[number].duration_ns for number in numbers], axis=1)
            timing = self._batch(graph, durations, order)
            for column, number in enumerate(numbers):
                runs[number] = self._run(graph, drafts[number], timing, column)
        for number, draft in enumerate(drafts):
            if number not in runs:
                known = order if draft.same_order else None
                timing = self._batch(draft.graph, draft.duration_ns[:, None], known)
                runs[number] = self._run(draft.graph, draft, timing, 0)
        return [runs[number] for number in range(len(drafts))]

    def _batch(self, graph: Graph, durations: Int64Array, order: Int32Array | None) -> BatchTiming:
        return propagate_batch(
            graph, durations, steps=self.steps.number, order=order, times=True, engine=self.engine
        )

    def _run(self, graph: Graph, draft: Draft, batch: BatchTiming, column: int) -> _Run:
        assert batch.start_ns is not None  # noqa: S101 - asked for
        assert batch.end_ns is not None  # noqa: S101 - asked for
        timing = Timing(
            start_ns=batch.start_ns[:, column],
            end_ns=batch.end_ns[:, column],
            duration_ns=draft.duration_ns,
            order=np.empty(0, np.int32),
        )
        length, last, begin = int(batch.makespan_ns[column]), None, batch.begin_ns
        steps = self.steps.durations(batch)[column]
        if self.steps.apart:
            # The path of one step, a typical one; of all together it would be the longest one's.
            typical = int(np.argsort(steps, kind="stable")[(len(steps) - 1) // 2])
            rows = np.flatnonzero(self.steps.number == typical)
            last, length, begin = int(rows[timing.end_ns[rows].argmax()]), int(steps[typical]), 0
        reached, left = critical_arrays(graph, timing, self.engine, last)
        return _Run(
            edited=int(draft.edited.sum()),
            steps_ns=steps,
            length_ns=length,
            path=_PathRows(
                self.picker,
                left,
                self.rank[reached],
                timing.start_ns[reached],
                timing.end_ns[left],
                waiting_rows(graph)[left],
                begin,
            ),
        )
