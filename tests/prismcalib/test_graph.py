import numpy as np
import pytest

from prismcalib.errors import CalibError
from prismcalib.graph import Graph


def arrays(**changes):
    """A valid graph of three rows, rows 0 and 2 in one sync instance, with changes."""
    columns = {
        "duration_ns": np.array([5, 7, 3]),
        "dep_offsets": np.array([0, 0, 1, 3]),
        "dep_rows": np.array([0, 0, 1], np.int32),
        "instance": np.array([0, -1, 0], np.int32),
        "instance_size": np.array([2], np.int32),
    }
    return columns | changes


def test_columns_get_their_types_and_become_read_only():
    graph = Graph(
        **arrays(
            duration_ns=np.array([5, 7, 3], np.uint16), dep_lag_ns=[0, 0, 9], release_ns=[0, -4, 0]
        )
    )
    for column, dtype in (
        (graph.duration_ns, np.int64),
        (graph.dep_offsets, np.int64),
        (graph.dep_rows, np.int32),
        (graph.instance, np.int32),
        (graph.instance_size, np.int32),
        (graph.dep_lag_ns, np.int64),
        (graph.release_ns, np.int64),
    ):
        assert column.dtype == dtype
        assert not column.flags.writeable


def test_the_callers_arrays_stay_writable_and_are_not_copied():
    durations = np.array([5, 7, 3])
    graph = Graph(**arrays(duration_ns=durations))
    assert durations.flags.writeable
    assert np.shares_memory(graph.duration_ns, durations)


def test_accessors():
    graph = Graph(**arrays(dep_lag_ns=[1, 2, 3]), labels=lambda row: f"op {row}")
    assert graph.rows == 3
    assert graph.instances == 1
    assert graph.deps(2).tolist() == [0, 1]
    assert graph.lags(2).tolist() == [2, 3]
    assert graph.members_present.tolist() == [2]
    assert graph.label(1) == "op 1"
    assert Graph(**arrays()).lags(2).tolist() == [0, 0]
    assert Graph(**arrays()).label(1) == "row 1"


def test_from_lists():
    graph = Graph.from_lists(
        [5, 7, 3],
        [[], [0], [0, 1]],
        lags_ns=[[], [1], [2, 3]],
        instances=[0, -1, 0],
        releases_ns=[0, 0, 6],
    )
    assert graph.dep_offsets.tolist() == [0, 0, 1, 3]
    assert graph.dep_rows.tolist() == [0, 0, 1]
    assert graph.dep_lag_ns.tolist() == [1, 2, 3]
    assert graph.instance_size.tolist() == [2]
    assert graph.release_ns.tolist() == [0, 0, 6]


def test_an_empty_graph_is_valid():
    graph = Graph.from_lists([], [])
    assert graph.rows == graph.instances == 0


@pytest.mark.parametrize(
    ("changes", "where", "text"),
    [
        ({"instance": [0, -1]}, "instance", "2 entries; 3 fit"),
        ({"dep_offsets": [0, 1, 3]}, "dep_offsets", "3 entries; 4 fit"),
        ({"dep_lag_ns": [0]}, "dep_lag_ns", "1 entries; 3 fit"),
        ({"release_ns": [0]}, "release_ns", "1 entries; 3 fit"),
        ({"dep_offsets": [1, 1, 1, 3]}, "dep_offsets", "must run from 0 to 3, not from 1 to 3"),
        ({"dep_offsets": [0, 2, 1, 3]}, "dep_offsets", "decreases at row 1"),
        ({"dep_rows": [0, 3, 1]}, "dep_rows", "row 2 depends on row 3 of 3"),
        ({"dep_rows": [-1, 0, 1]}, "dep_rows", "row 1 depends on row -1"),
        ({"instance": [0, 1, 0]}, "instance", "row 1 is in sync instance 1 of 1"),
        ({"instance": [0, -2, 0]}, "instance", "row 1 is in sync instance -2"),
        ({"duration_ns": [5, -7, 3]}, "duration_ns", "row 1 lasts -7 ns"),
        ({"dep_lag_ns": [0, 0, -1]}, "dep_lag_ns", "row 2 has the lag -1 ns"),
        ({"duration_ns": [2**61, 2**61, 3]}, "duration_ns", "overflow"),
        ({"release_ns": [-(2**61), 2**61, 3]}, "duration_ns", "overflow"),
        ({"instance_size": [0]}, "instance_size", "sync instance 0 expects 0 members"),
        ({"instance_size": [1]}, "instance", "has 2 members but expects 1: row 0, row 2"),
        ({"duration_ns": [5.0, 7.0, 3.0]}, "duration_ns", "needs integers"),
        ({"duration_ns": [[5, 7, 3]]}, "duration_ns", "one dimension"),
        ({"dep_rows": np.array([0, 0, 2**31])}, "dep_rows", "do not fit int32"),
    ],
)
def test_invalid_arrays_are_refused(changes, where, text):
    with pytest.raises(CalibError, match=text) as caught:
        Graph(**arrays(**changes))
    assert caught.value.where == f"Graph.{where}"
