"""A graph that is being made smaller: rows that stand for several, and what they wait for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Graph, Int32Array, Int64Array

__all__ = ["BoolArray", "Net", "edges_in_order", "net_of", "renumbered"]

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Net:
    """n rows made from N rows of a graph, with e edges.

    Rows are in an order in which edges lead forward within a rank.

    Attributes:
        home: int32[N], the row that each original row became part of.
        head, tail: int32[n], original rows that say what a row is like, and how it ends.
        position: int64[n], ascending: the original row whose place the row has taken.
        duration: int64[n], as in `Graph`.
        start, end: int64[n], times of the row when ranks arrive as they did.
        owner, dep, lag: edges: row, row it depends on, least delay; by owner, then dep.
        instance: int32[n], or -1.
        mergeable: bool[n], whether the row may be merged with others (local, not in a batch).
        place: int32[n], rows of one place (rank, step, microbatch and so on) may be merged.
        sort: int32[n], only rows of one sort (kind) are merged ...
        lane: int32[n], ... and if they follow each other, of one lane (stream).
        uneven_ns: by how much, at most, the computations that one fused operation put together
            differ between its ranks: so much may an end be off if ranks arrive otherwise.
    """

    home: Int32Array
    head: Int32Array
    tail: Int32Array
    position: Int64Array
    duration: Int64Array
    start: Int64Array
    end: Int64Array
    owner: Int64Array
    dep: Int64Array
    lag: Int64Array
    instance: Int32Array
    mergeable: BoolArray
    place: Int32Array
    sort: Int32Array
    lane: Int32Array
    uneven_ns: int = 0

    def __len__(self) -> int:
        return len(self.duration)

    @property
    def waits_for(self) -> Int64Array:
        """int64[n], number of rows that each row depends on."""
        return np.bincount(self.owner, minlength=len(self))

    @property
    def lets_go(self) -> Int64Array:
        """int64[n], number of rows that depend on each row."""
        return np.bincount(self.dep, minlength=len(self))


def net_of(
    graph: Graph,
    start_ns: Int64Array,
    end_ns: Int64Array,
    *,
    mergeable: BoolArray,
    place: Int32Array,
    sort: Int32Array,
    lane: Int32Array,
) -> Net:
    """A graph without anything merged yet; of its waits nothing is kept.

    Rows that wait for others, or that others wait for, must not be mergeable.
    """
    rows = np.arange(graph.rows)
    owner = np.repeat(rows, np.diff(graph.dep_offsets))
    dep = graph.dep_rows.astype(np.int64)
    lag = np.zeros(len(dep), np.int64) if graph.dep_lag_ns is None else graph.dep_lag_ns
    # Owners ascend already; a stable sort is quick on what is nearly in order.
    order = np.argsort(owner * max(graph.rows, 1) + dep, kind="stable")
    return Net(
        home=rows.astype(np.int32),
        head=rows.astype(np.int32),
        tail=rows.astype(np.int32),
        position=rows,
        duration=graph.duration_ns,
        start=start_ns,
        end=end_ns,
        owner=owner[order],
        dep=dep[order],
        lag=lag[order],
        instance=graph.instance,
        mergeable=mergeable & (graph.instance < 0),
        place=place,
        sort=sort,
        lane=lane,
    )


def renumbered(
    net: Net,
    stays: BoolArray,
    part_of: Int64Array,
    owner: Int64Array,
    dep: Int64Array,
    lag: Int64Array,
) -> Net:
    """Only the rows that stay; the others are part of one of these. Edges are between these."""
    number = np.cumsum(stays) - 1
    names = ("head", "tail", "position", "duration", "start", "end", "instance", "mergeable")
    kept = {name: getattr(net, name)[stays] for name in (*names, "place", "sort", "lane")}
    return replace(
        net,
        home=number[part_of[net.home]].astype(np.int32),
        **kept,
        **edges_in_order(number[owner], number[dep], lag),
    )


def edges_in_order(owner: Int64Array, dep: Int64Array, lag: Int64Array) -> dict[str, Any]:
    """Edges in order, of several between the same rows only the one with the largest lag."""
    key = owner * (int(owner.max(initial=0)) + 1 + int(dep.max(initial=0))) + dep
    if not (key[1:] > key[:-1]).all():
        order = np.lexsort((-lag, key))
        key = key[order]
        new = np.append(True, key[1:] != key[:-1])
        order = order[new]
        owner, dep, lag = owner[order], dep[order], lag[order]
    return {"owner": owner, "dep": dep, "lag": lag}
