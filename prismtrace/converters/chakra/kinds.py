"""What the nodes of a Chakra trace do, and what its communications say about themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import polars as pl

from prismtrace.converters.chakra.nodes import UNKNOWN, ChakraNodes, NodeType
from prismtrace.converters.chakra.ordering import known
from prismtrace.converters.chakra.wire import Bools, Ints
from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.names import CommPatterns, collective_kind
from prismtrace.errors import GroupError
from prismtrace.schema import REDUCING_KINDS, ROOTED_KINDS, DType, Kind, ReduceOp

__all__ = ["COLLECTIVES", "WORLD", "Meaning", "meanings"]

WORLD = "0"
"""Name of the group of all ranks: readers of Chakra traces take it, or no name, for that."""

COLLECTIVES = (
    Kind.ALL_REDUCE,
    Kind.REDUCE,
    Kind.ALL_GATHER,
    Kind.GATHER,
    Kind.SCATTER,
    Kind.BROADCAST,
    Kind.ALL_TO_ALL,
    Kind.REDUCE_SCATTER,
    Kind.REDUCE_SCATTER,  # in blocks of equal size
    Kind.BARRIER,
)
"""Kinds by the number of a collective (``comm_type``)."""

_KINDS = list(Kind)
_CODE = {kind: code for code, kind in enumerate(_KINDS)}


@dataclass(frozen=True)
class Meaning:
    """Columns of the nodes in order; `comm` has an entry for each true one of `is_comm`."""

    kind: pl.Series
    is_comm: Bools
    comm: list[CommOp]
    nbytes: pl.Series
    dtype: pl.Series
    reduce_op: pl.Series
    in_world: int
    """Communications that name no group."""


def meanings(
    nodes: ChakraNodes,
    position: Ints,
    groups: dict[str, NamedGroup],
    patterns: CommPatterns,
    counts: Counter[str],
    *,
    where: str,
) -> Meaning:
    """Kinds, sizes and partners.

    Args:
        nodes: what the file says.
        position: the order of the nodes.
        groups: those that the file lists, under the names that its nodes use.
        patterns: what names of kernels say, for collectives of which no number does.
        counts: kinds that are not known are counted.
        where: the file, for errors.

    Raises:
        GroupError: a collective spans some dimensions of a network and names no group.
    """
    count = len(nodes)
    kind, told = _kinds(nodes, patterns, counts)
    kind, told = kind[position], told[position]
    is_comm = (kind != _CODE[Kind.COMPUTE]) & (kind != _CODE[Kind.MEMCPY])
    size = known(nodes.numbers.get("comm_size"), count)[position]
    memory = known(nodes.numbers.get("tensor_size"), count)[position]
    size = np.where(is_comm, size, np.where(kind == _CODE[Kind.MEMCPY], memory, -1))
    chosen = np.flatnonzero(is_comm)
    comm, in_world = _describe(nodes, position, kind, size, told, chosen, groups, where)

    def column(attribute: str) -> pl.Series:
        said = [value and str(value) for value in map(attrgetter(attribute), comm)]
        found = pl.Series([None], dtype=pl.String).new_from_index(0, count)
        return found.scatter(chosen, said) if any(said) else found

    sized = pl.Series(size)
    return Meaning(
        kind=pl.Series([str(item) for item in _KINDS], dtype=pl.String).gather(kind),
        is_comm=is_comm,
        comm=comm,
        nbytes=pl.select(pl.when(sized >= 0).then(sized)).to_series(),
        dtype=column("dtype"),
        reduce_op=column("reduce_op"),
        in_world=in_world,
    )


def _kinds(nodes: ChakraNodes, patterns: CommPatterns, counts: Counter[str]) -> tuple[Ints, Bools]:
    """Code of the kind of each node, and whether an attribute of `export`'s says it."""
    count = len(nodes)
    kind = np.full(count, _CODE[Kind.COMPUTE], dtype=np.int64)
    kind[nodes.type == NodeType.COMM_SEND] = _CODE[Kind.SEND]
    kind[nodes.type == NodeType.COMM_RECV] = _CODE[Kind.RECV]
    kind[(nodes.type == NodeType.MEM_LOAD) | (nodes.type == NodeType.MEM_STORE)] = _CODE[
        Kind.MEMCPY
    ]
    counts["unknown-node-type"] += int(((nodes.type < 0) | (nodes.type > NodeType.COMM_COLL)).sum())
    collective = nodes.type == NodeType.COMM_COLL
    comm_type = nodes.numbers.get("comm_type", np.full(count, UNKNOWN, dtype=np.int64))
    on_cpu = known(nodes.numbers.get("is_cpu_op"), count) == 1
    kind[collective] = _CODE[Kind.OTHER_COMM]
    numbered = np.flatnonzero(collective & (comm_type >= 0) & (comm_type < len(COLLECTIVES)))
    kind[numbered] = np.array([_CODE[meant] for meant in COLLECTIVES])[comm_type[numbered]]
    comms = collective | np.isin(nodes.type, [NodeType.COMM_SEND, NodeType.COMM_RECV])
    # PyTorch's calls of a collective are nodes beside the collective itself.
    calls = comms & on_cpu
    if (comms & ~on_cpu).any():
        kind[calls] = _CODE[Kind.COMPUTE]
    else:
        kind[calls & collective & (comm_type == UNKNOWN)] = _CODE[Kind.COMPUTE]
    for at in np.flatnonzero(kind == _CODE[Kind.OTHER_COMM]).tolist():
        named = patterns.kind(nodes.name[at]) or collective_kind(nodes.name[at])
        counts["unknown-comm-type"] += named is None
        kind[at] = _CODE[named or Kind.OTHER_COMM]
    told = np.zeros(count, dtype=np.bool_)
    for at, text in enumerate(nodes.texts.get("kind", [])):
        if text in _NAMES:
            kind[at], told[at] = _CODE[_NAMES[text]], True
    return kind, told


