"""The command `convert`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismtrace import console
from prismtrace.arguments import JsonFlag, numbers_of, ranks_of_files, wrong_usage

if TYPE_CHECKING:
    from prismtrace.converters.inputs import InputFiles

__all__ = ["convert"]


class Grain(StrEnum):
    """What becomes a node."""

    COMMUNICATION = "communication"
    KERNEL = "kernel"


class Unmatched(StrEnum):
    """What becomes of a communication without partners."""

    REFUSE = "refuse"
    KEEP = "keep"


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
            " with a single input just the number. Where files have the same name, more of the path:"
            " --rank b/last.json.gz=7.",
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
    _warn_of_skipped(files)
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


def _warn_of_skipped(files: InputFiles) -> None:
    """Name the JSON files of folders and archives that are left out."""
    from prismtrace.converters.archives import name_of

    if files.skipped:
        names = [console.printable(name_of(path)) for path in files.skipped]
        more = len(names) - _MOST_NAMES
        print(
            f"warning: {console.counted(len(names), 'JSON file')} skipped, in no format that is "
            f"known here: {', '.join(names[:_MOST_NAMES])}"
            + (f" and {more} more" if more > 0 else ""),
            file=sys.stderr,
        )


_MOST_NAMES = 8


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
