"""What one execution of one slice tells: durations, transfers, idle gaps.  Never clock offsets.

A slice is an execution of its own.  Its real ranks wait only for each other and for virtual
ranks that come late, so its waits and start times say nothing about the whole job.  What
carries over is how long things take:

    computation     its duration
    transfer        end minus the start of the last member that took part, real or virtual
    gap             start minus the end of the last dependency
    release         start of a row without dependencies, counted from the slice's beginning

A transfer whose last member to arrive was a virtual rank is not trusted: that member's arrival
is an artefact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.alignment import Alignment, ClockJump, align_clocks
from prismcalib.assembly import Values
from prismcalib.clocks import Spread, worst_group
from prismcalib.errors import ClockError, MergeInputError
from prismcalib.graph import Graph, Int64Array
from prismcalib.instances import Members, members_of, number
from prismcalib.rows import ABSENT, COLUMNS, KINDS, Rows, check_times, ranks_text, rows_of
from prismcalib.steady import chain_steps
from prismcalib.step_times import steps_of
from prismtrace.group_names import group_labels
from prismtrace.reading import reading
from prismtrace.schema import ROOTED_KINDS, Kind, TraceHeader, TransferSource
from prismtrace.trace import scan_nodes

__all__ = ["Clocks", "Execution", "ExecutionReport", "measure"]

SOURCES = tuple(TransferSource)
_MEASURED, _REDUCED, _NONE = (
    SOURCES.index(source)
    for source in (TransferSource.MEASURED, TransferSource.REDUCED, TransferSource.NONE)
)
_LOWEST = np.iinfo(np.int64).min
_HIGHEST = np.iinfo(np.int64).max

# Kinds whose members all need each other's data: none can end before all have started.
_SYMMETRIC = np.array(
    [
        kind.is_communication and not kind.is_p2p and kind not in {*ROOTED_KINDS, Kind.OTHER_COMM}
        for kind in KINDS
    ]
)
_TOLERANCE_NS = 50_000
_MOST_INCONSISTENT = 0.05


@dataclass(frozen=True)
class Clocks:
    """How clocks within one execution are treated; see `prismcalib.merge`."""

    keep: bool
    max_residual_ns: int


@dataclass(frozen=True)
class ExecutionReport:
    """Numbers about one execution of a slice; times in ns.

    Attributes:
        index, file, ranks, rows: the slice, its file, its real ranks as text, their rows.
        step_ns: the step as this slice saw it, before alignment: last steps, or its window.
        clocks: clocks that were related to each other.
        end_spread: how far the ends of one operation lie apart among its real ranks.
        late_virtual: transfers not trusted because a virtual rank came last.
        overlap_clamps, transfer_clamps: rows that started before a dependency ended, and
            members that ended before the last member started.
        clamped_ns: time of both.
        chained: rows that the end of the step before had to release.
        jumps: clocks that seem to have been set within it.
    """

    index: int
    file: str
    ranks: str
    rows: int
    step_ns: int
    clocks: int
    end_spread: Spread | None
    late_virtual: int
    overlap_clamps: int
    transfer_clamps: int
    clamped_ns: int
    chained: int
    jumps: tuple[ClockJump, ...] = ()


@dataclass(frozen=True, eq=False)
class Execution:
    """Rows of the real ranks of a slice, and what their times tell."""

    rows: Rows
    members: Members
    values: Values
    report: ExecutionReport


@dataclass(frozen=True, eq=False)
class _Arrivals:
    """Members of all instances in a slice, the r of real ranks before those of virtual ones.

    `latest` is, of every instance, the last start over real and virtual members.
    """

    members: Members
    real: int
    instance: Int64Array
    count: int
    start: Int64Array
    latest: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))


def measure(path: Path, header: TraceHeader, clocks: Clocks, warmup: int) -> Execution:
    """Read one file of a slice and take its durations.

    Raises:
        MergeInputError: rows are missing or their times cannot be.
        ClockError: the clocks of this execution do not fit together.
    """
    where = str(path)
    info = header.slice
    if info is None:
        raise MergeInputError("a slice that does not say which ranks are real", where=where)
    with reading([path]):
        table = scan_nodes(path).select(COLUMNS).collect()
    rank = pl.col("rank")
    present = set(table["rank"].unique())
    virtual = None
    if present - set(info.real_ranks):
        virtual = table.filter(~rank.is_in(list(info.real_ranks)))
        table = table.filter(rank.is_in(list(info.real_ranks)))
    _check_real(table, present, info.real_ranks, where)
    check_times(table, where)
    table, chained = chain_steps(table)
    rows = rows_of(table, header, where)
    start, end, origin, related = rows.start, rows.start + rows.dur, info.origin_ns, 1
    alignment = None
    members = members_of(rows, header)
    if len({clock.id for clock in header.clock if set(clock.ranks) & present}) > 1:
        alignment = _aligned(rows, table, members, header, clocks, where)
        start, end = alignment.start_ns, alignment.end_ns
        related = len(alignment.domains)
        if origin is not None:
            begun = alignment.common_ns(rows.rank[:1], np.array([origin]))
            origin = int(begun[0])
    begin = int(start.min()) if origin is None else origin

    arrivals = _arrive(members, start, virtual, alignment, header, where)
    spread = _check_ends(rows, arrivals, start, end, clocks, header, where)
    duration, source, early, late = _transfers(rows, arrivals, end, header)
    gap, overlap = _gaps(rows, start, end)
    roots = np.diff(rows.offsets) == 0
    release = np.where(roots, np.maximum(start - begin, 0), 0)
    return Execution(
        rows=rows,
        members=members,
        values=Values(
            duration=duration,
            source=source,
            gap=gap if gap.any() else None,
            release=release if release.any() else None,
        ),
        report=ExecutionReport(
            index=info.index,
            file=path.name,
            ranks=ranks_text(info.real_ranks),
            rows=len(rows),
            step_ns=steps_of(rows.step, start, end).steady_ns(warmup),
            clocks=related,
            end_spread=spread,
            late_virtual=late,
            overlap_clamps=int((overlap > 0).sum()),
            transfer_clamps=int((early > 0).sum()),
            clamped_ns=int(overlap.sum() + early.sum()),
            chained=chained,
            jumps=() if alignment is None else alignment.report.jumps,
        ),
    )


def _check_real(
    table: pl.DataFrame, present: set[int], real_ranks: tuple[int, ...], where: str
) -> None:
    absent = set(real_ranks) - present
    if absent:
        raise MergeInputError(
            f"the slice says that ranks {ranks_text(absent)} are real but has no rows of them",
            where=where,
            hint="the file was cut short; record this slice again",
        )
    if not table["real"].all():
        rank, index = table.filter(~pl.col("real")).select("rank", "index").row(0)
        raise MergeInputError(
            f"rank {rank} is a real rank of this slice but its row is marked as virtual",
            where=f"{where} rank={rank} index={index}",
            hint="the header's slice.real_ranks and the rows contradict each other",
        )


def _aligned(
    rows: Rows,
    table: pl.DataFrame,
    members: Members,
    header: TraceHeader,
    clocks: Clocks,
    where: str,
) -> Alignment:
    """All real ranks on one clock, for a slice that ran on several."""
    channels = len(header.groups) + len(members.pairs)
    local, _ = number(members.channel, members.seq, channels)
    local = np.unique(local, return_inverse=True)[1].ravel()
    instance = np.full(len(rows), -1, np.int32)
    instance[members.row] = local
    graph = Graph(
        duration_ns=np.zeros(len(rows), np.int64),
        dep_offsets=np.zeros(len(rows) + 1, np.int64),
        dep_rows=np.empty(0, np.int32),
        instance=instance,
        instance_size=np.bincount(local).astype(np.int32),
        labels=lambda row: rows.label(row, header),
    )
    clock = tuple(clock for clock in header.clock if set(clock.ranks) & set(rows.rank.tolist()))
    own = header.model_copy(update={"clock": clock})
    try:
        return align_clocks(
            graph, table, own, keep=clocks.keep, max_residual_ns=clocks.max_residual_ns
        )
    except ClockError as error:
        place = f"{where} {error.where}" if error.where else where
        raise ClockError(error.message, where=place, hint=error.hint) from error


def _arrive(
    members: Members,
    start: Int64Array,
    virtual: pl.DataFrame | None,
    alignment: Alignment | None,
    header: TraceHeader,
    where: str,
) -> _Arrivals:
    starts = start[members.row]
    every = members
    if virtual is not None:
        timed = pl.col("start_ns").is_not_null() & pl.col("seq").is_not_null()
        others = virtual.filter(timed, ~pl.col("rank").is_in(_elsewhere(header)))
        guests = rows_of(others, header, where, partial=True)
        arrived = guests.start
        if alignment is not None:
            arrived = alignment.common_ns(guests.rank, arrived)
        joined = members_of(guests, header)
        pairs = np.union1d(members.pairs, joined.pairs)
        channel = np.concatenate(
            [_in(pairs, part, len(header.groups)) for part in (members, joined)]
        )
        seq = np.concatenate([members.seq, joined.seq])
        every = Members(np.concatenate([members.row, joined.row]), channel, pairs, seq)
        starts = np.concatenate([starts, arrived[joined.row]])
    instance, count = number(every.channel, every.seq, len(header.groups) + len(every.pairs))
    latest = np.full(count, _LOWEST)
    np.maximum.at(latest, instance, starts)
    return _Arrivals(every, len(members.row), instance, count, starts, latest)


def _elsewhere(header: TraceHeader) -> list[int]:
    """Virtual ranks whose clock no real rank shares; nothing tells when they arrived."""
    real = set(header.slice.real_ranks) if header.slice is not None else set(header.ranks)
    return [rank for clock in header.clock if not real & {*clock.ranks} for rank in clock.ranks]


def _in(pairs: Int64Array, members: Members, groups: int) -> Int64Array:
    """Channels of the members when the job's pairs are those given."""
    names = np.concatenate([np.arange(groups), groups + np.searchsorted(pairs, members.pairs)])
    return names[members.channel]


