"""Chakra execution traces, as ASTRA-sim and Chakra's own tools read them.

A folder: one file ``NAME.RANK.et`` a rank, of protobuf messages each after its length, and
``comm_group.json``, which lists the ranks of each process group. The files can be converted
back; then they give the same nodes, groups and dependencies, and times in whole microseconds.

What the format cannot say is left out and counted:

* times are whole microseconds: start and end of a node are rounded each, so that what followed
  still follows (`rounded-times`);
* delays of dependencies (`dropped-lags`) and dependencies on other ranks (`dropped-xdeps`);
* communications without partners, and those of a kind that Chakra has no number for, become
  computation of the same duration, with the kind beside it (`exported-as-local`).

All dependencies stand in ``data_deps``, program order included: readers wait for those only.
The messages are described in `prismtrace.converters.chakra.messages`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace import __version__
from prismtrace.blocks import rank_blocks
from prismtrace.converters.chakra.kinds import COLLECTIVES
from prismtrace.converters.chakra.messages import message_class
from prismtrace.converters.chakra.nodes import NodeType
from prismtrace.errors import ValidationError
from prismtrace.output import atomic_folder
from prismtrace.ranks import format_ranks
from prismtrace.schema import Kind, ProcessGroup, TraceHeader
from prismtrace.trace import PathLike, Trace

__all__ = ["GROUP_FILE", "export_chakra"]

GROUP_FILE = "comm_group.json"
"""Name of the file that lists the ranks of each group."""

_VERSION = "0.0.4"  # of the schema
_COMM_TYPE = {kind: COLLECTIVES.index(kind) for kind in COLLECTIVES}
_COLUMNS = [
    "rank", "index", "kind", "name", "stream", "batch", "step", "microbatch", "chunk", "phase",
    "group", "seq", "peer", "bytes", "dtype", "reduce_op", "start_ns", "dur_ns", "deps", "xdeps",
    "lag_ns",
]  # fmt: skip
_ATTRIBUTE_KEY = b"\x52"  # field 10 of a node, a message
_MOST_KNOWN = 1 << 16


def export_chakra(
    trace: Trace, path: PathLike, *, advance: Callable[[int], None] | None = None
) -> dict[str, int]:
    """Write a trace as a folder of Chakra execution traces.

    Memory stays flat in the number of ranks. `advance` is called with the number of rows
    written since its last call.

    Returns:
        What the format cannot say, and how often it was left out or rounded.

    Raises:
        OutputError: see `atomic_folder`.
        ValidationError: a communication is of a group that the header does not list.
    """
    with atomic_folder(path) as folder:
        base_ns = trace.nodes.select(pl.col("start_ns").min()).collect(engine="streaming").item()
        writer = _Writer(folder, Path(path).name or "trace", trace.header, min(0, base_ns or 0))
        writer.timed = base_ns is not None
        for rows in rank_blocks(trace.nodes, _COLUMNS):
            for part in rows.partition_by("rank", maintain_order=True):
                writer.write_rank(part)
                if advance is not None:
                    advance(part.height)
        listed = {writer.names[group.id]: list(group.ranks) for group in trace.header.groups}
        (folder / GROUP_FILE).write_text(json.dumps(listed) + "\n", encoding="utf-8")
    return {name: number for name, number in sorted(writer.counts.items()) if number}


@dataclass
class _Writer:
    folder: Path
    name: str
    header: TraceHeader
    base_ns: int
    """Subtracted from starts, which must not be negative."""
    timed: bool = True
    counts: Counter[str] = field(default_factory=Counter)
    attributes: dict[tuple[str, Any], bytes] = field(default_factory=dict)
    """Attributes in their written form; most nodes share them with others."""

    def __post_init__(self) -> None:
        # ASTRA-sim reads a group's name as a number, and 0 as the group of all ranks.
        self.names = {group.id: str(group.id + 1) for group in self.header.groups}
        self.members: dict[int, list[ProcessGroup]] = {}
        for group in self.header.groups:
            for rank in group.ranks:
                self.members.setdefault(rank, []).append(group)
        self.ranks_of = {group.id: group.ranks for group in self.header.groups}
        self.host_of = {rank: clock.host for clock in self.header.clock for rank in clock.ranks}

    def write_rank(self, rows: pl.DataFrame) -> None:
        """The file of one rank."""
        rank = rows["rank"][0]
        rows = rows.with_columns(self._times()).with_columns(
            changed=(pl.col("start_us") * 1000 + self.base_ns != pl.col("start_ns"))
            | (pl.col("dur_us") * 1000 != pl.col("dur_ns")),
            deps=pl.col("index") - pl.col("deps").cast(pl.List(pl.Int64)),
        )
        self.counts["rounded-times"] += int(rows["changed"].sum())
        self.counts["dropped-xdeps"] += int(rows["xdeps"].list.len().sum())
        self.counts["dropped-lags"] += int((rows["lag_ns"].list.max() > 0).sum())
        with (self.folder / f"{self.name}.{rank}.et").open("wb") as file:
            file.write(_framed(self._metadata(rank)))
            for row in rows.iter_rows(named=True):
                file.write(_framed(self._node(row)))

    def _times(self) -> list[pl.Expr]:
        """Start and duration in µs; both ends are rounded, so order and gaps stay."""
        start = pl.col("start_ns") - self.base_ns
        start_us = (start + 500) // 1000
        end_us = (start + pl.col("dur_ns") + 500) // 1000
        return [
            start_us.fill_null(0).alias("start_us"),
            (end_us - start_us).fill_null(0).alias("dur_us"),
        ]

    def _metadata(self, rank: int) -> bytes:
        groups = {
            self.names[group.id]: {
                "name": group.name,
                "desc": group.desc,
                "ranks": format_ranks(group.ranks),
            }
            for group in self.members.get(rank, [])
        }
        host = self.host_of.get(rank)
        said = {
            "prismtrace": __version__,
            "timed": int(self.timed),
            "base_ns": self.base_ns,
            "rank": rank,
            "world_size": self.header.world_size,
            "process_groups": json.dumps(groups),
            "stream_names": json.dumps(self.header.streams),
        } | ({"host_name": host} if host else {})
        message = message_class("GlobalMetadata")(version=_VERSION)
        for name, value in said.items():
            message.attr.add(name=name, **{_field(name, value): value})
        return bytes(message.SerializeToString())

    def _node(self, row: dict[str, Any]) -> bytes:
        kind = Kind(row["kind"])
        matched = row["group"] is not None and row["seq"] is not None
        node_type, comm_type = NodeType.COMP, None
        if matched and kind.is_p2p:
            node_type = NodeType.COMM_SEND if kind is Kind.SEND else NodeType.COMM_RECV
        elif matched and kind in _COMM_TYPE:
            node_type, comm_type = NodeType.COMM_COLL, _COMM_TYPE[kind]
        local = node_type == NodeType.COMP
        self.counts["exported-as-local"] += local and kind.is_communication
        said: dict[str, Any] = {
            "is_cpu_op": False,
            "kind": str(kind) if local and kind is not Kind.COMPUTE else None,
            "comm_type": comm_type,
            "pg_name": None if local else self._group_name(row),
            "stream": row["stream"],
            "tensor_size" if kind is Kind.MEMCPY else "comm_size": row["bytes"],
            "root": None if local else self._root(kind, row),
            **{name: row[name] for name in _SHARED},
        }
        if not local and kind.is_p2p:
            ends = (row["rank"], row["peer"])
            said["comm_src"], said["comm_dst"] = ends if kind is Kind.SEND else ends[::-1]
            said["comm_tag"] = row["seq"] % 2**31
        message = message_class("Node")(
            id=row["index"],
            name=row["name"] or str(kind),
            type=node_type,
            data_deps=row["deps"],
            start_time_micros=row["start_us"],
            duration_micros=row["dur_us"],
        )
        parts = [message.SerializeToString()]
        parts += [self._attribute(name, value) for name, value in said.items() if value is not None]
        # Messages written one after the other are one message of the fields of all.
        return b"".join(parts)

    def _group_name(self, row: dict[str, Any]) -> str:
        if row["group"] not in self.names:
            raise ValidationError(
                f"a communication names a group of id {row['group']}, which the header does not list",
                where=f"rank={row['rank']} index={row['index']}",
                hint="run `prismtrace validate` on the trace: it lists every rule that is broken",
            )
        return self.names[row["group"]]

    def _root(self, kind: Kind, row: dict[str, Any]) -> int | None:
        """Group rank of the root of a rooted collective."""
        if row["peer"] is None or kind.is_p2p:
            return None
        ranks = self.ranks_of[row["group"]]
        return ranks.index(row["peer"]) if row["peer"] in ranks else None

    def _attribute(self, name: str, value: Any) -> bytes:
        found = self.attributes.get((name, value))
        if found is None:
            if len(self.attributes) > _MOST_KNOWN:
                self.attributes.clear()
            message = message_class("AttributeProto")(name=name, **{_field(name, value): value})
            found = _ATTRIBUTE_KEY + _framed(message.SerializeToString())
            self.attributes[name, value] = found
        return found


_SHARED = ("dtype", "reduce_op", "phase", "batch", "step", "microbatch", "chunk")
"""Attributes that are called like their columns; other readers pass over them."""

_INT32 = frozenset({"comm_src", "comm_dst", "comm_tag"})


def _field(name: str, value: Any) -> str:
    """Which field holds an attribute's value; readers look into that one only."""
    if isinstance(value, bool):
        return "bool_val"
    if isinstance(value, str):
        return "string_val"
    return "int32_val" if name in _INT32 else "int64_val"


def _framed(message: bytes) -> bytes:
    """A message after its length."""
    length = len(message)
    head = bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + message
