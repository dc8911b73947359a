"""Rows and graphs of some ranks of a job, repeated from the programs of their stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.graph import Graph, Int64Array
from prismcalib.synth.authoring import stage_programs
from prismcalib.synth.layout import Layout
from prismcalib.synth.program import Program, stream_names
from prismcalib.synth.spec import JobSpec
from prismcalib.synth.times import expert_loads
from prismtrace.schema import ClockDomain, Kind, TraceHeader, TraceKind
from prismtrace.trace import node_ids, node_schema

__all__ = ["Job", "JobGraph"]


@dataclass(frozen=True, eq=False)
class JobGraph:
    """What some ranks do in some steps, and for whom among themselves they wait.

    Attributes:
        graph: n rows, with durations 0 and no lags; ranks that are absent are not waited for.
        keys: int64[channels], sorted keys of the channels in use, see `Layout.keys`.
        starts, lengths: int64[channels], first instance of each channel and how many it has.
    """

    graph: Graph
    keys: Int64Array
    starts: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, eq=False)
class Job:
    """A job's layout and programs."""

    spec: JobSpec
    layout: Layout = field(init=False)
    programs: tuple[Program, ...] = field(init=False)

    def __post_init__(self) -> None:
        layout = Layout(self.spec)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "programs", tuple(stage_programs(layout)))

    @property
    def rows(self) -> int:
        """Rows of the whole job."""
        spec = self.spec
        rows = sum(program.rows for program in self.programs)
        return rows * spec.ranks_per_stage * spec.steps

    def header(self, kind: TraceKind) -> TraceHeader:
        """The header of the whole job."""
        spec = self.spec
        ranks = tuple(range(spec.world_size))
        axes = {"pp": spec.pp, "tp": spec.tp, "dp": spec.dp, "ep": spec.ep}
        timed = kind != TraceKind.BARE
        return TraceHeader(
            kind=kind,
            world_size=spec.world_size,
            ranks=ranks,
            axes=axes,
            groups=self.layout.groups,
            streams=stream_names(spec),
            clock=(ClockDomain(id=0, ranks=ranks, source="synthetic"),) if timed else (),
            steps=tuple(range(spec.steps)),
            created_by="prismcalib.synth",
        )

    def blocks(self, ranks: Int64Array) -> Iterator[tuple[Program, Int64Array]]:
        """Sorted ranks by stage."""
        stages = ranks // self.spec.ranks_per_stage
        for stage in np.unique(stages).tolist():
            yield self.programs[stage], ranks[stages == stage]

    # Graph ------------------------------------------------------------------------------

    def graph(self, ranks: Int64Array, steps: int) -> JobGraph:
        """The graph of sorted ranks over the first steps."""
        keys, lengths, present = self._channels(ranks, steps)
        starts = np.cumsum(lengths) - lengths
        blocks = [(*block, _deps_of_rank(block[0], steps)) for block in self.blocks(ranks)]
        rows = sum(steps * program.rows * len(members) for program, members, _ in blocks)
        edges = sum(len(deps.back) * len(members) for _, members, deps in blocks)
        offsets = np.zeros(rows + 1, np.int64)
        dep_rows = np.empty(edges, np.int32)
        instance = np.empty(rows, np.int32)
        row = edge = 0
        for program, members, deps in blocks:
            # One line of these views is one rank.
            shape = (len(members), -1)
            next_row = row + steps * program.rows * len(members)
            next_edge = edge + len(deps.back) * len(members)
            numbers = np.arange(len(members))[:, None]
            ends = edge + len(deps.back) * numbers
            np.add(ends, deps.ends, out=offsets[row + 1 : next_row + 1].reshape(shape))
            base = row + steps * program.rows * numbers
            np.add(
                base,
                deps.targets,
                out=dep_rows[edge:next_edge].reshape(shape),
                casting="same_kind",
            )
            block = instance[row:next_row].reshape(shape)
            block[:] = -1
            for place, channel in enumerate(program.channels):
                position = np.flatnonzero(np.tile(program.channel == place, steps))
                found = np.searchsorted(keys, self.layout.keys(channel, members))
                block[:, position] = starts[found][:, None] + _numbers(program, place, steps)
            row, edge = next_row, next_edge
        return JobGraph(
            graph=Graph(
                duration_ns=np.zeros(rows, np.int64),
                dep_offsets=offsets,
                dep_rows=dep_rows,
                instance=instance,
                instance_size=np.repeat(present, lengths).astype(np.int32),
            ),
            keys=keys,
            starts=starts,
            lengths=lengths,
        )

    def _channels(self, ranks: Int64Array, steps: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Sorted keys of the channels in use; operations and members present of each."""
        keys, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for program, members in self.blocks(ranks):
            keys.append(self.layout.all_keys(program.channels, members).ravel())
            lengths.append(np.repeat(program.counts * steps, len(members)))
        every = np.concatenate(keys)
        unique, at, present = np.unique(every, return_index=True, return_counts=True)
        return unique, np.concatenate(lengths)[at], present

    # Rows -------------------------------------------------------------------------------

    @cached_property
    def _templates(self) -> list[pl.DataFrame]:
        return [_template(program, self.spec.steps) for program in self.programs]

    def frame(
        self, program: Program, ranks: Int64Array, *, channels: NDArray[np.bool_] | None = None
    ) -> pl.DataFrame:
        """Node rows of some ranks of a stage, all steps, without times; (rank, index) order.

        With `channels`, bool[channels of the program], only their operations, and no deps.
        """
        template = self._templates[program.stage]
        if channels is not None:
            kept = np.append(channels, values=False)[template["channel"].to_numpy()]
            template = template.filter(pl.Series(kept)).with_columns(
                deps=pl.lit([], pl.List(pl.UInt32))
            )
        rank = pl.Series("rank", np.repeat(ranks.astype(np.int32), template.height))
        rows = pl.concat([template] * len(ranks), rechunk=True).with_columns(rank)
        lane = pl.col("rank") % self.spec.ranks_per_stage
        return (
            rows.with_columns(
                id=node_ids(pl.col("rank"), pl.col("index")),
                peer=pl.col("peer_stage") * self.spec.ranks_per_stage + lane,
                group=pl.Series(self._groups(program, ranks, template["channel"].to_numpy())),
                bytes=self._bytes(program, ranks, template, rows["bytes"]),
            )
            .with_columns(pl.when(pl.col("channel") >= 0).then("group").alias("group"))
            .select([name for name in node_schema() if name in {*template.columns, *_ADDED}])
        )

    def _groups(
        self, program: Program, ranks: Int64Array, channel: NDArray[np.int16]
    ) -> NDArray[np.int32]:
        """int32[R * rows], group id of every row; meaningless for computations."""
        ids = np.zeros((len(ranks), len(program.channels) + 1), np.int32)
        for place, used in enumerate(program.channels):
            ids[:, place] = self.layout.group_ids(used, ranks)
        return ids[:, channel].ravel()

    def _bytes(
        self, program: Program, ranks: Int64Array, template: pl.DataFrame, size: pl.Series
    ) -> pl.Series:
        """Bytes of every row: tokens go where the experts are asked for."""
        uneven = (template["kind"] == Kind.ALL_TO_ALL.value).to_numpy()
        loads = [
            expert_loads(self.spec, program, rank, step)
            for rank in ranks.tolist()
            for step in range(self.spec.steps)
        ]
        if loads[0] is None or not uneven.any():
            return size
        per_rank = np.array(loads).reshape(len(ranks), -1)
        place = template["step"].to_numpy() * program.loads + template["load"].to_numpy()
        scale = np.ones((len(ranks), template.height))
        scale[:, uneven] = per_rank[:, place[uneven]]
        return (size * pl.Series(scale.ravel())).round().cast(pl.Int64)


_ADDED = ("id", "rank", "peer", "group")


@dataclass(frozen=True, eq=False)
class _Deps:
    """Dependencies of one rank over several steps; row numbers count within the rank.

    Attributes:
        ends: int64[rows], of each row, where its part of the following arrays ends.
        back: int32[e], distances back to the dependency.
        targets: int64[e], the rows depended on.
    """

    ends: Int64Array
    back: NDArray[np.int32]
    targets: Int64Array


def _deps_of_rank(program: Program, steps: int) -> _Deps:
    counts = np.diff(program.dep_offsets)
    later = np.concatenate([[len(program.tails)], counts[1:]])
    every = np.concatenate([counts, *([later] * (steps - 1))])
    back = np.concatenate(
        [program.dep_distance, *([program.tails, program.dep_distance] * (steps - 1))]
    )
    return _Deps(
        ends=np.cumsum(every),
        back=back.astype(np.int32),
        targets=np.repeat(np.arange(len(every)), every) - back,
    )


def _numbers(program: Program, place: int, steps: int) -> Int64Array:
    """Numbers of a channel's operations over several steps, in program order."""
    in_step = program.seq[program.channel == place]
    numbers: Int64Array = (program.counts[place] * np.arange(steps)[:, None] + in_step).ravel()
    return numbers


def _template(program: Program, steps: int) -> pl.DataFrame:
    """Rows of one rank over all steps, without what depends on the rank.

    Beside node columns: `channel`, `load` and `peer_stage` (null if none).
    """
    schema = node_schema()
    counts = np.append(program.counts, 0)[program.channel]
    step = pl.DataFrame(
        {name: pl.Series(name, values, schema[name]) for name, values in program.columns.items()}
    ).with_columns(
        channel=pl.Series(program.channel),
        load=pl.Series(program.load),
        peer_stage=pl.Series(program.peer_stage),
        seq=pl.Series(program.seq),
        count=pl.Series(counts),
    )
    deps = _deps_of_rank(program, steps)
    number = pl.col("step").cast(pl.Int64)
    batches = 1 + max(
        (number for number in program.columns["batch"] if number is not None), default=0
    )
    rows = pl.concat([step.with_columns(step=pl.lit(i, pl.Int32)) for i in range(steps)])
    return (
        rows.with_columns(
            index=pl.int_range(pl.len(), dtype=pl.Int32),
            seq=pl.when(pl.col("channel") >= 0).then(pl.col("seq") + number * pl.col("count")),
            batch=(pl.col("batch") + number * batches).cast(pl.Int32),
            peer_stage=pl.when(pl.col("peer_stage") >= 0).then("peer_stage"),
            deps=_lists(deps),
            real=pl.lit(value=True),
        )
        .drop("count")
        .rechunk()
    )


def _lists(deps: _Deps) -> pl.Series:
    """The distances as a list column."""
    owner = np.repeat(np.arange(len(deps.ends)), np.diff(deps.ends, prepend=0))
    rows = pl.DataFrame({"row": np.arange(len(deps.ends))})
    lists = pl.DataFrame({"row": owner, "deps": deps.back.astype(np.uint32)})
    grouped = lists.group_by("row", maintain_order=True).agg("deps")
    joined = rows.join(grouped, on="row", how="left", maintain_order="left")["deps"]
    return joined.fill_null(pl.Series([[]], dtype=pl.List(pl.UInt32)))
