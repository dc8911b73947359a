"""The command `prismreplay record`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismreplay.command_options import Json
from prismtrace import console

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prismreplay.record import RecordReport
    from prismtrace.assembling import AssembleReport, LastCommunication

__all__ = ["record"]


def record(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND...",
            help="A launcher with all it needs, or a script and its arguments, after two dashes.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")] = Path(
        "recorded.parquet"
    ),
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start this many ranks of a script here, without a launcher. Default for a "
            "script: 1.",
        ),
    ] = None,
    spools: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Only record, into this folder: on several hosts, each runs its launcher with "
            "it; then put the folders together and use --assemble.",
        ),
    ] = None,
    assemble: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Run nothing: make the trace of this folder of spools, also of a run that failed.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the output of ranks goes that are started here. Default: beside the trace.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Record a true run of a program: which rank computes and communicates when.

    The program needs no change, and costs little more time. Ranks compute on CPUs, over gloo, or on
    GPUs, over NCCL: then times are those of the GPUs.

    Examples: prismreplay record -- torchrun --nproc-per-node 8 train.py --steps 3

    prismreplay record --nproc-per-node 8 -- train.py --steps 3
    """
    words = command or []
    _check_usage(words, nproc_per_node, spools, assemble)
    console.warn_of_suffix(output)
    if assemble is not None:
        _assemble(assemble, output, json=json)
        return
    from prismreplay.collect.programs import program_of
    from prismreplay.errors import RankFailedError
    from prismreplay.record import assembling_line, record_spools
    from prismreplay.record import record as run
    from prismtrace.output import refuse_inputs

    is_script = nproc_per_node is not None or words[0] == "-m" or words[0].endswith(".py")
    program = program_of(words) if is_script else None
    refuse_inputs(output, words)
    ranks = nproc_per_node or 1
    try:
        if spools is not None:
            record_spools(words, spools, program=program, ranks=ranks, log_dir=log_dir)
            print(f"recorded {console.counted(len(list(spools.glob('*.spool'))), 'rank')}")
            print(f"next: {assembling_line(spools, output)}")
            return
        report = run(
            words, output, program=program, ranks=ranks, log_dir=log_dir, quiet_stdout=json
        )
    except RankFailedError as error:
        if error.report:
            print(error.report, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        kept = spools or output.with_suffix(".spools")
        if any(kept.glob("*.spool")):
            print(
                "note: if the program stood still, `prismreplay collect` says at which line; what was "
                "recorded until then is kept, and tells where every rank stood: "
                + assembling_line(kept, output),
                file=sys.stderr,
            )
        raise
    if program is not None:
        _note_shared_cores(ranks)
    _show(report, json=json)


def _note_shared_cores(ranks: int) -> None:
    from prismreplay.collect.gpus import Nvml, find_gpus

    cores = len(os.sched_getaffinity(0))
    if ranks > cores and not find_gpus(Nvml.load()):
        print(
            f"note: {ranks} ranks shared {console.counted(cores, 'core')}: they took longer than with "
            "a core each",
            file=sys.stderr,
        )


def _check_usage(
    words: list[str], nproc_per_node: int | None, spools: Path | None, assemble: Path | None
) -> None:
    if assemble is not None and (words or nproc_per_node or spools):
        raise typer.BadParameter("--assemble runs nothing: give it with --output only")
    if assemble is None and not words:
        raise typer.BadParameter("no program is given; it comes after two dashes: -- train.py")


def _assemble(folder: Path, output: Path, *, json: bool) -> None:
    from prismreplay.record import assemble_spools
    from prismtrace.ranks import name_ranks

    made = assemble_spools(folder, output)
    if made.cut_ranks:
        cut = ", ".join(map(str, made.cut_ranks))
        print(
            f"warning: cut off before their end: ranks {cut}; {made.dropped:,} nodes of steps that "
            "not all ranks finished are left out",
            file=sys.stderr,
        )
        print("the last communication of every rank:", file=sys.stderr)
        for line in _last_lines(made.last):
            print(f"  {line}", file=sys.stderr)
        print("ranks that are behind are those that the others wait for", file=sys.stderr)
        if killed := [one.rank for one in made.last if one.killed]:
            print(
                f"but of {name_ranks(killed)}, killed, the last half second may be missing: they may have "
                "come further. Where programs differ, `prismreplay collect` says so, and at which line",
                file=sys.stderr,
            )
    if made.missing_ranks:
        print(f"warning: no spool of {name_ranks(made.missing_ranks)}", file=sys.stderr)
    _show(made, json=json)


def _last_lines(last: Iterable[LastCommunication]) -> Iterator[str]:
    """One line for ranks that stood at the same place; those of the fewest first."""
    from prismtrace.ranks import name_ranks

    alike: dict[str, list[int]] = {}
    for one in last:
        where = "none"
        if one.kind is not None:
            number = "" if one.seq is None else f" {one.seq}"
            peer = "" if one.peer is None else f" (rank {one.peer})"
            where = f"{one.kind}{number}{peer} of group {one.group}"
            where += ", ended" if one.ended else ", did not end"
        where += "; its program came to its end" if one.finished else ""
        alike.setdefault(where, []).append(one.rank)
    for where, ranks in sorted(alike.items(), key=lambda item: len(item[1])):
        yield f"{name_ranks(ranks)}: {where}"


def _show(report: RecordReport | AssembleReport, *, json: bool) -> None:
    if json:
        console.print_json(report)
        return
    steps = len(report.steps)
    rows = [
        ("ranks", f"{len(report.ranks)} of {report.world_size}"),
        ("steps", f"{steps}" if steps else "none found"),
        ("graph", f"{report.nodes:,} nodes, {console.counted(report.groups, 'group')}"),
    ]
    if hasattr(report, "run_s"):
        rows.append(("time", f"{report.run_s:.1f} s"))
    if log_dir := getattr(report, "log_dir", None):
        rows.append(("logs", str(log_dir)))
    rows += [(name, f"{number:,}") for name, number in report.policies.items()]
    for name, text in rows:
        print(f"{name + ':':<26} {text}")
    console.announce_output(report.output)
