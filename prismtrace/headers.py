"""Which files a trace has, and the headers they carry."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from pydantic import ValidationError as PydanticError

from prismtrace.errors import (
    FormatVersionError,
    InputFileError,
    SourceFormatError,
    ValidationError,
)
from prismtrace.schema import FORMAT_VERSION, TraceHeader

__all__ = ["METADATA_KEY", "PathLike", "read_header", "read_headers", "trace_files"]

METADATA_KEY = "prismtrace"
"""Key of the header in the Parquet file metadata."""

PathLike = str | os.PathLike[str]


def trace_files(source: PathLike | Sequence[PathLike]) -> list[Path]:
    """The files that a path, a folder, a pattern or a list of them stands for.

    Raises:
        InputFileError: nothing is there.
    """
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    paths: list[Path] = []
    for item in given:
        path = Path(item)
        if path.is_dir():
            found = sorted(path.glob("*.parquet"))
            if not found:
                raise InputFileError(
                    "the folder holds no .parquet file",
                    where=str(path),
                    hint="convert profiler traces first: prismtrace convert",
                )
        elif path.exists() or not glob.has_magic(str(item)):
            found = [path]
        else:
            found = sorted(Path(name) for name in glob.glob(str(item)))
            if not found:
                raise InputFileError(
                    "no file matches the pattern",
                    where=str(item),
                    hint="check the path, and quote patterns",
                )
        paths.extend(found)
    if not paths:
        raise InputFileError("no trace file was given", hint="name at least one")
    return paths


def read_header(path: PathLike) -> TraceHeader:
    """The header of one trace file; errors as in `open_trace`."""
    return _parse_header(_header_text(path), str(path))


def read_headers(paths: Sequence[PathLike]) -> list[TraceHeader]:
    """Headers of many files of one job; the process groups are parsed once if all list the same.

    A job of thousands of ranks has megabytes of groups in every header.
    """
    headers: list[TraceHeader] = []
    shared = ""
    for path in paths:
        text = _header_text(path)
        if shared and text.count(shared) == 1:
            rest = _parse_header(text.replace(shared, _NO_GROUPS), str(path))
            headers.append(rest.model_copy(update={"groups": headers[0].groups}))
            continue
        headers.append(_parse_header(text, str(path)))
        if not shared and len(headers) == 1:
            shared = _groups_text(text)
    return headers


_NO_GROUPS = '"groups":[]'


def _groups_text(text: str) -> str:
    """The part of a header's JSON that lists the groups; empty if it is written otherwise."""
    begin = text.find(_NO_GROUPS[:-1])
    if begin < 0 or text.count(_NO_GROUPS[:-1]) > 1:
        return ""
    _, end = json.JSONDecoder().raw_decode(text, begin + len(_NO_GROUPS) - 2)
    return text[begin:end]


def _header_text(path: PathLike) -> str:
    where = str(path)
    try:
        metadata = pl.read_parquet_metadata(Path(path))
    except FileNotFoundError as error:
        raise InputFileError("no such file", where=where, hint="check the path") from error
    except (OSError, pl.exceptions.PolarsError) as error:
        raise InputFileError(
            "not a readable Parquet file (truncated, or another format)",
            where=where,
            hint="profiler traces are converted with `prismtrace convert`",
        ) from error
    if METADATA_KEY not in metadata:
        raise SourceFormatError(
            "a Parquet file without PrismTrace header",
            where=where,
            hint="only files that prismtrace, prismcalib or prismreplay wrote can be opened",
        )
    return metadata[METADATA_KEY]


def _parse_header(text: str, where: str) -> TraceHeader:
    try:
        raw = json.loads(text)
        _check_version(str(raw.get("format_version")), where)
        return TraceHeader.model_validate(raw)
    except (PydanticError, ValueError, AttributeError) as error:
        raise ValidationError(f"the header is broken: {_first_line(error)}", where=where) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, PydanticError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{first['msg']} at $.{place}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _check_version(version: str, where: str) -> None:
    major = FORMAT_VERSION.partition(".")[0]
    if version.partition(".")[0] != major:
        raise FormatVersionError(
            f"format version {version}; this version reads {major}.x",
            where=where,
            hint="convert the source again, or install a matching prismllm",
        )
