"""When does every operation start?  Longest-path propagation over the execution graph.

The model, exact in int64 nanoseconds:

    start(n)        = max( release(n), end(p) + lag(p, n) for every dependency p )
    computation:      end(n) = start(n) + duration(n)
    member n of g:    ready(g) = max( start(m) for every member m of g )
                      end(n) = ready(g) + duration(n),   wait(n) = ready(g) - start(n)

Rows that wait for some rows only (`Graph.waits`) have ready(n) = max( start(n), start(m) for
every m that n waits for ) instead.

`prismcalib.definition` states this over networkx, for reading and as the oracle of the tests.
Two engines compute the same, to the nanosecond: `python_engine` (no
start-up cost) and `array_engine` (compiled, tens of nanoseconds a row).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from prismcalib.errors import CalibError
from prismcalib.graph import MAX_TOTAL_NS, Graph, Int32Array, Int64Array
from prismcalib.stall import cycle_error, require_members
from prismcalib.step_times import step_durations

__all__ = [
    "BatchTiming",
    "Engine",
    "Timing",
    "critical_arrays",
    "critical_rows",
    "critical_steps",
    "pick_engine",
    "propagate",
    "propagate_batch",
    "slack",
]

Engine = Literal["auto", "networkx", "python", "array"]
"""What computes: networkx to be understood, plain Python for small graphs, compiled for large."""

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
            members of a sync instance next to each other.  Of a graph with waits: the order of
            all rows of `Graph.expanded`.
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
    require_members(graph)
    full = graph.expanded
    # Engines count from 0 upwards; only releases can lie below.
    origin = 0
    release = full.release_ns
    if release is not None and len(release) and release.min() < 0:
        origin = int(release.min())
        release = release - origin
    start, end, order = _passes(engine, full.rows)[0](full, release)
    if len(order) < full.rows:
        raise cycle_error(graph, order)
    if origin:
        start += origin
        end += origin
    return Timing(
        start_ns=_without_arrivals(graph, start),
        end_ns=end[: graph.rows],
        duration_ns=graph.duration_ns,
        order=order,
    )


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
        return step_durations(self.begin_ns, self.step_end_ns)


def propagate_batch(
    graph: Graph,
    duration_ns: Int64Array,
    *,
    lag_ns: Int64Array | None = None,
    steps: Int32Array | None = None,
    order: Int32Array | None = None,
    times: bool = False,
    engine: Engine = "auto",
) -> BatchTiming:
    """Propagate one graph with K sets of durations at once, far faster than one by one.

    Args:
        graph: the operations and what they wait for; its own durations are not used.
        duration_ns: int64[n, K] >= 0, one column per scenario or sample.  C order is fastest.
        lag_ns: int64[e, K] >= 0, lags of every scenario; without, those of the graph.
        steps: int[n], number of the step of each row, from 0; -1: in no step.  Steps are
            counted up to the largest number.
        order: `propagate(graph).order`, if it is known already; saves one propagation.
        times: keep start and end of all rows in all K scenarios (16 n K bytes).
        engine: all give equal times; `auto` takes the fastest for the size.

    Raises:
        CalibError: shapes or signs are wrong.
        MissingMemberError, CycleError: as `propagate`.
    """
    full = graph.expanded
    durations, lags = _batch_times(graph, duration_ns, lag_ns)
    step, step_count = _step_numbers(graph, steps)
    scenarios = durations.shape[1]
    chosen = pick_engine(full.rows, scenarios) if engine == "auto" else engine
    if order is None:
        order = propagate(graph, chosen).order
    elif len(order) != full.rows:
        raise CalibError(f"the order has {len(order)} entries for {full.rows} rows")
    release = full.release_ns
    begin = origin = 0
    if release is not None and full.rows:
        begin = int(release[np.diff(full.dep_offsets) == 0].min())
        origin = min(0, int(release.min()))
        release = release - origin

    if chosen == "array":
        from prismcalib import replay_engine

        last, step_end, start, end = replay_engine.replay(
            full, release, durations, lags, order, step, step_count, times=times
        )
    else:
        last = np.zeros(scenarios, np.int64)
        step_end = np.zeros((scenarios, step_count), np.int64)
        start, end = (np.empty((full.rows, scenarios if times else 0), np.int64) for _ in "se")
        forward, in_step = _passes(chosen, full.rows)[0], step >= 0
        for column in range(scenarios):
            lag = None if lags is None else lags[:, min(column, lags.shape[1] - 1)]
            one = replace(full, duration_ns=durations[:, column], dep_lag_ns=lag)
            first_times, last_times, _ = forward(one, release)
            last[column] = last_times.max(initial=0)
            np.maximum.at(step_end[column], step[in_step], last_times[in_step])
            if times:
                start[:, column], end[:, column] = first_times, last_times
    return BatchTiming(
        begin_ns=begin,
        last_end_ns=np.maximum(last + origin, begin),
        step_end_ns=None if steps is None else np.maximum(step_end + origin, begin),
        start_ns=_without_arrivals(graph, _moved(start, origin)) if times else None,
        end_ns=_moved(end, origin)[: graph.rows] if times else None,
    )


def _moved(times: Int64Array, origin: int) -> Int64Array:
    return times + origin if origin else times


def slack(graph: Graph, timing: Timing, engine: Engine = "auto") -> Int64Array:
    """int64[n]: how much later each row could start without a later end of the whole `graph`.

    The slack of a sync member includes its wait.  `timing` must be `propagate(graph)`,
    which also says what an `engine` is.
    """
    backward = _passes(engine, graph.rows)[1]
    start, end = timing.start_ns, timing.end_ns
    if graph.wait_offsets is not None:
        # In the expanded graph a row that waits starts when it is ready.
        waits = np.diff(graph.wait_offsets) > 0
        arrived = start[graph.arriving]
        start = np.append(np.where(waits, timing.ready_ns, start), arrived)
        end = np.append(end, arrived)
    return _without_arrivals(graph, backward(graph.expanded, timing.order, start, end))


def critical_rows(graph: Graph, timing: Timing) -> list[int]:
    """Rows of one longest path through all ranks, first to last; all have slack 0.

    `timing` must be `propagate(graph)` of the same `graph`. The path ends at the lowest of the rows that end last.  From a sync member that waited it
    goes to the last member to arrive, from any other row to a dependency that ended just in
    time; of several it takes the lowest row.  It begins at a row that no dependency held up.
    The time from the start of one row of the path to the start of the next is what the path
    spends there, transfers included.
    """
    return [row for row, _ in critical_steps(graph, timing)]


def critical_steps(graph: Graph, timing: Timing, engine: Engine = "auto") -> list[tuple[int, int]]:
    """The path of `critical_rows` as pairs (row reached, row left by).

    The two differ where the path changes ranks inside a sync instance: it reaches the instance
    at the last member to arrive and leaves it at the member whose end mattered.  Of a
    timing only start, end and duration are used.
    """
    reached, left_by = critical_arrays(graph, timing, engine)
    return list(zip(reached.tolist(), left_by.tolist(), strict=True))


def critical_arrays(
    graph: Graph, timing: Timing, engine: Engine = "auto", last_row: int | None = None
) -> tuple[Int32Array, Int32Array]:
    """The k pairs of `critical_steps` as two arrays int32[k]: rows reached, rows left by.

    `last_row`: the row to end at, instead of the one that ends last.
    """
    if not graph.rows:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    if (pick_engine(graph.rows) if engine == "auto" else engine) == "array":
        from prismcalib import replay_engine

        times = (timing.start_ns, timing.end_ns, timing.duration_ns)
        return replay_engine.walk(graph, *times, last_row)
    start, end, ready = timing.start_ns, timing.end_ns, timing.ready_ns
    last_arrival = _last_arrivals(graph, timing)
    row = int(end.argmax()) if last_row is None else last_row
    reached: list[int] = []
    left_by: list[int] = []
    while True:
        left_by.append(row)
        awaited = graph.waits(row)
        if start[row] < ready[row] and (graph.instance[row] >= 0 or len(awaited)):
            if graph.instance[row] >= 0:
                row = int(last_arrival[graph.instance[row]])
            else:
                row = int(awaited[start[awaited] == ready[row]].min())
        reached.append(row)
        deps = graph.deps(row)
        in_time = deps[end[deps] + graph.lags(row) == start[row]]
        if not len(in_time):
            return np.array(reached[::-1], np.int32), np.array(left_by[::-1], np.int32)
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
        from prismcalib import definition

        return definition.forward, definition.backward
    raise CalibError(f"no engine {engine!r}", hint="use auto, networkx, python or array")


def _without_arrivals(graph: Graph, values: Int64Array) -> Int64Array:
    """What the rows of the expanded graph say about the rows themselves: their arrivals do."""
    if graph.wait_rows is None:
        return values
    values[graph.arriving] = values[graph.rows :]
    return values[: graph.rows]


def _batch_times(
    graph: Graph, duration_ns: Int64Array, lag_ns: Int64Array | None
) -> tuple[Int64Array, Int64Array | None]:
    """Durations int64[n, K] and lags int64[e, K or 1] of `expanded`, C order, read-only."""
    durations = _checked("duration_ns", duration_ns, graph.rows)
    if lag_ns is not None:
        lags = _checked("lag_ns", lag_ns, len(graph.dep_rows))
        if lags.shape[1] != durations.shape[1]:
            raise CalibError(
                f"{lags.shape[1]} columns for {durations.shape[1]} scenarios", where="lag_ns"
            )
    elif graph.dep_lag_ns is not None:
        lags = graph.dep_lag_ns[:, None]
    else:
        lags = np.empty((0, 1), np.int64)
    longest = graph.idle_ns
    for times in (durations, lags):
        if times.size:
            longest += float(times.sum(axis=0, dtype=np.float64).max())
    if longest >= MAX_TOTAL_NS:
        raise CalibError(
            f"all times together, {longest:.3g} ns, overflow int64", where="duration_ns"
        )
    if graph.wait_rows is not None:
        # Arrivals last 0, and nothing lies between an arrival and what waits for it.
        arrivals = np.zeros((len(graph.arriving), durations.shape[1]), np.int64)
        durations = _frozen(np.concatenate([durations, arrivals]))
        source = graph.expanded_lag_source
        if len(lags):
            lags = np.where(source[:, None] >= 0, lags[source], 0)
    return durations, _frozen(lags) if len(lags) else None


def _checked(name: str, values: Int64Array, length: int) -> Int64Array:
    """A batch's times, two-dimensional and not negative."""
    given = np.asarray(values)
    if given.ndim != 2 or len(given) != length or given.dtype.kind not in "iu":
        raise CalibError(
            f"a batch needs integers of the shape ({length}, K), not {given.dtype}{given.shape}",
            where=name,
        )
    if given.size and given.min() < 0:
        entry, column = divmod(int(given.argmin()), given.shape[1])
        raise CalibError(
            f"entry {entry} is {given[entry, column]} ns in column {column}", where=name
        )
    return _frozen(given)


