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
`_AHEAD` places later on the same rank; that alone doubles the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from prismcalib.graph import Graph, Int32Array, Int64Array

__all__ = ["backward", "forward", "replay"]

_AHEAD = 16
# Scenarios of one pass of `replay`: their ends of one row fill two cache lines.
_BLOCK = 16
_NO_TIMES = np.empty(0, np.int64)
_NO_TIMES.flags.writeable = False


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
        _read_only(graph.dep_lag_ns),
        _read_only(release),
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
            _read_only(graph.dep_lag_ns),
            graph.instance,
            _read_only(order),
            _read_only(start),
            int(end.max()),
            slack,
        )
    return slack


def replay(
    graph: Graph,
    release: Int64Array | None,
    durations: Int64Array,
    order: Int32Array,
    step: Int32Array,
    step_count: int,
    *,
    times: bool,
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Times of K scenarios in a known order of completion, `_BLOCK` scenarios a pass.

    Args:
        graph: its durations are not used.
        release: int64[n] >= 0, or None for zeros.
        durations: int64[n, K], C order, read-only.
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
    end = np.empty((rows, width), np.int64)
    start = np.empty((rows, scenarios if times else 0), np.int64)
    # Steps first, so that the scenarios of a pass lie together; row S: the last of all.
    last_end = np.zeros((step_count + 1, scenarios), np.int64)
    for first in range(0, scenarios, _BLOCK):
        _replay(
            _read_only(order),
            durations,
            first,
            min(first + _BLOCK, scenarios),
            graph.dep_offsets,
            graph.dep_rows,
            _read_only(graph.dep_lag_ns),
            _read_only(release),
            graph.instance,
            _read_only(step),
            end,
            first if times else 0,
            last_end,
        )
    if times:
        lags = _read_only(graph.dep_lag_ns)
        _starts(graph.dep_offsets, graph.dep_rows, lags, _read_only(release), end, start)
    return last_end[step_count], np.ascontiguousarray(last_end[:step_count].T), start, end


def _read_only(array: Any) -> Any:
    """A read-only view, since numba compiles anew for each mix of writable and read-only."""
    if array is None:
        return _NO_TIMES
    view = array.view()
    view.flags.writeable = False
    return view


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled at its first call, kept on disk where a folder can be written."""
    options = {"nogil": True, "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:
        # numba found no writable folder: compile once per process instead.
        return numba.njit(**options)(function)  # type: ignore[no-any-return]


def _prefetch_intrinsic(write: int) -> Any:
    """`prefetch(array, index)`: ask for the cache line of an element, soon read or written."""

    def prefetch(_typing: Any, array: Any, _index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
            flag = ir.IntType(32)
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [pointer.type, flag, flag, flag]),
                "llvm.prefetch.p0",
            )
            # Keep in all cache levels (3); data, not instructions (1).
            builder.call(function, [pointer, flag(write), flag(3), flag(1)])
            return context.get_dummy_value()

        return types.void(array, types.intp), generate

    return intrinsic(prefetch)


_will_read = _prefetch_intrinsic(0)
_will_write = _prefetch_intrinsic(1)


# Kernels. numba reads the arrays' types at the call; `int(...)` widens row numbers to 64 bits.


@_compiled
def _wait_for(dep: int, row: int, end: Int64Array, link: Int32Array) -> None:
    """Put the row in front of the waiters of an unfinished dependency."""
    link[row] = -2 - end[dep]
    end[dep] = -2 - row


@_compiled
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


@_compiled
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


@_compiled
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
        ahead = row + _AHEAD
        if ahead < rows:
            _will_read(offsets, ahead)
            _will_read(duration, ahead)
            _will_read(instance, ahead)
            _will_write(start, ahead)
            _will_write(end, ahead)
            _will_write(link, ahead)
            _will_read(deps, offsets[row] + 2 * _AHEAD)

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


@_compiled
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
            if position >= _AHEAD:
                ahead = order[position - _AHEAD]
                _will_write(slack, ahead)
                _will_read(duration, ahead)
                _will_read(offsets, ahead)
                _will_read(start, ahead)
                _will_read(instance, ahead)
                _will_read(deps, offsets[order[position - _AHEAD // 2]])
            row = order[position]
            slack[row] = latest - start[row]
            for edge in range(offsets[row], offsets[row + 1]):
                dep = deps[edge]
                slack[dep] = min(slack[dep], latest - (lags[edge] if len(lags) else 0))
        last = first - 1


@_compiled
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
        if position + _AHEAD < rows:
            ahead = order[position + _AHEAD]
            _will_read(offsets, ahead)
            _will_read(instance, ahead)
            _will_read(duration, ahead)
            nearer = order[position + _AHEAD // 2]
            _will_read(deps, offsets[nearer])
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
                lag = lags[edge] if len(lags) else 0
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


@_compiled
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
            lag = lags[edge] if len(lags) else 0
            for q in range(start.shape[1]):
                start[row, q] = max(start[row, q], end[dep, q] + lag)
