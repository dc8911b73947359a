"""Archives of traces (.tgz, .tar.gz, .tar): their members are inputs like files of a folder.

Readers go over a file twice, first to tell what it is, so members are unpacked: into the
system's folder for temporary files (TMPDIR), from where they go when the block ends that reads
them, or the process. Whoever reads of them reads ``ARCHIVE!MEMBER``.
"""

from __future__ import annotations

import atexit
import gzip
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath

from prismtrace.converters.content import read_blocks
from prismtrace.errors import InputFileError, OutputError, PrismError
from prismtrace.output import output_error

__all__ = ["is_archive", "is_called", "members_of", "name_of", "naming_members"]

_MAGIC_AT = 257
_unpacked: dict[str, str] = {}
"""What the paths of an archive's members begin with -> the same in words that last."""
_here: ContextVar[list[tuple[Path, str]] | None] = ContextVar("unpacked here", default=None)
"""What the innermost `naming_members` has unpacked."""


def is_archive(path: Path) -> bool:
    """Whether a file is a tar archive, gzipped or not, whatever its name.

    Raises:
        InputFileError: it cannot be read.
    """
    head = next(read_blocks(path), b"")
    return head[_MAGIC_AT : _MAGIC_AT + 5] == b"ustar"


def members_of(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The traces in an archive, unpacked, in the order of their names.

    Links and devices are passed over, as are hidden files, which some systems add of their own.

    Args:
        path: the archive.
        suffixes: endings of members that count.

    Raises:
        InputFileError: it is damaged, or holds no such member.
        OutputError: there is no space to unpack it.
    """
    folder = Path(tempfile.mkdtemp(prefix="prismtrace-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    begin = f"{folder / path.name}{os.sep}"
    _unpacked[begin] = f"{path}!"
    if (here := _here.get()) is not None:
        here.append((folder, begin))
    try:
        found = _unpack(path, folder / path.name, suffixes)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise InputFileError(
            f"not a whole archive: {error}", where=str(path), hint="copy it again, or unpack it"
        ) from error
    if not found:
        raise InputFileError(
            f"the archive holds no trace ({', '.join(suffixes)})",
            where=str(path),
            hint="unpack it and name the files",
        )
    return sorted(found)


def name_of(path: Path) -> str:
    """What a file is called: of an archive's member ``ARCHIVE!MEMBER``."""
    return _renamed(str(path))


def is_called(path: Path, words: str) -> bool:
    """Whether that names a file: its path or ``ARCHIVE!MEMBER``, or how they end, in whole names."""
    return any(
        called == words or called.endswith((f"{os.sep}{words}", f"!{words}"))
        for called in (str(path), name_of(path))
    )


@contextmanager
def naming_members() -> Iterator[None]:
    """In this block errors call members of archives by their names, not by where they lie.

    What was unpacked in it is gone afterwards.
    """
    unpacked: list[tuple[Path, str]] = []
    outer = _here.set(unpacked)
    try:
        yield
    except PrismError as error:
        error.message = _renamed(error.message)
        error.where = error.where and _renamed(error.where)
        error.hint = error.hint and _renamed(error.hint)
        raise
    finally:
        _here.reset(outer)
        for folder, begin in unpacked:
            shutil.rmtree(folder, ignore_errors=True)
            _unpacked.pop(begin, None)


def _renamed(text: str) -> str:
    for begin, name in _unpacked.items():
        text = text.replace(begin, name)
    return text


def _unpack(path: Path, folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            # A name that leads out of the folder is no member's.
            safe = not name.is_absolute() and ".." not in name.parts
            wanted = name.name.endswith(suffixes) and not name.name.startswith(".")
            source = archive.extractfile(member) if member.isreg() and safe and wanted else None
            if source is None:
                continue
            target = folder / name
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(source, file)
            except OSError as error:
                raise _no_space(target, error) from error
            # With it a conversion that goes on knows the file again. Any number may stand there.
            with suppress(OSError, OverflowError, ValueError):
                os.utime(target, (member.mtime, member.mtime))
            found.append(target)
    return found


def _no_space(target: Path, error: OSError) -> OutputError:
    told = output_error(target, error.errno or 0)
    return OutputError(
        told.message, where=told.where, hint="unpack the archive yourself, or set TMPDIR"
    )
