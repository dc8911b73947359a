"""What a slicing campaign measures: a trace in memory, or a job that is made up as needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.build import require_all_members, sorted_rows, structure_graph
from prismcalib.clocks import group_max
from prismcalib.errors import MergeInputError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.synth.assembly import Job, JobGraph
from prismcalib.synth.program import Program
from prismcalib.synth.spec import JobSpec
from prismcalib.synth.times import own_times
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.trace import Trace

__all__ = ["JobSource", "Part", "Source", "TraceSource", "source_of"]


@dataclass(frozen=True, eq=False)
class Part:
    """Some ranks of a job, the real ones of a slice, as they are when no one disturbs them.

    Attributes:
        rows: n node rows in (rank, index) order; times are not set.
        graph: n rows with own durations and releases, without lags; instances expect the
            members that are here.
        gap_ns: int64[n], idle time after the last dependency; None if there is none.
        complete: bool[G], whether all members of an instance are here.
    """

    rows: pl.DataFrame
    graph: Graph
    gap_ns: Int64Array | None
    complete: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Partners:
    """Communications of absent ranks with the ranks of a part.

    Attributes:
        rows: node rows in (rank, index) order; times are not set.
        instance: int64[rows], instance of the part's graph.
    """

    rows: pl.DataFrame
    instance: Int64Array


class Source(Protocol):
    """A job to cut."""

    @property
    def header(self) -> TraceHeader:
        """Header of the whole job."""

    def part(self, ranks: Int64Array) -> Part:
        """What sorted ranks do."""

    def partners(self, ranks: Int64Array, part: Part) -> Partners:
        """What the others do with them."""


def source_of(job: Trace | JobSpec) -> Source:
    """The source for a trace or a job."""
    return TraceSource(job) if isinstance(job, Trace) else JobSource(Job(job))


# --- a job, made up rank by rank ------------------------------------------------------


@dataclass(eq=False)
class JobSource:
    """A made-up job; only what is asked for is ever built."""

    job: Job
    header: TraceHeader = field(init=False)
    _last: JobGraph | None = None

    def __post_init__(self) -> None:
        self.header = self.job.header(TraceKind.RECORDED)

    def part(self, ranks: Int64Array) -> Part:
        """What sorted ranks do."""
        job, spec = self.job, self.job.spec
        durations, gaps, frames = [], [], []
        for program, members in job.blocks(ranks):
            steps = [own_times(job.layout, program, members, step) for step in range(spec.steps)]
            durations.append(np.stack([own.duration_ns for own in steps], axis=1).ravel())
            idle = [own.gap_ns for own in steps if own.gap_ns is not None]
            if idle:
                gaps.append(np.stack(idle, axis=1).ravel())
            frames.append(job.frame(program, members))
        self._last = job.graph(ranks, spec.steps)
        graph = replace(self._last.graph, duration_ns=np.concatenate(durations))
        rows = pl.concat(frames, rechunk=True)
        expected = {group.id: len(group.ranks) for group in self.header.groups}
        return Part(
            rows=rows,
            graph=graph,
            gap_ns=np.concatenate(gaps) if gaps else None,
            complete=self._complete(self._last, expected),
        )

    def _complete(self, part: JobGraph, expected: dict[int, int]) -> NDArray[np.bool_]:
        pairs = self.job.spec.pp**2
        keys = np.array(list(part.first_instance), np.int64)
        starts = np.array(list(part.first_instance.values()), np.int64)
        sizes = np.array(
            [2 if key % pairs else expected[key // pairs] for key in keys.tolist()],
            np.int64,
        )
        lengths = np.diff(np.append(starts, part.graph.instances))
        return part.graph.instance_size == np.repeat(sizes, lengths)

    def partners(self, ranks: Int64Array, part: Part) -> Partners:
        """What the others do with them."""
        del part
        if self._last is None:
            raise AssertionError("ask for the part first")
        everyone = np.arange(self.job.spec.world_size)
        others = everyone[~np.isin(everyone, ranks)]
        first = self._last.first_instance
        keys = np.array(list(first), np.int64)
        starts = np.array(list(first.values()), np.int64)
        frames, instances = [], []
        for program, members in self.job.blocks(others):
            used = np.array(
                [self.job.layout.keys(channel, members) for channel in program.channels]
            ).reshape(len(program.channels), len(members))
            found = np.searchsorted(keys, used)
            shared = np.isin(used, keys)
            # Ranks that share the same channels have the same rows.
            patterns, number = np.unique(shared, axis=1, return_inverse=True)
            for place, pattern in enumerate(patterns.T):
                if pattern.any():
                    column = np.flatnonzero(number.ravel() == place)
                    frame = self.job.frame(program, members[column], channels=pattern)
                    base = starts[np.where(shared, found, 0)[:, column]]
                    frames.append(frame)
                    instances.append(self._instance(program, pattern, base, frame))
        if not frames:
            return Partners(part_rows(self._empty()), np.empty(0, np.int64))
        return _sorted(pl.concat(frames, rechunk=True), np.concatenate(instances))

    def _empty(self) -> pl.DataFrame:
        return self.job.frame(self.job.programs[0], np.zeros(1, np.int64)).clear()

    def _instance(
        self, program: Program, pattern: NDArray[np.bool_], base: Int64Array, frame: pl.DataFrame
    ) -> Int64Array:
        channel = np.tile(program.channel, self.job.spec.steps)
        channel = channel[np.append(pattern, values=False)[channel]]
        return base[channel].T.ravel() + frame["seq"].to_numpy()


# --- a trace --------------------------------------------------------------------------

_TIMES = ("start_ns", "dur_ns", "transfer_ns", "transfer_source", "lag_ns")
_DERIVED = (
    "wait_ns",
    "slack_ns",
    "critical",
    "x_observed_start_ns",
    "x_observed_dur_ns",
)


def part_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows without anything that was measured or calculated."""
    return rows.drop(_TIMES, *_DERIVED, strict=False)


