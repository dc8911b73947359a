"""How `prismcalib merge` tells its result to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prismcalib.alignment import ClockJump
from prismcalib.commands_comm import print_costs
from prismcalib.durations import format_ns
from prismcalib.merge_result import MergeReport
from prismcalib.slices import SlicesReport
from prismcalib.step_times import steps_text
from prismcalib.wording import IDLE_BETWEEN, IDLE_INSIDE, doubts, parts_of_spans
from prismtrace.console import counted, table
from prismtrace.schema import TraceHeader, TransferSource

__all__ = ["print_merge", "print_slices"]

_COUNTS = "  that counts"
"""Below idle times: the part of them on the critical path."""

_MOST_JUMPS = 5


def print_merge(report: MergeReport, header: TraceHeader, *, again: bool = False) -> None:
    """What merging a recorded run did; `again` if it had been merged before."""
    share = report.difference_ns / max(report.recorded_ns, 1)
    why = f"because of the clamps below; no row is later than {format_ns(report.most_delayed_ns)}"
    if not report.difference_ns:
        why = (
            f"the clamps below move rows by up to {format_ns(report.most_delayed_ns)}, none the end"
        )
    if not report.most_delayed_ns:
        why = (
            "every row as recorded, for the recorded idle times are kept: it checks the graph "
            "and predicts nothing"
        )
    overlaps, early = report.overlap_clamps, report.transfer_clamps
    times = [
        ("recorded", report.recorded_ns, "first start to last end, over all ranks"),
        (
            "propagated",
            report.propagated_ns,
            "the same from durations, dependencies and recorded idle times",
        ),
        ("difference", report.difference_ns, f"{share:.3%}, {why}"),
        (
            "overlap clamps",
            overlaps.total_ns,
            f"{counted(overlaps.count, 'row')} began before what they depend on ended; moved",
        ),
        (
            "transfer clamps",
            early.total_ns,
            f"{counted(early.count, 'member')} ended before the last one began; they end then",
        ),
        *_idle_times(report, header),
        (
            "waiting",
            report.wait_ns,
            "in communications for late members, sum over ranks, also beside own computation",
        ),
        ("transferring", report.transfer_ns, "the rest of the communications, sum over ranks"),
    ]
    lines = [(name, format_ns(ns), text) for name, ns, text in times]
    if report.unmatched:
        lines.append(
            (
                "unmatched",
                str(report.unmatched),
                "communications without known partners: they wait for nobody",
            )
        )
    if again:
        print("already aligned: done anew, from the observed times that the file keeps\n")
    title = ", ".join(
        [
            counted(report.ranks, "rank"),
            counted(report.rows, "row"),
            counted(report.instances, "matched communication"),
        ]
    )
    table(title, ("", "time", "meaning"), lines)
    for text in doubts(header):
        print(f"\nwarning: {text}")
    print()
    _print_clocks(report)


def _idle_times(report: MergeReport, header: TraceHeader) -> Iterator[tuple[str, int, str]]:
    """Idle time by where it lies: where spans have many kernels, most may be inside."""
    lags, critical = report.lags, report.lags_on_critical_path
    rows = counted(lags.count, "row")
    meaning = f"before {rows}, sum over ranks (launch and host delays); kept"
    yield IDLE_BETWEEN, lags.total_ns, meaning
    yield _COUNTS, critical.total_ns, f"{critical.count:,} of them, on the critical path"
    inside, critical_inside = report.idle_inside, report.idle_inside_on_critical_path
    if inside is None or critical_inside is None:
        return
    parts, rows = parts_of_spans(header), counted(inside.count, "row")
    meaning = f"not in these: between the {parts} of {rows}, sum over ranks; see `x_busy_ns`"
    yield IDLE_INSIDE, inside.total_ns, meaning
    count = f"{critical_inside.count:,} of them, on the critical path"
    yield _COUNTS, critical_inside.total_ns, count


def _print_clocks(report: MergeReport) -> None:
    clock = report.clock
    before, after = clock.end_spread_before, clock.end_spread_after
    if before is not None and after is not None:
        table(
            f"clocks: ends of the same communication lie apart ({clock.operations} compared, "
            "of those that all members leave together)",
            ("", "median", "95 %", "max"),
            [
                (name, *(format_ns(ns) for ns in (spread.median_ns, spread.p95_ns, spread.max_ns)))
                for name, spread in (("as recorded", before), ("as used", after))
            ],
        )
    _warn_of_jumps(clock.jumps)
    moved = [domain for domain in clock.domains if domain.offset_ns]
    if not moved:
        print(_no_correction(report))
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


def _warn_of_jumps(jumps: Sequence[ClockJump], place: str = "") -> None:
    for jump in jumps[:_MOST_JUMPS]:
        doubt = "" if jump.sorts > 1 else "; or the one kind of communication that tells, changed"
        print(f"warning: {place}{jump}{doubt}")
    if not jumps:
        return
    more = len(jumps) - _MOST_JUMPS
    print(
        (f"and {counted(more, 'more clock')}. " if more > 0 else "")
        + "Nothing was corrected for that: merge the steps before and after it by themselves "
        "(`prismtrace slice-out --steps`)\n"
    )


def _no_correction(report: MergeReport) -> str:
    clocks, spread = len(report.clock.domains), report.clock.end_spread_after
    if clocks == 1:
        return "one clock: nothing to correct"
    if report.clock.mode == "keep":
        return f"{clocks} clocks, kept as they are"
    if spread is None:
        return f"{clocks} clocks: nothing to compare, nothing corrected"
    within = format_ns(spread.median_ns)
    return f"all {clocks} clocks agree within {within} (median of the ends); nothing to correct"


def print_slices(report: SlicesReport, header: TraceHeader) -> None:
    """What merging slices did."""
    gain = report.step_ns / max(report.before_ns, 1) - 1
    seen = report.executions_seen
    clamps = report.overlap_clamps + report.transfer_clamps
    known = ", ".join(f"{name} {count}" for name, count in report.sources.items()) or "none"
    lines = [
        ("step before", format_ns(report.before_ns), "the longest that any slice saw by itself"),
        (
            "step after",
            format_ns(report.step_ns),
            f"{gain:+.2%}, all ranks on one timeline: "
            + steps_text(len(report.steps_ns), report.warmup),
        ),
        ("steps", str(len(report.steps_ns)), _steps_text(report)),
        ("propagated", format_ns(report.propagated_ns), "first start to last end, all steps"),
        (IDLE_BETWEEN, format_ns(report.gaps_ns), "before rows, sum over ranks; kept"),
        (
            _COUNTS,
            format_ns(report.gaps_on_critical_path_ns),
            "the part of it on the critical path",
        ),
        ("waiting", format_ns(report.wait_ns), "in communications, sum over ranks"),
        ("transferring", format_ns(report.transfer_ns), f"members by source: {known}"),
        ("clamps", str(clamps), f"rows or members out of order, {format_ns(report.clamped_ns)}"),
    ]
    optional = [
        ("late virtual", report.late_virtual, "transfers dropped: a virtual rank came last"),
        (
            "unknown",
            report.unknown_transfers,
            "transfers as slices saw them, where virtual ranks take no time: nothing else is known",
        ),
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
        f"{counted(report.ranks, 'rank')}, {counted(report.rows, 'row')}, "
        f"{counted(report.instances, 'matched communication')} from "
        f"{counted(report.slices, 'slice')} in {counted(report.executions, 'execution')}",
        ("", "value", "meaning"),
        lines,
    )
    for text in doubts(header):
        print(f"warning: {text}")
    if report.sources.keys() == {TransferSource.NONE.value}:
        print(
            "warning: nothing says what communications take, so they take no time here. Let slices "
            "have whole groups (`prismreplay slice --sandbox-size`), or measure communications "
            "(`prismreplay comm-bench`, then --comm-table)"
        )
    for one in seen:
        _warn_of_jumps(one.jumps, f"slice {one.index} ({one.file}): ")
    print(f"structure: every slice agrees with {report.checked_against}")
    print()
    if report.comm_costs is not None:
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
    times = [format_ns(ns) for ns in report.steps_ns[:6]]
    return ", ".join(times) + (", ..." if len(report.steps_ns) > len(times) else "")
