"""Compiled loops over an order of completion that is known: many scenarios at once, the path.

Durations do not change what comes after what, so one order serves all scenarios.  Theirs are
the inner loops, over neighbouring memory: what the structure costs is paid once for `_BLOCK`
scenarios.
"""

from __future__ import annotations

import numpy as np

from prismcalib.compiling import AHEAD, NO_LAGS, NO_ROWS, NO_TIMES, compiled, read_only, will_read
from prismcalib.graph import Graph, Int32Array, Int64Array

__all__ = ["replay", "walk"]

# Scenarios of one pass of `replay`: their ends of one row fill two cache lines.
_BLOCK = 16


def replay(
    graph: Graph,
    release: Int64Array | None,
    durations: Int64Array,
    lags: Int64Array | None,
    order: Int32Array,
    step: Int32Array,
    step_count: int,
    *,
    times: bool,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Times of K scenarios in a known order of completion, `_BLOCK` scenarios a pass.

    Args:
        graph: its durations and lags are not used.
        release: int64[n] >= 0, or None for zeros.
        durations: int64[n, K], C order, read-only.
        lags: int64[e, K], or int64[e, 1] for all scenarios, C order, read-only; or None.
        order: of any propagation of the graph: durations do not change what comes after what.
        step: int32[n], -1: none.
        step_count: S, more than the largest step.
        times: fill start and end.

    Returns:
        last end int64[K], last end per step int64[K, S], start and end int64[n, K] (garbage
        unless `times`).
    """
    rows, scenarios = durations.shape
    width = scenarios if times else min(scenarios, _BLOCK)
    lags = NO_LAGS if lags is None else lags
    end = np.empty((rows, width), np.int64)
    start = np.empty((rows, scenarios if times else 0), np.int64)
    # Steps first, so that the scenarios of a pass lie together; row S: the last of all.
    last_end = np.zeros((step_count + 1, scenarios), np.int64)
    for first in range(0, scenarios, _BLOCK):
        _replay(
            read_only(order),
            durations,
            first,
            min(first + _BLOCK, scenarios),
            graph.dep_offsets,
            graph.dep_rows,
            lags,
            read_only(release),
            graph.instance,
            read_only(step),
            end,
            first if times else 0,
            last_end,
        )
    if times:
        _starts(graph.dep_offsets, graph.dep_rows, lags, read_only(release), end, start)
    return last_end[step_count], np.ascontiguousarray(last_end[:step_count].T), start, end


def walk(
    graph: Graph,
    start: Int64Array,
    end: Int64Array,
    duration: Int64Array,
    last_row: int | None = None,
) -> tuple[Int32Array, Int32Array]:
    """One longest path, see `prismcalib.propagation.critical_arrays`; n >= 1."""
    # No row is reached twice.
    steps = np.empty((2, graph.rows), np.int32)
    count = _walk(
        read_only(np.ascontiguousarray(duration)),
        graph.dep_offsets,
        graph.dep_rows,
        read_only(graph.dep_lag_ns),
        graph.instance,
        graph.instances,
        NO_TIMES if graph.wait_offsets is None else graph.wait_offsets,
        NO_ROWS if graph.wait_rows is None else graph.wait_rows,
        read_only(np.ascontiguousarray(start)),
        read_only(np.ascontiguousarray(end)),
        -1 if last_row is None else last_row,
        steps,
    )
    reached, left_by = steps[:, :count][:, ::-1].copy()
    return reached, left_by


# Kernels. numba reads the arrays' types at the call; `int(...)` widens row numbers to 64 bits.


@compiled
def _replay(
    order: Int32Array,
    duration: Int64Array,
    first: int,
    stop: int,
    offsets: Int64Array,
    deps: Int32Array,
    lags: Int64Array,
    release: Int64Array,
    instance: Int32Array,
    step: Int32Array,
    end: Int64Array,
    column: int,
    last_end: Int64Array,
) -> None:
    """Fill columns `column` ... of end with scenarios first ... stop - 1, and last_end."""
    rows = len(order)
    width = stop - first
    ready = np.empty(width, np.int64)
    steps = len(last_end) - 1
    position = 0
    while position < rows:
        if position + AHEAD < rows:
            ahead = order[position + AHEAD]
            will_read(offsets, ahead)
            will_read(instance, ahead)
            will_read(duration, ahead)
            nearer = order[position + AHEAD // 2]
            will_read(deps, offsets[nearer])
        row = order[position]
        number = instance[row]
        following = position + 1
        if number >= 0:
            while following < rows and instance[order[following]] == number:
                following += 1
        for q in range(width):
            ready[q] = 0
        for at in range(position, following):
            row = order[at]
            if len(release):
                for q in range(width):
                    ready[q] = max(ready[q], release[row])
            for edge in range(offsets[row], offsets[row + 1]):
                dep = int(deps[edge])
                if lags.shape[1] > 1:
                    for q in range(width):
                        ready[q] = max(ready[q], end[dep, column + q] + lags[edge, first + q])
                else:
                    lag = lags[edge, 0] if len(lags) else 0
                    for q in range(width):
                        ready[q] = max(ready[q], end[dep, column + q] + lag)
        for at in range(position, following):
            row = order[at]
            number = step[row]
            for q in range(width):
                time = ready[q] + duration[row, first + q]
                end[row, column + q] = time
                last_end[steps, first + q] = max(last_end[steps, first + q], time)
            if number >= 0:
                for q in range(width):
                    time = end[row, column + q]
                    last_end[number, first + q] = max(last_end[number, first + q], time)
        position = following


@compiled
def _starts(
    offsets: Int64Array,
    deps: Int32Array,
    lags: Int64Array,
    release: Int64Array,
    end: Int64Array,
    start: Int64Array,
) -> None:
    """Fill start of all rows and scenarios from the ends."""
    for row in range(len(start)):
        start[row, :] = release[row] if len(release) else 0
        for edge in range(offsets[row], offsets[row + 1]):
            dep = int(deps[edge])
            for q in range(start.shape[1]):
                lag = lags[edge, q if lags.shape[1] > 1 else 0] if len(lags) else 0
                start[row, q] = max(start[row, q], end[dep, q] + lag)


@compiled
def _walk(
    duration: Int64Array,
    offsets: Int64Array,
    deps: Int32Array,
    lags: Int64Array,
    instance: Int32Array,
    instances: int,
    wait_offsets: Int64Array,
    wait_rows: Int32Array,
    start: Int64Array,
    end: Int64Array,
    last_row: int,
    steps: Int32Array,
) -> int:
    """Fill steps with pairs (row reached, row left by) from the end; returns how many.

    The end is `last_row`, or the lowest of the rows that end last if that is -1.
    """
    rows = len(start)
    last_arrival = np.zeros(instances, np.int32)
    row = rows - 1
    for candidate in range(rows - 1, -1, -1):
        # Of ties the lowest row, hence from the last to the first.
        if end[candidate] >= end[row]:
            row = candidate
        if instance[candidate] >= 0 and start[candidate] == end[candidate] - duration[candidate]:
            last_arrival[instance[candidate]] = candidate
    count = 0
    row = row if last_row < 0 else last_row
    while row >= 0:
        steps[1, count] = row
        ready = end[row] - duration[row]
        if start[row] < ready:
            if instance[row] >= 0:
                row = int(last_arrival[instance[row]])
            elif len(wait_offsets):
                reached = row
                for edge in range(wait_offsets[row], wait_offsets[row + 1]):
                    if start[wait_rows[edge]] == ready:
                        awaited = int(wait_rows[edge])
                        reached = awaited if reached == row else min(reached, awaited)
                row = reached
        steps[0, count] = row
        count += 1
        before = -1
        for edge in range(offsets[row], offsets[row + 1]):
            dep = int(deps[edge])
            if end[dep] + (lags[edge] if len(lags) else 0) == start[row]:
                before = dep if before < 0 else min(before, dep)
        row = before
    return count
