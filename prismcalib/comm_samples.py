"""Times of communications as rows of one shape, and the tables that hold them as they are."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from prismcalib.errors import CommLogError
from prismtrace.output import atomic_output
from prismtrace.schema import DType, Kind

__all__ = [
    "CSV_COLUMNS",
    "SCHEMA",
    "csv_rows",
    "dtype_of",
    "finite",
    "plain_rows",
    "sample_row",
    "whole",
    "write_comm_samples",
]

SCHEMA = {
    "kind": pl.String,
    "dtype": pl.String,
    "ranks": pl.Int32,
    "hosts": pl.Int32,
    "bytes": pl.Int64,
    "in_place": pl.Boolean,
    "time_ns": pl.Int64,
    "cpu_ns": pl.Int64,
}
"""One measurement: `bytes` as nccl-tests counts them, `time_ns` of one operation.

`cpu_ns` is the processor time that the backend's own threads took for it on one rank, on average;
null where nobody measured it.
"""

CSV_COLUMNS = ("kind", "dtype", "ranks", "hosts", "bytes", "time_ns")
_DTYPES = {
    "char": DType.INT8,
    "int": DType.INT32,
    "half": DType.FLOAT16,
    "float": DType.FLOAT32,
    "double": DType.FLOAT64,
    "f8e4m3": DType.FLOAT8_E4M3FN,
    "fp8_e4m3": DType.FLOAT8_E4M3FN,
    "f8e5m2": DType.FLOAT8_E5M2,
    "fp8_e5m2": DType.FLOAT8_E5M2,
} | {name.value: name for name in DType}


def write_comm_samples(path: str | os.PathLike[str], samples: pl.DataFrame) -> None:
    """Write measurements as a CSV that `read_comm_log` reads.

    Args:
        path: file to write.
        samples: columns of `SCHEMA`.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_output(path) as temporary:
        samples.select(list(SCHEMA)).write_csv(temporary)


def csv_rows(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a CSV, which `path` names in errors."""
    reader = csv.DictReader(text.lstrip("\ufeff").splitlines(), skipinitialspace=True)
    yield from plain_rows((f"{path}:{reader.line_num}", row) for row in reader)


def plain_rows(
    given: Iterable[tuple[str, Mapping[str, Any]]],
) -> Iterator[dict[str, Any]]:
    """Rows of values by name, each with its place in a file.

    Raises:
        CommLogError: a value is missing, or cannot be.
    """
    for place, row in given:
        absent = [name for name in CSV_COLUMNS if row.get(name) in (None, "")]
        if absent:
            raise CommLogError(
                f"{', '.join(absent)} is missing",
                where=place,
                hint=f"columns: {', '.join(CSV_COLUMNS)}; optional: in_place, cpu_ns",
            )
        if row["kind"] not in {kind.value for kind in Kind if kind.is_communication}:
            raise CommLogError(f"unknown kind {row['kind']!r}", where=place)
        kind = Kind.SEND if row["kind"] == Kind.RECV else Kind(row["kind"])
        ranks, hosts, size = (whole(row[name], place, name) for name in CSV_COLUMNS[2:5])
        time = finite(row["time_ns"])
        if time is None or time <= 0 or ranks < 2:
            raise CommLogError("an operation takes time, and at least two ranks", where=place)
        if not 1 <= hosts <= ranks:
            raise CommLogError("as many hosts as ranks at most, and at least one", where=place)
        in_place = str(row.get("in_place") or "false").lower() in ("true", "1", "yes")
        dtype = dtype_of(row["dtype"], place)
        cpu = row.get("cpu_ns")
        cpu_ns = None if cpu in (None, "") else whole(cpu, place, "cpu_ns")
        yield sample_row(kind, dtype, ranks, hosts, size, round(time), in_place, cpu_ns)


def sample_row(
    kind: Kind,
    dtype: DType,
    ranks: int,
    hosts: int,
    size: int,
    ns: int,
    in_place: bool,
    cpu_ns: int | None = None,
) -> dict[str, Any]:
    """One row of `SCHEMA`."""
    values = (kind.value, dtype.value, ranks, hosts, size, in_place, ns, cpu_ns)
    return dict(zip(SCHEMA, values, strict=True))


def finite(cell: Any) -> float | None:
    """A cell's number; None if it is none, or not finite."""
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if abs(value) < float("inf") else None


def whole(cell: Any, where: str, name: str = "size") -> int:
    """A cell's whole number.

    Raises:
        CommLogError: it is none.
    """
    try:
        value = int(cell)
    except (TypeError, ValueError):
        value = -1
    if not 0 <= value < 2**63:
        raise CommLogError(f"{name} is {cell!r}, not a whole number", where=where)
    return value


def dtype_of(cell: Any, where: str) -> DType:
    """What the trace calls a type of nccl-tests.

    Raises:
        CommLogError: nobody knows it.
    """
    if cell not in _DTYPES:
        raise CommLogError(f"unknown data type {cell!r}", where=where)
    return _DTYPES[cell]
