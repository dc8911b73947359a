"""The command `hang`: which ranks a job that stands still is waiting for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismtrace import console
from prismtrace.arguments import JsonFlag, ranks_of_files, wrong_usage

__all__ = ["hang"]


def hang(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="DUMPS...",
            help="Flight-recorder dumps, one per rank; folders and quoted patterns work too.",
            show_default=False,
        ),
    ],
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs",
            "-j",
            min=0,
            help="Files to read at the same time; 0: as many as there are cores.",
        ),
    ] = 1,
    rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE=N",
            help="Rank of a file whose name does not say it, e.g. --rank dump_a=7 (repeatable).",
        ),
    ] = None,
    groups: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Process groups that the dumps do not list: a JSON file of names and global ranks,"
            ' e.g. {"1": "0-7", "2": "8-15"}.',
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Say which ranks a job that stands still is waiting for, from its flight recorders.

    The exit code is 0 whatever the verdict, 1 when a dump cannot be used.

    Example: prismtrace hang /tmp/nccl_trace_rank_*
    """
    from prismtrace.converters.flight.inputs import dump_files
    from prismtrace.converters.inputs import given_ranks
    from prismtrace.hangs import find_hang
    from prismtrace.hangs.printing import print_hang

    files = dump_files(inputs)
    ranks = ranks_of_files(rank or [], [str(file) for file in files])
    with wrong_usage("--rank"):
        given_ranks(files, ranks)
    size = sum(file.stat().st_size for file in files)
    with console.progress("reading", total=size, unit="bytes") as bar:
        report = find_hang(files, ranks=ranks, groups=groups, jobs=jobs, progress=bar.advance)
    if json:
        console.print_json(report.to_dict())
    else:
        print_hang(report)
