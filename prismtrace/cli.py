"""The command `prismtrace`: convert, look at, check, cut and export traces.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from prismtrace import console, exit_codes
from prismtrace.arguments import JsonFlag, TraceArgument, chosen_ranks
from prismtrace.commands_convert import convert
from prismtrace.commands_hang import hang
from prismtrace.commands_tables import QueryCommand, concat, diff, query, slice_out

if TYPE_CHECKING:
    from prismtrace.trace import Trace

__all__ = ["app", "main"]

app = console.new_app(
    "Turn profiler traces of a distributed training job into one typed trace, and look at it."
)


class SchemaName(StrEnum):
    """Names of `prismtrace.schema.MODELS`; spelled out so that --help need not load it."""

    TRACE_HEADER = "trace-header"
    NODE = "node"
    EDGE = "edge"


class Target(StrEnum):
    """Names of `prismtrace.exporting.ExportFormat`, likewise."""

    PERFETTO = "perfetto"
    NODE_LINK = "node-link"
    CHAKRA = "chakra"


def _open(paths: list[str]) -> Trace:
    from prismtrace.trace import open_trace

    return open_trace(paths)


app.command()(convert)


@app.command()
def info(trace: TraceArgument, json: JsonFlag = False) -> None:
    """Say what is in a trace: ranks, kinds, groups, steps, time, repairs.

    Example: prismtrace info run.parquet
    """
    from prismtrace.info import summarize
    from prismtrace.printing import print_info

    summary = summarize(_open(trace))
    if json:
        console.print_json(summary)
    else:
        print_info(summary)


@app.command()
def validate(
    trace: TraceArgument,
    limit: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Rows to show for each broken rule.")
    ] = 5,
    json: JsonFlag = False,
) -> None:
    """Check a trace against the rules of the format.

    The exit code is 1 when a rule is broken; warnings alone leave it at 0.

    Example: prismtrace validate run.parquet
    """
    from prismtrace.trace import open_trace
    from prismtrace.validation import validate as check

    violations = check(open_trace(trace, exact=False), limit=limit)
    errors = sum(violation.severity == "error" for violation in violations)
    if json:
        console.print_json({"valid": errors == 0, "violations": violations})
    else:
        for violation in violations:
            for line in str(violation).splitlines():
                print(console.printable(line))
        warnings = len(violations) - errors
        broken = console.counted(errors, "rule") + " broken"
        told = f"{broken}, {console.counted(warnings, 'warning')}"
        print(told if violations else "valid")
    raise typer.Exit(1 if errors else 0)


@app.command()
def schema(
    name: Annotated[
        SchemaName | None, typer.Argument(help="One schema; without it, all.", show_default=False)
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write NAME.schema.json files into this folder instead of printing."
        ),
    ] = None,
) -> None:
    """Print the JSON Schemas of the trace format.

    Example: prismtrace schema node
    """
    from prismtrace.schema import MODELS, json_schema
    from prismtrace.schema_files import write_schemas

    names = tuple(MODELS) if name is None else tuple(key for key in MODELS if key == name.value)
    if write is not None:
        for path in write_schemas(write, names):
            print(path)
    elif name is not None:
        console.print_json(json_schema(names[0]))
    else:
        console.print_json({key: json_schema(key) for key in names})


@app.command()
def export(
    trace: TraceArgument,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="File to write; chakra: a new folder.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Target,
        typer.Option(
            help="perfetto: timeline for ui.perfetto.dev (gzipped if OUTPUT ends in .gz);"
            " node-link: graph for networkx.node_link_graph; chakra: execution traces for ASTRA-sim"
            " and Chakra's tools, one file per rank."
        ),
    ] = Target.PERFETTO,
    ranks: Annotated[
        str | None, typer.Option(metavar="RANKS", help="Only these, e.g. 0-7 or 0,8,16.")
    ] = None,
) -> None:
    """Write a trace for another tool: a timeline to look at, or a graph.

    Example: prismtrace export run.parquet --to perfetto -o run.json.gz
    """
    import polars as pl

    from prismtrace.exporting import export as export_trace
    from prismtrace.printing import print_losses

    opened = _open(trace)
    if ranks is not None:
        opened = opened.ranks(chosen_ranks(ranks, opened))
    rows = opened.nodes.select(pl.len()).collect().item()
    with console.progress(f"exporting to {to.value}", total=rows) as bar:
        lost = export_trace(opened, output, to=to.value, advance=bar.advance)
    print_losses(lost)
    console.announce_output(output)


app.command()(hang)
app.command()(diff)
app.command(cls=QueryCommand)(query)
app.command("slice-out")(slice_out)
app.command()(concat)


def main() -> NoReturn:
    """Entry point of the console script."""
    exit_codes.run(app)


if __name__ == "__main__":
    main()
