"""What NCCL's own NVTX ranges say about communications: kind, size, communicator, partner.

NCCL marks every call of its API with a range, to which recent versions attach a payload. It is
in the export as JSON or as bytes with a schema, if at all: both are left out unless asked for.
"""

from __future__ import annotations

import json
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.nsys.database import Database
from prismtrace.schema import ReduceOp

__all__ = ["Call", "Payloads", "Record", "communicators", "records_of_calls"]

_FIELDS = {
    "nccl communicator id": "communicator",
    "no. of ranks": "size",
    "rank": "position",
    "message size [bytes]": "nbytes",
    "reduction operation": "reduce_op",
    "peer rank": "peer",
    "root": "root",
}
# Entry types of the NVTX payload extension; enumerations of NCCL's are C ints.
_FORMATS = {
    **dict.fromkeys((5, 15), "<i"),
    **dict.fromkeys((6, 16), "<I"),
    **dict.fromkeys((7, 9, 17), "<q"),
    **dict.fromkeys((8, 10, 18, 22), "<Q"),
}
_FIRST_OWN_TYPE = 2**24
_HEADER = struct.Struct("<8xI4xQ8x")  # schema and size of what follows
_REDUCE_OPS = {
    "sum": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "prod": ReduceOp.PRODUCT,
    "max": ReduceOp.MAX,
    "min": ReduceOp.MIN,
    "avg": ReduceOp.AVG,
    **dict(
        zip(
            map(str, range(5)),
            (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG),
            strict=True,
        )
    ),
}
# Calls whose "message size" is what one rank contributes or gets.
_SHARES = ("allgather", "reducescatter", "gather", "scatter", "alltoall")
_COLLECTIVES = (
    "allreduce",
    "allgather",
    "reducescatter",
    "broadcast",
    "bcast",
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "send",
    "recv",
)


class Call(NamedTuple):
    """A range of NCCL's on one thread."""

    start_ns: int
    end_ns: int
    name: str
    payload: Mapping[str, Any]


class Record(NamedTuple):
    """One communication of one thread, as `record_param_comms` is for PyTorch's."""

    start_ns: int
    end_ns: int
    values: Mapping[str, Any]


