"""Temporary files of a conversion: beside the result, on the same disk, gone in the end."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from prismtrace.errors import OutputError

__all__ = ["disk_errors", "workspace"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, removed however the block ends.

    Raises:
        OutputError: `target` is a folder, or nothing can be written beside it.
    """
    if target.is_dir():
        raise OutputError(
            "the output path is a folder", where=str(target), hint="name a file inside it"
        )
    try:
        folder = tempfile.TemporaryDirectory(
            prefix=f".{target.name}.", suffix=".parts", dir=target.parent
        )
    except OSError as error:
        raise OutputError(
            f"cannot write the result: {error.strerror}",
            where=str(target),
            hint="name a file in an existing folder that you may write to",
        ) from error
    with folder as name:
        yield Path(name)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about writing to `path` into an OutputError.

    Polars wraps it into an error of its own, with the number in its text.
    """
    try:
        yield
    except OSError as error:
        raise _output_error(path, error.errno or 0) from error
    except pl.exceptions.PolarsError as error:
        found = re.search(r"os error (\d+)", str(error))
        # When the last bytes of a file do not fit, the number is lost.
        if found is None and "transport error" not in str(error):
            raise
        raise _output_error(path, int(found[1]) if found else errno.ENOSPC) from error


def _output_error(path: Path, number: int) -> OutputError:
    return OutputError(
        f"cannot write the result: {os.strerror(number)}",
        where=str(path),
        hint="free some space or write to another disk; nothing was left behind"
        if number in _FULL
        else "choose a folder that you may write to",
    )
