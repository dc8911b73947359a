"""The command `prismcalib what-if`: its arguments, and how the answer is printed."""

from __future__ import annotations

import json as json_text
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismcalib.steps_option import StepsOption, print_steps
from prismtrace.console import print_json, progress, table
from prismtrace.help_text import Command

if TYPE_CHECKING:
    from prismcalib.edits import Edit
    from prismcalib.paths import CriticalPath
    from prismcalib.whatif import WhatIf
    from prismcalib.wording import RankNames
    from prismtrace.schema import TraceHeader

__all__ = ["EditCommand", "what_if"]

# Edits by flag: what the flag takes.
_EDITS = {
    "--scenario": ("NAME",),
    "--scale": ("PREDICATE", "FACTOR"),
    "--scale-gaps": ("PREDICATE", "FACTOR"),
    "--set": ("PREDICATE", "DURATION"),
    "--drop": ("PREDICATE",),
    "--swap-durations-from": ("FILE",),
}
_FLAGS = " ".join(_EDITS)
_UNNAMED = "edited"
_AS_MUCH = 0.9
"""Part of the largest share from which another rank is named beside it."""


class EditCommand(Command):
    """A command whose edits take one or two values and apply in the order they are written.

    The parser of options knows neither: it gets every edit as one value, with its number.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the values of every edit before the options are parsed."""
        joined: list[str] = []
        rest = list(args)
        number = 0
        while rest:
            token = rest.pop(0)
            if token == "--":  # noqa: S105 - ends the options
                joined += [token, *rest]
                break
            if token.partition("=")[0] in _EDITS and "=" in token:
                flag = token.partition("=")[0]
                raise typer.BadParameter(f"write {flag} {' '.join(_EDITS[flag])}, without =")
            joined.append(token)
            if token not in _EDITS:
                continue
            wanted = _EDITS[token]
            values, rest = rest[: len(wanted)], rest[len(wanted) :]
            if len(values) < len(wanted) or any(value in _EDITS for value in values):
                raise typer.BadParameter(f"{token} takes {' and '.join(wanted)}", ctx=ctx)
            joined.append(json_text.dumps([number, token, *values]))
            number += 1
        return super().parse_args(ctx, joined)


def _edit_option(flag: str, help: str) -> Any:
    return typer.Option(flag, metavar=" ".join(_EDITS[flag]), help=help)


def what_if(
    trace: Annotated[
        Path, typer.Argument(readable=False, help="Trace that `prismcalib merge` wrote.")
    ],
    scale: Annotated[
        list[str] | None,
        _edit_option("--scale", "Multiply the durations of the rows that fulfil PREDICATE."),
    ] = None,
    scale_gaps: Annotated[
        list[str] | None,
        _edit_option(
            "--scale-gaps", "Multiply the idle time before them, between spans (launch gaps)."
        ),
    ] = None,
    set: Annotated[
        list[str] | None,
        _edit_option("--set", "Give each of them this duration, e.g. 0ns or 1.5ms."),
    ] = None,
    drop: Annotated[
        list[str] | None,
        _edit_option("--drop", "Take them out: no duration, no gap, nobody waits for them."),
    ] = None,
    swap_durations_from: Annotated[
        list[str] | None,
        _edit_option(
            "--swap-durations-from", "Take all durations from another merged trace of the job."
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        _edit_option("--scenario", "The edits that follow, up to the next, are one scenario."),
    ] = None,
    scenarios: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="More scenarios, from a .toml or .json file."),
    ] = None,
    eager_below: Annotated[
        int,
        typer.Option(
            metavar="BYTES",
            min=0,
            help="In all scenarios, sends of fewer bytes do not wait for their receiver.",
        ),
    ] = 0,
    rooted: Annotated[
        bool,
        typer.Option("--rooted", help="In all scenarios, rooted collectives wait as for merge."),
    ] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Rows of each table of a path.")
    ] = 5,
    steps: StepsOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """How long would a step take if some operations were faster, or gone? Changes no file.

    PREDICATE is a condition on the columns of the trace, as in SQL: kind, rank, name, phase,
    step, microbatch, bytes, peer, group_name, group_label (what tables call the group),
    group_size and more (`prismtrace schema node`). Durations of communications are their
    transfers; waiting follows from the rest.

    Example: prismcalib what-if aligned.parquet --scale 'kind == "all_reduce" and rank < 8' 0.5
    """
    given = [scale, scale_gaps, set, drop, swap_durations_from, scenario]
    from prismcalib.edits import read_scenarios
    from prismcalib.waiting import WaitRules
    from prismcalib.whatif import what_if as find_answer

    named = _scenarios([value for values in given for value in values or ()])
    if scenarios is not None:
        for name, edits in read_scenarios(scenarios).items():
            if name in named:
                raise typer.BadParameter(f"two scenarios are named {name!r}")
            named[name] = edits
    rules = WaitRules(eager_below=eager_below, rooted=rooted)
    if not named and rules:
        named["other wait rules"] = []
    if not named:
        raise typer.BadParameter(f"say what should be different: {_FLAGS} or --scenarios")
    with progress("propagating"):
        answer = find_answer(trace, named, rules=rules, steps=steps)
    if json:
        print_json(answer.as_dict(limit))
    else:
        from prismtrace.trace import read_header, trace_files

        _print_answer(answer, read_header(trace_files(trace)[0]), limit)


