"""Which files a conversion reads, and the ranks that the user gave them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from prismtrace.converters.archives import is_archive, is_called, members_of, name_of
from prismtrace.converters.sniff import is_dump, is_foreign_json, is_operation_level
from prismtrace.errors import InputFileError, RankError
from prismtrace.input_files import PathLike, files_of, require_readable, unreadable

__all__ = ["InputFiles", "PathLike", "expand_inputs", "given_ranks", "rank_in_name"]


_SUFFIXES = (".json", ".json.gz", ".et", ".et.gz", ".sqlite")
_ARCHIVES = (".tgz", ".tar.gz", ".tar")
_TABLES = (".parquet", ".csv")

_ET = r"[._-](\d+)\.et(?:\.gz)?$"
_RANK_IN_NAME = (r"rank[-_]?(\d+)", r"worker[-_]?(\d+)", r"_(\d+)\.(?:json|sqlite)", _ET)


class InputFiles(list[Path]):
    """The files that a conversion reads.

    `skipped` are JSON files of other programs that lie among the traces of a folder or archive.
    """

    skipped: list[Path]


def expand_inputs(inputs: PathLike | Sequence[PathLike]) -> InputFiles:
    """Files, folders, glob patterns and archives as a list of files.

    Of folders and archives those count that end like a trace (`_SUFFIXES`), but for JSON files
    that are none; of folders also flight-recorder dumps and operation-level logs. What was
    expanded already stays as it is.

    Raises:
        InputFileError: a path does not exist or a folder holds no trace.
    """
    if isinstance(inputs, InputFiles):
        return inputs
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    paths: list[Path] = []
    skipped: list[Path] = []
    for item in given:
        try:
            found = files_of(
                item,
                (*_SUFFIXES, *_ARCHIVES),
                what="trace (.json, .json.gz, .et, .et.gz or .sqlite, or an archive of them) and no "
                "operation-level log",
                hint="name the folder or the files that the profiler wrote",
                also=_is_told_by_content,
            )
        except OSError as error:
            raise unreadable(item, error) from error
        for path in found:
            require_readable(path)
        paths += _traces_among(item, found, skipped)
    if not paths:
        raise InputFileError("no input file was given", hint="name at least one trace")
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise RankError("the file is given twice", where=str(path), hint="name it once")
        seen.add(path.resolve())
    files = InputFiles(paths)
    files.skipped = skipped
    return files


def _traces_among(item: PathLike, found: Sequence[Path], skipped: list[Path]) -> list[Path]:
    """Without the JSON files of other programs, which go into `skipped`; archives as members.

    A file that was named is taken for what it is said to be.

    Raises:
        InputFileError: nothing else is there.
    """
    traces: list[Path] = []
    foreign: list[Path] = []
    named = not Path(item).is_dir()
    for path in found:
        is_file = path.name.endswith(_SUFFIXES) or not is_archive(path)
        for member in [path] if is_file else members_of(path, _SUFFIXES):
            is_named = named and is_file
            (foreign if not is_named and is_foreign_json(member) else traces).append(member)
    if foreign and not traces:
        raise InputFileError(
            "none of the JSON files in it is a trace: "
            + ", ".join(path.name for path in foreign[:_SHOWN])
            + (f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""),
            where=str(item),
            hint="name the folder or the files that the profiler wrote",
        )
    skipped += foreign
    return traces


_SHOWN = 4  # names
_LISTED = 8  # names to choose from


def _is_told_by_content(path: Path) -> bool:
    """Whether it is a flight-recorder dump, as torch calls it: without an ending; or a log."""
    if path.name.endswith(_TABLES):
        return path.is_file() and is_operation_level(path)
    return "." not in path.name and is_dump(path)


def given_ranks(paths: Sequence[Path], ranks: Mapping[str, int]) -> dict[Path, int]:
    """Ranks by path, from ranks by path (of a member ``ARCHIVE!MEMBER``) or how that ends.

    A whole path is that file's, even if others end so.

    Raises:
        RankError: a name is that of no input or of several, or two are of the same one.
    """
    given: dict[Path, int] = {}
    for key, rank in ranks.items():
        whole = [path for path in paths if key in (str(path), name_of(path))]
        fitting = whole or [path for path in paths if is_called(path, key)]
        if len(fitting) != 1:
            raise RankError(
                f"{key}={rank} names {'no' if not fitting else 'more than one'} input file",
                where=f"--rank {key}={rank}",
                hint=f"{'it may be' if fitting else 'inputs'}: {_names_of(fitting or paths)}",
            )
        if given.setdefault(fitting[0], rank) != rank:
            raise RankError(
                f"{name_of(fitting[0])} is given two ranks, {given[fitting[0]]} and {rank}",
                where=f"--rank {key}={rank}",
                hint="name each file once",
            )
    return given


def _names_of(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(map(name_of, paths[:_LISTED])) + more


def rank_in_name(path: Path) -> int | None:
    """The rank that a file's name tells, if it tells one and not several."""
    for pattern in _RANK_IN_NAME:
        found = {int(number) for number in re.findall(pattern, path.name, re.IGNORECASE)}
        if found:
            return found.pop() if len(found) == 1 else None
    return None
