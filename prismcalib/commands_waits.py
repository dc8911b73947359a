"""The command `prismcalib waits`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prismcalib.steps_option import StepsOption, print_steps
from prismtrace.console import counted, print_json, progress, table

__all__ = ["waits"]


def waits(
    trace: Annotated[
        Path, typer.Argument(readable=False, help="Trace that `prismcalib merge` wrote.")
    ],
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Communications to show.")] = 10,
    steps: StepsOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """The longest waits: in which communication, for which rank, and what that one did meanwhile.

    One line for each communication, with the member that waited longest. A rank that arrives
    last may have waited for another one itself: then look at that wait. Idle inside is the time
    between the kernels of its spans: its host was late.

    Example: prismcalib waits aligned.parquet --limit 20
    """
    from prismcalib.chosen_steps import chosen_steps, told
    from prismcalib.durations import format_ns
    from prismcalib.long_waits import longest_waits
    from prismcalib.paths import calibrated_trace
    from prismcalib.wording import RankNames, doubts

    opened = calibrated_trace(trace)
    with progress("looking at waits"), chosen_steps(opened, steps) as (chosen, looked_at):
        found = longest_waits(chosen, limit=limit, steps="all")
    if json:
        print_json({**told(looked_at), "waits": [one.as_dict() for one in found]})
        return
    print_steps(looked_at)
    for text in doubts(opened.header):
        print(text)
    if not found:
        print("nobody waits for anybody")
        return
    names = RankNames.of(opened.header)
    idle = any(one.inner_idle_ns for one in found)
    table(
        "longest waits, one line for each communication; behind the rank that arrived last, what it "
        "did meanwhile",
        (
            *("wait", *names.heads, "step", "phase", "kind", "group", "seq", "waiting"),
            *("for rank", *names.heads[1:]),
            *("computed", *(("idle inside",) if idle else ()), "waited itself", "else"),
            "longest span",
        ),
        [
            (
                *(format_ns(one.wait_ns), *names.cells(one.rank)),
                *(one.step, one.phase, one.kind, one.group, one.seq),
                counted(one.waiting, "rank"),
                *names.cells(one.last),
                format_ns(one.computed_ns - one.inner_idle_ns),
                *((format_ns(one.inner_idle_ns),) if idle else ()),
                *map(format_ns, (one.waited_ns, one.other_ns)),
                one.longest,
            )
            for one in found
        ],
    )