_NAMES = {str(kind): kind for kind in Kind}


def _describe(
    nodes: ChakraNodes,
    position: Ints,
    kind: Ints,
    size: Ints,
    told: Bools,
    chosen: Ints,
    listed: dict[str, NamedGroup],
    where: str,
) -> tuple[list[CommOp], int]:
    """What each communication says; equal ones are one object."""
    source = position[chosen]
    sender, receiver, root = (
        _column(nodes, name, source) for name in ("comm_src", "comm_dst", "root")
    )
    groups, dtypes, reductions = (
        _chosen(nodes.texts.get(name), source) for name in ("pg_name", "dtype", "reduce_op")
    )
    partial = {at for at, every in nodes.involved if not every}
    known_ops: dict[tuple[object, ...], CommOp] = {}
    found: list[CommOp] = []
    in_world = 0
    rows = zip(
        kind[chosen].tolist(),
        size[chosen].tolist(),
        sender,
        receiver,
        root,
        groups,
        dtypes,
        reductions,
        told[chosen].tolist(),
        source.tolist(),
        strict=True,
    )
    for *row, at in rows:
        if row[5] is None and at in partial:
            raise GroupError(
                f"{_KINDS[row[0]]} spans some dimensions of a network (involved_dim) and names "
                "no group: which ranks take part depends on the network",
                where=f"{where}, node {nodes.id[at]}",
                hint="write the trace with a pg_name for each collective",
            )
        key = tuple(row)
        op = known_ops.get(key)
        if op is None:
            op = _comm_op(*row)
            if row[5] in listed and not row[-1]:
                group = listed[row[5]]
                op = replace(op, group_name=group.name, group_ranks=group.ranks)
            known_ops[key] = op
        in_world += op.group_name == WORLD and row[5] is None
        found.append(op)
    return found, in_world


def _column(nodes: ChakraNodes, name: str, source: Ints) -> list[int]:
    column = nodes.numbers.get(name)
    return [-1] * len(source) if column is None else known(column, len(column))[source].tolist()


def _chosen(texts: list[str | None] | None, source: Ints) -> list[str | None]:
    return [None] * len(source) if texts is None else [texts[at] for at in source.tolist()]


def _comm_op(
    code: int,
    size: int,
    sender: int,
    receiver: int,
    root: int,
    group: str | None,
    dtype: str | None,
    reduction: str | None,
    told: bool,
) -> CommOp:
    kind = _KINDS[code]
    peer = receiver if kind is Kind.SEND else sender
    return CommOp(
        kind=kind,
        dtype=DType(dtype) if dtype in _DTYPES else None,
        reduce_op=ReduceOp(reduction)
        if kind in REDUCING_KINDS and reduction in _REDUCTIONS
        else None,
        nbytes=size if size >= 0 else None,
        group_name=None if told else group or WORLD,
        peer=peer if kind.is_p2p and peer >= 0 else None,
        group_peer=root if kind in ROOTED_KINDS and root >= 0 else None,
        alone=told,
    )


_DTYPES = frozenset(str(dtype) for dtype in DType)
_REDUCTIONS = frozenset(str(op) for op in ReduceOp)
