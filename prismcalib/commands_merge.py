"""The command `prismcalib merge`: its flags, and how the result is told."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prismtrace.console import announce_output, print_json, progress, warn_of_suffix

__all__ = ["merge"]


class EngineName(StrEnum):
    """Values of --engine."""

    AUTO = "auto"
    NETWORKX = "networkx"
    PYTHON = "python"
    ARRAY = "array"


class ClockMode(StrEnum):
    """Values of --clock."""

    ALIGN = "align"
    KEEP = "keep"


class ReduceMode(StrEnum):
    """Values of --reduce."""

    MEDIAN = "median"
    MEAN = "mean"
    MIN = "min"
    LAST = "last"


class MissingMode(StrEnum):
    """Values of --missing."""

    FAIL = "fail"
    REPRESENTATIVE = "representative"
    BARE = "bare"


EagerBelow = Annotated[
    int,
    typer.Option(
        metavar="BYTES",
        min=0,
        help="Sends of fewer bytes do not wait for their receiver; 0: all wait. Leave it alone "
        "unless you know that the backend buffers small messages.",
    ),
]
Rooted = Annotated[
    bool,
    typer.Option(
        "--rooted",
        help="In broadcast and scatter, wait for the root only; in reduce and gather, only the "
        "root waits. Otherwise all wait for all. Leave it alone unless the traces show members that "
        "leave such collectives before others have arrived.",
    ),
]
SparseAllToAll = Annotated[
    bool,
    typer.Option(
        "--sparse-all-to-all",
        help="In all_to_all, wait only for ranks that send something (known from bytes = 0, or "
        "per pair from the column x_send_bytes). Leave it alone unless many pairs of ranks exchange "
        "nothing, as experts may.",
    ),
]


def _duration(text: str) -> int:
    from prismcalib.durations import parse_ns

    try:
        return parse_ns(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--max-residual") from error


def _refuse_to_replace(output: Path, inputs: Iterable[Path | None]) -> None:
    """What was measured is not replaced; a timeline that is aligned again may be.

    Raises:
        OutputError: the output is one of the inputs.
    """
    from prismtrace.errors import PrismError
    from prismtrace.headers import read_header
    from prismtrace.output import refuse_inputs
    from prismtrace.schema import TraceKind

    with suppress(PrismError):
        if output.is_file() and read_header(output).kind == TraceKind.CALIBRATED:
            return
    refuse_inputs(output, inputs)


def merge(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            help="A recorded trace (one file, a folder, all its files), or all slices of a job.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Calibrated trace to write (.parquet).")
    ],
    bare: Annotated[
        Path | None,
        typer.Option(help="Slices: the job's graph without times; every slice must agree with it."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Slices: an earlier result; ranks that the new slices do not hold keep its times."
        ),
    ] = None,
    reduce: Annotated[
        ReduceMode,
        typer.Option(help="Slices: what several samples of one operation become."),
    ] = ReduceMode.MEDIAN,
    pool_steps: Annotated[
        bool,
        typer.Option(
            "--pool-steps",
            help="Slices: the same operation in several steps counts as samples of one; otherwise "
            "only repeats of a slice do.",
        ),
    ] = False,
    warmup: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default=False,
            help="First steps that are not typical: kept, and left out by analyses. Without it 1 of "
            "slices and of runs that `prismreplay` recorded, else 0.",
        ),
    ] = None,
    missing: Annotated[
        MissingMode,
        typer.Option(
            help="Slices: ranks in no slice. fail: refuse. representative: take the times of a "
            "rank that does the same. bare: assume that they take no time."
        ),
    ] = MissingMode.FAIL,
    unfold: Annotated[
        bool,
        typer.Option(
            "--unfold", help="Slices: give ranks that are replicas of others rows of their own."
        ),
    ] = False,
    comm_table: Annotated[
        Path | None,
        typer.Option(
            help="Slices: measured times of communications (from `prismcalib comm-table`), for "
            "groups that no slice ran as a whole."
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Slices: how many consecutive ranks share a host in the real job. Needed with "
            "--comm-table; alone, unmeasured transfers come from a model of the measured ones.",
        ),
    ] = None,
    columns_only: Annotated[
        bool,
        typer.Option(
            "--columns-only",
            help="Write only the computed columns; the inputs must stay where they are.",
        ),
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Slices: files read at once; 0: one per core.")
    ] = 0,
    engine: Annotated[
        EngineName,
        typer.Option(
            help="How to compute the timeline. There is no need to choose: all give the same "
            "times, auto takes the fastest. The others are there to check it; networkx is the "
            "readable definition, and slow."
        ),
    ] = EngineName.AUTO,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute it with all engines and compare; slow.")
    ] = False,
    clock: Annotated[
        ClockMode,
        typer.Option(
            help="align: estimate how the clocks of one execution differ. keep: trust them."
        ),
    ] = ClockMode.ALIGN,
    max_residual: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="Refuse the data if the ends of one collective lie further apart than this "
            "(median over all), e.g. 500us.",
        ),
    ] = "10ms",
    eager_below: EagerBelow = 0,
    rooted: Rooted = False,
    sparse_all_to_all: SparseAllToAll = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Put all ranks of a job on one timeline; split every collective into wait and transfer.

    Takes a recorded run, or the slices of a campaign: executions in which only some ranks were
    real, each with a clock of its own.

    Example: prismcalib merge run.parquet -o aligned.parquet

    Example: prismcalib merge slices/*.parquet --bare graph.parquet -o aligned.parquet
    """
    limit_ns = _duration(max_residual)
    from prismcalib.merge_printing import print_merge, print_slices
    from prismcalib.merge_result import MergeReport
    from prismcalib.merging import merge as merge_trace
    from prismcalib.slices import SliceOptions
    from prismcalib.waiting import WaitRules
    from prismtrace.headers import trace_files

    _refuse_to_replace(output, [*trace_files(list(inputs)), bare, base, comm_table])
    with progress("merging") as bar:
        result = merge_trace(
            list(inputs),
            engine=engine.value,
            clock=clock.value,
            max_residual_ns=limit_ns,
            rules=WaitRules(
                eager_below=eager_below, rooted=rooted, sparse_all_to_all=sparse_all_to_all
            ),
            slices=SliceOptions(
                bare=bare,
                base=base,
                reduce=reduce.value,
                pool_steps=pool_steps,
                missing=missing.value,
                unfold=unfold,
                jobs=jobs,
                ranks_per_host=ranks_per_host,
                comm_table=comm_table,
            ),
            warmup=warmup,
            verify=verify,
            advance=bar.advance,
        )
        result.write(output, columns_only=columns_only)
    warn_of_suffix(output)
    if json:
        print_json({"output": str(output), **result.report.as_dict()})
        return
    if isinstance(result.report, MergeReport):
        print_merge(result.report, result.header, again=result.merged_again)
    else:
        print_slices(result.report, result.header)
    print()
    announce_output(output)
