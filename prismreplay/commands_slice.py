"""The command `prismreplay slice`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from prismreplay.command_options import (
    Json,
    LocalWorldSize,
    MockRouter,
    Program,
    ShmDir,
    VirtualTensors,
    shown_ranks,
    tensor_sources,
)
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.slicing.campaigning import SliceOptions, SlicingReport

__all__ = ["slice_"]


def slice_(
    graph: Annotated[
        Path,
        typer.Argument(readable=False, help="The job's graph, as `prismreplay collect` wrote it."),
    ],
    program: Program,
    sandbox_size: Annotated[int, typer.Option(min=1, help="Ranks that are real at a time.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for the slices.")
    ] = Path("slices"),
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices to use: GPUs, of which a slice takes one for each of its ranks; else CPU "
            "cores, one for each rank and assistant and one for the emulator. Several slices run at "
            "once where there is room. Default: all.",
        ),
    ] = None,
    tensors: VirtualTensors = None,
    repeat: Annotated[int, typer.Option(min=1, help="Executions of every slice.")] = 1,
    refine: Annotated[
        int,
        typer.Option(
            min=0,
            help="Slice again, at most so often, with virtual ranks arriving when the slices "
            "before say, until durations settle.",
        ),
    ] = 0,
    settled: Annotated[
        float,
        typer.Option(min=0, help="With --refine: changes up to this share count as none."),
    ] = 0.02,
    warmup: Annotated[
        int,
        typer.Option(min=0, help="First steps that are not typical; kept, not counted."),
    ] = 1,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="Keep these steps only, of the slices and in a copy of the graph beside them.",
        ),
    ] = None,
    only: Annotated[
        int | None, typer.Option(min=0, help="Run this slice alone, again if it is there.")
    ] = None,
    local_world_size: LocalWorldSize = None,
    assistants: Annotated[
        int,
        typer.Option(
            min=0,
            help="Processes of a slice that play virtual ranks in real groups with its ranks; each "
            "needs a core.",
        ),
    ] = 0,
    comm_table: Annotated[
        Path | None,
        typer.Option(
            help="From comm-bench: what communication takes of a rank's own processor, which is "
            "taken from it beside its computation. With --refine also for merging."
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(min=1, help="With --refine: ranks that share a host, as for merge."),
    ] = None,
    show_rank: Annotated[
        str,
        typer.Option(metavar="RANKS|all|none", help="Ranks whose output is shown, as in 0,3-5."),
    ] = "none",
    shm_dir: ShmDir = None,
    mock_router: MockRouter = None,
    json: Json = False,
) -> None:
    """Measure every rank of a job, a few at a time, among virtual ones.

    Each slice runs some ranks for real; what the others would send comes from a recording or from
    rules, at once. Interrupted, it goes on where it stopped when it is called again.

    Example: prismreplay slice bare.parquet --sandbox-size 2 -o slices -- train.py --steps 3
    """
    from prismreplay.collect.programs import program_of

    call = program_of(program)
    call.check()
    if only is not None and refine:
        raise typer.BadParameter("--only runs one slice again; --refine needs all of them")
    # Before torch is imported, which counts its threads then.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from prismreplay.slicing.campaigning import SliceOptions, slice_job
    from prismreplay.slicing.running import perform, prepare
    from prismreplay.slicing.workers import WorkError
    from prismreplay.tensors.choices import read_choices
    from prismtrace.ranks import MOST_RANKS

    options = SliceOptions(
        graph=graph,
        sandbox_size=sandbox_size,
        devices=devices,
        tensors=read_choices(tensors=tensor_sources(graph, tensors), mock_router=mock_router),
        repeats=repeat,
        refine=refine,
        tolerance=settled,
        warmup=warmup,
        steps=_steps(steps),
        only=only,
        local_world_size=local_world_size,
        shown=shown_ranks(show_rank, MOST_RANKS),
        quiet_stdout=json,
        shm_dir=shm_dir,
        comm_table=comm_table,
        ranks_per_host=ranks_per_host,
        assistants=assistants,
    )
    with console.progress("slicing", lines=True) as bar:
        done = 0

        def show(count: int, total: int, text: str) -> None:
            nonlocal done
            bar.describe(f"slicing: {text}" + (f", {count} of {total} done" if total else ""))
            bar.advance(max(0, count - done))
            done = max(done, count)

        try:
            report = slice_job(
                call, output, options, perform=perform, prepare=prepare, progress=show
            )
        except WorkError as failed:
            if failed.report:
                print(failed.report.rstrip(), file=sys.stderr)
            raise failed.error from None
    if json:
        console.print_json(report)
    else:
        _print(report, options)


def _steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, dash, last = text.partition("-")
    try:
        begin = int(first)
        end = int(last) if dash else begin
    except ValueError:
        begin, end = 1, 0
    if not 0 <= begin <= end:
        raise typer.BadParameter(f"--steps {text}: give the first and the last, as in 2-5")
    return begin, end


def _print(report: SlicingReport, options: SliceOptions) -> None:
    sizes = sorted({len(ranks) for ranks in report.slices})
    groups = report.whole_groups + report.split_groups
    steps = [time for one in report.outcomes for time in one.step_ns[options.warmup :]]
    rows = [
        ("slices", f"{len(report.slices)} of {'-'.join(map(str, sizes))} ranks"),
        ("executions", f"{report.ran} made" + (f", {report.kept} kept" if report.kept else "")),
        ("at once", f"{report.at_once}"),
        ("groups", f"{report.whole_groups} of {groups} measured as a whole"),
    ]
    if report.assistants:
        rows.append(("assistants", f"{report.assistants} a slice, in real groups of few"))
    if steps:
        rows.append(("steps took", f"{min(steps) / 1e6:,.3f} to {max(steps) / 1e6:,.3f} ms"))
    cost = sum(one.virtual_late[1] for one in report.outcomes)
    if cost:
        rows.append(("emulator took", f"{cost / 1e6:,.1f} ms of all ranks, left out of the times"))
    for one in report.rounds:
        word = "settled" if one.settled else "moved"
        step = f"{one.before_ns / 1e6:,.3f} -> {one.after_ns / 1e6:,.3f} ms"
        text = f"{word}: step {step}, durations by {one.moved_share:.1%}"
        rows.append((f"round {one.number}", text))
        rows += [
            ("", f"{each.name}: {each.before_ns / 1e6:,.3f} -> {each.after_ns / 1e6:,.3f} ms")
            for each in one.moved
            if not one.settled
        ]
    rows.append(("time", f"{report.wall_s:.1f} s"))
    for name, text in rows:
        print(f"{name + ':' if name else '':<18} {text}")
    _warn(report)
    print()
    folder = quote(str(report.folder))
    if options.only is not None:
        print(f"wrote slice {options.only} of {len(report.slices)} in {report.folder}")
        alone = f"{folder}/slice-{options.only:04d}*.parquet"
        print(f"next: prismcalib merge {alone} --base aligned.parquet -o realigned.parquet")
        return
    print(f"wrote {console.counted(len(report.slices), 'slice')} in {report.folder}")
    graph = " ".join(quote(str(path)) for path in report.graph)
    costs, first, table = "", "next: ", options.comm_table
    if report.split_groups:
        costs = f" --ranks-per-host {options.local_world_size or report.world_size}"
        if table is None and not report.whole_groups:
            table = Path("table.parquet")
            print(f"next: prismreplay comm-bench --nproc {report.world_size} -o {table}")
            first = "then: "
        if table is not None:
            costs += f" --comm-table {quote(str(table))}"
    print(
        f"{first}prismcalib merge {folder}/slice-*.parquet --bare {graph}{costs} -o aligned.parquet"
    )


def _warn(report: SlicingReport) -> None:
    if report.replaced:
        what = sorted({name for unlike in report.replaced.values() for name in unlike})
        count = len(report.replaced)
        print(
            f"note: {console.counted(count, 'slice')} in the folder {'was' if count == 1 else 'were'} "
            f"replaced, as made otherwise ({', '.join(what)})",
            file=sys.stderr,
        )
    if report.split_groups:
        took = "what few ranks take" if report.assistants else "no time yet"
        are, its = ("was", "its") if report.split_groups == 1 else ("were", "their")
        fill = "merge has a model fill them in (--ranks-per-host), or times that"
        if not report.whole_groups:
            fill = "as no group was whole, no model can be fitted to others; give merge times that"
        print(
            f"note: {console.counted(report.split_groups, 'group')} {are} never real as a whole, and "
            f"{its} transfers take {took}: {fill} `prismreplay comm-bench` measured (--comm-table)",
            file=sys.stderr,
        )
    if not report.timing_true:
        print(
            "warning: fewer devices than ranks and emulator need: they share them, and durations are "
            "longer than on the real machine",
            file=sys.stderr,
        )
    from prismreplay.run.marks import CORE_WAIT_BOUND

    waited = max((one.core_wait for one in report.outcomes), default=0.0)
    if waited > CORE_WAIT_BOUND:
        print(
            f"warning: ranks of a slice waited for a core, which others had, for up to "
            f"{waited:.0%} of the time in which they could compute: durations are longer "
            "than on a quiet machine",
            file=sys.stderr,
        )
    if not report.settled:
        print(
            "warning: durations have not settled; refine more, repeat slices, or accept more "
            "change (--settled)",
            file=sys.stderr,
        )
