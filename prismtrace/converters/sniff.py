"""Which tool wrote a file: told by its content, never by its name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from prismtrace.converters.content import read_blocks
from prismtrace.errors import SourceFormatError

__all__ = [
    "DUMPS",
    "SourceFormat",
    "is_dump",
    "is_foreign_json",
    "is_operation_level",
    "sniff",
    "unsupported",
]

_HEAD_BYTES = 256 * 1024


class SourceFormat(StrEnum):
    """A file format, by the tool that writes it."""

    KINETO = "kineto"
    PYTORCH_ET = "pytorch-et"
    CHAKRA_JSON = "chakra-json"
    CHAKRA = "chakra"
    FLIGHT_RECORDER = "flight-recorder"
    FLIGHT_RECORDER_JSON = "flight-recorder-json"
    NSYS_SQLITE = "nsys-sqlite"
    NSYS_REPORT = "nsys-report"
    SQLITE = "sqlite"
    PRISMTRACE_PARQUET = "prismtrace-parquet"
    GROUPS = "groups"
    OPS_PARQUET = "ops-parquet"
    OPS_CSV = "ops-csv"
    UNKNOWN = "unknown"


_DESCRIPTIONS = {
    SourceFormat.KINETO: "a PyTorch profiler trace",
    SourceFormat.PYTORCH_ET: "a PyTorch execution trace",
    SourceFormat.CHAKRA_JSON: "a Chakra trace as JSON",
    SourceFormat.CHAKRA: "a Chakra execution trace",
    SourceFormat.FLIGHT_RECORDER: "a PyTorch flight-recorder dump",
    SourceFormat.FLIGHT_RECORDER_JSON: "a PyTorch flight-recorder dump as JSON",
    SourceFormat.NSYS_SQLITE: "an Nsight Systems export",
    SourceFormat.NSYS_REPORT: "an Nsight Systems report",
    SourceFormat.SQLITE: "an SQLite database, but no Nsight Systems export",
    SourceFormat.PRISMTRACE_PARQUET: "a PrismTrace file already",
    SourceFormat.GROUPS: "a list of process groups",
    SourceFormat.OPS_PARQUET: "an operation-level trace (Parquet)",
    SourceFormat.OPS_CSV: "an operation-level trace (CSV)",
    SourceFormat.UNKNOWN: "in no format that is known here",
}

DUMPS = frozenset({SourceFormat.FLIGHT_RECORDER, SourceFormat.FLIGHT_RECORDER_JSON})
"""What the flight recorder writes."""

_KINETO_KEYS = re.compile(
    rb'"(?:traceEvents|deviceProperties|distributedInfo|baseTimeNanoseconds)"\s*:'
)
_KINETO_EVENT = re.compile(rb'\s*\[\s*(?:\]|\{[^{}\[\]]*"(?:ph|cat)"\s*:)')
_NSYS_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")
_GROUPS = re.compile(rb'\{\s*(?:\}\s*$|"[^"]*"\s*:\s*\[\s*[0-9]+\s*[,\]])')
_OPS_COLUMNS = frozenset({"dp_rank", "stage", "step", "optype"})


def sniff(path: Path) -> SourceFormat:
    """The format of `path`, gzipped or not, from its first 256 KiB.

    Raises InputFileError when the file cannot be read.
    """
    head = _take(read_blocks(path), _HEAD_BYTES)
    if head.startswith(b"SQLite format 3\0"):
        return SourceFormat.NSYS_SQLITE if _is_nsys(head) else SourceFormat.SQLITE
    if head.startswith(b"PAR1"):
        return _sniff_parquet(path)
    if head[:1] == b"\x80" and head[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}:
        is_dump = any(key in head for key in (b"entries", b"pg_config", b"profiling_name"))
        return SourceFormat.FLIGHT_RECORDER if is_dump else SourceFormat.UNKNOWN
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:1] in {b"{", b"["}:
        found = _sniff_json(text)
        if found is not SourceFormat.UNKNOWN:
            return found
    if set(_first_line(text).split(",")) >= _OPS_COLUMNS:
        return SourceFormat.OPS_CSV
    if _is_chakra(head):
        return SourceFormat.CHAKRA
    # Of what is damaged or not documented the name only improves what is said about it.
    if path.name.endswith((".et", ".et.gz")):
        return SourceFormat.CHAKRA
    return SourceFormat.NSYS_REPORT if path.suffix in _NSYS_REPORTS else SourceFormat.UNKNOWN


def is_operation_level(path: Path) -> bool:
    """Whether the file is an operation-level log with the columns that are known by name."""
    return sniff(path) in {SourceFormat.OPS_PARQUET, SourceFormat.OPS_CSV}


def is_dump(path: Path) -> bool:
    """Whether the path is a file that the flight recorder wrote."""
    return path.is_file() and sniff(path) in DUMPS


def is_foreign_json(path: Path) -> bool:
    """Whether the file is JSON, gzipped or not, that no tool wrote of which traces are read.

    What is damaged before it says anything may be a trace.
    """
    if not path.name.endswith((".json", ".json.gz")) or sniff(path) is not SourceFormat.UNKNOWN:
        return False
    counts: Counter[str] = Counter()
    head = _take(read_blocks(path, counts=counts), _HEAD_BYTES)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return text[:1] in {b"{", b"["} and not counts


def unsupported(path: Path, found: SourceFormat) -> SourceFormatError:
    """The error for a file that was recognised and cannot be converted (yet)."""
    if found is SourceFormat.UNKNOWN:
        return SourceFormatError(
            "this file is in no format that is known here",
            where=str(path),
            hint="pass a PyTorch profiler trace (Chrome trace JSON, plain or gzipped)",
        )
    if found is SourceFormat.NSYS_REPORT:
        return SourceFormatError(
            "this is an Nsight Systems report; only its SQLite export can be read",
            where=str(path),
            hint="nsys export --type sqlite --include-blobs true --include-json true "
            f"-o {path.stem}.sqlite {path.name}",
        )
    if found is SourceFormat.SQLITE:
        return SourceFormatError(
            f"this is {_DESCRIPTIONS[found]}",
            where=str(path),
            hint="pass what nsys export --type sqlite has written",
        )
    if found is SourceFormat.PRISMTRACE_PARQUET:
        return SourceFormatError(
            "this is a PrismTrace file already",
            where=str(path),
            hint="open it directly; only traces of other tools need converting",
        )
    return SourceFormatError(
        f"this is {_DESCRIPTIONS[found]}; its converter is not available in this version",
        where=str(path),
        hint="pass the PyTorch profiler (Kineto) traces of the same run",
    )


def _take(blocks: Iterator[bytes], size: int) -> bytes:
    parts: list[bytes] = []
    got = 0
    for block in blocks:
        parts.append(block)
        got += len(block)
        if got >= size:
            break
    return b"".join(parts)


def _has_key(text: bytes, name: str) -> bool:
    return re.search(rb'"' + name.encode() + rb'"\s*:', text) is not None


def _sniff_json(text: bytes) -> SourceFormat:
    if _KINETO_EVENT.match(text):
        return SourceFormat.KINETO
    if _has_key(text, "profiling_name") and _has_key(text, "record_id"):
        return SourceFormat.FLIGHT_RECORDER_JSON
    if text[:1] == b"[":
        return SourceFormat.UNKNOWN
    if _has_key(text, "workload_graph"):
        return SourceFormat.CHAKRA_JSON
    if _has_key(text, "nodes") and _has_key(text, "schema"):
        return SourceFormat.PYTORCH_ET
    if _KINETO_KEYS.search(text):
        return SourceFormat.KINETO
    if _has_key(text, "pg_config") and _has_key(text, "version"):
        return SourceFormat.FLIGHT_RECORDER_JSON
    return SourceFormat.GROUPS if _GROUPS.match(text) else SourceFormat.UNKNOWN


def _first_line(text: bytes) -> str:
    return text[:4096].partition(b"\n")[0].decode(errors="replace").replace('"', "").strip()


def _is_nsys(head: bytes) -> bool:
    # The tables' names stand in the schema, which SQLite keeps on the first pages.
    return any(name in head for name in (b"StringIds", b"CUPTI_ACTIVITY", b"NVTX_EVENTS"))


def _sniff_parquet(path: Path) -> SourceFormat:
    import polars as pl

    try:
        if "prismtrace" in pl.read_parquet_metadata(path):
            return SourceFormat.PRISMTRACE_PARQUET
        columns = set(pl.scan_parquet(path, glob=False).collect_schema())
    except (OSError, pl.exceptions.PolarsError):
        return SourceFormat.UNKNOWN
    return SourceFormat.OPS_PARQUET if columns >= _OPS_COLUMNS else SourceFormat.UNKNOWN


def _is_chakra(head: bytes) -> bool:
    """Whether the file starts with frames of protobuf: length, then a Node or GlobalMetadata."""
    at = 0
    frames = 0
    while at < len(head) and frames < 3:
        length, at = _varint(head, at)
        if not 0 < length < 2**31:
            break
        frame = head[at : at + length]
        complete = len(frame) == length
        cut_off = frames > 0 or len(head) >= _HEAD_BYTES
        if not (complete or cut_off) or not _is_message(frame, complete=complete):
            return False
        frames += 1
        at += length
    return frames > 0


def _is_message(data: bytes, *, complete: bool) -> bool:
    """Fields 1 to 15 in protobuf's wire format; the last may be cut off when not complete."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire_type = key >> 3, key & 7
        if not 1 <= field <= 15:
            return False
        if wire_type == 0:
            value, at = _varint(data, at)
            if value < 0:
                return not complete
        elif wire_type == 2:
            length, at = _varint(data, at)
            if length < 0:
                return not complete
            at += length
        else:
            return False
    return at == len(data) or not complete


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position after it); value -1 when the data ends first or it is too long."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return -1, at
