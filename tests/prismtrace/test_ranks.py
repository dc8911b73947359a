import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismtrace.ranks import format_ranks, parse_numbers, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1], "0-1"),
        ([0, 8], "0,8"),
        ([0, 1, 2, 3], "0-3"),
        ([0, 8, 16, 3], "0-16/8,3"),
        ([3, 2, 1], "3,2,1"),
        ([7, 0, 1, 2], "7,0-2"),
        ([0, 5, 6, 7], "0,5-7"),
    ],
)
def test_runs(ranks, text):
    assert format_ranks(ranks) == text
    assert parse_ranks(text) == tuple(ranks)


@given(st.lists(st.integers(0, 40), max_size=30))
def test_any_list_comes_back_in_order(ranks):
    assert parse_ranks(format_ranks(ranks)) == tuple(ranks)


def test_spaces_are_allowed():
    assert parse_ranks(" 0-2 , 5 ") == (0, 1, 2, 5)


@pytest.mark.parametrize("text", ["x", "1-", "-1", "3-1", "0-8/0", "1,,2", "0/2", "1.5"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="ranks"):
        parse_ranks(text)


@pytest.mark.parametrize("text", ["0-99999999999", "4194304", "0-4194303,0", "9" * 5_000])
def test_absurd_numbers_are_refused_before_they_are_expanded(text):
    with pytest.raises(ValueError, match="ranks"):
        parse_ranks(text)


def test_thousands_of_groups_fit_into_a_small_header():
    """8 192 ranks in groups of 8 neighbours and of 8 with stride: the header stays small."""
    groups = [range(first, first + 8) for first in range(0, 8192, 8)]
    groups += [range(first, 8192, 1024) for first in range(1024)]
    assert sum(len(format_ranks(group)) for group in groups) < 40_000


def test_steps_are_written_without_strides():
    assert format_ranks([2, 4, 6, 7, 8], strided=False) == "2,4,6-8"
    assert format_ranks([2, 4, 6, 7, 8]) == "2-6/2,7-8"


def test_numbers_of_something_else_are_called_what_they_are():
    far = 2**31 - 1
    assert parse_numbers(f"3,{far - 1}-{far}", "step", 2**31) == (3, far - 1, far)
    with pytest.raises(ValueError, match="not a list of steps: '-1'"):
        parse_numbers("-1", "step", 2**31)
    with pytest.raises(ValueError, match=f"steps go up to {far}: "):
        parse_numbers(str(far + 1), "step", 2**31)
    with pytest.raises(ValueError, match="more than 4194304 steps"):
        parse_numbers(f"0-{far}", "step", 2**31)
