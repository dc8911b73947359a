"""diff, query, slice-out and concat as people call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import prismtrace as pt
from prismtrace import cli
from prismtrace.schema import ProcessGroup
from prismtrace.trace import Trace, write


def call(*words: object) -> Any:
    return CliRunner().invoke(cli.app, [str(word) for word in words])


@pytest.fixture
def path(job: Trace, tmp_path: Path) -> Path:
    write(job, tmp_path / "run.parquet")
    return tmp_path / "run.parquet"


@pytest.fixture
def piece(path: Path, tmp_path: Path) -> Path:
    pt.slice_out(pt.open(path), tmp_path / "piece.parquet", ranks=[0])
    return tmp_path / "piece.parquet"


def test_diff_tells_and_exits(path: Path, piece: Path) -> None:
    done = call("diff", path, path)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "the same graph")
    done = call("diff", path, piece)
    assert done.exit_code == 1
    assert done.stdout.startswith("the graphs differ\nonly in A: ranks 1\n")
    assert "all_reduce        1        1" in done.stdout
    assert "are those of ranks that both have" in done.stdout


def test_diff_shows_both_sides(make_trace: Any, tmp_path: Path) -> None:
    for name, kinds in (("a", ["compute", "memcpy"]), ("b", ["compute", "compute", "compute"])):
        rows = [{"kind": kind, "rank": r} for r in range(3) for kind in kinds]
        write(make_trace(*rows, kind="bare"), tmp_path / f"{name}.parquet")
    done = call("diff", tmp_path / "a.parquet", tmp_path / "b.parquet", "--limit", 2)
    assert "rank 1 index 1 (2 and 3 nodes)\n  A: memcpy\n  B: compute\n" in done.stdout
    assert "... and 1 more (--json lists all)" in done.stdout
    assert "ms A" not in done.stdout


def test_diff_of_jobs_of_different_size(make_trace: Any, tmp_path: Path) -> None:
    for name, world in (("a", 2), ("b", 4)):
        group = ProcessGroup(id=0, name="0", desc="default_pg", ranks=tuple(range(world)))
        row = {"kind": "barrier", "group": 0, "seq": 0}
        rows = [{**row, "rank": rank} for rank in range(world)]
        trace = make_trace(
            *rows, kind="bare", world_size=world, groups=(group,), axes={"dp": world}
        )
        write(trace, tmp_path / f"{name}.parquet")
    done = call("diff", tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert done.stdout.splitlines()[:4] == [
        "the graphs differ",
        "world of 2 ranks in A (dp 2), of 4 in B (dp 4)",
        "only in B: ranks 2-3",
        "group default_pg (0): ranks 0-1 in A, 0-3 in B",
    ]
    assert "another place of the job" not in done.stdout


def test_diff_for_programs(path: Path, piece: Path) -> None:
    found = json.loads(call("diff", path, piece, "--json").stdout)
    assert (found["same"], found["ranks_a"], found["ranks"]) == (False, [1], [])
    assert found["kinds"][0].keys() == {
        "name", "nodes_a", "nodes_b", "time_a_ns", "time_b_ns",
    }  # fmt: skip


def test_query_prints(path: Path) -> None:
    sql = "SELECT kind, COUNT(*) AS n FROM nodes GROUP BY kind ORDER BY n DESC, kind LIMIT 2"
    assert call("query", path, sql).stdout.split() == [
        "kind", "n", "----------", "-", "compute", "3", "all_reduce", "2",
    ]  # fmt: skip
    assert call("query", path, sql, "--format", "csv").stdout == "kind,n\ncompute,3\nall_reduce,2\n"
    found = json.loads(call("query", path, sql, "--format", "json").stdout)
    assert found == [{"kind": "compute", "n": 3}, {"kind": "all_reduce", "n": 2}]


def test_a_wide_row_is_printed_a_column_a_line(
    make_trace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(make_trace({}, {}, extra={"note": "word " * 30}), tmp_path / "a.parquet")
    monkeypatch.setenv("COLUMNS", "60")
    lines = call("query", tmp_path, "SELECT * FROM header").stdout.splitlines()
    assert lines[:2] == ["kind        slice", "world_size  1"]
    assert lines[-2].startswith(" " * 12 + "word")
    assert max(map(len, lines)) <= 60
    narrow = call("query", tmp_path, "SELECT kind, ranks FROM header").stdout.splitlines()
    assert narrow == ["kind   ranks", "-----  -----", "slice  0"]
    two = call("query", tmp_path, "SELECT * FROM nodes").stdout.splitlines()
    assert len(two) == 4


def test_query_shows_a_hundred_rows(make_trace: Any, tmp_path: Path) -> None:
    write(make_trace(*({} for _ in range(120))), tmp_path / "a.parquet")
    shown = call("query", tmp_path / "a.parquet", "SELECT id FROM nodes").stdout
    assert len(shown.splitlines()) == 103
    assert "... and more: --format csv" in shown
    assert "and more" not in call("query", tmp_path, "SELECT id FROM nodes LIMIT 100").stdout


def test_query_writes(path: Path, tmp_path: Path) -> None:
    for name, words in (("a.parquet", ()), ("b.csv", ()), ("c.txt", ("--format", "json"))):
        done = call("query", path, "SELECT rank FROM nodes", "-o", tmp_path / name, *words)
        assert done.stdout.startswith(f"wrote {tmp_path / name}")
    assert pl.read_parquet(tmp_path / "a.parquet").height == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SELECT kid FROM nodes"], "there is no column 'kid'"),
        (["SELECT CAST(kind AS INT) FROM nodes"], "conversion from"),
        (["SELECT rank FROM nodes", "--format", "parquet"], "Parquet needs a file"),
        (["SELECT rank FROM nodes", "-o", "x.txt"], "does not end in .csv, .json or .parquet"),
        (["SELECT rank FROM nodes", "-o", "x.csv", "--format", "table"], "only printed"),
    ],
)
def test_query_used_wrongly(path: Path, words: list[str], message: str) -> None:
    done = call("query", path, *words)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_an_answer_that_cannot_be_written_is_no_wrong_usage(path: Path, tmp_path: Path) -> None:
    done = call("query", path, "SELECT id FROM nodes", "-o", tmp_path / "no" / "a.csv")
    assert done.exit_code == 1
    assert isinstance(done.exception, pt.PrismError)
    assert done.exception.code == "output"


def test_query_needs_a_trace_and_then_a_question(path: Path) -> None:
    for words in ((), (path,), ("SELECT 1",)):
        done = call("query", *words)
        assert (done.exit_code, "a trace, and then SQL" in done.stderr) == (2, True)
    done = call("query", "SELECT rank FROM nodes", path)
    assert (done.exit_code, "the trace comes first" in done.stderr) == (2, True)


def test_diff_of_times_names_the_command_that_explains_them(path: Path) -> None:
    assert call("diff", path, path).stdout.splitlines()[-1].startswith("`prismcalib compare`")


def test_slice_out_and_concat(path: Path, tmp_path: Path) -> None:
    pieces = [tmp_path / f"{rank}.parquet" for rank in (0, 1)]
    for rank, piece in enumerate(pieces):
        done = call("slice-out", path, "--ranks", rank, "-o", piece)
        assert "of 7 nodes, ranks" in done.stdout
    done = call("concat", *pieces, "-o", tmp_path / "again.parquet")
    assert done.stdout.startswith("joined 2 pieces: 7 nodes, ranks 0-1, steps 0\nwrote")
    assert call("diff", path, tmp_path / "again.parquet").exit_code == 0
    report = json.loads(call("concat", *pieces, "-o", tmp_path / "b.parquet", "--json").stdout)
    assert (report["nodes"], report["linked"]) == (7, 0)


def test_slice_out_says_what_it_cut(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.parquet"
    done = call("slice-out", path, "--window", "0.00005-1", "-o", out)
    assert "cut 3 dependencies on nodes that were left out" in done.stdout
    report = json.loads(call("slice-out", path, "--steps", "0", "-o", out, "--json").stdout)
    assert report["cut_dependencies"] == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "say what to keep"),
        (["--window", "3-1"], 2, "not BEGIN-END in milliseconds"),
        (["--window", "x"], 2, "not BEGIN-END in milliseconds"),
        (["--ranks", "a"], 2, "not a list of ranks"),
        (["--steps", ""], 2, "names no step"),
        (["--steps", "4"], 1, None),
    ],
)
def test_slice_out_used_wrongly(
    path: Path, tmp_path: Path, words: list[str], code: int, message: str | None
) -> None:
    done = call("slice-out", path, *words, "-o", tmp_path / "x.parquet")
    assert done.exit_code == code
    assert message is None or message in " ".join(done.stderr.split())
