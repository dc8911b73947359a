"""The command `prismreplay run`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismreplay.command_options import (
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
from prismreplay.commands_collect import LateBar
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.collect.messages import Channel
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.run.results import Comparison, RunReport
    from prismreplay.run.running import RunOptions, Timing
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
    inject: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Change virtual ranks, as in rank=12,kind=compute,scale=1.4. Repeatable.",
        ),
    ] = None,
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
        typer.Option(help="Where the output of ranks goes. Default: beside the trace."),
    ] = None,
    show_rank: Annotated[
        str | None,
        typer.Option(help="Ranks whose output is shown, as in 0,3-5; all; none. Default: one."),
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
    from prismreplay.errors import DeadlockError, RankFailedError
    from prismreplay.run.injecting import edits_of
    from prismreplay.run.results import report_of
    from prismreplay.run.running import RunOptions, run_sandbox
    from prismreplay.run.spinning import read_spin
    from prismreplay.tensors.choices import read_choices
    from prismreplay.tensors.recorded import RecordedTensors
    from prismtrace.trace import open_trace

    trace = open_trace(graph)
    world_size = trace.header.world_size
    ranks = read_ranks("--sandbox", sandbox, world_size)
    edits = edits_of(inject or (), ranks)
    sources = tensor_sources(graph, tensors)
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
    bar = LateBar(len(ranks), "running")
    try:
        outcome = run_sandbox(
            call, trace, output, options, lambda: _timing(trace, ranks, edits, plan, early),
            progress=bar.show, elsewhere=elsewhere,
        )  # fmt: skip
    except (DeadlockError, RankFailedError) as error:
        bar.close()
        if error.report:
            print(error.report.rstrip(), file=sys.stderr)
        raise
    finally:
        bar.close()
    report = report_of(outcome, trace, timed=not early, checked=check, real=compare)
    if json:
        console.print_json(report)
    else:
        _print(report, spun=spin is not None)


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
    from prismreplay.errors import PlanError
    from prismreplay.plan import Plan, compile_plan
    from prismreplay.run.running import Timing

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
    return Timing(found)


def _print(report: RunReport, *, spun: bool) -> None:
    from prismcalib.durations import format_ns as ns
    from prismtrace.ranks import format_ranks

    rows: list[tuple[str, object]] = [
        ("ranks", f"{format_ranks(report.sandbox)} of {report.world_size}"),
        ("steps", len(report.steps) or "none found"),
    ]
    if report.step_ns is not None:
        predicted = report.predicted_step_ns
        rows.append(
            (
                "step time",
                ns(report.step_ns)
                + ("" if predicted is None else f", predicted {ns(predicted)}")
                + f"; here it took {ns(report.measured_step_ns or 0)}",
            )
        )
    if report.timed:
        rows.append(("interference", f"{report.interference:.1%} of a step at most"))
    rows += [
        ("memory", _memory(report)),
        (
            "read ahead",
            f"{report.prefetched.hits:,} contributions in time, {report.prefetched.misses:,} not",
        ),
        ("time", f"{report.wall_s:.1f} s, {report.start_s:.1f} s of it to start"),
        ("logs", report.log_dir),
    ]
    rows += _warnings(report, spun=spun)
    for name, text in rows:
        print(f"{name + ':':<18} {text}")
    print()
    _print_tables(report)
    console.announce_output(report.output)


def _memory(report: RunReport) -> str:
    if any(one.device for one in report.ranks):
        peak = max(one.peak_allocated_bytes for one in report.ranks)
        reserved = max(one.peak_resident_bytes for one in report.ranks)
        return (
            f"{peak:,} bytes allocated at most on a rank's GPU, {reserved / 1e6:,.0f} MB reserved"
        )
    peak = max((one.peak_resident_bytes for one in report.ranks), default=0)
    return f"{peak / 1e6:,.0f} MB resident at most on a rank"


_REPEATED = (
    "operations of steps beyond the graph: their tensors are those of its last step, which do "
    "not fit the training"
)


_MIRRORED = (
    "operations were given what the rank itself gave, as nothing says what virtual ranks send: "
    "losses are not the job's"
)


def _warnings(report: RunReport, *, spun: bool) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if report.disturbed:
        found.append(
            ("warning", "answers came late: these times are this machine's; use an idle core more")
        )
    if report.repeated_operations:
        found.append(("warning", f"{report.repeated_operations:,} {_REPEATED}"))
    mirrored = sum(one.device["mirrored"] for one in report.ranks if one.device)
    if mirrored:
        found.append(("warning", f"{mirrored:,} {_MIRRORED}"))
    if report.missing_operations:
        found.append(("note", f"{report.missing_operations:,} operations of the graph not made"))
    if spun and not any(one.spun for one in report.ranks):
        found.append(("warning", "--spin: no piece of the program has such a name"))
    if report.resized_operations:
        found.append(
            ("warning", f"{report.resized_operations:,} operations of other sizes than the graph's")
        )
    if report.checked:
        found.append(("checked", "all that sandbox ranks sent is what was recorded"))
    compared = [one for one in report.groups if one.compared]
    if compared:
        count = sum(one.compared for one in compared)
        worst = max(one.largest_difference for one in compared)
        text = (
            f"{count:,} all_reduces gave the exact result, to {worst:.2f} of its type's precision"
        )
        found.append(("small groups", text))
    return found


def _print_tables(report: RunReport) -> None:
    from prismcalib.durations import format_ns as ns

    if report.steps:
        console.table(
            "Steps",
            ["step", "emulated", "predicted", "took here", "late answers"],
            [
                [
                    one.step,
                    ns(one.emulated_ns),
                    None if one.predicted_ns is None else ns(one.predicted_ns),
                    ns(one.measured_ns),
                    ns(one.late_ns),
                ]
                for one in report.steps
            ],
        )
        print()
    console.table(
        "Groups with sandbox members"
        + (f"; {report.bypassed_groups} others are not made" if report.bypassed_groups else ""),
        ["group", "ranks", "sandbox", "transport", "operations", "MB"],
        [
            [
                one.desc or one.name,
                one.size,
                len(one.sandbox),
                one.transport,
                one.operations,
                f"{one.nbytes / 1e6:,.2f}",
            ]
            for one in report.groups
        ],
    )
    print()
    played = [one for one in report.groups if one.reduced_transfer_ns is not None]
    if played:
        console.table(
            "Groups with an assistant: how long their real operations took, and came too late",
            ["group", "members", "transfer", "assistant late"],
            [
                [
                    one.desc or one.name,
                    f"{len(one.sandbox)} + 1 for {one.size - len(one.sandbox)}",
                    ns(one.reduced_transfer_ns or 0),
                    ns(one.assistant_late_ns or 0),
                ]
                for one in played
            ],
        )
        print()
    console.table(
        "How well times were met",
        [
            *("rank", "holds", "median", "99 %", "worst", "late answers", "handing over"),
            "communication beside it",
        ],
        [
            [
                one.rank,
                one.holds,
                ns(one.hold_median_ns),
                ns(one.hold_p99_ns),
                ns(one.hold_worst_ns),
                f"{one.late_answers:,}, {ns(one.late_ns)}",
                ns(one.handing_ns),
                ns(one.contended_ns),
            ]
            for one in report.ranks
        ],
    )
    print()
    if any(one.device for one in report.ranks):
        _print_devices(report)
    if report.comparison is not None:
        _print_comparison(report.comparison)


def _print_devices(report: RunReport) -> None:
    from prismcalib.durations import format_ns as ns

    devices = [one.device for one in report.ranks if one.device]
    console.table(
        "On GPUs: the host's part of an operation, by how much ends were missed, and memory",
        [
            *("rank", "operations", "host", "asked for", "holds", "median", "99 %", "worst"),
            *("too late", "peak allocated", "emulator's"),
        ],
        [
            [
                one["rank"],
                one["operations"],
                ns(one["issuing_median_ns"]),
                f"{one['fetched']:,}, {one['fetched_late']:,} late, {ns(one['fetching_ns'])}",
                one["holds"],
                ns(one["hold_median_ns"]),
                ns(one["hold_p99_ns"]),
                ns(one["hold_worst_ns"]),
                f"{one['late']:,}, {ns(one['late_ns'])}",
                f"{one['peak_allocated_bytes']:,}",
                f"{one['outside_bytes'] / 1e6:,.1f} MB",
            ]
            for one in devices
        ],
    )
    print()


def _print_comparison(found: Comparison) -> None:
    from prismcalib.durations import format_ns as ns

    for title, rows in (("step", found.steps), ("kind", found.kinds)):
        console.table(
            f"Against {found.real}, by {title}",
            [title, "real", "emulated", "error"],
            [[name, ns(real), ns(here), f"{error:+.2%}"] for name, real, here, error in rows],
        )
        print()
