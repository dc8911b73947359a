"""The command `prismcalib report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismcalib.steps_option import StepsOption, print_steps
from prismtrace.console import print_json, printable, progress

__all__ = ["report"]


def report(
    trace: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            help="Trace that `prismcalib merge` wrote: one file, a folder, or files.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Page to write (.html).")
    ] = None,
    steps: StepsOption = "auto",
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the page's numbers as JSON; --output may be absent."),
    ] = False,
) -> None:
    """One HTML page: what the run waits for, a timeline of all ranks, and every number behind it.

    The page is a single file that needs no network. It stays usable with thousands of ranks.

    Example: prismcalib report aligned.parquet -o report.html
    """
    if output is None and not json:
        raise typer.BadParameter("name the page to write, or ask for --json", param_hint="--output")
    from prismcalib.report import describe_run, write_report
    from prismtrace.headers import trace_files
    from prismtrace.output import refuse_inputs

    with progress("reading") as bar:
        if output is not None:
            refuse_inputs(output, trace_files(trace))
        if output is None:
            summary = describe_run(trace, on_rows=bar.advance, steps=steps)
        else:
            summary = write_report(trace, output, on_rows=bar.advance, steps=steps)
    if json:
        print_json(summary.as_dict())
        return
    print_steps(summary.looked_at)
    print(printable(summary.conclusion.headline))
    for note in summary.conclusion.notes:
        print(f"  {printable(note)}")
    if output is not None:
        print(
            f"{printable(str(output))}: {output.stat().st_size / 1e6:.1f} MB; open it in any browser"
        )
