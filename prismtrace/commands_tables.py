"""The commands `diff`, `query`, `slice-out` and `concat`: traces as tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prismtrace import console
from prismtrace.arguments import JsonFlag, TraceArgument, chosen_numbers, wrong_usage
from prismtrace.help_text import Command

if TYPE_CHECKING:
    import polars as pl

    from prismtrace.differences import ClassDifference, Difference

__all__ = ["QueryCommand", "concat", "diff", "query", "slice_out"]

_MOST_ROWS = 100


class Form(StrEnum):
    """How `query` answers: a table to read, or the names of `prismtrace.querying.AnswerFormat`."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


# --- diff -----------------------------------------------------------------------------


def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="Trace to compare with.", show_default=False)
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Trace to compare.", show_default=False)],
    limit: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Rows to show in each table.")
    ] = 16,
    json: JsonFlag = False,
) -> None:
    """Compare two traces: is it the same graph, and where do the times differ?

    The graph of a rank is its operations in order, with kind, group, partner, size and
    dependencies. The exit code is 1 when the graphs differ; other times alone leave it at 0.
    Either trace may be without times.

    Example: prismtrace diff before.parquet after.parquet
    """
    from prismtrace.differences import diff as compare
    from prismtrace.trace import open_trace

    one, other = open_trace(a), open_trace(b)
    with console.progress("comparing") as bar:
        found = compare(one, other, progress=bar.advance)
    if json:
        console.print_json({"same": found.same, **vars(found)})
    else:
        _print_difference(found, limit)
    raise typer.Exit(0 if found.same else 1)


def _print_difference(found: Difference, limit: int) -> None:
    print("the same graph" if found.same else "the graphs differ")
    _print_jobs(found, limit)
    if found.resized:
        print(f"all_to_all of other sizes, which they may have: {found.resized:,}")
    if found.ranks:
        print(f"\n{console.counted(len(found.ranks), 'rank')} with other graphs, first difference:")
    for rank in found.ranks[:limit]:
        print(f"rank {rank.rank} index {rank.index} ({rank.nodes_a:,} and {rank.nodes_b:,} nodes)")
        for name, text in (("A", rank.a), ("B", rank.b)):
            print(f"  {name}: {console.printable(text or 'no such node')}")
    if len(found.ranks) > limit:
        print(f"... and {len(found.ranks) - limit} more (--json lists all)")
    if found.ranks and found.world_a != found.world_b:
        print("in jobs of different size the same number may be another place of the job:")
        print("`prismcalib compare` of the merged traces compares by what is done, not by rank")
    timed = any(one.change_ns is not None for one in found.kinds)
    if (found.ranks_a or found.ranks_b) and found.kinds:
        print("\nnodes and times by kind, phase and group are those of ranks that both have")
    for title, classes in (
        ("kind", found.kinds),
        ("phase", found.phases),
        ("group", found.groups),
        ("rank", found.by_rank),
    ):
        _print_classes(title, classes, limit)
    if timed and limit:
        print(
            "\ntimes are sums over whole traces, the job's start and first steps included, and those of"
        )
        print("communications hold the waiting for others, which hides who is slow:")
        print("`prismcalib compare` of the merged traces tells what made a step slower")


def _print_jobs(found: Difference, limit: int) -> None:
    """Sizes, ranks and groups that differ."""
    from prismtrace.ranks import format_ranks

    if found.world_a != found.world_b:
        axes = _axes_text(found.axes_a), _axes_text(found.axes_b)
        print(f"world of {found.world_a} ranks in A{axes[0]}, of {found.world_b} in B{axes[1]}")
    for name, ranks, groups in (
        ("A", found.ranks_a, found.groups_a),
        ("B", found.ranks_b, found.groups_b),
    ):
        if ranks:
            print(f"only in {name}: ranks {format_ranks(ranks)}")
        if groups:
            more = f" and {len(groups) - limit} more" if len(groups) > limit else ""
            shown = ", ".join(groups[:limit])
            print(f"only in {name}: groups {console.printable(shown)}{more}")
    for group in found.regrouped[:limit]:
        ranks_a, ranks_b = format_ranks(group.ranks_a), format_ranks(group.ranks_b)
        print(f"group {console.printable(group.name)}: ranks {ranks_a} in A, {ranks_b} in B")
    if len(found.regrouped) > limit:
        print(f"... and {len(found.regrouped) - limit} more groups of other ranks (--json)")