def _scenarios(given: list[str]) -> dict[str, list[Edit]]:
    """Edits by scenario, in the order of the command line."""
    from prismcalib.durations import parse_ns
    from prismcalib.edits import Drop, Scale, ScaleGaps, SetDuration, SwapDurations

    named: dict[str, list[Edit]] = {}
    name = _UNNAMED
    for _, flag, *values in sorted(json_text.loads(text) for text in given):
        if flag == "--scenario":
            name = values[0]
            if name in named:
                raise typer.BadParameter(f"two scenarios are named {name!r}")
            named[name] = []
            continue
        edits = named.setdefault(name, [])
        try:
            if flag == "--scale":
                edits.append(Scale(values[0], _factor(values[1])))
            elif flag == "--scale-gaps":
                edits.append(ScaleGaps(values[0], _factor(values[1])))
            elif flag == "--set":
                edits.append(SetDuration(values[0], parse_ns(values[1])))
            elif flag == "--drop":
                edits.append(Drop(values[0]))
            else:
                edits.append(SwapDurations(values[0]))
        except ValueError as error:
            raise typer.BadParameter(f"{flag}: {error}") from error
    empty = [name for name, edits in named.items() if not edits]
    if empty:
        raise typer.BadParameter(f"scenario {empty[0]!r} has no edits; they follow its name")
    return named


def _factor(text: str) -> float:
    """A factor: `0.5`; also with the sign of multiplication that tables show, `2x` and `x 2`."""
    try:
        return float(text.strip().lower().removeprefix("x").removesuffix("x"))
    except ValueError:
        raise ValueError(f"{text!r} is no factor (expected e.g. 0.5 or 2)") from None


def _print_answer(answer: WhatIf, header: TraceHeader, limit: int) -> None:
    from prismcalib.durations import format_ns
    from prismcalib.step_times import steps_text
    from prismcalib.wording import RankNames

    print_steps(answer.looked_at)
    base = max(answer.baseline.step_ns, 1)
    names = RankNames.of(header)
    table(
        f"step time, {steps_text(len(answer.baseline.steps_ns), answer.baseline.warmup)}",
        ("scenario", "step", "change", "", "rows edited", "what it then waits for"),
        [
            (
                scenario.name,
                format_ns(scenario.step_ns),
                format_ns(scenario.delta_ns) if scenario.edited or scenario.delta_ns else None,
                f"{scenario.delta_ns / base:+.1%}",
                scenario.edited,
                _summary(scenario.critical_path, names),
            )
            for scenario in (answer.baseline, *answer.scenarios)
        ],
    )
    if len(answer.scenarios) == 1:
        paths = answer.baseline.critical_path, answer.scenarios[0].critical_path
        parts = [_parts(path) for path in paths]
        _print_shift(
            "kind, idle time apart",
            ("kind",),
            lambda part: (part,),
            *parts,
            also=[part for path in paths for part in _largest_parts(path)],
            limit=limit,
        )
        for column, heads, cells in (
            ("rank", names.heads, names.cells),
            ("group", ("group",), lambda group: (group,)),
        ):
            ranks = column == "rank"
            times = [_with_idle(path, column) for path in paths]
            _print_shift(
                f"{column}, idle time included",
                heads,
                cells,
                *times,
                also=[rank for path in paths for rank in _top_ranks(path)] if ranks else [],
                limit=limit,
            )


