import polars as pl
import pytest

from prismcalib.errors import PredicateError
from prismcalib.merging import merge
from prismcalib.predicates import RowPicker


@pytest.fixture
def picker(make_run):
    result = merge(make_run().trace)
    return RowPicker(result.nodes, result.header)


@pytest.mark.parametrize(
    ("where", "same"),
    [
        ('kind == "all_reduce" and rank < 2', "kind = 'all_reduce' AND rank < 2"),
        ("kind IN ('send', \"recv\")", "kind = 'send' OR kind = 'recv'"),
        ('name LIKE "back%"', "name = 'backward'"),
        ('group_name == "world"', "group = 0"),
        ("group_size = 2", "group > 0"),
        ("\"kind\" = 'compute'", "not (kind <> 'compute')"),
        ("step BETWEEN 0 AND 1", "step < 2"),
        ("name IS NULL", "kind != 'compute'"),
        ("true", "rank >= 0"),
    ],
)
def test_sql_as_people_write_it(picker, where, same):
    assert (picker.pick(where) == picker.pick(same)).all()
    assert 0 < picker.pick(where).sum() <= picker.rows.height


def test_polars_expressions(picker):
    expression = (pl.col("kind") == "all_reduce") & (pl.col("group_name") == "world")
    picked = picker.pick(expression)
    assert (picked == picker.pick("kind = 'all_reduce' and group = 0")).all()


def test_texts_keep_their_quotes(picker):
    named = RowPicker(
        picker.rows.with_columns(name=pl.lit('it\'s "it"', dtype=pl.Categorical)), picker.header
    )
    assert named.pick("name = 'it''s \"it\"'").all()
    assert named.pick('name = "it\'s ""it"""').all()


@pytest.mark.parametrize(
    ("where", "message", "hint"),
    [
        ("kin = 'send'", "no column kin", "did you mean kind?"),
        ("kind = all_reduce", "no column all_reduce", "in quotes: kind = 'all_reduce'"),
        ("group_name = world", "no column world", "in quotes: group_name = 'world'"),
        ("rank <", "cannot be read", "such as"),
        ("", "cannot be read", "such as"),
        ("rank = 1; drop", "cannot be read", "such as"),
        ("rank = 'x'", "cannot be evaluated", "numbers with numbers"),
        ('group == "world"', "cannot be evaluated", "`group_name` a text"),
        ('kind = "send" & rank = 1', "cannot be evaluated", "and, or, not"),
        ("rank", "gives Int32", "comparison"),
        ("kind = 'allreduce'", "no row", "'all_reduce', 'compute', 'recv', 'send'"),
        ("step > 99", "no row", "step runs from 0 to 2"),
        ("microbatch = 1", "no row", "microbatch is empty"),
        ("false", "no row", "never true"),
        ("rank IN (SELECT rank FROM read_csv('x'))", "SELECT is not allowed", "subqueries"),
    ],
)
def test_what_is_refused(picker, where, message, hint):
    with pytest.raises(PredicateError, match=message) as caught:
        picker.pick(where)
    assert hint in caught.value.hint
    assert caught.value.where == where
