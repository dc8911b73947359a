"""When would the virtual ranks have arrived?  Where sandbox and virtual ranks meet.

A run has a few *sandbox* ranks, which execute; all others are virtual.  The two meet only at
*boundary* operations: sync instances with members of both sorts.  What a virtual rank does
between two of them is known, so the time at which the virtual members of a boundary operation
arrive is a max-plus expression of when earlier ones were ready:

    arrival(b) = max over edges (a, weight) of b: ready(a) + weight
    ready(b)   = max( arrival(b), arrival of every sandbox member )

`compile_plan` finds the edges in one pass over the graph and leaves out those that can never
decide; `VirtualWorld` evaluates them while the sandbox runs.  Its cost depends on the edges of
the plan, not on the size of the world.  Weights are exact int64 nanoseconds: fed with the
arrivals that a full propagation gives, the plan gives the times that propagation gives.

Where a label would be too long to be copied it becomes a *junction*: a vertex of the plan that
nobody arrives at.  Operations in which not everybody waits for everybody (eager sends, rooted
collectives, see `prismcalib.waiting`) have two vertices on a sandbox rank: its arrival, that
others wait for, and its readiness.

The method is the paper's section 6 (a virtual rank joins when it would have arrived), with the
arrival computed from the calibrated graph instead of replayed by a process per rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.propagation import propagate
from prismreplay.errors import PlanError

__all__ = [
    "Boundary",
    "Place",
    "Repeat",
    "VertexKind",
    "VirtualWorld",
    "compile_boundary",
]

Place = tuple[int, int]
"""A vertex, and the round in which it happens; see `Repeat`."""

ORIGIN = 0
"""The first vertex: the beginning of time, ready at 0."""


LONGEST_LABEL = 32
"""Default of `compile_boundary`: more are rare, and fewer would add vertices."""

LONGEST_SHARED = 3
"""The same where several ranks sync: one junction there spares each of them one of its own."""


class VertexKind(IntEnum):
    """What a vertex of the plan stands for."""

    ORIGIN = 0
    INSTANCE = 1
    """A sync instance with sandbox and virtual members."""
    JUNCTION = 2
    """The latest of several arrivals in the virtual world."""
    EVENT = 3
    """One row of a sandbox rank that a virtual rank waits for, or that waits for one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Boundary:
    """V vertices and E edges, in an order in which edges lead forward.

    Attributes:
        kind: int8[V], `VertexKind`.
        owner: int32[V]: the instance's number, the event's row in `Graph.expanded`, or -1.
        edge_offsets: int64[V + 1]; vertex v has the edges
            `edge_offsets[v]:edge_offsets[v + 1]`.
        edge_source: int32[E], vertices.
        edge_weight_ns: int64[E].
        origin_ns: time of the graph that the origin stands for.
    """

    kind: NDArray[np.int8]
    owner: Int32Array
    edge_offsets: Int64Array
    edge_source: Int32Array
    edge_weight_ns: Int64Array
    origin_ns: int = 0

    @property
    def vertices(self) -> int:
        """Number of vertices V, the origin included."""
        return len(self.kind)

    @property
    def edges(self) -> int:
        """Number of edges E."""
        return len(self.edge_source)

    @cached_property
    def vertex_of_instance(self) -> dict[int, int]:
        """Sync instance -> vertex."""
        return self._by_owner(VertexKind.INSTANCE)

    @cached_property
    def vertex_of_event(self) -> dict[int, int]:
        """Row of `Graph.expanded` -> vertex."""
        return self._by_owner(VertexKind.EVENT)

    def _by_owner(self, kind: VertexKind) -> dict[int, int]:
        found = np.flatnonzero(self.kind == kind)
        return dict(zip(self.owner[found].tolist(), found.tolist(), strict=True))


