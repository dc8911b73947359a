"""What a dump says about its rank: which one it is, its groups, its communications in order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from prismtrace.converters.flight.reading import Dump, Entry
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.placing import RankComms
from prismtrace.errors import RankError

__all__ = ["comms_of", "groups_of", "rank_of", "with_members"]

_RANK_IN_NAME = (r"rank[-_]?(\d{1,9})", r"(\d{1,9})(?:\.\D\w*)*$")
# How long an operation may last of which neither end nor timeout is known.
_LONGEST_NS = 24 * 3600 * 10**9


def rank_of(path: Path, given: int | None) -> int:
    """A dump's rank: as given, else from the name of the file (nothing in it tells).

    Raises:
        RankError: the name does not tell, or tells several.
    """
    if given is not None:
        return given
    for pattern in _RANK_IN_NAME:
        found = {int(number) for number in re.findall(pattern, path.name, re.IGNORECASE)}
        if len(found) == 1:
            return found.pop()
        if found:
            break
    raise RankError(
        "a flight-recorder dump does not say which rank it is, and its name does not either",
        where=str(path),
        hint=f"say it: --rank {path.name}=N",
    )


def groups_of(dump: Dump) -> tuple[NamedGroup, ...]:
    """The groups that a dump lists, then those that its entries use; the latter without ranks."""
    listed = {group.name for group in dump.groups}
    used: dict[str, str] = {}
    for comm in {entry.comm for entry in dump.entries}:
        if comm.group_name is not None and comm.group_name not in listed:
            used.setdefault(comm.group_name, comm.group_desc or "")
    return dump.groups + tuple(NamedGroup(name, used[name], None) for name in sorted(used))


def with_members(
    listed: Mapping[int, Sequence[NamedGroup]],
    world_size: int,
    given: Collection[str],
    counts: Counter[str],
) -> dict[int, tuple[NamedGroup, ...]]:
    """Give groups of which no dump lists the ranks those that use them.

    gloo's recorder lists no ranks. A rank that uses a group belongs to it; the first group is
    everybody's.

    Args:
        listed: rank -> groups as `groups_of` returns them.
        world_size: ranks of the job.
        given: names of groups whose ranks the user told.
        counts: groups whose members were found this way are counted.
    """
    known = {group.name for groups in listed.values() for group in groups if group.ranks}
    users: dict[str, list[int]] = {}
    for rank in sorted(listed):
        for group in listed[rank]:
            if group.ranks is None and group.name not in known and group.name not in given:
                users.setdefault(group.name, []).append(rank)
    everybody = {
        group.name
        for groups in listed.values()
        for group in groups
        if "default_pg" in (group.name, group.desc)
    }
    counts["group-members-from-use"] += len(users.keys() - everybody)

    def completed(group: NamedGroup) -> NamedGroup:
        if group.ranks is not None or group.name not in users:
            return group
        if group.name in everybody:
            return replace(group, ranks=tuple(range(world_size)))
        return replace(group, ranks=tuple(users[group.name]))

    return {
        rank: tuple(completed(group) for group in groups if group.ranks or group.name not in given)
        for rank, groups in listed.items()
    }


def comms_of(rank: int, entries: Sequence[Entry]) -> RankComms:
    """The entries as matching wants them.

    An operation is there from its enqueueing until the watchdog noticed its end, or its
    timeout: times that bound when it happened, not those at which it did.
    """
    start = [entry.created_ns or 0 for entry in entries]
    end = [
        entry.completed_ns
        if entry.completed_ns is not None and entry.completed_ns >= begin
        else begin + (entry.timeout_ns or _LONGEST_NS)
        for entry, begin in zip(entries, start, strict=True)
    ]
    return RankComms(
        rank=rank,
        index=np.arange(len(entries), dtype=np.int64),
        comm=[entry.comm for entry in entries],
        start_ns=np.array(start, dtype=np.int64),
        end_ns=np.array(end, dtype=np.int64),
        seq=[entry.seq for entry in entries],
        comms_id=[None] * len(entries),
        step=[None] * len(entries),
    )
