"""Short names for content: equal only if the content is."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from prismtrace.input_files import unreadable

__all__ = ["file_digest", "files_digest", "texts_digest"]


def texts_digest(*texts: str) -> str:
    """Of texts, which may hold bytes that are no UTF-8, as names of files and arguments do."""
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        found.update(f"{len(text)}:{text}".encode(errors="surrogateescape"))
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """Of what a file holds, whatever its name.

    Raises:
        InputFileError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def files_digest(paths: Iterable[Path]) -> str:
    """Of what files hold, in this order; errors as of `file_digest`."""
    return texts_digest(*map(file_digest, paths))
