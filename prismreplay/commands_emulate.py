"""The command `prismreplay emulate`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from prismreplay.command_options import (
    LocalWorldSize,
    MockRouter,
    Program,
    WorldSize,
    read_ranks,
)
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.emulation.emulating import Emulation
    from prismreplay.emulation.stages import Note, Stage

__all__ = ["emulate"]

_WHAT = {
    "collect": "all ranks take turns and give the graph of the job, and what they communicate",
    "comm-bench": "how long communications take on this machine",
    "slice": "every rank once for real among virtual ones: how long everything takes",
    "merge": "one timeline of the whole job",
    "run": "the sandbox for real, in a world that keeps this time",
}

_MOST_LOSSES = 6
_RECORD_BELOW = 65536
"""On GPUs: sizes, flags and objects, which programs depend on. All of a job's tensors may be more
than a disk holds.
"""


def emulate(
    program: Program,
    world_size: WorldSize,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices that ranks compute on; on CPUs the emulator takes one core more, if "
            "there is one. Default: the GPUs, else the CPU cores.",
        ),
    ] = None,
    sandbox: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks that run in the end, as in 0-3.")
    ] = "0",
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="Folder for what every stage gives; stages done stay done.",
        ),
    ] = Path("emulation"),
    sandbox_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a slice that are real. Default: one a device."),
    ] = None,
    local_world_size: LocalWorldSize = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULES|FOLDER|builtin:NAME",
            help="What virtual ranks send, before what was recorded here. Default: that alone.",
        ),
    ] = None,
    mock_router: MockRouter = None,
    record_below: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="BYTES",
            help="Record what communications of at most so many bytes carry; of larger ones, virtual "
            "ranks give what the sandbox ranks do, and losses are not the job's. Default: all on "
            "CPUs, 65536 on GPUs.",
        ),
    ] = None,
    comm_table: Annotated[
        Path | None,
        typer.Option(
            help="Measured times of communications, for groups that no slice has as a whole. "
            "Default: on CPUs, measure them here, with as many ranks as there are cores."
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Executions of every slice.")] = 1,
    refine: Annotated[
        int, typer.Option(min=0, help="Slice again, at most so often, until durations settle.")
    ] = 0,
    warmup: Annotated[
        int, typer.Option(min=0, help="First steps that are not typical; kept, not counted.")
    ] = 1,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="auto|local|reduced",
            help="How sandbox ranks meet virtual ones, see `run`. Default: as there.",
        ),
    ] = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="Slow virtual ranks down, see `run`. Repeatable."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="A true run (`record`) to compare the emulated one with.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Collect, slice, merge and run a program: a few ranks for real in the world of all.

    Every stage is a command of its own, which is shown and can be typed again; its files stay in
    the output folder. Called again with the same words, it goes on where it stopped.

    Example: prismreplay emulate --world-size 16 --devices 2 -- train.py --steps 5
    """
    chosen = tuple(sorted(set(read_ranks("--sandbox", sandbox, world_size))))
    if not chosen:
        raise typer.BadParameter("--sandbox: name at least one rank, as in 0-1")
    if local_world_size is not None and local_world_size > world_size:
        raise typer.BadParameter(
            f"--local-world-size is more than the {world_size} ranks there are"
        )
    from prismreplay.collect.gpus import Nvml, find_gpus
    from prismreplay.emulation.emulating import EmulateOptions
    from prismreplay.emulation.emulating import emulate as run_chain
    from prismreplay.emulation.stages import StageError

    gpus = len(find_gpus(Nvml.load()))
    cores = len(os.sched_getaffinity(0))
    options = EmulateOptions(
        world_size=world_size,
        devices=min(world_size, devices or gpus or cores),
        sandbox=chosen,
        sandbox_size=sandbox_size,
        local_world_size=local_world_size,
        tensors=tuple(tensors or ()),
        mock_router=mock_router,
        comm_table=comm_table,
        repeats=repeat,
        refine=refine,
        warmup=warmup,
        transport=transport,
        inject=tuple(inject or ()),
        compare=compare,
        cores=cores,
        on_gpus=gpus > 0,
        record_below=_RECORD_BELOW if record_below is None and gpus else record_below,
    )
    told = _Told(sys.stderr if json else sys.stdout)
    try:
        done = run_chain(program, output, options, told)
    except StageError as failed:
        print(
            f"note: {failed.stage} failed; what was done before stays in {output}, and the same "
            "command goes on from there",
            file=sys.stderr,
        )
        raise typer.Exit(failed.code) from None
    except KeyboardInterrupt:
        print(
            f"note: interrupted; what was done before stays in {output}, and the same command goes on "
            "from there",
            file=sys.stderr,
        )
        raise
    if json:
        console.print_json(done)
    else:
        _print(done)


