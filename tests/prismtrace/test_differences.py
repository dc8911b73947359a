"""Two traces side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

import prismtrace as pt
from prismtrace import differences
from prismtrace.differences import ClassDifference, GroupDifference
from prismtrace.schema import ProcessGroup
from prismtrace.trace import Trace


def changed(trace: Trace, rank: int, index: int, **values: Any) -> Trace:
    at = (pl.col("rank") == rank) & (pl.col("index") == index)
    schema = trace.nodes.collect_schema()
    return replace(
        trace,
        nodes=trace.nodes.with_columns(
            pl.when(at).then(pl.lit(value, schema[name])).otherwise(name).alias(name)
            for name, value in values.items()
        ),
    )


def test_a_trace_is_the_same_as_itself(job: Trace) -> None:
    found = pt.diff(job, job)
    assert found.same
    assert (found.ranks, found.resized, found.groups_a) == ((), 0, ())
    assert {one.change_ns for one in (*found.kinds, *found.groups, *found.by_rank)} == {0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "all_gather", "reduce_op": None}, "all_gather group=world seq=0"),
        ({"seq": 4}, "all_reduce group=world seq=4"),
        ({"bytes": 63}, "bytes=63"),
        ({"dtype": "int8"}, "dtype=int8"),
        ({"deps": []}, "all_reduce group=world seq=0 bytes=64 dtype=float32"),
        ({"group": None}, "all_reduce seq=0"),
        ({"group": 9}, "group=unknown"),
        ({"xdeps": [0]}, "deps=[1] xdeps=[0]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_makes_a_difference(job: Trace, values: dict[str, Any], words: str) -> None:
    found = pt.diff(job, changed(job, 1, 1, **values))
    (rank,) = found.ranks
    assert not found.same
    assert (rank.rank, rank.index, rank.nodes_a, rank.nodes_b) == (1, 1, 3, 3)
    assert rank.a.startswith("all_reduce group=world seq=0 bytes=64")
    assert words in rank.b


@pytest.mark.parametrize(
    "values",
    [
        {"start_ns": 7, "dur_ns": 8},
        {"name": "other"},
        {"stream": 0, "step": 3, "phase": "backward"},
        {"bytes": None, "dtype": None},
        {"lag_ns": None, "wait_ns": None},
    ],
    ids="-".join,
)
def test_what_makes_none(job: Trace, values: dict[str, Any]) -> None:
    assert pt.diff(job, changed(job, 1, 1, **values)).same


def test_dependencies_are_a_set(make_trace: Any) -> None:
    a, b = (
        make_trace({}, {}, {"deps": deps, "xdeps": xdeps}, kind="bare")
        for deps, xdeps in (([2, 1], [1, 0]), ([1, 2], [0, 1]))
    )
    assert pt.diff(a, b).same
    (rank,) = pt.diff(a, make_trace({}, {}, {"deps": [1]}, kind="bare")).ranks
    assert (rank.index, rank.a, rank.b) == (
        2,
        "compute deps=[1, 2] xdeps=[0, 1]",
        "compute deps=[1]",
    )


def test_the_first_difference_of_every_rank_is_shown(make_trace: Any) -> None:
    a = make_trace(*({"rank": r, "name": n} for r in (0, 1, 2) for n in "abc"), kind="bare")
    rows = [{"rank": r, "name": n} for r in (0, 1) for n in "abc"]
    rows += [{"rank": 2, "name": "a"}, {"rank": 2, "kind": "memcpy"}]
    rows += [{"rank": 2, "kind": "memcpy"}, {"rank": 2}]
    found = pt.diff(a, make_trace(*rows, kind="bare"))
    (rank,) = found.ranks
    assert (rank.rank, rank.index, rank.nodes_a, rank.nodes_b) == (2, 1, 3, 4)
    assert (rank.a, rank.b) == ("compute 'b'", "memcpy")
    longer = pt.diff(a, make_trace(*rows[:6], {"rank": 2}, kind="bare"))
    assert (longer.ranks[0].index, longer.ranks[0].b) == (1, None)


def test_ranks_and_groups_that_only_one_has(make_trace: Any) -> None:
    groups = [
        ProcessGroup(id=n, name=name, ranks=ranks)
        for n, (name, ranks) in enumerate({"x": (0, 1), "y": (1, 0), "z": (0,)}.items())
    ]
    a = make_trace({}, {"rank": 1}, kind="bare", world_size=3, groups=tuple(groups[:2]))
    b = make_trace({}, {"rank": 2}, kind="bare", world_size=3, groups=tuple(groups[1:]))
    found = pt.diff(a, b)
    assert (found.ranks_a, found.ranks_b) == ((1,), (2,))
    assert [(one.nodes_a, one.nodes_b) for one in found.kinds] == [(1, 1)]
    assert {(one.nodes_a, one.nodes_b) for one in found.by_rank} == {(1, 1), (1, 0), (0, 1)}
    assert (found.groups_a, found.groups_b) == (("x",), ("z",))
    assert not found.same
    assert not pt.diff(make_trace({}, kind="bare"), make_trace({}, world_size=2)).same


def test_groups_of_jobs_of_different_size_are_paired_by_name(make_trace: Any) -> None:
    def trace(world: int, **groups: tuple[int, ...]) -> Trace:
        listed = tuple(
            ProcessGroup(id=n, name=name, ranks=ranks)
            for n, (name, ranks) in enumerate(groups.items())
        )
        row = {"kind": "barrier", "group": 0, "seq": 0}
        return make_trace(row, kind="bare", world_size=world, groups=listed)

    a = trace(2, all=(0, 1), one=(0,), tp=(0, 1))
    b = trace(4, all=(0, 1, 2, 3), eins=(0,), dp=(0, 2))
    found = pt.diff(a, b)
    assert found.regrouped == (GroupDifference("all", (0, 1), (0, 1, 2, 3)),)
    assert (found.groups_a, found.groups_b) == (("tp",), ("dp",))
    assert (found.ranks, found.same) == ((), False)
    assert pt.diff(a, trace(2, all=(1, 0), one=(0,), tp=(0, 1))).regrouped == ()


def test_groups_are_the_same_if_their_ranks_are(make_trace: Any) -> None:
    def trace(*names: str, used: str) -> Trace:
        groups = tuple(ProcessGroup(id=n, name=x, ranks=(0,)) for n, x in enumerate(names))
        row = {"kind": "barrier", "group": names.index(used), "seq": 0}
        return make_trace(row, kind="bare", groups=groups)

    assert pt.diff(trace("tp", "dp", used="tp"), trace("dp", "tp", used="tp")).same
    assert not pt.diff(trace("tp", "dp", used="tp"), trace("dp", "tp", used="dp")).same
    assert pt.diff(trace("tp", "dp", used="tp"), trace("a", "b", used="a")).same
    assert pt.diff(trace("tp", "dp", used="dp"), trace("a", "tp", used="a")).same


def test_all_to_all_may_have_other_sizes(make_trace: Any) -> None:
    row = {"kind": "all_to_all", "group": 0, "seq": 0}
    found = pt.diff(make_trace({**row, "bytes": 8}), make_trace({**row, "bytes": 9}))
    assert (found.same, found.resized) == (True, 1)


def test_times_by_class(job: Trace) -> None:
    slower = changed(changed(job, 1, 1, dur_ns=45), 1, 0, dur_ns=51)
    found = pt.diff(job, slower)
    assert found.same
    assert found.kinds[0] == ClassDifference("all_reduce", 2, 2, 80, 95)
    assert [(one.name, one.change_ns) for one in found.kinds[:2]] == [
        ("all_reduce", 15),
        ("compute", 1),
    ]
    assert [(one.name, one.change_ns) for one in found.by_rank] == [("1", 16), ("0", 0)]
    assert [(one.name, one.change_ns) for one in found.groups] == [("world", 15)]


def test_a_trace_without_times(job: Trace) -> None:
    bare = replace(
        job, nodes=job.nodes.with_columns(start_ns=pl.lit(None), dur_ns=pl.lit(None, pl.Int64))
    )
    found = pt.diff(bare, job)
    assert found.same
    assert [(one.time_a_ns, one.change_ns) for one in found.kinds] == [(None, None)] * 4
    assert {one.name: one.time_b_ns for one in found.kinds}["all_reduce"] == 80


def test_block_by_block(job: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    other = changed(changed(job, 1, 1, seq=9), 0, 2, deps=[1])
    whole = pt.diff(job, other)
    monkeypatch.setattr(differences, "BLOCK_ROWS", 1)
    compared: list[int] = []
    assert pt.diff(job, other, progress=compared.append) == whole
    assert compared == [8, 6]
    assert [(rank.rank, rank.index) for rank in whole.ranks] == [(0, 2), (1, 1)]
