import subprocess
import sys

import numba
import numpy as np
import pytest

from prismcalib import compiling
from prismcalib.errors import CalibError, CycleError, MissingMemberError
from prismcalib.graph import Graph
from prismcalib.propagation import critical_rows, pick_engine, propagate, propagate_batch, slack

ENGINES = ["networkx", "python", "array"]
engines = pytest.mark.parametrize("engine", ENGINES)


def two_ranks():
    """Rank 0 computes 10, rank 1 computes 30; both all-reduce; both compute 5."""
    return Graph.from_lists(
        [10, 4, 5, 30, 6, 5],
        [[], [0], [1], [], [3], [4]],
        instances=[-1, 0, -1, -1, 0, -1],
        labels=lambda row: f"rank {row // 3} op {row % 3}",
    )


@engines
def test_members_wait_for_the_last_and_transfer_for_their_own_time(engine):
    graph = two_ranks()
    timing = propagate(graph, engine)
    assert timing.start_ns.tolist() == [0, 10, 34, 0, 30, 36]
    assert timing.end_ns.tolist() == [10, 34, 39, 30, 36, 41]
    assert timing.wait_ns.tolist() == [0, 20, 0, 0, 0, 0]
    assert timing.ready_ns.tolist() == [0, 30, 34, 0, 30, 36]
    assert timing.makespan_ns == 41
    assert slack(graph, timing, engine).tolist() == [20, 20, 2, 0, 0, 0]
    assert critical_rows(graph, timing) == [3, 4, 5]


@engines
def test_the_path_hops_to_the_rank_that_arrived_last(engine):
    # Rank 0 waits for rank 1 and has the longer rest.
    graph = Graph.from_lists(
        [10, 4, 50, 30, 6, 5], [[], [0], [1], [], [3], [4]], instances=[-1, 0, -1, -1, 0, -1]
    )
    timing = propagate(graph, engine)
    assert critical_rows(graph, timing) == [3, 4, 2]
    # What the path spends on its rows adds up to the whole.
    assert np.diff(timing.start_ns[[3, 4, 2]]).tolist() == [30, 4]


@engines
def test_lags_and_releases_delay_the_start(engine):
    graph = Graph.from_lists(
        [10, 5, 5, 5],
        [[], [0], [0], [1, 2]],
        lags_ns=[[], [3], [0], [0, 7]],
        releases_ns=[100, 0, 150, 0],
    )
    timing = propagate(graph, engine)
    assert timing.start_ns.tolist() == [100, 113, 150, 162]
    assert timing.makespan_ns == 67
    assert slack(graph, timing, engine).tolist() == [40, 44, 0, 0]
    # The path begins where a release, not a dependency, set the start.
    assert critical_rows(graph, timing) == [2, 3]


@engines
def test_releases_before_zero(engine):
    graph = Graph.from_lists([10, 5], [[], [0]], releases_ns=[-50, -1000])
    timing = propagate(graph, engine)
    assert timing.start_ns.tolist() == [-50, -40]
    assert timing.makespan_ns == 15
    assert slack(graph, timing, engine).tolist() == [0, 0]


@engines
def test_zero_durations_and_ties_take_the_lowest_row(engine):
    graph = Graph.from_lists([0, 0, 0, 0], [[], [], [1, 0], [2]], instances=[-1, -1, 0, -1])
    timing = propagate(graph, engine)
    assert timing.end_ns.tolist() == [0, 0, 0, 0]
    assert critical_rows(graph, timing) == [0]
    graph = Graph.from_lists([3, 3, 1], [[], [], [1, 0]])
    assert critical_rows(graph, propagate(graph, engine)) == [0, 2]


@engines
def test_of_several_last_arrivals_the_path_takes_the_lowest(engine):
    graph = Graph.from_lists(
        [1, 9, 9, 0, 0, 0, 5],
        [[], [], [], [0], [1], [2], [3]],
        instances=[-1, -1, -1, 0, 0, 0, -1],
    )
    assert critical_rows(graph, propagate(graph, engine)) == [1, 4, 6]


@engines
def test_an_empty_graph(engine):
    graph = Graph.from_lists([], [])
    timing = propagate(graph, engine)
    assert timing.makespan_ns == 0
    assert len(slack(graph, timing, engine)) == 0
    assert critical_rows(graph, timing) == []


@engines
def test_a_cycle_is_named(engine):
    # Two ranks, two collectives, issued in opposite orders.
    graph = Graph.from_lists(
        [1, 1, 1, 1],
        [[], [0], [], [2]],
        instances=[0, 1, 1, 0],
        labels=lambda row: f"rank {row // 2} op {row % 2}",
    )
    with pytest.raises(CycleError) as caught:
        propagate(graph, engine)
    assert caught.value.rows == (1, 2, 3, 0)
    assert "rank 0 op 1 -> rank 1 op 0 -> rank 1 op 1 -> rank 0 op 0" in str(caught.value)
    assert "different orders" in caught.value.hint


@engines
def test_a_cycle_within_one_rank(engine):
    with pytest.raises(CycleError) as caught:
        propagate(Graph.from_lists([1, 1, 1], [[], [2], [1]]), engine)
    assert sorted(caught.value.rows) == [1, 2]
    assert "depends on itself" in caught.value.hint
    with pytest.raises(CycleError) as caught:
        propagate(Graph.from_lists([1], [[0]]), engine)
    assert caught.value.rows == (0,)


