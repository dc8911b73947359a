"""What a slicing campaign measures: a trace in memory, or a job that is made up as needed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.build import require_all_members, sorted_rows, structure_graph
from prismcalib.errors import MergeInputError
from prismcalib.graph import Graph, Int64Array
from prismcalib.grouped import group_max
from prismcalib.steady import chain_steps
from prismcalib.synth.assembly import Job, JobGraph
from prismcalib.synth.spec import JobSpec
from prismcalib.synth.times import own_times
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.trace import Trace

__all__ = ["JobSource", "Part", "Partners", "Source", "TraceSource", "source_of"]


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

    def take(self, ranks: Int64Array, *, partners: bool) -> tuple[Part, Partners | None]:
        """What sorted ranks do, and what others do with them, if asked for and if any do."""


def source_of(job: Trace | JobSpec) -> Source:
    """The source for a trace or a job."""
    return TraceSource(job) if isinstance(job, Trace) else JobSource(Job(job))


# --- a job, made up rank by rank ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class JobSource:
    """A made-up job; only what is asked for is ever built."""

    job: Job
    header: TraceHeader = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "header", self.job.header(TraceKind.RECORDED))

    def take(self, ranks: Int64Array, *, partners: bool) -> tuple[Part, Partners | None]:
        """See `Source.take`."""
        job, steps = self.job, range(self.job.spec.steps)
        durations, gaps, frames = [], [], []
        for program, members in job.blocks(ranks):
            times = [own_times(job.layout, program, members, step) for step in steps]
            durations.append(np.stack([own.duration_ns for own in times], axis=1).ravel())
            idle = [own.gap_ns for own in times if own.gap_ns is not None]
            if idle:
                gaps.append(np.stack(idle, axis=1).ravel())
            frames.append(job.frame(program, members))
        graph = job.graph(ranks, len(steps))
        part = Part(
            rows=pl.concat(frames, rechunk=True),
            graph=replace(graph.graph, duration_ns=np.concatenate(durations)),
            gap_ns=np.concatenate(gaps) if gaps else None,
            complete=graph.graph.instance_size == np.repeat(self._sizes(graph), graph.lengths),
        )
        return part, self._partners(ranks, graph) if partners else None

    def _sizes(self, graph: JobGraph) -> NDArray[np.int32]:
        """Members that the instances of each channel of the graph have in the job."""
        group, p2p = np.divmod(graph.keys, self.job.spec.pp**2)
        sizes = np.array([len(group.ranks) for group in self.header.groups], np.int32)
        return np.where(p2p > 0, np.int32(2), sizes[group])

    def _partners(self, ranks: Int64Array, graph: JobGraph) -> Partners | None:
        everyone = np.arange(self.job.spec.world_size)
        starts = np.append(graph.starts, 0)
        frames, instances = [], []
        for program, members in self.job.blocks(everyone[~np.isin(everyone, ranks)]):
            keys = self.job.layout.all_keys(program.channels, members)
            shared = np.isin(keys, graph.keys)
            base = starts[np.searchsorted(graph.keys, keys)]
            # Ranks that share the same channels have the same rows.
            patterns, number = np.unique(shared, axis=1, return_inverse=True)
            for place, pattern in enumerate(patterns.T):
                if pattern.any():
                    alike = np.flatnonzero(number.ravel() == place)
                    frame = self.job.frame(program, members[alike], channels=pattern)
                    channel = np.tile(program.channel, self.job.spec.steps)
                    channel = channel[np.append(pattern, values=False)[channel]]
                    frames.append(frame)
                    instances.append(base[:, alike][channel].T.ravel() + frame["seq"].to_numpy())
        if not frames:
            return None
        numbered = pl.concat(frames).with_columns(instance=pl.Series(np.concatenate(instances)))
        ordered = numbered.sort("rank", "index")
        return Partners(ordered.drop("instance"), ordered["instance"].to_numpy())


# --- a trace --------------------------------------------------------------------------

_NOT_STRUCTURE = (
    "start_ns",
    "dur_ns",
    "transfer_ns",
    "transfer_source",
    "lag_ns",
    "wait_ns",
    "slack_ns",
    "critical",
    "x_observed_start_ns",
    "x_observed_dur_ns",
)


@dataclass(frozen=True, eq=False)
class TraceSource:
    """A recorded or calibrated trace whose times are those of one clock.

    Raises:
        MergeInputError: no times, or the clocks of a recorded trace are several.
    """

    trace: Trace
    _rows: pl.DataFrame = field(init=False)
    _graph: Graph = field(init=False)
    _gap: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        header = self.header
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
        # In a run of its own a rank begins a step when it has ended the one before, not at the
        # recorded time, which others may have held up.
        rows, _ = chain_steps(sorted_rows(self.trace))
        if rows["start_ns"].null_count():
            raise MergeInputError("some rows of the trace have no times")
        graph = structure_graph(rows, header)
        require_all_members(graph, rows, header)
        observed = rows["start_ns"].to_numpy()
        start = observed - observed.min()
        own, gap = _explain(graph, start, start + rows["dur_ns"].to_numpy())
        free = np.diff(graph.dep_offsets) == 0
        graph = replace(graph, duration_ns=own, release_ns=np.where(free, start, 0))
        object.__setattr__(self, "_rows", rows.drop(_NOT_STRUCTURE, strict=False))
        object.__setattr__(self, "_graph", graph)
        object.__setattr__(self, "_gap", gap)

    @property
    def header(self) -> TraceHeader:
        """Header of the trace."""
        return self.trace.header

    def take(self, ranks: Int64Array, *, partners: bool) -> tuple[Part, Partners | None]:
        """See `Source.take`."""
        chosen = np.isin(self._rows["rank"].to_numpy(), ranks)
        whole = self._graph
        numbers = np.unique(whole.instance[chosen & (whole.instance >= 0)])
        graph = _subgraph(whole, chosen, numbers)
        part = Part(
            rows=self._rows.filter(pl.Series(chosen)),
            graph=graph,
            gap_ns=self._gap[chosen],
            complete=graph.instance_size == whole.instance_size[numbers],
        )
        others = ~chosen & np.isin(whole.instance, numbers)
        if not partners or not others.any():
            return part, None
        rows = self._rows.filter(pl.Series(others))
        rows = rows.with_columns(deps=pl.lit([], pl.List(pl.UInt32)))
        return part, Partners(rows, np.searchsorted(numbers, whole.instance[others]))


def _subgraph(whole: Graph, chosen: NDArray[np.bool_], instances: NDArray[np.int32]) -> Graph:
    """The graph of some rows; instances, numbered anew, expect the members among them."""
    owner = np.repeat(np.arange(whole.rows), np.diff(whole.dep_offsets))
    kept = chosen[owner] & chosen[whole.dep_rows]
    counts = np.bincount(owner[kept], minlength=whole.rows)[chosen]
    instance = whole.instance[chosen]
    member = instance >= 0
    instance[member] = np.searchsorted(instances, instance[member])
    row = np.cumsum(chosen) - 1
    return Graph(
        duration_ns=whole.duration_ns[chosen],
        dep_offsets=np.concatenate([[0], np.cumsum(counts)]),
        dep_rows=row[whole.dep_rows[kept]].astype(np.int32),
        instance=instance,
        instance_size=np.bincount(instance[member], minlength=len(instances)).astype(np.int32),
        release_ns=None if whole.release_ns is None else whole.release_ns[chosen],
    )


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
