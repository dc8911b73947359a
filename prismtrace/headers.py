"""Which files a trace has, and the headers they carry."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import polars as pl
from pydantic import ValidationError as PydanticError

from prismtrace.errors import (
    FormatVersionError,
    InputFileError,
    RankError,
    SourceFormatError,
    ValidationError,
)
from prismtrace.input_files import PathLike, files_of, is_text, require_readable, unreadable
from prismtrace.ranks import name_ranks
from prismtrace.schema import FORMAT_VERSION, TraceHeader

__all__ = [
    "CORE_WAIT",
    "CUT_BEFORE",
    "METADATA_KEY",
    "SHARED_CORES",
    "PathLike",
    "read_header",
    "read_headers",
    "require_ranks",
    "trace_files",
]

CUT_BEFORE = "cut_before"
"""In `TraceHeader.extra`: steps whose predecessor was cut out, and its number."""

SHARED_CORES = "shared_cores"
"""In `TraceHeader.extra`: of a job on CPUs recorded with fewer cores than ranks, of the host where that was
worst, how many ranks shared how many cores."""

CORE_WAIT = "core_wait"
"""In `TraceHeader.extra`: of slices on a busy machine, the share of the time in which their ranks could
compute that they waited for a core; of a merged trace the largest of its slices."""

METADATA_KEY = "prismtrace"
"""Key of the header in the Parquet file metadata."""


def trace_files(source: PathLike | Sequence[PathLike]) -> list[Path]:
    """The files that a path, a folder, a pattern or a list of them stands for.

    Raises:
        InputFileError: nothing is there.
    """
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    paths: list[Path] = []
    for item in given:
        try:
            found = files_of(
                item,
                (".parquet",),
                what=".parquet file",
                hint="convert profiler traces first: prismtrace convert",
            )
        except OSError as error:
            raise unreadable(item, error) from error
        for path in found:
            require_readable(path)
            if not is_text(path):
                raise InputFileError(
                    "the path is not valid UTF-8 text",
                    where=str(path),
                    hint="rename the file or folder",
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


def require_ranks(header: TraceHeader, ranks: Iterable[int], where: str | None) -> None:
    """Refuse ranks that a trace does not have.

    Raises:
        RankError: names them.
    """
    absent = sorted(set(ranks) - set(header.ranks))
    if absent:
        raise RankError(
            f"{name_ranks(absent)} {'is' if len(absent) == 1 else 'are'} not in the trace",
            where=where,
            hint=f"it has {name_ranks(header.ranks)}",
        )


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
        raise unreadable(path, error) from error
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
            hint="only files that prismtrace, prismcalib or prismreplay wrote can be opened; an "
            "operation-level log is converted first: prismtrace convert LOG -o log.parquet",
        )
    return metadata[METADATA_KEY]


_WRITE_AGAIN = "write the trace again from its sources; this file was changed or is damaged"


def _parse_header(text: str, where: str) -> TraceHeader:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValidationError(
            "the header is broken: it is not JSON", where=where, hint=_WRITE_AGAIN
        ) from error
    if not isinstance(raw, dict):
        raise ValidationError(
            "the header is broken: it is not a JSON object", where=where, hint=_WRITE_AGAIN
        )
    _check_version(raw.get("format_version"), where)
    try:
        return TraceHeader.model_validate(raw)
    except PydanticError as error:
        raise ValidationError(
            f"the header is broken: {_first_problem(error)}", where=where, hint=_WRITE_AGAIN
        ) from error


def _first_problem(error: PydanticError) -> str:
    """What is wrong and where, without the words of Python."""
    first = error.errors(include_url=False)[0]
    place = ".".join(["$", *(str(part) for part in first["loc"])])
    if first["type"] == "value_error":
        return f"{first['ctx']['error']} at {place}"
    if first["type"] in _JSON_TYPES:
        return f"{place} should be {_JSON_TYPES[first['type']]}"
    return f"{place}: {first['msg'].removeprefix('Input ')}"


_JSON_TYPES = {
    "dict_type": "an object",
    "model_type": "an object",
    "tuple_type": "a list",
    "list_type": "a list",
    "string_type": "a text",
}
_VERSION = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


def _check_version(version: object, where: str) -> None:
    major = FORMAT_VERSION.partition(".")[0]
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None or match[1] != major:
        told = "no format version" if version is None else f"format version {version}"
        if match is None and version is not None:
            told += " is not of the form 1.0.0"
        raise FormatVersionError(
            f"{told}; this version reads {major}.x",
            where=where,
            hint="convert the source again, or install a matching prismllm-toolkit",
        )
