"""The dumps of a job together: each rank's operations with their groups and partners."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from prismtrace.converters.flight.ranks import by_rank, comms_of, groups_of
from prismtrace.converters.flight.reading import Dump, read_dump
from prismtrace.converters.groups import GroupBook, NamedGroup
from prismtrace.converters.placing import Assignment, RankComms, assign_groups
from prismtrace.converters.workers import run_tasks
from prismtrace.errors import RankError
from prismtrace.ranks import MOST_RANKS

__all__ = ["FlightJob", "read_job"]


@dataclass(frozen=True)
class FlightJob:
    """What the recorders of a job's ranks held; mappings by rank."""

    world_size: int
    """Ranks of the job, as far as the dumps tell."""
    dumps: Mapping[int, Dump]
    comms: Mapping[int, RankComms]
    assignments: Mapping[int, Assignment]
    """Groups and partners; null where the dumps do not tell them."""
    counts: Counter[str]


def read_job(
    paths: Sequence[Path],
    ranks: Mapping[Path, int],
    groups: Mapping[str, tuple[int, ...]],
    *,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> FlightJob:
    """Read the dumps of a job.

    Args:
        paths: one file a rank.
        ranks: ranks that the user gave.
        groups: process groups that the user named.
        jobs: files read at a time, each by a process of its own; 0 means one per core.
        progress: called with the number of bytes done since the last call.

    Raises:
        TraceError: a file is no dump, or ranks do not fit together.
    """
    places = by_rank(paths, ranks, "file", "file")
    dumps: dict[int, Dump] = {}
    tasks = [(path,) for path in places.values()]
    processes = min(jobs or os.cpu_count() or 1, len(tasks))
    # Closed here, not by the garbage collector, in which Ctrl-C would be lost.
    with closing(run_tasks(read_dump, tasks, processes)) as results:
        for (rank, path), dump in zip(places.items(), results, strict=True):
            dumps[rank] = dump
            if progress is not None:
                progress(path.stat().st_size)
    counts: Counter[str] = Counter()
    for dump in dumps.values():
        counts.update(dump.counts)
    world_size = _world_size(dumps, groups)
    # Ranks without a dump are listed, too, so that the members of groups are told from use even so.
    listed: dict[int, tuple[NamedGroup, ...]] = dict.fromkeys(range(world_size), ())
    for rank, dump in dumps.items():
        listed[rank] = tuple(
            group for group in groups_of(dump) if group.ranks or group.name not in groups
        )
    book = GroupBook.build(world_size, listed, groups, counts)
    comms = {rank: comms_of(rank, dumps[rank].entries) for rank in sorted(dumps)}
    return FlightJob(
        world_size=world_size,
        dumps={rank: dumps[rank] for rank in sorted(dumps)},
        comms=comms,
        assignments={rank: assign_groups(comms[rank], book, True) for rank in comms},
        counts=counts,
    )


def _world_size(dumps: Mapping[int, Dump], groups: Mapping[str, tuple[int, ...]]) -> int:
    listed = [
        max(group.ranks) + 1 for dump in dumps.values() for group in dump.groups if group.ranks
    ]
    told = [dump.world_size for dump in dumps.values() if dump.world_size]
    given = [max(members) + 1 for members in groups.values()]
    size = max([*dumps, 0]) + 1
    size = max([size, *listed, *told, *given])
    if size > MOST_RANKS:
        raise RankError(
            f"a world of {size} ranks; at most {MOST_RANKS} are believed",
            where=", ".join(str(dump.path) for dump in list(dumps.values())[:2]),
            hint="a file was changed or is damaged, or its rank is wrong: --rank FILE=N",
        )
    return size
