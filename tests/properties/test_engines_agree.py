"""All engines give the same times, to the nanosecond, and the same errors."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismcalib.errors import CalibError, CycleError
from prismcalib.graph import Graph
from prismcalib.propagation import (
    critical_arrays,
    critical_rows,
    critical_steps,
    propagate,
    propagate_batch,
    slack,
)


def random_graph(draw: random.Random) -> Graph:
    """Any graph of up to 40 rows: row numbers say nothing about the order of execution.

    Some have cycles, some lack members; lags, releases before 0, zero durations, repeated
    dependencies and instances of one or many members all occur.
    """
    n = draw.randint(1, 40)
    place = list(range(n))
    draw.shuffle(place)
    deps: list[list[int]] = [[] for _ in range(n)]
    for row in range(n):
        for _ in range(min(row, draw.choice([0, 1, 1, 2, 3, 8]))):
            deps[place[row]].append(place[draw.randrange(row)])
    if draw.random() < 0.15:
        deps[draw.randrange(n)].append(draw.randrange(n))

    instances, sizes = [-1] * n, []
    # Neighbours in the order of execution seldom close a cycle, random rows often do.
    pool = list(place)
    if draw.random() < 0.5:
        draw.shuffle(pool)
    while len(pool) > 3 and draw.random() < 0.7:
        members = [pool.pop() for _ in range(draw.choice([1, 2, 2, 3]))]
        for row in members:
            instances[row] = len(sizes)
        sizes.append(len(members) + (draw.random() < 0.02))
        del pool[len(pool) - draw.randint(0, 2) :]

    waits = None
    if draw.random() < 0.4:
        # Mostly for rows that run earlier: waits for later ones often close a cycle.
        waits = [
            [place[draw.randrange(place.index(row) + (draw.random() < 0.1))] for _ in range(2)]
            if instances[row] < 0 and place.index(row) and draw.random() < 0.3
            else []
            for row in range(n)
        ]

    longest = draw.choice([3, 100, 10**12])
    return Graph.from_lists(
        [draw.randint(0, longest) for _ in range(n)],
        deps,
        lags_ns=[[draw.choice([0, 0, draw.randint(1, 50)]) for _ in row] for row in deps]
        if draw.random() < 0.5
        else None,
        instances=instances,
        instance_sizes=sizes,
        releases_ns=[draw.randint(-100, 200) for _ in range(n)] if draw.random() < 0.3 else None,
        waits=waits,
    )


def model_times(graph: Graph):
    """Start and end by the equations of the model, taken literally until nothing changes."""
    release = [0] * graph.rows if graph.release_ns is None else graph.release_ns.tolist()
    start, end = list(release), [-(10**18)] * graph.rows
    members = [np.flatnonzero(graph.instance == g).tolist() for g in range(graph.instances)]
    while True:
        before = (list(start), list(end))
        for row in range(graph.rows):
            deps, lags = graph.deps(row).tolist(), graph.lags(row).tolist()
            ends = [end[dep] + lag for dep, lag in zip(deps, lags, strict=True)]
            start[row] = max([release[row], *ends])
            together = members[graph.instance[row]] if graph.instance[row] >= 0 else []
            ready = max(start[other] for other in [row, *together, *graph.waits(row).tolist()])
            end[row] = ready + int(graph.duration_ns[row])
        if before == (start, end):
            return start, end


def outcome(graph: Graph, engine: str):
    """Times and slack as lists, or the error."""
    try:
        timing = propagate(graph, engine)
    except CalibError as error:
        return type(error), str(error)
    check_timing(graph, timing, slack(graph, timing, engine))
    return (
        timing.start_ns.tolist(),
        timing.end_ns.tolist(),
        slack(graph, timing, engine).tolist(),
        critical_steps(graph, timing, engine),
        [rows.tolist() for rows in critical_arrays(graph, timing, engine, graph.rows // 2)],
    )


def check_timing(graph, timing, late):
    full = graph.expanded
    assert sorted(timing.order.tolist()) == list(range(full.rows))
    seen: set[int] = set()
    finished: list[int] = []
    for row in timing.order.tolist():
        finished.append(row)
        instance = int(full.instance[row])
        if instance < 0 or not finished[:-1] or full.instance[finished[-2]] != instance:
            assert instance < 0 or instance not in seen
            seen.add(instance)
    assert (timing.wait_ns >= 0).all()
    waiting = graph.instance >= 0
    if graph.wait_offsets is not None:
        waiting = waiting | (np.diff(graph.wait_offsets) > 0)
    assert (timing.wait_ns[~waiting] == 0).all()
    # A row that waits while others wait for it may not be late, though it has to wait.
    awaited = [] if graph.wait_rows is None else graph.wait_rows
    assert (np.delete(late - timing.wait_ns, awaited) >= 0).all()
    path = critical_rows(graph, timing)
    assert (late[path] == 0).all()
    assert (np.diff(timing.start_ns[path]) >= 0).all()


def check_cycle(graph, rows):
    """Each row waits for the one before it, the first for the last."""
    for before, row in zip(rows[-1:] + rows[:-1], rows, strict=True):
        together = graph.instance[before] == graph.instance[row] >= 0
        assert before in graph.deps(row) or together or before in graph.waits(row)


def check_engines(graph: Graph):
    expected = outcome(graph, "networkx")
    assert outcome(graph, "python") == expected
    assert outcome(graph, "array") == expected
    if expected[0] is CycleError:
        with pytest.raises(CycleError) as caught:
            propagate(graph, "python")
        check_cycle(graph, caught.value.rows)
    if not isinstance(expected[0], type):
        assert model_times(graph) == expected[:2]
    return expected[0] if isinstance(expected[0], type) else "timing"


def test_on_4000_random_graphs():
    counts: dict[object, int] = {}
    for seed in range(4000):
        kind = check_engines(random_graph(random.Random(seed)))
        counts[kind] = counts.get(kind, 0) + 1
    # The generator draws enough of everything.
    assert min(counts.values()) >= 50
    assert len(counts) == 3


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200)
def test_on_graphs_that_hypothesis_draws(draw):
    check_engines(random_graph(draw))


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_slack_is_exactly_the_harmless_delay(draw):
    graph = random_graph(draw)
    try:
        timing = propagate(graph)
    except CalibError:
        return
    late = slack(graph, timing)
    row = draw.randrange(graph.rows)

    def last_end_if_delayed_by(delay_ns: int) -> int:
        release = timing.start_ns.copy()
        release[row] += delay_ns
        delayed = Graph(
            duration_ns=graph.duration_ns,
            dep_offsets=graph.dep_offsets,
            dep_rows=graph.dep_rows,
            instance=graph.instance,
            instance_size=graph.instance_size,
            dep_lag_ns=graph.dep_lag_ns,
            release_ns=release,
            wait_offsets=graph.wait_offsets,
            wait_rows=graph.wait_rows,
        )
        return int(propagate(delayed).end_ns.max())

    assert last_end_if_delayed_by(late[row]) == timing.end_ns.max()
    assert last_end_if_delayed_by(late[row] + 1) == timing.end_ns.max() + 1


def test_batches_on_300_random_graphs():
    for seed in range(300):
        graph = random_graph(random.Random(seed))
        draw = np.random.default_rng(seed)
        scenarios = int(draw.integers(0, 20))
        durations = draw.integers(0, (3, 100, 10**9)[seed % 3], (graph.rows, scenarios))
        steps = draw.integers(-1, 3, graph.rows)
        lags = draw.integers(0, 50, (len(graph.dep_rows), scenarios)) if seed % 3 == 0 else None
        try:
            timing = propagate(graph)
        except CalibError as error:
            for engine in ("networkx", "python", "array"):
                with pytest.raises(type(error)):
                    propagate_batch(graph, durations, engine=engine)
            continue
        expected = propagate_batch(
            graph, durations, lag_ns=lags, steps=steps, times=True, engine="networkx"
        )
        for engine in ("python", "array"):
            order = timing.order if seed % 2 else None
            found = propagate_batch(
                graph,
                durations,
                lag_ns=lags,
                steps=steps,
                order=order,
                times=True,
                engine=engine,
            )
            assert found.begin_ns == expected.begin_ns
            for name in ("last_end_ns", "step_end_ns", "start_ns", "end_ns"):
                assert (getattr(found, name) == getattr(expected, name)).all()
            # What is not asked for changes nothing.
            short = propagate_batch(graph, durations, lag_ns=lags, engine=engine)
            assert (short.last_end_ns == expected.last_end_ns).all()
            assert short.end_ns is short.step_end_ns is None
        for column in range(min(scenarios, 2)):
            lag = graph.dep_lag_ns if lags is None else lags[:, column]
            alone = propagate(replace(graph, duration_ns=durations[:, column], dep_lag_ns=lag))
            assert alone.makespan_ns == expected.makespan_ns[column]
            assert (alone.end_ns == expected.end_ns[:, column]).all()
