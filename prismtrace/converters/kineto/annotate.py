"""Step and phase of each operation, from the CPU-side ranges that enclose its launch."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter

import polars as pl

from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.kineto.reader import KinetoFile
from prismtrace.errors import StepError
from prismtrace.schema import Phase

__all__ = ["annotate", "step_ranges"]

_PROFILER_STEP = r"^ProfilerStep#(\d+)$"
_BACKWARD_OP = "autograd::engine::evaluate_function"
# Ranges that people and torch write around the parts of a step.
_PHASES = (
    (re.compile(r"^Optimizer\.step|\boptimizer(_step)?\b", re.IGNORECASE), Phase.OPTIMIZER),
    (re.compile(r"\bbackward\b", re.IGNORECASE), Phase.BACKWARD),
    (re.compile(r"\bforward\b", re.IGNORECASE), Phase.FORWARD),
)

Range = tuple[int, int, int]
"""(start, end, number)."""


def step_ranges(file: KinetoFile, step_from: str) -> list[Range]:
    """The training steps of a file as (start, end, number), by start.

    Args:
        file: a file that was read.
        step_from: ``profilerstep`` (``ProfilerStep#N`` ranges), ``whole`` (the file is one
            step), ``auto`` (the former if there, else the latter) or a pattern for the
            names of annotations; its first group, if any, is the step's number, otherwise
            they are counted from 0.

    Raises:
        StepError: the wanted ranges are not in the file, or the pattern is invalid.
    """
    if step_from == "whole":
        return [(-(2**63), 2**63, 0)]
    pattern = _PROFILER_STEP if step_from in ("auto", "profilerstep") else step_from
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise StepError(f"--step-from {step_from!r} is no valid pattern: {error}") from error
    found = _named_ranges(file, compiled)
    if found:
        return found
    if step_from == "auto":
        return [(-(2**63), 2**63, 0)]
    raise StepError(
        f"no annotation matches {pattern!r}",
        where=str(file.path),
        hint="use --step-from whole, or a pattern that matches a record_function name; "
        f"present: {', '.join(_annotation_names(file)[:8]) or 'none'}",
    )


def _named_ranges(file: KinetoFile, pattern: re.Pattern[str]) -> list[Range]:
    notes = _annotations(file).sort("start_ns")
    found: list[Range] = []
    for name, start, duration in notes.select("name", "start_ns", "dur_ns").iter_rows():
        match = pattern.search(name)
        if match is not None:
            number = match[1] if match.groups() else None
            found.append(
                (
                    start,
                    start + duration,
                    int(number) if number and number.isdigit() else len(found),
                )
            )
    return found


def _annotations(file: KinetoFile) -> pl.DataFrame:
    """User annotations and, for files of 2021, the operators that played their part."""
    name = pl.col("name").cast(pl.String)
    category = pl.col("cat").cast(pl.String)
    return (
        file.events.filter(
            (category == "user_annotation")
            | ((category == "cpu_op") & name.str.starts_with("ProfilerStep#"))
        )
        .select("start_ns", "dur_ns", "tid", name=name)
        .filter(~pl.col("name").str.contains("^(?:nccl|gloo):"))
    )


def _annotation_names(file: KinetoFile) -> list[str]:
    return _annotations(file).get_column("name").unique(maintain_order=True).to_list()


def annotate(ops: IssuedOps, file: KinetoFile, step_from: str, counts: Counter[str]) -> None:
    """Fill `ops.step` and `ops.phase` by launch time (start time where there is no launch)."""
    steps = step_ranges(file, step_from)
    step_starts = [start for start, _, _ in steps]
    phases = _PhaseRanges(file)
    outside = 0
    for position in range(len(ops)):
        launch = ops.launch_ns[position]
        at = launch if launch is not None else ops.start_ns[position]
        index = bisect_right(step_starts, at) - 1
        if index >= 0 and at <= steps[index][1]:
            ops.step[position] = steps[index][2]
        else:
            outside += 1
        if launch is not None:
            ops.phase[position] = phases.at(launch, ops.launch_tid[position])
    counts["outside-steps"] += outside


class _PhaseRanges:
    """Ranges that tell the phase; the innermost one around a launch decides."""

    def __init__(self, file: KinetoFile) -> None:
        name = pl.col("name").cast(pl.String)
        backward = file.events.filter(
            (pl.col("cat").cast(pl.String) == "cpu_op") & name.str.starts_with(_BACKWARD_OP)
        ).select("start_ns", "dur_ns", "tid", name=name)
        ranges: list[tuple[int, int, int | None, Phase]] = []
        for text, start, duration, tid in (
            pl.concat([backward, _annotations(file).select(backward.columns)])
            .select("name", "start_ns", "dur_ns", "tid")
            .iter_rows()
        ):
            phase = (
                Phase.BACKWARD
                if text.startswith(_BACKWARD_OP)
                else next((found for rule, found in _PHASES if rule.search(text)), None)
            )
            if phase is not None:
                ranges.append((start, start + duration, tid, phase))
        self._by_thread: dict[int | None, list[tuple[int, int, Phase]]] = {}
        for start, end, tid, phase in sorted(ranges, key=lambda item: item[0]):
            self._by_thread.setdefault(tid, []).append((start, end, phase))
        self._starts = {
            tid: [start for start, _, _ in entries] for tid, entries in self._by_thread.items()
        }

    def at(self, time_ns: int, tid: int | None) -> Phase | None:
        """Phase of a launch. Nesting is shallow: a look at a few earlier ranges is enough."""
        starts = self._starts.get(tid)
        if starts is None:
            return None
        entries = self._by_thread[tid]
        last = bisect_right(starts, time_ns)
        for start, end, phase in reversed(entries[max(0, last - 16) : last]):
            if start <= time_ns <= end:
                return phase
        return None