def _axes_text(axes: dict[str, int]) -> str:
    """As ` (tp 2, dp 4)`; nothing if none is known."""
    sizes = ", ".join(f"{name} {size}" for name, size in axes.items())
    return f" ({sizes})" if sizes else ""


def _print_classes(title: str, classes: Sequence[ClassDifference], limit: int) -> None:
    """Classes with their times; without times those with other counts."""
    timed = any(one.change_ns is not None for one in classes)
    shown = [one for one in classes if timed or one.nodes_a != one.nodes_b]
    if not shown or not limit:
        return
    print()
    columns = [title, "nodes A", "nodes B"]
    rows: list[list[object]] = [[one.name, one.nodes_a, one.nodes_b] for one in shown[:limit]]
    if timed:
        columns += ["ms A", "ms B", "change", "%"]
        for row, one in zip(rows, shown, strict=False):
            share = one.change_ns and one.time_a_ns and 100 * one.change_ns / one.time_a_ns
            row += [_ms(one.time_a_ns), _ms(one.time_b_ns), _ms(one.change_ns), share or None]
    console.table("", columns, rows, of=len(shown))


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else time_ns / 1e6


# --- query ----------------------------------------------------------------------------

_QUESTION = re.compile(r"\s*(?:select|with)\s", re.IGNORECASE)


class QueryCommand(Command):
    """The command whose last argument is SQL: says so when one of the two is missing."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as every command."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            # A lone argument is taken for the SQL.
            if error.param is not None and error.param.name == "trace":
                told = "two things are needed: a trace, and then SQL in quotes"
                raise typer.BadParameter(told, ctx=ctx, param_hint="TRACE... SQL") from error
            raise


def query(
    trace: TraceArgument,
    sql: Annotated[
        str,
        typer.Argument(
            metavar="SQL",
            help="A SELECT over the tables nodes, groups, header.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Form | None,
        typer.Option(
            "--format",
            help="table: the first 100 rows to read; csv, json, parquet: all of them. By default as"
            " the name of OUTPUT ends, without OUTPUT a table.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write: .csv, .json or .parquet."),
    ] = None,
) -> None:
    """Ask a trace in SQL: the tables are nodes, groups and header.

    Columns of nodes: docs/reference/columns.md. SQL's own word group is written "group" where it
    is meant as the column.

    Example: prismtrace query run.parquet "SELECT kind, COUNT(*) AS n FROM nodes GROUP BY kind"
    """
    from prismtrace import querying
    from prismtrace.reading import reading
    from prismtrace.trace import open_trace

    form = _form(to, output)
    if any(_QUESTION.match(path) for path in trace) and not _QUESTION.match(sql):
        raise typer.BadParameter("the trace comes first, then the SQL", param_hint="TRACE... SQL")
    opened = open_trace(trace)
    with wrong_usage("SQL"):
        answer = querying.query(opened, sql)
    if output is not None:
        with wrong_usage("SQL"), console.progress("answering"):
            querying.write_answer(answer, output, form.value, trace=opened)
        console.announce_output(output)
        return
    with reading(opened.paths), wrong_usage("SQL"), querying.answering():
        if form is Form.TABLE:
            _print_rows(answer.head(_MOST_ROWS + 1).collect(engine="streaming"))
        elif form is Form.CSV:
            for number, batch in enumerate(answer.collect_batches(maintain_order=True)):
                sys.stdout.write(batch.write_csv(include_header=number == 0))
        else:
            querying.write_json(answer, sys.stdout)


def _form(to: Form | None, output: Path | None) -> Form:
    """What is asked for, or follows from the name of the output."""
    if output is None:
        if to is Form.PARQUET:
            raise typer.BadParameter("Parquet needs a file: add -o FILE", param_hint="--format")
        return to or Form.TABLE
    if to is Form.TABLE:
        raise typer.BadParameter("a table is only printed", param_hint="--format")
    if to is not None:
        return to
    for form in (Form.CSV, Form.JSON, Form.PARQUET):
        if output.suffix == f".{form}":
            return form
    raise typer.BadParameter(
        f"{output.name} does not end in .csv, .json or .parquet: add --format",
        param_hint="--output",
    )


def _print_rows(rows: pl.DataFrame) -> None:
    console.row_or_table(rows.columns, rows.head(_MOST_ROWS).iter_rows())
    if rows.height > _MOST_ROWS:
        print("... and more: --format csv or json prints all, LIMIT says how many")


# --- slice-out, concat ----------------------------------------------------------------


def slice_out(
    trace: TraceArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Trace file to write.", show_default=False)
    ],
    ranks: Annotated[
        str | None, typer.Option(metavar="RANKS", help="Only these, e.g. 0-7 or 0,8,16.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="STEPS", help="Only these, e.g. 10-12.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="MS-MS",
            help="Only what lies in this window at least partly: milliseconds since the first"
            " start in the trace, e.g. 0-25.5.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Cut ranks, steps or a window of time out of a trace.

    Nodes are numbered anew. Dependencies on what was left out go, and communications that lost
    a member to --steps or --window wait for nobody; both are counted. Where the offsets between
    clocks are not known, as before a merge, the window counts from the first start of each clock.

    Example: prismtrace slice-out run.parquet --ranks 0-7 --steps 10 -o piece.parquet
    """
    from prismtrace.cutting import slice_out as cut
    from prismtrace.trace import open_trace

    if ranks is None and steps is None and window is None:
        raise typer.BadParameter("say what to keep: --ranks, --steps or --window")
    opened = open_trace(trace)
    with console.progress("cutting") as bar:
        report = cut(
            opened,
            output,
            ranks=None if ranks is None else chosen_numbers(ranks, "--ranks", "rank"),
            steps=None if steps is None else chosen_numbers(steps, "--steps", "step"),
            window_ns=None if window is None else _window(window),
            progress=bar.advance,
        )
    console.warn_of_suffix(output)
    if json:
        console.print_json(report)
        return
    print(f"kept {report.nodes:,} of {report.nodes_before:,} nodes, ", end="")
    print(_covered(report.ranks, report.steps))
    if report.cut_dependencies:
        print(f"cut {report.cut_dependencies:,} dependencies on nodes that were left out")
    if report.cut_partners:
        print(f"{report.cut_partners:,} communications lost a member: they wait for nobody")
    console.announce_output(output)


