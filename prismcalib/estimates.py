"""How far a predicted step time may be off because of transfers that were not measured.

Times only ever grow with durations.  So when every estimated transfer is taken at the lower end
of what its source allows, and again at the upper end, the step times that follow enclose the
true one, as far as the sources are right about themselves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.chosen_steps import numbered_as_whole
from prismcalib.comm_costs import group_spread
from prismcalib.graph import Graph, Int64Array
from prismcalib.paths import CriticalPath
from prismcalib.propagation import propagate_batch
from prismcalib.steps import StepModel
from prismtrace.schema import P2P_KINDS, TraceHeader, TransferSource

__all__ = ["EstimateRange", "duration_factors", "estimate_range", "range_of", "scaled"]

FloatArray = NDArray[np.float64]

_DOUBT = {
    "source": pl.String,
    "kind": pl.String,
    "ranks": pl.Int64,
    "hosts": pl.Int64,
    "low": pl.Float64,
    "high": pl.Float64,
}


@dataclass(frozen=True)
class EstimateRange:
    """What the doubt about estimated transfers leaves of the step time.

    Attributes:
        low_ns, high_ns: the median step time with all of them at their shortest and longest.
        shares: share of the critical path that rests on each source other than `measured`.
        unknown: the part of these whose source does not say how far off it may be; the range
            takes them as they are.
    """

    low_ns: int
    high_ns: int
    shares: dict[str, float]
    unknown: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """The range as JSON values."""
        return asdict(self)


def estimate_range(
    graph: Graph, rows: pl.DataFrame, header: TraceHeader, path: CriticalPath
) -> EstimateRange | None:
    """The range of a calibrated trace's step time; None if every transfer was measured.

    Args:
        graph, rows: from `graph_from_trace`.
        header: of the trace; holds the doubts that `merge` wrote down.
        path: its critical path.
    """
    source = rows["transfer_source"].cast(pl.String)
    if not (source.drop_nulls() != TransferSource.MEASURED.value).any():
        return None
    low, high, unknown = duration_factors(rows, header)
    durations = np.stack([scaled(graph.duration_ns, low), scaled(graph.duration_ns, high)], axis=1)
    ids = numbered_as_whole(rows)["id"].filter(unknown)
    return range_of(StepModel.of(graph, rows, header), durations, path, ids)


def range_of(
    model: StepModel, durations: Int64Array, path: CriticalPath, unknown_ids: pl.Series
) -> EstimateRange:
    """The range between two sets of durations int64[n, 2].

    `unknown_ids`: nodes, at least those of the path, that were estimated nobody knows how well.
    """
    shortest, longest = model.typical_each(
        propagate_batch(model.graph, durations, steps=model.number)
    )
    return EstimateRange(
        low_ns=round(shortest),
        high_ns=round(longest),
        shares=_shares(path, pl.lit(value=True)),
        unknown=_shares(path, pl.col("id").is_in(unknown_ids.implode())),
    )


def scaled(duration_ns: Int64Array, factor: FloatArray) -> Int64Array:
    """int64[n], durations times their factor float64[n]."""
    product: Int64Array = np.rint(duration_ns * factor).astype(np.int64)
    # Whole nanoseconds stay exact where nothing is in doubt.
    return np.where(factor == 1, duration_ns, product)


def duration_factors(rows: pl.DataFrame, header: TraceHeader) -> tuple[Any, Any, pl.Series]:
    """Factors on the duration of every row, and bool[n]: estimated, by how much is not said."""
    costs = header.extra.get("merge", {}).get("comm_costs") or {}
    doubts = pl.DataFrame(
        [{name: doubt[name] for name in _DOUBT} for doubt in costs.get("doubts", [])],
        schema=_DOUBT,
    )
    per_host = int(costs.get("ranks_per_host", 1))
    ranks, hosts = group_spread(header, per_host)
    spread = pl.DataFrame(
        {"group": [group.id for group in header.groups], "k": ranks[: len(header.groups)]}
        | {"h": hosts[: len(header.groups)]},
        schema={"group": pl.Int32, "k": pl.Int64, "h": pl.Int64},
    )
    kind = pl.col("kind").cast(pl.String)
    pair = kind.is_in([member.value for member in P2P_KINDS])
    apart = (pl.col("rank") // per_host != pl.col("peer") // per_host).cast(pl.Int64)
    found = (
        rows.select(
            "rank", "peer", "group", kind=kind, source=pl.col("transfer_source").cast(pl.String)
        )
        .join(spread, on="group", how="left", maintain_order="left")
        .with_columns(
            ranks=pl.when(pair).then(2).otherwise("k"),
            hosts=pl.when(pair).then(1 + apart).otherwise("h"),
        )
        .join(doubts, on=["source", "kind", "ranks", "hosts"], how="left", maintain_order="left")
    )
    estimated = found["source"].is_not_null() & (found["source"] != TransferSource.MEASURED.value)
    unknown = estimated & found["low"].is_null()
    return found["low"].fill_null(1.0).to_numpy(), found["high"].fill_null(1.0).to_numpy(), unknown


def _shares(path: CriticalPath, chosen: pl.Expr) -> dict[str, float]:
    """Share of the path by source, of the chosen segments that were not measured."""
    parts = (
        path.segments.filter(chosen & (pl.col("transfer_source") != TransferSource.MEASURED.value))
        .group_by("transfer_source")
        .agg(pl.col("busy_ns").sum())
        .sort("transfer_source")
    )
    return {name: ns / max(path.length_ns, 1) for name, ns in parts.iter_rows()}
