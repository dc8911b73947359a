"""How `prismtrace hang` tells its verdict to people: who is at fault first."""

from __future__ import annotations

from collections.abc import Sequence

from prismtrace import console
from prismtrace.hangs.report import Culprit, GroupProgress, HangReport, PendingOperation, Reason
from prismtrace.printing import MOST_LINES
from prismtrace.ranks import name_ranks

__all__ = ["print_hang"]

_REASONS = {
    Reason.NOT_ENQUEUED: "has not enqueued",
    Reason.DIFFERENT_OPERATION: "enqueued something else than",
    Reason.NO_DUMP: "left no dump: it may have ended, stand elsewhere, or wait as well in",
    Reason.NOT_STARTED: "enqueued, but its GPU has not started",
    Reason.NOT_COMPLETED: "has not completed",
    Reason.DEADLOCK: "is part of a circle of waiting, in",
}


def print_hang(report: HangReport) -> None:
    """The verdict, the ranks at fault, then what every group is in."""
    _say(report.sentence)
    if report.missing_ranks:
        print("  copy the dumps of all hosts together; why a rank left none, its log may tell")
    for culprit in report.culprits[:MOST_LINES]:
        print()
        for line in _culprit_lines(culprit):
            _say(line)
    if len(report.culprits) > MOST_LINES:
        print(f"... and {len(report.culprits) - MOST_LINES} more ranks (--json lists all)")
    print()
    _say(f"dumps: {name_ranks(report.ranks)} of a world of {report.world_size}")
    for group in report.groups[:MOST_LINES]:
        _say(
            f"group {group.label}{_of_torch(group)}, {name_ranks(group.ranks)}: "
            f"{_progress(report, group)}"
        )
        if group.pending is not None:
            _print_pending(group.pending)
    if len(report.groups) > MOST_LINES:
        print(f"... and {len(report.groups) - MOST_LINES} more groups (--json lists all)")
    for pending in report.p2p[:MOST_LINES]:
        _say(f"group {pending.group}:")
        _print_pending(pending)
    if len(report.p2p) > MOST_LINES:
        print(f"... and {len(report.p2p) - MOST_LINES} more pairs (--json lists all)")
    for note in report.notes:
        _say(f"note: {note}")


def _of_torch(group: GroupProgress) -> str:
    """What torch's own logs call it, if that is something else."""
    return "" if group.label == group.name else f" ({group.name} in torch's logs)"


def _say(text: str) -> None:
    print(console.printable(text))


def _progress(report: HangReport, group: GroupProgress) -> str:
    known = set(group.ranks).isdisjoint(report.missing_ranks)
    who = "all" if known else "all with a dump"
    return (
        f"enqueued by {who}: {_number(group.enqueued_by_all)}, "
        f"completed by {who}: {_number(group.completed_by_all)}"
    )


def _number(seq: int | None) -> str:
    return "none" if seq is None else f"#{seq}"


def _culprit_lines(culprit: Culprit) -> list[str]:
    number = "" if culprit.seq is None else f" #{culprit.seq}"
    what = f"{culprit.operation}{number} in group {culprit.group}"
    lines = [f"rank {culprit.rank} {_REASONS[culprit.reason]} {what}"]
    if culprit.detail:
        lines.append(f"  {culprit.detail}")
    if culprit.waited_for_by:
        lines.append(f"  waited for by {name_ranks(culprit.waited_for_by)}")
    if culprit.last_operation is not None:
        at = f" at {culprit.last_site}" if culprit.last_site else ""
        lines.append(f"  its last known operation: {culprit.last_operation}{at}")
    return lines


def _print_pending(pending: PendingOperation) -> None:
    number = "" if pending.seq is None else f" #{pending.seq}"
    waited = f", for at least {pending.waited_ns / 1e9:.3f} s" if pending.waited_ns else ""
    late = ", timed out" if pending.timed_out else ""
    _say(f"  pending:   {pending.operation}{number}{waited}{late}")
    parts: list[tuple[str, Sequence[int]]] = [
        ("absent", pending.absent),
        ("different", pending.different),
        ("scheduled", pending.scheduled),
        ("started", pending.started),
        ("completed", pending.completed),
        ("no dump", pending.no_dump),
    ]
    for what, ranks in parts:
        if ranks:
            _say(f"  {what + ':':<10} {name_ranks(ranks)}")
    for text, ranks in _by_text(pending.differences or {})[:MOST_LINES]:
        _say(f"    {text}: {name_ranks(ranks)}")
    for site, ranks in _by_text(pending.sites or {})[:MOST_LINES]:
        _say(f"    at {site}: {name_ranks(ranks)}")


def _by_text(texts: dict[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks with the same text together; most ranks first."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
