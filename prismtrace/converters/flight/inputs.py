"""Which flight-recorder dumps a command reads; their names have no ending to go by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prismtrace.converters.inputs import PathLike, expand_inputs, rank_in_name
from prismtrace.converters.sniff import is_dump
from prismtrace.input_files import files_of, unreadable

__all__ = ["dump_files", "is_empty_dump"]


def dump_files(inputs: PathLike | Sequence[PathLike]) -> list[Path]:
    """Files, folders and glob patterns as a list of files; of a folder, its dumps.

    Raises:
        InputFileError: a path does not exist, or a folder holds no dump.
    """
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    found: list[PathLike] = []
    for item in given:
        try:
            found += files_of(
                item,
                (),
                what="flight-recorder dump",
                hint="name the folder or the files that torch wrote, e.g. nccl_trace_rank_0",
                also=lambda path: is_dump(path) or is_empty_dump(path),
            )
        except OSError as error:
            raise unreadable(item, error) from error
    return expand_inputs(found)


def is_empty_dump(path: Path) -> bool:
    """Whether it is named as a rank's dump and holds nothing: the rank ended before it wrote."""
    return (
        rank_in_name(path) is not None
        and "trace" in path.name
        and path.is_file()
        and not path.stat().st_size
    )
