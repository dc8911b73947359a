"""One Chakra trace becomes one rank's nodes, one for one, not yet matched with other ranks."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import polars as pl

from prismtrace.converters.chakra.feeder import read_feeder
from prismtrace.converters.chakra.frames import Frames, read_frames
from prismtrace.converters.chakra.kinds import WORLD, Meaning, meanings
from prismtrace.converters.chakra.lanes import assign_lanes
from prismtrace.converters.chakra.listed import group_configs, own_groups
from prismtrace.converters.chakra.nodes import ChakraNodes
from prismtrace.converters.chakra.ordering import (
    Edges,
    Order,
    add_stream_order,
    known,
    lay_out,
    order_nodes,
)
from prismtrace.converters.chakra.wire import Ints
from prismtrace.converters.content import read_blocks
from prismtrace.converters.dep_lists import lists_by_owner
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.inputs import rank_in_name
from prismtrace.converters.kineto.names import CommPatterns
from prismtrace.converters.parts import disk_errors
from prismtrace.converters.placing import RankComms
from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.converters.sniff import SourceFormat
from prismtrace.errors import InputFileError, RankError
from prismtrace.schema import Phase

__all__ = ["OWN", "convert_chakra", "read_chakra"]

OWN = "prismtrace"
"""Attribute of the metadata of files that `export` wrote: which edges lead where is complete
there, and the names of streams and groups are told."""

_NS = 1000  # of a microsecond
_LATEST_US = (2**63 - 1) // _NS // 4  # so that ends can be added up
_RANK = re.compile(r"\.(\d+)\.json(?:\.gz)?$", re.IGNORECASE)
_LOST = ("truncated", "damaged-gzip", "dropped-unreadable", "empty-frame")


def read_chakra(
    path: Path, found: SourceFormat, counts: Counter[str], *, recover: bool = False
) -> Frames:
    """Read a Chakra trace in either of its forms, gzipped or not.

    Raises:
        InputFileError: it cannot be read, or holds no nodes.
        SourceFormatError: it is of a version that cannot be told right.
    """
    blocks = read_blocks(path, counts=counts)
    if found is SourceFormat.CHAKRA_JSON:
        frames = Frames(read_feeder(blocks, where=str(path), counts=counts), {})
    else:
        frames = read_frames(blocks, where=str(path), counts=counts, recover=recover)
    lost = {name: counts[name] for name in _LOST if counts[name]}
    if lost and not recover:
        what = ", ".join(f"{name} {number}" for name, number in lost.items())
        raise InputFileError(
            f"the file is damaged ({what}): nodes are missing",
            where=str(path),
            hint="copy it again, or use what can be read with --recover",
        )
    if not len(frames.nodes):
        raise InputFileError(
            "the file holds no node",
            where=str(path),
            hint="write it again with the tool that made it",
        )
    return frames


def convert_chakra(
    path: Path,
    found: SourceFormat,
    nodes_path: Path,
    options: RankOptions,
    given_rank: int | None = None,
) -> RankTrace:
    """Read one file and write its nodes (without group, seq and partner) to `nodes_path`.

    Raises:
        TraceError: the file cannot be read or used; see the subclasses.
    """
    counts: Counter[str] = Counter()
    frames = read_chakra(path, found, counts, recover=options.recover)
    nodes, facts = frames.nodes, frames.metadata
    rank = _rank(path, facts, given_rank)
    own = OWN in facts
    order = order_nodes(
        nodes, where=str(path), counts=counts, recover=options.recover, by_start=not own
    )
    _check_times(nodes, path)
    own_named = own_groups(_text(facts, "process_groups"), str(path))
    patterns = CommPatterns.parse(options.comm_kernels)
    meaning = meanings(nodes, order.position, own_named, patterns, counts, where=str(path))
    placed = _place(nodes, order, meaning, facts, counts)
    table = _table(nodes, order.position, meaning, placed)
    with disk_errors(nodes_path.parent.parent):
        table.write_parquet(nodes_path, compression="lz4")
    world, host = facts.get("world_size"), _text(facts, "host_name")
    return RankTrace(
        path=path,
        rank=rank,
        world_size=world if isinstance(world, int) and world > 0 else None,
        host=host,
        groups=_groups(nodes, own_named, meaning, counts),
        comms=_comms(rank, nodes, order.position, meaning, placed, host if own else None),
        streams=tuple(table.get_column("stream").unique(maintain_order=True)),
        steps=tuple(table.get_column("step").drop_nulls().unique().sort()),
        nodes=nodes_path,
        rows=table.height,
        counts={name: number for name, number in counts.items() if number},
        source="chakra" if placed.recorded else "chakra-layout",
        timed=placed.timed,
        highest_rank=max((op.peer or 0 for op in meaning.comm), default=0),
    )


def _rank(path: Path, facts: dict[str, int | str], given: int | None) -> int:
    said = facts.get("rank")
    if given is not None:
        if given < 0:
            raise RankError(f"a rank is not negative: {given}", where=str(path))
        return given
    if isinstance(said, int) and said >= 0:
        return said
    ending = _RANK.search(path.name)
    named = int(ending[1]) if ending else rank_in_name(path)
    if named is None:
        raise RankError(
            "the file does not say which rank it is (Chakra traces are called NAME.RANK.et)",
            where=str(path),
            hint=f"say it: --rank {quote(path.name)}=N",
        )
    return named


def _check_times(nodes: ChakraNodes, path: Path) -> None:
    """Refuse times that add up to more than 64 bits of nanoseconds hold."""
    longest = int(nodes.dur_us.max(initial=0))
    total = float(nodes.dur_us.sum(dtype=np.float64))
    latest = int(nodes.start_us.max(initial=0))
    if max(longest, latest, total) > _LATEST_US:
        raise InputFileError(
            f"times of up to {max(longest, latest)} µs: no run takes so long",
            where=str(path),
            hint="start_time_micros and duration_micros are microseconds; the file was changed",
        )


def _text(facts: dict[str, int | str], name: str) -> str | None:
    value = facts.get(name)
    return value if isinstance(value, str) and value else None


def _stream_names(facts: dict[str, int | str]) -> dict[int, str]:
    """Names of streams, in files that `export` wrote."""
    try:
        raw = json.loads(_text(facts, "stream_names") or "{}")
        return {int(number): str(name) for number, name in raw.items()}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _base_ns(facts: dict[str, int | str]) -> int:
    """What `export` subtracted from starts."""
    base = facts.get("base_ns", 0)
    return base if isinstance(base, int) and -(2**62) < base <= 0 else 0


@dataclass(frozen=True)
class _Placed:
    """Streams, edges and times of the nodes, in order."""

    stream: pl.Series
    edges: Edges
    start_ns: Ints
    dur_ns: Ints
    recorded: bool
    """Starts are the file's."""
    timed: bool
    """Any node has a duration or a start."""


