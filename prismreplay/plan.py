"""What a run will do with the communications of its sandbox ranks, and when.

A plan is compiled once from a calibrated graph and the list of sandbox ranks, and kept in a
file.  It knows every *boundary* operation (`prismreplay.boundary`) by the names that the running
program gives it: process group, sequence number and, of a p2p operation, sender and receiver.

    plan = compile_plan(pt.open("calibrated.parquet"), sandbox=[0, 1])
    plan.write("plan.parquet")

    world = plan.world()
    world.arrived(OpKey(group=3, seq=0), rank=0, time_ns=1_000_000)

A program that runs for more steps than the graph has repeats the last one: operation seq of a
group is then the one that the last step has in that place, and `VirtualWorld` shifts what it
depends on by as many steps.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import polars as pl

from prismcalib.edits import Edit
from prismreplay.boundary import (
    Boundary,
    Place,
    Repeat,
    VertexKind,
    VirtualWorld,
    compile_boundary,
)
from prismreplay.errors import PlanError
from prismreplay.plan_graph import JobGraph
from prismtrace.group_names import group_labels
from prismtrace.headers import PathLike
from prismtrace.output import atomic_output
from prismtrace.ranks import format_ranks, parse_ranks
from prismtrace.reading import read_table
from prismtrace.schema import ProcessGroup, TraceKind
from prismtrace.trace import Trace

__all__ = ["Known", "OpKey", "Plan", "PlannedWorld", "compile_plan"]

FORMAT = 1
_METADATA_KEY = "prismreplay_plan"
_COMPILE = "`prismreplay plan` makes one"
_DAMAGED = "a damaged plan: what it says does not fit together"


class OpKey(NamedTuple):
    """A communication by the names that all its members know; see the format's (group, seq)."""

    group: int
    seq: int
    sender: int = -1
    receiver: int = -1


