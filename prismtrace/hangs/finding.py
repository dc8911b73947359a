"""`find_hang`: from the dumps of a job's ranks to the ranks that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from pathlib import Path

from prismtrace.console import counted
from prismtrace.converters.archives import naming_members
from prismtrace.converters.flight.inputs import dump_files, is_empty_dump
from prismtrace.converters.flight.job import FlightJob, read_job
from prismtrace.converters.groups import GroupKey, read_groups_file
from prismtrace.converters.inputs import PathLike, given_ranks
from prismtrace.group_names import group_label
from prismtrace.hangs.pending import Instance, JobState, Key, describe, read_state, streams
from prismtrace.hangs.report import (
    Culprit,
    GroupProgress,
    HangReport,
    PendingOperation,
    Reason,
    Verdict,
)
from prismtrace.hangs.waits import ends_of_waiting, reaching
from prismtrace.ranks import format_ranks, name_ranks

__all__ = ["find_hang"]

_Item = tuple[str, object]
"""``("rank", r)`` or ``("operation", key)``."""
_NAMED = 8
"""Files that a note names."""


@naming_members()
def find_hang(
    inputs: PathLike | Sequence[PathLike],
    *,
    ranks: Mapping[str, int] | None = None,
    groups: PathLike | None = None,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> HangReport:
    """Say who hangs in what, and which ranks are waited for.

    Args:
        inputs: flight-recorder dumps, one file a rank: files, folders or glob patterns.
        ranks: file name or path -> rank, for files whose names do not tell.
        groups: JSON file of process groups (name -> ranks) for dumps that list none.
        jobs: files read at a time, each by a process of its own; 0 means one per core.
        progress: called with the number of input bytes done since the last call.

    Raises:
        TraceError: a file is no dump, or ranks do not fit together.
    """
    paths = dump_files(inputs)
    named = read_groups_file(Path(groups)) if groups is not None else {}
    given = given_ranks(paths, ranks or {})
    empty = [path for path in paths if is_empty_dump(path)]
    full = [path for path in paths if path not in empty] or paths
    report = analyse(read_job(full, given, named, jobs=jobs, progress=progress))
    if not empty:
        return report
    names = ", ".join(path.name for path in empty[:_NAMED]) + (", ..." if empty[_NAMED:] else "")
    return replace(report, notes=(f"empty, so taken for missing: {names}", *report.notes))


def analyse(job: FlightJob) -> HangReport:
    """The report on dumps that were read; see `find_hang`."""
    state = read_state(job)
    instances = {instance.key: instance for instance in state.instances}
    waits = _waits(job, state, instances)
    latest = _latest(job)
    culprits: list[Culprit] = []
    for end in ends_of_waiting(waits):
        waiting = {name for kind, name in reaching(waits, end) if kind == "rank"}
        culprits += _blame(job, state, instances, end, waiting)
    culprits.sort(key=lambda found: (-len(found.waited_for_by), found.rank))
    pending = {key: _told(job, state, found, latest) for key, found in instances.items()}
    verdict = Verdict.NO_HANG if not instances else Verdict.STALLED
    return HangReport(
        verdict=Verdict.HANG if culprits else verdict,
        culprits=tuple(culprits),
        world_size=job.world_size,
        ranks=tuple(job.dumps),
        missing_ranks=tuple(rank for rank in range(job.world_size) if rank not in job.dumps),
        groups=tuple(
            GroupProgress(
                label=_label(job, group.key),
                name=group.key.name,
                desc=_desc(job, group.key.name),
                ranks=group.key.ranks,
                enqueued_by_all=group.enqueued_by_all,
                completed_by_all=group.completed_by_all,
                pending=pending.get((group.key, None, None)),
            )
            for group in state.groups
        ),
        p2p=tuple(pending[instance.key] for instance in state.p2p),
        notes=tuple(_notes(job, state)),
    )


# --- who waits for whom -----------------------------------------------------------------


def _waits(
    job: FlightJob, state: JobState, instances: Mapping[Key, Instance]
) -> dict[_Item, list[_Item]]:
    """Operations wait for ranks that have not come, and for what is ahead on a stream.

    Ranks wait for the operations that they are in.
    """
    waits: dict[_Item, list[_Item]] = {}
    for key, instance in instances.items():
        targets = waits.setdefault(("operation", key), [])
        for rank, position in instance.position.items():
            if state.state[rank][position] != "completed":
                waits.setdefault(("rank", rank), []).append(("operation", key))
        if instance.difference is None:
            targets += [("rank", rank) for rank in (*instance.absent, *instance.no_dump)]
    for rank in job.dumps:
        for key, ahead in _behind(job, state, instances, rank):
            if instances[key].difference is None:
                waits["operation", key].append(("operation", ahead))
    return waits


def _behind(
    job: FlightJob, state: JobState, instances: Mapping[Key, Instance], rank: int
) -> list[tuple[Key, Key]]:
    """Operations of a rank that cannot start before another one on the same stream ends."""
    places = streams(job, rank)
    heads: dict[object, int] = {}
    for position, what in enumerate(state.state[rank]):
        if what != "completed":
            heads.setdefault(places[position], position)
    entries = job.dumps[rank].entries
    found: list[tuple[Key, Key]] = []
    for key, instance in instances.items():
        if rank not in instance.position:
            continue
        position = instance.position[rank]
        head = heads.get(places[position], position)
        batch = entries[position].batch
        if head >= position or (batch is not None and batch == entries[head].batch):
            continue
        ahead = _key(job, rank, head)
        if ahead is not None and ahead in instances and ahead != key:
            found.append((key, ahead))
    return found


def _key(job: FlightJob, rank: int, position: int) -> Key | None:
    assignment = job.assignments[rank]
    group, peer = assignment.group[position], assignment.peer[position]
    if group is None:
        return None
    if peer is None:
        return group, None, None
    sends = job.dumps[rank].entries[position].comm.kind == "send"
    return (group, rank, peer) if sends else (group, peer, rank)


# --- who is at fault --------------------------------------------------------------------


def _blame(
    job: FlightJob,
    state: JobState,
    instances: Mapping[Key, Instance],
    end: Sequence[_Item],
    waiting: set[object],
) -> list[Culprit]:
    """The ranks at one end of waiting; none when an operation merely does not end."""
    ranks = sorted(name for kind, name in end if kind == "rank" and isinstance(name, int))
    inside = [instances[name] for kind, name in end if kind == "operation"]  # type: ignore[index]
    if len(end) == 1 and inside:
        (instance,) = inside
        ranks, reason = _within(state, instance)
        detail = instance.difference.guess if instance.difference is not None else ""
        told = dict.fromkeys(ranks, instance)
    elif len(end) == 1:
        told = {rank: _awaited_in(job, instances, rank) for rank in ranks}
        reason = Reason.NOT_ENQUEUED if ranks[0] in job.dumps else Reason.NO_DUMP
        detail = ""
    else:
        ranks = ranks or sorted({rank for instance in inside for rank in instance.position})
        told = {rank: _taking_part(inside, rank) for rank in ranks}
        reason, detail = Reason.DEADLOCK, f"each of ranks {format_ranks(ranks)} waits for another"
    return [_culprit(job, rank, reason, told[rank], waiting - {rank}, detail) for rank in ranks]


def _within(state: JobState, instance: Instance) -> tuple[list[int], Reason]:
    """Ranks that keep an operation from ending which all members have enqueued."""
    if instance.difference is not None:
        return list(instance.difference.ranks), Reason.DIFFERENT_OPERATION
    states = {rank: state.state[rank][at] for rank, at in instance.position.items()}
    if len(set(states.values())) > 1:
        for what, reason in (
            ("scheduled", Reason.NOT_STARTED),
            ("started", Reason.NOT_COMPLETED),
        ):
            behind = sorted(rank for rank, found in states.items() if found == what)
            if behind:
                return behind, reason
    return [], Reason.NOT_COMPLETED


def _awaited_in(job: FlightJob, instances: Mapping[Key, Instance], rank: int) -> Instance:
    """The operation that the rank is first missing from.

    What lacks a rank that is in another of them comes after that one; of the rest the one that
    was enqueued first.
    """
    waiting = [i for i in instances.values() if rank in i.absent or rank in i.no_dump]
    first = [
        late
        for late in waiting
        if not any(other in i.position for i in waiting if i is not late for other in late.absent)
    ]

    def order(instance: Instance) -> tuple[float, int, int]:
        entries = [job.dumps[r].entries[at] for r, at in instance.position.items()]
        created = [entry.created_ns for entry in entries if entry.created_ns is not None]
        missing = len(instance.absent) + len(instance.no_dump)
        return min(created, default=inf), missing, -len(instance.position)

    return min(first or waiting, key=order)


def _taking_part(instances: Sequence[Instance], rank: int) -> Instance:
    """The operation that the rank is in, or else one that waits for it."""
    return max(instances, key=lambda i: (rank in i.position, len(i.position)))


def _culprit(
    job: FlightJob,
    rank: int,
    reason: Reason,
    instance: Instance,
    waiting: set[object],
    detail: str,
) -> Culprit:
    site = last = None
    differs = instance.difference if reason is Reason.DIFFERENT_OPERATION else None
    if rank in job.dumps and job.dumps[rank].entries:
        own = instance.position.get(rank)
        at = len(job.dumps[rank].entries) - 1 if own is None else own
        entry = job.dumps[rank].entries[at]
        group = job.assignments[rank].group[at]
        last = describe(job, rank, at) + (f" in group {_label(job, group)}" if group else "")
        site = entry.site
    return Culprit(
        rank=rank,
        reason=reason,
        group=_label(job, instance.key[0]),
        seq=instance.seq,
        operation=instance.what if differs is None else differs.instead_of(rank),
        waited_for_by=tuple(sorted(r for r in waiting if isinstance(r, int))),
        last_site=site,
        last_operation=last,
        detail=detail,
    )


# --- what is told -----------------------------------------------------------------------


def _told(job: FlightJob, state: JobState, instance: Instance, latest: int) -> PendingOperation:
    ranks_in: dict[str, list[int]] = {"scheduled": [], "started": [], "completed": []}
    entries = {rank: job.dumps[rank].entries[at] for rank, at in instance.position.items()}
    for rank, position in sorted(instance.position.items()):
        ranks_in[state.state[rank][position]].append(rank)
    created = [entry.created_ns for entry in entries.values() if entry.created_ns is not None]
    difference = instance.difference
    return PendingOperation(
        group=_label(job, instance.key[0]),
        seq=instance.seq,
        operation=instance.what
        if instance.key[1] is None
        else f"{instance.what} ({instance.key[1]} -> {instance.key[2]})",
        absent=instance.absent,
        different=difference.ranks if difference is not None else (),
        scheduled=tuple(ranks_in["scheduled"]),
        started=tuple(ranks_in["started"]),
        completed=tuple(ranks_in["completed"]),
        no_dump=instance.no_dump,
        timed_out=any(entry.timed_out for entry in entries.values()),
        waited_ns=max(0, latest - min(created)) if created else 0,
        sites={rank: entry.site for rank, entry in entries.items() if entry.site} or None,
        differences=difference.what if difference is not None else None,
    )


def _latest(job: FlightJob) -> int:
    return max(
        (
            time
            for dump in job.dumps.values()
            for entry in dump.entries
            for time in (entry.created_ns, entry.started_ns, entry.completed_ns)
            if time is not None
        ),
        default=0,
    )


def _label(job: FlightJob, key: GroupKey) -> str:
    return group_label(key.name, _desc(job, key.name), key.ranks)


def _desc(job: FlightJob, name: str) -> str:
    """What the program calls a group, if it does."""
    for dump in job.dumps.values():
        told = [group.desc for group in dump.groups if group.name == name]
        used = (entry.comm for entry in dump.entries if entry.comm.group_name == name)
        told += [comm.group_desc or "" for comm in islice(used, 1)]
        if told:
            return "" if told[0] == "undefined" else told[0]
    return ""


def _notes(job: FlightJob, state: JobState) -> list[str]:
    notes = list(state.notes)
    for group in state.groups:
        if group.harmless is not None:
            told = "; ".join(f"rank {r}: {what}" for r, what in sorted(group.harmless.what.items()))
            notes.append(
                f"members of group {_label(job, group.key)} differ in a collective: {told}"
            )
    empty = [rank for rank, dump in job.dumps.items() if not dump.entries]
    if empty:
        notes.append(f"of {name_ranks(empty)} the dumps hold no operation")
    count = job.counts["group-of-communicator-users"]
    if count:
        notes.append(
            f"{counted(count, 'group')} listed nowhere: members are the ranks that use "
            "one, so that a rank that never did would not be missed"
        )
    lost = job.counts["kept-without-group"]
    if lost:
        notes.append(
            f"left out, of groups whose ranks are unknown: operations {lost}; name the groups with "
            "--groups"
        )
    if job.counts["dropped-entry"]:
        notes.append(f"entries that could not be read: {job.counts['dropped-entry']}")
    return notes
