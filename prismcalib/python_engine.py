"""Propagation in plain Python: no compilation, so the fastest for small graphs.

The same method as `array_engine`, over lists.  A row that cannot start yet waits in the list
of *one* dependency that has not ended.  When that one ends, the row is tried again: it starts
waiting for the next unfinished dependency, or all have ended and it starts.  Dependencies are
examined from the last to the first, each at most twice, and the stored direction (row to its
dependencies) is the only one needed.
"""

from __future__ import annotations

import numpy as np

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
    offsets, deps = graph.dep_offsets.tolist(), graph.dep_rows.tolist()
    lags = None if graph.dep_lag_ns is None else graph.dep_lag_ns.tolist()
    duration, instance = graph.duration_ns.tolist(), graph.instance.tolist()
    absent = graph.instance_size.tolist()
    start = [0] * graph.rows if release is None else release.tolist()
    end: list[int | None] = [None] * graph.rows
    waiters: list[list[int]] = [[] for _ in end]
    arrived: list[list[int]] = [[] for _ in absent]
    # Dependencies of a row before its cursor are yet to be examined.
    cursor = offsets[1:]
    order: list[int] = []
    startable: list[int] = []

    for row in range(graph.rows - 1, -1, -1):
        waiting = startable if cursor[row] == offsets[row] else waiters[deps[cursor[row] - 1]]
        waiting.append(row)

    while startable:
        row = startable.pop()
        time = start[row]
        at, first = cursor[row], offsets[row]
        while at > first:
            at -= 1
            ended = end[deps[at]]
            if ended is None:
                cursor[row], start[row] = at + 1, time
                waiters[deps[at]].append(row)
                break
            if lags is not None:
                ended += lags[at]
            if ended > time:
                time = ended
        else:
            start[row] = time
            number = instance[row]
            if number < 0:
                end[row] = time + duration[row]
                order.append(row)
                startable += waiters[row]
                continue
            members = arrived[number]
            members.append(row)
            absent[number] -= 1
            if absent[number] == 0:
                ready = max([start[member] for member in members])
                for member in members:
                    end[member] = ready + duration[member]
                    startable += waiters[member]
                order += members

    ends = np.array([0 if time is None else time for time in end], np.int64)
    return np.array(start, np.int64), ends, np.array(order, np.int32)


def backward(graph: Graph, order: Int32Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """int64[n] slack: latest start that keeps the last end, minus the earliest start.

    `order`, `start` and `end` are the result of `forward`, complete.
    """
    offsets, deps = graph.dep_offsets.tolist(), graph.dep_rows.tolist()
    lags = None if graph.dep_lag_ns is None else graph.dep_lag_ns.tolist()
    duration, instance = graph.duration_ns.tolist(), graph.instance.tolist()
    latest_end = [int(end.max()) if graph.rows else 0] * graph.rows
    latest_start = [0] * graph.rows
    rows = order.tolist()
    last = graph.rows - 1
    while last >= 0:
        row = rows[last]
        number = instance[row]
        latest = latest_end[row] - duration[row]
        first = last - 1
        if number >= 0:
            while first >= 0 and instance[rows[first]] == number:
                member = rows[first]
                latest = min(latest, latest_end[member] - duration[member])
                first -= 1
        for at in range(first + 1, last + 1):
            row = rows[at]
            latest_start[row] = latest
            for edge in range(offsets[row], offsets[row + 1]):
                dep = deps[edge]
                limit = latest if lags is None else latest - lags[edge]
                if limit < latest_end[dep]:
                    latest_end[dep] = limit
        last = first
    return np.array(latest_start, np.int64) - start
