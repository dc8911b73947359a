"""What a Chakra trace says, as columns: one entry a node, in the order of the file."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prismtrace.converters.chakra.wire import Ints

__all__ = ["INTEGERS", "TEXTS", "UNKNOWN", "ChakraNodes", "NodeType", "joined"]

UNKNOWN = -(2**63)
"""In a column of integers: the node does not say."""

INTEGERS = (
    "is_cpu_op",
    "comm_type",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
    "tensor_size",
    "stream",
    "tid",
    "rf_id",
    "root",
    "batch",
    "step",
    "microbatch",
    "chunk",
)
"""Attributes that are numbers."""

TEXTS = ("pg_name", "dtype", "reduce_op", "phase", "kind")
"""Attributes that are texts."""


class NodeType:
    """Numbers of the types of nodes (an open set: later versions have more)."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass
class ChakraNodes:
    """Nodes of one file. Arrays have one entry a node; `UNKNOWN` where it does not say."""

    id: Ints = field(default_factory=_none)
    type: Ints = field(default_factory=_none)
    start_us: Ints = field(default_factory=_none)
    dur_us: Ints = field(default_factory=_none)
    name: list[str] = field(default_factory=list)
    numbers: dict[str, Ints] = field(default_factory=dict)
    """Attribute of `INTEGERS` -> its column."""
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    """Attribute of `TEXTS` -> its column; absent when no node has it."""
    data_owner: Ints = field(default_factory=_none)
    data_dep: Ints = field(default_factory=_none)
    """Data dependencies: position of the node, and the id of the node that it waits for."""
    ctrl_owner: Ints = field(default_factory=_none)
    ctrl_dep: Ints = field(default_factory=_none)
    """Control dependencies, likewise."""
    involved: list[tuple[int, bool]] = field(default_factory=list)
    """Position of nodes with an ``involved_dim``, and whether all dimensions are."""
    groups: list[str] = field(default_factory=list)
    """JSON texts of ``process_group:init`` nodes."""

    def __len__(self) -> int:
        return len(self.id)


_ARRAYS = ("id", "type", "start_us", "dur_us", "data_dep", "ctrl_dep")


def joined(parts: list[ChakraNodes]) -> ChakraNodes:
    """The nodes of several blocks of one file."""
    whole = ChakraNodes()
    if not parts:
        return whole
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    for name in _ARRAYS:
        setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
    for name in ("data_owner", "ctrl_owner"):
        shifted = [
            getattr(part, name) + offset for part, offset in zip(parts, offsets, strict=False)
        ]
        setattr(whole, name, np.concatenate(shifted))
    for name in {name for part in parts for name in part.numbers}:
        whole.numbers[name] = np.concatenate(
            [
                part.numbers[name]
                if name in part.numbers
                else np.full(len(part), UNKNOWN, dtype=np.int64)
                for part in parts
            ]
        )
    for name in {name for part in parts for name in part.texts}:
        whole.texts[name] = [
            text for part in parts for text in part.texts.get(name, [None] * len(part))
        ]
    for part, offset in zip(parts, offsets, strict=False):
        whole.name += part.name
        whole.groups += part.groups
        whole.involved += [(position + int(offset), every) for position, every in part.involved]
    return whole