def _transfers(
    rows: Rows, arrivals: _Arrivals, end: Int64Array, header: TraceHeader
) -> tuple[Int64Array, NDArray[np.uint8], Int64Array, int]:
    """Durations, sources, members that ended too early by how much, transfers not trusted."""
    real = slice(0, arrivals.real)
    row = arrivals.members.row[real]
    instance, channel = arrivals.instance[real], arrivals.members.channel[real]
    own = end[row] - arrivals.latest[instance]
    early = np.maximum(-own, 0)
    own = np.maximum(own, 0)
    sizes = np.array([len(group.ranks) for group in header.groups] or [0], np.int64)
    groups = len(header.groups)
    size = np.where(channel < groups, sizes[np.minimum(channel, max(groups - 1, 0))], 2)
    present = np.bincount(instance, minlength=arrivals.count)[instance]
    source = np.where(present == size, np.uint8(_MEASURED), np.uint8(_REDUCED))
    # Whoever made the slice knows more than its times tell (a table, a model, a ring).
    given = rows.transfer[row] >= 0
    source = np.where(given, np.uint8(_MEASURED), source)
    source = np.where(rows.source[row] == ABSENT, source, rows.source[row])
    own = np.where(given, rows.transfer[row], own)
    early = np.where(given, 0, early)
    late = 0
    if arrivals.real < len(arrivals.instance):
        last_real = np.full(arrivals.count, _LOWEST)
        np.maximum.at(last_real, instance, arrivals.start[real])
        untrusted = (arrivals.latest[instance] > last_real[instance]) & ~given
        source[untrusted] = _NONE
        late = int(untrusted.sum())
    duration = rows.dur.copy()
    duration[row] = own
    sources = np.full(len(rows), ABSENT, np.uint8)
    sources[row] = source
    return duration, sources, early, late


