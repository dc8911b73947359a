"""How `prismreplay run` tells its result to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prismcalib.durations import format_ns as ns
from prismreplay.run.marks import CORE_WAIT_BOUND
from prismreplay.run.results import Comparison, GroupResult, RankResult, RunReport, StepResult
from prismtrace import console
from prismtrace.ranks import format_ranks

__all__ = ["print_run"]

_REPEATED = (
    "operations of steps beyond the graph: their tensors are those of its last step, which do "
    "not fit the training"
)
_UNPLANNED = (
    "operations of steps beyond the graph that its last step lacks: virtual ranks kept nobody "
    "waiting in them; collect as many steps as are run"
)
_MIRRORED = (
    "operations were given what the rank itself gave, as nothing says what virtual ranks send: "
    "losses are not the job's"
)


def print_run(report: RunReport, *, spun: bool, injected: bool = False) -> None:
    """What a run did.

    Args:
        report: of the run.
        spun: pieces of the program were to have another pace.
        injected: virtual ranks were to do otherwise than the timeline that predicts.
    """
    expected = "predicted without --inject" if injected else "predicted"
    rows: list[tuple[str, object]] = [
        ("ranks", f"{format_ranks(report.sandbox)} of {report.world_size}"),
        ("steps", len(report.steps) or "none found"),
    ]
    if report.step_ns is not None:
        predicted = report.predicted_step_ns
        rows.append(
            (
                "step time",
                ns(report.step_ns)
                + ("" if predicted is None else f", {expected} {ns(predicted)}")
                + f"; here it took {ns(report.measured_step_ns or 0)}",
            )
        )
    if report.timed:
        rows.append(("interference", f"{report.interference:.1%} of a step at most"))
    rows += [
        ("memory", _memory(report)),
        (
            "read ahead",
            f"{report.prefetched.hits:,} contributions in time, {report.prefetched.misses:,} not",
        ),
        ("time", f"{report.wall_s:.1f} s, {report.start_s:.1f} s of it to start"),
        ("logs", report.log_dir),
    ]
    rows += _warnings(report, spun=spun)
    for name, text in rows:
        print(f"{name + ':':<18} {text}")
    print()
    _print_tables(report, expected)
    console.announce_output(report.output)


def _memory(report: RunReport) -> str:
    if any(one.device for one in report.ranks):
        peak = max(one.peak_allocated_bytes for one in report.ranks)
        reserved = max(one.peak_resident_bytes for one in report.ranks)
        return (
            f"{peak:,} bytes allocated at most on a rank's GPU, {reserved / 1e6:,.0f} MB reserved"
        )
    peak = max((one.peak_resident_bytes for one in report.ranks), default=0)
    return f"{peak / 1e6:,.0f} MB resident at most on a rank"


def _warnings(report: RunReport, *, spun: bool) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    if report.disturbed:
        found.append(
            ("warning", "answers came late: these times are this machine's; use an idle core more")
        )
    if report.timed and report.core_wait > CORE_WAIT_BOUND:
        text = (
            f"ranks waited for a core, which others had, for {report.core_wait:.0%} of the time in "
            "which they could compute: these times are this machine's"
        )
        found.append(("warning", text))
    if report.repeated_operations:
        found.append(("warning", f"{report.repeated_operations:,} {_REPEATED}"))
    if report.unplanned_operations:
        found.append(("warning", f"{report.unplanned_operations:,} {_UNPLANNED}"))
    mirrored = sum(one.device["mirrored"] for one in report.ranks if one.device)
    if mirrored:
        found.append(("warning", f"{mirrored:,} {_MIRRORED}"))
    if report.missing_operations:
        found.append(("note", f"{report.missing_operations:,} operations of the graph not made"))
    if spun and not any(one.spun for one in report.ranks):
        found.append(("warning", "--spin: no piece of the program has such a name"))
    if report.resized_operations:
        found.append(
            ("warning", f"{report.resized_operations:,} operations of other sizes than the graph's")
        )
    if report.checked:
        found.append(("checked", "all that sandbox ranks sent is what was recorded"))
    compared = [one for one in report.groups if one.compared]
    if compared:
        count = sum(one.compared for one in compared)
        worst = max(one.largest_difference for one in compared)
        text = (
            f"{count:,} all_reduces gave the exact result, to {worst:.2f} of its type's precision"
        )
        found.append(("small groups", text))
    return found


def _print_tables(report: RunReport, expected: str) -> None:
    if report.steps:
        _print_steps(report.steps, expected)
    _print_groups(report)
    played = [one for one in report.groups if one.reduced_transfer_ns is not None]
    if played:
        _print_assistants(played)
    _print_lateness(report.ranks)
    devices = [one.device for one in report.ranks if one.device]
    if devices:
        _print_devices(devices)
    if report.comparison is not None:
        _print_comparison(report.comparison)


def _print_steps(steps: Sequence[StepResult], expected: str) -> None:
    console.table(
        "Steps",
        ["step", "emulated", expected, "took here", "late answers"],
        [
            [
                one.step,
                ns(one.emulated_ns),
                None if one.predicted_ns is None else ns(one.predicted_ns),
                ns(one.measured_ns),
                ns(one.late_ns),
            ]
            for one in steps
        ],
    )
    print()


def _print_groups(report: RunReport) -> None:
    console.table(
        "Groups with sandbox members"
        + (f"; {report.bypassed_groups} others are not made" if report.bypassed_groups else ""),
        ["group", "ranks", "sandbox", "transport", "operations", "MB"],
        [
            [
                one.desc or one.name,
                one.size,
                len(one.sandbox),
                one.transport,
                one.operations,
                f"{one.nbytes / 1e6:,.2f}",
            ]
            for one in report.groups
        ],
    )
    print()


def _print_assistants(groups: Sequence[GroupResult]) -> None:
    console.table(
        "Groups with an assistant: how long their real operations took, and came too late",
        ["group", "members", "transfer", "assistant late"],
        [
            [
                one.desc or one.name,
                f"{len(one.sandbox)} + 1 for {one.size - len(one.sandbox)}",
                ns(one.reduced_transfer_ns or 0),
                ns(one.assistant_late_ns or 0),
            ]
            for one in groups
        ],
    )
    print()


def _print_lateness(ranks: Sequence[RankResult]) -> None:
    console.table(
        "How well times were met",
        [
            *("rank", "holds", "median", "99 %", "worst", "late answers", "handing over"),
            "communication beside it",
        ],
        [
            [
                one.rank,
                one.holds,
                ns(one.hold_median_ns),
                ns(one.hold_p99_ns),
                ns(one.hold_worst_ns),
                f"{one.late_answers:,}, {ns(one.late_ns)}",
                ns(one.handing_ns),
                ns(one.contended_ns),
            ]
            for one in ranks
        ],
    )
    print()


def _print_devices(devices: Sequence[Mapping[str, int]]) -> None:
    console.table(
        "On GPUs: the host's part of an operation, by how much ends were missed, and memory",
        [
            *("rank", "operations", "host", "asked for", "holds", "median", "99 %", "worst"),
            *("too late", "peak allocated", "emulator's"),
        ],
        [
            [
                one["rank"],
                one["operations"],
                ns(one["issuing_median_ns"]),
                f"{one['fetched']:,}, {one['fetched_late']:,} late, {ns(one['fetching_ns'])}",
                one["holds"],
                ns(one["hold_median_ns"]),
                ns(one["hold_p99_ns"]),
                ns(one["hold_worst_ns"]),
                f"{one['late']:,}, {ns(one['late_ns'])}",
                f"{one['peak_allocated_bytes']:,}",
                f"{one['outside_bytes'] / 1e6:,.1f} MB",
            ]
            for one in devices
        ],
    )
    print()


def _print_comparison(found: Comparison) -> None:
    for text in found.doubts:
        print(f"{found.real}: {text}")
    for title, rows in (("step", found.steps), ("kind", found.kinds)):
        console.table(
            f"Against {found.real}, by {title}",
            [title, "real", "emulated", "error"],
            [[name, ns(real), ns(here), f"{error:+.2%}"] for name, real, here, error in rows],
        )
        print()
