"""Which communications of a job are worth measuring on the machine at hand."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from prismreplay.comm_bench.spec import KINDS
from prismtrace.reading import reading
from prismtrace.schema import P2P_KINDS, Kind
from prismtrace.trace import open_trace

__all__ = ["bench_words"]

_SMALLEST, _LARGEST = 1 << 10, 64 << 20
_FACTOR, _ROUNDS = 8, 3
# Their payload is that of all members together.
_GATHERED = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


def bench_words(graph: Path, most_ranks: int) -> tuple[str, ...]:
    """Options of `comm-bench` for what a job communicates; empty if that is nothing.

    Groups larger than the machine stands for are measured with as many members as it has room
    for; how their times grow is then left to a model.

    Args:
        graph: of the job.
        most_ranks: that can communicate here.
    """
    trace = open_trace(graph)
    with reading(trace.paths):
        rows = (
            trace.nodes.drop_nulls("group")
            .group_by(pl.col("kind").cast(pl.String), "group")
            .agg(pl.col("bytes").max().fill_null(0))
            .collect()
        )
    members = {group.id: len(group.ranks) for group in trace.header.groups}
    kinds: set[Kind] = set()
    sizes: set[int] = set()
    largest = _SMALLEST
    for name, group, nbytes in rows.iter_rows():
        kind = Kind.SEND if Kind(name) in P2P_KINDS else Kind(name)
        count = 2 if kind is Kind.SEND else members[group]
        if kind not in KINDS or count < 2:
            continue
        kinds.add(kind)
        sizes.add(min(count, most_ranks))
        largest = max(largest, nbytes * (count if kind in _GATHERED else 1))
    if not kinds or most_ranks < 2:
        return ()
    largest = min(_LARGEST, 1 << (largest - 1).bit_length())
    return (
        *("--nproc", str(max(sizes))),
        *("--kinds", ",".join(kind for kind in KINDS if kind in kinds)),
        *("--sizes", f"{_SMALLEST}-{largest}", "--factor", str(_FACTOR)),
        *("--group-sizes", ",".join(map(str, sorted(sizes)))),
        *("--rounds", str(_ROUNDS)),
    )
