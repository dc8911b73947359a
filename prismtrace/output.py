"""Writing results: to a temporary name first, renamed when whole."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prismtrace.errors import OutputError, PrismError

__all__ = ["atomic_output"]


@contextmanager
def atomic_output(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the place of `path`.

    When the block fails or is interrupted the temporary file is removed and whatever was at
    `path` stays as it was.

    Raises:
        OutputError: the folder is missing or read-only, `path` is a folder, the disk is full.
    """
    target = Path(path)
    if target.is_dir():
        raise OutputError(
            "the output path is a folder", where=str(target), hint="name a file inside it"
        )
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise _output_error(target, error) from error
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; results get the permissions a plain open() would give.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    except PrismError:
        raise
    except OSError as error:
        raise _output_error(target, error) from error
    except Exception as error:
        # Polars wraps the operating system's error into its own types.
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        wrapped = OSError(int(code[1]), os.strerror(int(code[1])))
        raise _output_error(target, wrapped) from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _output_error(target: Path, error: OSError) -> OutputError:
    hints = {
        errno.ENOSPC: "free some space or write to another disk; nothing was left behind",
        errno.ENOENT: "make the folder first",
        errno.ENOTDIR: "the parent is not a folder",
        errno.EACCES: "choose a folder that you may write to",
        errno.EROFS: "choose a folder that you may write to",
    }
    return OutputError(
        f"cannot write the result: {error.strerror or error}",
        where=str(target),
        hint=hints.get(error.errno or 0),
    )
