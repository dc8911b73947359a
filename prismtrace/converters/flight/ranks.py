"""What a dump says about its rank: which one it is, its groups, its communications in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote

import numpy as np

from prismtrace.converters.flight.reading import Dump, Entry
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.inputs import rank_in_name
from prismtrace.converters.placing import RankComms
from prismtrace.errors import RankError

__all__ = ["by_rank", "comms_of", "groups_of", "rank_of"]

_LAST_NUMBER = re.compile(r"(\d{1,9})(?:\.\D\w*)*$")
_PUT_ASIDE = ("~", ".bak", ".backup", ".old", ".orig", ".tmp", ".save", ".swp", ".copy")
# How long an operation may last of which neither end nor timeout is known.
_LONGEST_NS = 24 * 3600 * 10**9


def rank_of(path: Path, given: int | None) -> int:
    """A dump's rank: as given, else from the name of the file (nothing in it tells).

    Raises:
        RankError: the name does not tell, tells several, or is that of a copy put aside.
    """
    if given is not None:
        return given
    if path.name.lower().endswith(_PUT_ASIDE):
        raise RankError(
            "by its name a copy that was put aside, not the flight-recorder dump of a rank",
            where=str(path),
            hint=f"leave it out, or say whose it is: --rank {quote(path.name)}=N",
        )
    if (named := rank_in_name(path)) is not None:
        return named
    # Files are called whatever TORCH_FR_DUMP_TEMP_FILE says, and then the rank.
    if last := _LAST_NUMBER.search(path.name):
        return int(last[1])
    raise RankError(
        "a flight-recorder dump does not say which rank it is, and its name does not either",
        where=str(path),
        hint=f"say it: --rank {quote(path.name)}=N",
    )


def by_rank(
    paths: Iterable[Path], given: Mapping[Path, int], in_full: str, briefly: str
) -> dict[int, Path]:
    """The dumps of a job by their ranks.

    Args:
        paths: the dumps.
        given: ranks that the user gave.
        in_full: what to call a dump in an error, and `briefly` in its hint.

    Raises:
        RankError: as `rank_of`, or two dumps are of one rank.
    """
    places: dict[int, Path] = {}
    for path in paths:
        rank = rank_of(path, given.get(path))
        if rank in places:
            raise RankError(
                f"rank {rank} is in two {in_full}s",
                where=f"{places[rank]} and {path}",
                hint=f"give one {briefly} per rank, or set ranks with --rank FILE=N",
            )
        places[rank] = path
    return places


def groups_of(dump: Dump) -> tuple[NamedGroup, ...]:
    """The groups that a dump lists, then those that its entries use.

    gloo's recorder lists no ranks: those that use a name are the members then.
    """
    listed = {group.name for group in dump.groups}
    used: dict[str, str] = {}
    for comm in {entry.comm for entry in dump.entries}:
        if comm.group_name is not None and comm.group_name not in listed:
            used.setdefault(comm.group_name, comm.group_desc or "")
    return dump.groups + tuple(
        NamedGroup(name, used[name], None, shared_name=used[name] != "default_pg")
        for name in sorted(used)
    )


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