def _place(
    nodes: ChakraNodes,
    order: Order,
    meaning: Meaning,
    facts: dict[str, int | str],
    counts: Counter[str],
) -> _Placed:
    count = len(nodes)
    position = order.position
    start_us, dur_us = nodes.start_us[position], nodes.dur_us[position]
    own = OWN in facts
    recorded = facts.get("timed") == 1 if own else bool(start_us.any())
    code, labels = _streams(nodes, position, _stream_names(facts))
    edges = order.edges
    if (code < 0).any():
        kind = meaning.is_comm.astype(np.int64)
        code, of_kind, edges = assign_lanes(edges, code, len(labels), kind, dur_us, counts)
        numbers = Counter[int]()
        for lane in of_kind.tolist():
            labels.append(f"{('compute', 'communication')[lane]} {numbers[lane]}")
            numbers[lane] += 1
    if not own:
        named = known(nodes.numbers.get("tid"), count)[position] >= 0
        named |= known(nodes.numbers.get("stream"), count)[position] >= 0
        edges = add_stream_order(edges, code, named, count)
    timed = recorded or bool(dur_us.any())
    if timed and not recorded:
        start_us = lay_out(edges, dur_us)
        counts["laid-out-start"] += count
    if timed:
        silent = meaning.is_comm & (dur_us == 0)
        counts["communication-without-duration"] += int(silent.sum())
    return _Placed(
        stream=pl.Series(labels, dtype=pl.String).gather(code),
        edges=edges,
        start_ns=start_us * _NS + _base_ns(facts),
        dur_ns=dur_us * _NS,
        recorded=recorded,
        timed=timed,
    )


