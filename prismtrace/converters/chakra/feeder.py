"""The JSON form that Chakra's feeder reads: an object with a list ``workload_graph``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from prismtrace.converters.chakra.nodes import UNKNOWN, ChakraNodes
from prismtrace.converters.chakra.wire import Ints
from prismtrace.converters.content import read_json
from prismtrace.errors import InputFileError

__all__ = ["read_feeder"]

_INTEGERS = (
    "is_cpu_op",
    "tensor_size",
    "comm_type",
    "comm_size",
    "comm_src",
    "comm_dst",
    "comm_tag",
    "stream",
    "tid",
)


class _Node(msgspec.Struct, gc=False):
    """One entry of the list; names as the feeder spells them."""

    Id: int
    Name: str = ""
    NodeType: int = 0
    ctrl_deps: list[int] = msgspec.field(default_factory=list, name="ctrlDeps")
    data_deps: list[int] = []
    start_time: int | None = None
    runtime: int = 0
    is_cpu_op: bool | int | None = None
    tensor_size: int | None = None
    comm_type: int | None = None
    comm_size: int | None = None
    comm_src: int | None = None
    comm_dst: int | None = None
    comm_tag: int | None = None
    stream: int | None = None
    tid: int | None = None
    pg_name: str | int | None = None


class _Document(msgspec.Struct, gc=False):
    workload_graph: list[_Node]


def read_feeder(blocks: Iterable[bytes], *, where: str, counts: Counter[str]) -> ChakraNodes:
    """Read the nodes of a file from its uncompressed bytes.

    Raises:
        InputFileError: it is not of that form, or larger than 1 GiB.
    """
    nodes = read_json(
        blocks,
        _Document,
        name="Chakra trace as JSON",
        where=where,
        smaller="convert it to Chakra's protobuf form, which is read in pieces",
        hint='expected {"workload_graph": [{"Id": 0, "Name": …, "NodeType": 4}, …]}',
    ).workload_graph
    counts["events"] += len(nodes)
    return _columns(nodes, where)


def _columns(nodes: list[_Node], where: str) -> ChakraNodes:
    found = ChakraNodes(
        id=_array([node.Id for node in nodes], "Id", where),
        type=_array([node.NodeType for node in nodes], "NodeType", where),
        start_us=_array([node.start_time or 0 for node in nodes], "start_time", where),
        dur_us=_array([node.runtime for node in nodes], "runtime", where),
        name=[node.Name for node in nodes],
    )
    if (found.start_us < 0).any() or (found.dur_us < 0).any():
        raise InputFileError(
            "a node has a negative time", where=where, hint="runtime is a number of microseconds"
        )
    for name, owner, dep in (
        ("data_deps", "data_owner", "data_dep"),
        ("ctrl_deps", "ctrl_owner", "ctrl_dep"),
    ):
        lists = [getattr(node, name) for node in nodes]
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        setattr(found, owner, np.repeat(np.arange(len(lists)), lengths))
        setattr(found, dep, _array([value for entry in lists for value in entry], name, where))
    for name in _INTEGERS:
        values: list[Any] = [getattr(node, name) for node in nodes]
        if any(value is not None for value in values):
            numbers = [UNKNOWN if value is None else int(value) for value in values]
            found.numbers[name] = _array(numbers, name, where)
    groups = [None if node.pg_name is None else str(node.pg_name) for node in nodes]
    if any(group is not None for group in groups):
        found.texts["pg_name"] = groups
    return found


def _array(values: list[int], name: str, where: str) -> Ints:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise InputFileError(
            f"a number in {name} does not fit 64 bits",
            where=where,
            hint="the file was changed: write it again",
        ) from error
