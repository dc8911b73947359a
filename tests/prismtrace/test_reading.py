"""Errors of Polars while rows are read, in our words."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from prismtrace.errors import InputFileError, ValidationError
from prismtrace.reading import reading

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