class _Told:
    """Prints every stage as it goes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begins(self, number: int, of: int, stage: Stage, note: Note | None) -> None:
        self._say(f"{number}/{of} {stage.name}: {_WHAT[stage.name]}")
        self._say(f"    $ {console.printable(stage.line)}")
        if note is not None:
            self._say(f"    done before, in {note.wall_s:.1f} s\n")

    def ended(self, note: Note) -> None:
        self._say(f"    done in {note.wall_s:.1f} s\n")

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _own_clock(emulated_ns: int, measured_ns: int | None) -> str:
    """What the program itself saw, if the emulator held it up."""
    from prismcalib.durations import format_ns

    if measured_ns is None or measured_ns <= emulated_ns:
        return ""
    return f"; {format_ns(measured_ns)} by the program's own clock, which counts the emulator, too"


def _print(done: Emulation) -> None:
    from prismcalib.durations import format_ns
    from prismcalib.step_times import steps_text
    from prismtrace.ranks import format_ranks

    found = done.findings
    emulated = found.emulated_step_ns
    predicted, before = format_ns(found.predicted_step_ns), found.uninjected_step_ns
    if before is not None:
        change = found.predicted_step_ns / max(before, 1) - 1
        predicted += f" with --inject; {format_ns(before)} without ({change:+.1%})"
    rows = [("predicted step time", predicted)]
    if found.range_ns is not None:
        without = "" if before is None else " without --inject"
        text = " and ".join(map(format_ns, found.range_ns))
        rows.append(("  it lies between", f"{text}{without}: not all transfers were measured"))
    if emulated is not None:
        apart = emulated / max(found.predicted_step_ns, 1) - 1
        rows.append(
            (
                "emulated step time",
                f"{format_ns(emulated)} ({apart:+.1%} against that; {steps_text(found.steps, 1)}"
                + _own_clock(emulated, found.measured_step_ns)
                + ")",
            )
        )
    if found.comparison is not None:
        real, worst = found.comparison, found.comparison["worst_step_error"]
        error = f"{real['step_error']:+.1%} against {real['real']}; of any step {worst:.1%} at most"
        rows.append(("error of the step", error))
        rows += [("  but of the true run", text) for text in real.get("doubts", ())]
    for rank, nbytes in found.peak_memory.items():
        rows.append((f"peak memory, rank {rank}", f"{nbytes / 1e6:,.1f} MB"))
    for rank, losses in found.losses.items():
        shown = ", ".join(f"{loss:g}" for loss in losses[-_MOST_LOSSES:])
        earlier = "... " if len(losses) > _MOST_LOSSES else ""
        rows.append((f"losses, rank {rank}", earlier + shown))
    if not found.losses:
        silent = f"{'rank' if len(found.peak_memory) == 1 else 'ranks'} "
        silent += format_ranks(tuple(found.peak_memory))
        text = f"none in what {silent} printed ({done.folder}/run.logs)"
        rows.append(("losses", f"{text}: --sandbox must name a rank that prints them"))
    rows.append(("rests on measurement", f"{found.measured_share:.1%} of the critical path"))
    if found.table_share:
        text = f"{found.table_share:.1%} on transfers that were measured apart from the job (--comm-table)"
        rows.append(("  and", text))
    rows.append(("time in all", _took(done)))
    for name, text in rows:
        print(f"{name + ':':<22} {text}")
    print()
    console.table(
        "where the time goes: the critical path of the steps that count"
        + ("" if before is None else ", with --inject"),
        ("kind", "time", "share"),
        [(part.name, format_ns(part.time_ns), f"{part.share:.1%}") for part in found.path],
    )
    print()
    console.table(
        "what that rests on",
        ("", "share"),
        [(name, f"{share:.1%}") for name, share in found.basis.items()],
    )
    for text in found.warnings:
        print(f"\nwarning: {text}", file=sys.stderr)
    print()
    print(f"the timeline of all ranks: {done.folder}/calibrated.parquet")
    print(f"the sandbox's own trace:   {done.folder}/run.parquet")


def _took(done: Emulation) -> str:
    """Of all stages, and of those that were not done before."""
    now = sum(stage.wall_s for stage in done.stages if not stage.kept)
    before = any(stage.kept for stage in done.stages)
    return f"{done.wall_s:.1f} s" + (f", {now:.1f} s of it now" if before else "")