class _Channel(NamedTuple):
    """Where operations are numbered: a group, or of p2p one direction of a pair in it."""

    group: int
    sender: int
    receiver: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Boundary operations of some sandbox ranks.

    Attributes:
        world_size: of the job.
        sandbox: ranks that execute.
        groups: the process groups that have sandbox members, with all their ranks.
        steps: numbers of the steps of the graph, first to last.
        period_ns: what the last step takes in the graph.
        boundary: the vertices and edges.
        operations: one row per (vertex, sandbox rank) in vertex order: `vertex`, `rank`,
            `group`, `seq`, `src_rank`, `dst_rank` (-1 for collectives), `kind`, `step`,
            `arrival` (the vertex is only the arrival of this rank, for which others wait),
            `transfer_ns`, `transfer_source`.
        made_from: digest of the graph's files (`digests.files_digest`), by which a plan of an
            older calibration is told; None: not known.
    """

    world_size: int
    sandbox: tuple[int, ...]
    groups: tuple[ProcessGroup, ...]
    steps: tuple[int, ...]
    period_ns: int
    boundary: Boundary
    operations: pl.DataFrame
    made_from: str | None = None

    def world(self) -> PlannedWorld:
        """The virtual ranks at the beginning of a run."""
        return PlannedWorld(self)

    @cached_property
    def sandbox_members(self) -> dict[int, int]:
        """Vertex -> arrivals of sandbox ranks that it takes."""
        return dict(self.operations.group_by("vertex").len().iter_rows())

    @cached_property
    def repeat(self) -> Repeat | None:
        """How the last step is repeated; None if the graph has no complete step."""
        return _repeat(self)

    def write(self, path: PathLike) -> None:
        """Write the plan to one Parquet file; the previous file stays intact on failure."""
        plan = self.boundary
        counts = np.diff(plan.edge_offsets)
        order = np.repeat(np.arange(plan.vertices), counts)
        edges = pl.DataFrame(
            {"vertex": order, "source": plan.edge_source, "weight_ns": plan.edge_weight_ns}
        )
        edges = edges.group_by("vertex", maintain_order=True).agg("source", "weight_ns")
        vertices = pl.DataFrame(
            {
                "vertex": np.arange(plan.vertices),
                "vertex_kind": plan.kind,
                "owner": plan.owner,
            }
        ).join(edges, on="vertex", how="left", maintain_order="left")
        operations = self.operations.group_by("vertex", maintain_order=True).agg(
            pl.struct(pl.exclude("vertex")).alias("operations")
        )
        table = vertices.join(
            operations.cast({"vertex": pl.Int64}), on="vertex", how="left", maintain_order="left"
        )
        head = {
            "format": FORMAT,
            "world_size": self.world_size,
            "sandbox": format_ranks(self.sandbox),
            "groups": [group.model_dump(mode="json") for group in self.groups],
            "steps": list(self.steps),
            "period_ns": self.period_ns,
            "origin_ns": plan.origin_ns,
            "made_from": self.made_from,
        }
        with atomic_output(Path(path)) as temporary:
            table.write_parquet(
                temporary, compression="zstd", metadata={_METADATA_KEY: json.dumps(head)}
            )

    @classmethod
    def read(cls, path: PathLike) -> Self:
        """Read a file that `write` made.

        Raises:
            InputFileError: missing, unreadable or damaged.
            PlanError: not a plan, one of another format, or its parts do not fit together.
        """
        where = str(path)
        head, table = read_table(Path(path), _METADATA_KEY, hint=_COMPILE)
        if head is None:
            raise PlanError("not a plan", where=where, hint=_COMPILE)
        if head.get("format") != FORMAT:
            raise PlanError(
                f"a plan of format {head.get('format')}; this version reads {FORMAT}",
                where=where,
                hint="compile the plan again",
            )
        try:
            return cls(
                world_size=int(head["world_size"]),
                sandbox=parse_ranks(head["sandbox"]),
                groups=tuple(ProcessGroup.model_validate(group) for group in head["groups"]),
                steps=tuple(map(int, head["steps"])),
                period_ns=int(head["period_ns"]),
                boundary=_boundary_of(table, int(head["origin_ns"])),
                operations=table.select("vertex", "operations")
                .drop_nulls()
                .explode("operations", empty_as_null=False, keep_nulls=False)
                .unnest("operations"),
                made_from=head.get("made_from"),
            )
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise PlanError(_DAMAGED, where=where, hint="compile the plan again") from error
        except pl.exceptions.PolarsError as error:
            raise PlanError(_DAMAGED, where=where, hint="compile the plan again") from error


def _boundary_of(table: pl.DataFrame, origin_ns: int) -> Boundary:
    """The vertices and edges of a plan's rows.

    Raises:
        ValueError: an edge does not lead forward, which a run would never come to the end of.
    """
    counts = table["source"].list.len().fill_null(0).to_numpy()
    sources = _flat(table["source"]).to_numpy()
    weights = _flat(table["weight_ns"]).to_numpy()
    targets = np.repeat(np.arange(table.height), counts)
    if len(weights) != len(sources) or ((sources < 0) | (sources >= targets)).any():
        raise ValueError("edges that do not lead forward")
    return Boundary(
        kind=table["vertex_kind"].to_numpy(),
        owner=table["owner"].to_numpy(),
        edge_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        edge_source=sources,
        edge_weight_ns=weights,
        origin_ns=origin_ns,
    )


def _flat(lists: pl.Series) -> pl.Series:
    return lists.drop_nulls().explode(empty_as_null=False, keep_nulls=False)


def compile_plan(trace: Trace, sandbox: Sequence[int], edits: Sequence[Edit] = ()) -> Plan:
    """The plan of a run of some ranks.

    Args:
        trace: a calibrated trace of all ranks.
        sandbox: global ranks that will execute.
        edits: what the virtual ranks shall do otherwise than in the trace.

    Raises:
        PlanError: not calibrated, ranks outside the world, or see `compile_boundary`.
        MergeInputError, CoverageError: as `prismcalib.graph_from_trace`.
    """
    header = trace.header
    if header.kind != TraceKind.CALIBRATED:
        raise PlanError(
            f"a plan needs a calibrated trace, not a {header.kind.value} one",
            hint="run `prismcalib merge` first; for data without times, `prismreplay run --early` "
            "needs no plan and takes any graph",
        )
    chosen = tuple(sorted(set(sandbox)))
    if not chosen or chosen[-1] >= header.world_size or chosen[0] < 0:
        raise PlanError(
            f"sandbox ranks {format_ranks(chosen) or 'none'} of a world of {header.world_size}",
            hint="name ranks of the job, counted from 0",
        )
    job = JobGraph.of(trace, chosen, edits)
    boundary = compile_boundary(job.graph, job.mine)
    return Plan(
        world_size=header.world_size,
        sandbox=chosen,
        groups=tuple(group for group in header.groups if set(chosen) & set(group.ranks)),
        steps=job.steps,
        period_ns=job.period_ns,
        boundary=boundary,
        operations=_operations(job, boundary),
    )


def _operations(job: JobGraph, boundary: Boundary) -> pl.DataFrame:
    """One row per vertex and sandbox rank; see `Plan.operations`."""
    graph = job.graph
    vertex_of = np.full(max(graph.instances, 1), -1, np.int32)
    for instance, vertex in boundary.vertex_of_instance.items():
        vertex_of[instance] = vertex
    members = np.flatnonzero(job.mine & (graph.instance >= 0))
    members = members[vertex_of[graph.instance[members]] >= 0]
    events = boundary.vertex_of_event
    event_rows = np.array([graph.original(event) for event in events], np.int64)
    found = np.concatenate([members, event_rows])
    vertices = np.concatenate(
        [vertex_of[graph.instance[members]], np.array(list(events.values()), np.int32)]
    )
    arrival = np.concatenate(
        [
            np.zeros(len(members), np.bool_),
            np.array([event >= graph.rows for event in events], np.bool_),
        ]
    )
    return (
        job.sandbox_rows(found)
        .select(
            pl.Series("vertex", vertices, pl.Int32),
            *("rank", "group", "seq", "src_rank", "dst_rank", "kind", "step"),
            pl.Series("arrival", arrival, pl.Boolean),
            *("transfer_ns", "transfer_source"),
        )
        .cast({"src_rank": pl.Int32, "dst_rank": pl.Int32})
        .sort("vertex", "rank")
    )


def _repeat(plan: Plan) -> Repeat | None:
    if not plan.steps:
        return None
    last = plan.steps[-1]
    boundary = plan.boundary
    before = np.full(boundary.vertices, -1, np.int32)
    successor = np.full(boundary.vertices, -1, np.int32)
    # One name per vertex: an event's rank tells arrivals of the same operation apart.
    names = plan.operations.unique("vertex", maintain_order=True)
    counts = _operations_per_step(names.filter(pl.col("step") == last))
    columns = ("vertex", "group", "seq", "src_rank", "dst_rank", "step", "arrival", "rank")
    by_name: dict[tuple[Any, ...], int] = {}
    for vertex, group, seq, src, dst, step, arrival, rank in names.select(columns).iter_rows():
        only = rank if boundary.kind[vertex] == VertexKind.EVENT else -1
        by_name[group, seq, src, dst, arrival, only] = vertex
        before[vertex] = plan.steps.index(last) - plan.steps.index(step) if step is not None else -1
    for (group, seq, src, dst, arrival, only), vertex in by_name.items():
        later = seq + counts[_Channel(group, src, dst)]
        successor[vertex] = by_name.get((group, later, src, dst, arrival, only), -1)
    return Repeat(steps_before=before, successor=successor, period_ns=plan.period_ns)


def _operations_per_step(operations: pl.DataFrame) -> Counter[_Channel]:
    """How many operations of every channel a step has."""
    once = operations.unique(["group", "src_rank", "dst_rank", "seq"])
    counted = once.group_by("group", "src_rank", "dst_rank").len()
    return Counter(
        {_Channel(group, src, dst): count for group, src, dst, count in counted.iter_rows()}
    )


class Known(NamedTuple):
    """Vertices of one operation on one sandbox rank, and its transfer."""

    arrival: int | None
    ready: int | None
    transfer_ns: int


class PlannedWorld:
    """`VirtualWorld`, addressed by the names of operations.

    Not thread-safe: whoever uses it from several threads holds a lock.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._world = VirtualWorld(plan.boundary, plan.sandbox_members, plan.repeat)
        self._known = _known(plan)
        last = plan.operations.filter(pl.col("step") == plan.steps[-1]) if plan.steps else None
        self._counts = _operations_per_step(last) if last is not None else Counter()
        self._first_unseen = {
            _Channel(group, src, dst): seq + 1
            for group, src, dst, seq in plan.operations.group_by("group", "src_rank", "dst_rank")
            .agg(pl.col("seq").max())
            .iter_rows()
        }

    # `round_`: which repetition of the last step it is, with the key of the operation in that
    # step; None: the key counts on.

    def known_to(self, rank: int) -> list[Known]:
        """The graph's operations of a sandbox rank."""
        return [known for (_, member), known in self._known.items() if member == rank]

    def is_boundary(self, key: OpKey, rank: int, round_: int | None = None) -> bool:
        """Whether virtual ranks take part in this operation of a sandbox rank."""
        return self._find(key, rank, round_) is not None

    def transfer_ns(self, key: OpKey, rank: int, round_: int | None = None) -> int:
        """How long the operation takes a sandbox rank once all are there."""
        return self.located(key, rank, round_)[0].transfer_ns

    def forget(self, before_round: int) -> None:
        """Drop what happened in earlier repetitions than this one; see `VirtualWorld.forget`."""
        self._world.forget(before_round)

    def arrived(
        self, key: OpKey, rank: int, time_ns: int, round_: int | None = None
    ) -> list[tuple[Place, int]]:
        """A sandbox rank has arrived; times since the plan's origin.

        Returns all places that are ready now, as `VirtualWorld.arrived`.

        Raises:
            PlanError: the operation is no boundary operation, or the rank was there already.
        """
        known, place = self.located(key, rank, round_)
        settled = []
        for vertex in (known.arrival, known.ready):
            if vertex is not None:
                settled += self._world.arrived(vertex, time_ns, place)
        return settled

    def ready_ns(self, key: OpKey, rank: int, round_: int | None = None) -> int | None:
        """When all that this rank waits for are there; None while that is not known."""
        known, place = self.located(key, rank, round_)
        if known.ready is None:
            # Nobody keeps this rank waiting: it is ready when it arrives.
            return None if known.arrival is None else self._world.ready_ns(known.arrival, place)
        return self._world.ready_ns(known.ready, place)

    def located(self, key: OpKey, rank: int, round_: int | None) -> tuple[Known, int]:
        """An operation's vertices, and its round.

        Raises:
            PlanError: the operation is no boundary operation.
        """
        found = self._find(key, rank, round_)
        if found is None:
            called = group_labels(self.plan.groups).get(key.group, key.group)
            raise PlanError(
                f"the plan has no operation [group={called} seq={key.seq}] "
                f"between rank {rank} and virtual ranks",
                hint="the program does something else than when it was collected; collect again",
            )
        return found

    def _find(self, key: OpKey, rank: int, round_: int | None) -> tuple[Known, int] | None:
        if round_ is not None:
            known = self._known.get((key, rank))
            return None if known is None else (known, round_)
        channel = _Channel(key.group, key.sender, key.receiver)
        end, count = self._first_unseen.get(channel, 0), self._counts[channel]
        round_ = 0
        if key.seq >= end and count:
            round_ = (key.seq - end) // count + 1
            key = key._replace(seq=key.seq - round_ * count)
        known = self._known.get((key, rank))
        return None if known is None else (known, round_)


def _known(plan: Plan) -> Mapping[tuple[OpKey, int], Known]:
    known: dict[tuple[OpKey, int], Known] = {}
    columns = ("vertex", "rank", "group", "seq", "src_rank", "dst_rank", "arrival", "transfer_ns")
    for vertex, rank, group, seq, src, dst, arrival, transfer in plan.operations.select(
        columns
    ).iter_rows():
        name = OpKey(group, seq, src, dst), rank
        old = known.get(name, Known(None, None, transfer or 0))
        known[name] = old._replace(**{"arrival" if arrival else "ready": vertex})
    return known
