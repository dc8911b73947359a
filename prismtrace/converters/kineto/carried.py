"""What a communication says about itself: kind, payload, group, partner.

The sources, best first: metadata on the kernel, the `record_param_comms` entry around its
launch, the ``nccl:…`` annotation, the kernel's name.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prismtrace.converters.kineto.names import (
    CommPatterns,
    collective_kind,
    dtype_of,
    kernel_dtype,
    kernel_reduce_op,
    peer_in_name,
)
from prismtrace.converters.kineto.records import MOST_ELEMENTS
from prismtrace.schema import DType, Kind, ReduceOp

__all__ = ["CommOp", "describe_gloo", "describe_record", "is_wait", "shape_elements"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class CommOp:
    """One communication of one rank, before it is matched with its partners."""

    kind: Kind
    dtype: DType | None = None
    reduce_op: ReduceOp | None = None
    nbytes: int | None = None
    """Payload as nccl-tests counts it."""
    share: bool = False
    """`nbytes` is one rank's share, as of an all_gather; the whole is that times the group size."""
    group_name: str | None = None
    group_desc: str | None = None
    group_ranks: tuple[int, ...] | None = None
    group_size: int | None = None
    local_group: int | None = None
    """Process-local number of the group (torch ≤ 2.2), useless across ranks."""
    seq: int | None = None
    local_seq: int | None = None
    """Number that the ``wait`` entry of the same operation shows, where it is visible."""
    comms_id: int | None = None
    peer: int | None = None
    """Global rank of the partner."""
    group_peer: int | None = None
    """Partner, or root, as rank within the group."""
    early: bool = False
    """Launched before the recording began, so that nothing tells what it is."""
    alone: bool = False
    """Its source says that no partners of it are known."""
    communicators: int = 1
    """How many communicators the rank is seen to use where nothing names them."""


def is_wait(row: Row) -> bool:
    """Whether a `record_param_comms` entry marks a wait instead of a collective.

    Up to torch 2.1 there are no names; entries that carry data start with a tensor.
    """
    if row.get("collective") is not None:
        return bool(row["collective"] == "wait")
    types = _json(row.get("input_type"))
    return bool(types) and types[0] == "Scalar"


def describe_record(
    *,
    kernel: str,
    patterns: CommPatterns,
    own: Row | None,
    records: Sequence[Row],
    note: str | None,
    note_row: Row | None,
    early: bool,
    counts: Counter[str],
) -> list[CommOp]:
    """The operations that one communication kernel carries (several: coalesced launch).

    Args:
        kernel: its name.
        patterns: what kernel names say.
        own: metadata on the kernel itself.
        records: `record_param_comms` entries around or before its launch.
        note: name of the ``nccl:…`` annotation around its launch.
        note_row: what that annotation carries.
        early: whether the launch was not recorded.
        counts: kernels without any metadata are counted here.
    """
    named = [row for row in records if not is_wait(row)]
    if own is not None and own.get("collective") is not None and len(named) <= 1:
        named = [{**(named[0] if named else {}), **_present(own)}]
    if not named:
        counts["no-metadata"] += 1
        named = [{}]
    return [_describe(kernel, patterns, row, note, note_row, early=early) for row in named]


