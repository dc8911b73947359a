"""Which ranks the page shows span by span, and their spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from prismcalib.blocks import Layout
from prismcalib.paths import inner_idle
from prismcalib.report.data import RunSummary
from prismtrace.trace import Trace

__all__ = ["MOST_LANES", "MOST_STREAMS", "Lane", "choose_ranks", "read_lanes"]

MOST_LANES = 16
MOST_STREAMS = 4
"""Rows of a lane; a rank's further streams share the last one."""

_COLUMNS = (
    "kind", "name", "group", "seq", "peer", "bytes", "step", "stream", "start_ns", "dur_ns",
    "wait_ns", "slack_ns", "critical",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Lane:
    """A rank that is shown span by span.

    Attributes:
        rank: which.
        why: the reason it was chosen, for people.
        streams: logical stream of each row of the lane.
        spans: in order of start: `_COLUMNS` with start_ns from the begin of the window,
            inner_idle_ns, row (of the lane).
        dropped: spans left out, the shortest.
        dropped_ns: their time.
    """

    rank: int
    why: str
    streams: tuple[int, ...]
    spans: pl.DataFrame
    dropped: int
    dropped_ns: int


def choose_ranks(ranks: pl.DataFrame, most: int = MOST_LANES) -> dict[int, str]:
    """Rank -> reason: all of a small job; of a large one those that matter, and a sample.

    Half of them hold most of the critical path, a quarter compute longest against their peers,
    the rest are spread evenly.

    Args:
        ranks: as `RunSummary.ranks`.
        most: how many to choose.
    """
    if ranks.height <= most:
        return dict.fromkeys(ranks["rank"].to_list(), "")
    reasons: dict[int, list[str]] = {}
    on_path = ranks.filter(pl.col("path_share") > 0).sort(
        "path_share", "rank", descending=[True, False]
    )
    for rank, share in on_path.select("rank", "path_share").head(most // 2).rows():
        reasons.setdefault(rank, []).append(f"{share:.0%} of the critical path".replace("%", " %"))
    slow = ranks.filter(pl.col("excess") > 0).sort("excess", "rank", descending=[True, False])
    for rank, excess in slow.select("rank", "excess").head(most // 4).rows():
        reasons.setdefault(rank, []).append(f"computes {excess:+.0%}".replace("%", " %"))
    others = [rank for rank in ranks["rank"].to_list() if rank not in reasons]
    missing = most - len(reasons)
    places = np.linspace(0, len(others) - 1, missing).round().astype(int)
    for place in np.unique(places).tolist():
        reasons[others[place]] = ["sample"]
    return {rank: ", ".join(reasons[rank]) for rank in sorted(reasons)}


def read_lanes(trace: Trace, summary: RunSummary, most_spans: int) -> list[Lane]:
    """Read the spans of the chosen ranks, at most `most_spans` in all.

    Args:
        trace: the trace that `summary` describes.
        summary: tells which ranks matter.
        most_spans: shared evenly among the lanes; of a longer rank the shortest spans go.
    """
    chosen = choose_ranks(summary.ranks)
    share = max(most_spans // max(len(chosen), 1), 1)
    layout = Layout.of(trace)
    return [_lane(layout, summary, rank, why, share) for rank, why in chosen.items()]


def _lane(layout: Layout, summary: RunSummary, rank: int, why: str, most: int) -> Lane:
    number = int(np.searchsorted(layout.ranks, rank))
    idle = inner_idle(layout.columns).alias("inner_idle_ns")
    spans = layout.read(number, number + 1, [*_COLUMNS, idle]).with_columns(
        pl.col("start_ns") - summary.extent.begin_ns
    )
    dropped = spans.clear()
    if spans.height > most:
        spans = spans.sort("dur_ns", descending=True, maintain_order=True)
        spans, dropped = spans.head(most), spans.slice(most)
    streams = spans["stream"].unique().sort().to_list()
    row = pl.col("stream").rank("dense") - 1
    return Lane(
        rank=rank,
        why=why,
        streams=tuple(streams[:MOST_STREAMS]),
        spans=spans.with_columns(row=row.cast(pl.Int64).clip(upper_bound=MOST_STREAMS - 1)).sort(
            "start_ns", "row", maintain_order=True
        ),
        dropped=dropped.height,
        dropped_ns=int(dropped["dur_ns"].sum()),
    )
