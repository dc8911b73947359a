"""What groups are called: never a bare number, and no two the same."""

from __future__ import annotations

import pytest

from prismtrace.group_names import group_family, group_label, group_labels
from prismtrace.schema import ProcessGroup


def _group(number: int, name: str, ranks: tuple[int, ...], desc: str = "") -> ProcessGroup:
    return ProcessGroup(id=number, name=name, desc=desc, ranks=ranks)


@pytest.mark.parametrize(
    ("name", "desc", "label"),
    [
        ("tp_3", "TENSOR_PARALLEL_GROUP", "tp_3"),
        ("3", "mesh_dp", "mesh_dp [0,4]"),
        ("3", "undefined", "[0,4]"),
        ("3", "", "[0,4]"),
        ("3 (1)", "mesh_dp", "mesh_dp [0,4]"),
        ("0:split:0,4", "mesh_dp", "mesh_dp [0,4]"),
        ("0,4", "", "[0,4]"),
        ("1f2e3d4c5b6a79880123456789abcdef01234567", "mesh_dp", "mesh_dp [0,4]"),
        ("0x55d0c0ffee00", "", "[0,4]"),
    ],
)
def test_a_number_is_no_name(name: str, desc: str, label: str) -> None:
    assert group_label(name, desc, (0, 4)) == label
    assert group_labels([_group(7, name, (0, 4), desc)]) == {7: label}


def test_no_two_groups_are_called_the_same() -> None:
    groups = [
        _group(0, "dp", (0, 2)),
        _group(1, "dp", (1, 3)),
        _group(2, "0", (0, 1, 2, 3)),
        _group(3, "1", (0, 1, 2, 3)),
        _group(4, "world", (0, 1, 2, 3)),
    ]
    assert group_labels(groups) == {
        0: "dp [0,2]",
        1: "dp [1,3]",
        2: "[0-3] (id 2)",
        3: "[0-3] (id 3)",
        4: "world",
    }


def test_many_scattered_ranks_are_counted() -> None:
    ranks = tuple(number**2 for number in range(100))
    label = group_label("5", "ep", ranks)
    assert label == "ep [0-1,4,9,16,25,36,49,64,81,100,121,144,... 100 ranks]"


@pytest.mark.parametrize(
    ("name", "desc", "family"),
    [
        ("tp_3", "", "tp"),
        ("3", "mesh_dp", "mesh_dp"),
        ("3", "undefined", "groups of 2"),
        ("a3f4e5d6c7b8a9f0", "", "groups of 2"),
        ("abc_12", "other", "abc"),
    ],
)
def test_families(name: str, desc: str, family: str) -> None:
    assert group_family(_group(1, name, (0, 1), desc)) == family


def test_a_name_may_look_like_what_others_are_called() -> None:
    groups = [
        _group(0, "0", (0, 1, 2, 3)),
        _group(1, "1", (0, 1, 2, 3)),
        _group(2, "[x] (id 2)", (0, 1)),
        _group(3, "all of [0-3] (id 0)", (0, 1)),
        _group(4, "mesh [0-3] (id 0)", (0, 1)),
        _group(5, "mesh [0-3] (id 0) (id 0)", (0, 1)),
    ]
    groups[:2] = [_group(number, str(number), (0, 1, 2, 3), "mesh") for number in (0, 1)]
    labels = group_labels(groups)
    assert len(set(labels.values())) == len(groups)
    assert labels[1] == "mesh [0-3] (id 1)"
    assert labels[3] == "all of [0-3] (id 0)"
