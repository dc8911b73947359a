"""Which files an argument names, and refusing at once what cannot be read as one."""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Callable
from pathlib import Path

from prismtrace.errors import InputFileError

__all__ = ["PathLike", "files_of", "is_text", "read_text", "require_readable", "unreadable"]

PathLike = str | os.PathLike[str]
"""Where something is, or is to be: a text or a `pathlib.Path`."""

_LONGEST_TEXT = 64 << 20


def files_of(
    item: str | os.PathLike[str],
    suffixes: tuple[str, ...],
    *,
    what: str,
    hint: str,
    also: Callable[[Path], bool] = lambda _: False,
) -> list[Path]:
    """The files that a path, a folder or a glob pattern names, sorted.

    Args:
        item: what was given; a file need not exist.
        suffixes: endings of a folder's files that count.
        what: what a folder without any of them lacks, for the error.
        hint: what to do then.
        also: tells other files of a folder that count.

    Raises:
        InputFileError: the folder holds none, or nothing matches the pattern.
        OSError: the folder may not be read.
    """
    path = Path(item)
    if path.is_dir():
        found = sorted(
            entry for entry in path.iterdir() if entry.name.endswith(suffixes) or also(entry)
        )
        if not found:
            inner = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
            if inner:
                hint += f"; the folders in it are not looked into: {', '.join(inner[:4])}"
                hint += f" and {len(inner) - 4} more" if len(inner) > 4 else ""
            raise InputFileError(f"the folder holds no {what}", where=str(path), hint=hint)
        return found
    if path.exists() or not glob.has_magic(str(item)):
        return [path]
    found = sorted(Path(name) for name in glob.glob(str(item), recursive=True))
    if not found:
        raise InputFileError(
            "no file matches the pattern",
            where=str(item),
            hint="check the path, and quote patterns",
        )
    return found


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


def read_text(path: str | os.PathLike[str]) -> str:
    """All of a file that a person writes.

    Raises:
        InputFileError: as `require_readable`, larger than any such file, or not UTF-8.
    """
    require_readable(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(_LONGEST_TEXT + 1)
    except OSError as error:
        raise unreadable(path, error) from error
    hint = "is it the file that you mean?"
    if len(data) > _LONGEST_TEXT:
        raise InputFileError(
            f"more than {_LONGEST_TEXT >> 20} MiB of text", where=str(path), hint=hint
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputFileError("not UTF-8 text", where=str(path), hint=hint) from error


def is_text(path: str | os.PathLike[str]) -> bool:
    """Whether a path is UTF-8: Polars opens no others, whatever encoding the locale has."""
    name = os.fspath(path)
    try:
        return name.encode() == os.fsencode(name)
    except UnicodeEncodeError:
        return False


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
