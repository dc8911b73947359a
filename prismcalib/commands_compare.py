"""The commands `prismcalib compare` and `prismcalib health`: arguments and printing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismcalib.steps_option import StepsOption, print_steps
from prismtrace.console import counted, print_json, progress, table

if TYPE_CHECKING:
    import polars as pl

    from prismcalib.comparing import Comparison
    from prismcalib.health import Health
    from prismcalib.wording import RankNames

__all__ = ["compare", "health"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

_FEW_RANKS = 5


def compare(
    a: Annotated[
        Path, typer.Argument(readable=False, help="Merged trace of the run to compare with.")
    ],
    b: Annotated[
        Path, typer.Argument(readable=False, help="Merged trace of the run that changed.")
    ],
    by: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROPERTY",
            help="What makes a class of operations: kind, phase, group, name or rank; repeat it "
            "for several. Default: the first four.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="Rows of each table.")] = 10,
    steps: StepsOption = "auto",
    json: Json = False,
) -> None:
    """What became slower from A to B, and how much of the step that costs.

    Classes of operations are compared per step and rank, so the runs may differ in length and
    size. The effect on the step is computed: A with the times of this class as in B.

    Example: prismcalib compare monday.parquet tuesday.parquet --by kind --by name
    """
    from prismcalib.comparing import compare as compare_runs
    from prismcalib.operations import CLASS_COLUMNS

    by = list(dict.fromkeys(by or CLASS_COLUMNS))
    with progress("comparing"):
        comparison = compare_runs(a, b, by=by, effects=max(limit, 30), steps=steps)
    if json:
        print_json(comparison.as_dict(limit))
    else:
        _print_comparison(comparison, by, _names(a), limit)


def _names(trace: Path) -> RankNames:
    from prismcalib.wording import RankNames
    from prismtrace.trace import read_header, trace_files

    return RankNames.of(read_header(trace_files(trace)[0]))


def _print_comparison(comparison: Comparison, by: list[str], names: RankNames, limit: int) -> None:
    from prismcalib.durations import format_ns

    for run, looked_at in zip("AB", comparison.looked_at or (), strict=False):
        print_steps(looked_at, of=run)
    before = max(comparison.step_a_ns, 1)

    def change(ns: int) -> tuple[str, str]:
        return format_ns(ns), f"{ns / before:+.1%}"

    table(
        "step time (medians, as of `predict`)",
        ("", "time", "of the step"),
        [
            ("A", format_ns(comparison.step_a_ns), None),
            ("B", format_ns(comparison.step_b_ns), None),
            ("change", *change(comparison.change_ns)),
            ("if all classes took as long as in B", *change(comparison.own_effect_ns)),
            ("if idle time between spans were as in B", *change(comparison.gap_effect_ns)),
            ("neither: single operations, other ones, other order", *change(comparison.rest_ns)),
        ],
    )
    print()
    per = "counts and times are per " + ("step" if "rank" in by else "step and rank")
    _print_classes(
        f"classes of operations, largest effect first; {per}",
        comparison.classes,
        by,
        names,
        before,
        limit,
    )
    for note in comparison.notes:
        print(note)
    if comparison.ranks is not None and by != ["rank"]:
        print()
        title = (
            "ranks, largest effect first; counts and times are per step (averages hide a single slow "
            "rank; --by rank: all)"
        )
        _print_classes(title, comparison.ranks.head(_FEW_RANKS), ["rank"], names, before, limit)


def _print_classes(
    title: str, classes: pl.DataFrame, by: list[str], names: RankNames, before: int, limit: int
) -> None:
    from prismcalib.comparing import cut_otherwise
    from prismcalib.durations import format_ns

    shown = classes.head(limit).with_columns(cut=cut_otherwise(by))
    heads = [head for name in by for head in (names.heads if name == "rank" else (name,))]
    table(
        title,
        (
            *heads,
            "count A",
            "count B",
            "time A",
            "time B",
            "each",
            "effect on step",
            "of it",
            "clear",
        ),
        [
            (
                *(cell for name in by for cell in _class_cells(row, name, names)),
                f"{row['count_a']:.4g}",
                f"{row['count_b']:.4g}",
                format_ns(row["time_a_ns"]),
                format_ns(row["time_b_ns"]),
                _ratio_cell(row),
                None if row["effect_ns"] is None else format_ns(row["effect_ns"]),
                None if row["effect_ns"] is None else f"{row['effect_ns'] / before:+.1%}",
                {True: "yes", False: "within noise", None: None}[row["clear"]],
            )
            for row in shown.iter_rows(named=True)
        ],
        of=classes.height,
    )


def _ratio_cell(row: dict[str, Any]) -> str | None:
    if row["ratio"] is None:
        return None
    return f"x {row['ratio']:.3f}" + (" in all" if row["cut"] else "")


def _class_cells(row: dict[str, Any], name: str, names: RankNames) -> tuple[Any, ...]:
    return names.cells(row[name]) if name == "rank" else (row[name],)


def health(
    expected: Annotated[
        Path,
        typer.Argument(
            readable=False, help="Trace of the job on healthy devices, or merged from slices."
        ),
    ],
    observed: Annotated[
        list[Path],
        typer.Argument(
            readable=False,
            help="Trace of the run to look at; several where units of the job were tried apart.",
        ),
    ],
    slower: Annotated[
        float,
        typer.Option(metavar="PERCENT", min=0, help="A rank stands out if it is this much slower."),
    ] = 5.0,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Rows of the table of ranks.")
    ] = 16,
    json: Json = False,
) -> None:
    """Which devices compute slower than they should: down-clocked, throttled or shared ones.

    Computation of the same place in the same rank's step is compared; traces need not be merged.

    Example: prismcalib health calibrated.parquet monday.parquet
    """
    from prismcalib.health import device_health

    with progress("comparing"):
        found = device_health(expected, *observed, slower=slower / 100)
    if json:
        print_json(found.as_dict())
    else:
        _print_health(found, _names(observed[0]), limit, slower / 100)


def _print_health(found: Health, names: RankNames, limit: int, slower: float) -> None:
    print(
        f"{counted(found.ranks.height, 'rank')}, {found.compared:.0%} of the expected computation compared: "
        f"usually x {found.usual_ratio:.3f} of what was expected, "
        f"scatter between ranks {found.scatter:.1%}"
    )
    # Two ranks are held against what was expected, see `device_health`.
    against = "the others" if found.ranks.height > 2 else "expected"
    if not found.findings:
        print(f"no rank {'stands out from the others' if found.ranks.height > 2 else 'is slow'}")
    if found.usual_ratio > 1 + slower:
        print("but all of them together are slower than expected")
    for finding in found.findings:
        where = ", ".join(filter(None, (finding.host, finding.unit)))
        print(
            f"rank {names.text(finding.rank)}{f' ({where})' if where else ''}: {finding.above:.1%} slower than {against} "
            f"({finding.deviations:.0f} deviations), {finding.slowed_share:.0%} of its computation "
            f"slowed, most in {finding.slowest}: {finding.verdict}"
        )
    print()
    table(
        "ranks, slowest first (computation: whole spans, with idle time inside them)",
        (
            *names.heads,
            "host",
            "operations",
            "computation",
            "against others" if found.ranks.height > 2 else "against expected",
            "deviations",
            "transfers",
        ),
        [
            (
                *names.cells(row["rank"]),
                row["host"],
                row["operations"],
                f"x {row['ratio']:.3f}",
                f"{row['above']:+.1%}",
                f"{row['deviations']:.1f}",
                None if row["transfer_ratio"] is None else f"x {row['transfer_ratio']:.3f}",
            )
            for row in found.ranks.sort("above", descending=True).head(limit).iter_rows(named=True)
        ],
        of=found.ranks.height,
    )
