"""The grid of ranks behind a log: who is at which stage, replica and tensor-parallel lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismtrace.errors import RankError
from prismtrace.ranks import format_ranks

__all__ = [
    "LARGEST_NUMBER",
    "Int64Array",
    "IntArray",
    "RankGrid",
    "dense_positions",
    "rank_grid",
    "rank_numbers",
]

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


def rank_numbers(table: pl.DataFrame) -> tuple[Int64Array, IntArray]:
    """int64[R] numbers of the ranks in the log, and int32[n] the rank of every row, from 0.

    Ranks keep the order of their numbers; in a log without numbers tensor-parallel ranks count
    fastest, then data-parallel ones, then stages.
    """
    if "rank" in table.columns:
        return dense_positions(table, "rank")
    (stages, stage), (replicas, replica), (lanes, lane) = (
        dense_positions(table, name) for name in ("stage", "dp_rank", "tp_rank")
    )
    rank = (stage * np.int32(len(replicas)) + replica) * np.int32(len(lanes)) + lane
    return np.arange(len(stages) * len(replicas) * len(lanes)), rank


def rank_grid(number: Int64Array, table: pl.DataFrame, rank: IntArray) -> RankGrid:
    """Where the ranks sit.

    Args:
        number: int64[R], their numbers in the log.
        table: rows of n places at which ranks say to be.
        rank: int[n], whose places these are.

    Raises:
        RankError: the grid has holes, or a rank or a place is taken twice.
    """
    present = np.bincount(rank, minlength=len(number)) > 0
    if not present.all():
        raise _incomplete(len(number), int((~present).sum()))
    stages, stage = _places(number, table, "stage", rank)
    lanes, lane = _places(number, table, "tp_rank", rank)
    if "dp_rank" in table.columns:
        replicas, replica = _places(number, table, "dp_rank", rank)
    else:
        replica = _position_in_team(stage * lanes + lane)
        replicas = int(replica.max()) + 1
    shape = (stages, replicas, lanes)
    cells = (stage * replicas + replica) * lanes + lane
    at = np.full(int(np.prod(shape)), -1, np.int64)
    at[cells] = np.arange(len(cells))
    _require_full(at.reshape(shape), cells, number)
    return RankGrid(number, stage, replica, lane, at.reshape(shape))


def _places(
    number: Int64Array, table: pl.DataFrame, column: str, rank: IntArray
) -> tuple[int, Int64Array]:
    """How many indices there are, and int64[R] the one that all rows of a rank have."""
    if column not in table.columns:
        return 1, np.zeros(len(number), np.int64)
    values = table[column].to_numpy()
    of_rank = np.zeros(len(number), values.dtype)
    of_rank[rank] = values
    differs = values != of_rank[rank]
    if differs.any():
        raise RankError(
            f"rank {number[rank[differs].min()]} is at two places of the grid: its rows differ in {column}",
            hint="say with --columns which columns hold stage, data- and tensor-parallel rank; logs "
            "of different jobs are converted one by one",
        )
    distinct, position = np.unique(of_rank, return_inverse=True)
    return len(distinct), position.astype(np.int64)


def _incomplete(ranks: int, missing: int, first: str = "") -> RankError:
    return RankError(
        f"{missing} of {ranks} ranks are missing{first}",
        hint="give the log of the whole job; its files may be several",
    )


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
        first = f": the first at stage {stage}, data-parallel rank {dp}, tensor-parallel rank {tp}"
        raise _incomplete(at.size, int((at < 0).sum()), first)
