"""Refusing at once what cannot be read as a file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from prismtrace.errors import InputFileError

__all__ = ["is_text", "require_readable", "unreadable"]


def require_readable(path: str | os.PathLike[str]) -> None:
    """Refuse what is missing, may not be read, or is no regular file.

    A pipe would wait for a writer, a device need not end, and both give their content once,
    while inputs are read twice: first to tell what they are.

    Raises:
        InputFileError: see above.
    """
    try:
        found = Path(path).stat().st_mode
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found):
        what = "a folder" if stat.S_ISDIR(found) else "a pipe or a device"
        raise InputFileError(
            f"not a regular file but {what}", where=str(path), hint="write it to a file first"
        )
    if not os.access(path, os.R_OK):
        raise unreadable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def is_text(path: str | os.PathLike[str]) -> bool:
    """Whether a path is UTF-8: Polars opens no others."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def unreadable(path: str | os.PathLike[str], error: OSError) -> InputFileError:
    """The error for a path that the operating system refuses."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return InputFileError("no such file", where=str(path), hint="check the path")
    hints = {
        errno.EACCES: "check its permissions and those of its folder",
        errno.ENAMETOOLONG: "the path is too long to be one: check it",
        errno.ELOOP: "the link leads to itself: check the path",
    }
    return InputFileError(
        f"cannot be read: {error.strerror or error}",
        where=str(path),
        hint=hints.get(error.errno or 0, "check the path"),
    )