def compile_boundary(
    graph: Graph,
    sandbox: NDArray[np.bool_],
    *,
    longest_label: int = LONGEST_LABEL,
    longest_shared: int = LONGEST_SHARED,
) -> Boundary:
    """What the virtual rows of a graph mean for the sandbox rows.

    Args:
        graph: a calibrated graph; durations of sandbox rows are not used.
        sandbox: bool[n], rows of sandbox ranks.
        longest_label: sources that one time may depend on before a junction takes their place.
        longest_shared: the same of an operation of several virtual ranks.

    Raises:
        MissingMemberError, CycleError: as `propagate`.
        PlanError: a dependency between a sandbox and a virtual row that is no communication.
    """
    from prismcalib.compiling import read_only
    from prismreplay.boundary_engine import trace_labels

    full = graph.expanded
    mine = np.concatenate([sandbox, sandbox[graph.arriving]]) if full is not graph else sandbox
    mine = np.ascontiguousarray(mine, np.bool_)
    crossing = _crossing_rows(graph, full, mine)
    order = propagate(graph).order
    origin, release = 0, np.empty(0, np.int64)
    if full.release_ns is not None and full.rows:
        origin = int(full.release_ns.min())
        release = full.release_ns - origin
    lags = np.empty(0, np.int64) if full.dep_lag_ns is None else full.dep_lag_ns
    kind, owner, offsets, source, weight = trace_labels(
        read_only(order),
        full.dep_offsets,
        full.dep_rows,
        read_only(lags),
        read_only(release),
        full.duration_ns,
        full.instance,
        read_only(mine),
        read_only(crossing),
        longest_label,
        min(longest_shared, longest_label),
    )
    return _without_dead_ends(kind, owner, offsets, source, weight, origin)


