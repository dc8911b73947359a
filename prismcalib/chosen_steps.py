"""Which steps of a trace an analysis looks at: one rule for all of them.

A run that was recorded from its beginning holds imports, the making of groups, first uses and
a first step in which much is made that stays. Averages, peers and the longest path of all that say
little about training. So by default (`auto`) such a start is left out, where it is known to be in
the trace: of recordings and slices by `prismreplay`, and where `merge --warmup` says how many first
steps are not typical. Other profilers begin where they were told to; their traces are taken whole.

What is left out is cut out before anything is computed, as `prismtrace slice-out --steps` does it:
nothing of the steps looked at waits for it any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl

from prismcalib.block_graph import graph_from_blocks, table_of
from prismcalib.blocks import BY_BLOCKS, Layout, is_large
from prismcalib.build import graph_from_trace
from prismcalib.durations import format_ns
from prismcalib.extent import extent_of
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.propagation import Timing, critical_arrays, propagate, slack
from prismcalib.stall import require_members
from prismcalib.step_times import STEP_BEGINS, begun_before
from prismtrace.console import counted
from prismtrace.cutting import cut_out, slice_out
from prismtrace.errors import OutputError, StepError
from prismtrace.ranks import format_ranks
from prismtrace.schema import TraceHeader
from prismtrace.trace import Trace, node_ids, open_trace

__all__ = [
    "WHOLE_INDEX",
    "ChosenSteps",
    "chosen_steps",
    "numbered_as_whole",
    "parse_steps",
    "told",
    "whole_numbers",
]

WHOLE_INDEX = "x_whole_index"
"""Column of steps that were cut out of a trace: the row's index there, by which people know it."""

_STEPS = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_WALK_BYTES = 40


