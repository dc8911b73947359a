"""How `prismcalib critical-path` and `prismcalib predict` tell their results to people."""

from __future__ import annotations

from prismcalib.commands_comm import print_range
from prismcalib.durations import format_ns
from prismcalib.lateness import Lateness
from prismcalib.paths import CriticalPath, ShareColumn
from prismcalib.prediction import BEFORE_PATH, IDLE_RECORDED, Prediction
from prismcalib.resampling import StepSpread
from prismcalib.step_times import steps_text
from prismcalib.steps_option import print_steps
from prismcalib.wording import (
    IDLE_BETWEEN,
    IDLE_INSIDE,
    ONE_STEP_PATH,
    RankNames,
    doubts,
    start_text,
)
from prismtrace.console import counted, table
from prismtrace.schema import TraceHeader

__all__ = ["print_path", "print_prediction"]


_NEXT = (
    "`prismcalib waits` shows who had waited for others before; `prismcalib stragglers` looks for "
    "the cause"
)
_DRAWN = (
    "the step time above is the median of the steps as they were; a drawn step takes one of them for "
    "every rank apart, so that slow ones of several ranks meet more often or more seldom"
)
"""Why quantiles of drawn steps are not those of the steps."""


def print_path(path: CriticalPath, late: Lateness | None, header: TraceHeader, limit: int) -> None:
    """The path, with `limit` rows of each table; `late`: for whom ranks waited, where it is known."""
    names = RankNames.of(header)
    print_steps(path.looked_at)
    if late is not None:
        print(late.sentence)
        if late.wait_ns:
            print(_NEXT)
        print()
    _print_length(path)
    for text in doubts(header):
        print(f"\n{text}")
    if late is not None and late.wait_ns:
        print()
        table(
            "waited for (waiting of all ranks, also beside their own computation)",
            (*names.heads, "arrived last", "wait caused", "share"),
            [
                (*names.cells(rank), last, format_ns(caused), f"{share:.1%}")
                for rank, last, caused, share in late.ranks.head(limit).rows()
            ],
            of=late.ranks.height,
        )
    columns: tuple[ShareColumn, ...] = ("kind", "rank", "group", "phase", "step")
    for column in columns:
        _print_shares(path, column, names, limit)
    print()
    table(
        "longest segments (idle: before they start)",
        (*names.heads, "index", "kind", "name", "group", "seq", "busy", IDLE_INSIDE, "idle"),
        [
            (
                *names.cells(node["rank"]),
                *(node[name] for name in ("index", "kind", "name", "group", "seq")),
                format_ns(node["busy_ns"] - node["inner_idle_ns"]),
                format_ns(node["inner_idle_ns"]),
                format_ns(node["gap_ns"]),
            )
            for node in path.longest(limit).iter_rows(named=True)
        ],
    )


def _print_length(path: CriticalPath) -> None:
    def part(ns: int) -> tuple[str, str]:
        return format_ns(ns), f"{ns / max(path.length_ns, 1):.1%}"

    table(
        f"critical path: {counted(path.segments.height, 'segment')}, "
        f"{counted(path.hops, 'change')} of rank",
        ("", "time", "share"),
        [
            ("length", *part(path.length_ns)),
            ("computation", *part(path.compute_ns - path.inner_idle_ns)),
            (IDLE_INSIDE, *part(path.inner_idle_ns)),
            ("transfer", *part(path.transfer_ns)),
            ("unmatched communication", *part(path.unmatched_ns)),
            (IDLE_BETWEEN, *part(path.gap_ns)),
            ("before the path starts", *part(path.lead_in_ns)),
        ],
    )
    if path.lead_in_ns * 2 > path.length_ns:
        print(f"\n{ONE_STEP_PATH}")
    if start := start_text(path.start_share()):
        print(f"\n{start}")


def _print_shares(path: CriticalPath, column: ShareColumn, names: RankNames, limit: int) -> None:
    shares = path.shares(column)
    if shares[column].null_count() == shares.height:
        return
    if column == "step":
        shares = shares.sort("step", nulls_last=True)
    print()
    table(
        f"by {column}",
        (
            *(names.heads if column == "rank" else (column,)),
            *("segments", "busy", IDLE_INSIDE, IDLE_BETWEEN, "share"),
        ),
        [
            (
                *(names.cells(value) if column == "rank" else (value,)),
                count,
                format_ns(busy - idle),
                format_ns(idle),
                format_ns(gap),
                f"{share:.1%}",
            )
            for value, count, busy, idle, gap, share in shares.head(limit).rows()
        ],
        of=shares.height,
    )


def print_prediction(prediction: Prediction, header: TraceHeader, *, spread: bool) -> None:
    """The step time and what it rests on; `spread`: also say so if it is not known how it varies."""
    print_steps(prediction.looked_at)
    durations = prediction.counted_ns
    which = steps_text(prediction.steps.height, prediction.warmup)
    if len(durations) > 1:
        which += f"; {format_ns(min(durations))} to {format_ns(max(durations))}"
    print(f"step time {format_ns(prediction.step_ns)} ({which})")
    if prediction.steps["step"].null_count():
        print("the trace marks no steps: this is its whole window")
    elif prediction.steps.height == 1:
        follows = prediction.looked_at is not None and prediction.looked_at.before
        begin = "end of the step before" if follows else "first start of any rank"
        print(f"a single step counts from the {begin} to the last end")
    for text in doubts(header):
        print(text)
    if prediction.spread is not None:
        _print_spread(prediction.spread)
    elif spread and not prediction.steps["step"].null_count():
        print(f"no spread: {prediction.why_no_spread}")
    if prediction.estimates is not None:
        print_range(prediction.estimates)
    window = max(prediction.window_ns, 1)
    names = RankNames.of(header)
    idle = f", nor beside what is {IDLE_INSIDE}" if prediction.ranks["inner_idle_ns"].sum() else ""
    print()
    table(
        f"where each rank spends the window (transferring and waiting: not beside computation{idle})",
        (*names.heads, "computing", IDLE_INSIDE, "transferring", "waiting", IDLE_BETWEEN),
        [
            (*names.cells(rank), *(f"{ns / window:.1%}" for ns in times))
            for rank, *times in prediction.ranks.rows()
        ],
    )
    print(f"{IDLE_BETWEEN}: also before a rank's first span and after its last")
    print()
    table(
        "what the critical path rests on",
        ("", "share"),
        [
            (f"{name}, inside and between spans" if name == IDLE_RECORDED else name, f"{share:.1%}")
            for name, share in prediction.basis.items()
        ],
    )
    if prediction.basis.get(BEFORE_PATH, 0) > 0.5:
        print(f"\n{ONE_STEP_PATH}")


def _print_spread(spread: StepSpread) -> None:
    print()
    table(
        f"how much it varies: {spread.simulated_steps} steps, drawn from "
        f"{spread.observed_steps} of every rank"
        + (
            f"; {counted(spread.unlike_steps, 'step')} with other operations left out"
            if spread.unlike_steps
            else ""
        ),
        ("quantile", "step time", "90 % sure it is between", "and"),
        [
            (f"p{round(100 * quantile.level)}", *map(format_ns, times))
            for quantile in spread.quantiles
            for times in [(quantile.ns, quantile.low_ns, quantile.high_ns)]
        ],
    )
    print(_DRAWN)
