"""Temporary files of a conversion: beside the result, on the same disk, gone in the end."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prismtrace.errors import PrismError
from prismtrace.output import (
    CUT_OFF,
    disk_error,
    output_error,
    own_prefix,
    writable_target,
)

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
            prefix=own_prefix(real), suffix=".parts", dir=real.parent
        )
    except OSError as error:
        raise output_error(target, error.errno or 0) from error
    with folder as name:
        yield Path(name)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about writing to `path` into an OutputError."""
    try:
        yield
    except PrismError:
        raise
    except Exception as error:
        number = disk_error(error)
        if number is None and CUT_OFF in str(error):
            number = errno.ENOSPC
        if number is None:
            raise
        raise output_error(path, number) from error