@dataclass(frozen=True)
class ChosenSteps:
    """The steps that an analysis looked at, and what it left out; times in ns.

    Attributes:
        steps: numbers of the steps looked at; empty if none are marked.
        before: numbers of the steps that were left out before them.
        before_ns: from the first start in the trace to the end of these, or to the steps looked at.
        after: numbers of those left out behind them.
        after_ns: from the end of the steps looked at to the last end in the trace.
        outside: how many rows in no step were left out.
        between: how many of them start among the steps of their rank.
        unasked: whether they were left out by default.
    """

    steps: tuple[int, ...]
    before: tuple[int, ...] = ()
    before_ns: int = 0
    after: tuple[int, ...] = ()
    after_ns: int = 0
    outside: int = 0
    between: int = 0
    unasked: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing was left out."""
        return not (self.before or self.after or self.outside)

    @property
    def sentence(self) -> str:
        """What was left out, in a line, and how to get it; empty if nothing was."""
        if self.everything:
            return ""
        start = "the job's start" if self.unasked else ""
        parts = [
            _part([start, _named(self.before)], self.before_ns),
            _part([_named(self.after) or "what follows"], self.after_ns),
            f"{counted(self.between, 'operation')} in no step" if self.between else "",
        ]
        left = ", ".join(filter(None, parts)) or "what lies outside of steps"
        asked = "; `--steps all` looks at everything" if self.unasked else ""
        return f"looking at {_named(self.steps)}; left out: {left}{asked}"

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "steps": list(self.steps),
            "left_out_before": list(self.before),
            "left_out_before_ns": self.before_ns,
            "left_out_after": list(self.after),
            "left_out_after_ns": self.after_ns,
            "left_out_among_them": self.between,
            "left_out_by_default": self.unasked,
        }


def told(looked_at: ChosenSteps | None) -> dict[str, Any]:
    """The steps looked at as a part of an answer in JSON; empty where they are not known."""
    return {} if looked_at is None else {"steps_looked_at": looked_at.as_dict()}


def _named(steps: tuple[int, ...]) -> str:
    if not steps:
        return ""
    return f"step{'' if len(steps) == 1 else 's'} {format_ranks(steps, strided=False)}"


def _part(what: list[str], time_ns: int) -> str:
    named = " and ".join(filter(None, what)) or "what comes before"
    return f"{named} ({format_ns(time_ns)})" if time_ns else ""


def parse_steps(text: str) -> tuple[int, int] | str:
    """`auto`, `all`, or the first and last step of `4-7` or `4`.

    Raises:
        ValueError: it is none of these.
    """
    if text in ("auto", "all"):
        return text
    found = _STEPS.fullmatch(text.strip())
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise ValueError(f"{text!r} is not auto, all, a step as in 4 or steps as in 1-4")
    return int(found[1]), int(found[2] or found[1])


@contextmanager
def chosen_steps(
    trace: Trace, steps: str = "auto", *, marks: bool = False
) -> Iterator[tuple[Trace, ChosenSteps]]:
    """The trace of the steps chosen, and what was left out; all of the trace where nothing was.

    The trace is good for the time of the `with`: of more than ten million rows the steps are
    written to a temporary file.

    Args:
        trace: any trace with times.
        steps: `auto`: without the job's start and first step, if the trace is known to hold them
            and steps remain; `all`: everything; `1-4` or `4`: these, and nothing outside of them.
        marks: whether `critical` and slack are to be those of the steps looked at.

    Raises:
        StepError: not in the trace, or not as above.
        OutputError: the temporary file cannot be written.
        MissingMemberError: with `marks`, the trace lacks ranks that others communicate with.
        TooLargeError: the path of the steps would not fit into memory.
    """
    wanted = _wanted(trace, steps)
    if wanted is None:
        yield trace, ChosenSteps(trace.header.steps)
        return
    left, begin_ns = _left_out(trace, wanted, unasked=steps == "auto")
    if left.everything:
        yield trace, left
        return
    whole = replace(
        trace, nodes=trace.nodes.with_columns(pl.col("index").alias(WHOLE_INDEX)), parts=()
    )
    if not is_large(trace):
        yield _marked(_noted(cut_out(whole, steps=wanted), begin_ns), marks=marks), left
        return
    with TemporaryDirectory(prefix="prismcalib-steps-") as folder:
        file = Path(folder) / "steps.parquet"
        try:
            slice_out(whole, file, steps=wanted)
        except OutputError as error:
            raise OutputError(
                f"the steps of a trace this large take a temporary file: {error.message}",
                where=error.where,
                hint="free some space, or name a folder on another disk: TMPDIR=FOLDER",
            ) from error
        cut = replace(open_trace(file), paths=trace.paths)
        yield _with_path(_noted(cut, begin_ns, **{BY_BLOCKS: True})), left


def _wanted(trace: Trace, steps: str) -> tuple[int, ...] | None:
    """The steps to cut out; None: everything is looked at."""
    header = trace.header
    where = ", ".join(map(str, trace.paths[:3])) or None
    try:
        parsed = parse_steps(steps)
    except ValueError as error:
        hint = "auto leaves out the job's start, all nothing"
        raise StepError(str(error), where=where, hint=hint) from error
    if parsed == "all":
        return None
    if isinstance(parsed, str):
        first = _first_typical(header)
        return None if first is None else header.steps[min(first, len(header.steps) - 1) :]
    first, last = parsed
    chosen = tuple(step for step in header.steps if first <= step <= last)
    # Those at both ends have to be there; numbers between them that no step has are no mistake.
    return tuple(sorted({first, *chosen, last}))


def _first_typical(header: TraceHeader) -> int | None:
    """How many first steps are the job's start; None if the trace is not known to hold it."""
    steps = header.steps
    if len(steps) < 2 or begun_before(header):
        return None
    said = header.extra.get("merge", {}).get("warmup")
    if said is not None:
        return int(said)
    return 1 if header.created_by.startswith("prismreplay ") and steps[0] == 0 else None


def _left_out(
    trace: Trace, wanted: tuple[int, ...], *, unasked: bool
) -> tuple[ChosenSteps, int | None]:
    """What is left out if these steps are kept, and when the steps before them have ended."""
    end = pl.col("start_ns") + pl.col("dur_ns")
    bounds = (
        trace.nodes.group_by("step")
        .agg(begin=pl.col("start_ns").min(), end=end.max(), rows=pl.len())
        .collect(engine="streaming")
    )
    step = pl.col("step")
    kept = bounds.filter(step.is_between(wanted[0], wanted[-1]))
    ahead = bounds.filter(step < wanted[0])
    begin, last = bounds["begin"].min(), bounds["end"].max()
    behind = tuple(number for number in trace.header.steps if number > wanted[-1])
    before = tuple(number for number in trace.header.steps if number < wanted[0])
    ended = ahead.select(pl.col("end").max()).item()
    outside = int(bounds.filter(step.is_null())["rows"].sum())
    left = ChosenSteps(
        steps=wanted,
        before=before,
        before_ns=_between(begin, kept["begin"].min() if ended is None else ended),
        after=behind,
        after_ns=_between(kept["end"].max(), last),
        outside=outside,
        between=_between_steps(trace, wanted) if outside else 0,
        unasked=unasked,
    )
    return left, ended