def _streams(nodes: ChakraNodes, position: Ints, names: dict[int, str]) -> tuple[Ints, list[str]]:
    """Number of each node's stream (−1: it names none) and the labels of the numbers."""
    count = len(nodes)
    stream = known(nodes.numbers.get("stream"), count)[position]
    thread = known(nodes.numbers.get("tid"), count)[position]
    on_cpu = known(nodes.numbers.get("is_cpu_op"), count)[position] == 1
    on_cpu &= stream < 0
    number = np.where(stream >= 0, stream, thread)
    values, place = _numbered(number)
    used, code = _numbered(2 * place + on_cpu)
    labels = []
    for value, cpu in zip(values[used // 2].tolist(), (used % 2).tolist(), strict=True):
        label = f"cpu thread {value}" if cpu else names.get(value, f"stream {value}")
        labels.append(label)
    # Lanes of those that name none are numbered later.
    return np.where(number < 0, -1, code), labels


def _numbered(values: Ints) -> tuple[Ints, Ints]:
    """The different values, ascending, and which of them each one is; quick if these are few."""
    different = pl.Series(values).unique().sort().to_numpy()
    return different, np.searchsorted(different, values)


def _table(nodes: ChakraNodes, position: Ints, meaning: Meaning, placed: _Placed) -> pl.DataFrame:
    """Columns of the nodes, without id, rank, group, seq and peer; `stream` is a label."""
    count = len(nodes)
    edges = placed.edges.nearest_first(count)
    names = pl.Series(nodes.name, dtype=pl.String).gather(position)
    times: dict[str, Any] = {"start_ns": None, "dur_ns": None}
    if placed.timed:
        times = {"start_ns": placed.start_ns, "dur_ns": placed.dur_ns}
    columns: dict[str, Any] = {
        "index": pl.int_range(count, dtype=pl.Int32, eager=True),
        "kind": meaning.kind,
        "name": names,
        "stream": placed.stream,
        "phase": _texts(nodes, "phase", position, frozenset(Phase)),
        "bytes": meaning.nbytes,
        "dtype": meaning.dtype,
        "reduce_op": meaning.reduce_op,
        **times,
        "deps": lists_by_owner(edges.node, (edges.node - edges.dep).astype(np.uint32), count),
    }
    frame = pl.DataFrame(
        columns, schema_overrides={"start_ns": pl.Int64, "dur_ns": pl.Int64}
    ).with_columns(name=pl.when(pl.col("name") != "").then("name"))
    return frame.with_columns(
        pl.Series(name, _bounded(nodes, name, position), dtype=dtype)
        for name, dtype in _NUMBERED.items()
    )


_NUMBERED: dict[str, Any] = {
    "batch": pl.Int32,
    "step": pl.Int32,
    "microbatch": pl.Int32,
    "chunk": pl.Int16,
}


def _bounded(nodes: ChakraNodes, name: str, position: Ints) -> pl.Series:
    """A column of numbers that fit it; what does not is unknown."""
    column = nodes.numbers.get(name)
    if column is None:
        return pl.repeat(None, len(position), dtype=_NUMBERED[name], eager=True)
    most = 2**15 if _NUMBERED[name] == pl.Int16 else 2**31
    values = column[position]
    fits = (values >= 0) & (values < most)
    return pl.select(
        pl.when(pl.Series(fits)).then(pl.Series(np.where(fits, values, 0))).cast(_NUMBERED[name])
    ).to_series()


def _texts(nodes: ChakraNodes, name: str, position: Ints, allowed: frozenset[str]) -> pl.Series:
    column = nodes.texts.get(name)
    if column is None:
        return pl.repeat(None, len(position), dtype=pl.String, eager=True)
    return pl.Series(
        [value if value in allowed else None for value in column], dtype=pl.String
    ).gather(position)


def _groups(
    nodes: ChakraNodes, own_named: dict[str, NamedGroup], meaning: Meaning, counts: Counter[str]
) -> tuple[NamedGroup, ...]:
    """Groups that the file lists, and the one of all ranks if communications name none."""
    groups = list(own_named.values())
    for text in nodes.groups:
        groups += group_configs(text, counts)
    if meaning.in_world and not any(group.name == WORLD for group in groups):
        counts["assumed-world-group"] += meaning.in_world
        groups.append(NamedGroup(WORLD, "default_pg", None))
    return tuple(dict.fromkeys(groups))


def _comms(
    rank: int,
    nodes: ChakraNodes,
    position: Ints,
    meaning: Meaning,
    placed: _Placed,
    clock: str | None,
) -> RankComms:
    """The rank's communications; their times only where they were measured."""
    index = np.flatnonzero(meaning.is_comm).astype(np.int64)
    nothing = np.zeros(len(index), dtype=np.int64)
    start = placed.start_ns[index] if placed.recorded else nothing
    steps = _bounded(nodes, "step", position).gather(index).to_list()
    tags = nodes.numbers.get("comm_tag")
    return RankComms(
        rank=rank,
        index=index,
        comm=meaning.comm,
        start_ns=start,
        end_ns=start + (placed.dur_ns[index] if placed.recorded else 0),
        seq=[None] * len(index),
        comms_id=[None] * len(index),
        step=steps,
        host=clock if placed.recorded else None,
        tag=None if tags is None else known(tags, len(nodes))[position][index],
    )
