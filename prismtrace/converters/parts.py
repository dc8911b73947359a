"""Temporary files of a conversion: beside the result, on the same disk, gone in the end."""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl

from prismtrace.output import output_error, temporary_prefix, writable_target

__all__ = ["disk_errors", "workspace"]


@contextmanager
def workspace(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, removed however the block ends.

    Raises:
        OutputError: `target` is no file's place, or nothing can be written beside it.
    """
    real = writable_target(target)
    try:
        folder = tempfile.TemporaryDirectory(
            prefix=temporary_prefix(real), suffix=".parts", dir=real.parent
        )
    except OSError as error:
        raise output_error(target, error.errno or 0) from error
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
        raise output_error(path, error.errno or 0) from error
    except pl.exceptions.PolarsError as error:
        found = re.search(r"os error (\d+)", str(error))
        # When the last bytes of a file do not fit, the number is lost.
        if found is None and "transport error" not in str(error):
            raise
        raise output_error(path, int(found[1]) if found else errno.ENOSPC) from error
