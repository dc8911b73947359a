"""Propagation over the arrays themselves, compiled with numba: the engine for large graphs.

Importing this module imports numba (about half a second); the first call on a machine compiles
for a few seconds and keeps the result on disk.

Forward pass.  Every unfinished row sits in exactly one linked list: the waiters of *one* of
its unfinished dependencies, or the arrivals of its sync instance.  When a row ends, its waiters
are tried again; a waiter moves on to the next unfinished dependency, or it starts.  So neither
the reverse edges nor a count of unfinished dependencies is needed, each dependency is examined
at most twice, and the work per row stays in a few cache lines:

    end[row]     time of the end; before that, `-1 - k` with k - 1 the first waiter, k = 0: none
    start[row]   time of the start; before that, how many dependencies are known to have ended
    link[row]    next row of the list that holds this row, -1 at its end

Rows to try are taken from a stack: last in, first out keeps working on the rank whose rows
are in the cache.  What is left to wait for is memory, so each step asks for the row that comes
`AHEAD` places later on the same rank; that alone doubles the speed.
"""

from __future__ import annotations

import numpy as np

from prismcalib.compiling import AHEAD, compiled, read_only, will_read, will_write
from prismcalib.graph import Graph, Int32Array, Int64Array

__all__ = ["backward", "forward"]


def forward(graph: Graph, release: Int64Array | None) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Earliest times.

    Args:
        graph: has all members of its sync instances.
        release: int64[n] >= 0, or None for zeros.

    Returns:
        start and end, int64[n], and the finished rows in order of completion, int32: all
        rows, or fewer if the graph has a cycle.
    """
    start = np.empty(graph.rows, np.int64)
    end = np.empty(graph.rows, np.int64)
    order = np.empty(graph.rows, np.int32)
    finished = _forward(
        graph.duration_ns,
        graph.dep_offsets,
        graph.dep_rows,
        read_only(graph.dep_lag_ns),
        read_only(release),
        graph.instance,
        graph.instance_size,
        start,
        end,
        order,
    )
    return start, end, order[:finished]


def backward(graph: Graph, order: Int32Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """int64[n] slack: latest start that keeps the last end, minus the earliest start.

    `order`, `start` and `end` are the result of `forward`, complete.
    """
    slack = np.empty(graph.rows, np.int64)
    if graph.rows:
        _backward(
            graph.duration_ns,
            graph.dep_offsets,
            graph.dep_rows,
            read_only(graph.dep_lag_ns),
            graph.instance,
            read_only(order),
            read_only(start),
            int(end.max()),
            slack,
        )
    return slack


# Kernels. numba reads the arrays' types at the call; `int(...)` widens row numbers to 64 bits.


@compiled
def _wait_for(dep: int, row: int, end: Int64Array, link: Int32Array) -> None:
    """Put the row in front of the waiters of an unfinished dependency."""
    link[row] = -2 - end[dep]
    end[dep] = -2 - row


@compiled
def _finish(
    row: int, time: int, end: Int64Array, link: Int32Array, stack: Int32Array, height: int
) -> int:
    """Set the end of a row and push its waiters; returns the new height of the stack."""
    waiter = -2 - end[row]
    end[row] = time
    while waiter >= 0:
        stack[height] = waiter
        height += 1
        waiter = int(link[waiter])
    return height


@compiled
def _prepare(
    offsets: Int64Array,
    deps: Int32Array,
    start: Int64Array,
    end: Int64Array,
    link: Int32Array,
    stack: Int32Array,
) -> int:
    """Let every row wait for its last dependency; stacks rows that have none, returns how many."""
    end[:] = -1
    start[:] = 0
    height = 0
    for row in range(len(end) - 1, -1, -1):
        if offsets[row] == offsets[row + 1]:
            stack[height] = row
            height += 1
        else:
            _wait_for(int(deps[offsets[row + 1] - 1]), row, end, link)
    return height


@compiled
def _forward(
    duration: Int64Array,
    offsets: Int64Array,
    deps: Int32Array,
    lags: Int64Array,
    release: Int64Array,
    instance: Int32Array,
    size: Int32Array,
    start: Int64Array,
    end: Int64Array,
    order: Int32Array,
) -> int:
    """Fill start, end and order; returns the number of finished rows."""
    rows = len(duration)
    link = np.empty(rows, np.int32)
    stack = np.empty(rows, np.int32)
    absent = size.copy()
    ready = np.zeros(len(size), np.int64)
    arrivals = np.full(len(size), -1, np.int32)
    height = _prepare(offsets, deps, start, end, link, stack)
    finished = 0
    while height > 0:
        height -= 1
        row = int(stack[height])
        ahead = row + AHEAD
        if ahead < rows:
            will_read(offsets, ahead)
            will_read(duration, ahead)
            will_read(instance, ahead)
            will_write(start, ahead)
            will_write(end, ahead)
            will_write(link, ahead)
            will_read(deps, offsets[row] + 2 * AHEAD)

        first, last = offsets[row], offsets[row + 1] - 1
        edge = last - start[row]
        while edge >= first and end[deps[edge]] >= 0:
            edge -= 1
        if edge >= first:
            start[row] = last - edge
            _wait_for(int(deps[edge]), row, end, link)
            continue

        time = release[row] if len(release) else 0
        for edge in range(first, last + 1):
            time = max(time, end[deps[edge]] + (lags[edge] if len(lags) else 0))
        start[row] = time
        number = instance[row]
        if number < 0:
            height = _finish(row, time + duration[row], end, link, stack, height)
            order[finished] = row
            finished += 1
            continue

        ready[number] = max(ready[number], time)
        link[row] = arrivals[number]
        arrivals[number] = row
        absent[number] -= 1
        if absent[number] == 0:
            member = int(arrivals[number])
            while member >= 0:
                following = int(link[member])
                time = ready[number] + duration[member]
                height = _finish(member, time, end, link, stack, height)
                order[finished] = member
                finished += 1
                member = following
    return finished


@compiled
def _backward(
    duration: Int64Array,
    offsets: Int64Array,
    deps: Int32Array,
    lags: Int64Array,
    instance: Int32Array,
    order: Int32Array,
    start: Int64Array,
    last_end: int,
    slack: Int64Array,
) -> None:
    """Fill slack, which holds the latest end of a row until its turn comes."""
    slack[:] = last_end
    last = len(order) - 1
    while last >= 0:
        number = instance[order[last]]
        first = last
        latest = slack[order[last]] - duration[order[last]]
        if number >= 0:
            while first > 0 and instance[order[first - 1]] == number:
                first -= 1
                member = order[first]
                latest = min(latest, slack[member] - duration[member])
        for position in range(last, first - 1, -1):
            if position >= AHEAD:
                ahead = order[position - AHEAD]
                will_write(slack, ahead)
                will_read(duration, ahead)
                will_read(offsets, ahead)
                will_read(start, ahead)
                will_read(instance, ahead)
                will_read(deps, offsets[order[position - AHEAD // 2]])
            row = order[position]
            slack[row] = latest - start[row]
            for edge in range(offsets[row], offsets[row + 1]):
                dep = deps[edge]
                slack[dep] = min(slack[dep], latest - (lags[edge] if len(lags) else 0))
        last = first - 1
