from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from prismtrace.converters.groups import GroupBook, GroupKey, NamedGroup, read_groups_file
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.errors import GroupError, InputFileError
from prismtrace.schema import Kind


def book(
    listed: dict[int, dict[str, tuple[int, ...] | None]] | None = None,
    *,
    world_size: int = 4,
    given: dict[str, tuple[int, ...]] | None = None,
) -> GroupBook:
    groups = {
        rank: [NamedGroup(name, "", ranks) for name, ranks in names.items()]
        for rank, names in (listed or {}).items()
    }
    return GroupBook.build(world_size, groups, given or {}, Counter())


def comm(**says: object) -> CommOp:
    return CommOp(Kind.ALL_REDUCE, **says)


def test_union_of_what_ranks_list() -> None:
    found = book({0: {"1": (0, 1)}, 1: {"1": (0, 1)}, 2: {"1": (2, 3)}, 3: {"1": (2, 3)}})
    groups, ids = found.table([])
    assert [(g.id, g.name, g.ranks) for g in groups] == [(0, "1", (0, 1)), (1, "1", (2, 3))]
    assert found.assign(0, comm(group_name="1")) == GroupKey((0, 1), "1")
    assert found.assign(3, comm(group_name="1")) == GroupKey((2, 3), "1")
    assert ids[GroupKey((2, 3), "1")] == 1


def test_order_of_ranks_is_the_group_rank() -> None:
    assert book({0: {"1": (2, 0)}}).assign(0, comm(group_name="1")).ranks == (2, 0)


def test_groups_with_equal_ranks_are_told_apart_by_name() -> None:
    found = book({r: {"0": (0, 1), "1": (0, 1)} for r in (0, 1)}, world_size=2)
    assert found.assign(0, comm(group_name="1")).name == "1"
    assert len(found.table([])[0]) == 2


def test_names_that_differ_between_ranks_are_one_group() -> None:
    # Counters of different processes: the n-th group of equal ranks is the same one.
    found = book({0: {"3": (0, 1), "5": (0, 1)}, 1: {"2": (0, 1), "9": (0, 1)}})
    assert found.assign(1, comm(group_name="9")) == found.assign(0, comm(group_name="5"))
    assert [g.name for g in found.table([])[0]] == ["3", "5"]
    assert found.counts == {"group-names-differ": 1}


def test_metadata_that_says_more_than_the_name() -> None:
    found = book({0: {"1": (0, 1)}})
    assert found.assign(0, comm(group_name="1", group_ranks=(0, 2))).ranks == (0, 2)
    assert found.assign(0, comm(group_ranks=(0, 3))) == GroupKey((0, 3), "0,3")
    with pytest.raises(GroupError, match="not listed in any file"):
        found.assign(0, comm(group_name="1", group_size=3))
    with pytest.raises(GroupError, match="not listed in any file"):
        found.assign(0, comm(group_name="7"))


def test_a_group_of_the_whole_job_needs_no_list() -> None:
    # Long lists are cut short in the trace, and the block may be absent.
    found = book(world_size=64)
    assert found.assign(5, comm(group_name="0", group_size=64)).ranks == tuple(range(64))
    assert found.counts == {}


def test_size_alone_decides_when_one_group_fits() -> None:
    found = book({0: {"0": (0, 1, 2, 3), "1": (0, 1)}})
    assert found.assign(0, comm(group_size=2)).name == "1"
    with pytest.raises(GroupError, match="names no process group and 2 fit") as caught:
        found.assign(0, comm())
    assert "'0' = ranks 0-3, '1' = ranks 0-1" in str(caught.value)
    assert "tell the groups of collectives; or keep" in str(caught.value.hint)
    with pytest.raises(GroupError, match="send names no process group") as caught:
        found.assign(0, CommOp(Kind.SEND))
    assert "nor would dumps" in str(caught.value.hint)
    with pytest.raises(GroupError, match="none of its size is known"):
        found.assign(0, comm(group_size=3))


def test_nothing_known_at_all_means_the_whole_job() -> None:
    found = book()
    assert found.assign(2, comm()) is found.assumed
    assert found.assumed == GroupKey((0, 1, 2, 3), "world")


def test_process_local_numbers_tell_groups_of_equal_ranks_apart() -> None:
    found = book({0: {"0": (0, 1), "1": (0, 1)}}, world_size=2)
    order = [found.assign(0, comm(local_group=n)).name for n in (940, 177, 940, 63)]
    assert order == ["0", "1", "0", "0#2"]


def test_ranks_that_are_not_listed() -> None:
    found = book({0: {"0": None, "5": None}})
    assert [(g.name, g.ranks) for g in found.table([])[0]] == [("0", (0, 1, 2, 3))]
    assert found.counts == {"group-without-ranks": 1}


def test_ranks_outside_the_world() -> None:
    for wrong in ({"listed": {0: {"1": (0, 4)}}}, {"given": {"1": (0, 4)}}):
        with pytest.raises(GroupError, match=r"ranks 4 outside the world of 4"):
            book(**wrong)
    with pytest.raises(GroupError, match="outside the world"):
        book().assign(0, comm(group_ranks=(0, 9)))


def test_given_groups_come_first() -> None:
    found = book(given={"tp": (0, 1), "dp": (0, 2, 3)})
    assert found.assign(0, comm(group_size=2)).name == "tp"
    assert found.assign(2, comm(group_name="dp")).ranks == (0, 2, 3)


def test_keys_of_equal_groups_are_equal() -> None:
    assert GroupKey((0, 1), "a") == GroupKey((0, 1), "a")
    assert len({GroupKey((0, 1), "a"), GroupKey((0, 1), "a"), GroupKey((0, 1), "b")}) == 2
    assert min(GroupKey((0, 2), "a"), GroupKey((0, 1), "b")).name == "b"


def test_groups_file(tmp_path: Path) -> None:
    path = tmp_path / "groups.json"
    path.write_text(json.dumps({"tp": "0-3", "dp": [0, 4], "x": "0-8/4"}))
    assert read_groups_file(path) == {"tp": (0, 1, 2, 3), "dp": (0, 4), "x": (0, 4, 8)}
    for text in ("{", "[1]", '{"a": 5}', '{"a": "x-y"}', '{"a": ["p"]}'):
        path.write_text(text)
        with pytest.raises(InputFileError, match="not a groups file"):
            read_groups_file(path)
