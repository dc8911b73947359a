"""Transfers that no slice measured: from a table, else from a model, and never unsaid.

In a slice a group may run with some of its members only.  Where the transfer of the whole group
then comes from is decided row by row, best source first:

    measured    all members took part, or whoever made the slice measured it: kept as it is
    table       the team's own times of such operations (`prismcalib.comm_table`)
    ring        a pruned ring that moved the bytes of the whole group: kept where the table has
                no entry for the operation.  It would outrank the table if its link were of the
                class that limits the whole group, and algorithm, protocol and channels were those
                that the whole group would choose; a trace states neither, so it never does
    model       latency and bandwidth, fitted to the table and to what the slices measured
    reduced     the time of the members that took part: kept for want of others
    none        kept as observed

How far off an estimate may be is written to the header, for predictions to go on with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from prismcalib.assembly import Assembly, Values
from prismcalib.comm_model import CommModel, LinkFit, fit_comm_model
from prismcalib.comm_table import CommTable, Estimate, Operation
from prismcalib.errors import MergeInputError
from prismcalib.graph import Int64Array
from prismcalib.rows import ABSENT, KINDS, Rows
from prismtrace.schema import DType, TraceHeader, TransferSource

__all__ = ["CommCosts", "CostReport", "Doubt", "group_spread"]

_SOURCES = tuple(TransferSource)
_MEASURED, _TABLE, _RING, _MODEL, _NONE = (
    _SOURCES.index(source)
    for source in (
        TransferSource.MEASURED,
        TransferSource.TABLE,
        TransferSource.RING,
        TransferSource.MODEL,
        TransferSource.NONE,
    )
)
_DTYPES = tuple(DType)
_KEY = {
    "kind": pl.UInt8,
    "dtype": pl.UInt8,
    "ranks": pl.Int32,
    "hosts": pl.Int32,
    "bytes": pl.Int64,
}


@dataclass(frozen=True)
class Doubt:
    """The true times of some transfers lie between `low` and `high` times the estimated ones.

    Attributes:
        source: where the estimates come from, see `TransferSource`.
        kind: of communication.
        ranks, hosts: how many take part in one.
        members: rows that were estimated so.
    """

    source: str
    kind: str
    ranks: int
    hosts: int
    low: float
    high: float
    members: int


@dataclass(frozen=True)
class CostReport:
    """Where transfers came from that were not measured.

    Attributes:
        ranks_per_host: how ranks were taken to be spread.
        table: files that the table was made from.
        from_table, from_model: members of operations that got their time there.
        extrapolated: of these, beyond what was measured.
        other_dtype: of these, measured with another data type.
        left: members that kept what the slice saw, by source.
        fits: the model.
        doubts: how far the estimates may be off.
        kept: members whose estimate stems from the earlier result that others were merged onto.
    """

    ranks_per_host: int
    table: tuple[str, ...]
    from_table: int
    from_model: int
    extrapolated: int
    other_dtype: int
    left: dict[str, int]
    fits: tuple[LinkFit, ...]
    doubts: tuple[Doubt, ...]
    kept: int = 0


@dataclass(frozen=True, eq=False)
class _Later:
    """Members that wait for the model: rows of the job, and which of the operations they are."""

    row: Int64Array
    operation: Int64Array
    operations: pl.DataFrame


class CommCosts:
    """Fills in transfers while slices are merged, block by block.

    Args:
        header: of the job.
        ranks_per_host: consecutive ranks that share a host.
        table: measured times, if there are any.

    Raises:
        MergeInputError: hosts have no ranks.
    """

    def __init__(
        self, header: TraceHeader, ranks_per_host: int, table: CommTable | None = None
    ) -> None:
        if ranks_per_host < 1:
            raise MergeInputError(f"a host cannot have {ranks_per_host} ranks")
        self._ranks_per_host = ranks_per_host
        self._table = table
        self._group_ranks, self._group_hosts = group_spread(header, ranks_per_host)
        self._measured: list[pl.DataFrame] = []
        self._later: list[_Later] = []
        self._known: dict[Operation, Estimate | None] = {}
        self._counts: Counter[str] = Counter()
        self._doubts: dict[tuple[str, str, int, int], Doubt] = {}
        self._model = CommModel(())

    def fill(self, rows: Rows, values: Values) -> Values:
        """Times from the table in place of worse ones; remembers what was measured."""
        self._remember(rows, values)
        if self._table is None:
            return values
        chosen = np.flatnonzero((values.source > _TABLE) & (values.source != ABSENT))
        operations, place = self._operations(rows, chosen)
        estimates = [self._from_table(operation) for operation in _each(operations)]
        return self._with(values, chosen, place, operations, estimates, TransferSource.TABLE)

    def defer(self, rows: Rows, values: Values, base: dict[int, int]) -> None:
        """Note the members whose time has to come from the model, once that is known.

        `base` is the row of the job where the rows of each rank begin.
        """
        chosen = np.flatnonzero((values.source > _RING) & (values.source != ABSENT))
        if not len(chosen):
            return
        operations, place = self._operations(rows, chosen)
        begin = np.empty(len(rows), np.int64)
        for rank, first, last in rows.rank_runs:
            begin[first:last] = base[rank]
        self._later.append(_Later(begin[chosen] + rows.index[chosen], place, operations))

    def finish(self, assembly: Assembly) -> CostReport:
        """Fit the model and write its times into the rows that wait for it."""
        self._fit()
        for later in self._later:
            values = Values(
                duration=assembly.duration[later.row], source=assembly.source[later.row]
            )
            every = np.arange(len(later.row))
            estimates = [self._model.estimate(op) for op in _each(later.operations)]
            filled = self._with(
                values, every, later.operation, later.operations, estimates, TransferSource.MODEL
            )
            assembly.duration[later.row] = filled.duration
            assembly.source[later.row] = filled.source
        codes = np.bincount(assembly.source, minlength=256)
        left = {
            _SOURCES[code].value: int(codes[code])
            for code in (_RING, *range(_MODEL + 1, _NONE + 1))
        }
        return CostReport(
            ranks_per_host=self._ranks_per_host,
            table=() if self._table is None else self._table.sources,
            from_table=self._counts["table"],
            from_model=self._counts["model"],
            extrapolated=self._counts["extrapolated"],
            other_dtype=self._counts["other_dtype"],
            left={name: count for name, count in left.items() if count},
            fits=self._model.fits,
            doubts=tuple(self._doubts[key] for key in sorted(self._doubts)),
        )

    # Operations -------------------------------------------------------------------------

    def _operations(self, rows: Rows, chosen: Int64Array) -> tuple[pl.DataFrame, Int64Array]:
        """The different operations among some rows, and which of them each row is."""
        group = rows.group[chosen]
        ranks, hosts = self._group_ranks[group], self._group_hosts[group]
        sender, receiver = (ends[chosen] for ends in rows.p2p_ends)
        pair = sender >= 0
        apart = sender // self._ranks_per_host != receiver // self._ranks_per_host
        frame = pl.DataFrame(
            {
                "kind": rows.kind[chosen],
                "dtype": rows.dtype[chosen],
                "ranks": np.where(pair, 2, ranks),
                "hosts": np.where(pair, 1 + apart, hosts),
                "bytes": rows.bytes[chosen],
            },
            schema=_KEY,
        )
        operations = frame.unique(maintain_order=True).with_row_index("operation")
        place = frame.join(operations, on=list(_KEY), how="left", maintain_order="left")
        return operations.drop("operation"), place["operation"].cast(pl.Int64).to_numpy()

    def _remember(self, rows: Rows, values: Values) -> None:
        """Median time of every measured operation of a block."""
        chosen = np.flatnonzero((values.source == _MEASURED) & (rows.bytes > 0))
        if not len(chosen):
            return
        operations, place = self._operations(rows, chosen)
        found = (
            pl.DataFrame({"place": place, "time": values.duration[chosen]})
            .group_by("place")
            .agg(pl.col("time").median(), pl.len())
            .sort("place")
        )
        self._measured.append(operations.with_columns(found["time"], found["len"]))

    def _from_table(self, operation: Operation) -> Estimate | None:
        if operation not in self._known:
            self._known[operation] = (
                None if self._table is None else self._table.estimate(operation)
            )
        return self._known[operation]

    def _fit(self) -> None:
        measured: list[tuple[Operation, float]] = []
        if self._measured:
            seen = pl.concat(self._measured).group_by(list(_KEY)).agg(pl.col("time").median())
            seen = seen.sort(list(_KEY))
            measured += list(zip(_each(seen), seen["time"].to_list(), strict=True))
        if self._table is not None:
            measured += self._table.measured()
        self._model = fit_comm_model(measured)

    def _with(
        self,
        values: Values,
        chosen: Int64Array,
        place: Int64Array,
        operations: pl.DataFrame,
        estimates: Sequence[Estimate | None],
        source: TransferSource,
    ) -> Values:
        """The values with the estimates, where there are any, of the chosen rows."""
        if not len(chosen) or not any(estimates):
            return values
        known = np.array([estimate is not None for estimate in estimates])
        times = np.array([0 if e is None else e.time_ns for e in estimates], np.int64)
        hit = known[place]
        duration, sources = values.duration.copy(), values.source.copy()
        duration[chosen[hit]] = times[place[hit]]
        sources[chosen[hit]] = _SOURCES.index(source)
        counts = np.bincount(place[hit], minlength=len(estimates)).tolist()
        for operation, estimate, count in zip(_each(operations), estimates, counts, strict=True):
            if estimate is not None:
                self._note(operation, estimate, count, source)
        return replace(values, duration=duration, source=sources)

    def _note(
        self, operation: Operation, estimate: Estimate, count: int, source: TransferSource
    ) -> None:
        self._counts[source.value] += count
        self._counts["extrapolated"] += count * estimate.extrapolated
        self._counts["other_dtype"] += count * estimate.other_dtype
        key = (source.value, operation.kind, operation.ranks, operation.hosts)
        before = self._doubts.get(key, Doubt(*key, low=1.0, high=1.0, members=0))
        self._doubts[key] = replace(
            before,
            low=min(before.low, estimate.low),
            high=max(before.high, estimate.high),
            members=before.members + count,
        )


def with_kept_doubts(
    report: CostReport | None, base: TraceHeader, assembly: Assembly
) -> CostReport | None:
    """The report with what an earlier result says about estimates that were kept from it.

    Raises:
        MergeInputError: the earlier result was estimated for other hosts.
    """
    earlier = base.extra.get("merge", {}).get("comm_costs")
    if not earlier or not earlier.get("doubts"):
        return report
    per_host = int(earlier["ranks_per_host"])
    if report is not None and report.ranks_per_host != per_host:
        raise MergeInputError(
            f"the earlier result has {per_host} ranks per host, the new slices are to have "
            f"{report.ranks_per_host}",
            hint=f"give --ranks-per-host {per_host}, or merge all slices anew",
        )
    new = report or CostReport(
        ranks_per_host=per_host,
        table=(),
        from_table=0,
        from_model=0,
        extrapolated=0,
        other_dtype=0,
        left={},
        fits=(),
        doubts=(),
    )
    estimated = sum(int(np.count_nonzero(assembly.source == code)) for code in (_TABLE, _MODEL))
    doubts = {_doubt_key(doubt): doubt for doubt in new.doubts}
    for entry in earlier["doubts"]:
        old = Doubt(**entry)
        known = doubts.get(_doubt_key(old), old)
        doubts[_doubt_key(old)] = replace(
            known, low=min(known.low, old.low), high=max(known.high, old.high)
        )
    return replace(
        new,
        kept=estimated - new.from_table - new.from_model,
        doubts=tuple(doubts[key] for key in sorted(doubts)),
    )


def _doubt_key(doubt: Doubt) -> tuple[str, str, int, int]:
    return doubt.source, doubt.kind, doubt.ranks, doubt.hosts


def group_spread(header: TraceHeader, ranks_per_host: int) -> tuple[Int64Array, Int64Array]:
    """Ranks and hosts of every process group, int64[G] each, by position in the header."""
    ranks = np.array([len(group.ranks) for group in header.groups] or [0], np.int64)
    hosts = [len({rank // ranks_per_host for rank in group.ranks}) for group in header.groups]
    return ranks, np.array(hosts or [0], np.int64)


def _each(operations: pl.DataFrame) -> list[Operation]:
    def named(kind: int, dtype: int, *rest: Any) -> Operation:
        return Operation(
            KINDS[kind].value, None if dtype == ABSENT else _DTYPES[dtype].value, *rest
        )

    return [named(*key) for key in operations.select(*_KEY).iter_rows()]
