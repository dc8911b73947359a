"""The command `prismcalib`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from prismcalib.commands_comm import coarsen, comm_table
from prismcalib.commands_compare import compare, health
from prismcalib.commands_merge import merge
from prismcalib.commands_report import report
from prismcalib.commands_stragglers import stragglers
from prismcalib.commands_waits import waits
from prismcalib.commands_whatif import EditCommand, what_if
from prismcalib.steps_option import StepsOption
from prismtrace.console import counted, new_app, print_json, progress
from prismtrace.exit_codes import run

app = new_app("From recorded ranks to one true timeline, and what it says about the run.")


Calibrated = Annotated[
    Path, typer.Argument(readable=False, help="Trace that `prismcalib merge` wrote.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command("critical-path")
def critical_path(
    trace: Calibrated,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of each table.")] = 10,
    steps: StepsOption = "auto",
    json: Json = False,
) -> None:
    """What would have to be faster for the run to be shorter, over all ranks.

    The path is a chain of segments, each waiting for the one before it, from the first start to
    the last end. Where ranks wait for each other it goes to the one that came last. Making
    anything faster that is not on it changes nothing.

    Read the first table for what the time goes to: computation; idle inside spans, where the
    device waits for its host; transfers; idle between spans. Before the path starts, other ranks
    had begun, and nothing recorded says that it waited for them. Then the parts, for where. Then
    the longest segments, for what to change first.

    Example: prismcalib critical-path aligned.parquet --limit 20
    """
    from dataclasses import replace

    from prismcalib.blocks import is_large
    from prismcalib.chosen_steps import chosen_steps
    from prismcalib.lateness import find_late_ranks
    from prismcalib.path_printing import print_path
    from prismcalib.paths import calibrated_trace
    from prismcalib.paths import critical_path as find_path

    whole = calibrated_trace(trace)
    with progress("looking for the path"), chosen_steps(whole, steps) as (opened, looked_at):
        path = replace(find_path(opened, steps="all"), looked_at=looked_at)
        late = None if is_large(opened) else find_late_ranks(opened)
    if json:
        waited = late and {"sentence": late.sentence, "ranks": late.ranks.to_dicts()}
        print_json({**path.as_dict(limit), "waited_for": waited})
        return
    print_path(path, late, whole.header, limit)


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
    steps: StepsOption = "auto",
    json: Json = False,
) -> None:
    """The step time this timeline implies, where each rank spends it, and what it rests on.

    With two or more alike steps also how much it varies: every rank repeats steps of its own,
    chosen at random, and the window is computed anew.

    Example: prismcalib predict aligned.parquet
    """
    from prismcalib.path_printing import print_prediction
    from prismcalib.prediction import predict as predict_step
    from prismtrace.trace import read_header, trace_files

    with progress("resampling steps"):
        prediction = predict_step(trace, draws=draws, seed=seed, steps=steps)
    if json:
        print_json(prediction.as_dict())
        return
    print_prediction(prediction, read_header(trace_files(trace)[0]), spread=draws > 0)


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