def _frozen(values: Int64Array) -> Int64Array:
    # One combination of layout and writability, so that numba compiles once.
    view = np.ascontiguousarray(values, np.int64).view()
    view.flags.writeable = False
    return view


def _step_numbers(graph: Graph, steps: Int32Array | None) -> tuple[Int32Array, int]:
    """Step of every row as int32[n] (-1: none), and how many steps there are."""
    if steps is None:
        return np.full(graph.expanded.rows, -1, np.int32), 0
    step = np.ascontiguousarray(steps, np.int32)
    if step.shape != (graph.rows,) or (graph.rows and step.min() < -1):
        raise CalibError(
            f"steps are numbers from 0 (or -1) of {graph.rows} rows, not {step.shape}",
            where="steps",
        )
    arrivals = np.full(graph.expanded.rows - graph.rows, -1, np.int32)
    return np.append(step, arrivals), int(step.max(initial=-1)) + 1


def _last_arrivals(graph: Graph, timing: Timing) -> Int32Array:
    """int32[G], the lowest row among the members that arrive last."""
    rows = np.flatnonzero((graph.instance >= 0) & (timing.start_ns == timing.ready_ns))
    arrivals = np.zeros(graph.instances, np.int32)
    # Of repeated indices numpy keeps the last assignment, hence the descending order.
    arrivals[graph.instance[rows[::-1]]] = rows[::-1]
    return arrivals
