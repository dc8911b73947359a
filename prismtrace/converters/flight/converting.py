"""One dump becomes one rank's nodes: communication only, without times.

The recorder tells when a host enqueued an operation and when its watchdog noticed that it had
started or ended. Neither is when the GPU worked, so the trace is bare; what was recorded is kept
in columns of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from prismtrace.converters.dep_lists import lists_by_owner
from prismtrace.converters.flight.ranks import comms_of, groups_of, rank_of
from prismtrace.converters.flight.reading import Entry, read_dump
from prismtrace.converters.parts import disk_errors
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.errors import InputFileError

__all__ = ["SOURCE", "convert_dump"]

SOURCE = "flight recorder"


def convert_dump(path: Path, nodes_path: Path, given_rank: int | None = None) -> RankTrace:
    """Read one dump and write its nodes (without group, seq and partner) to `nodes_path`.

    Raises:
        TraceError: the file cannot be read or used; see the subclasses.
    """
    dump = read_dump(path)
    rank = rank_of(path, given_rank)
    if not dump.entries:
        raise InputFileError(
            "the flight-recorder dump holds no operation",
            where=str(path),
            hint="set TORCH_FR_BUFFER_SIZE (older versions: TORCH_NCCL_TRACE_BUFFER_SIZE) for the job",
        )
    counts = Counter(dump.counts)
    counts["events"] = counts["kept"] = len(dump.entries)
    counts["wrapped-buffer"] += dump.wrapped
    nodes = _table(dump.entries)
    with disk_errors(nodes_path.parent.parent):
        nodes.write_parquet(nodes_path, compression="lz4")
    return RankTrace(
        path=path,
        rank=rank,
        world_size=dump.world_size,
        host=None,
        groups=groups_of(dump),
        comms=comms_of(rank, dump.entries),
        streams=tuple(nodes.get_column("stream").unique(maintain_order=True)),
        steps=(),
        nodes=nodes_path,
        rows=nodes.height,
        counts={name: number for name, number in counts.items() if number},
        source=SOURCE,
        timed=False,
    )


def _table(entries: Sequence[Entry]) -> pl.DataFrame:
    """Columns of the nodes, without id, rank, group, seq and peer; `stream` is a label."""
    count = len(entries)
    streams = [_stream(entry) for entry in entries]
    owner, distance = _order(entries, streams)

    def column(name: str, dtype: pl.DataType | type[pl.DataType]) -> pl.Series:
        return pl.Series([getattr(entry, name) for entry in entries], dtype=dtype)

    nothing = pl.repeat(None, count, dtype=pl.Int64, eager=True)
    return pl.DataFrame(
        {
            "index": pl.int_range(count, dtype=pl.Int32, eager=True),
            "kind": [entry.comm.kind.value for entry in entries],
            "name": [entry.name.partition(":")[2] or entry.name for entry in entries],
            "stream": streams,
            "batch": column("batch", pl.Int32),
            "step": nothing.cast(pl.Int32),
            "microbatch": nothing.cast(pl.Int32),
            "chunk": nothing.cast(pl.Int16),
            "phase": nothing.cast(pl.String),
            "bytes": pl.Series([entry.comm.nbytes for entry in entries], dtype=pl.Int64),
            "dtype": pl.Series([entry.comm.dtype for entry in entries], dtype=pl.String),
            "reduce_op": nothing.cast(pl.String),
            "start_ns": nothing,
            "dur_ns": nothing,
            "deps": lists_by_owner(owner, distance.astype(np.uint32), count),
            "x_enqueued_ns": column("created_ns", pl.Int64),
            "x_noticed_start_ns": column("started_ns", pl.Int64),
            "x_noticed_end_ns": column("completed_ns", pl.Int64),
            "x_gpu_dur_ns": column("dur_ns", pl.Int64),
            "x_state": column("state", pl.String),
            "x_call_site": column("site", pl.String),
        }
    )


def _stream(entry: Entry) -> str:
    """What NCCL runs in order: a group's launches, and those of a pair on its own."""
    comm = entry.comm
    name = comm.group_name if comm.group_name is not None else f"#{comm.local_group}"
    if not comm.kind.is_p2p or entry.batch is not None:
        return f"group {name}"
    ends = entry.name.replace("<-", "->").partition(" ")[2].split("->")
    return f"group {name}, ranks {' and '.join(sorted(ends))}"


def _order(entries: Sequence[Entry], streams: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of an entry and the distance back to one before it on its stream.

    The operations of a coalesced launch follow on all of the launch before, not on each other.
    """
    owner: list[int] = []
    distance: list[int] = []
    before: dict[str, list[int]] = {}
    latest: dict[str, list[int]] = {}
    for position, (entry, stream) in enumerate(zip(entries, streams, strict=True)):
        last = latest.get(stream, [])
        together = last and entry.batch is not None and entries[last[-1]].batch == entry.batch
        if not together:
            before[stream] = last
            latest[stream] = last = []
        for earlier in reversed(before[stream]):
            owner.append(position)
            distance.append(position - earlier)
        last.append(position)
    return np.array(owner, dtype=np.int64), np.array(distance, dtype=np.int64)