def _parts(path: CriticalPath) -> dict[str, int]:
    """What the path is made of, in ns: kinds, whose idle time inside and before is apart."""
    from prismcalib.wording import IDLE_BETWEEN, IDLE_INSIDE

    shares = path.shares("kind")
    busy = dict(zip(shares["kind"], shares["busy_ns"] - shares["inner_idle_ns"], strict=True))
    idle = {
        IDLE_INSIDE: path.inner_idle_ns,
        IDLE_BETWEEN: path.gap_ns,
        "before the path starts": path.lead_in_ns,
    }
    return {**busy, **{name: ns for name, ns in idle.items() if ns}}


def _with_idle(path: CriticalPath, column: Any) -> dict[Any, int]:
    shares = path.shares(column)
    return dict(zip(shares[column], shares["busy_ns"] + shares["gap_ns"], strict=True))


def _summary(path: CriticalPath, names: RankNames) -> str:
    """The largest parts: `compute 71%, all_reduce 20%; 41% of it on rank 6, 40% on rank 0`."""
    text = ", ".join(f"{name} {share:.0%}" for name, share in _largest_parts(path).items())
    (first, share), *others = _top_ranks(path).items()
    ranks = f"{share:.0%} of it on rank {names.text(first)}"
    ranks += "".join(f", {share:.0%} on rank {names.text(rank)}" for rank, share in others)
    return f"{text}; {ranks}"


def _largest_parts(path: CriticalPath) -> dict[str, float]:
    """Shares of at most three parts of half a percent or more."""
    largest = sorted(_parts(path).items(), key=lambda part: -part[1])[:3]
    shares = {name: ns / max(path.length_ns, 1) for name, ns in largest}
    return {name: share for name, share in shares.items() if share >= 0.005}


def _top_ranks(path: CriticalPath) -> dict[int, float]:
    """Share of the rank that holds most of the path, and of two more that hold nearly as much."""
    ranks = path.shares("rank").select("rank", "share").head(3).rows()
    return {rank: share for rank, share in ranks if share >= _AS_MUCH * ranks[0][1]}


def _print_shift(
    what: str,
    heads: tuple[str, ...],
    cells: Callable[[Any], tuple[Any, ...]],
    old: dict[Any, int],
    new: dict[Any, int],
    *,
    also: Iterable[Any],
    limit: int,
) -> None:
    """Time on the path by part, before and after, largest change first; `also`: shown anyway."""
    from prismcalib.durations import format_ns

    if old == new:
        return
    print()
    changes = sorted(
        {*old, *new}, key=lambda value: (-abs(new.get(value, 0) - old.get(value, 0)), str(value))
    )
    also = set(also)
    shown = [value for at, value in enumerate(changes) if at < limit or value in also]
    left_out = f", {len(changes) - len(shown)} more not shown" * (len(shown) < len(changes))
    table(
        f"time on the critical path by {what}; largest changes first{left_out}",
        (*heads, "before", "after", "change"),
        [
            (
                *cells(value),
                format_ns(old.get(value, 0)),
                format_ns(new.get(value, 0)),
                format_ns(new.get(value, 0) - old.get(value, 0)),
            )
            for value in shown
        ],
    )