def _crossing_rows(graph: Graph, full: Graph, mine: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Sandbox rows at either end of a dependency between a sandbox and a virtual row."""
    owner = np.repeat(np.arange(full.rows, dtype=np.int32), np.diff(full.dep_offsets))
    across = mine[owner] != mine[full.dep_rows]
    crossing = np.zeros(full.rows, np.bool_)
    ends = np.where(mine[owner[across]], owner[across], full.dep_rows[across])
    crossing[ends] = True
    arrivals = np.zeros(full.rows, np.bool_)
    arrivals[graph.rows :] = True
    arrivals[graph.arriving] = True
    wrong = np.flatnonzero(crossing & ~arrivals)
    if len(wrong):
        raise PlanError(
            f"{graph.label(int(wrong[0]))} and a row of a virtual rank depend on each other "
            "without a communication between them",
            hint="the trace has `xdeps` across this border; make both ranks sandbox ranks",
        )
    return crossing


def _without_dead_ends(
    kind: NDArray[np.int8],
    owner: Int32Array,
    offsets: Int64Array,
    source: Int32Array,
    weight: Int64Array,
    origin_ns: int,
) -> Boundary:
    """The plan without junctions from which no sandbox row is reached."""
    needed = kind != VertexKind.JUNCTION
    for vertex in range(len(kind) - 1, 0, -1):
        if needed[vertex]:
            needed[source[offsets[vertex] : offsets[vertex + 1]]] = True
    number = np.cumsum(needed, dtype=np.int64) - 1
    kept = np.repeat(needed, np.diff(offsets))
    counts = np.diff(offsets)[needed]
    return Boundary(
        kind=kind[needed],
        owner=owner[needed],
        edge_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        edge_source=number[source[kept]].astype(np.int32),
        edge_weight_ns=weight[kept],
        origin_ns=origin_ns,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Repeat:
    """How a run goes on after the last step of the graph: by doing that step again and again.

    A *round* is one more execution of the last step: round 0 is the one in the graph.

    Attributes:
        steps_before: int32[V], how many steps before the last one a vertex lies: 0 in the last, -1
            outside of all steps.
        successor: int32[V], the vertex that is the same operation one step later; -1 if none.
        period_ns: what a step takes in the graph.
    """

    steps_before: Int32Array
    successor: Int32Array
    period_ns: int

    def source(self, vertex: int, round_: int) -> Place | None:
        """Where a source of the last step lies when that step is repeated; None: nowhere.

        What lies s steps before the last one is, from round s on, that operation of the last step
        s rounds earlier. What is in no step happened once.
        """
        while round_ and self.steps_before[vertex] > 0:
            vertex = int(self.successor[vertex])
            if vertex < 0:
                return None
            round_ -= 1
        return vertex, 0 if self.steps_before[vertex] < 0 else round_


@dataclass(eq=False)
class VirtualWorld:
    """The virtual ranks of one run: told when sandbox ranks arrive, it says when all are there.

    `sandbox_members` of a vertex: how many arrivals of sandbox ranks it takes, at least one.
    Times are in nanoseconds since the graph's origin, on whatever clock the run uses. A place
    in time is a pair (vertex, round); without `repeat` there is only round 0.
    """

    boundary: Boundary
    sandbox_members: Mapping[int, int]
    repeat: Repeat | None = None
    _ready: dict[Place, int] = field(init=False, default_factory=dict)
    _absent: dict[Place, int] = field(init=False, default_factory=dict)
    _latest: dict[Place, int] = field(init=False, default_factory=dict)
    _blocked: dict[Place, list[Place]] = field(init=False, default_factory=dict)
    _edges: list[list[tuple[int, int]]] = field(init=False)
    _is_junction: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        plan = self.boundary
        pairs = list(zip(plan.edge_source.tolist(), plan.edge_weight_ns.tolist(), strict=True))
        offsets = plan.edge_offsets.tolist()
        self._edges = [pairs[a:b] for a, b in itertools.pairwise(offsets)]
        self._is_junction = (plan.kind == VertexKind.JUNCTION).tolist()

    def arrived(self, vertex: int, time_ns: int, round: int = 0) -> list[tuple[Place, int]]:
        """A sandbox rank has arrived at a vertex.

        Returns the places that are ready now, with the time at which they are: this one, and
        those that were waiting for it.  Empty while others are missing.

        Raises:
            PlanError: more arrivals than the vertex has sandbox members.
        """
        place = (vertex, round)
        absent = self._absent.get(place, self.sandbox_members.get(vertex, 0))
        if absent < 1:
            raise PlanError(
                f"vertex {vertex} of the plan has all its sandbox members already",
                hint="the program makes an operation more often than its graph has it: collect it "
                "again, with as many steps as are run; with --plan, compile that again, too",
            )
        self._absent[place] = absent - 1
        self._latest[place] = max(time_ns, self._latest.get(place, time_ns))
        return self._settle(place) if absent == 1 else []

    def ready_ns(self, vertex: int, round: int = 0) -> int | None:
        """When all members of a vertex are there; None while that is not known."""
        return self._ready.get((vertex, round))

    def forget(self, before_round: int) -> None:
        """Drop what no later place asks for; keeps a long run's memory flat.

        What is in the graph itself stays: what follows the training depends on it.
        """
        for table in (self._ready, self._absent, self._latest):
            for place in [place for place in table if 0 < place[1] < before_round]:
                if place not in self._blocked:
                    del table[place]

    def _arrival(self, place: Place) -> tuple[int, Place | None]:
        """Latest arrival over the edges, and a place that it still depends on, if any."""
        # Chains of junctions are long: what is under way is kept here, not on Python's stack.
        under_way = [place]
        while True:
            latest, junctions, missing = self._over_edges(*under_way[-1])
            if missing is not None:
                return 0, missing
            if junctions:
                under_way += junctions
                continue
            done = under_way.pop()
            if not under_way:
                return latest, None
            self._ready[done] = latest

    def _over_edges(self, vertex: int, round_: int) -> tuple[int, list[Place], Place | None]:
        """Latest arrival over the edges; junctions to see to first; or a place that is missing."""
        ready, latest = self._ready, 0
        junctions: list[Place] = []
        for source, weight in self._edges[vertex]:
            if source == ORIGIN:
                shift = round_ * self.repeat.period_ns if self.repeat else 0
                latest = max(latest, weight + shift)
                continue
            before = (source, 0) if round_ == 0 else self._canonical(source, round_)
            if before is None:
                continue
            there = ready.get(before)
            if there is not None:
                if there + weight > latest:
                    latest = there + weight
            elif self._is_junction[before[0]]:
                junctions.append(before)
            else:
                return 0, [], before
        return latest, junctions, None

    def _canonical(self, vertex: int, round_: int) -> Place | None:
        """The place at which a source of a repeated step really was."""
        if self.repeat is None:
            return vertex, 0
        if self._is_junction[vertex]:
            return vertex, round_
        return self.repeat.source(vertex, round_)

    def _settle(self, place: Place) -> list[tuple[Place, int]]:
        """Decide what can be decided now that all sandbox members are at a place."""
        settled: list[tuple[Place, int]] = []
        queue = [place]
        while queue:
            place = queue.pop()
            latest, missing = self._arrival(place)
            if missing is not None:
                self._blocked.setdefault(missing, []).append(place)
                continue
            self._ready[place] = max(latest, self._latest[place])
            settled.append((place, self._ready[place]))
            queue += self._blocked.pop(place, ())
        return settled
