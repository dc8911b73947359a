"""What merging gives: the calibrated trace, and how a recorded run became it.

Of slices: `prismcalib.slices_report`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import polars as pl

from prismcalib.alignment import ClockReport
from prismcalib.graph import Int64Array
from prismcalib.slices_report import SlicesReport
from prismtrace.schema import TraceHeader
from prismtrace.trace import Trace, write_nodes

__all__ = ["Amount", "MergeReport", "MergeResult"]


@dataclass(frozen=True)
class Amount:
    """How often something happened, and its time in all.

    Attributes:
        count: how often.
        total_ns: the time.
    """

    count: int
    total_ns: int

    @classmethod
    def of(cls, times_ns: Int64Array) -> Amount:
        """Count and sum of the positive times."""
        return cls(int((times_ns > 0).sum()), int(times_ns.sum()))


@dataclass(frozen=True)
class MergeReport:
    """What `merge` found and did; all times in ns.

    Attributes:
        ranks, rows: size of the trace.
        instances: collectives and send-recv pairs whose members were all found.
        unmatched: communications whose partners lie outside the recorded window; they keep
            their duration and wait for nobody.
        clock: offsets between clocks, and how well the ends agree.
        recorded_ns: last end minus first start over all ranks, on aligned clocks.
        propagated_ns: the same from durations and lags alone.
        lags: idle time between spans, before rows, kept as lags (launch gaps, host delays).
        lags_on_critical_path: the part of it that the whole run waits for.
        idle_inside: idle time inside spans of computation, between their kernels, of which
            `lags` hold nothing; None where the trace does not tell (no `x_busy_ns`).
        idle_inside_on_critical_path: the part of it that the whole run waits for.
        overlap_clamps: rows that started before a dependency ended; moved behind it.
        transfer_clamps: members that ended before the last member started; they end then.
        overlaps_by_kind: kinds of these rows with the time by which they were moved, in ns, most
            first.
        most_delayed_ns: largest delay of any row against its aligned time, due to clamps.
        wait_ns, transfer_ns: sums over all members of instances.
    """

    ranks: int
    rows: int
    instances: int
    unmatched: int
    clock: ClockReport
    recorded_ns: int
    propagated_ns: int
    lags: Amount
    lags_on_critical_path: Amount
    overlap_clamps: Amount
    transfer_clamps: Amount
    most_delayed_ns: int
    wait_ns: int
    transfer_ns: int
    idle_inside: Amount | None = None
    idle_inside_on_critical_path: Amount | None = None
    overlaps_by_kind: dict[str, int] = field(default_factory=dict)

    @property
    def difference_ns(self) -> int:
        """Propagated minus recorded length."""
        return self.propagated_ns - self.recorded_ns

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values (lists, not tuples)."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {**fields, "difference_ns": self.difference_ns}


@dataclass(frozen=True, eq=False)
class MergeResult:
    """A calibrated trace, and how it came about.

    Attributes:
        header: its header.
        table: its nodes, lazily. Of slices, what was measured stays in their files until it is
            asked for.
        report: `MergeReport` of a recorded run, `SlicesReport` of slices.
        merged_again: whether the source was a calibrated trace, whose observed times were used.
    """

    header: TraceHeader
    table: pl.LazyFrame
    report: MergeReport | SlicesReport
    _write_columns: Callable[[str | os.PathLike[str]], None]
    merged_again: bool = False

    @cached_property
    def nodes(self) -> pl.DataFrame:
        """All nodes in memory, in (rank, index) order."""
        return self.table.collect()

    @property
    def trace(self) -> Trace:
        """The result as a trace."""
        return Trace(header=self.header, nodes=self.table)

    def write(self, path: str | os.PathLike[str], *, columns_only: bool = False) -> None:
        """Write the calibrated trace as one Parquet file.

        With `columns_only` the file holds the computed columns alone, which is several times
        quicker; `prismtrace.open` joins them with those of the input files, which have to stay
        where they are, relative to the file.

        Raises:
            OutputError: the file cannot be written.
            MergeInputError: columns only, but the rows do not lie in files.
        """
        if columns_only:
            self._write_columns(path)
        else:
            write_nodes(self.header, self.table, path)
