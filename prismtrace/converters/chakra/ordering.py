"""The graph of one rank: who waits for whom, in which order, on which stream, and when.

Nodes of a Chakra trace stand in any order, need not say when they started, and often not on
which stream they ran. A trace needs all three: dependencies lead back, and nodes of a stream
follow each other.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

import numpy as np

from prismtrace.converters.chakra.nodes import ChakraNodes
from prismtrace.converters.chakra.wire import Bools, Ints
from prismtrace.errors import InputFileError

__all__ = ["Edges", "Order", "add_stream_order", "known", "lay_out", "order_nodes"]


@dataclass(frozen=True)
class Edges:
    """Positions of a node and of one that it waits for, sorted by node, without repetition."""

    node: Ints
    dep: Ints

    @classmethod
    def of(cls, node: Ints, dep: Ints, count: int) -> Edges:
        """Sorted and without repetition; `count` is the number of nodes."""
        both = node * count
        both += dep
        if (both[1:] > both[:-1]).all():
            return cls(node, dep)
        # Nearly sorted already: a stable sort takes one pass over what is.
        both.sort(kind="stable")
        both = both[np.concatenate([[True], both[1:] != both[:-1]])]
        node = both // max(count, 1)
        return cls(node, both - node * count)

    def offsets(self, count: int) -> Ints:
        """Where the edges of each node begin; one entry more than nodes."""
        return np.searchsorted(self.node, np.arange(count + 1)).astype(np.int64)

    def nearest_first(self, count: int) -> Edges:
        """The same, of each node the latest that it waits for first."""
        begin = self.offsets(count)
        number = np.diff(begin)
        turned = np.repeat(begin[:-1] + begin[1:] - 1, number) - np.arange(len(self.node))
        return Edges(self.node, self.dep[turned])


@dataclass(frozen=True)
class Order:
    """Order of the nodes (positions in the file) and the edges between their new positions."""

    position: Ints
    edges: Edges


def order_nodes(
    nodes: ChakraNodes,
    *,
    where: str,
    counts: Counter[str],
    recover: bool = False,
    by_start: bool = True,
) -> Order:
    """An order in which nothing waits for what comes later.

    It is that of recorded starts where there are any, unless `by_start` is false, else that of
    the file, as far as dependencies allow.

    Control dependencies count unless they are PyTorch's, where they lead to the operator that
    called this one, or contradict the data dependencies.

    Raises:
        InputFileError: two nodes have one id, or nodes wait for each other in a circle (with
            `recover` the last edge of each circle is left out and counted).
    """
    places = _Places(nodes, where)
    data = places.edges(nodes.data_owner, nodes.data_dep)
    counts["dropped-missing-dep"] += len(nodes.data_dep) - len(data[0])
    ctrl = places.edges(nodes.ctrl_owner, nodes.ctrl_dep)
    count = len(nodes)
    priority = _priority(nodes, by_start=by_start)
    if len(ctrl[0]) and not (len(data[0]) and "rf_id" in nodes.numbers):
        counts["dropped-missing-dep"] += len(nodes.ctrl_dep) - len(ctrl[0])
        both = Edges.of(
            np.concatenate([data[0], ctrl[0]]), np.concatenate([data[1], ctrl[1]]), count
        )
        found, _ = _sorted(both, priority)
        if len(found) == count:
            return _renumbered(both, found, count)
        counts["ignored-control-deps"] += len(ctrl[0])
    edges = Edges.of(*data, count)
    found, waiting = _sorted(edges, priority)
    while len(found) < count:
        if not recover:
            raise _circle(nodes, edges, waiting, where)
        edges = _without_first_circle(edges, waiting, priority)
        counts["dropped-circular-dep"] += 1
        found, waiting = _sorted(edges, priority)
    return _renumbered(edges, found, count)


class _Places:
    """Positions of nodes by id."""

    def __init__(self, nodes: ChakraNodes, where: str) -> None:
        self._plain = bool((nodes.id == np.arange(len(nodes))).all())
        self._count = len(nodes)
        if self._plain:
            return
        self._order = np.argsort(nodes.id, kind="stable")
        self._ids = nodes.id[self._order]
        twice = np.flatnonzero(np.diff(self._ids) == 0)
        if len(twice):
            raise InputFileError(
                f"two nodes have the id {self._ids[twice[0]]}",
                where=where,
                hint="the file was changed, or put together from several: write it again",
            )

    def edges(self, owner: Ints, dep: Ints) -> tuple[Ints, Ints]:
        """Positions of both ends, without edges to nodes that are not in the file."""
        if self._plain:
            there = (dep >= 0) & (dep < self._count)
            return (owner, dep) if there.all() else (owner[there], dep[there])
        at = np.minimum(np.searchsorted(self._ids, dep), self._count - 1)
        there = self._ids[at] == dep
        return owner[there], self._order[at[there]]


def _priority(nodes: ChakraNodes, *, by_start: bool) -> Ints:
    """Order of nodes that do not wait for each other."""
    count = len(nodes)
    place = np.arange(count)
    if not (by_start and nodes.start_us.any()):
        return place
    priority = np.empty(count, dtype=np.int64)
    priority[np.lexsort((place, nodes.start_us))] = place
    return priority


def _sorted(edges: Edges, priority: Ints) -> tuple[Ints, Bools]:
    """Positions in an order that keeps all edges; and which could not be reached, in circles."""
    count = len(priority)
    waiting = np.zeros(count, dtype=np.bool_)
    if (priority[edges.dep] < priority[edges.node]).all():
        order = np.empty(count, dtype=np.int64)
        order[priority] = np.arange(count)
        return order, waiting
    by_dep = np.argsort(edges.dep, kind="stable")
    users = edges.node[by_dep].tolist()
    begin = np.searchsorted(edges.dep[by_dep], np.arange(count + 1)).tolist()
    open_deps = np.bincount(edges.node, minlength=count).tolist()
    key = priority.tolist()
    ready = [(key[node], node) for node in range(count) if not open_deps[node]]
    heapq.heapify(ready)
    order_list: list[int] = []
    while ready:
        _, node = heapq.heappop(ready)
        order_list.append(node)
        for user in users[begin[node] : begin[node + 1]]:
            open_deps[user] -= 1
            if not open_deps[user]:
                heapq.heappush(ready, (key[user], user))
    return np.array(order_list, dtype=np.int64), np.array(open_deps) > 0


def _renumbered(edges: Edges, order: Ints, count: int) -> Order:
    if (order == np.arange(count)).all():
        return Order(order, edges)
    new = np.empty(count, dtype=np.int64)
    new[order] = np.arange(count)
    return Order(order, Edges.of(new[edges.node], new[edges.dep], count))


def _walk(edges: Edges, waiting: Bools) -> list[int]:
    """A circle of positions, each waiting for the next."""
    inside = waiting[edges.node] & waiting[edges.dep]
    # Each waiting node waits for another one, so that a walk comes back to itself.
    next_of = dict(zip(edges.node[inside].tolist(), edges.dep[inside].tolist(), strict=True))
    node = next(iter(next_of))
    seen: dict[int, int] = {}
    path: list[int] = []
    while node not in seen:
        seen[node] = len(path)
        path.append(node)
        node = next_of[node]
    return path[seen[node] :]


def _circle(nodes: ChakraNodes, edges: Edges, waiting: Bools, where: str) -> InputFileError:
    path = _walk(edges, waiting)
    shown = [f"{nodes.id[node]} ({nodes.name[node][:_SHOWN]})" for node in path[:3]]
    more = f" and {len(path) - 3} more" if len(path) > 3 else ""
    return InputFileError(
        f"nodes wait for each other in a circle: {', '.join(shown)}{more}",
        where=where,
        hint="the graph cannot have run; --recover leaves out one edge of each circle",
    )


_SHOWN = 40  # characters of a name


def _without_first_circle(edges: Edges, waiting: Bools, priority: Ints) -> Edges:
    """Without the edge of a circle that leads to its latest node: the others lead back."""
    path = _walk(edges, waiting)
    pairs = list(zip(path, [*path[1:], path[0]], strict=True))
    node, dep = max(pairs, key=lambda pair: int(priority[pair[1]] - priority[pair[0]]))
    kept = (edges.node != node) | (edges.dep != dep)
    return Edges(edges.node[kept], edges.dep[kept])


def add_stream_order(edges: Edges, stream: Ints, chained: Bools, count: int) -> Edges:
    """Edges with the order of streams, without those that follow from others.

    Args:
        edges: between positions in order.
        stream: number of each node's stream.
        chained: nodes that wait for the one before them on their stream.
        count: number of nodes.
    """
    before = _before_on_stream(stream, chained)
    begin = edges.offsets(count)
    streams = int(stream.max(initial=0)) + 1
    # A part at a time: sorting all edges at once takes several times their memory. Node, stream
    # and dependency are one number while a part is sorted.
    rows = max(1, min(_PART_NODES, 2**62 // (streams * max(count, 1))))
    parts: list[tuple[Ints, Ints]] = []
    for first in range(0, count, rows):
        last = min(first + rows, count)
        inside = slice(begin[first], begin[last])
        follows = np.flatnonzero(before[first:last] >= 0) + first
        node = np.concatenate([edges.node[inside], follows])
        dep = np.concatenate([edges.dep[inside], before[follows]])
        on_stream = (node - first) * streams + stream[dep]
        order = np.argsort(on_stream * count + dep, kind="stable")  # much is in order
        # Of what a node waits for on one stream the last ends last.
        kept = order[np.diff(on_stream[order], append=-1) != 0]
        part = Edges.of(node[kept], dep[kept], count)
        parts.append((part.node, part.dep))
    if not parts:
        return edges
    return Edges(
        np.concatenate([node for node, _ in parts]), np.concatenate([dep for _, dep in parts])
    )


_PART_NODES = 1 << 16
"""Nodes, or edges, of a part."""


def _before_on_stream(stream: Ints, chained: Bools) -> Ints:
    """The node before each one on its stream, if that one waits for it; else −1."""
    order = np.argsort(stream, kind="stable")
    same = (stream[order][1:] == stream[order][:-1]) & chained[order][1:]
    before = np.full(len(stream), -1, dtype=np.int64)
    before[order[1:][same]] = order[:-1][same]
    return before


def lay_out(edges: Edges, dur: Ints) -> Ints:
    """Starts of nodes that say none: when the last that they wait for has ended.

    Args:
        edges: between positions in order.
        dur: durations, not negative; the starts are in their unit.
    """
    end = np.zeros(len(dur), dtype=np.int64)
    # A part at a time, since Python's numbers take several times the memory.
    for first in range(0, len(dur), _PART_NODES):
        last = min(first + _PART_NODES, len(dur))
        inside = slice(*np.searchsorted(edges.node, (first, last)))
        node, dep = edges.node[inside], edges.dep[inside]
        known = end[dep[dep < first]]
        end[first:last] = _ends(node - first, dep - first, dur[first:last], known)
    return end - dur


def _ends(node: Ints, dep: Ints, dur: Ints, known: Ints) -> Ints:
    """When each node ends that starts as soon as the last that it waits for has ended.

    Args:
        node, dep: edges, sorted by node; `dep` is before `node`, or negative.
        dur: durations of all nodes.
        known: ends of the negative ones, as they come.
    """
    count = len(dur)
    next_to = (dep == node - 1) & (dep >= 0)
    follows = np.zeros(count, dtype=np.bool_)
    follows[node[next_to]] = True
    # Each node of a run waits for the one before it, so for all of the run.
    run = np.maximum.accumulate(np.where(follows, 0, np.arange(count)))
    kept = next_to | (dep < run[node])
    node, dep = node[kept], dep[kept]
    # A stretch is a part of a run: only its first node waits for others than the one before,
    # and others wait only for its last one. So it is like one long node.
    is_first = ~follows | (np.bincount(node, minlength=count) > 1)
    is_first[dep[(dep >= 0) & (dep != node - 1)] + 1] = True
    stretch = np.cumsum(is_first) - 1
    total = np.cumsum(dur)
    until = total[np.append(np.flatnonzero(is_first)[1:], count) - 1]
    ahead = is_first[node]
    node, dep = stretch[node[ahead]], dep[ahead]
    # A row ends when the last of three has ended, and its duration later. What waits for more
    # takes several rows, each of which waits for the one before. They are numbered after the
    # known ends; number 0 ends at 0.
    number = np.bincount(node, minlength=len(until))
    rows = np.maximum(number // 2, 1)
    last = np.cumsum(rows) + len(known)
    begin = last - rows - len(known)
    waits = np.zeros((3, int(rows.sum())), dtype=np.int64)
    waits[0] = np.arange(len(known), last[-1])
    waits[0, begin] = 0
    nth = np.arange(len(node)) - (np.cumsum(number) - number)[node]
    column = np.where(nth == 0, 0, 2 - nth % 2)
    row = begin[node] + np.maximum(nth - 1, 0) // 2
    waits[column, row] = np.where(dep < 0, np.cumsum(dep < 0), last[stretch[np.maximum(dep, 0)]])
    more = np.zeros(waits.shape[1], dtype=np.int64)
    more[last - len(known) - 1] = np.diff(until, prepend=0)
    ends: list[int] = [0, *known.tolist()]
    put = ends.append
    for one, two, three, duration in zip(*waits.tolist(), more.tolist(), strict=True):
        latest, second, third = ends[one], ends[two], ends[three]
        if second > latest:
            latest = second
        if third > latest:
            latest = third
        put(latest + duration)
    found: Ints = (np.array(ends, dtype=np.int64)[last] - until)[stretch] + total
    return found


def known(column: Ints | None, count: int) -> Ints:
    """A column of numbers; −1 where a node does not say, or says something negative."""
    if column is None:
        return np.full(count, -1, dtype=np.int64)
    return np.maximum(column, -1)  # `UNKNOWN` is negative, too
