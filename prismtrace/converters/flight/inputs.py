"""Which flight-recorder dumps a command reads; their names have no ending to go by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prismtrace.converters.inputs import PathLike, expand_inputs
from prismtrace.converters.sniff import SourceFormat, sniff
from prismtrace.errors import InputFileError
from prismtrace.input_files import unreadable

__all__ = ["DUMPS", "dump_files", "dumps_in"]

DUMPS = frozenset({SourceFormat.FLIGHT_RECORDER, SourceFormat.FLIGHT_RECORDER_JSON})


def dump_files(inputs: PathLike | Sequence[PathLike]) -> list[Path]:
    """Files, folders and glob patterns as a list of files; of a folder, its dumps.

    Raises:
        InputFileError: a path does not exist, or a folder holds no dump.
    """
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    found: list[PathLike] = []
    for item in given:
        if not Path(item).is_dir():
            found.append(item)
            continue
        dumps = dumps_in(Path(item))
        if not dumps:
            raise InputFileError(
                "the folder holds no flight-recorder dump",
                where=str(item),
                hint="name the folder or the files that torch wrote, e.g. nccl_trace_rank_0",
            )
        found += dumps
    return expand_inputs(found)


def dumps_in(folder: Path) -> list[Path]:
    """The dumps in a folder, by their content, sorted by name.

    Raises:
        InputFileError: the folder cannot be read.
    """
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.is_file())
        return [path for path in files if sniff(path) in DUMPS]
    except OSError as error:
        raise unreadable(folder, error) from error
