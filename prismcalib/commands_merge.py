"""The command `prismcalib merge`: its flags, and how the result is told."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prismtrace.console import print_json, progress, table

if TYPE_CHECKING:
    from prismcalib.merging import MergeReport
    from prismcalib.slices import SlicesReport

__all__ = ["merge"]


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


class ReduceMode(StrEnum):
    """Values of --reduce."""

    MEDIAN = "median"
    MEAN = "mean"
    MIN = "min"
    LAST = "last"


class MissingMode(StrEnum):
    """Values of --missing."""

    FAIL = "fail"
    REPRESENTATIVE = "representative"
    BARE = "bare"


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


def merge(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="A recorded trace (one file, a folder, all its files), or all slices of a job."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Calibrated trace to write (.parquet).")
    ],
    bare: Annotated[
        Path | None,
        typer.Option(help="Slices: the job's graph without times; every slice must agree with it."),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Slices: an earlier result; ranks that the new slices do not hold keep its times."
        ),
    ] = None,
    reduce: Annotated[
        ReduceMode,
        typer.Option(help="Slices: what several samples of one operation become."),
    ] = ReduceMode.MEDIAN,
    pool_steps: Annotated[
        bool,
        typer.Option(
            "--pool-steps",
            help="Slices: the same operation in several steps counts as samples of one; otherwise "
            "only repeats of a slice do.",
        ),
    ] = False,
    warmup: Annotated[
        int,
        typer.Option(min=0, help="Slices: first steps that are not typical; kept, not counted."),
    ] = 1,
    missing: Annotated[
        MissingMode,
        typer.Option(
            help="Slices: ranks in no slice. fail: refuse. representative: take the times of a "
            "rank that does the same. bare: assume that they take no time."
        ),
    ] = MissingMode.FAIL,
    unfold: Annotated[
        bool,
        typer.Option(
            "--unfold", help="Slices: give ranks that are replicas of others rows of their own."
        ),
    ] = False,
    comm_table: Annotated[
        Path | None,
        typer.Option(
            help="Slices: measured times of communications (from `prismcalib comm-table`), for "
            "groups that no slice ran as a whole."
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Slices: how many consecutive ranks share a host in the real job. Needed with "
            "--comm-table; alone, unmeasured transfers come from a model of the measured ones.",
        ),
    ] = None,
    columns_only: Annotated[
        bool,
        typer.Option(
            "--columns-only",
            help="Write only the computed columns; the inputs must stay where they are.",
        ),
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Slices: files read at once; 0: one per core.")
    ] = 0,
    engine: Annotated[
        EngineName,
        typer.Option(help="How to compute the timeline; all give the same, auto is fastest."),
    ] = EngineName.AUTO,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compute it with all engines and compare; slow.")
    ] = False,
    clock: Annotated[
        ClockMode,
        typer.Option(
            help="align: estimate how the clocks of one execution differ. keep: trust them."
        ),
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
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Put all ranks of a job on one timeline; split every collective into wait and transfer.

    Takes a recorded run, or the slices of a campaign: executions in which only some ranks were
    real, each with a clock of its own.

    Example: prismcalib merge run.parquet -o aligned.parquet

    Example: prismcalib merge slices/*.parquet --bare graph.parquet -o aligned.parquet
    """
    limit_ns = _duration(max_residual)
    from prismcalib.merging import MergeReport
    from prismcalib.merging import merge as merge_trace
    from prismcalib.slices import SliceOptions
    from prismcalib.waiting import WaitRules

    with progress("merging") as bar:
        result = merge_trace(
            list(inputs),
            engine=engine.value,
            clock=clock.value,
            max_residual_ns=limit_ns,
            rules=WaitRules(
                eager_below=eager_below, rooted=rooted, sparse_all_to_all=sparse_all_to_all
            ),
            slices=SliceOptions(
                bare=bare,
                base=base,
                reduce=reduce.value,
                pool_steps=pool_steps,
                warmup=warmup,
                missing=missing.value,
                unfold=unfold,
                jobs=jobs,
                ranks_per_host=ranks_per_host,
                comm_table=comm_table,
            ),
            verify=verify,
            advance=bar.advance,
        )
        result.write(output, columns_only=columns_only)
    if json:
        print_json({"output": str(output), **result.report.as_dict()})
    elif isinstance(result.report, MergeReport):
        _print_merge(result.report, output)
    else:
        _print_slices(result.report, output)


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
        "waiting": (
            report.wait_ns,
            "in communications for late members, sum over ranks, also beside own computation",
        ),
        "transferring": (report.transfer_ns, "the rest of the communications, sum over ranks"),
    }
    lines = [(name, format_ns(ns), text) for name, (ns, text) in texts.items()]
    if report.unmatched:
        lines.append(
            (
                "unmatched",
                str(report.unmatched),
                "communications without known partners: they wait for nobody",
            )
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


def _print_slices(report: SlicesReport, output: Path) -> None:
    from prismcalib.durations import format_ns

    gain = report.step_ns / max(report.before_ns, 1) - 1
    seen = report.executions_seen
    clamps = report.overlap_clamps + report.transfer_clamps
    known = ", ".join(f"{name} {count}" for name, count in report.sources.items()) or "none"
    lines = [
        ("step before", format_ns(report.before_ns), "the longest that any slice saw by itself"),
        ("step after", format_ns(report.step_ns), f"{gain:+.2%}: all ranks on one timeline"),
        ("steps", str(len(report.steps_ns)), _steps_text(report)),
        ("propagated", format_ns(report.propagated_ns), "first start to last end, all steps"),
        ("gaps kept", format_ns(report.gaps_ns), "idle time before rows, sum over ranks"),
        (
            "gaps that count",
            format_ns(report.gaps_on_critical_path_ns),
            "the part of it on the critical path",
        ),
        ("waiting", format_ns(report.wait_ns), "in communications, sum over ranks"),
        ("transferring", format_ns(report.transfer_ns), f"members by source: {known}"),
        ("clamps", str(clamps), f"rows or members out of order, {format_ns(report.clamped_ns)}"),
    ]
    optional = [
        ("late virtual", report.late_virtual, "transfers dropped: a virtual rank came last"),
        ("unknown", report.unknown_transfers, "transfers kept as observed, for want of others"),
        ("chained", report.chained, "rows released by the end of the step before"),
        ("unmatched", report.unmatched, "communications that wait for nobody"),
        ("resized", report.resized, "all_to_all of another size than in the bare graph"),
    ]
    lines += [(name, str(count), text) for name, count, text in optional if count]
    ranks = [
        ("kept ranks", report.kept, "from the earlier result"),
        ("folded ranks", report.folded, "replicas without rows of their own"),
        ("twin ranks", report.twins, "with the times of a rank that does the same"),
        ("untimed ranks", report.untimed, "assumed to take no time"),
    ]
    lines += [(name, text, meaning) for name, text, meaning in ranks if text]
    table(
        f"{output}: {report.ranks} ranks, {report.rows} rows, {report.instances} matched "
        f"communications from {report.slices} slices in {report.executions} executions",
        ("", "value", "meaning"),
        lines,
    )
    print(f"structure: every slice agrees with {report.checked_against}")
    print()
    if report.comm_costs is not None:
        from prismcalib.commands_comm import print_costs

        print_costs(report.comm_costs)
    worst = sorted(seen, key=lambda one: -(one.end_spread.median_ns if one.end_spread else -1))
    table(
        "slices, those first whose ends of one communication lie furthest apart",
        ("slice", "file", "real ranks", "step seen", "ends apart (median)", "max", "clamps"),
        [
            (
                one.index,
                one.file,
                one.ranks,
                format_ns(one.step_ns),
                None if one.end_spread is None else format_ns(one.end_spread.median_ns),
                None if one.end_spread is None else format_ns(one.end_spread.max_ns),
                one.overlap_clamps + one.transfer_clamps,
            )
            for one in worst[:10]
        ],
    )


def _steps_text(report: SlicesReport) -> str:
    from prismcalib.durations import format_ns

    times = [format_ns(ns) for ns in report.steps_ns[:6]]
    warm = min(report.warmup, len(times) - 1)
    shown = ", ".join(times) + (", ..." if len(report.steps_ns) > len(times) else "")
    return f"{shown}; the first {warm} not counted" if warm else shown
