"""How long a step takes: one rule for every step time that the toolkit states.

A step lasts from the end of the step before to its own last end, over all ranks
(`step_durations`), and *the* step time is the median of the steps after the warm-up
(`warmup_of`, `typical_ns`). Where a step was cut out of the trace, the next one lasts from its own
first start, or from when it was left out by `prismcalib.chosen_steps`: that one's end is known
(`cut_before`, `STEP_BEGINS`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from prismcalib.blocks import Layout
from prismcalib.graph import Int32Array, Int64Array
from prismtrace.headers import CUT_BEFORE
from prismtrace.schema import TraceHeader

__all__ = [
    "STEP_BEGINS",
    "StepTimes",
    "begins_of_cut",
    "begun_before",
    "counted_steps",
    "cut_before",
    "laid_out",
    "step_durations",
    "step_table",
    "step_table_of",
    "steps_of",
    "steps_text",
    "typical_ns",
    "warmup_of",
]


STEP_BEGINS = "step_begins_ns"
"""In `TraceHeader.extra` in memory: when steps begin whose predecessor was left out, if known."""


def warmup_of(header: TraceHeader) -> int:
    """How many first steps of a trace do not count.

    Of merged slices as many as `merge --warmup` said (1 if nothing); of a recorded run none unless
    it was said, since profilers have a warm-up of their own; nor where the first were cut out.
    """
    if begun_before(header):
        return 0
    return int(header.extra.get("merge", {}).get("warmup") or 0)


def begun_before(header: TraceHeader) -> bool:
    """Whether the first step follows others that were cut out."""
    return bool(header.steps) and str(header.steps[0]) in header.extra.get(CUT_BEFORE, {})


def laid_out(header: TraceHeader) -> bool:
    """Whether the steps were sampled from a longer run and laid out one behind the other."""
    return bool(header.extra.get("sampled_steps"))


def cut_before(header: TraceHeader, steps: Sequence[int]) -> tuple[int, ...]:
    """Positions of the steps, ascending, that do not follow the one before them in the trace."""
    cut = header.extra.get(CUT_BEFORE, {})
    return tuple(position for position, step in enumerate(steps) if str(step) in cut)


def begins_of_cut(
    header: TraceHeader, steps: Sequence[int], firsts_ns: Mapping[int, int]
) -> dict[int, int]:
    """When the steps at the positions of `cut_before` begin.

    Args:
        header: of the trace.
        steps: their numbers, ascending.
        firsts_ns: by position, where it is known: the first start in the step.
    """
    known = header.extra.get(STEP_BEGINS, {})
    begins = {
        place: known.get(str(steps[place]), firsts_ns.get(place))
        for place in cut_before(header, steps)
    }
    return {place: int(begin) for place, begin in begins.items() if begin is not None}


def step_durations(
    begin_ns: int,
    ends_ns: Int64Array,
    firsts_ns: Int64Array | None = None,
    *,
    cut: Mapping[int, int] | None = None,
) -> Int64Array:
    """int64[..., S]: from the end of the steps before, or `begin_ns`, to the own last end.

    A step that ends before an earlier one takes no time.

    Args:
        begin_ns: when the first step begins.
        ends_ns: int64[..., S], last ends.
        firsts_ns: int64[S], first starts of steps that are `laid_out`: repairs may move the end
            of one behind the start of the next, which waits for nothing in it.
        cut: positions of steps that follow none in the trace, and when those begin.
    """
    if cut:
        places = sorted({0, *cut})
        runs = zip(places, [*places[1:], ends_ns.shape[-1]], strict=True)
        parts = [
            step_durations(
                cut.get(first, begin_ns),
                ends_ns[..., first:behind],
                None if firsts_ns is None else firsts_ns[first:behind],
            )
            for first, behind in runs
        ]
        return np.concatenate(parts, axis=-1)
    reached = np.maximum(np.maximum.accumulate(ends_ns, axis=-1), begin_ns)
    if firsts_ns is None:
        return np.diff(reached, axis=-1, prepend=begin_ns)
    begins = np.minimum(np.append([begin_ns], reached[:-1]), firsts_ns)
    lasting: Int64Array = ends_ns - begins
    return lasting


def step_table(
    bounds: pl.DataFrame, header: TraceHeader, first_start_ns: int, last_end_ns: int
) -> pl.DataFrame:
    """step, duration_ns; one row with step null for the whole window if there are no steps.

    Args:
        bounds: step, start_ns (first), end_ns (last), ascending.
        header: of the trace.
        first_start_ns, last_end_ns: of the window.
    """
    steps, ends = bounds["step"].cast(pl.Int32), bounds["end_ns"].to_numpy()
    if not bounds.height:
        steps, ends = pl.Series([None], dtype=pl.Int32), np.array([last_end_ns], np.int64)
        durations = step_durations(first_start_ns, ends)
    else:
        firsts = bounds["start_ns"].to_numpy()
        cut = begins_of_cut(header, steps.to_list(), dict(enumerate(firsts.tolist())))
        laid = laid_out(header)
        durations = step_durations(
            0 if laid else first_start_ns, ends, firsts if laid else None, cut=cut
        )
    return pl.DataFrame({"step": steps, "duration_ns": durations})


def step_table_of(layout: Layout, begin_ns: int, end_ns: int) -> pl.DataFrame:
    """`step_table` of a whole trace; `begin_ns` and `end_ns` are those of the whole trace."""
    start, end = pl.col("start_ns").min(), pl.col("end_ns").max()
    ends = (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns")
    bounds = pl.concat(
        block.nodes.drop_nulls("step").group_by("step").agg(start, end)
        for block in layout.blocks(["step", "start_ns", ends])
    )
    whole = bounds.group_by("step").agg(start, end).sort("step")
    return step_table(whole, layout.trace.header, begin_ns, end_ns)


def counted_steps(times_ns: Int64Array, warmup: int) -> Int64Array:
    """int64[..., S - warmup]: the steps after the warm-up, at least the last."""
    return times_ns[..., min(warmup, times_ns.shape[-1] - 1) :]


def typical_ns(times_ns: Int64Array | Sequence[int], warmup: int) -> int:
    """The step time: median of the steps that count."""
    return round(float(np.median(counted_steps(np.asarray(times_ns), warmup))))


def steps_text(steps: int, warmup: int, average: str = "median") -> str:
    """Which steps a step time is made from: `median of 2 steps, the first left out (warm-up)`."""
    left = min(warmup, steps - 1)
    counted = steps - left
    text = "one step" if counted == 1 else f"{average} of {counted} steps"
    if not left:
        return text
    return f"{text}, the first{f' {left}' if left > 1 else ''} left out (warm-up)"


@dataclass(frozen=True)
class StepTimes:
    """Duration of every step in ns; one entry, the whole window, if there are no steps.

    A step lasts from the end of the step before (the first: from the first start) to its own
    last end, over all ranks.
    """

    durations_ns: tuple[int, ...]

    @classmethod
    def between(cls, begin_ns: int, ends_ns: list[int], last_ns: int) -> StepTimes:
        """From the first start and the ends of the steps, or the last end if there are none."""
        ends = np.array(ends_ns or [last_ns], np.int64)
        return cls(tuple(step_durations(begin_ns, ends).tolist()))

    def steady_ns(self, warmup: int) -> int:
        """Median of the steps after the first `warmup`, at least of the last one."""
        return typical_ns(self.durations_ns, warmup)


def steps_of(step: Int32Array, start: Int64Array, end: Int64Array) -> StepTimes:
    """Step times of rows whose times lie on one clock."""
    marked = np.unique(step[step >= 0])
    ends = [int(end[step == number].max()) for number in marked]
    return StepTimes.between(int(start.min()), ends, int(end.max()))
