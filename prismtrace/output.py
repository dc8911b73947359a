"""Writing results: to a temporary name first, renamed when whole."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prismtrace.errors import OutputError, PrismError
from prismtrace.input_files import is_text
from prismtrace.owners import mark, remove_left_over

__all__ = [
    "CUT_OFF",
    "atomic_folder",
    "atomic_output",
    "disk_error",
    "output_error",
    "own_prefix",
    "refusal",
    "refuse_inputs",
    "temporary_prefix",
    "utf8_text",
    "writable_target",
]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MORE_BYTES = 1 << 20
CUT_OFF = "transport error"
"""What Polars says when the last bytes of a file did not fit; also of some damaged files it reads."""
_SHORT_NAME = 40  # of the target in a temporary name, which must not become too long itself


@contextmanager
def atomic_output(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the place of `path`.

    When the block fails or is interrupted the temporary file is removed and whatever was at
    `path` stays as it was. A file that is replaced keeps its permissions; where `path` is a
    link, the file that it leads to is replaced.

    Raises:
        OutputError: see `writable_target`; or the folder is read-only, the disk is full.
    """
    shown, target = Path(path), writable_target(path)
    try:
        handle, name = tempfile.mkstemp(prefix=own_prefix(target), suffix=".tmp", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise output_error(shown, error.errno or 0) from error
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(_permissions(target))
        temporary.replace(target)
    except PrismError:
        raise
    except Exception as error:
        number = disk_error(error)
        if number is None and CUT_OFF in str(error):
            number = refusal(temporary)
        if number is None:
            raise
        raise output_error(shown, number) from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; on success it takes the place of `path`.

    Folders above `path` are made if need be. When the block fails, what is in the temporary
    folder is removed.

    Raises:
        OutputError: `path` is there already and no empty folder, or cannot be written.
    """
    target = Path(path)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise OutputError(
            "the output is a folder, and there is a file of that name",
            where=str(target),
            hint="name a new folder",
        )
    if target.is_dir() and any(target.iterdir()):
        raise OutputError(
            "the folder is not empty; traces of other runs in it would be read together",
            where=str(target),
            hint="name a new folder",
        )
    try:
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=own_prefix(target), dir=target.parent))
    except OSError as error:
        raise output_error(target, error.errno or 0) from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if target.is_dir():
            target.rmdir()
        temporary.rename(target)
    except OSError as error:
        raise output_error(target, error.errno or 0) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def disk_error(error: Exception) -> int | None:
    """The operating system's number of what went wrong, which Polars puts into texts of its own.

    0: not known; None: the operating system is not to blame.
    """
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := re.search(r"os error (\d+)", str(error)):
        return int(found[1])
    return 0 if isinstance(error, OSError) else None


def refusal(file: Path) -> int | None:
    """Why a file takes no more bytes, as a number of the operating system; None if it does.

    What it has taken is left at its end.
    """
    try:
        with file.open("ab") as opened:
            opened.write(bytes(_MORE_BYTES))
    except OSError as error:
        return error.errno
    return None


def writable_target(path: str | os.PathLike[str]) -> Path:
    """The file that a result named `path` is written to: `path`, or what a link leads to.

    Raises:
        OutputError: there is a folder, a device or a pipe at `path`, or it cannot be the path of a
            file that is read again.
    """
    target = Path(os.path.realpath(path))
    if not is_text(target):
        raise OutputError(
            "the output path is not valid UTF-8 text, and could not be opened again",
            where=str(path),
            hint="choose another name or folder",
        )
    try:
        found = target.lstat().st_mode
    except FileNotFoundError:
        return target
    except OSError as error:
        raise output_error(Path(path), error.errno or 0) from error
    if stat.S_ISDIR(found):
        raise OutputError(
            "the output path is a folder", where=str(path), hint="name a file inside it"
        )
    if not stat.S_ISREG(found):
        raise OutputError(
            "the output path is a device, a pipe or a link in a circle; none of them is written to",
            where=str(path),
            hint="name a file; it is written beside its place first and then renamed",
        )
    return target


def refuse_inputs(
    path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str] | None]
) -> None:
    """Refuse to replace a file that is read, whatever name it is called by.

    Raises:
        OutputError: `path` is one of the inputs.
    """
    for source in inputs:
        # What is not there, or may not be looked at, cannot be the same; others will tell.
        with suppress(OSError):
            if source is not None and Path(path).samefile(source):
                raise OutputError(
                    "the output is one of the inputs", where=str(path), hint="name another file"
                )


def utf8_text(name: str) -> str:
    """A file name as text that every reader can decode; other bytes become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")


def own_prefix(target: Path) -> str:
    """How the names of this process's temporary files for `target` begin.

    Those that a dead process has left for it are removed.
    """
    prefix = temporary_prefix(target)
    remove_left_over(target.parent, prefix)
    return f"{prefix}{mark()}."


def temporary_prefix(target: Path) -> str:
    """How the names of what is kept beside `target` begin: hidden, and plain text."""
    plain = target.name.encode("ascii", "replace").decode().replace("?", "_")
    return f".{plain[:_SHORT_NAME]}."


def _permissions(target: Path) -> int:
    """Those of the file that is replaced, else what a plain open() would give."""
    with suppress(OSError):
        return stat.S_IMODE(target.stat().st_mode)
    return 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def output_error(path: Path, number: int) -> OutputError:
    """What the operating system's error `number` means for writing to `path`."""
    hints = {
        errno.ENOENT: "make the folder first",
        errno.ENOTDIR: "the parent is not a folder",
        errno.ENAMETOOLONG: "choose a shorter name",
        errno.ENOTEMPTY: "another run has written there meanwhile; name a new folder",
    }
    hint = hints.get(number, "choose a folder that you may write to")
    if number in _FULL:
        hint = "free some space or write to another disk; nothing was left behind"
    if number == errno.ENOSPC and _no_file_more(path):
        hint = "the disk has space but takes no more files (df -i): delete some; nothing was left"
    return OutputError(
        f"cannot write the result: {os.strerror(number) if number else 'unknown error'}",
        where=str(path),
        hint=hint,
    )


def _no_file_more(path: Path) -> bool:
    with suppress(OSError, AttributeError):
        disk = os.statvfs(path if path.is_dir() else path.parent)
        return disk.f_files > 0 and disk.f_favail == 0
    return False
