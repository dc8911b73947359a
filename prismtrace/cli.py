"""The command `prismtrace`: convert, look at, check, cut and export traces.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from prismtrace import console
from prismtrace.arguments import (
    JsonFlag,
    TraceArgument,
    chosen_ranks,
    numbers_of,
    ranks_of_files,
    wrong_usage,
)
from prismtrace.commands_hang import hang
from prismtrace.commands_tables import QueryCommand, concat, diff, query, slice_out

if TYPE_CHECKING:
    from prismtrace.trace import Trace

__all__ = ["app", "main"]

app = console.new_app(
    "Turn profiler traces of a distributed training job into one typed trace, and look at it."
)


class Grain(StrEnum):
    """What becomes a node."""

    COMMUNICATION = "communication"
    KERNEL = "kernel"


class Unmatched(StrEnum):
    """What becomes of a communication without partners."""

    REFUSE = "refuse"
    KEEP = "keep"


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


# --- convert --------------------------------------------------------------------------


@app.command()
def convert(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUTS...",
            help="Profiler traces, one per rank; folders and quoted patterns work too.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Trace file to write (.parquet).", show_default=False),
    ],
    grain: Annotated[
        Grain,
        typer.Option(
            help="communication: one node per communication, and one for all that a stream computes"
            " between two of them. It is what merge and its questions need. kernel: one node per GPU"
            " kernel, to see which kernel the time goes to; the trace has many times more rows."
        ),
    ] = Grain.COMMUNICATION,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            "-j",
            min=0,
            help="Files to read at the same time; 0: as many as there are cores. Each takes memory"
            " of its own and a moment to start: worth it for large files.",
        ),
    ] = 1,
    rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE=N",
            help="Rank of a file that does not say it, e.g. --rank last.json.gz=7 (repeatable);"
            " with a single input just the number.",
        ),
    ] = None,
    rank_of_pid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FILE:]PID=N",
            help="Rank of a process in an Nsight Systems export that holds several, e.g."
            " --rank-of-pid 144=0 (repeatable); processes that are not named are left out.",
        ),
    ] = None,
    step_from: Annotated[
        str,
        typer.Option(
            metavar="auto|profilerstep|whole|REGEX",
            help="Where training steps begin. profilerstep: the profiler's own marks; whole: the"
            " file is one step; else a regular expression for the names of annotations, e.g."
            " --step-from 'train_step_(\\d+)'. auto: profilerstep if there are any, else annotations"
            " such as 'step 3' or 'iteration 3', else whole.",
        ),
    ] = "auto",
    comm_kernel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=KIND",
            help="Own communication kernels, e.g. --comm-kernel 'my_allreduce.*=all_reduce'"
            " (repeatable).",
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Process groups that the traces do not name: a JSON file of names and global ranks"
            ' (those of the whole job, in group order), e.g. {"tp_0": "0-7", "tp_1": "8-15"}.',
        ),
    ] = None,
    keep_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Keep something that the profiler notes with each kernel, and a viewer shows as its"
            " arguments, as a column x_arg_NAME for questions of your own; with --grain kernel, e.g."
            " --keep-arg 'registers per thread' (repeatable).",
        ),
    ] = None,
    unmatched: Annotated[
        Unmatched,
        typer.Option(
            help="What to do with a communication that fits no group or has no partner in the"
            " other files: refuse the input, or keep it as a span that waits for nobody."
        ),
    ] = Unmatched.REFUSE,
    recover: Annotated[
        bool, typer.Option("--recover", help="Use what can be read of truncated or damaged files.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Fail when anything had to be repaired, dropped or assumed."),
    ] = False,
    columns: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The input is an operation-level log (Parquet or CSV); this TOML file says what"
            " its columns and operations are.",
        ),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Let the workers of this Dask cluster read the files, e.g. tcp://head:8786. They"
            " have to see the inputs and the folder of OUTPUT under the same paths.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep beside OUTPUT what was read of each file until all is done, and go on from"
            " there after an interruption, by the same command. --dask keeps it as well.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Convert profiler traces of all ranks, or an operation-level log, into one trace.

    Example: prismtrace convert rank*.json.gz -o run.parquet
    """
    from prismtrace.converters import convert as convert_files
    from prismtrace.converters.inputs import expand_inputs, given_ranks
    from prismtrace.printing import print_conversion

    files = expand_inputs(inputs)
    ranks = ranks_of_files(rank or [], [str(file) for file in files])
    with wrong_usage("--rank"):
        given_ranks(files, ranks)
    _check_options(comm_kernel or [], step_from, keep_arg or [], grain)
    size = sum(file.stat().st_size for file in files)
    with (
        _telling_what_is_kept(output, files, keep=resume or dask is not None),
        console.progress("converting", total=size, unit="bytes") as bar,
    ):
        report = convert_files(
            files,
            output,
            ranks=ranks,
            rank_of_pid=numbers_of(rank_of_pid or [], "[FILE:]PID=N", "--rank-of-pid"),
            grain=grain.value,
            jobs=jobs,
            comm_kernels=comm_kernel or (),
            keep_args=keep_arg or (),
            groups=groups,
            step_from=step_from,
            unmatched=unmatched.value,
            recover=recover,
            strict=strict,
            mapping=columns,
            dask=dask,
            resume=resume,
            progress=bar.advance,
        )
    console.warn_of_suffix(output)
    if json:
        console.print_json(report.to_dict())
    else:
        print_conversion(report)
        console.announce_output(output)


