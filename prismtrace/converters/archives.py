"""Archives of traces (.tgz, .tar.gz, .tar): their members are inputs like files of a folder.

Readers go over a file twice, first to tell what it is, so members are unpacked: into the
system's folder for temporary files (TMPDIR), from where they go when the process ends.
"""

from __future__ import annotations

import atexit
import gzip
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath

from prismtrace.converters.content import read_blocks
from prismtrace.errors import InputFileError, OutputError
from prismtrace.output import output_error

__all__ = ["is_archive", "members_of"]

_MAGIC_AT = 257


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
            found.append(target)
    return found


def _no_space(target: Path, error: OSError) -> OutputError:
    told = output_error(target, error.errno or 0)
    return OutputError(
        told.message, where=told.where, hint="unpack the archive yourself, or set TMPDIR"
    )