@dataclass(frozen=True, eq=False)
class TraceSource:
    """A recorded or calibrated trace whose times are those of one clock.

    Raises:
        MergeInputError: no times, or the clocks of a recorded trace are several.
    """

    trace: Trace
    header: TraceHeader = field(init=False)
    _rows: pl.DataFrame = field(init=False)
    _graph: Graph = field(init=False)
    _gap: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        header = self.trace.header
        if header.kind not in (TraceKind.RECORDED, TraceKind.CALIBRATED):
            raise MergeInputError(
                f"a {header.kind} trace cannot be cut into slices",
                hint="cut a recorded or calibrated trace, or a JobSpec",
            )
        if header.kind == TraceKind.RECORDED and len(header.clock) > 1:
            raise MergeInputError(
                f"the trace has {len(header.clock)} clocks that are not aligned",
                hint="merge it first: slices are cut from true times",
            )
        rows = sorted_rows(self.trace)
        if rows["start_ns"].null_count():
            raise MergeInputError("some rows of the trace have no times")
        graph = structure_graph(rows, header)
        require_all_members(graph, rows, header)
        start = rows["start_ns"].to_numpy() - int(rows["start_ns"].to_numpy().min())
        end = start + rows["dur_ns"].to_numpy()
        own, gap = _explain(graph, start, end)
        free = np.diff(graph.dep_offsets) == 0
        graph = replace(graph, duration_ns=own, release_ns=np.where(free, start, 0))
        object.__setattr__(self, "header", header)
        object.__setattr__(self, "_rows", part_rows(rows))
        object.__setattr__(self, "_graph", graph)
        object.__setattr__(self, "_gap", gap)

    def part(self, ranks: Int64Array) -> Part:
        """What sorted ranks do."""
        chosen = np.isin(self._rows["rank"].to_numpy(), ranks)
        whole = self._graph
        numbers = np.unique(whole.instance[chosen & (whole.instance >= 0)])
        owner = np.repeat(np.arange(whole.rows), np.diff(whole.dep_offsets))
        kept = chosen[owner] & chosen[whole.dep_rows]
        counts = np.bincount(owner[kept], minlength=whole.rows)[chosen]
        instance = whole.instance[chosen]
        member = instance >= 0
        instance[member] = np.searchsorted(numbers, instance[member])
        present = np.bincount(instance[member], minlength=len(numbers))
        release = whole.release_ns
        graph = Graph(
            duration_ns=whole.duration_ns[chosen],
            dep_offsets=np.concatenate([[0], np.cumsum(counts)]),
            dep_rows=(np.cumsum(chosen) - 1)[whole.dep_rows[kept]],
            instance=instance,
            instance_size=present,
            release_ns=None if release is None else release[chosen],
        )
        return Part(
            rows=self._rows.filter(pl.Series(chosen)),
            graph=graph,
            gap_ns=self._gap[chosen],
            complete=present == whole.instance_size[numbers],
        )

    def partners(self, ranks: Int64Array, part: Part) -> Partners:
        """What the others do with them."""
        del part
        whole = self._graph.instance
        chosen = np.isin(self._rows["rank"].to_numpy(), ranks)
        numbers = np.unique(whole[chosen & (whole >= 0)])
        others = ~chosen & np.isin(whole, numbers)
        rows = self._rows.filter(pl.Series(others)).with_columns(
            deps=pl.lit([], pl.List(pl.UInt32))
        )
        return Partners(rows, np.searchsorted(numbers, whole[others]))


def _explain(graph: Graph, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Own durations (transfers of members) and gaps, int64[n] each, behind true times."""
    member = graph.instance >= 0
    ready = start.copy()
    ready[member] = group_max(graph.instance[member], start[member])[graph.instance[member]]
    gap = np.zeros(graph.rows, np.int64)
    dependent = np.flatnonzero(np.diff(graph.dep_offsets))
    if len(dependent):
        last = np.maximum.reduceat(end[graph.dep_rows], graph.dep_offsets[dependent])
        gap[dependent] = np.maximum(start[dependent] - last, 0)
    return np.maximum(end - ready, 0), gap


def _sorted(rows: pl.DataFrame, instance: Int64Array) -> Partners:
    ordered = rows.with_columns(instance=pl.Series(instance)).sort("rank", "index")
    numbers: Int32Array | Int64Array = ordered["instance"].to_numpy()
    return Partners(ordered.drop("instance"), numbers.astype(np.int64))
