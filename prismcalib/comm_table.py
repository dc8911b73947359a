"""A table of measured communication times, and what it says about an operation in between.

Times of one kind on the same ranks and hosts form a curve over bytes.  Between two sizes it is
interpolated in log-log: latency makes it flat at one end, bandwidth straight at the other, and
neither end is known to a table.  Beyond its ends it goes on with the slope it has there, and the
answer says so.

How sure an answer is follows from the table itself:

    repeats     shortest and longest time of the same operation (several logs, in and out of place)
    curvature   how far a point lies from the line through its neighbours
    distance    beyond the ends: a quarter of the way, in logs

Where communication runs on the ranks' own processors, as gloo's does, a table may also say what it
takes of them: computation beside it is slower by as much.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import polars as pl

from prismcalib.comm_logs import Assumed, Reading, read_comm_log
from prismcalib.comm_samples import SCHEMA
from prismcalib.errors import CommLogError
from prismtrace.output import atomic_output
from prismtrace.reading import read_table
from prismtrace.schema import Kind

__all__ = ["CommTable", "Estimate", "Operation", "read_comm_logs"]

_METADATA_KEY = "prismcalib_comm_table"
_VERSION = 2
_MAKE_ONE = "make the table from logs with `prismcalib comm-table LOGS... -o table.parquet`"
_COLUMNS = {
    **{name: SCHEMA[name] for name in ("kind", "dtype", "ranks", "hosts", "bytes")},
    "time_ns": pl.Int64,
    "least_ns": pl.Int64,
    "most_ns": pl.Int64,
    "samples": pl.Int32,
    "cpu_ns": pl.Int64,
}

# torch calls these in place; the others write to a buffer of their own.
_IN_PLACE = (Kind.ALL_REDUCE.value, Kind.BROADCAST.value, Kind.REDUCE.value)

# Doubt about an extrapolated time, as a share of the distance in logs.
_DOUBT = 0.25


class Operation(NamedTuple):
    """A communication to estimate.

    Attributes:
        kind: of communication, as `Kind` spells it.
        dtype: element type, as `DType` spells it; None: unknown.
        ranks, hosts: how many take part, and on how many hosts they are.
        bytes: of its payload, as nccl-tests counts them.
    """

    kind: str
    dtype: str | None
    ranks: int
    hosts: int
    bytes: int


class Estimate(NamedTuple):
    """How long an operation takes, without waiting.

    Attributes:
        time_ns: most likely so long.
        low, high: between these times `time_ns`, as far as the source can tell.
        extrapolated: whether beyond what was measured.
        other_dtype: whether measured with another data type.
    """

    time_ns: int
    low: float
    high: float
    extrapolated: bool = False
    other_dtype: bool = False


@dataclass(frozen=True, eq=False)
class _Curve:
    """Logs of bytes, ascending, of times, and of the doubt about each."""

    size: Sequence[float]
    time: Sequence[float]
    least: Sequence[float]
    most: Sequence[float]

    def at(self, size: float) -> tuple[float, float, float, bool]:
        """Log of the time, how much lower and higher it may be, whether beyond an end."""
        points = len(self.size)
        above = next((at for at in range(points) if self.size[at] >= size), points)
        if above < points and self.size[above] == size:
            time = self.time[above]
            return time, time - self.least[above], self.most[above] - time, False
        if 0 < above < points:
            return (*self._between(above - 1, above, size), False)
        edge = 0 if above == 0 else points - 1
        distance = size - self.size[edge]
        time = self.time[edge] + distance * self._slope(edge)
        doubt = abs(distance) * _DOUBT
        low, high = self.time[edge] - self.least[edge], self.most[edge] - self.time[edge]
        return time, low + doubt, high + doubt, True

    def _between(self, left: int, right: int, size: float) -> tuple[float, float, float]:
        share = (size - self.size[left]) / (self.size[right] - self.size[left])
        time = self.time[left] * (1 - share) + self.time[right] * share
        bend = max(self._bend(left), self._bend(right))
        low = max(self.time[at] - self.least[at] for at in (left, right))
        high = max(self.most[at] - self.time[at] for at in (left, right))
        return time, max(low, bend), max(high, bend)

    def _bend(self, at: int) -> float:
        """How far a point lies from the line through its neighbours; 0 at the ends."""
        if not 0 < at < len(self.size) - 1:
            return 0.0
        share = (self.size[at] - self.size[at - 1]) / (self.size[at + 1] - self.size[at - 1])
        straight = self.time[at - 1] * (1 - share) + self.time[at + 1] * share
        return abs(self.time[at] - straight)

    def _slope(self, edge: int) -> float:
        """Slope at an end: never falling, never steeper than bandwidth alone."""
        if len(self.size) == 1:
            return 0.0
        left, right = (0, 1) if edge == 0 else (-2, -1)
        rise = self.time[right] - self.time[left]
        slope = rise / (self.size[right] - self.size[left])
        return min(max(slope, 0.0), 1.0)


@dataclass(frozen=True, eq=False)
class CommTable:
    """Measured times of communications.

    Attributes:
        times: kind, dtype, ranks, hosts, bytes; time_ns (median of what torch would call: in
            place for all_reduce, broadcast and reduce), least_ns, most_ns (of all), samples;
            cpu_ns (median; null: unknown).
        sources: files they come from.
        skipped: measurements that were not used, by reason.
    """

    times: pl.DataFrame
    sources: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, readings: Iterable[Reading]) -> CommTable:
        """One table of several files; the same operation in several of them counts once."""
        given = list(readings)
        skipped: Counter[str] = Counter()
        for reading in given:
            skipped.update(reading.skipped)
        key = [name for name in _COLUMNS if name in SCHEMA and not name.endswith("_ns")]
        usual = pl.col("in_place") == pl.col("kind").is_in(_IN_PLACE)
        time = pl.col("time_ns")
        times = (
            pl.concat([reading.samples for reading in given])
            .group_by(key)
            .agg(
                # The unusual form is better than nothing.
                time_ns=time.filter(usual).median().fill_null(time.median()).round().cast(pl.Int64),
                least_ns=time.min(),
                most_ns=time.max(),
                samples=pl.len().cast(pl.Int32),
                cpu_ns=pl.col("cpu_ns").median().round().cast(pl.Int64),
            )
            .sort(key)
        )
        return cls(
            times, tuple(sorted({r.path.name for r in given})), dict(sorted(skipped.items()))
        )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> CommTable:
        """Read a table that `write` wrote.

        Raises:
            InputFileError: no such file, damaged, or it is not Parquet.
            CommLogError: it is no table of communication times.
        """
        note, times = read_table(Path(path), _METADATA_KEY, hint=_MAKE_ONE)
        if note is None or note.get("version") != _VERSION or dict(times.schema) != _COLUMNS:
            raise CommLogError(
                "not a table of communication times, or one of another version",
                where=str(path),
                hint=_MAKE_ONE,
            )
        return cls(times, tuple(note["sources"]), note["skipped"])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the table as Parquet.

        Raises:
            OutputError: the file cannot be written.
        """
        note = {"version": _VERSION, "sources": self.sources, "skipped": dict(self.skipped)}
        with atomic_output(path) as temporary:
            self.times.write_parquet(temporary, metadata={_METADATA_KEY: json.dumps(note)})

    def curves(self) -> pl.DataFrame:
        """One row per kind, dtype, ranks and hosts: sizes, least and most bytes and ns."""
        return self.times.group_by("kind", "dtype", "ranks", "hosts", maintain_order=True).agg(
            pl.len().alias("sizes"),
            pl.col("bytes").min().alias("least_bytes"),
            pl.col("bytes").max().alias("most_bytes"),
            pl.col("time_ns").min().alias("fastest_ns"),
            pl.col("time_ns").max().alias("slowest_ns"),
        )

    def measured(self) -> list[tuple[Operation, float]]:
        """Every operation of the table and its time in ns."""
        rows = self.times.select(*Operation._fields, "time_ns").iter_rows()
        return [(Operation(*key), float(time)) for *key, time in rows]

    def estimate(self, operation: Operation) -> Estimate | None:
        """What the table says about an operation; None if nothing on as many ranks and hosts."""
        size = _log_bytes(operation)
        found = None if size is None else self._curve_for(operation)
        if found is None or size is None:
            return None
        curve, other_dtype = found
        time, low, high, beyond = curve.at(size)
        return Estimate(
            max(1, round(math.exp(time))), math.exp(-low), math.exp(high), beyond, other_dtype
        )

    def cpu_ns(self, operation: Operation) -> int:
        """Processor time that an operation takes on a rank, beside what the rank computes, in ns.

        0 where the table does not say.
        """
        size = _log_bytes(operation)
        found = None if size is None else self._curve_for(operation, self._cpu_curves)
        return 0 if found is None or size is None else round(math.exp(found[0].at(size)[0]))

    def _curve_for(
        self, operation: Operation, known: _Curves | None = None
    ) -> tuple[_Curve, bool] | None:
        known = self._curves if known is None else known
        kind = Kind.SEND.value if operation.kind == Kind.RECV else operation.kind
        curves = known.get((kind, operation.ranks, operation.hosts))
        if curves is None and kind == Kind.SEND:
            curves = _pair_curves(known, operation.hosts)
        if curves is None:
            return None
        if operation.dtype in curves:
            return curves[operation.dtype], False
        # A link moves bytes, whatever they mean; the curve with most points is the best known.
        best = max(curves.values(), key=lambda curve: len(curve.size))
        return best, kind != Kind.BARRIER

    @cached_property
    def _curves(self) -> _Curves:
        return _curves_of(self.times, "time_ns", "least_ns", "most_ns")

    @cached_property
    def _cpu_curves(self) -> _Curves:
        measured = self.times.filter(pl.col("cpu_ns") > 0)
        return _curves_of(measured, "cpu_ns", "cpu_ns", "cpu_ns")


