"""Reading a PyTorch execution trace (JSON, gzipped or not), of schema 1.0.1 to 1.1.1.

Operators are nodes with ascending ids; what is wanted of them is which thread called them and,
of each communication's record, the collective, its size and its process group.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from prismtrace.converters.chakra.listed import group_configs
from prismtrace.converters.content import read_blocks, read_json
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.kineto.names import collective_kind, dtype_of
from prismtrace.converters.kineto.records import MOST_ELEMENTS

__all__ = ["CommRecord", "ExecutionTrace", "Operator", "read_execution_trace"]

_RECORD = "record_param_comms"
_GROUPS = "## process_group:init ##"
_WORLD = ("0", "default_pg")
_NOTHING = msgspec.Raw(b"null")


@dataclass(frozen=True)
class CommRecord:
    """What an operator ``record_param_comms`` says; null: it does not."""

    collective: str | None = None
    dtype: str | None = None
    in_nelems: int | None = None
    out_nelems: int | None = None
    group_size: int | None = None
    pg_name: str | None = None
    pg_desc: str | None = None
    seq: int | None = None
    rank: int | None = None
    """Of a message the partner, else the caller, as rank within the group."""

    @property
    def is_wait(self) -> bool:
        """It waits for an earlier operation of the same number."""
        return self.collective == "wait"


@dataclass(frozen=True)
class Operator:
    """One node: an operator or a range that the program was in."""

    id: int
    name: str
    parent: int
    rf_id: int
    """Number of the call, as profiler traces show it."""
    tid: int
    comm: CommRecord | None = None


@dataclass(frozen=True)
class ExecutionTrace:
    """What one process called, in order."""

    path: Path
    operators: tuple[Operator, ...]
    groups: tuple[NamedGroup, ...] = ()
    world_size: int | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def records(self) -> list[Operator]:
        """Operators that are communications, in order."""
        return [operator for operator in self.operators if operator.comm is not None]


class _Node(msgspec.Struct, gc=False):
    """A node as it is written; attributes stand in a list since schema 1.0.2."""

    id: int
    name: str = ""
    ctrl_deps: int | list[int] | None = None
    parent: int | None = None
    rf_id: int | None = None
    tid: int | None = None
    inputs: msgspec.Raw = _NOTHING
    input_shapes: msgspec.Raw = _NOTHING
    input_types: msgspec.Raw = _NOTHING
    outputs: msgspec.Raw = _NOTHING
    output_shapes: msgspec.Raw = _NOTHING
    attrs: list[dict[str, Any]] = []


class _Document(msgspec.Struct, gc=False):
    nodes: list[_Node]


def read_execution_trace(path: Path) -> ExecutionTrace:
    """Read the execution trace at `path`.

    Raises:
        InputFileError: it cannot be read, is cut off or of another form, or larger than 1 GiB.
    """
    counts: Counter[str] = Counter()
    nodes = read_json(
        read_blocks(path, counts=counts),
        _Document,
        name="PyTorch execution trace",
        where=str(path),
        smaller="record fewer steps",
        hint="was the observer stopped before the program ended? record again",
    ).nodes
    counts["events"] += len(nodes)
    groups, names = _groups(nodes, counts)
    world = [len(group.ranks) for group in groups if group.ranks and _is_world(group)]
    operators = tuple(_operator(node, names) for node in sorted(nodes, key=lambda node: node.id))
    return ExecutionTrace(
        path, operators, groups, max(world, default=None), {k: n for k, n in counts.items() if n}
    )


def _is_world(group: NamedGroup) -> bool:
    return group.name == _WORLD[0] or group.desc == _WORLD[1]


def _operator(node: _Node, names: dict[int, str]) -> Operator:
    attributes = {str(item.get("name")): item.get("value") for item in node.attrs}
    parent = node.parent if node.ctrl_deps is None else node.ctrl_deps
    if isinstance(parent, list):
        parent = parent[0] if parent else None
    return Operator(
        id=node.id,
        name=node.name,
        parent=parent if parent is not None else -1,
        rf_id=_number(attributes.get("rf_id", node.rf_id)) or 0,
        tid=_number(attributes.get("tid", node.tid)) or 0,
        comm=_record(node, attributes, names) if node.name == _RECORD else None,
    )


def _groups(
    nodes: Sequence[_Node], counts: Counter[str]
) -> tuple[tuple[NamedGroup, ...], dict[int, str]]:
    """The groups that existed when the recording began, and names by process-local number."""
    groups: dict[NamedGroup, None] = {}
    names: dict[int, str] = {}
    for node in nodes:
        if node.name != _GROUPS:
            continue
        values = _part("values", node.inputs)
        for text in values:
            if not isinstance(text, str):
                continue
            groups |= dict.fromkeys(group_configs(text, counts))
            for config in _json(text.encode()):
                if isinstance(config, dict) and type(config.get("backend_id")) is int:
                    names[config["backend_id"]] = str(config.get("pg_name"))
    return tuple(groups), names


def _record(node: _Node, attributes: dict[Any, Any], names: dict[int, str]) -> CommRecord:
    """The attributes of newer versions; what they lack from the arguments of the record."""
    values = _part("values", node.inputs)
    at = next((k for k, value in enumerate(values) if _is_collective(value)), None)
    name = attributes.get("collective_name")
    if not isinstance(name, str):
        name = values[at] if at is not None else None
    seq = group = rank = size = None
    if at is not None and at >= 3:
        # [tensors,] number, group, rank, name, …, size of the group
        seq, group, rank = values[at - 3 : at]
        size = values[-1] if len(values) > at + 1 else None
    first = (_json_first(values, at)) if at is not None else None
    return CommRecord(
        collective=name,
        dtype=_text(attributes.get("dtype")) or _dtype(node),
        in_nelems=_given(attributes, "in_msg_nelems", node.inputs, node.input_shapes, first),
        out_nelems=_given(attributes, "out_msg_nelems", node.outputs, node.output_shapes, True),
        group_size=_number(attributes.get("pg_size")) or _number(size) or None,
        pg_name=_text(attributes.get("pg_name")) or _group_name(group, names),
        pg_desc=_text(attributes.get("pg_desc")),
        seq=_number(seq[0] if isinstance(seq, list) and seq else seq),
        rank=_number(rank),
    )


def _is_collective(value: Any) -> bool:
    return isinstance(value, str) and (
        value in ("wait", "init") or collective_kind(value) is not None
    )


def _json_first(values: list[Any], at: int) -> bool:
    """Whether tensors come first among the arguments."""
    return at >= 4 and isinstance(values[0], list)


def _group_name(group: Any, names: dict[int, str]) -> str | None:
    """A group's name: as told, or of a process-local number that the file explains."""
    if isinstance(group, list):
        group = group[0] if group else None
    if isinstance(group, str):
        return group or None
    return names.get(group) if type(group) is int else None


