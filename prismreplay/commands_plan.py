"""The command `prismreplay plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismreplay.command_options import Inject, Json, read_ranks
from prismtrace import console

if TYPE_CHECKING:
    from prismreplay.plan_report import PlanReport

__all__ = ["plan"]


def plan(
    graph: Annotated[
        Path,
        typer.Argument(
            readable=False, help="The job's calibrated trace, as `prismcalib merge` wrote it."
        ),
    ],
    sandbox: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks that will run for real, as in 0-3.")
    ] = "0",
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan to write.")] = Path(
        "plan.parquet"
    ),
    inject: Inject = None,
    json: Json = False,
) -> None:
    """Work out when virtual ranks arrive, for runs of the same ranks: once instead of each time.

    A large job's graph takes memory and time that a run does not need; a plan has only what sandbox
    ranks meet with. `prismreplay run --plan` takes it.

    Example: prismreplay plan calibrated.parquet --sandbox 0-1 -o plan.parquet
    """
    import time
    from dataclasses import replace

    from prismreplay.digests import files_digest
    from prismreplay.plan import compile_plan
    from prismreplay.plan_report import report_of_plan
    from prismreplay.run.injecting import edits_of
    from prismtrace.output import refuse_inputs, writable_target
    from prismtrace.progress_bar import progress
    from prismtrace.trace import open_trace

    console.warn_of_suffix(output)
    writable_target(output)
    trace = open_trace(graph)
    refuse_inputs(output, trace.paths)
    ranks = read_ranks("--sandbox", sandbox, trace.header.world_size)
    edits = edits_of(inject or (), ranks)
    begun = time.perf_counter()
    with progress("compiling the plan"):
        # Before the graph is read: should it be replaced meanwhile, the plan is too old.
        made_from = files_digest(trace.paths)
        made = replace(compile_plan(trace, ranks, edits), made_from=made_from)
    made.write(output)
    report = report_of_plan(made, trace.header, output, time.perf_counter() - begun)
    if json:
        console.print_json(report)
    else:
        _print(report)


def _print(report: PlanReport) -> None:
    from prismcalib.durations import format_ns
    from prismtrace.ranks import format_ranks

    if report.steps:
        steps = f"{report.steps}, the last one takes {format_ns(report.period_ns)}"
    else:
        steps = "none found: a run cannot be longer than the graph"
    size = (
        f"{report.vertices:,} vertices, {report.junctions:,} of them among virtual ranks, "
        f"{report.edges:,} edges"
    )
    groups = (
        f"{report.mixed_groups} with virtual members, {report.real_groups} real ones, "
        f"{report.bypassed_groups} not made"
    )
    rows = [
        ("ranks", f"{format_ranks(report.sandbox)} of {report.world_size}"),
        ("steps", steps),
        (
            "operations",
            f"{report.boundary_operations:,} of sandbox ranks with virtual ones",
        ),
        ("cost", f"{report.edges_per_operation:.1f} comparisons an operation ({size})"),
        ("groups", groups),
        (
            "transfers",
            ", ".join(f"{share:.0%} {source}" for source, share in report.transfer_share.items())
            or "none",
        ),
        ("time", f"{report.wall_s:.1f} s"),
        ("memory", f"{report.peak_memory_bytes / 1e6:,.0f} MB at most"),
        ("file", f"{report.file_bytes / 1e6:,.2f} MB"),
    ]
    for name, text in rows:
        print(f"{name + ':':<12} {text}")
    console.announce_output(report.output)
