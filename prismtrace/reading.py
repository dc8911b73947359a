"""What goes wrong only when rows are read: damaged pages, values the format does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.errors import InputFileError, ValidationError
from prismtrace.input_files import require_readable

__all__ = ["read_table", "reading"]

_UNKNOWN_VALUE = re.compile(
    r"conversion from `(?P<from>.*?)` to `(?P<to>.*?)` failed in column '(?P<column>.*?)' "
    r"for .*? values: \[(?P<values>.*)\]"
)
_DISK = re.compile(r"os error \d+")


@contextmanager
def reading(paths: Sequence[Path]) -> Iterator[None]:
    """Say in our words why the rows of a trace's files cannot be read in this block.

    Raises:
        InputFileError: pages of a file are damaged.
        ValidationError: a column holds a value that the format does not know.
    """
    where = ", ".join(map(str, paths)) or None
    try:
        yield
    except (pl.exceptions.ComputeError, pl.exceptions.InvalidOperationError) as error:
        text = str(error)
        if found := _UNKNOWN_VALUE.search(text):
            raise ValidationError(
                f"column {found['column']!r} holds what the format does not know or allow: "
                f"{found['values']}",
                where=where,
                hint="`prismtrace validate` lists the rows; a newer version may have written them",
            ) from error
        if "parquet" not in text.lower() or _DISK.search(text):
            raise
        raise _damaged(where) from error
    except pl.exceptions.PanicException as error:
        # What only the decoder noticed when it was too late.
        raise _damaged(where) from error


def read_table(path: Path, key: str, *, hint: str) -> tuple[dict[str, Any] | None, pl.DataFrame]:
    """All rows of a small Parquet file that is no trace, and what its writer noted under `key`.

    The note is a JSON object; None if there is none, so that the caller can say what it is not.

    Raises:
        InputFileError: missing, no regular file, unreadable, or damaged; `hint` says then how such
            a file is made.
    """
    require_readable(path)
    try:
        metadata = pl.read_parquet_metadata(path)
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise InputFileError(
            "not a readable Parquet file (truncated, or another format)",
            where=str(path),
            hint=hint,
        ) from error
    with reading([path]):
        rows = pl.read_parquet(path, glob=False)
    try:
        note = json.loads(metadata.get(key, "null"))
    except (ValueError, RecursionError) as error:
        raise InputFileError(
            "its note is no JSON: the file is damaged", where=str(path), hint=hint
        ) from error
    return (note if isinstance(note, dict) else None), rows


def _damaged(where: str | None) -> InputFileError:
    return InputFileError(
        "the rows are damaged, although the file begins and ends well",
        where=where,
        hint="copy it again, or write it again from its sources",
    )
