"""Nsight Systems exports (SQLite): a file holds the processes of a host, each a rank."""

from __future__ import annotations

from pathlib import Path

from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.converters.sniff import SourceFormat, unsupported

__all__ = ["convert_processes"]


def convert_processes(
    path: Path, stem: Path, options: RankOptions, given_rank: int | None = None
) -> tuple[RankTrace, ...]:
    """Not there yet."""
    _ = stem, options, given_rank
    raise unsupported(path, SourceFormat.NSYS_SQLITE)
