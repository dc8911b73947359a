"""Order of streams and starts, against plain loops that say what they mean."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prismtrace.converters.chakra import ordering
from prismtrace.converters.chakra.ordering import Edges, add_stream_order, lay_out


@st.composite
def graphs(draw):
    """Edges that lead back, with many from one node to the next, streams and durations."""
    count = draw(st.integers(0, 25))
    pairs = {(k, k - 1) for k in range(1, count) if draw(st.integers(0, 3))}
    for node in range(1, count):
        pairs |= {(node, draw(st.integers(0, node - 1))) for _ in range(draw(st.integers(0, 7)))}
    node, dep = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T

    def column(most):
        return np.array(draw(st.lists(st.integers(0, most), min_size=count, max_size=count)), int)

    return Edges.of(node, dep, count), column(3), column(1) > 0, column(5)


def pairs_of(edges):
    return list(zip(edges.node.tolist(), edges.dep.tolist(), strict=True))


@contextmanager
def parts_of(size):
    most, ordering._PART_NODES = ordering._PART_NODES, size
    try:
        yield
    finally:
        ordering._PART_NODES = most


@given(graphs(), st.integers(1, 30))
def test_nodes_start_when_the_last_that_they_wait_for_has_ended(graph, part):
    edges, _, _, dur = graph
    end = [0] * len(dur)
    start = []
    for node, duration in enumerate(dur.tolist()):
        start.append(max([end[dep] for of, dep in pairs_of(edges) if of == node], default=0))
        end[node] = start[node] + duration
    with parts_of(part):
        assert lay_out(edges, dur).tolist() == start


@given(graphs(), st.integers(1, 30))
def test_of_each_stream_the_last_is_waited_for(graph, part):
    edges, stream, chained, _ = graph
    count = len(stream)
    pairs = set(pairs_of(edges))
    for node in range(count):
        before = [k for k in range(node) if stream[k] == stream[node]]
        if before and chained[node]:
            pairs.add((node, before[-1]))
    last = {(node, int(stream[dep])): dep for node, dep in sorted(pairs)}
    with parts_of(part):
        found = add_stream_order(edges, stream, chained, count)
    assert pairs_of(found) == sorted((node, dep) for (node, _), dep in last.items())


@given(graphs())
def test_the_nearest_is_first(graph):
    edges, _, _, dur = graph
    turned = pairs_of(edges.nearest_first(len(dur)))
    assert turned == sorted(pairs_of(edges), key=lambda pair: (pair[0], -pair[1]))
