"""Who waits for whom when no rank can go on, in words. No input or output in here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from prismreplay.errors import DeadlockError
from prismreplay.runtime.operations import Op
from prismtrace.ranks import format_ranks

__all__ = ["Blocked", "describe", "lost", "operation", "who_waits"]

MOST_LINES = 40
"""Waits that are listed; of a job of thousands of ranks nobody reads more."""


@dataclass(frozen=True)
class Blocked:
    """A rank that waits: for members `missing` of `op`, or with `store` for `keys`."""

    rank: int
    site: str = ""
    op: Op | None = None
    missing: tuple[int, ...] = ()
    store: str = ""
    keys: tuple[str, ...] = ()

    def what(self, ended: Mapping[int, int], waiting: Collection[int]) -> str:
        """What it waits in, and for whom, told apart by what these do."""
        if self.op is None:
            keys = ", ".join(repr(_bare(key)) for key in self.keys[:4])
            more = f" and {len(self.keys) - 4} more" if len(self.keys) > 4 else ""
            return f"store {self.store} until somebody sets {keys}{more}"
        if self.op.call.kind.is_p2p:
            return operation(self.op)  # names its partner
        return f"{operation(self.op)} for {_told_apart(self.missing, ended, waiting)}"


def _told_apart(missing: Sequence[int], ended: Mapping[int, int], waiting: Collection[int]) -> str:
    """`rank 2 (ended), ranks 0,5 (still running)`; only ranks, if all of them do the same."""
    doing: dict[str, list[int]] = {"ended": [], "waiting elsewhere": [], "still running": []}
    for rank in missing:
        elsewhere = "waiting elsewhere" if rank in waiting else "still running"
        doing["ended" if rank in ended else elsewhere].append(rank)
    told = {what: ranks for what, ranks in doing.items() if ranks}
    if len(told) < 2:
        return _ranks(missing)
    return ", ".join(f"{_ranks(ranks)} ({what})" for what, ranks in told.items())


def operation(op: Op) -> str:
    """`all_reduce 4 of group default_pg [0-7]`, `recv 2 from rank 0 in group pp`."""
    group = op.group.called
    number = "" if op.seq is None else f" {op.count}"
    if op.call.kind.is_p2p:
        number += f" with tag {op.tag}" if op.tag else ""
        way = "from" if op.call.value == "recv" else "to"
        other = "anyone" if op.peer is None else f"rank {op.peer}"
        return f"{op.call.value}{number} {way} {other} in group {group}"
    return f"{op.call.value}{number} of group {group}"


def describe(
    blocked: Sequence[Blocked], ended: Mapping[int, int], unreceived: int = 0
) -> DeadlockError:
    """No rank can go on."""
    stuck = {one.rank for one in blocked}
    number = f"{len(stuck)} rank{'s' if len(stuck) != 1 else ''}"
    culprits = sorted({rank for one in blocked for rank in one.missing if rank in ended})
    asking = sorted({one.rank for one in blocked if one.op is None})
    if culprits:
        why = f"{_ranks(culprits)} ended before taking part"
    elif asking:
        why = f"nobody sets the keys that {_ranks(asking)} {_verb('wait', asking)} for"
    else:
        why = "they wait for each other"
    report = who_waits(blocked, ended)
    if unreceived:
        report += f"\n{unreceived:,} messages were sent and not received"
    return DeadlockError(
        f"the program cannot go on: {number} blocked; {why}", report=report, hint=_HINT
    )


def lost(
    waits: Blocked,
    gone: Sequence[int],
    blocked: Sequence[Blocked],
    ended: Mapping[int, int],
    running: Sequence[int] = (),
) -> DeadlockError:
    """A rank waits for one that has ended, whatever those still `running` do."""
    op = "" if waits.op is None else operation(waits.op)
    at = f" at {waits.site}" if waits.site else ""
    return DeadlockError(
        f"rank {waits.rank} waits in {op}{at}, but the program of {_ranks(gone)} has ended "
        "without taking part",
        report=who_waits(blocked, ended, running),
        hint=_HINT,
    )


_HINT = (
    "every member of a group must make the same calls in the same order; the report above names "
    "the lines"
)


def who_waits(
    blocked: Sequence[Blocked], ended: Mapping[int, int], running: Sequence[int] = ()
) -> str:
    """Who waits for whom, one line for all ranks that wait alike; who has ended, who goes on."""
    waiting = {one.rank for one in blocked}
    alike: dict[tuple[str, str], list[int]] = {}
    for one in sorted(blocked, key=lambda one: one.rank):
        ranks = alike.setdefault((one.what(ended, waiting), one.site), [])
        if one.rank not in ranks:
            ranks.append(one.rank)
    lines = ["who waits for whom:"]
    for (what, site), ranks in list(alike.items())[:MOST_LINES]:
        at = f"  at {site}" if site else ""
        lines.append(f"  {_ranks(ranks)} {_verb('wait', ranks)} in {what}{at}")
    if len(alike) > MOST_LINES:
        lines.append(f"  ... and {len(alike) - MOST_LINES} more kinds of waits")
    if ended:
        lines.append(f"  the program of {_ranks(sorted(ended))} has ended")
    if running:
        verb = "is" if len(running) == 1 else "are"
        lines.append(f"  {_ranks(running)} {verb} still running, and may come yet")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "nobody"
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(sorted(ranks))}"


def _verb(verb: str, ranks: Sequence[int]) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def _bare(key: str) -> str:
    """A key without the namespace that the run puts before it."""
    return key.partition("|")[2] or key
