"""The command `prismreplay run`."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismreplay.command_options import (
    Inject,
    Json,
    LocalWorldSize,
    MockRouter,
    Program,
    ShmDir,
    VirtualTensors,
    read_ranks,
    shown_ranks,
    tensor_sources,
)
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.collect.messages import Channel
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.run.options import RunOptions, Timing
    from prismtrace.trace import Trace

__all__ = ["Transport", "run"]


class Transport(StrEnum):
    """How groups with virtual members communicate."""

    AUTO = "auto"
    LOCAL = "local"
    REDUCED = "reduced"


def run(
    graph: Annotated[
        Path,
        typer.Argument(
            readable=False, help="The job's calibrated trace, as `prismcalib merge` wrote it."
        ),
    ],
    program: Program,
    sandbox: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks that run for real, as in 0-3.")
    ] = "0",
    tensors: VirtualTensors = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The sandbox ranks' trace.")
    ] = Path("run.parquet"),
    transport: Annotated[
        Transport,
        typer.Option(
            help="How groups with virtual members communicate. local: through the emulator, with "
            "timed ends; reduced: also in a real group with an assistant, who plays the virtual "
            "members; auto: local, on CPUs."
        ),
    ] = Transport.AUTO,
    assistants: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that play virtual ranks with --transport reduced; each needs a core. "
            "Default: one for every sandbox rank.",
        ),
    ] = None,
    comm_table: Annotated[
        Path | None,
        typer.Option(
            help="From comm-bench: what communication takes of a rank's own processor, which is "
            "taken from it beside its computation."
        ),
    ] = None,
    inject: Inject = None,
    spin: Annotated[
        tuple[str, float] | None,
        typer.Option(
            metavar="WHERE FACTOR",
            help="Have named pieces of sandbox ranks count as faster or slower, as in "
            "'name ~ \"attn\"' 0.8.",
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="A recorded true run to compare times with.")
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            help="Compare all that sandbox ranks send with the recording and name the first "
            "difference. Costs time: not for timing."
        ),
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(help="A plan of these sandbox ranks, compiled before.")
    ] = None,
    early: Annotated[
        bool,
        typer.Option(help="Virtual ranks are always there: data without times; any graph will do."),
    ] = False,
    hosts: Annotated[
        bool,
        typer.Option(
            "--hosts",
            help="Sandbox ranks are spread over the hosts on which a launcher (torchrun, srun) has "
            "started this same command.",
        ),
    ] = False,
    local_world_size: LocalWorldSize = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the output of ranks goes. Default: beside the trace."
        ),
    ] = None,
    show_rank: Annotated[
        str | None,
        typer.Option(
            metavar="RANKS|all|none",
            help="Ranks whose output is shown, as in 0,3-5. Default: one.",
        ),
    ] = None,
    shm_dir: ShmDir = None,
    mock_router: MockRouter = None,
    json: Json = False,
) -> None:
    """Run a few ranks of a job for real; all others are virtual and arrive when they would.

    The program needs no change and prints what it always prints. What it communicates comes from
    a recording or from rules; when virtual ranks arrive follows from the calibrated trace and from
    when the sandbox ranks do.

    Example: prismreplay run calibrated.parquet --sandbox 0-1 --tensors bare.tensors -- train.py
    """
    from prismreplay.collect.programs import program_of

    call = program_of(program)
    call.check()
    console.warn_of_suffix(output)
    if assistants is not None and transport is not Transport.REDUCED:
        raise typer.BadParameter("--assistants belongs to --transport reduced")
    if hosts and transport is Transport.REDUCED:
        raise typer.BadParameter("--transport reduced is for one host")
    # Before torch is imported, which counts its threads then.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from prismreplay.late_bar import LateBar
    from prismreplay.run.injecting import edits_of
    from prismreplay.run.options import RunOptions
    from prismreplay.run.printing import print_run
    from prismreplay.run.results import report_of
    from prismreplay.run.running import run_sandbox
    from prismreplay.run.spinning import read_spin
    from prismreplay.tensors.choices import read_choices
    from prismreplay.tensors.recorded import RecordedTensors
    from prismtrace.headers import require_ranks
    from prismtrace.input_files import require_readable
    from prismtrace.output import refuse_inputs
    from prismtrace.trace import open_trace

    trace = open_trace(graph)
    world_size = trace.header.world_size
    ranks = read_ranks("--sandbox", sandbox, world_size)
    # What is needed only later must not fail then, when the run is over.
    if compare is not None:
        require_ranks(open_trace(compare).header, ranks, str(compare))
    for needed in filter(None, (plan, comm_table)):
        require_readable(needed)
    edits = edits_of(inject or (), ranks)
    sources = tensor_sources(graph, tensors)
    inputs = [*trace.paths, plan, compare, comm_table, mock_router, *sources, call.path]
    refuse_inputs(output, inputs)
    folder = next((Path(source) for source in sources if Path(source).is_dir()), None)
    if check and folder is None:
        raise typer.BadParameter("--check needs a recording: --tensors FOLDER")
    options = RunOptions(
        sandbox=ranks,
        tensors=read_choices(tensors=sources, mock_router=mock_router),
        local_world_size=local_world_size,
        log_dir=log_dir,
        shown=None if show_rank is None else shown_ranks(show_rank, world_size),
        quiet_stdout=json,
        shm_dir=shm_dir,
        check=RecordedTensors(folder) if check and folder is not None else None,
        spins=() if spin is None else (read_spin(*spin),),
        assistants=(assistants or len(ranks)) if transport is Transport.REDUCED else 0,
        comm_table=comm_table,
    )
    elsewhere = _elsewhere(call, world_size, options, log_dir, output) if hosts else {}
    if elsewhere is None:
        return  # the first host says how it went
    with LateBar(len(ranks), "running") as bar:
        outcome = run_sandbox(
            call, trace, output, options, lambda: _timing(trace, ranks, edits, plan, early),
            progress=bar.show, elsewhere=elsewhere,
        )  # fmt: skip
    report = report_of(outcome, trace, timed=not early, checked=check, real=compare)
    if json:
        console.print_json(report)
    else:
        print_run(report, spun=spin is not None, injected=bool(edits))


def _elsewhere(
    call: ProgramCall, world_size: int, options: RunOptions, log_dir: Path | None, output: Path
) -> dict[int, Channel] | None:
    """Connections to sandbox ranks of other hosts; None: this is another host, and is done."""
    from prismreplay.run.hosts import hosts_from, meet
    from prismreplay.run.other_host import run_elsewhere

    met = meet(hosts_from(os.environ), options.sandbox)
    if not met.other_host:
        return met.channels
    folder = log_dir or output.with_suffix(f".host{met.number}.logs")
    run_elsewhere(call, world_size, options, met.channels, folder)
    return None


def _timing(
    trace: Trace, ranks: tuple[int, ...], edits: list[Any], plan: Path | None, early: bool
) -> Timing:
    """When virtual ranks arrive."""
    from prismreplay.digests import files_digest
    from prismreplay.errors import PlanError
    from prismreplay.plan import Plan, compile_plan
    from prismreplay.run.options import Timing

    if early:
        return Timing()
    if plan is None:
        return Timing(compile_plan(trace, ranks, edits))
    if edits:
        raise PlanError("--inject changes what a plan is made from", hint="leave --plan out")
    found = Plan.read(plan)
    if found.sandbox != ranks or found.world_size != trace.header.world_size:
        raise PlanError(
            "the plan is of other sandbox ranks, or of another job",
            where=str(plan),
            hint="compile it again: prismreplay plan",
        )
    if found.made_from not in (None, files_digest(trace.paths)):
        names = ", ".join(map(str, trace.paths))
        raise PlanError(
            f"the plan was compiled from another calibration than {names} is",
            where=str(plan),
            hint="compile it again: prismreplay plan; or give the graph that it was made from",
        )
    return Timing(found)
