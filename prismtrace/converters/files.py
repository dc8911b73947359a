"""One input file, of whatever format, becomes the nodes of the ranks in it."""

from __future__ import annotations

from pathlib import Path

from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.converters.sniff import DUMPS, SourceFormat, sniff

__all__ = ["convert_file"]


def convert_file(
    path: Path, stem: Path, options: RankOptions, given_rank: int | None = None
) -> tuple[RankTrace, ...]:
    """Read one file and write the nodes of its ranks to Parquet files.

    Args:
        path: the file.
        stem: what the names of the Parquet files begin with, in the conversion's folder.
        options: how to read.
        given_rank: the rank that the user gave the file.

    Raises:
        TraceError: the file cannot be read or used; see the subclasses.
    """
    found = sniff(path)
    if found is SourceFormat.NSYS_SQLITE:
        from prismtrace.converters.nsys import convert_processes

        return convert_processes(path, stem, options, given_rank)
    if found in {SourceFormat.CHAKRA, SourceFormat.CHAKRA_JSON}:
        from prismtrace.converters.chakra.rank import convert_chakra

        return (convert_chakra(path, found, stem.with_suffix(".parquet"), options, given_rank),)
    if found is SourceFormat.PYTORCH_ET:
        from prismtrace.converters.pytorch_et.structure import convert_execution_trace

        return (convert_execution_trace(path, stem.with_suffix(".parquet"), given_rank),)
    if found in DUMPS:
        from prismtrace.converters.flight.converting import convert_dump

        return (convert_dump(path, stem.with_suffix(".parquet"), given_rank),)
    from prismtrace.converters.kineto.rank import convert_rank

    return (convert_rank(path, stem.with_suffix(".parquet"), options, given_rank),)
