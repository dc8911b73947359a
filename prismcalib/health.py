"""Does every device do what it should?  Observed computation against expected, rank by rank.

The same operation is the same place in the same rank's step.  A rank's ratio is the weighted
median over its operations of observed over expected time: a few odd operations do not move it.
A rank stands out if its ratio lies far from the median of all ranks, measured by how the ranks
usually scatter (median absolute deviation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.errors import ComparisonError
from prismcalib.operations import OperationTable
from prismtrace.schema import TraceKind
from prismtrace.trace import Source, Trace, open_trace

__all__ = ["Finding", "Health", "device_health"]

# A rank stands out if it is this much slower than the others, and this many deviations away.
SLOWER = 0.05
_DEVIATIONS = 4.0
# Normal distributions have a standard deviation of 1.4826 median absolute deviations; timers
# and clocks of equal devices scatter by about half a percent.
_MAD_TO_SIGMA = 1.4826
_LEAST_SIGMA = 0.005
# Of an operation class or a device: slower than the rank's peers by this counts as slowed.
_SLOWED = 0.03
_WHOLE_DEVICE = 0.7
_KEYS = ["rank", "in_step", "place", "kind"]
# Traces that have less than this in common are of different jobs.
_LEAST_SHARED = 0.1


@dataclass(frozen=True)
class Finding:
    """A rank that stands out.

    Attributes:
        rank, host: where (host None: unknown).
        unit: trace that it was observed in, where there are several.
        ratio: observed over expected computation.
        above: how much slower than the median rank, 0.2 = 20 %.
        deviations: the same in units of the usual scatter.
        slowed_share: share of its computation time in operations that are slowed.
        slowest: the class of operations that is slowed most (kind or name).
        verdict: what it looks like.
    """

    rank: int
    host: str | None
    unit: str | None
    ratio: float
    above: float
    deviations: float
    slowed_share: float
    slowest: str
    verdict: str


@dataclass(frozen=True, eq=False)
class Health:
    """Ratios of all ranks, and those that stand out.

    Attributes:
        ranks: rank, host, unit (the trace, where there are several), operations (compared),
            expected_ns and observed_ns (computation per step), ratio, above, deviations,
            transfer_ratio (of communications without waiting; null unless both traces are merged),
            flagged.
        usual_ratio: median over the ranks.
        scatter: usual deviation of a rank's ratio from it, relative.
        compared: share of the expected computation time that the observed trace has as well.
        findings: ranks that are slower than the others, slowest first.
    """

    ranks: pl.DataFrame
    usual_ratio: float
    scatter: float
    compared: float
    findings: tuple[Finding, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "usual_ratio": self.usual_ratio,
            "scatter": self.scatter,
            "compared": self.compared,
            "findings": [vars(finding) for finding in self.findings],
            "ranks": self.ranks.to_dicts(),
        }


def device_health(
    expected: Source, observed: Source, *more: Source, slower: float = SLOWER
) -> Health:
    """Compare an observed run with what was expected of its devices.

    Args:
        expected: a trace of the same job on healthy devices, or a calibrated one made from
            slices; recorded or merged.
        observed: the run to look at; recorded or merged.  Steps are compared by their medians,
            so the two need not have the same number.
        more: further runs to look at, of other ranks of the job: units that were tried apart.
        slower: how much slower than the others a rank must be to stand out, 0.05 = 5 %.

    Raises:
        ComparisonError: a trace without times, traces that share no operation, or a rank that was
            observed twice.
    """
    standard = _timed(expected, "expected")
    units = [_timed(each, "observed") for each in (observed, *more)]
    unit_of, host_of = _units(units), _hosts(units)
    healthy, tables = OperationTable(standard), [OperationTable(trace) for trace in units]
    totals, transfers, everything = [], [], 0.0
    for matched, expected_ns in _matched_ranks(healthy, tables):
        totals.append(_rank_totals(matched.filter("local")))
        transfers.append(_transfer_ratios(matched))
        everything += expected_ns
    ratios = pl.concat(totals)
    compared = float(ratios["expected_ns"].sum()) / max(everything, 1.0)
    if not ratios.height or compared < _LEAST_SHARED:
        raise ComparisonError(
            f"the two traces share {compared:.0%} of their computation: same rank, place in the "
            "step and kind",
            where=f"{_name(standard)} and {_name(units[0])}",
            hint="compare runs of the same job, code and grain",
        )
    value = ratios["ratio"].to_numpy()
    usual = float(np.median(value))
    # Two ranks say nothing about what is usual: they are held against what was expected.
    center = usual if len(value) > 2 else 1.0
    above = value / center - 1
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(above))) if len(value) > 2 else 0.0
    sigma = max(sigma, _LEAST_SIGMA)
    table = ratios.with_columns(
        above=above,
        deviations=above / sigma,
        flagged=(above > slower) & (above / sigma > _DEVIATIONS),
        host=pl.col("rank").replace_strict(host_of, default=None, return_dtype=pl.String),
        unit=pl.col("rank").replace_strict(unit_of, default=None, return_dtype=pl.String),
    ).join(pl.concat(transfers), on="rank", how="left", maintain_order="left")
    flagged = table.filter("flagged").sort("above", descending=True)
    return Health(
        ranks=table.sort("rank"),
        usual_ratio=usual,
        scatter=sigma,
        compared=compared,
        findings=tuple(
            _finding(row, _local_of(healthy, tables, row["rank"]), center)
            for row in flagged.iter_rows(named=True)
        ),
    )


def _timed(source: Source, role: str) -> Trace:
    trace = source if isinstance(source, Trace) else open_trace(source)
    if trace.header.kind == TraceKind.BARE:
        raise ComparisonError(
            f"the {role} trace is a bare graph: it has no times",
            where=_name(trace),
            hint="merge slices of the job first, or convert a recorded run",
        )
    return trace


def _units(traces: Sequence[Trace]) -> dict[int, str]:
    """Rank -> the trace that it is in; empty for a single one."""
    if len(traces) == 1:
        return {}
    found: dict[int, str] = {}
    for trace in traces:
        for rank in trace.header.ranks:
            if rank in found:
                raise ComparisonError(
                    f"rank {rank} was observed twice",
                    where=f"{found[rank]} and {_name(trace)}",
                    hint="give traces of different ranks, or one after the other",
                )
        found |= dict.fromkeys(trace.header.ranks, _name(trace))
    return found


def _matched_ranks(
    expected: OperationTable, observed: Sequence[OperationTable]
) -> Iterator[tuple[pl.DataFrame, float]]:
    """What both have in common of some ranks after the other, and their expected computation."""
    for some in expected:
        medians = _medians(some)
        low, high = (int(rank) for rank in some["rank"].to_numpy()[[0, -1]])
        computing = medians.filter("local")["own_ns"].sum()
        yield _matched(medians, _of_ranks(observed, low, high)), float(computing)


def _of_ranks(tables: Sequence[OperationTable], low: int, high: int) -> pl.DataFrame:
    return pl.concat([_medians(table.of_ranks(low, high)) for table in tables])


def _local_of(
    expected: OperationTable, observed: Sequence[OperationTable], rank: int
) -> pl.DataFrame:
    """The matched computation of one rank."""
    both = (_of_ranks(tables, rank, rank) for tables in ([expected], observed))
    return _matched(*both).filter("local")


def _medians(operations: pl.DataFrame) -> pl.DataFrame:
    """Own time of every operation of a step, median over the steps; what it is."""
    known = operations.filter(pl.col("own_ns").is_not_null())
    if (operations["step_number"].max() or 0) == 0:
        # One step: every operation is there once.
        return known.select(*_KEYS, pl.col("own_ns").cast(pl.Float64), "name", "local")
    return known.group_by(*_KEYS, maintain_order=True).agg(
        pl.col("own_ns").median(), pl.col("name", "local").first()
    )


def _rank_totals(local: pl.DataFrame) -> pl.DataFrame:
    """rank, operations, expected_ns, observed_ns, ratio (weighted median) of matched computation."""
    return local.group_by("rank", maintain_order=True).agg(
        pl.len().alias("operations"),
        pl.col("expected_ns", "observed_ns").sum(),
        pl.struct("ratio", "expected_ns")
        .map_batches(_median_of_structs, return_dtype=pl.Float64, returns_scalar=True)
        .alias("ratio"),
    )


def _matched(expected: pl.DataFrame, observed: pl.DataFrame) -> pl.DataFrame:
    """Operations in both, with expected_ns, observed_ns and their ratio.

    Those that take no time are left out.
    """
    return (
        expected.join(
            observed.select(*_KEYS, observed_ns="own_ns"), on=_KEYS, maintain_order="left"
        )
        .rename({"own_ns": "expected_ns"})
        .filter((pl.col("expected_ns") > 0) & (pl.col("observed_ns") > 0))
        .with_columns(ratio=pl.col("observed_ns") / pl.col("expected_ns"))
    )


def _transfer_ratios(matched: pl.DataFrame) -> pl.DataFrame:
    """rank, transfer_ratio: total observed over total expected transfer."""
    return (
        matched.filter(~pl.col("local"))
        .group_by("rank")
        .agg(transfer_ratio=pl.col("observed_ns").sum() / pl.col("expected_ns").sum())
    )


def _finding(row: dict[str, Any], local: pl.DataFrame, center: float) -> Finding:
    mine = local.with_columns(slowed=pl.col("ratio") > center * (1 + _SLOWED))
    slowed = mine["expected_ns"].filter(mine["slowed"])
    share = float(slowed.sum()) / float(mine["expected_ns"].sum())
    label = pl.coalesce("name", "kind")
    classes = mine.group_by(label.alias("label"), maintain_order=True).agg(
        excess=(pl.col("observed_ns") - center * pl.col("expected_ns")).sum()
    )
    slowest = str(classes.sort("excess", descending=True)["label"][0])
    if share >= _WHOLE_DEVICE:
        verdict = "all its computation is slowed: a down-clocked, throttled or shared device"
    else:
        verdict = "some operations are slowed, most are not: not the device's clock"
    return Finding(
        rank=row["rank"],
        host=row["host"],
        unit=row["unit"],
        ratio=row["ratio"],
        above=row["above"],
        deviations=row["deviations"],
        slowed_share=share,
        slowest=slowest,
        verdict=verdict,
    )


def _hosts(traces: Sequence[Trace]) -> dict[int, str | None]:
    clocks = (clock for trace in traces for clock in trace.header.clock)
    return {rank: clock.host for clock in clocks for rank in clock.ranks}


def _median_of_structs(pairs: pl.Series) -> float:
    fields = pairs.struct
    return weighted_median(fields.field("ratio").to_numpy(), fields.field("expected_ns").to_numpy())


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """The value below and above which at most half of the weight lies."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _name(trace: Trace) -> str:
    return ", ".join(str(path) for path in trace.paths) or "a trace in memory"