def _covered(ranks: Sequence[int], steps: Sequence[int]) -> str:
    from prismtrace.ranks import format_ranks

    marked = format_ranks(steps, strided=False) or "not marked"
    return f"ranks {format_ranks(ranks)}, steps {marked}"


_WINDOW = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)-(\d{1,12}(?:\.\d{1,6})?)")


def _window(text: str) -> tuple[int, int]:
    """`0-25.5` in ms as ns."""
    found = _WINDOW.fullmatch(text.strip())
    begin, end = (round(float(part) * 1e6) for part in found.groups()) if found else (0, 0)
    if begin >= end:
        raise typer.BadParameter(
            f"{text!r} is not BEGIN-END in milliseconds, e.g. 0-25.5", param_hint="--window"
        )
    return begin, end


def concat(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="PIECE...",
            help="Trace files of one job; each may also be a folder or a pattern in quotes that"
            " stands for several pieces.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Trace file to write.", show_default=False)
    ],
    json: JsonFlag = False,
) -> None:
    """Join pieces of one job's trace: blocks of ranks, stretches of steps, or both.

    Later steps are numbered on, and the first node of each stream waits for the last one of the
    stretch before. Pieces of different jobs are refused.

    Example: prismtrace concat ranks0-7.parquet ranks8-15.parquet -o run.parquet
    """
    from prismtrace.joining import concat as join

    with console.progress("joining"):
        report = join(traces, output)
    console.warn_of_suffix(output)
    if json:
        console.print_json(report)
        return
    print(f"joined {console.counted(report.pieces, 'piece')}: {report.nodes:,} nodes, ", end="")
    print(_covered(report.ranks, report.steps))
    if report.linked:
        print(f"added {report.linked:,} edges between nodes that follow each other on a stream")
    console.announce_output(output)
