"""The grid of ranks behind a log: who is at which stage, replica and tensor-parallel lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismtrace.errors import RankError
from prismtrace.ranks import format_ranks

__all__ = ["LARGEST_NUMBER", "Int64Array", "IntArray", "RankGrid", "dense_positions", "rank_grid"]

IntArray = NDArray[np.signedinteger[Any]]
Int64Array = NDArray[np.int64]

LARGEST_NUMBER = 2**24
"""Ranks and stages are small numbers: tables are as long as the largest."""


@dataclass(frozen=True, eq=False)
class RankGrid:
    """Where each of the R ranks sits: stage, data-parallel and tensor-parallel index.

    Attributes:
        source: int64[R], the ranks' numbers in the log; the trace numbers them from 0.
        stage, dp, tp: int64[R].
        pp_size, dp_size, tp_size: extents; R is their product.
        at: int64[pp_size, dp_size, tp_size], the rank at a place.
    """

    source: Int64Array
    stage: Int64Array
    dp: Int64Array
    tp: Int64Array
    at: Int64Array

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.source)

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return int(self.at.shape[0])

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return int(self.at.shape[1])

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks in the log."""
        return int(self.at.shape[2])


def dense_positions(table: pl.DataFrame, column: str) -> tuple[Int64Array, IntArray]:
    """The distinct values of a column in ascending order, and int32[n] positions in them."""
    if column not in table.columns:
        return np.zeros(1, np.int64), np.zeros(table.height, np.int32)
    values = table[column].to_numpy()
    low, high = int(values.min()), int(values.max())
    if high - low > max(LARGEST_NUMBER, 4 * len(values)):
        distinct, position = np.unique(values, return_inverse=True)
        return distinct.astype(np.int64), position.astype(np.int32)
    if low:
        values = (
            values - low if high - low <= np.iinfo(values.dtype).max else values - np.int64(low)
        )
    seen = np.zeros(high - low + 1, np.bool_)
    seen[values] = True
    position = np.cumsum(seen, dtype=np.int32) - np.int32(1)
    return np.flatnonzero(seen) + low, position[values]


def rank_grid(table: pl.DataFrame) -> tuple[IntArray, RankGrid]:
    """int32[n] rank of every row, counted from 0, and where the ranks sit.

    Ranks keep the order of their numbers in the log; without numbers tensor-parallel ranks
    count fastest, then data-parallel ones, then stages.
    """
    stages, stage = dense_positions(table, "stage")
    lanes, lane = dense_positions(table, "tp_rank")
    if "rank" in table.columns:
        number, rank = dense_positions(table, "rank")
        places = [
            _place_of_rank(number, rank, index)
            if name in table.columns
            else np.zeros(len(number), np.int64)
            for name, index in (("stage", stage), ("tp_rank", lane))
        ]
        if "dp_rank" in table.columns:
            replicas, replica = dense_positions(table, "dp_rank")
            places.append(_place_of_rank(number, rank, replica))
        else:
            places.append(_position_in_team(places[0] * len(lanes) + places[1]))
            replicas = np.arange(int(places[2].max()) + 1)
        shape = (len(stages), len(replicas), len(lanes))
        cells = (places[0] * shape[1] + places[2]) * shape[2] + places[1]
    else:
        replicas, replica = dense_positions(table, "dp_rank")
        shape = (len(stages), len(replicas), len(lanes))
        rank = (stage * np.int32(shape[1]) + replica) * np.int32(shape[2]) + lane
        number = cells = np.arange(int(np.prod(shape)))
    at = np.full(int(np.prod(shape)), -1, np.int64)
    at[cells] = np.arange(len(cells))
    _require_full(at.reshape(shape), cells, number)
    stage_of, replica_of, lane_of = (np.asarray(i) for i in np.unravel_index(cells, shape))
    return rank, RankGrid(number, stage_of, replica_of, lane_of, at.reshape(shape))


def _place_of_rank(number: Int64Array, rank: IntArray, index: IntArray) -> Int64Array:
    """int64[R], the one index that all rows of a rank have."""
    of_rank = np.zeros(len(number), index.dtype)
    of_rank[rank] = index
    differs = of_rank[rank] != index
    if differs.any():
        raise RankError(
            f"rank {number[rank[int(differs.argmax())]]} is at two places of the grid: stages, "
            "data-parallel or tensor-parallel ranks differ between its rows",
            hint="say with --columns which columns hold them",
        )
    return of_rank.astype(np.int64)


def _position_in_team(team: Int64Array) -> Int64Array:
    """int64[R], position of each rank among those of its team."""
    order = np.argsort(team, kind="stable")
    ordered = team[order]
    position = np.empty(len(team), np.int64)
    position[order] = np.arange(len(team)) - np.searchsorted(ordered, ordered)
    return position


def _require_full(at: Int64Array, cells: Int64Array, number: Int64Array) -> None:
    shared = np.flatnonzero(np.bincount(cells[cells >= 0], minlength=at.size) > 1)
    if len(shared):
        twice = number[cells == shared[0]]
        stage, dp, tp = np.unravel_index(shared[0], at.shape)
        raise RankError(
            f"ranks {format_ranks(twice.tolist())} are all at stage {stage}, data-parallel "
            f"rank {dp}, tensor-parallel rank {tp}",
            hint="name the column that tells them apart with --columns, e.g. columns.tp_rank",
        )
    if (at < 0).any():
        stage, dp, tp = (int(index[0]) for index in np.nonzero(at < 0))
        raise RankError(
            f"{int((at < 0).sum())} of {at.size} ranks are missing: the first at stage {stage}, "
            f"data-parallel rank {dp}, tensor-parallel rank {tp}",
            hint="give the log of the whole job; its files may be several",
        )
