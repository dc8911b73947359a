"""How long ranks compute, and how much longer than the others: one definition for all commands.

A rank computes while at least one of its computations or copies runs, without the idle time
between kernels, over the whole window.  It is held against the median of the *other* ranks of
its pipeline stage, or of all other ranks where there are no stages.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from prismcalib.paths import inner_idle
from prismtrace.schema import LOCAL_KINDS

__all__ = ["computing_times", "covered_ns", "longer_than_others", "others_median"]


def computing_times(rows: pl.DataFrame) -> pl.DataFrame:
    """rank, local_ns (covered by computations and copies), compute_ns (without idle inside).

    Args:
        rows: of whole ranks; rank, kind, start_ns, dur_ns and, where known, x_busy_ns.
    """
    kind = pl.col("kind").cast(pl.String)
    local = rows.filter(kind.is_in([member.value for member in LOCAL_KINDS])).select(
        "rank",
        begin_ns="start_ns",
        end_ns=pl.col("start_ns") + pl.col("dur_ns"),
        inner_ns=inner_idle(rows.columns),
    )
    inner = local.group_by("rank").agg(pl.col("inner_ns").sum())
    covered = pl.col("covered_ns")
    return (
        covered_ns(local)
        .join(inner, on="rank", maintain_order="left")
        .select(
            "rank", local_ns=covered, compute_ns=covered - pl.min_horizontal("inner_ns", covered)
        )
    )


def covered_ns(spans: pl.DataFrame) -> pl.DataFrame:
    """rank, covered_ns: the time that at least one of its spans (begin_ns to end_ns) covers."""
    earlier = pl.col("end_ns").cum_max().shift().over("rank")
    new = pl.col("end_ns") - pl.max_horizontal("begin_ns", earlier)
    return (
        spans.sort("rank", "begin_ns")
        .with_columns(covered_ns=new.clip(lower_bound=0))
        .group_by("rank", maintain_order=True)
        .agg(pl.col("covered_ns").sum())
    )


def longer_than_others(name: str, peers: str) -> pl.Expr:
    """How much longer than the median of the others, 0.3 = 30 %; null where there are none."""
    return pl.col(name) / pl.col(peers).clip(lower_bound=1) - 1


def others_median(values: pl.Series, part: pl.Series) -> pl.Series:
    """Of each value the median of the other values of its part; null where there is none."""
    result = np.full(len(values), np.nan)
    numbers, parts = values.to_numpy(), part.fill_null(-1).to_numpy()
    for number in np.unique(parts):
        rows = np.flatnonzero(parts == number)
        if len(rows) == 1:
            continue
        rows = rows[np.argsort(numbers[rows], kind="stable")]
        place, others = np.arange(len(rows)), len(rows) - 1
        middle = [(others - 1) // 2, others // 2]
        # Among the others, those behind one's own place have moved up by one.
        taken = [numbers[rows[low + (place <= low)]] for low in middle]
        result[rows] = np.mean(taken, axis=0)
    return pl.Series(result).fill_nan(None).round().cast(pl.Int64)