def _log_bytes(operation: Operation) -> float | None:
    """Where an operation is on its curve; null if its payload is not known. A barrier has none."""
    if operation.kind == Kind.BARRIER:
        return 0.0
    return math.log(operation.bytes) if operation.bytes > 0 else None


_Curves = dict[tuple[str, int, int], dict[str, _Curve]]
"""By kind, ranks and hosts, then by dtype."""


def _curves_of(times: pl.DataFrame, *columns: str) -> _Curves:
    curves: _Curves = {}
    # Of no bytes, as barriers are, there is no logarithm.
    ordered = times.with_columns(pl.col("bytes").clip(1)).sort("bytes")
    parts = ordered.partition_by(
        "kind", "ranks", "hosts", "dtype", as_dict=True, maintain_order=True
    )
    for (kind, ranks, hosts, dtype), part in parts.items():
        curve = _Curve(*(part[name].log().to_list() for name in ("bytes", *columns)))
        curves.setdefault((kind, ranks, hosts), {})[dtype] = curve
    return curves


def _pair_curves(known: _Curves, hosts: int) -> dict[str, _Curve] | None:
    """Sends within a host, or between hosts, measured with more ranks at once."""
    alike = [
        (ranks, others)
        for kind, ranks, others in known
        if kind == Kind.SEND and (others > 1) == (hosts > 1)
    ]
    return known[(Kind.SEND.value, *min(alike))] if alike else None


def read_comm_logs(
    paths: Sequence[str | os.PathLike[str]], *, assumed: Assumed | None = None
) -> CommTable:
    """The table that logs of nccl-tests, or CSV and JSON tables, make together.

    Args:
        paths: the files.
        assumed: what logs of nccl-tests do not tell, if they do not.

    Raises:
        InputFileError: a file cannot be read.
        CommLogError: one holds no measurement, does not tell what was measured, or contradicts
            itself; `where` names file and line.
    """
    return CommTable.of(read_comm_log(path, assumed=assumed) for path in paths)
