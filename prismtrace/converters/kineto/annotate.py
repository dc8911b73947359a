"""Step, microbatch and phase of each operation, from the CPU-side ranges that enclose its launch."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import TypeVar

import polars as pl

from prismtrace.annotation_names import phase_in_name, read_annotation
from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.profile import Profile
from prismtrace.errors import StepError
from prismtrace.schema import Phase

__all__ = ["annotate", "step_pattern", "step_ranges"]

_PROFILER_STEP = r"^ProfilerStep#(\d+)$"
_BACKWARD_OP = "autograd::engine::evaluate_function"
_DIGITS = 19  # of a number that may be a step's

Range = tuple[int, int, int]
"""(start, end, number)."""


def step_ranges(file: Profile, step_from: str, counts: Counter[str]) -> list[Range]:
    """The training steps of a file as (start, end, number), by start.

    Args:
        file: a file that was read.
        step_from: ``profilerstep`` (``ProfilerStep#N`` ranges), ``whole`` (the file is one
            step), ``auto`` (the former if there, else annotations such as ``step 3``, else the
            latter) or a pattern for the names of annotations; its first group, if any, is the
            step's number, otherwise they are counted from 0.
        counts: numbers that had to be replaced or assumed are counted here.

    Raises:
        StepError: the wanted ranges are not in the file, or the pattern is invalid.
    """
    if step_from == "whole":
        return [(-(2**63), 2**63, 0)]
    pattern = step_pattern(step_from)
    found = _named_ranges(file, pattern, counts)
    if not found and step_from == "auto":
        found = _ascending(_numbered_ranges(file, lambda name: read_annotation(name).step), counts)
    if found:
        return found
    if step_from == "auto":
        counts["assumed-one-step"] += 1
        return [(-(2**63), 2**63, 0)]
    raise StepError(
        f"no annotation matches {pattern.pattern!r}",
        where=str(file.path),
        hint="use --step-from whole, or a pattern that matches a record_function name; "
        f"present: {', '.join(_annotation_names(file)[:8]) or 'none'}",
    )


def step_pattern(step_from: str) -> re.Pattern[str]:
    """The pattern of the names of steps that `step_from` stands for; see `step_ranges`.

    Raises:
        StepError: it is no pattern, or matches every name.
    """
    try:
        pattern = re.compile(_PROFILER_STEP if step_from in ("auto", "profilerstep") else step_from)
    except (re.error, RecursionError, OverflowError) as error:
        raise StepError(
            f"{step_from!r} is no valid pattern: {error}",
            where="--step-from",
            hint="a regular expression such as 'train_step_(\\d+)'",
        ) from error
    if pattern.search(""):
        raise StepError(
            f"{step_from!r} matches every annotation",
            where="--step-from",
            hint="a regular expression such as 'train_step_(\\d+)'",
        )
    return pattern


def _named_ranges(file: Profile, pattern: re.Pattern[str], counts: Counter[str]) -> list[Range]:
    notes = _annotations(file).sort("start_ns")
    found: list[Range] = []
    for name, start, duration in notes.select("name", "start_ns", "dur_ns").iter_rows():
        match = pattern.search(name)
        if match is not None:
            number = match[1] if match.groups() else None
            short = number is not None and number.isdecimal() and len(number) < _DIGITS
            known = short and int(number or 0) < 2**31
            found.append((start, start + duration, int(number or 0) if known else len(found)))
    return _ascending(found, counts)


def _numbered_ranges(file: Profile, number_of: Callable[[str], int | None]) -> list[Range]:
    """Annotations to whose name a number belongs, by start; an enclosing one comes first."""
    notes = _annotations(file)
    names = notes.get_column("name").unique().to_list()
    numbers = {name: number for name in names if (number := number_of(name)) is not None}
    chosen = notes.filter(pl.col("name").is_in(list(numbers))).sort(
        "start_ns", "dur_ns", descending=[False, True], maintain_order=True
    )
    return [
        (start, start + duration, numbers[name])
        for name, start, duration in chosen.select("name", "start_ns", "dur_ns").iter_rows()
    ]


def _ascending(found: list[Range], counts: Counter[str]) -> list[Range]:
    numbers = [number for *_, number in found]
    if numbers != sorted(numbers):
        # Steps of a trace ascend in time; the names do not, so they are of no use.
        counts["renumbered-steps"] += len(found)
        return [(start, end, k) for k, (start, end, _) in enumerate(found)]
    return found


def _annotations(file: Profile) -> pl.DataFrame:
    """User annotations and, for files of 2021, the operators that played their part."""
    name, category = pl.col("name"), pl.col("cat")
    return file.events.filter(
        ((category == "user_annotation") & ~name.str.contains("^(?:nccl|gloo):"))
        | ((category == "cpu_op") & name.str.starts_with("ProfilerStep#"))
    ).select("start_ns", "dur_ns", "tid", "name")


def _annotation_names(file: Profile) -> list[str]:
    return _annotations(file).get_column("name").unique(maintain_order=True).to_list()


def annotate(ops: IssuedOps, file: Profile, step_from: str, counts: Counter[str]) -> None:
    """Fill `ops.step`, `ops.microbatch` and `ops.phase` by when each operation was issued."""
    steps = step_ranges(file, step_from, counts)
    step_starts = [start for start, _, _ in steps]
    outside = 0
    for position, at in enumerate(ops.issue_ns):
        index = bisect_right(step_starts, at) - 1
        if index >= 0 and at <= steps[index][1]:
            ops.step[position] = steps[index][2]
        else:
            outside += 1
    counts["outside-steps"] += outside
    microbatches = _numbered_ranges(file, lambda name: read_annotation(name).microbatch)
    every = range(len(ops))
    for position, number in _innermost(ops.issue_ns, every, microbatches):
        ops.microbatch[position] = number
    phases = _phase_ranges(file)
    launched: dict[int | None, list[int]] = {}
    for position, launch in enumerate(ops.launch_ns):
        if launch is not None:
            launched.setdefault(ops.launch_tid[position], []).append(position)
    # What a thread runs that annotates nothing was asked for by another: torch's backward.
    of_all = sorted(chain.from_iterable(phases.values()), key=lambda found: (found[0], -found[1]))
    for tid, positions in launched.items():
        for position, phase in _innermost(ops.issue_ns, positions, phases.get(tid, of_all)):
            ops.phase[position] = phase


Value = TypeVar("Value")
PhaseRange = tuple[int, int, Phase]
"""(start, end, phase)."""


def _phase_ranges(file: Profile) -> dict[int | None, list[PhaseRange]]:
    """Ranges of each thread that tell the phase, by start; an enclosing one comes first."""
    backward = file.events.filter(
        (pl.col("cat") == "cpu_op") & pl.col("name").str.starts_with(_BACKWARD_OP)
    ).select("start_ns", "dur_ns", "tid", "name")
    ranges = pl.concat([backward, _annotations(file)]).sort(
        "start_ns", "dur_ns", descending=[False, True], maintain_order=True
    )
    found: dict[int | None, list[PhaseRange]] = {}
    for start, duration, tid, name in ranges.iter_rows():
        phase = _phase_of(name)
        if phase is not None:
            found.setdefault(tid, []).append((start, start + duration, phase))
    return found


@cache
def _phase_of(name: str) -> Phase | None:
    if name.startswith(_BACKWARD_OP):
        return Phase.BACKWARD
    return phase_in_name(name)


def _innermost(
    issue_ns: Sequence[int], positions: Sequence[int], ranges: Sequence[tuple[int, int, Value]]
) -> Iterator[tuple[int, Value]]:
    """Positions with the innermost range around their issue; both ascend in time."""
    open_ranges: list[tuple[int, int, Value]] = []
    upcoming = 0
    for position in positions:
        at = issue_ns[position]
        while upcoming < len(ranges) and ranges[upcoming][0] <= at:
            open_ranges.append(ranges[upcoming])
            upcoming += 1
        while open_ranges and open_ranges[-1][1] < at:
            open_ranges.pop()
        if open_ranges:
            yield position, open_ranges[-1][2]
