"""The plan gives the virtual ranks the times that propagation of the whole graph gives them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prismcalib
from prismcalib import synth
from prismcalib.graph import Graph
from prismcalib.propagation import propagate
from prismreplay.boundary import (
    Boundary,
    VertexKind,
    VirtualWorld,
    compile_boundary,
)
from prismreplay.errors import PlanError


def random_job(seed: int, ranks: int, length: int, *, waits: bool) -> tuple[Graph, np.ndarray]:
    """A program for every rank that cannot deadlock: operations are issued in one global order."""
    rng = np.random.default_rng(seed)
    durations, deps, lags, instances, wait_for = [], [], [], [], []
    rank_of, last = [], [[] for _ in range(ranks)]
    sizes = []

    def add(rank: int, after: list[int], duration: int, instance: int = -1) -> int:
        row = len(durations)
        durations.append(duration)
        deps.append(sorted(set(after)))
        lags.append([int(rng.integers(0, 3)) * int(rng.integers(0, 20)) for _ in deps[-1]])
        instances.append(instance)
        wait_for.append([])
        rank_of.append(rank)
        return row

    for _ in range(length):
        if rng.random() < 0.5:
            rank = int(rng.integers(ranks))
            row = add(rank, last[rank][-2:], int(rng.integers(0, 100)))
            # Now and then, the row runs beside what follows.
            last[rank] = [row] if rng.random() < 0.7 else [*last[rank][-1:], row]
            continue
        size = int(rng.integers(2, min(5, ranks) + 1))
        members = rng.choice(ranks, size, replace=False).tolist()
        if waits and rng.random() < 0.4:
            root, *others = members
            first = add(root, last[root], int(rng.integers(0, 30)))
            last[root] = [first]
            for rank in others:
                row = add(rank, last[rank], int(rng.integers(0, 30)))
                wait_for[row] = [first]
                last[rank] = [row]
            continue
        number = len(sizes)
        sizes.append(size)
        for rank in members:
            row = add(rank, last[rank], int(rng.integers(0, 30)), number)
            waited = rng.random() < 0.7
            last[rank] = [row] if waited else [*last[rank][:1], row]
    order = np.lexsort((np.arange(len(rank_of)), rank_of))
    place = np.argsort(order)
    graph = Graph.from_lists(
        [durations[i] for i in order],
        [[int(place[d]) for d in deps[i]] for i in order],
        lags_ns=[lags[i] for i in order],
        instances=[instances[i] for i in order],
        instance_sizes=sizes,
        releases_ns=[int(rng.integers(-20, 20)) if not deps[i] else -20 for i in order],
        waits=[[int(place[w]) for w in wait_for[i]] for i in order] if waits else None,
    )
    return graph, np.array(rank_of)[order]


def arrivals(graph: Graph, boundary: Boundary, mine: np.ndarray) -> list[tuple[int, int, int]]:
    """(time, vertex, ready) of every arrival of a sandbox row, from a full propagation."""
    full = graph.expanded
    timing = propagate(full)
    found = []
    for instance, vertex in boundary.vertex_of_instance.items():
        rows = np.flatnonzero((full.instance == instance) & mine)
        found += [(int(timing.start_ns[row]), vertex, int(timing.ready_ns[row])) for row in rows]
    for row, vertex in boundary.vertex_of_event.items():
        ours = [d for d in full.deps(row) if mine[d]]
        lag = dict(zip(full.deps(row).tolist(), full.lags(row).tolist(), strict=True))
        own = max((int(timing.end_ns[d]) + lag[int(d)] for d in ours), default=None)
        release = int(full.release_ns[row])
        own = release if own is None else max(own, release)
        found.append((own, vertex, int(timing.ready_ns[row])))
    return sorted(found)


def members_by_vertex(boundary: Boundary, graph: Graph, sandbox: np.ndarray) -> dict[int, int]:
    """How many sandbox rows each vertex waits for."""
    chosen = graph.instance[sandbox & (graph.instance >= 0)]
    counts = np.bincount(chosen, minlength=graph.instances)
    members = {v: int(counts[g]) for g, v in boundary.vertex_of_instance.items()}
    return members | dict.fromkeys(boundary.vertex_of_event.values(), 1)


def check(graph, ranks, sandbox: list[int], factors: list[float], **options) -> Boundary:
    mine_rows = np.isin(ranks, sandbox)
    boundary = compile_boundary(graph, mine_rows, **options)
    full = graph.expanded
    mine = (
        np.concatenate([mine_rows, mine_rows[graph.arriving]]) if full is not graph else mine_rows
    )
    for factor in factors:
        # What sandbox rows really take is known when they run, not when the plan is made.
        durations = np.where(mine_rows, (graph.duration_ns * factor).astype(np.int64), 0)
        durations = np.where(mine_rows, durations, graph.duration_ns)
        run = replace(graph, duration_ns=durations)
        world = VirtualWorld(boundary, members_by_vertex(boundary, full, mine))
        expected, given_ = {}, {}
        for time, vertex, ready in arrivals(run, boundary, mine):
            expected[vertex] = ready
            for (settled, _), at in world.arrived(vertex, time - boundary.origin_ns):
                given_[settled] = at + boundary.origin_ns
        assert given_ == expected
    return boundary


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 8),
    st.integers(1, 120),
    st.booleans(),
    st.data(),
)
def test_random_jobs_and_sandboxes(seed, ranks, length, waits, data):
    graph, rank_of = random_job(seed, ranks, length, waits=waits)
    sandbox = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, unique=True))
    check(graph, rank_of, sandbox, [1.0, 0.0, 3.7], longest_shared=data.draw(st.integers(1, 3)))


def test_long_labels_become_junctions():
    graph, rank_of = random_job(5, 40, 3000, waits=False)
    boundary = check(graph, rank_of, [0, 1, 2, 3], [1.0, 2.0], longest_label=3)
    assert (boundary.kind == VertexKind.JUNCTION).any()


def test_chains_of_junctions_may_be_long():
    length = 5000
    kinds = [VertexKind.ORIGIN, VertexKind.INSTANCE, *[VertexKind.JUNCTION] * length]
    kinds.append(VertexKind.INSTANCE)
    edges = len(kinds) - 2
    chain = Boundary(
        kind=np.array(kinds, np.int8),
        owner=np.full(len(kinds), -1, np.int32),
        edge_offsets=np.array([0, 0, *range(edges + 1)]),
        edge_source=np.arange(1, edges + 1, dtype=np.int32),
        edge_weight_ns=np.full(edges, 2),
    )
    world = VirtualWorld(chain, {1: 1, edges + 1: 1})
    world.arrived(1, 10)
    assert world.arrived(edges + 1, 0) == [((edges + 1, 0), 10 + 2 * edges)]


def test_a_wrong_weight_is_noticed():
    """The check above can fail: most edges matter."""
    graph, rank_of = random_job(7, 5, 60, waits=False)
    boundary = compile_boundary(graph, rank_of == 0)
    noticed = 0
    for edge in range(boundary.edges):
        weights = boundary.edge_weight_ns.copy()
        weights[edge] += 10_000
        wrong = replace(boundary, edge_weight_ns=weights)
        world = VirtualWorld(wrong, members_by_vertex(wrong, graph, rank_of == 0))
        for time, vertex, ready in arrivals(graph, wrong, rank_of == 0):
            settled = dict(world.arrived(vertex, time - wrong.origin_ns))
            at = settled.get((vertex, 0))
            noticed += at is not None and at + wrong.origin_ns != ready
    assert noticed > boundary.edges // 2


def test_too_many_arrivals_are_refused():
    graph, rank_of = random_job(7, 5, 60, waits=False)
    boundary = compile_boundary(graph, rank_of == 0)
    world = VirtualWorld(boundary, members_by_vertex(boundary, graph, rank_of == 0))
    vertex = next(iter(boundary.vertex_of_instance.values()))
    world.arrived(vertex, 0)
    with pytest.raises(PlanError, match="all its sandbox members already"):
        world.arrived(vertex, 0)


def test_a_dependency_across_the_border_without_communication_is_refused():
    graph = Graph.from_lists([1, 2], [[], [0]])
    with pytest.raises(PlanError, match="without a communication"):
        compile_boundary(graph, np.array([True, False]))


def test_a_pipeline_needs_few_edges_whatever_the_size_of_the_world():
    edges = {}
    for dp in (2, 8):
        spec = synth.JobSpec(pp=4, tp=2, dp=dp, microbatches=8, layers_per_stage=2, steps=2)
        trace = prismcalib.merge(synth.generate(spec)).trace
        graph, rows = prismcalib.graph_from_trace(trace)
        boundary = check(graph, rows["rank"].to_numpy(), [2, 3], [1.0, 1.3])
        edges[dp] = boundary.edges
    assert edges[8] <= 1.1 * edges[2]