@contextmanager
def _telling_what_is_kept(output: Path, files: list[Path], *, keep: bool) -> Iterator[None]:
    """When the block fails, say what the next attempt need not read again.

    Whoever stops the command hears it, too, when nothing is kept.
    """
    from prismtrace.converters.kept import count_kept
    from prismtrace.converters.sniff import is_operation_level

    try:
        yield
    except BaseException as error:
        kept = count_kept(output) if keep else 0
        told = ""
        if kept:
            told = (
                f"{kept:,} of {console.counted(len(files), 'file')} are read and kept: the same "
                "command with --resume goes on from there"
            )
        elif isinstance(error, KeyboardInterrupt):
            told = "stopped: nothing is written, and nothing is kept of what was read"
            if not keep and len(files) > 1 and not is_operation_level(files[0]):
                told += "; with --resume it is, and the same command goes on from there"
        if told:
            print(told, file=sys.stderr)
        raise


def _check_options(
    comm_kernels: list[str], step_from: str, keep_args: list[str], grain: Grain
) -> None:
    from prismtrace.converters.kineto.annotate import step_pattern
    from prismtrace.converters.kineto.events import check_keep_args
    from prismtrace.converters.kineto.names import CommPatterns

    with wrong_usage("--comm-kernel"):
        CommPatterns.parse(comm_kernels)
    with wrong_usage("--step-from"):
        step_pattern(step_from)
    with wrong_usage("--keep-arg"):
        check_keep_args(keep_args)
    twice = [name for name in keep_args if keep_args.count(name) > 1]
    if twice:
        raise typer.BadParameter(f"{twice[0]!r} is given twice", param_hint="--keep-arg")
    if keep_args and grain is not Grain.KERNEL:
        raise typer.BadParameter("goes with --grain kernel only", param_hint="--keep-arg")


# --- info -----------------------------------------------------------------------------


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


# --- validate -------------------------------------------------------------------------


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


# --- schema ---------------------------------------------------------------------------


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


# --- export ---------------------------------------------------------------------------


@app.command()
def export(
    trace: TraceArgument,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="File to write; chakra: a new folder.", show_default=False
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


# --- diff, query, slice-out, concat ---------------------------------------------------

app.command()(hang)
app.command()(diff)
app.command(cls=QueryCommand)(query)
app.command("slice-out")(slice_out)
app.command()(concat)


def main() -> NoReturn:
    """Entry point of the console script."""
    console.run(app)


if __name__ == "__main__":
    main()