def _given(
    attributes: dict[Any, Any], name: str, part: msgspec.Raw, shapes: msgspec.Raw, said: bool | None
) -> int | None:
    """Number of elements: as told, else of the first tensors."""
    number = _number(attributes.get(name))
    if number is not None:
        return number
    if not said:
        return None
    document = _json(bytes(part))
    found = document.get("shapes") if isinstance(document, dict) else _json(bytes(shapes))
    if not isinstance(found, list) or not found or not isinstance(found[0], list):
        return None
    return _elements(found[0])


def _elements(shape: list[Any], depth: int = 0) -> int | None:
    """Elements of a tensor's shape, or of all in a list of shapes."""
    if all(type(size) is int and size >= 0 for size in shape):
        total: int | None = math.prod(shape) if shape or depth else None
    elif depth > _DEEPEST or not all(isinstance(inner, list) for inner in shape):
        return None
    else:
        parts = [_elements(inner, depth + 1) for inner in shape]
        known = [part for part in parts if part is not None]
        total = sum(known) if len(known) == len(parts) else None
    return total if total is None or total <= MOST_ELEMENTS else None


_DEEPEST = 4  # lists of lists of tensors occur


def _dtype(node: _Node) -> str | None:
    """Element type of the first tensor, from a type such as ``GenericList[Tensor(float)]``."""
    for part, plain in ((node.inputs, node.input_types), (node.outputs, _NOTHING)):
        document = _json(bytes(part))
        types = document.get("types") if isinstance(document, dict) else _json(bytes(plain))
        if isinstance(types, list) and types and isinstance(types[0], str):
            name = types[0].rpartition("Tensor(")[2].partition(")")[0]
            if dtype_of(name) is not None:
                return name
    return None


def _part(key: str, raw: msgspec.Raw) -> list[Any]:
    """The values of the inputs, in either way of writing them."""
    document = _json(bytes(raw))
    values = document.get(key) if isinstance(document, dict) else document
    return values if isinstance(values, list) else []


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: Any) -> int | None:
    return value if type(value) is int and -(2**63) <= value < 2**63 else None