def _gaps(rows: Rows, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Idle time after the last dependency, and how much a row starts before its end.

    The gap belongs to the row, not to an edge: which dependency is last may differ in the
    whole job, the host's delay does not.
    """
    counts = np.diff(rows.offsets)
    dependent = np.flatnonzero(counts)
    none = np.zeros(len(rows), np.int64)
    if not len(dependent):
        return none, none
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    ended = end[owner - rows.distance]
    if rows.lags is not None:
        ended = ended + rows.lags
    earliest = start.copy()
    earliest[dependent] = np.maximum.reduceat(ended, rows.offsets[dependent])
    if len(rows.far_row):
        # What another rank held up is no gap; where that rank was virtual, nobody knows.
        earliest[rows.far_row] = np.maximum(earliest[rows.far_row], start[rows.far_row])
    idle = start - earliest
    return np.maximum(idle, 0), np.maximum(-idle, 0)


def _check_ends(
    rows: Rows,
    arrivals: _Arrivals,
    start: Int64Array,
    end: Int64Array,
    clocks: Clocks,
    header: TraceHeader,
    where: str,
) -> Spread | None:
    """Refuse an execution whose real ranks contradict each other; returns how well ends agree."""
    row = arrivals.members.row[: arrivals.real]
    instance = arrivals.instance[: arrivals.real]
    symmetric = _SYMMETRIC[rows.kind[row]]
    row, instance = row[symmetric], instance[symmetric]
    first_end, last_end = np.full(arrivals.count, _HIGHEST), np.full(arrivals.count, _LOWEST)
    np.minimum.at(first_end, instance, end[row])
    np.maximum.at(last_end, instance, end[row])
    several = np.bincount(instance, minlength=arrivals.count) > 1
    spreads = (last_end - first_end)[several]
    spread = Spread.of(spreads)
    if spread is None:
        return None
    group = np.zeros(arrivals.count, np.int64)
    group[instance] = rows.group[row]
    found = worst_group(spreads, group[several], clocks.max_residual_ns)
    if found is not None:
        worst, median_ns, count = found
        called = group_labels(header.groups)[header.groups[worst].id]
        raise ClockError(
            f"ends of the same operation lie {median_ns / 1e6:.3f} ms apart (median of {count} in "
            f"group {called}), more than the "
            f"{clocks.max_residual_ns / 1e6:.3f} ms allowed",
            where=where,
            hint="the clocks of this slice's ranks differ; name one clock domain per host in its "
            "header so that they can be aligned, or accept it with --max-residual",
        )
    last_start = np.full(arrivals.count, _LOWEST)
    np.maximum.at(last_start, instance, start[row])
    inconsistent = several & (last_start > first_end + _TOLERANCE_NS)
    if inconsistent.sum() > _MOST_INCONSISTENT * several.sum():
        bad = int(inconsistent.argmax())
        shown = int(row[(instance == bad).argmax()])
        raise ClockError(
            f"{int(inconsistent.sum())} of {int(several.sum())} collectives have a member that "
            f"ended {(last_start - first_end)[bad] / 1e6:.3f} ms before another started, which "
            "cannot be",
            where=f"{where} first: {rows.label(shown, header)}",
            hint="the clocks of this slice's ranks differ, or operations are numbered wrongly",
        )
    return spread
