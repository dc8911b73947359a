"""Streams for nodes that name none.

Nodes of a stream run one after the other. So that no order comes in that the graph does not
have, a node goes behind one that it waits for, if only by way of others; or opens a stream.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prismtrace.converters.chakra.ordering import Edges
from prismtrace.converters.chakra.wire import Ints

__all__ = ["assign_lanes"]

_MOST_LANES = 256
"""Streams before they are used again by nodes that are not known to follow each other."""

_ALL_LANES = 4096
"""Streams before nodes wait until one is free."""
_NEVER = 2**63


@dataclass
class _Kind:
    """The streams of one kind of nodes."""

    last: list[int]
    """Node -> the latest node of this kind that it is or waits for, as far as seen; or −1."""
    by_tail: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (last node, stream); outdated entries are passed over."""
    by_end: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (end of the last node, stream), likewise."""


def assign_lanes(
    edges: Edges, stream: Ints, base: int, kind: Ints, dur: Ints, counts: Counter[str]
) -> tuple[Ints, Ints, Edges]:
    """Streams of all nodes.

    Args:
        edges: between positions in order.
        stream: number of each node's stream, or −1.
        base: number of the first new stream.
        kind: 0 or 1; nodes of different kinds are put on different streams.
        dur: durations in any unit.
        counts: nodes that had to wait for a stream are counted.

    Returns:
        The streams of all nodes, the kind of every new stream, and the edges, with those of
        nodes that had to wait.
    """
    count = len(stream)
    lanes = _Lanes(count)
    begin, deps = edges.offsets(count).tolist(), edges.dep.tolist()
    rows = zip(begin, begin[1:], stream.tolist(), kind.tolist(), dur.tolist(), strict=False)
    for node, (first, last, given, of_kind, duration) in enumerate(rows):
        lanes.place(node, deps[first:last], of_kind, duration, named=given >= 0)
    counts["assumed-stream-order"] += len(lanes.added)
    if lanes.added:
        more = np.array(lanes.added, dtype=np.int64)
        waiting = np.concatenate([edges.node, more[:, 0]])
        edges = Edges.of(waiting, np.concatenate([edges.dep, more[:, 1]]), count)
    found = np.array(lanes.lane, dtype=np.int64)
    kinds = np.array(lanes.kind_of, dtype=np.int64)
    return np.where(stream < 0, found + base, stream), kinds, edges


class _Lanes:
    def __init__(self, count: int) -> None:
        self.lane = [-1] * count
        self.kind_of: list[int] = []
        self.added: list[tuple[int, int]] = []
        self._tails: list[int] = []
        self._end = [0] * count
        self._kinds = (_Kind([-1] * count), _Kind([-1] * count))
        self._since = [-1] * count
        """Node -> it waits for all nodes up to this one."""
        self._open: set[int] = set()
        """Nodes that nothing waits for yet."""

    def place(
        self, node: int, deps: list[int], of_kind: int, duration: int, *, named: bool
    ) -> None:
        """Take in the next node; it needs a stream unless it names one."""
        at = max([self._end[dep] for dep in deps], default=0)
        self._end[node] = at + duration
        self._open.difference_update(deps)
        since = max([self._since[dep] for dep in deps], default=-1)
        self._since[node] = since if self._open else node
        self._open.add(node)
        for kind in self._kinds:
            kind.last[node] = max([kind.last[dep] for dep in deps], default=-1)
        if named:
            return
        kind = self._kinds[of_kind]
        chosen = self._behind(kind, deps)
        if chosen < 0:
            waited = since if self._since[node] != node else node - 1
            chosen = self._idle(kind.by_tail, waited)
        if chosen < 0 and len(self._tails) >= _MOST_LANES:
            full = len(self._tails) >= _ALL_LANES
            chosen = self._ended(kind.by_end, _NEVER if full else at)
            if chosen >= 0:
                tail = self._tails[chosen]
                self.added.append((node, tail))
                self._end[node] = max(at, self._end[tail]) + duration
        if chosen < 0:
            chosen = len(self._tails)
            self._tails.append(node)
            self.kind_of.append(of_kind)
        self._tails[chosen], self.lane[node] = node, chosen
        kind.last[node] = node
        heapq.heappush(kind.by_tail, (node, chosen))
        heapq.heappush(kind.by_end, (self._end[node], chosen))

    def _behind(self, kind: _Kind, deps: list[int]) -> int:
        """The stream that ends with a node that one of `deps` is or waits for; else −1."""
        for dep in deps:
            last = kind.last[dep]
            if last >= 0 and self._tails[self.lane[last]] == last:
                return self.lane[last]
        return -1

    def _idle(self, heap: list[tuple[int, int]], waited: int) -> int:
        """A stream that ends with one of the nodes up to `waited`; else −1."""
        while heap:
            tail, lane = heap[0]
            if self._tails[lane] == tail and tail > waited:
                return -1
            heapq.heappop(heap)
            if self._tails[lane] == tail:
                return lane
        return -1

    def _ended(self, heap: list[tuple[int, int]], at: int) -> int:
        """The stream that has been free for longest; −1 if none is."""
        while heap:
            ended, lane = heap[0]
            current = self._end[self._tails[lane]] == ended
            if current and ended > at:
                return -1
            heapq.heappop(heap)
            if current:
                return lane
        return -1
