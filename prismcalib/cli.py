"""The command `prismcalib`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from prismcalib.commands_comm import coarsen, comm_table, print_range
from prismcalib.commands_compare import compare, health
from prismcalib.commands_merge import merge
from prismcalib.commands_report import report
from prismcalib.commands_stragglers import stragglers
from prismcalib.commands_waits import waits
from prismcalib.commands_whatif import EditCommand, what_if
from prismtrace.console import counted, new_app, print_json, progress, run, table

app = new_app("From recorded ranks to one true timeline, and what it says about the run.")


Calibrated = Annotated[
    Path, typer.Argument(readable=False, help="Trace that `prismcalib merge` wrote.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command("critical-path")
def critical_path(
    trace: Calibrated,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of each table.")] = 10,
    json: Json = False,
) -> None:
    """What would have to be faster for the run to be shorter, over all ranks.

    The path is a chain of segments, each waiting for the one before it, from the first start to
    the last end. Where ranks wait for each other it goes to the one that came last. Making
    anything faster that is not on it changes nothing.

    Read the first table for what the time goes to: computation; idle inside spans, where the
    device waits for its host; transfers; idle between spans. Then the parts, for where. Then the
    longest segments, for what to change first.

    Example: prismcalib critical-path aligned.parquet --limit 20
    """
    from prismcalib.blocks import is_large
    from prismcalib.durations import format_ns
    from prismcalib.lateness import find_late_ranks
    from prismcalib.paths import ShareColumn, calibrated_trace
    from prismcalib.paths import critical_path as find_path
    from prismcalib.wording import ONE_STEP_PATH, RankNames, idle_inside

    opened = calibrated_trace(trace)
    names = RankNames.of(opened.header)
    path = find_path(opened)
    late = None if is_large(opened) else find_late_ranks(opened)
    if json:
        waited = late and {"sentence": late.sentence, "ranks": late.ranks.to_dicts()}
        print_json({**path.as_dict(limit), "waited_for": waited})
        return
    if late is not None:
        more = (
            "; who of them waited for others first shows `prismcalib waits`, and "
            "`prismcalib stragglers` looks for the cause"
        )
        print(f"{late.sentence}{more if late.wait_ns else ''}\n")
    inside = idle_inside(opened.header)

    def part(ns: int) -> tuple[str, str]:
        return format_ns(ns), f"{ns / max(path.length_ns, 1):.1%}"

    table(
        f"critical path: {counted(path.segments.height, 'segment')}, "
        f"{counted(path.hops, 'change')} of rank",
        ("", "time", "share"),
        [
            ("length", *part(path.length_ns)),
            ("computation", *part(path.compute_ns - path.inner_idle_ns)),
            (inside, *part(path.inner_idle_ns)),
            ("transfer", *part(path.transfer_ns)),
            ("unmatched communication", *part(path.unmatched_ns)),
            ("idle", *part(path.gap_ns)),
            ("before the path starts", *part(path.lead_in_ns)),
        ],
    )
    if path.lead_in_ns * 2 > path.length_ns:
        print(f"\n{ONE_STEP_PATH}")
    if late is not None and late.wait_ns:
        print()
        table(
            "waited for (waiting of all ranks, also beside their own computation)",
            (*names.heads, "arrived last", "wait caused", "share"),
            [
                (*names.cells(rank), last, format_ns(caused), f"{share:.1%}")
                for rank, last, caused, share in late.ranks.head(limit).rows()
            ],
        )
    columns: tuple[ShareColumn, ...] = ("kind", "rank", "group", "phase", "step")
    for column in columns:
        shares = path.shares(column)
        if shares[column].null_count() == shares.height:
            continue
        if column == "step":
            shares = shares.sort("step", nulls_last=True)
        print()
        table(
            f"by {column}",
            (
                *(names.heads if column == "rank" else (column,)),
                *("segments", "busy", inside, "idle", "share"),
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
        )
    print()
    table(
        "longest segments (idle: before they start)",
        (*names.heads, "index", "kind", "name", "group", "seq", "busy", inside, "idle"),
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


@app.command()
def predict(
    trace: Calibrated,
    draws: Annotated[
        int,
        typer.Option(
            min=0,
            help="Windows of resampled steps, for the spread of the step time; 0: none.",
        ),
    ] = 200,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same spread.")] = 0,
    json: Json = False,
) -> None:
    """The step time this timeline implies, where each rank spends it, and what it rests on.

    With two or more alike steps also how much it varies: every rank repeats steps of its own,
    chosen at random, and the window is computed anew.

    Example: prismcalib predict aligned.parquet
    """
    from prismcalib.durations import format_ns
    from prismcalib.prediction import BEFORE_PATH
    from prismcalib.prediction import predict as predict_step
    from prismcalib.step_times import steps_text
    from prismcalib.wording import ONE_STEP_PATH, RankNames, idle_inside
    from prismtrace.trace import read_header, trace_files

    with progress("resampling steps"):
        prediction = predict_step(trace, draws=draws, seed=seed)
    if json:
        print_json(prediction.as_dict())
        return
    durations = prediction.counted_ns
    which = steps_text(prediction.steps.height, prediction.warmup)
    if len(durations) > 1:
        which += f"; {format_ns(min(durations))} to {format_ns(max(durations))}"
    print(f"step time {format_ns(prediction.step_ns)} ({which})")
    if prediction.steps["step"].null_count():
        print("the trace marks no steps: this is its whole window")
    elif prediction.steps.height == 1:
        print("a single step counts from the first start of any rank to the last end")
    spread = prediction.spread
    if spread is not None:
        print()
        table(
            f"how much it varies: {spread.simulated_steps} steps, drawn from "
            f"{spread.observed_steps} of every rank"
            + (f"; {spread.unlike_steps} of other operations" if spread.unlike_steps else ""),
            ("quantile", "step time", "90 % sure it is between", "and"),
            [
                (f"p{round(100 * quantile.level)}", *map(format_ns, times))
                for quantile in spread.quantiles
                for times in [(quantile.ns, quantile.low_ns, quantile.high_ns)]
            ],
        )
    elif draws and not prediction.steps["step"].null_count():
        print(f"no spread: {prediction.why_no_spread}")
    if prediction.estimates is not None:
        print_range(prediction.estimates)
    window = max(prediction.window_ns, 1)
    header = read_header(trace_files(trace)[0])
    inside, names = idle_inside(header), RankNames.of(header)
    print()
    table(
        "where each rank spends the window (transferring and waiting: not beside computation)",
        (*names.heads, "computing", inside, "transferring", "waiting", "idle"),
        [
            (*names.cells(rank), *(f"{ns / window:.1%}" for ns in times))
            for rank, *times in prediction.ranks.rows()
        ],
    )
    print()
    table(
        "what the critical path rests on",
        ("", "share"),
        [(name, f"{share:.1%}") for name, share in prediction.basis.items()],
    )
    if prediction.basis.get(BEFORE_PATH, 0) > 0.5:
        print(f"\n{ONE_STEP_PATH}")


@app.command()
def check(
    trace: Annotated[
        Path, typer.Argument(readable=False, help="Any trace, also one without times.")
    ],
    json: Json = False,
) -> None:
    """Look for cycles and for communications that lack members.

    Example: prismcalib check run.parquet
    """
    from prismcalib.checking import check_graph
    from prismtrace.trace import open_trace

    with progress("checking"):
        summary = check_graph(open_trace(trace))
    if json:
        print_json(summary)
    else:
        counts = ", ".join(
            counted(summary[name], noun)
            for name, noun in (
                ("ranks", "rank"),
                ("rows", "row"),
                ("deps", "dependency"),
                ("instances", "matched communication"),
            )
        )
        chain_text = counted(summary["longest_chain"], "row")
        print(f"no cycle, no member missing: {counts}, the longest chain has {chain_text}")


app.command()(merge)
app.command("comm-table")(comm_table)
app.command()(coarsen)
app.command("what-if", cls=EditCommand)(what_if)
app.command()(compare)
app.command()(health)
app.command()(stragglers)
app.command()(waits)
app.command()(report)


def main() -> NoReturn:
    """Entry point of the command."""
    run(app)


if __name__ == "__main__":
    main()
