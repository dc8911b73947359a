"""From the order of a log's file to the order in which each rank issued its operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prismtrace.converters.ops.cutting import cut_into_parts, threads
from prismtrace.converters.ops.grid import Int64Array, IntArray
from prismtrace.converters.ops.mapping import OperationRule
from prismtrace.schema import Kind

__all__ = ["IssueOrder", "Runs", "sorted_rows"]

# At equal times: data arrives, is computed on, and is sent on.
_TURN = {Kind.RECV: 0, Kind.SEND: 3}
_COMPUTE_TURN, _COMMUNICATION_TURN = 1, 2

_MOST_BITS = 63


@dataclass(frozen=True, eq=False)
class Runs:
    """Rows that follow each other in a log and are of one rank and step.

    Attributes:
        first: int64[r], ascending row numbers.
        rows: of the whole log.
        step, segment: int[r], position of the step, and ``rank * steps + step``.
    """

    first: Int64Array
    rows: int
    step: IntArray
    segment: Int64Array

    def lowest(self, values: Int64Array, steps: int) -> Int64Array:
        """int64[steps], the smallest of int64[n] values in each step."""
        found = np.full(steps, np.iinfo(np.int64).max)
        np.minimum.at(found, self.step, np.minimum.reduceat(values, self.first))
        return found

    def highest(self, values: Int64Array, steps: int) -> Int64Array:
        """int64[steps], the largest of int64[n] values in each step."""
        found = np.zeros(steps, np.int64)
        np.maximum.at(found, self.step, np.maximum.reduceat(values, self.first))
        return found

    def lengths(self, segments: int) -> Int64Array:
        """int64[segments], how many rows each rank has in each step."""
        found = np.zeros(segments, np.int64)
        np.add.at(found, self.segment, np.diff(self.first, append=self.rows))
        return found


class IssueOrder:
    """The n rows of a log by rank, step, start, turn and operation.

    Runs are brought together first; what is left is to sort the rows of a rank in a step.
    """

    def __init__(self, runs: Runs, begins: Int64Array, rules: tuple[OperationRule, ...]) -> None:
        """Args: `begins`, int64[segments + 1], where each rank and step begins in this order."""
        order = np.argsort(runs.segment, kind="stable")
        self._begins = begins
        self._first = runs.first[order]
        self._size = np.diff(runs.first, append=runs.rows)[order]
        self._run_of_segment = np.searchsorted(runs.segment[order], np.arange(len(begins)))
        self._place = _places(rules)

    def applied_to(
        self, columns: dict[str, IntArray], origin: Int64Array, shift: Int64Array
    ) -> dict[str, IntArray]:
        """Columns in this order, in parallel.

        Args:
            columns: int[n] each, among them start and operation.
            origin: int64[steps], no row of a step starts earlier.
            shift: int64[steps], what to add to the times of each step.
        """
        result = {name: np.empty(len(values), values.dtype) for name, values in columns.items()}

        def fill(part: range) -> None:
            rows = slice(self._begins[part.start], self._begins[part.stop])
            order = self._rows_of(part, columns, origin)
            for name, values in columns.items():
                # All are in range; a check would copy them.
                values.take(order, out=result[name][rows], mode="clip")
            if shift.any():
                later = self._of_rows(part, shift)
                result["start"][rows] += later
                result["end"][rows] += later

        with threads() as pool:
            list(pool.map(fill, cut_into_parts(self._begins)))
        return result

    def _rows_of(self, part: range, columns: dict[str, IntArray], origin: Int64Array) -> Int64Array:
        """Row numbers of a range of segments, in issue order."""
        runs = slice(self._run_of_segment[part.start], self._run_of_segment[part.stop])
        first, size = self._first[runs], self._size[runs]
        row = np.repeat(first - (np.cumsum(size) - size), size)
        row += np.arange(len(row))
        within = columns["start"][row]
        if origin.any():
            within -= self._of_rows(part, origin)
        segment = np.repeat(np.arange(len(part)), self._lengths(part))
        place = self._place[columns["operation"][row]]
        return row[sorted_rows(segment, within, place)]

    def _of_rows(self, part: range, of_step: Int64Array) -> Int64Array:
        """What the steps of the rows have, for the rows of a range of segments."""
        step = np.arange(part.start, part.stop) % len(of_step)
        return np.repeat(of_step[step], self._lengths(part))

    def _lengths(self, part: range) -> Int64Array:
        return np.diff(self._begins[part.start : part.stop + 1])


def _places(rules: tuple[OperationRule, ...]) -> NDArray[np.uint8]:
    """uint8[operations], position of each operation among all that happen at the same time."""
    turn = [
        (_TURN.get(rule.kind, _COMMUNICATION_TURN) if rule.kind.is_communication else _COMPUTE_TURN)
        for rule in rules
    ]
    place = np.empty(len(rules), np.uint8)
    place[np.argsort(turn, kind="stable")] = np.arange(len(rules))
    return place


def sorted_rows(segment: Int64Array, within: Int64Array, place: NDArray[np.uint8]) -> Int64Array:
    """Positions in the order (segment, within, place).

    Sorting is stable since that is quickest: the rows of a kind are often in order already.
    """
    place_bits = int(place.max()).bit_length()
    low_bits = int(within.max()).bit_length() + place_bits
    if low_bits + int(segment[-1]).bit_length() > _MOST_BITS:
        return np.lexsort((place, within, segment))
    key = segment << low_bits
    key |= within << place_bits
    key |= place
    return np.argsort(key, kind="stable")
