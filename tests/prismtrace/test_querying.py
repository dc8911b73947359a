"""Questions in SQL."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prismtrace as pt
from prismtrace.errors import InputFileError, OutputError, PrismError, QueryError
from prismtrace.querying import answering, write_answer, write_json
from prismtrace.reading import reading
from prismtrace.trace import Trace, write


def rows(trace: Trace, sql: str) -> list[tuple[object, ...]]:
    return pt.query(trace, sql).collect().rows()


def test_the_tables(job: Trace) -> None:
    sql = "SELECT kind, COUNT(*) AS n FROM nodes WHERE rank = 0 GROUP BY kind ORDER BY n, kind"
    assert rows(job, sql) == [("all_reduce", 1), ("send", 1), ("compute", 2)]
    assert rows(job, "SELECT id, name, size FROM groups") == [(0, "world", 2)]
    assert rows(job, "SELECT kind, world_size, ranks, steps FROM header") == [
        ("calibrated", 2, "0-1", [0])
    ]
    joined = 'SELECT SUM(n.dur_ns) FROM nodes n JOIN groups g ON n."group" = g.id'
    assert rows(job, joined) == [(105,)]


def test_enums_are_text(job: Trace) -> None:
    assert rows(job, "SELECT COUNT(*) FROM nodes WHERE kind LIKE 'all_%'") == [(2,)]
    assert rows(job, "SELECT COUNT(*) FROM nodes WHERE kind = 'allreduce'") == [(0,)]
    assert rows(job, "SELECT COUNT(*) FROM nodes WHERE name LIKE 'gemm%'") == [(3,)]


@pytest.mark.parametrize(
    ("sql", "names"),
    [
        ("SELECT COUNT(*) FROM nodes", ["COUNT(*)"]),
        ("select distinct kind, Sum( dur_ns ),max(dur_ns) FROM nodes GROUP BY kind;",
         ["kind", "Sum( dur_ns )", "max(dur_ns)"]),
        ('SELECT rank AS r, n.kind, n."group", n.rank "a b", CAST(rank AS INT) c FROM nodes n',
         ["r", "kind", "group", "a b", "c"]),
        ("WITH t AS (SELECT SUM(dur_ns) AS s FROM nodes) SELECT MAX(s) FROM t", ["MAX(s)"]),
        ("SELECT 'it''s, from', rank  +\n 1 /* , x */, rank IS NULL -- , y\n FROM nodes",
         ["'it''s, from'", "rank + 1", "rank IS NULL"]),
        ("SELECT SUM(rank) OVER (PARTITION BY kind) FROM nodes",
         ["SUM(rank) OVER (PARTITION BY kind)"]),
        ('SELECT CASE WHEN rank > 0 THEN 1 ELSE 0 END, rank AS "^.*$" FROM nodes',
         ["CASE WHEN rank > 0 THEN 1 ELSE 0 END", "^.*$"]),
        # Of these Polars tells the names.
        ("SELECT COALESCE(name, 'a text that is too long to be the name of a column') FROM nodes",
         ["name"]),
        ("SELECT *, size + 1 AS more FROM groups", ["id", "name", "desc", "label", "size", "ranks", "more"]),
        ("SELECT COUNT(*) FROM nodes UNION ALL SELECT COUNT(*) FROM groups", ["COUNT(*)"]),
        ("(SELECT COUNT(*) FROM nodes)", ["len"]),
        ("SHOW TABLES", ["name"]),
    ],
)  # fmt: skip
def test_columns_are_called_as_they_are_written(job: Trace, sql: str, names: list[str]) -> None:
    assert pt.query(job, sql).collect().columns == names


@pytest.mark.parametrize(
    ("sql", "message", "hint"),
    [
        ("", "no statement, or several", "one SELECT"),
        ("SELECT 1; SELECT 2", "no statement, or several", "one SELECT"),
        ("SELEC kind FROM nodes", "not valid SQL: expected: an SQL statement", "group"),
        ("SELECT kind FROM nodez", "there is no table 'nodez'", "nodes, groups and header"),
        ("SELECT kid FROM nodes", "there is no column 'kid'", "id, rank, index, kind"),
        ("SELECT foo(kind) FROM nodes", "unsupported function 'foo'", "tables"),
        ("SELECT kind + 1 FROM nodes", "arithmetic on dtypes str", "CAST"),
        ("UPDATE nodes SET rank = 1", "the SQL is no SELECT", "SELECT"),
        ("-- all\n delete FROM nodes", "the SQL is no SELECT", "SELECT"),
        ("DROP TABLE nodes", "does not ask for anything", "SELECT"),
        ("CREATE TABLE x AS SELECT * FROM nodes", "does not ask for anything", "SELECT"),
    ],
)
def test_queries_that_are_wrong(job: Trace, sql: str, message: str, hint: str) -> None:
    with pytest.raises(QueryError) as caught:
        pt.query(job, sql)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sql", ["SELECT CAST(kind AS INT) FROM nodes", "SELECT SUM(deps) FROM nodes"]
)
def test_what_turns_out_while_computing(job: Trace, sql: str) -> None:
    with reading([]), pytest.raises(PrismError) as caught, answering():
        pt.query(job, sql).collect()
    assert isinstance(caught.value, QueryError)


WORDS = (
    'SELECT FROM WHERE GROUP BY ORDER LIMIT JOIN ON AS nodes groups header kind rank "group" deps '
    "dur_ns * , ( ) = - / < 1 NULL COUNT(*) SUM(dur_ns) MAX(name) CAST( AS INT) UNION IN (1,2) ; "
    "DISTINCT CASE WHEN THEN END UNNEST(deps) OVER (PARTITION OR NOT DROP TABLE"
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.sampled_from(WORDS.split()), max_size=4), at=st.integers(0, 9))
def test_whatever_is_asked_is_answered_or_refused(job: Trace, words: list[str], at: int) -> None:
    asked = ["SELECT", "kind", ",", "COUNT(*)", "FROM", "nodes", "GROUP", "BY", "kind"]
    sql = " ".join([*asked[:at], *words, *asked[at + 1 :]])
    with contextlib.suppress(QueryError), answering():
        write_json(pt.query(job, sql), io.StringIO())


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_answers_in_files(job: Trace, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    write_answer(pt.query(job, "SELECT rank, name FROM nodes"), path, suffix, trace=job)
    read = {"csv": pl.read_csv, "json": pl.read_json, "parquet": pl.read_parquet}[suffix]
    assert read(path).rows() == job.collect().select("rank", pl.col("name").cast(str)).rows()
    assert list(tmp_path.iterdir()) == [path]


def test_csv_has_no_lists(job: Trace, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="CSV has no lists"):
        write_answer(pt.query(job, "SELECT deps FROM nodes"), tmp_path / "a.csv", "csv", trace=job)
    assert list(tmp_path.iterdir()) == []


def test_json_is_a_list_however_long(job: Trace) -> None:
    for sql, expected in (("SELECT * FROM nodes WHERE rank > 7", 0), ("SELECT * FROM nodes", 7)):
        text = io.StringIO()
        write_json(pt.query(job, sql), text)
        assert len(json.loads(text.getvalue())) == expected


def test_the_trace_is_not_overwritten(job: Trace, tmp_path: Path) -> None:
    write(job, tmp_path / "run.parquet")
    opened = pt.open(tmp_path / "run.parquet")
    with pytest.raises(OutputError, match="one of the inputs"):
        write_answer(
            pt.query(opened, "SELECT rank FROM nodes"), opened.paths[0], "parquet", trace=opened
        )


def test_damaged_rows_are_not_the_querys_fault(make_trace: object, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    write(make_trace(*({"name": f"kernel {n}"} for n in range(500))), path)
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    opened = pt.open(path)
    with pytest.raises(InputFileError, match="damaged"):
        write_answer(
            pt.query(opened, "SELECT * FROM nodes"), tmp_path / "a.json", "json", trace=opened
        )
