"""When does every operation start?  Longest-path propagation over the execution graph.

The model, exact in int64 nanoseconds:

    start(n)        = max( release(n), end(p) + lag(p, n) for every dependency p )
    computation:      end(n) = start(n) + duration(n)
    member n of g:    ready(g) = max( start(m) for every member m of g )
                      end(n) = ready(g) + duration(n),   wait(n) = ready(g) - start(n)

The functions of the section "Definition" state this over networkx, for reading and as the
oracle of the tests.  Two engines compute the same, to the nanosecond: `python_engine` (no
start-up cost) and `array_engine` (compiled, tens of nanoseconds a row).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from prismcalib.errors import CalibError
from prismcalib.graph import MAX_TOTAL_NS, Graph, Int32Array, Int64Array
from prismcalib.stall import cycle_error, missing_member_error

if TYPE_CHECKING:
    import networkx as nx

__all__ = [
    "BatchTiming",
    "Engine",
    "Timing",
    "critical_rows",
    "critical_steps",
    "pick_engine",
    "propagate",
    "propagate_batch",
    "slack",
]

Engine = Literal["auto", "networkx", "python", "array"]

_Forward = Callable[[Graph, Int64Array | None], tuple[Int64Array, Int64Array, Int32Array]]
_Backward = Callable[[Graph, Int32Array, Int64Array, Int64Array], Int64Array]

# Rows from which on the compiled engine wins although importing it costs most of a second.
_ARRAY_FROM_ROWS = 200_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Timing:
    """Start and end of all n rows of a graph.

    Attributes:
        start_ns: int64[n]; of a sync member the time it arrives and begins to wait.
        end_ns: int64[n].
        duration_ns: int64[n], the durations that were propagated.
        order: int32[n], all rows in an order of completion: after their dependencies, the
            members of a sync instance next to each other.
    """

    start_ns: Int64Array
    end_ns: Int64Array
    duration_ns: Int64Array
    order: Int32Array

    @property
    def ready_ns(self) -> Int64Array:
        """int64[n], when the own duration began: arrival of the last member, else the start."""
        return self.end_ns - self.duration_ns

    @property
    def wait_ns(self) -> Int64Array:
        """int64[n], time a sync member waited for the last member; 0 for computation."""
        return self.ready_ns - self.start_ns

    @property
    def makespan_ns(self) -> int:
        """Time from the first start to the last end; 0 for an empty graph."""
        if not len(self.end_ns):
            return 0
        return int(self.end_ns.max()) - int(self.start_ns.min())


def propagate(graph: Graph, engine: Engine = "auto") -> Timing:
    """Earliest start and end of every row.

    Args:
        graph: the operations and what they wait for.
        engine: all give equal times; `auto` takes the fastest for the size.

    Raises:
        MissingMemberError: a sync instance can never complete.
        CycleError: operations wait for each other in a circle; one is named.
    """
    missing = missing_member_error(graph)
    if missing is not None:
        raise missing
    # Engines count from 0 upwards; only releases can lie below.
    origin = 0
    release = graph.release_ns
    if release is not None and len(release) and release.min() < 0:
        origin = int(release.min())
        release = release - origin
    start, end, order = _passes(engine, graph.rows)[0](graph, release)
    if len(order) < graph.rows:
        raise cycle_error(graph, order)
    if origin:
        start += origin
        end += origin
    return Timing(start_ns=start, end_ns=end, duration_ns=graph.duration_ns, order=order)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchTiming:
    """What K propagations of one graph with different durations give.

    Attributes:
        begin_ns: the first start; durations do not change it, so it is the same for all.
        last_end_ns: int64[K], the last end over all rows.
        step_end_ns: int64[K, S], the last end over the rows of each step (`begin_ns` for a
            step without rows); None if no steps were given.
        start_ns, end_ns: int64[n, K], all times; None unless they were asked for.
    """

    begin_ns: int
    last_end_ns: Int64Array
    step_end_ns: Int64Array | None = None
    start_ns: Int64Array | None = None
    end_ns: Int64Array | None = None

    @property
    def makespan_ns(self) -> Int64Array:
        """int64[K], time from the first start to the last end."""
        return self.last_end_ns - self.begin_ns

    @property
    def step_ns(self) -> Int64Array:
        """int64[K, S], duration of every step: from the end of the steps before to its own.

        The first step begins with the first start.  A step that ends before an earlier one
        takes no time.
        """
        if self.step_end_ns is None:
            raise CalibError("no steps were given to propagate_batch")
        ends = np.maximum.accumulate(self.step_end_ns, axis=1)
        return np.diff(ends, axis=1, prepend=self.begin_ns)


def propagate_batch(
    graph: Graph,
    duration_ns: Int64Array,
    *,
    steps: Int32Array | None = None,
    order: Int32Array | None = None,
    times: bool = False,
    engine: Engine = "auto",
) -> BatchTiming:
    """Propagate one graph with K sets of durations at once, far faster than one by one.

    Args:
        graph: the operations and what they wait for; its own durations are not used.
        duration_ns: int64[n, K] >= 0, one column per scenario or sample.  C order is fastest.
        steps: int[n], number of the step of each row, from 0; -1: in no step.  Steps are
            counted up to the largest number.
        order: `propagate(graph).order`, if it is known already; saves one propagation.
        times: keep start and end of all rows in all K scenarios (16 n K bytes).
        engine: all give equal times; `auto` takes the fastest for the size.

    Raises:
        CalibError: shapes or signs are wrong.
        MissingMemberError, CycleError: as `propagate`.
    """
    durations = _batch_durations(graph, duration_ns)
    step, step_count = _step_numbers(graph, steps)
    scenarios = durations.shape[1]
    chosen = pick_engine(graph.rows, scenarios) if engine == "auto" else engine
    if order is None:
        order = propagate(graph, chosen).order
    elif len(order) != graph.rows:
        raise CalibError(f"the order has {len(order)} entries for {graph.rows} rows")
    free = np.diff(graph.dep_offsets) == 0
    release = graph.release_ns
    begin = 0 if release is None or not graph.rows else int(release[free].min())
    origin = min(begin, 0) if release is None or not graph.rows else min(0, int(release.min()))
    if origin and release is not None:
        release = release - origin

    if chosen == "array":
        from prismcalib import array_engine

        last, step_end, start, end = array_engine.replay(
            graph, release, durations, order, step, step_count, times=times
        )
    else:
        last = np.full(scenarios, begin - origin, np.int64)
        step_end = np.full((scenarios, step_count), begin - origin, np.int64)
        start, end = (np.empty((graph.rows, scenarios if times else 0), np.int64) for _ in "se")
        for column in range(scenarios):
            one = replace(graph, duration_ns=durations[:, column], release_ns=release)
            first_times, last_times, _ = _passes(chosen, graph.rows)[0](one, release)
            last[column] = last_times.max(initial=begin - origin)
            np.maximum.at(step_end[column], step[step >= 0], last_times[step >= 0])
            if times:
                start[:, column], end[:, column] = first_times, last_times
    return BatchTiming(
        begin_ns=begin,
        last_end_ns=last + origin,
        step_end_ns=None if steps is None else np.maximum(step_end + origin, begin),
        start_ns=start + origin if times else None,
        end_ns=end + origin if times else None,
    )


def slack(graph: Graph, timing: Timing, engine: Engine = "auto") -> Int64Array:
    """int64[n]: how much later each row could start without a later end of the whole graph.

    The slack of a sync member includes its wait.  `timing` must be `propagate(graph)`.
    """
    backward = _passes(engine, graph.rows)[1]
    return backward(graph, timing.order, timing.start_ns, timing.end_ns)


def critical_rows(graph: Graph, timing: Timing) -> list[int]:
    """Rows of one longest path through all ranks, first to last; all have slack 0.

    The path ends at the lowest of the rows that end last.  From a sync member that waited it
    goes to the last member to arrive, from any other row to a dependency that ended just in
    time; of several it takes the lowest row.  It begins at a row that no dependency held up.
    The time from the start of one row of the path to the start of the next is what the path
    spends there, transfers included.
    """
    return [row for row, _ in critical_steps(graph, timing)]


def critical_steps(graph: Graph, timing: Timing) -> list[tuple[int, int]]:
    """The path of `critical_rows` as pairs (row reached, row left by).

    The two differ where the path changes ranks inside a sync instance: it reaches the instance
    at the last member to arrive and leaves it at the member whose end mattered.  Of a
    timing only start, end and duration are used.
    """
    if not graph.rows:
        return []
    start, end = timing.start_ns, timing.end_ns
    last_arrival = _last_arrivals(graph, timing)
    row = int(end.argmax())
    steps: list[tuple[int, int]] = []
    while True:
        left_by = row
        if graph.instance[row] >= 0 and start[row] + graph.duration_ns[row] < end[row]:
            row = int(last_arrival[graph.instance[row]])
        steps.append((row, left_by))
        deps = graph.deps(row)
        in_time = deps[end[deps] + graph.lags(row) == start[row]]
        if not len(in_time):
            steps.reverse()
            return steps
        row = int(in_time.min())


def pick_engine(rows: int, passes: int = 1) -> Literal["python", "array"]:
    """The fastest engine for `passes` propagations of a graph with `rows` rows."""
    return "array" if rows * passes >= _ARRAY_FROM_ROWS else "python"


def _passes(engine: Engine, rows: int) -> tuple[_Forward, _Backward]:
    """Forward and backward pass of an engine, imported only now that it is needed."""
    chosen = pick_engine(rows) if engine == "auto" else engine
    if chosen == "array":
        from prismcalib import array_engine

        return array_engine.forward, array_engine.backward
    if chosen == "python":
        from prismcalib import python_engine

        return python_engine.forward, python_engine.backward
    if chosen == "networkx":
        return _define_forward, _define_backward
    raise CalibError(f"no engine {engine!r}", hint="use auto, networkx, python or array")


def _batch_durations(graph: Graph, duration_ns: Int64Array) -> Int64Array:
    """The durations as a read-only, C-contiguous int64[n, K]."""
    given = np.asarray(duration_ns)
    if given.ndim != 2 or len(given) != graph.rows or given.dtype.kind not in "iu":
        raise CalibError(
            f"durations of a batch are integers of the shape ({graph.rows}, K), "
            f"not {given.dtype}{given.shape}",
            where="duration_ns",
        )
    durations = np.ascontiguousarray(given, np.int64).view()
    durations.flags.writeable = False
    if not durations.size:
        return durations
    if durations.min() < 0:
        row, column = divmod(int(durations.argmin()), durations.shape[1])
        raise CalibError(
            f"{graph.label(row)} lasts {durations[row, column]} ns in column {column}",
            where="duration_ns",
        )
    longest = float(durations.sum(axis=0, dtype=np.float64).max()) + graph.idle_ns
    if longest >= MAX_TOTAL_NS:
        raise CalibError(
            f"all times together, {longest:.3g} ns, overflow int64", where="duration_ns"
        )
    return durations


def _step_numbers(graph: Graph, steps: Int32Array | None) -> tuple[Int32Array, int]:
    """Step of every row as int32[n] (-1: none), and how many steps there are."""
    if steps is None:
        return np.full(graph.rows, -1, np.int32), 0
    step = np.ascontiguousarray(steps, np.int32)
    if step.shape != (graph.rows,) or (graph.rows and step.min() < -1):
        raise CalibError(
            f"steps are numbers from 0 (or -1) of {graph.rows} rows, not {step.shape}",
            where="steps",
        )
    return step, int(step.max(initial=-1)) + 1


def _last_arrivals(graph: Graph, timing: Timing) -> Int32Array:
    """int32[G], the lowest row among the members that arrive last."""
    rows = np.flatnonzero((graph.instance >= 0) & (timing.start_ns == timing.ready_ns))
    arrivals = np.zeros(graph.instances, np.int32)
    # Of repeated indices numpy keeps the last assignment, hence the descending order.
    arrivals[graph.instance[rows[::-1]]] = rows[::-1]
    return arrivals


# Definition ---------------------------------------------------------------------------------


def _contract(graph: Graph) -> nx.DiGraph[int]:
    """The graph with every sync instance contracted to one vertex.

    A computation is the vertex of its row number, sync instance g is the vertex -1 - g; the
    vertex attribute `rows` lists what it stands for.
    """
    import networkx as nx

    vertex = np.where(graph.instance < 0, np.arange(graph.rows), -1 - graph.instance).tolist()
    contracted: nx.DiGraph[int] = nx.DiGraph()
    for row in range(graph.rows):
        contracted.add_node(vertex[row])
        contracted.nodes[vertex[row]].setdefault("rows", []).append(row)
    for row in range(graph.rows):
        contracted.add_edges_from((vertex[dep], vertex[row]) for dep in graph.deps(row))
    return contracted


def _define_forward(
    graph: Graph, release: Int64Array | None
) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Earliest times in topological order; stops at a cycle."""
    import networkx as nx

    contracted = _contract(graph)
    start = np.zeros(graph.rows, np.int64) if release is None else release.copy()
    end = np.zeros(graph.rows, np.int64)
    order: list[int] = []
    try:
        for vertex in nx.topological_sort(contracted):
            members = contracted.nodes[vertex]["rows"]
            for row in members:
                for dep, lag in zip(graph.deps(row), graph.lags(row), strict=True):
                    start[row] = max(start[row], end[dep] + lag)
            ready = max(start[row] for row in members)
            for row in members:
                end[row] = ready + graph.duration_ns[row]
            order += members
    except nx.NetworkXUnfeasible:
        pass  # The caller sees that rows are left over.
    return start, end, np.array(order, np.int32)


def _define_backward(
    graph: Graph, _order: Int32Array, start: Int64Array, end: Int64Array
) -> Int64Array:
    """Latest times in reverse topological order, minus the earliest ones."""
    import networkx as nx

    contracted = _contract(graph)
    latest_end = np.full(graph.rows, end.max() if graph.rows else 0)
    latest_start = np.zeros(graph.rows, np.int64)
    for vertex in reversed(list(nx.topological_sort(contracted))):
        members = contracted.nodes[vertex]["rows"]
        latest_ready = min(latest_end[row] - graph.duration_ns[row] for row in members)
        for row in members:
            latest_start[row] = latest_ready
            for dep, lag in zip(graph.deps(row), graph.lags(row), strict=True):
                latest_end[dep] = min(latest_end[dep], latest_ready - lag)
    return latest_start - start
