from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismreplay.slicing.rotation import Ties, rotate, ties_of, whole_groups
from prismtrace.schema import ProcessGroup
from prismtrace.trace import open_trace
from tests.prismreplay.slicing.jobs import bare_graph


def test_tensor_parallel_groups_stay_together_though_others_communicate_more():
    pairs = [Ties((first, first + 1), 10, "tp") for first in (0, 2, 4, 6)]
    replicas = [Ties((0, 2, 4, 6), 500, "dp"), Ties((1, 3, 5, 7), 500, "dp")]
    assert rotate(range(8), 2, [*replicas, *pairs]) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert rotate(range(8), 4, [*replicas, *pairs]) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_members_that_lie_apart_are_put_together():
    assert rotate(range(4), 2, [Ties((0, 2), 9), Ties((1, 3), 9)]) == ((0, 2), (1, 3))
    # A part is filled with what is left.
    assert rotate(range(4), 3, [Ties((0, 2), 9), Ties((1, 3), 9)]) == ((0, 2), (1, 3))
    assert rotate(range(5), 3, [Ties((0, 2), 9), Ties((1, 3), 9)]) == ((0, 2, 4), (1, 3))


def test_groups_that_do_not_fit_are_cut_into_neighbours():
    assert rotate(range(6), 2, [Ties(tuple(range(6)), 3)]) == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(ValueError, match="at least one rank"):
        rotate(range(4), 0)


ranks = st.lists(st.integers(0, 40), unique=True, min_size=1)
groups = st.lists(
    st.builds(
        Ties,
        st.lists(st.integers(0, 40), unique=True, min_size=2, max_size=8).map(tuple),
        st.integers(1, 9),
        st.sampled_from([None, "tp", "dp"]),
    )
)


@given(ranks, st.integers(1, 9), groups)
def test_every_rank_is_real_once(chosen, size, ties):
    parts = rotate(chosen, size, ties)
    assert sorted(rank for part in parts for rank in part) == sorted(chosen)
    assert all(0 < len(part) <= size for part in parts)
    assert parts == rotate(chosen[::-1], size, ties[::-1])


def test_ties_are_counted_in_the_graph(tmp_path):
    graph = bare_graph(
        tmp_path / "bare.parquet",
        groups=[("tp", (0, 1)), ("tp", (2, 3)), ("dp", (0, 2)), ("dp", (1, 3))],
        steps=3,
    )
    ties = ties_of(open_trace(graph))
    assert [(one.ranks, one.operations, one.axis) for one in ties] == [
        ((0, 1), 3, "tp"),
        ((2, 3), 3, "tp"),
        ((0, 2), 3, "dp"),
        ((1, 3), 3, "dp"),
    ]


def test_groups_are_whole_or_split():
    made = [
        ProcessGroup(id=number, name=str(number), ranks=ranks)
        for number, ranks in enumerate([(0, 1), (0, 2), (3,), (2, 3)])
    ]
    whole, split = whole_groups([(0, 1), (2, 3)], made)
    assert [group.id for group in whole] == [0, 3]
    assert [group.id for group in split] == [1]