@engines
def test_a_long_cycle_shows_its_communications(engine):
    rows = 40
    deps = [[row - 1] for row in range(rows)]
    deps[0] = []
    instances = [0, *[-1] * (rows - 2), 0]
    with pytest.raises(CycleError) as caught:
        propagate(Graph.from_lists([1] * rows, deps, instances=instances), engine)
    assert len(caught.value.rows) == rows
    assert str(caught.value).count("->") == 1
    deps[0] = [rows - 1]
    with pytest.raises(CycleError, match=r"-> \.\.\."):
        propagate(Graph.from_lists([1] * rows, deps), engine)


@engines
def test_missing_members_are_counted_and_the_others_named(engine):
    graph = Graph.from_lists(
        [1] * 6,
        [[]] * 6,
        instances=[0, 0, 1, 1, 1, -1],
        instance_sizes=[2, 4, 2],
        labels=lambda row: f"rank {row}",
    )
    with pytest.raises(MissingMemberError) as caught:
        propagate(graph, engine)
    error = caught.value
    assert (error.instance, error.rows, error.where) == (1, (2, 3, 4), "instance=1")
    assert "3 of 4 members, present: rank 2, rank 3, rank 4; 1 more" in str(error)


def test_an_instance_without_any_member_and_one_with_many():
    graph = Graph.from_lists([1], [[]], instances=[-1], instance_sizes=[2])
    with pytest.raises(MissingMemberError, match="0 of 2 members, present: none"):
        propagate(graph)
    graph = Graph.from_lists([1] * 20, [[]] * 20, instances=[0] * 20, instance_sizes=[21])
    with pytest.raises(MissingMemberError, match="row 11, and 8 more"):
        propagate(graph)


def test_missing_members_are_reported_before_a_cycle():
    graph = Graph.from_lists([1, 1], [[0], []], instances=[-1, 0], instance_sizes=[2])
    for engine in ENGINES:
        with pytest.raises(MissingMemberError):
            propagate(graph, engine)


def test_an_unknown_engine_is_refused():
    graph = two_ranks()
    with pytest.raises(CalibError, match="no engine 'fast'"):
        propagate(graph, "fast")
    with pytest.raises(CalibError, match="no engine 'fast'"):
        slack(graph, propagate(graph), "fast")


def test_auto_spares_small_graphs_the_compiler():
    assert pick_engine(1000) == "python"
    assert pick_engine(1000, passes=1000) == "array"
    assert pick_engine(10_000_000) == "array"
    code = (
        "import sys; from prismcalib.graph import Graph; from prismcalib.propagation import *;"
        "graph = Graph.from_lists([1, 1], [[], [0]]); timing = propagate(graph);"
        "slack(graph, timing); critical_rows(graph, timing);"
        "print({'numba', 'networkx'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_compiled_engine_serves_large_graphs():
    # Four chains of rows that meet at every hundredth row.
    ranks, length = 4, 60_000
    row = np.arange(ranks * length)
    position = row % length
    graph = Graph(
        duration_ns=row % 7,
        dep_offsets=np.concatenate([[0], np.cumsum(position > 0)]),
        dep_rows=(row - 1)[position > 0],
        instance=np.where(position % 100 == 0, position // 100, -1),
        instance_size=np.full(length // 100, ranks),
    )
    timing = propagate(graph)
    reference = propagate(graph, "python")
    assert np.array_equal(timing.start_ns, reference.start_ns)
    assert np.array_equal(timing.end_ns, reference.end_ns)
    late = slack(graph, timing)
    assert np.array_equal(late, slack(graph, reference, "python"))
    assert (late[critical_rows(graph, timing)] == 0).all()


def test_without_a_writable_folder_the_kernels_still_compile(monkeypatch):
    real = numba.njit

    def no_cache(**options):
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", no_cache)

    def add_one(value):
        return value + 1

    assert compiling.compiled(add_one)(1) == 2


@engines
def test_a_batch_gives_every_scenario_its_steps(engine):
    graph = two_ranks()
    durations = np.array([[10, 10], [4, 4], [5, 5], [30, 12], [6, 6], [5, 5]])
    steps = np.array([0, 0, 1, 0, 0, 1])
    batch = propagate_batch(graph, durations, steps=steps, engine=engine)
    assert batch.makespan_ns.tolist() == [41, 23]
    assert batch.step_end_ns.tolist() == [[36, 41], [18, 23]]
    assert batch.step_ns.tolist() == [[36, 5], [18, 5]]


@engines
def test_wrong_batches_are_refused(engine):
    graph = two_ranks()
    for wrong in (np.zeros(6, np.int64), np.zeros((5, 2), np.int64), np.zeros((6, 2))):
        with pytest.raises(CalibError, match="shape"):
            propagate_batch(graph, wrong, engine=engine)
    durations = np.zeros((6, 2), np.int64)
    durations[3, 1] = -1
    with pytest.raises(CalibError, match="entry 3 is -1 ns in column 1"):
        propagate_batch(graph, durations, engine=engine)
    with pytest.raises(CalibError, match="overflow"):
        propagate_batch(graph, np.full((6, 1), 2**61), engine=engine)
    good = np.zeros((6, 2), np.int64)
    with pytest.raises(CalibError, match="scenarios"):
        propagate_batch(graph, good, lag_ns=np.zeros((4, 3), np.int64), engine=engine)
    with pytest.raises(CalibError, match="shape"):
        propagate_batch(graph, good, lag_ns=np.zeros((3, 2), np.int64), engine=engine)
    with pytest.raises(CalibError, match="steps"):
        propagate_batch(graph, good, steps=np.zeros(5, np.int32), engine=engine)
    with pytest.raises(CalibError, match="order"):
        propagate_batch(graph, good, order=np.zeros(5, np.int32), engine=engine)
    with pytest.raises(CalibError, match="no steps"):
        _ = propagate_batch(graph, good, engine=engine).step_ns
