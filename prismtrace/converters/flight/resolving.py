"""Groups that a profiler does not tell, from the flight recorder of the same rank beside it.

Both list a rank's collectives in the order in which it issued them, one for a few steps, the other
for the last some thousand operations. Where the profile lies in the recording is found by looks:
kinds, element types, sizes, and groups that the profile does tell. Only where all possible places
agree about an operation's group is it taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prismtrace.converters.flight.ranks import by_rank, comms_of, groups_of
from prismtrace.converters.flight.reading import Dump, read_dump
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.placing import RankComms
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.converters.sequences import OpSequence, agree, make_sequence
from prismtrace.converters.sniff import DUMPS, sniff
from prismtrace.schema import Kind

__all__ = ["dumps_beside", "groups_from_dumps"]

# Host and profiler stamp with the same clock, but not quite at the same moment.
_TOLERANCE_NS = 1_000_000
_NO_GROUP = -1


def dumps_beside(paths: Sequence[Path]) -> list[Path]:
    """The flight-recorder dumps among files of which others are profiles."""
    dumps = [path for path in paths if sniff(path) in DUMPS]
    return dumps if len(dumps) < len(paths) else []


def groups_from_dumps(
    traces: Sequence[RankTrace],
    paths: Sequence[Path],
    ranks: Mapping[Path, int],
    counts: Counter[str],
) -> list[RankTrace]:
    """Name the groups of collectives that the profiles do not tell.

    Args:
        traces: what the profiles hold.
        paths: dumps of the same job.
        ranks: ranks that the user gave.
        counts: operations whose group was found are counted, and dumps that told none.

    Raises:
        TraceError: a dump cannot be read, or its rank is unknown or in two dumps.
    """
    dumps = by_rank(paths, ranks, "flight-recorder dump", "dump")
    recorded = {trace.rank for trace in traces}
    if recorded.isdisjoint(dumps):
        counts["unused-flight-recorder"] += len(dumps)
    return [
        _named(trace, read_dump(dumps[trace.rank]), counts) if trace.rank in dumps else trace
        for trace in traces
    ]


def _named(trace: RankTrace, dump: Dump, counts: Counter[str]) -> RankTrace:
    """One rank's trace with the groups that its recorder tells."""
    listed = {group.name for group in trace.groups if group.ranks}
    groups = tuple(group for group in trace.groups if group.ranks)
    groups += tuple(group for group in groups_of(dump) if group.name not in listed)
    found = _groups_of(trace, dump)
    counts["unused-flight-recorder"] += not found
    comms, seq = list(trace.comms.comm), list(trace.comms.seq)
    # Equal descriptions stay one object.
    shared: dict[tuple[int, int], CommOp] = {}
    for position, entry in found.items():
        comm, told = comms[position], dump.entries[entry].comm
        comms[position] = shared.setdefault(
            (id(comm), id(told)),
            replace(comm, group_name=told.group_name, group_desc=told.group_desc),
        )
        if seq[position] is None:
            seq[position] = dump.entries[entry].seq
    counts["group-from-flight-recorder"] += len(found)
    return replace(trace, groups=groups, comms=replace(trace.comms, comm=comms, seq=seq))


@dataclass(frozen=True)
class _Line:
    """The collectives of one rank in one source; arrays of the same length."""

    ops: OpSequence
    group: npt.NDArray[np.int64]
    """Number of the group's name; −1 where it is not told."""


def _groups_of(trace: RankTrace, dump: Dump) -> dict[int, int]:
    """Position of a communication that tells no group -> position of an entry with its group."""
    names: dict[str, int] = {}
    # NCCL launches no kernel for a group of one, so that a profile does not show it.
    alone = {group.name for group in dump.groups if group.ranks and len(group.ranks) == 1}
    profile = _line(trace.comms, names, frozenset())
    recorded = _line(comms_of(trace.rank, dump.entries), names, alone)
    if not len(profile.ops) or not len(recorded.ops) or (profile.group != _NO_GROUP).all():
        return {}
    places = _places(recorded, profile)
    if not places:
        return {}
    count = len(profile.ops)
    shifts = np.array(places)[:, None] + np.arange(count)
    inside = (shifts >= 0) & (shifts < len(recorded.ops))
    at = np.clip(shifts, 0, len(recorded.ops) - 1)
    group = np.where(inside, recorded.group[at], _NO_GROUP)
    told = group.max(axis=0)
    sure = ((group == told) | ~inside).all(axis=0) & (told != _NO_GROUP)
    open_ones = np.flatnonzero(sure & (profile.group == _NO_GROUP))
    entry = at[inside.argmax(axis=0), np.arange(count)]
    return {int(profile.ops.positions[k]): int(recorded.ops.positions[entry[k]]) for k in open_ones}


def _line(comms: RankComms, names: dict[str, int], alone: Collection[str]) -> _Line:
    """Collectives whose kind is known; a share is not compared with a whole."""
    positions = [
        position
        for position, comm in enumerate(comms.comm)
        if not comm.kind.is_p2p
        and comm.kind is not Kind.OTHER_COMM
        and comm.group_name not in alone
    ]
    ops = make_sequence(
        comms.rank,
        None,
        positions,
        comms.comm,
        [None if comm.kind is Kind.ALL_GATHER else comm.nbytes for comm in comms.comm],
        [None] * len(comms.comm),
        comms.start_ns,
        comms.end_ns,
    )
    group = [
        _NO_GROUP if name is None else names.setdefault(name, len(names))
        for name in (comms.comm[position].group_name for position in positions)
    ]
    return _Line(ops, np.array(group, dtype=np.int64))


def _places(recorded: _Line, profile: _Line) -> list[int]:
    """Where the profile may lie in the recording: every operation on one that looks like it.

    Places at which it lies inside as a whole go before those at which it sticks out.
    """
    whole = min(len(recorded.ops), len(profile.ops))
    found: list[tuple[int, int, bool]] = []
    for shift in range(-len(profile.ops) + 1, len(recorded.ops)):
        at = slice(max(shift, 0), min(shift + len(profile.ops), len(recorded.ops)))
        bt = slice(at.start - shift, at.stop - shift)
        size = at.stop - at.start
        if 2 * size < whole or not agree(recorded.ops, profile.ops, at, bt, p2p=False).all():
            continue
        named = profile.group[bt]
        if ((named != recorded.group[at]) & (named != _NO_GROUP)).any():
            continue
        late = profile.ops.end[bt] - recorded.ops.start[at]
        found.append((shift, size, bool((late >= -_TOLERANCE_NS).all())))
    # An operation is enqueued before it ends, if the two clocks are one.
    if any(possible for _, _, possible in found):
        found = [entry for entry in found if entry[2]]
    most = max((size for _, size, _ in found), default=0)
    return [shift for shift, size, _ in found if size == most or most < whole]
