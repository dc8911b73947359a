"""What events say about communication and synchronization, one row each.

A communication is described by `record_param_comms` and `c10d::*` operators, by `gloo:*`
annotations, and by GPU kernels that carry a copy of the operator's metadata. Their vocabulary
is kept as it is written; matching and normalising are not the reader's business.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from prismtrace.converters.kineto.events import EventArgs
from prismtrace.converters.kineto.values import int64

__all__ = [
    "COMM_SCHEMA",
    "MOST_ELEMENTS",
    "SYNC_SCHEMA",
    "comm_frame",
    "comm_values",
    "parse_ranks",
    "sync_values",
]

COMM_SCHEMA: Mapping[str, Any] = {
    "row": pl.UInt32(),
    "collective": pl.String(),
    "dtype": pl.String(),
    "in_nelems": pl.Int64(),
    "out_nelems": pl.Int64(),
    "group_size": pl.Int64(),
    "pg_name": pl.String(),
    "pg_desc": pl.String(),
    "pg_ranks": pl.List(pl.Int64()),
    "in_split": pl.String(),
    "out_split": pl.String(),
    "seq": pl.Int64(),
    "comms_id": pl.UInt64(),
    "src_rank": pl.Int64(),
    "dst_rank": pl.Int64(),
    "peer": pl.Int64(),
    "is_async": pl.Boolean(),
    "concrete_inputs": pl.List(pl.String()),
    "input_dims": pl.String(),
    "input_type": pl.String(),
}
SYNC_SCHEMA: Mapping[str, Any] = {
    "row": pl.UInt32(),
    "kind": pl.String(),
    "wait_on_stream": pl.Int64(),
    "wait_on_record_correlation": pl.Int64(),
}

# "No stream" and "no record", as int32 and as the uint32 some versions print.
NOTHING = frozenset({-1, 2**32 - 1})


def comm_frame(rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
    """Rows of COMM_SCHEMA as a table."""
    columns = zip(*rows, strict=True) if rows else ([] for _ in COMM_SCHEMA)
    return pl.DataFrame(
        [
            pl.Series(name, list(values), dtype=dtype)
            for (name, dtype), values in zip(COMM_SCHEMA.items(), columns, strict=True)
        ]
    )


def comm_values(args: EventArgs, counts: Counter[str]) -> tuple[Any, ...]:
    """The values of COMM_SCHEMA after `row`."""
    in_nelems = args.in_size if args.in_nelems is None else args.in_nelems
    out_nelems = args.out_size if args.out_nelems is None else args.out_nelems
    return (
        args.collective,
        args.dtype,
        _count(in_nelems, counts),
        _count(out_nelems, counts),
        _count(args.group_size, counts),
        None if args.pg_name is None else str(args.pg_name),
        args.pg_desc,
        None if args.pg_ranks is None else parse_ranks(args.pg_ranks),
        args.in_split,
        args.out_split,
        int64(args.seq, counts),
        _uint64(args.comms_id, counts),
        int64(args.src_rank, counts),
        int64(args.dst_rank, counts),
        int64(args.peer, counts),
        _flag(args.is_async),
        _strings(args.concrete_inputs),
        _json_text(args.input_dims),
        _json_text(args.input_type),
    )


def sync_values(args: EventArgs, name: str, counts: Counter[str]) -> tuple[Any, ...]:
    """The values of SYNC_SCHEMA after `row`.

    A wait for an event whose record is unknown is counted as `unresolved-sync-record`.
    """
    kind = args.sync_kind or name
    stream = int64(args.wait_on_stream, counts)
    record = int64(args.wait_on_record, counts)
    if record in NOTHING:
        record = None
        if "event" in kind.lower():
            counts["unresolved-sync-record"] += 1
    return kind, None if stream in NOTHING else stream, record


MOST_ELEMENTS = 2**36
"""In one message: a larger number is a mistake, and its bytes over all ranks exceed int64."""


@functools.lru_cache(maxsize=4096)
def parse_ranks(text: str) -> tuple[int, ...] | None:
    """The ranks in `"[0, 1]"`; None when the list is empty or was cut short with `...`."""
    try:
        ranks = tuple(int(part) for part in text.strip().strip("[]").split(","))
    except ValueError:
        return None
    return ranks or None


def _count(value: Any, counts: Counter[str]) -> int | None:
    number = int64(value, counts)
    if number is None or 0 <= number <= MOST_ELEMENTS:
        return number
    counts["dropped-field"] += 1
    return None


def _uint64(value: Any, counts: Counter[str]) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        number = -1
    # Versions that print the hash as int64 show large ones as negative numbers.
    if type(value) is int and -(2**63) <= number < 0:
        number += 2**64
    if 0 <= number < 2**64:
        return number
    counts["dropped-field"] += 1
    return None


def _flag(value: bool | int | str | None) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())


def _json_text(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode(errors="replace")
    return None if text in {"", "null"} else text


def _strings(raw: msgspec.Raw) -> list[str] | None:
    text = _json_text(raw)
    if text is None:
        return None
    try:
        values = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return None
    if not isinstance(values, list):
        return None
    return [v if isinstance(v, str) else msgspec.json.encode(v).decode() for v in values]
