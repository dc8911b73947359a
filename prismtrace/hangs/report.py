"""What `find_hang` tells."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from prismtrace.ranks import name_ranks

__all__ = ["Culprit", "GroupProgress", "HangReport", "PendingOperation", "Reason", "Verdict"]


class Verdict(StrEnum):
    """What the dumps show."""

    NO_HANG = "no-hang"
    """Every operation that was enqueued has ended."""
    HANG = "hang"
    """Some ranks are waited for."""
    STALLED = "stalled"
    """Operations that all members have enqueued, and equally, do not end."""


class Reason(StrEnum):
    """Why a rank is held to be at fault."""

    NOT_ENQUEUED = "not-enqueued"
    """Others wait in an operation that it has not enqueued, while it waits for nobody."""
    DIFFERENT_OPERATION = "different-operation"
    """It enqueued another operation than the others: kind, element type or size."""
    NO_DUMP = "no-dump"
    """Others wait for it and it left no dump: it may have ended."""
    NOT_STARTED = "not-started"
    """It enqueued the operation, but its GPU is busy with something before it."""
    NOT_COMPLETED = "not-completed"
    """The operation has ended on other ranks, not on this one."""
    DEADLOCK = "deadlock"
    """It waits for ranks that wait for it."""


@dataclass(frozen=True)
class PendingOperation:
    """An operation that has not ended on every rank; ranks are global ranks."""

    group: str
    """Its process group, as traces call it: by name, or description and ranks."""
    seq: int | None
    """Its number in the group, as the recorder of a member counts."""
    operation: str
    """E.g. ``all_reduce of float32, 4096 bytes``."""
    absent: tuple[int, ...] = ()
    """Members that have not enqueued it."""
    different: tuple[int, ...] = ()
    """Members that enqueued something else in its place."""
    scheduled: tuple[int, ...] = ()
    """Members on which it has been enqueued and has not begun."""
    started: tuple[int, ...] = ()
    """Members on which it has begun and has not ended."""
    completed: tuple[int, ...] = ()
    """Members on which it has ended."""
    no_dump: tuple[int, ...] = ()
    """Members of which there is no dump."""
    timed_out: bool = False
    """A rank has given it up."""
    waited_ns: int = 0
    """From when the first member enqueued it to the last time in any dump."""
    sites: dict[int, str] | None = None
    """Rank -> where its program called it."""
    differences: dict[int, str] | None = None
    """Rank -> what it enqueued, where members differ."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ranks that are in it and have not come out."""
        return tuple(sorted({*self.scheduled, *self.started}))


@dataclass(frozen=True)
class GroupProgress:
    """How far a process group has come, in numbers of its collectives."""

    label: str
    """As traces call the group: by name, or description and ranks."""
    name: str
    """As torch calls it, in its logs, too."""
    desc: str
    """What the program calls it; empty if it does not."""
    ranks: tuple[int, ...]
    """Its members."""
    enqueued_by_all: int | None
    """Last collective that every member with a dump has enqueued (of others nothing is known);
    null: none within the buffers."""
    completed_by_all: int | None
    """Last collective that has ended on every member with a dump."""
    pending: PendingOperation | None
    """The first one that has not; null: all have."""


@dataclass(frozen=True)
class Culprit:
    """A rank for which others wait."""

    rank: int
    """Its number."""
    reason: Reason
    """Why it is held to be at fault."""
    group: str
    """The group of the operation that waits for it, as traces call it."""
    seq: int | None
    """Number of that operation in its group."""
    operation: str
    """That operation, in words."""
    waited_for_by: tuple[int, ...]
    """Ranks that cannot go on without it, directly or through others."""
    last_site: str | None
    """Where its program made its last call of a communication, where frames were recorded."""
    last_operation: str | None
    """That call, in words."""
    detail: str = ""
    """What more can be said, such as a guess at what happened."""


@dataclass(frozen=True)
class HangReport:
    """Who hangs, in what, and who is waited for."""

    verdict: Verdict
    """What the dumps show."""
    culprits: tuple[Culprit, ...]
    """Those for which most ranks wait come first."""
    world_size: int
    """Ranks of the job, with a dump or without."""
    ranks: tuple[int, ...]
    """Ranks with a dump."""
    missing_ranks: tuple[int, ...]
    """Ranks without one."""
    groups: tuple[GroupProgress, ...]
    """How far each process group has come."""
    p2p: tuple[PendingOperation, ...]
    """Sends and receives that have not ended."""
    notes: tuple[str, ...]
    """What limits the answer."""

    @property
    def sentence(self) -> str:
        """The verdict in words; first of all which dumps are missing."""
        if not self.missing_ranks:
            return self._verdict_of("the dumps", "hang: ")
        one = len(self.missing_ranks) == 1
        missing = f"the {'dump' if one else 'dumps'} of {name_ranks(self.missing_ranks)}"
        told = self._verdict_of("the others", "the others show a hang: ")
        return f"{missing} {'is' if one else 'are'} missing; {told}"

    def _verdict_of(self, dumps: str, hang: str) -> str:
        """What the dumps that are there tell."""
        if self.verdict is Verdict.NO_HANG:
            return f"no hang: every operation in {dumps} has ended"
        if self.verdict is Verdict.STALLED:
            return (
                "stalled: what everything waits for was enqueued alike by all its members and does "
                "not end (the network, or still in flight when the buffers were dumped)"
            )
        blamed: dict[Reason, set[int]] = {}
        for culprit in self.culprits:
            blamed.setdefault(culprit.reason, set()).add(culprit.rank)
        if set(blamed) == {Reason.NO_DUMP}:
            absent = sorted(blamed[Reason.NO_DUMP])
            waiting = {rank for one in self.culprits for rank in one.waited_for_by}
            verb = "waits" if len(waiting) == 1 else "wait"
            return f"{name_ranks(sorted(waiting))} {verb} for {name_ranks(absent)}"
        told = (f"{name_ranks(sorted(ranks))} ({why.value})" for why, ranks in blamed.items())
        return f"{hang}{', '.join(told)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        return {**asdict(self), "sentence": self.sentence}
