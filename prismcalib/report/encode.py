"""What the page's timeline reads: a small description and one block of compressed bytes.

    description   JSON: names, lines, and for every array its place in the block
    block         gzip of all arrays one after another, as base64

Whole numbers are stored as LEB128 (seven bits a byte, lowest first, the high bit set on all but
the last byte), times as differences from the one before: most take one to three bytes before
compression. `reading.js` reads this.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.graph import Int64Array
from prismcalib.report.data import RunSummary
from prismcalib.report.lanes import Lane
from prismcalib.report.scan import PARTS
from prismtrace.group_names import group_labels
from prismtrace.schema import Kind

__all__ = ["encode_timeline", "leb128"]

_MOST_NAME = 160
_KINDS = [kind.value for kind in Kind]


def encode_timeline(
    summary: RunSummary, lanes: Sequence[Lane], most_path_runs: int
) -> tuple[dict[str, Any], str]:
    """The description and the block (base64) of a run's timeline."""
    block = _Block()
    for number, grid in enumerate(summary.grids):
        block.add(f"grid{number}", grid.shares.tobytes())
    runs = _path_runs(summary, most_path_runs)
    block.add_numbers("path_line", runs["line"].to_numpy())
    block.add_numbers("path_start", np.diff(runs["start_ns"].to_numpy(), prepend=0))
    block.add_numbers("path_length", runs["length_ns"].to_numpy())
    names = _add_lanes(block, lanes)
    header = summary.header
    groups = group_labels(header.groups)
    used = {group for lane in lanes for group in lane.spans["group"].drop_nulls().unique()}
    description = {
        "window": summary.extent.window_ns,
        "ranks": summary.extent.ranks.tolist(),
        "parts": PARTS,
        "grids": [
            {
                "ranksPerLine": grid.shape.ranks_per_line,
                "lines": grid.shares.shape[1],
                "bins": grid.shape.bins,
            }
            for grid in summary.grids
        ],
        "steps": _step_ends(summary),
        "stages": _stage_bands(summary),
        "lanes": [
            {
                "rank": lane.rank,
                "why": lane.why,
                "streams": [header.streams.get(s, f"stream {s}") for s in lane.streams],
                "spans": lane.spans.height,
            }
            for lane in lanes
        ],
        "names": names,
        "kinds": _KINDS,
        "groups": {str(group): groups.get(group, str(group)) for group in sorted(used)},
        "arrays": block.places,
    }
    return description, block.text()