def _present(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def _describe(
    kernel: str,
    patterns: CommPatterns,
    row: Row,
    note: str | None,
    note_row: Row | None,
    *,
    early: bool,
) -> CommOp:
    kind = (
        collective_kind(row.get("collective") or "")
        or collective_kind(note or "")
        or patterns.kind(kernel)
        or Kind.OTHER_COMM
    )
    dtype = (
        dtype_of(row.get("dtype")) or kernel_dtype(kernel) or _typed(row) or _typed(note_row or {})
    )
    elements = _elements(kind, row)
    if elements is None and note_row is not None:
        elements = shape_elements(note_row)
    concrete = row.get("concrete_inputs") or []
    peer = row.get("dst_rank") if kind is Kind.SEND else row.get("src_rank")
    return CommOp(
        kind=kind,
        dtype=dtype,
        reduce_op=row.get("reduce_op") or kernel_reduce_op(kernel)
        if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE)
        else None,
        nbytes=_bytes(row, elements, dtype),
        share=row.get("share", kind is Kind.ALL_GATHER and row.get("out_nelems") is None),
        group_name=row.get("pg_name"),
        group_desc=row.get("pg_desc"),
        group_ranks=tuple(row["pg_ranks"]) if row.get("pg_ranks") else None,
        group_size=row.get("group_size") or _old_group_size(concrete),
        local_group=_integer(concrete, 2),
        seq=row.get("seq"),
        local_seq=row["seq"] if row.get("seq") is not None else _integer(concrete, 1),
        comms_id=row.get("comms_id"),
        peer=peer if kind.is_p2p else None,
        group_peer=_group_peer(row, concrete, note) if kind.is_p2p else row.get("root"),
        early=early,
        communicators=row.get("communicators") or 1,
    )


def _bytes(row: Row, elements: int | None, dtype: DType | None) -> int | None:
    if row.get("nbytes") is not None:
        return int(row["nbytes"])
    return None if elements is None or dtype is None else elements * dtype.itemsize


def _group_peer(row: Row, concrete: Sequence[str], note: str | None) -> int | None:
    """The partner's rank within the group: from metadata, the annotation, or the arguments."""
    if row.get("peer") is not None:
        return int(row["peer"])
    named = peer_in_name(note or "")
    return _integer(concrete, 3) if named is None else named


def _elements(kind: Kind, row: Row) -> int | None:
    """Element count as nccl-tests counts it: the whole, not a rank's share."""
    sent, received = row.get("in_nelems"), row.get("out_nelems")
    if kind in (Kind.ALL_GATHER, Kind.RECV, Kind.GATHER) and received is not None:
        return int(received)
    if sent is not None:
        return int(sent)
    return shape_elements(row)


def shape_elements(row: Row) -> int | None:
    """Elements of the first tensor (list) in "Input Dims"."""
    dims = _json(row.get("input_dims"))
    if not dims or (not dims[0] and _typed(row) is None):
        return None
    if not dims[0]:
        return 1  # a tensor without dimensions
    first = dims[0] if isinstance(dims[0], list) else [dims[0]]
    shapes = first if isinstance(first[0], list) else [first]
    total = 0
    for shape in shapes:
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            return None
        total += math.prod(shape)
    return total if total <= MOST_ELEMENTS else None


def _typed(row: Row) -> DType | None:
    types = _json(row.get("input_type"))
    return dtype_of(types[0]) if types and isinstance(types[0], str) else None


def _json(text: str | None) -> list[Any]:
    if not text:
        return []
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def _integer(values: Sequence[str], position: int) -> int | None:
    try:
        number = int(values[position])
    except (IndexError, ValueError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def _old_group_size(concrete: Sequence[str]) -> int | None:
    """World size at the end of "Concrete Inputs" where no metadata exists (torch 2.2, 2.3)."""
    return _integer(concrete, len(concrete) - 1) if len(concrete) in (8, 10) else None


def describe_gloo(name: str, span: Row, launch: Row | None) -> CommOp | None:
    """A gloo operation from its ``gloo:…`` span and the `c10d::…` call that issued it.

    Returns null when the name is not a communication. gloo names neither group nor global
    partner; the call's "Concrete Inputs" hold the partner's rank within the group.
    """
    kind = collective_kind(name)
    if kind is None:
        return None
    dtype = _typed(span) or _typed(launch or {})
    elements = shape_elements(span)
    concrete = (launch or {}).get("concrete_inputs") or []
    return CommOp(
        kind=kind,
        dtype=dtype,
        nbytes=None if elements is None or dtype is None else elements * dtype.itemsize,
        share=kind is Kind.ALL_GATHER,
        group_peer=_integer(concrete, 2) if kind.is_p2p else None,
    )
