"""When would the virtual ranks have arrived?  The plan of a run, compiled from a calibrated graph.

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

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.propagation import propagate
from prismreplay.errors import PlanError

__all__ = ["Boundary", "VertexKind", "VirtualWorld", "compile_boundary", "members_by_vertex"]

ORIGIN = 0
"""The first vertex: the beginning of time, ready at 0."""


LONGEST_LABEL = 32
"""Default of `compile_boundary`: more are rare, and fewer would add vertices."""


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
    graph: Graph, sandbox: NDArray[np.bool_], *, longest_label: int = LONGEST_LABEL
) -> Boundary:
    """What the virtual rows of a graph mean for the sandbox rows.

    Args:
        graph: a calibrated graph; durations of sandbox rows are not used.
        sandbox: bool[n], rows of sandbox ranks.
        longest_label: sources that one time may depend on before a junction takes their place.

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


@dataclass(eq=False)
class VirtualWorld:
    """The virtual ranks of one run: told when sandbox ranks arrive, it says when all are there.

    `sandbox_members` of a vertex: how many arrivals of sandbox ranks it takes, at least one.
    Times are in nanoseconds since the graph's origin, on whatever clock the run uses.
    """

    boundary: Boundary
    sandbox_members: Mapping[int, int]
    _ready: dict[int, int] = field(init=False)
    _absent: dict[int, int] = field(init=False)
    _latest: dict[int, int] = field(init=False, default_factory=dict)
    _blocked: dict[int, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ready = {ORIGIN: 0}
        self._absent = dict(self.sandbox_members)

    def arrived(self, vertex: int, time_ns: int) -> list[tuple[int, int]]:
        """A sandbox rank has arrived at a vertex.

        Returns the vertices that are ready now, with the time at which they are, in order:
        this one, and those that were waiting for it.  Empty while others are missing.

        Raises:
            PlanError: more arrivals than the vertex has sandbox members.
        """
        absent = self._absent.get(vertex, 0)
        if absent < 1:
            raise PlanError(f"vertex {vertex} of the plan has all its sandbox members already")
        self._absent[vertex] = absent - 1
        self._latest[vertex] = max(time_ns, self._latest.get(vertex, time_ns))
        return self._settle([vertex])

    def ready_ns(self, vertex: int) -> int | None:
        """When all members of a vertex are there; None while that is not known."""
        return self._ready.get(vertex)

    def virtual_arrival_ns(self, vertex: int) -> int | None:
        """When the last virtual member arrives; None while that is not known."""
        latest, missing = self._arrival(vertex)
        return latest if missing is None else None

    def _arrival(self, vertex: int) -> tuple[int, int | None]:
        """Latest arrival over the edges, and a vertex that it still depends on, if any."""
        plan = self.boundary
        latest = 0
        for edge in range(plan.edge_offsets[vertex], plan.edge_offsets[vertex + 1]):
            source = int(plan.edge_source[edge])
            ready = self._ready.get(source)
            if ready is None:
                if plan.kind[source] != VertexKind.JUNCTION:
                    return 0, source
                self._settle([source])
                ready = self._ready.get(source)
                if ready is None:
                    return 0, source
            latest = max(latest, ready + int(plan.edge_weight_ns[edge]))
        return latest, None

    def _settle(self, candidates: Iterable[int]) -> list[tuple[int, int]]:
        """Decide what can be decided, starting from some vertices."""
        settled: list[tuple[int, int]] = []
        queue = list(candidates)
        heapq.heapify(queue)
        while queue:
            vertex = heapq.heappop(queue)
            if vertex in self._ready or self._absent.get(vertex, 0) > 0:
                continue
            if self.boundary.kind[vertex] != VertexKind.JUNCTION and vertex not in self._latest:
                continue
            latest, missing = self._arrival(vertex)
            if missing is not None:
                self._blocked.setdefault(missing, []).append(vertex)
                continue
            self._ready[vertex] = max(latest, self._latest.get(vertex, 0))
            if self.boundary.kind[vertex] != VertexKind.JUNCTION:
                settled.append((vertex, self._ready[vertex]))
            for waiting in self._blocked.pop(vertex, ()):
                heapq.heappush(queue, waiting)
        return settled


def members_by_vertex(
    boundary: Boundary, graph: Graph, sandbox: Sequence[bool] | NDArray[np.bool_]
) -> dict[int, int]:
    """How many sandbox rows each vertex waits for; what `VirtualWorld` takes."""
    chosen = graph.instance[np.asarray(sandbox) & (graph.instance >= 0)]
    counts = np.bincount(chosen, minlength=graph.instances)
    members = {v: int(counts[g]) for g, v in boundary.vertex_of_instance.items()}
    return members | dict.fromkeys(boundary.vertex_of_event.values(), 1)