def _between_steps(trace: Trace, wanted: tuple[int, ...]) -> int:
    """How many rows in no step start among the steps of their own rank; others run ahead or behind."""
    start, step = pl.col("start_ns"), pl.col("step")
    kept = trace.nodes.filter(step.is_between(wanted[0], wanted[-1]))
    of_rank = kept.group_by("rank").agg(begin=start.min(), end=start.max())
    among = (
        trace.nodes.filter(step.is_null())
        .join(of_rank, on="rank")
        .filter((start >= pl.col("begin")) & (start < pl.col("end")))
    )
    return int(among.select(pl.len()).collect(engine="streaming").item())


def _between(begin: Any, end: Any) -> int:
    return 0 if begin is None or end is None else max(int(end - begin), 0)


def _noted(cut: Trace, begin_ns: int | None, **notes: Any) -> Trace:
    """The steps with a note of when the first of them begins: when those before it have ended."""
    extra = {**cut.header.extra, **notes}
    if begin_ns is not None:
        extra[STEP_BEGINS] = {str(cut.header.steps[0]): begin_ns}
    return replace(cut, header=cut.header.model_copy(update={"extra": extra}))


def _marked(cut: Trace, *, marks: bool) -> Trace:
    """The steps with the path and slack that `merge` would give them."""
    if not marks:
        return cut
    graph, rows = graph_from_trace(cut)
    require_members(graph)
    timing = _stored(graph, rows["start_ns"].to_numpy(), rows["dur_ns"].to_numpy())
    reached, _ = critical_arrays(graph, timing)
    critical = np.zeros(graph.rows, np.bool_)
    critical[reached] = True
    late = slack(graph, replace(timing, order=propagate(graph).order))
    return replace(cut, nodes=rows.with_columns(slack_ns=late, critical=critical).lazy())


def _stored(graph: Graph, start_ns: Int64Array, duration_ns: Int64Array) -> Timing:
    return Timing(
        start_ns=start_ns,
        end_ns=start_ns + duration_ns,
        duration_ns=graph.duration_ns,
        order=np.empty(0, np.int32),
    )


def _with_path(cut: Trace) -> Trace:
    """The steps of a large trace with their path; slack stays that of the whole trace.

    The marks of the whole trace are those of the steps if its path goes through the row that
    ends last: what leads there is the same. Else the path is found anew, which takes the graph.
    """
    from prismcalib.trail import marked_rows  # cuts paths, as what imports this module does

    layout = Layout.of(cut)
    marked, last_row = marked_rows(layout, extent_of(cut, layout).end_ns)
    if last_row in marked:
        return cut
    numbers = _walked(layout)
    rank = np.searchsorted(layout.bounds, numbers, side="right") - 1
    places = pl.DataFrame(
        {"rank": layout.ranks[rank], "index": (numbers - layout.bounds[rank]).astype(np.int32)}
    )
    ids = places.select(id=node_ids(pl.col("rank"), pl.col("index")))["id"]
    return replace(cut, nodes=cut.nodes.with_columns(critical=pl.col("id").is_in(ids.implode())))


def _walked(layout: Layout) -> Int32Array:
    """Numbers of the rows by which the path reaches its steps."""
    graph = graph_from_blocks(layout, also=_WALK_BYTES)
    require_members(graph)
    times = table_of(layout, ["start_ns", "dur_ns"])
    timing = _stored(graph, times["start_ns"].to_numpy(), times["dur_ns"].to_numpy())
    return critical_arrays(graph, timing)[0]


def whole_numbers() -> dict[str, pl.Expr]:
    """Of rows with `WHOLE_INDEX`: the index and id that they have in the trace they were cut out of."""
    index = pl.col(WHOLE_INDEX)
    return {"index": index.alias("index"), "id": node_ids(pl.col("rank"), index).alias("id")}


def numbered_as_whole(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with `whole_numbers`, if they were cut out of a trace."""
    return rows.with_columns(**whole_numbers()) if WHOLE_INDEX in rows.columns else rows