class Payloads:
    """Decodes payloads; schemas are those of the file."""

    def __init__(self, database: Database, counts: Counter[str]) -> None:
        self._counts = counts
        self._layouts: dict[int, list[tuple[str, str, int]]] = {}
        entries = "NVTX_PAYLOAD_SCHEMA_ENTRIES"
        if not {"schemaid", "name", "type", "offset", "idx"} <= set(database.columns(entries)):
            return
        query = f"SELECT schemaId, name, type, offset, idx FROM {entries}"  # noqa: S608
        for schema, name, kind, offset, index in database.rows(query):
            known = _FIELDS.get(str(name).lower())
            own = isinstance(kind, int) and kind >= _FIRST_OWN_TYPE
            form = "<i" if own else _FORMATS.get(kind)
            place = 0 if offset is None and index == 0 else offset
            if known and form and type(schema) is int and type(place) is int and place >= 0:
                self._layouts.setdefault(schema, []).append((known, form, place))

    def decode(self, text: Any, binary: Any) -> dict[str, Any]:
        """Fields by the names that `Record.values` uses; empty when there is no payload."""
        if isinstance(text, str) and text:
            return self._from_json(text)
        if isinstance(binary, bytes) and binary:
            return self._from_bytes(binary)
        return {}

    def _from_json(self, text: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self._counts["dropped-field"] += 1
            return {}
        values: dict[str, Any] = {}
        for name, value in found.items():
            known = _FIELDS.get(name.lower())
            if known == "reduce_op":
                values[known] = str(value)
            elif known is not None:
                number = _number(value)
                if number is None:
                    self._counts["dropped-field"] += 1
                else:
                    values[known] = number
        return _checked(values)

    def _from_bytes(self, data: bytes) -> dict[str, Any]:
        if len(data) < _HEADER.size:
            self._counts["dropped-field"] += 1
            return {}
        schema, size = _HEADER.unpack_from(data)
        body = data[_HEADER.size :][: min(size, len(data))]
        values: dict[str, Any] = {}
        for name, form, offset in self._layouts.get(schema, ()):
            if offset + struct.calcsize(form) > len(body):
                self._counts["dropped-field"] += 1
                continue
            (number,) = struct.unpack_from(form, body, offset)
            values[name] = str(number) if name == "reduce_op" else number
        return _checked(values)


def _number(value: Any) -> int | None:
    """An integer, also as text with separators; null for others."""
    if type(value) is int:
        number = value
    else:
        digits = str(value).replace(",", "").strip()
        if not digits.lstrip("-").isascii() or not digits.lstrip("-").isdecimal():
            return None
        if len(digits) > 20:
            return None
        number = int(digits)
    return number if -(2**63) <= number < 2**64 else None


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """Only what can be: no negative sizes and places."""
    limits = {"communicator": 2**64, "nbytes": 2**40}
    kept = {
        name: value
        for name, value in values.items()
        if name == "reduce_op" or -(2**63) <= value < limits.get(name, 2**31)
    }
    if kept.get("communicator", 0) < 0:
        kept["communicator"] += 2**64
    return {n: v for n, v in kept.items() if n == "reduce_op" or v >= 0}


def communicators(calls: Sequence[Call]) -> tuple[NamedGroup, ...]:
    """The communicators that a rank creates or uses, with the rank's place where it is told."""
    found: dict[int, tuple[int | None, int | None]] = {}
    for call in calls:
        communicator = call.payload.get("communicator")
        if communicator is None:
            continue
        position, size = call.payload.get("position"), call.payload.get("size")
        if position is None or size is None or not position < size:
            found.setdefault(communicator, (None, None))
        else:
            found[communicator] = (position, size)
    return tuple(
        NamedGroup(_group_name(key), "", None, shared_name=True, position=place[0], size=place[1])
        for key, place in sorted(found.items())
    )


def _group_name(communicator: int) -> str:
    return f"communicator {communicator:x}"


@dataclass
class _Unit:
    """A call alone, or all calls between a group's start and end."""

    start_ns: int
    end_ns: int
    calls: list[Call] = field(default_factory=list)
    counted_ranks: bool = False
    """The program asked for the communicator's size right before."""


def records_of_calls(
    calls: Sequence[Call],
    exchanges: Sequence[tuple[int, int]],
    launches: Sequence[int],
    counts: Counter[str],
) -> list[Record]:
    """Communications of one thread.

    Args:
        calls: the thread's ranges, by start.
        exchanges: (start, end) of ranges in which PyTorch says that it does an all_to_all.
        launches: when the thread launched NCCL's kernels, ascending.
        counts: guesses are counted here.

    PyTorch makes an all_to_all of a group of sends and receives, between all ranks; such a
    group is told by PyTorch's own range around it, by partners that are all ranks, or by what
    PyTorch does before: it asks how many ranks there are.
    """
    starts = [start for start, _ in exchanges]
    records: list[Record] = []
    for unit in _units(calls):
        first, last = bisect_left(launches, unit.start_ns), bisect_right(launches, unit.end_ns)
        if first == last:
            # Captured into a graph, or a communicator of one rank: nothing runs here.
            counts["dropped-call-without-kernel"] += len(unit.calls)
            continue
        at = bisect_right(starts, unit.start_ns) - 1
        inside = at >= 0 and unit.start_ns <= exchanges[at][1]
        whole = _all_to_all(unit, inside, counts)
        if whole is not None:
            records.append(whole)
        else:
            records += _separate(unit, launches[first:last])
    return records


def _separate(unit: _Unit, launches: Sequence[int]) -> list[Record]:
    """The calls of a unit, those of a group right before the launch that they share.

    A group's end launches a kernel for each of its calls or for each communicator. If neither
    fits, all belong to the next launch.
    """
    parts: dict[Any, list[Call]] = {}
    for number, call in enumerate(unit.calls):
        each = len(launches) == len(unit.calls)
        parts.setdefault(number if each else call.payload.get("communicator"), []).append(call)
    if len(launches) < 2 or len(parts) != len(launches):
        return [Record(call.start_ns, call.end_ns, _values(call)) for call in unit.calls]
    return [
        Record(launch - 1, launch - 1, _values(call))
        for launch, part in zip(launches, parts.values(), strict=True)
        for call in part
    ]


def _units(calls: Sequence[Call]) -> list[_Unit]:
    units: list[_Unit] = []
    open_unit: _Unit | None = None
    depth = 0
    counted = False
    for call in calls:
        if call.name == "ncclCommCount":
            counted = True
            continue
        if call.name == "ncclGroupStart":
            depth += 1
            if open_unit is None:
                open_unit = _Unit(call.start_ns, call.end_ns, counted_ranks=counted)
        elif call.name == "ncclGroupEnd":
            depth = max(0, depth - 1)
            if open_unit is not None and depth == 0:
                open_unit.end_ns = call.end_ns
                units.append(open_unit)
                open_unit = None
        elif _collective(call.name) is not None:
            if open_unit is not None:
                open_unit.calls.append(call)
            else:
                units.append(_Unit(call.start_ns, call.end_ns, [call]))
        counted = False
    if open_unit is not None:
        units.append(open_unit)
    return [unit for unit in units if unit.calls]


def _collective(name: str) -> str | None:
    """The collective of a call such as ``ncclAllReduce``; null for other calls."""
    plain = name.removeprefix("nccl").lower()
    return plain if plain in _COLLECTIVES else None


def _all_to_all(unit: _Unit, inside: bool, counts: Counter[str]) -> Record | None:
    sends = [call for call in unit.calls if call.name == "ncclSend"]
    recvs = [call for call in unit.calls if call.name == "ncclRecv"]
    if not sends or len(sends) + len(recvs) != len(unit.calls):
        return None
    to = [call.payload["peer"] for call in sends if "peer" in call.payload]
    by = [call.payload["peer"] for call in recvs if "peer" in call.payload]
    known = len(to) + len(by) == len(unit.calls)
    everybody = known and len(to) > 1 and sorted(to) == sorted(by) == list(range(len(to)))
    names = [call.name for call in unit.calls]
    paired = names == ["ncclSend", "ncclRecv"] * len(sends) and len(sends) > 1
    if not inside and not everybody:
        if known or not (unit.counted_ranks and paired):
            return None
        counts["assumed-all-to-all"] += 1
    sizes = [call.payload.get("nbytes") for call in sends]
    values: dict[str, Any] = {"collective": "alltoall"}
    if None not in sizes:
        values["nbytes"] = sum(size or 0 for size in sizes)
    communicator = sends[0].payload.get("communicator")
    if communicator is not None:
        values["pg_name"] = _group_name(communicator)
    return Record(unit.start_ns, unit.end_ns, values)


def _values(call: Call) -> dict[str, Any]:
    collective = _collective(call.name) or ""
    values: dict[str, Any] = {"collective": "broadcast" if collective == "bcast" else collective}
    payload = call.payload
    if "nbytes" in payload:
        values |= {"nbytes": payload["nbytes"], "share": collective in _SHARES}
    if "communicator" in payload:
        values["pg_name"] = _group_name(payload["communicator"])
    if "reduce_op" in payload:
        known = _REDUCE_OPS.get(str(payload["reduce_op"]).lower().removeprefix("nccl"))
        values["reduce_op"] = None if known is None else known.value
    values |= {name: payload[name] for name in ("peer", "root") if name in payload}
    return values
