"""What an entry of the flight recorder says about its call: operation, payload, call site."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.names import collective_kind, dtype_of, peer_in_name
from prismtrace.converters.kineto.records import MOST_ELEMENTS
from prismtrace.schema import DType, Kind

__all__ = ["comm_of", "user_frame", "world_of"]

_MOST_TENSORS = 100_000
_MOST_DIMS = 64
_MOST_FRAMES = 256
_MOST_TEXT = 400

# Payload as nccl-tests counts it: the whole, which these find in what they receive.
_WHOLE_IN_OUTPUT = (Kind.ALL_GATHER, Kind.GATHER, Kind.RECV)
_SHARED = (Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER)
"""Kinds of which a rank may see only its own share of the whole."""


def comm_of(row: dict[Any, Any], name: str, counts: Counter[str]) -> CommOp:
    """The operation of an entry, before it is matched with its partners.

    Args:
        row: the entry.
        name: its ``profiling_name``.
        counts: names that are not known are counted here.
    """
    kind = collective_kind(name.partition(":")[2] or name)
    if kind is None:
        counts["unknown-collective"] += name.partition(":")[2] != "coalesced"
        kind = Kind.OTHER_COMM
    sent, received = _elements(row.get("input_sizes")), _elements(row.get("output_sizes"))
    whole, share = (received, sent) if kind in _WHOLE_IN_OUTPUT else (sent, received)
    elements = whole if whole is not None else share
    dtype = _dtype(row.get("input_dtypes")) or _dtype(row.get("output_dtypes"))
    group = row.get("process_group")
    named = isinstance(group, list | tuple) and len(group) == 2
    number = row.get("pg_id")
    local = number if type(number) is int and 0 <= number < 2**31 else None
    group_name, desc = map(str, group) if named and group is not None else (None, None)
    if group_name is None and local == 0:
        group_name, desc = "0", "default_pg"
    return CommOp(
        kind=kind,
        dtype=dtype,
        nbytes=None if elements is None or dtype is None else elements * dtype.itemsize,
        share=kind in _SHARED and whole is None,
        group_name=None if group_name is None else group_name[:_MOST_TEXT],
        group_desc=None if desc is None else desc[:_MOST_TEXT],
        local_group=None if named else local,
        group_peer=peer_in_name(name) if kind.is_p2p else None,
    )


def world_of(row: dict[Any, Any], comm: CommOp) -> int | None:
    """Ranks of the job, where an all_gather among all of them shows it."""
    if comm.kind is not Kind.ALL_GATHER or "default_pg" not in (comm.group_desc, comm.group_name):
        return None
    sent, received = _elements(row.get("input_sizes")), _elements(row.get("output_sizes"))
    if not sent or not received or received % sent:
        return None
    return received // sent


def _elements(sizes: Any) -> int | None:
    """Elements of all tensors; null when there are none."""
    if not isinstance(sizes, list | tuple) or not 0 < len(sizes) <= _MOST_TENSORS:
        return None
    total = 0
    for shape in sizes:
        if not isinstance(shape, list | tuple) or len(shape) > _MOST_DIMS:
            return None
        if any(type(n) is not int or not 0 <= n <= MOST_ELEMENTS for n in shape):
            return None
        total += math.prod(shape)
    return total if total <= MOST_ELEMENTS else None


def _dtype(names: Any) -> DType | None:
    first = names[0] if isinstance(names, list | tuple) and names else None
    return dtype_of(first) if isinstance(first, str) else None


_INSIDE_TORCH = ("/torch/", "\\torch\\", "<frozen ", "<string>")


def user_frame(frames: Any) -> str | None:
    """Where the program made the call, e.g. ``train.py:12 in step``; null when not recorded.

    The innermost frame that is not torch's own, else the innermost one.
    """
    if not isinstance(frames, list | tuple):
        return None
    told = [
        (file, line, str(frame.get("name", "")))
        for frame in frames[:_MOST_FRAMES]
        if isinstance(frame, dict)
        and isinstance(file := frame.get("filename"), str)
        and type(line := frame.get("line")) is int
        and 0 <= line < 2**31
    ]
    if not told:
        return None
    own = [frame for frame in told if not any(part in frame[0] for part in _INSIDE_TORCH)]
    file, line, name = (own or told)[0]
    return f"{file[-_MOST_TEXT:]}:{line}" + (f" in {name[:_MOST_TEXT]}" if name else "")
