"""The command `prismreplay collect`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismreplay.command_options import (
    Json,
    LocalWorldSize,
    MockRouter,
    Program,
    ShmDir,
    WorldSize,
    read_ranks,
    shown_ranks,
)
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.collect.collecting import CollectReport
    from prismreplay.collect.gpu_turns import GpuReport
    from prismreplay.tensors.choices import TensorChoices

__all__ = ["collect"]


def collect(
    program: Program,
    world_size: WorldSize,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to run them on. Default: the GPUs, else the CPU cores."),
    ] = None,
    per_device: Annotated[
        int, typer.Option(min=1, help="Ranks that compute on one device at a time.")
    ] = 1,
    output: Annotated[Path, typer.Option("-o", "--output", help="The graph to write.")] = Path(
        "bare.parquet"
    ),
    local_world_size: LocalWorldSize = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the output of ranks goes. Default: beside the graph."
        ),
    ] = None,
    show_rank: Annotated[
        str,
        typer.Option(metavar="RANKS|all|none", help="Ranks whose output is shown, as in 0,3-5."),
    ] = "0",
    shm_dir: ShmDir = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory of each GPU that ranks may take together; those that do not fit wait in "
            "the host's memory. Default: most of what is free.",
        ),
    ] = None,
    host_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory of the host for ranks that do not fit. Default: most of what is free.",
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="What communications give in place of what partners would send: a file of rules, "
            "the folder of a recording, or builtin:NAME. The first that answers counts.",
        ),
    ] = None,
    record_tensors: Annotated[
        str,
        typer.Option(
            metavar="none|sandbox-facing|all", help="Record the inputs of communications."
        ),
    ] = "none",
    record_below: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="BYTES",
            help="With --record-tensors: leave out communications of more than so many bytes.",
        ),
    ] = None,
    mirror_above: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="BYTES",
            help="Do not perform collectives of more than so many bytes: a rank gets what it would "
            "if all gave what it gives. The graph is the job's, losses are not.",
        ),
    ] = None,
    sandbox: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks that sandbox-facing means, as in 0-3.")
    ] = "",
    mock_router: MockRouter = None,
    fold: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help="Run one replica along this axis (dp), and the last one to compare; it stands "
            "for all.",
        ),
    ] = None,
    check_replicas: Annotated[
        bool, typer.Option(help="With --fold: run the last replica too, and compare.")
    ] = True,
    json: Json = False,
) -> None:
    """Run a program on all ranks of a big job, a few at a time, and write its graph.

    The program needs no change: it sees what torchrun would show it, and computes the same, bit
    for bit. Its ranks take turns; a rank gives its turn up when it has to wait for another one.

    Example: prismreplay collect --world-size 64 --devices 2 -- train.py --steps 3
    """
    from prismreplay.collect.programs import program_of
    from prismtrace.output import refuse_inputs

    _check_options(world_size, local_world_size)
    choices = _tensor_choices(
        world_size,
        sandbox,
        tensors=tensors or (),
        record=record_tensors,
        record_most_bytes=record_below,
        mock_router=mock_router,
        fold=fold,
        check_replicas=check_replicas,
    )
    call = program_of(program)
    call.check()
    refuse_inputs(output, [call.path, mock_router, *(tensors or ())])
    console.warn_of_suffix(output)
    # Before torch is imported, which counts its threads then.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Ranks are forked, which CUDA does not survive: nothing here may start it to ask for GPUs.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from prismreplay.collect.collecting import CollectOptions, usable_devices
    from prismreplay.collect.collecting import collect as run
    from prismreplay.late_bar import LateBar

    options = CollectOptions(
        world_size=world_size,
        devices=devices or usable_devices(),
        per_device=per_device,
        local_world_size=local_world_size,
        log_dir=log_dir,
        shown=shown_ranks(show_rank, world_size),
        quiet_stdout=json,
        shm_dir=shm_dir,
        mirror_above=mirror_above,
        gpu_bytes=_bytes("--gpu-memory", gpu_memory),
        host_bytes=_bytes("--host-memory", host_memory),
        tensors=choices,
    )
    with LateBar(world_size, "collecting") as bar:
        report = run(call, output, options, progress=bar.show)
    if json:
        console.print_json(report)
    else:
        _print(report)


def _check_options(world_size: int, local_world_size: int | None) -> None:
    if local_world_size is not None and local_world_size > world_size:
        raise typer.BadParameter(
            f"--local-world-size is more than the {world_size} ranks there are"
        )


def _bytes(option: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not 0 < gib < float("inf"):
        raise typer.BadParameter(f"{option} {gib:g}: name a size in GiB")
    return int(gib * (1 << 30))


def _tensor_choices(world_size: int, sandbox: str, **options: Any) -> TensorChoices:
    from prismreplay.tensors.choices import read_choices

    try:
        return read_choices(sandbox=read_ranks("--sandbox", sandbox, world_size), **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _gpu_rows(gpu: GpuReport) -> list[tuple[str, str]]:
    """What sharing GPUs took."""
    by = "" if gpu.measured_by == "nvml" else ", as ranks tell"
    most = f"{gpu.most_bytes / 1e9:,.1f} GB at the most, {gpu.rank_bytes / 1e9:,.1f} GB a rank{by}"
    rows = [("GPU memory", f"{most}; {gpu.budget_bytes / 1e9:,.1f} GB to use")]
    if gpu.trimmed:
        rows.append(("given back", f"{gpu.trimmed_bytes / 1e9:,.1f} GB, {gpu.trimmed:,} times"))
    if gpu.moved_out:
        out = f"{gpu.moved_out:,} out ({gpu.bytes_out / 1e9:,.1f} GB in {gpu.seconds_out:.1f} s)"
        back = f"{gpu.moved_in:,} in ({gpu.bytes_in / 1e9:,.1f} GB in {gpu.seconds_in:.1f} s)"
        rows.append(("moved", f"{out}, {back}; ranks waited {gpu.waited_s:.1f} s"))
    if gpu.spilled:
        rows.append(("to disk", f"{gpu.spilled:,} times"))
    return rows


def _print(report: CollectReport) -> None:
    naive = report.naive_context_switches
    steps = len(report.steps)
    rows: list[tuple[str, object]] = [
        ("ranks", f"{report.world_size}, at most {report.most_running} computing at a time"),
        ("steps", f"{steps}" if steps else "none found"),
        ("graph", f"{report.nodes:,} nodes, {console.counted(report.groups, 'group')}"),
        ("collectives", f"{report.collectives:,}"),
        ("messages", f"{report.messages:,}"),
        (
            "context switches",
            f"{report.context_switches:,}"
            + ("" if naive is None else f" (taking ranks in turn: {naive:,})"),
        ),
        ("rounds", f"{report.rounds:,}, turns of the rank that needed most"),
        ("time", f"{report.wall_s:.1f} s, {report.start_s:.1f} s of it to start"),
    ]
    if report.peak_memory_bytes:
        most = f"{report.peak_memory_bytes / 1e6:,.0f} MB"
        rows.append(("memory", f"{most} for all ranks at the most seen"))
    if report.gpu is not None:
        rows += _gpu_rows(report.gpu)
    rows.append(("logs", str(report.log_dir)))
    if report.supplied:
        rows.insert(5, ("supplied", f"{report.supplied:,} communications without partners"))
    if report.mirrored:
        calls = f"{report.mirrored:,} calls of collectives above --mirror-above: not performed"
        rows.insert(5, ("mirrored", calls))
    if report.folded_ranks:
        checked = len(report.checked_ranks)
        rows.insert(
            1,
            (
                "folded",
                f"{report.folded_ranks} ranks are replicas of {report.world_size - report.folded_ranks}"
                + (f"; {checked} of them ran and did the same" if checked else "; not compared"),
            ),
        )
    if report.uneven_all_to_all:
        rows.insert(
            2, ("warning", f"{report.uneven_all_to_all:,} all_to_all of replicas differ in size")
        )
    if report.recording is not None:
        kept = report.recording
        sizes = f"{kept.nbytes / 1e6:,.1f} MB, {kept.stored_bytes / 1e6:,.1f} MB on disk"
        rows.append(("tensors", f"{kept.tensors:,} of {sizes} in {kept.folder}"))
    if report.unreceived:
        rows.append(("warning", f"{report.unreceived:,} messages were never received"))
    if cut := report.policies.get("cut-rank"):
        rows.append(
            ("warning", f"{console.counted(cut, 'rank')} ended unnoticed (exec?): graph incomplete")
        )
    if report.cleaned.folders or report.cleaned.processes:
        processes, folders = map(len, (report.cleaned.processes, report.cleaned.folders))
        rows.append(("cleaned up", f"of dead runs: {processes} processes, {folders} folders"))
    for name, text in rows:
        print(f"{name + ':':<18} {text}")
    console.announce_output(report.output)
