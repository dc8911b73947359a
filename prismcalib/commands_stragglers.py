"""The command `prismcalib stragglers`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismcalib.steps_option import StepsOption, print_steps
from prismtrace.console import counted, print_json, progress, table

if TYPE_CHECKING:
    from prismcalib.stragglers import By, Part, StragglerReport
    from prismtrace.schema import TraceHeader

__all__ = ["stragglers"]


class ByName(StrEnum):
    """Values of --by."""

    KIND = "kind"
    STAGE = "stage"
    REPLICA = "replica"
    RANK = "rank"
    GROUP = "group"


class PeersName(StrEnum):
    """Values of --peers."""

    AUTO = "auto"
    TYPE = "type"
    POSITION = "position"


def stragglers(
    trace: Annotated[
        Path,
        typer.Argument(
            readable=False,
            help="Trace that `prismcalib merge` wrote, or an operation-level log that "
            "`prismtrace convert` read.",
        ),
    ],
    by: Annotated[
        list[ByName] | None,
        typer.Option(help="Judge only these sorts of parts (repeatable); without it, all."),
    ] = None,
    peers: Annotated[
        PeersName,
        typer.Option(
            help="What an operation is compared with. type: all operations of its sort, so an "
            "uneven split over stages counts. position: the same operation on ranks that do the "
            "same. auto: type for operation-level logs, else position."
        ),
    ] = PeersName.AUTO,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of each table.")] = 8,
    steps: StepsOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Which rank, stage, group or kind of operation slows the job down, and the likely cause.

    Example: prismcalib stragglers aligned.parquet --by rank --by stage
    """
    from prismcalib.stragglers import BY, find_stragglers
    from prismtrace.trace import open_trace

    chosen = tuple(name for name in BY if by is None or name in by)
    with progress("comparing with peers"):
        opened = open_trace(trace)
        report = find_stragglers(opened, by=chosen, peers=peers.value, steps=steps)
    if json:
        print_json(report.as_dict())
    else:
        _print(report, opened.header, limit)


def _print(report: StragglerReport, header: TraceHeader, limit: int) -> None:
    from prismcalib.causes import LAUNCH_DELAYS
    from prismcalib.durations import format_ns
    from prismcalib.step_times import steps_text
    from prismcalib.wording import CAUSE_MEANING, doubts, no_peers, share_text

    print_steps(report.looked_at)
    for text in doubts(header):
        print(text)
    base, without, ideal = (
        round(float(times.mean()))
        for times in (report.base_ns, report.without_delays_ns, report.ideal_ns)
    )
    compared = {
        "type": "others of its sort, over all ranks, stages and steps",
        "position": "the same one on ranks that do the same",
    }[report.peers]
    table(
        steps_text(len(report.steps) + report.warmup, report.warmup, "mean"),
        ("", "step time", "slowdown", "meaning"),
        [
            ("as it was", format_ns(base), None, ""),
            (
                "no launch delays",
                format_ns(without),
                f"{report.launch_slowdown:.4f}",
                "every operation starts as soon as it can; idle inside spans, if any, stays",
            ),
            (
                "ideal",
                "unknown" if report.nothing_compared else format_ns(ideal),
                None if report.nothing_compared else f"{report.slowdown:.4f}",
                f"besides, every operation takes as long as {compared}",
            ),
        ],
    )
    if len(report.steps) > 1:
        print("means, so that single slow steps count; the step time of `predict` is a median")
    if report.nothing_compared:
        print(f"\n{no_peers(report.peers)}")
    else:
        _print_compared(report, limit)
    print()
    print(
        "likely causes (what the step takes less without one; they overlap)"
        if report.causes
        else "no cause that costs half a percent stands out"
    )
    if report.causes:
        print(CAUSE_MEANING)
    for cause in report.causes:
        whole = base if cause.kind == LAUNCH_DELAYS else without
        saved = f"{format_ns(round(cause.saves * whole))} of {format_ns(whole)}"
        less = f"{share_text(cause.saves)} ({saved}) less {cause.without}"
        print(f"  {cause.kind}, {cause.where}: {less}")
        print(f"      {cause.evidence}")
        print(f"      {cause.advice}")


def _print_compared(report: StragglerReport, limit: int) -> None:
    from prismcalib.wording import PART_MEANINGS

    if report.without_peers:
        print(f"without a peer on another rank: {counted(report.without_peers, 'operation')}")
    print()
    for line in PART_MEANINGS:
        print(line)
    for by, parts in report.parts.items():
        print()
        _print_parts(report, by, parts, limit)


def _print_parts(report: StragglerReport, by: By, parts: Sequence[Part], limit: int) -> None:
    from prismcalib.durations import format_ns
    from prismcalib.wording import RankNames, share_text

    names = RankNames(report.source_ranks)
    ranks = by == "rank"
    whole = float(report.without_delays_ns.mean())
    left_out = report.not_simulated.get(by, 0)
    table(
        f"by {by}" + (f" ({left_out} more differ less and were left out)" if left_out else ""),
        (*(names.heads if ranks else (by,)), "slowdown", "saves if like its peers", "time"),
        [
            (
                *(names.cells(int(part.name)) if ranks else (part.name,)),
                f"{part.slowdown:.4f}",
                share_text(part.saves),
                format_ns(round(part.saves * whole)),
            )
            for part in parts[:limit]
        ],
        of=len(parts),
    )