def leb128(values: Int64Array) -> bytes:
    """Whole numbers >= 0 as LEB128."""
    left = values.astype(np.uint64)
    sizes = np.maximum((64 - _leading_zeros(left) + 6) // 7, 1)
    out = np.zeros((len(left), int(sizes.max(initial=1))), np.uint8)
    for place in range(out.shape[1]):
        out[:, place] = (left & np.uint64(127)) | np.where(place + 1 < sizes, 128, 0).astype(
            np.uint64
        )
        left = left >> np.uint64(7)
    return out[np.arange(out.shape[1]) < sizes[:, None]].tobytes()


def _leading_zeros(values: NDArray[np.uint64]) -> Int64Array:
    bits = np.zeros(len(values), np.int64)
    left = values.copy()
    for shift in (32, 16, 8, 4, 2, 1):
        large = left >= (np.uint64(1) << np.uint64(shift))
        bits[large] += shift
        left[large] >>= np.uint64(shift)
    return 64 - (bits + (left > 0))


class _Block:
    """Arrays one after another."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, name: str, data: bytes) -> None:
        self.places[name] = (self._size, len(data))
        self._parts.append(data)
        self._size += len(data)

    def add_numbers(self, name: str, values: Int64Array) -> None:
        self.add(name, leb128(np.asarray(values, np.int64)))

    def text(self) -> str:
        # No time stamp: the same trace gives the same bytes.
        packed = gzip.compress(b"".join(self._parts), compresslevel=6, mtime=0)
        return base64.b64encode(packed).decode("ascii")


def _add_lanes(block: _Block, lanes: Sequence[Lane]) -> list[str]:
    """Add the spans of all lanes, one array a column; returns the names that they number."""
    spans = pl.concat([lane.spans for lane in lanes])
    spans = spans.with_columns(pl.col("name").cast(pl.String).str.head(_MOST_NAME))
    names = (
        spans["name"]
        .drop_nulls()
        .value_counts(sort=True)
        .sort("count", "name", descending=[True, False])
    )
    number = {name: place + 1 for place, name in enumerate(names["name"])}
    starts = [np.diff(lane.spans["start_ns"].to_numpy(), prepend=0) for lane in lanes]
    block.add_numbers("start", np.concatenate(starts))
    columns = {
        "duration": pl.col("dur_ns"),
        "wait": pl.col("wait_ns").fill_null(0),
        "idle": pl.col("inner_idle_ns"),
        "kind": pl.col("kind").to_physical(),
        "row": pl.col("row"),
        "critical": pl.col("critical").fill_null(value=False),
        "name": pl.col("name").replace_strict(number, default=0),
        # One more than the value; 0 stands for null.
        "group": pl.col("group").cast(pl.Int64).fill_null(-1) + 1,
        "seq": pl.col("seq").fill_null(-1) + 1,
        "peer": pl.col("peer").cast(pl.Int64).fill_null(-1) + 1,
        "bytes": pl.col("bytes").fill_null(-1) + 1,
        "step": pl.col("step").cast(pl.Int64).fill_null(-1) + 1,
        "slack": pl.col("slack_ns").fill_null(-1) + 1,
    }
    for name, values in columns.items():
        block.add_numbers(name, spans.select(values.cast(pl.Int64)).to_series().to_numpy())
    return names["name"].to_list()


def _path_runs(summary: RunSummary, most: int) -> pl.DataFrame:
    """Stretches of the critical path on one rank: line, start_ns (in the window), length_ns."""
    segments = summary.path.segments
    ranks = summary.extent.ranks
    runs = (
        segments.select(
            "rank",
            "start_ns",
            end=pl.col("start_ns") + pl.col("busy_ns"),
            run=pl.col("rank").rle_id(),
        )
        .group_by("run", maintain_order=True)
        .agg(pl.col("rank").first(), pl.col("start_ns").first(), pl.col("end").last())
        .select(
            line=pl.Series(np.searchsorted(ranks, segments["rank"].to_numpy())).gather(
                segments["rank"].rle_id().arg_unique()
            ),
            start_ns=pl.col("start_ns") - summary.extent.begin_ns,
            length_ns=pl.col("end") - pl.col("start_ns"),
        )
    )
    if runs.height > most:
        # Too many to tell apart on a screen: the longest stay, lines join them.
        longest = runs["length_ns"].arg_sort(descending=True).head(most).sort()
        runs = runs[longest.to_list()]
    return runs


def _step_ends(summary: RunSummary) -> list[tuple[int, int]]:
    steps = summary.steps.drop_nulls("step")
    ends = steps["duration_ns"].cum_sum()
    return list(zip(steps["step"].to_list(), ends.to_list(), strict=True))


def _stage_bands(summary: RunSummary) -> list[tuple[int, int, int]]:
    """Stage, first line and past-the-last line (one line a rank), if stages are contiguous."""
    if summary.pipeline is None:
        return []
    bands: list[tuple[int, int, int]] = []
    for line, rank in enumerate(summary.extent.ranks.tolist()):
        stage = summary.pipeline.stage_of.get(rank, -1)
        if bands and bands[-1][0] == stage:
            bands[-1] = (stage, bands[-1][1], line + 1)
        else:
            bands.append((stage, line, line + 1))
    return bands if len(bands) <= summary.pipeline.stages else []
