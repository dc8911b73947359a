"""Errors of Polars while rows are read, in our words."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

from prismtrace.errors import InputFileError, ValidationError
from prismtrace.reading import read_table, reading

PATHS = [Path("a.parquet")]


def test_unknown_values_name_column_and_value() -> None:
    with pytest.raises(ValidationError, match=r"'kind' .*banana.* \[a.parquet\]"), reading(PATHS):
        pl.DataFrame({"kind": ["banana"]}).cast({"kind": pl.Enum(["compute"])})


def test_damage() -> None:
    with pytest.raises(InputFileError, match="damaged"), reading(PATHS):
        raise pl.exceptions.ComputeError("parquet: File out of specification: zstd error")


def test_other_errors_pass() -> None:
    with pytest.raises(pl.exceptions.ComputeError, match="os error 28"), reading(PATHS):
        raise pl.exceptions.ComputeError("parquet: No space left on device (os error 28)")
    with pytest.raises(pl.exceptions.ColumnNotFoundError), reading(PATHS):
        pl.DataFrame().select("a")


def test_a_small_table_and_its_note(tmp_path: Path) -> None:
    rows = pl.DataFrame({"a": [1, 2]})
    rows.write_parquet(tmp_path / "t.parquet", metadata={"ours": '{"version": 1}', "bad": "{"})
    note, found = read_table(tmp_path / "t.parquet", "ours", hint="make one")
    assert note == {"version": 1}
    assert found.equals(rows)
    assert read_table(tmp_path / "t.parquet", "theirs", hint="make one")[0] is None
    with pytest.raises(InputFileError, match="damaged"):
        read_table(tmp_path / "t.parquet", "bad", hint="make one")


def test_what_is_no_table(tmp_path: Path) -> None:
    whole = tmp_path / "t.parquet"
    pl.DataFrame({"a": range(5000)}).write_parquet(whole)
    (tmp_path / "half.parquet").write_bytes(whole.read_bytes()[:-50])
    (tmp_path / "text.txt").write_text("no table")
    os.mkfifo(tmp_path / "pipe")  # would wait for a writer
    for name in ("half.parquet", "text.txt", "pipe", "missing", "."):
        with pytest.raises(InputFileError) as caught:
            read_table(tmp_path / name, "ours", hint="make one")
        assert caught.value.hint
    data = bytearray(whole.read_bytes())
    data[4:300] = bytes(296)
    (tmp_path / "rows.parquet").write_bytes(data)
    with pytest.raises(InputFileError, match="damaged"):
        read_table(tmp_path / "rows.parquet", "ours", hint="make one")
