"""The command `prismcalib`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from prismcalib.commands_stragglers import stragglers
from prismcalib.commands_whatif import EditCommand, what_if
from prismtrace.console import new_app, print_json, progress, run, table

if TYPE_CHECKING:
    from prismcalib.merging import MergeReport

app = new_app("From recorded ranks to one true timeline, and what it says about the run.")


class EngineName(StrEnum):
    """Values of --engine."""

    AUTO = "auto"
    NETWORKX = "networkx"
    PYTHON = "python"
    ARRAY = "array"


class ClockMode(StrEnum):
    """Values of --clock."""

    ALIGN = "align"
    KEEP = "keep"


Calibrated = Annotated[Path, typer.Argument(help="Trace that `prismcalib merge` wrote.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
EagerBelow = Annotated[
    int,
    typer.Option(
        metavar="BYTES",
        min=0,
        help="Sends of fewer bytes do not wait for their receiver; 0: all wait.",
    ),
]
Rooted = Annotated[
    bool,
    typer.Option(
        "--rooted",
        help="In broadcast and scatter, wait for the root only; in reduce and gather, only the "
        "root waits. Otherwise all wait for all.",
    ),
]
SparseAllToAll = Annotated[
    bool,
    typer.Option(
        "--sparse-all-to-all",
        help="In all_to_all, wait only for ranks that send something (known from bytes = 0, or "
        "per pair from the column x_send_bytes).",
    ),
]


def _duration(text: str) -> int:
    from prismcalib.durations import parse_ns

    try:
        return parse_ns(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def merge(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="A recorded trace: one file, a folder, or all its files."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Calibrated trace to write (.parquet).")
    ],
    engine: Annotated[
        EngineName,
        typer.Option(help="How to compute the timeline; all give the same, auto is fastest."),
    ] = EngineName.AUTO,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute it with all engines and compare; slow.")
    ] = False,
    clock: Annotated[
        ClockMode,
        typer.Option(help="align: estimate how the ranks' clocks differ. keep: trust them."),
    ] = ClockMode.ALIGN,
    max_residual: Annotated[
        str,
        typer.Option(
            help="Refuse the data if the ends of one collective lie further apart than this "
            "(median over all), e.g. 500us.",
        ),
    ] = "10ms",
    eager_below: EagerBelow = 0,
    rooted: Rooted = False,
    sparse_all_to_all: SparseAllToAll = False,
    json: Json = False,
) -> None:
    """Put all ranks of a run on one timeline; split every collective into wait and transfer.

    Example: prismcalib merge run.parquet -o aligned.parquet
    """
    limit_ns = _duration(max_residual)
    from prismcalib.merging import merge as merge_trace
    from prismcalib.waiting import WaitRules
    from prismtrace.trace import open_trace

    rules = WaitRules(eager_below=eager_below, rooted=rooted, sparse_all_to_all=sparse_all_to_all)
    with progress("merging"):
        trace = open_trace(list(inputs))
        result = merge_trace(
            trace,
            engine=engine.value,
            clock=clock.value,
            max_residual_ns=limit_ns,
            rules=rules,
            verify=verify,
        )
        result.write(output)
    if json:
        print_json({"output": str(output), **result.report.as_dict()})
    else:
        _print_merge(result.report, output)


def _print_merge(report: MergeReport, output: Path) -> None:
    from prismcalib.durations import format_ns

    share = report.difference_ns / max(report.recorded_ns, 1)
    why = f"because of the clamps below; no row is later than {format_ns(report.most_delayed_ns)}"
    if not report.most_delayed_ns:
        why = "every row reproduced exactly"
    overlaps, early, lags, waited = (
        report.overlap_clamps,
        report.transfer_clamps,
        report.lags,
        report.lags_on_critical_path,
    )
    texts = {
        "recorded": (report.recorded_ns, "first start to last end, over all ranks"),
        "propagated": (report.propagated_ns, "from durations and lags alone"),
        "difference": (report.difference_ns, f"{share:.3%}, {why}"),
        "overlap clamps": (
            overlaps.total_ns,
            f"{overlaps.count} rows started before a row they depend on ended; moved behind it",
        ),
        "transfer clamps": (
            early.total_ns,
            f"{early.count} members ended before the last member started; they end with it",
        ),
        "gaps kept": (
            lags.total_ns,
            f"{lags.count} idle times before rows, kept as lags (launch and host delays)",
        ),
        "gaps that count": (waited.total_ns, f"{waited.count} of them, on the critical path"),
        "waiting": (report.wait_ns, "in communications for late members, sum over ranks"),
        "transferring": (report.transfer_ns, "the rest of the communications, sum over ranks"),
    }
    lines = [(name, format_ns(ns), text) for name, (ns, text) in texts.items()]
    if report.unmatched:
        lines.append(
            ("unmatched", str(report.unmatched), "communications with partners outside the window")
        )
    title = (
        f"{output}: {report.ranks} ranks, {report.rows} rows, "
        f"{report.instances} matched communications"
    )
    table(title, ("", "time", "meaning"), lines)
    print()
    _print_clocks(report)


def _print_clocks(report: MergeReport) -> None:
    from prismcalib.durations import format_ns

    clock = report.clock
    before, after = clock.end_spread_before, clock.end_spread_after
    if before is not None and after is not None:
        table(
            f"clocks: ends of the same communication lie apart ({clock.operations} compared)",
            ("", "median", "95 %", "max"),
            [
                (name, *(format_ns(ns) for ns in (spread.median_ns, spread.p95_ns, spread.max_ns)))
                for name, spread in (("as recorded", before), ("as used", after))
            ],
        )
    moved = [domain for domain in clock.domains if domain.offset_ns]
    if not moved:
        print(f"no clock corrected ({len(clock.domains)} in all)")
        return
    table(
        f"{len(moved)} of {len(clock.domains)} clocks corrected "
        f"(to that of rank {clock.reference_rank})",
        ("ranks", "host", "added", "uncertain by"),
        [
            (
                domain.ranks,
                domain.host,
                format_ns(domain.offset_ns),
                None if domain.uncertainty_ns is None else format_ns(domain.uncertainty_ns),
            )
            for domain in moved[:20]
        ],
    )


@app.command("critical-path")
def critical_path(
    trace: Calibrated,
    limit: Annotated[int, typer.Option(min=1, help="Rows of each table.")] = 10,
    json: Json = False,
) -> None:
    """What would have to be faster for the run to be shorter, over all ranks.

    Example: prismcalib critical-path aligned.parquet --limit 20
    """
    from prismcalib.durations import format_ns
    from prismcalib.paths import ShareColumn
    from prismcalib.paths import critical_path as find_path

    path = find_path(trace)
    if json:
        print_json(path.as_dict(limit))
        return

    def part(ns: int) -> tuple[str, str]:
        return format_ns(ns), f"{ns / max(path.length_ns, 1):.1%}"

    table(
        f"critical path: {path.segments.height} segments, {path.hops} changes of rank",
        ("", "time", "share"),
        [
            ("length", *part(path.length_ns)),
            ("computation", *part(path.compute_ns - path.inner_idle_ns)),
            ("idle between kernels", *part(path.inner_idle_ns)),
            ("transfer", *part(path.transfer_ns)),
            ("unmatched communication", *part(path.unmatched_ns)),
            ("other idle gaps", *part(path.gap_ns)),
            ("before the path starts", *part(path.lead_in_ns)),
        ],
    )
    columns: tuple[ShareColumn, ...] = ("kind", "rank", "group", "phase", "step")
    for column in columns:
        shares = path.shares(column)
        if shares[column].null_count() == shares.height:
            continue
        print()
        table(
            f"by {column}",
            (column, "segments", "busy", "idle inside", "gaps before", "share"),
            [
                (
                    value,
                    count,
                    format_ns(busy - idle),
                    format_ns(idle),
                    format_ns(gap),
                    f"{share:.1%}",
                )
                for value, count, busy, idle, gap, share in shares.head(limit).rows()
            ],
        )
    print()
    table(
        "longest segments",
        ("rank", "index", "kind", "name", "group", "seq", "busy", "idle inside", "gap before"),
        [
            (
                *(node[name] for name in ("rank", "index", "kind", "name", "group", "seq")),
                format_ns(node["busy_ns"] - node["inner_idle_ns"]),
                format_ns(node["inner_idle_ns"]),
                format_ns(node["gap_ns"]),
            )
            for node in path.longest(limit).iter_rows(named=True)
        ],
    )


@app.command()
def predict(trace: Calibrated, json: Json = False) -> None:
    """The step time this timeline implies, where each rank spends it, and what it rests on.

    Example: prismcalib predict aligned.parquet
    """
    from prismcalib.durations import format_ns
    from prismcalib.prediction import predict as predict_step

    prediction = predict_step(trace)
    if json:
        print_json(prediction.as_dict())
        return
    durations = prediction.steps["duration_ns"].to_list()
    print(
        f"step time {format_ns(prediction.step_ns)} (median of {len(durations)}; "
        f"{format_ns(min(durations))} to {format_ns(max(durations))})"
    )
    if prediction.steps["step"].null_count():
        print("the trace marks no steps: this is its whole window")
    window = max(prediction.window_ns, 1)
    print()
    table(
        "where each rank spends the window",
        ("rank", "busy", "waiting", "idle", "of busy: idle between kernels"),
        [
            (rank, *(f"{ns / window:.1%}" for ns in times))
            for rank, *times in prediction.ranks.rows()
        ],
    )
    print()
    table(
        "what the critical path rests on",
        ("", "share"),
        [(name, f"{share:.1%}") for name, share in prediction.basis.items()],
    )


@app.command()
def check(
    trace: Annotated[Path, typer.Argument(help="Any trace, also one without times.")],
    json: Json = False,
) -> None:
    """Look for cycles and for communications that lack members.

    Example: prismcalib check run.parquet
    """
    from dataclasses import replace

    import numpy as np

    from prismcalib.build import require_all_members, sorted_rows, structure_graph
    from prismcalib.propagation import propagate
    from prismtrace.trace import open_trace

    with progress("checking"):
        opened = open_trace(trace)
        rows = sorted_rows(opened)
        graph = structure_graph(rows, opened.header)
        require_all_members(graph, rows, opened.header)
        # With durations of 1 the makespan is the number of rows on the longest chain.
        chain = propagate(replace(graph, duration_ns=np.ones(graph.rows, np.int64))).makespan_ns
    summary = {
        "ranks": rows["rank"].n_unique(),
        "rows": graph.rows,
        "deps": len(graph.dep_rows),
        "instances": graph.instances,
        "longest_chain": chain,
    }
    if json:
        print_json(summary)
    else:
        names = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in summary.items())
        print(f"no cycle, no member missing: {names}")


app.command("what-if", cls=EditCommand)(what_if)
app.command()(stragglers)


def main() -> NoReturn:
    """Entry point of the command."""
    run(app)


if __name__ == "__main__":
    main()
