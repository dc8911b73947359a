"""Sizes and groups to measure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismreplay.comm_bench.spec import BenchSpec, parse_sizes, placements
from prismreplay.errors import CommBenchError
from prismtrace.schema import DType, Kind


@pytest.mark.parametrize(
    ("text", "factor", "sizes"),
    [
        ("1K-64K", 4, (1024, 4096, 16384, 65536)),
        ("1k-3KiB", 2, (1024, 2048, 3072)),
        ("1M,512", 4, (512, 1 << 20)),
        ("1K-4K, 8K", 2, (1024, 2048, 4096, 8192)),
    ],
)
def test_sizes(text, factor, sizes):
    assert parse_sizes(text, factor) == sizes


@pytest.mark.parametrize("text", ["", "K", "4K-1K", "1-2-3", "0", "-4", "1T"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"no (size|range of sizes) such as"):
        parse_sizes(text)


def test_a_spec_goes_to_other_processes():
    spec = BenchSpec((Kind.SEND,), (8, 16), (2,), DType.BFLOAT16, "nccl", 3, 0.5)
    assert BenchSpec.of_json(spec.to_json()) == spec


def test_groups_on_one_host():
    assert [one.ranks for one in placements(["a"] * 6, ())] == [
        (0, 1),
        (0, 1, 2, 3),
        (0, 1, 2, 3, 4, 5),
    ]


def test_groups_on_few_and_on_many_hosts():
    found = placements(["a", "a", "b", "b"], (2, 4))
    assert found == (((0, 1), 1), ((0, 2), 2), ((0, 1, 2, 3), 2))


def test_groups_that_are_too_large():
    with pytest.raises(CommBenchError, match="a group of 3 cannot be made of 2 ranks"):
        placements(["a", "a"], (2, 3))


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_every_group_has_rank_0_and_its_hosts(hosts):
    for ranks, count in placements(hosts, ()):
        assert ranks[0] == 0
        assert ranks == tuple(sorted(set(ranks)))
        assert len({hosts[rank] for rank in ranks}) == count
