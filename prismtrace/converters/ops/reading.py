"""A log as arrays: the chosen columns of Parquet or CSV files, checked, in issue order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismtrace.converters.content import read_blocks
from prismtrace.converters.ops.grid import (
    LARGEST_NUMBER,
    Int64Array,
    IntArray,
    RankGrid,
    dense_positions,
    rank_grid,
    rank_numbers,
)
from prismtrace.converters.ops.mapping import ColumnMapping, OperationRule, Origin
from prismtrace.errors import InputFileError, SourceFormatError, ValidationError
from prismtrace.schema import Kind

__all__ = ["Operations", "read_operations"]

# At equal times: data arrives, is computed on, and is sent on.
_TURN = {Kind.RECV: 0, Kind.SEND: 3}
_COMPUTE_TURN, _COMMUNICATION_TURN = 1, 2

_LARGEST = {
    **dict.fromkeys(("rank", "dp_rank", "stage", "tp_rank"), LARGEST_NUMBER),
    "step": 2**31 - 1,
    "microbatch": 2**31 - 1,
    "chunk": 2**10,
}
_MOST_BITS = 63
_EARLY_ROWS = 2**16
# A day in the unit of the trace: beyond, the unit of the mapping is wrong.
_LONGEST_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, eq=False)
class Operations:
    """The n rows of a log, sorted by (rank, step, start).

    Attributes:
        names, rules: by operation code.
        grid: the ranks.
        steps: int64[S], numbers of the steps as in the log.
        rank, step: int32[n], from 0; positions in the grid and in `steps`.
        segment: int64[n], ``rank * S + step``; does not decrease.
        operation: uint8[n] operation code.
        start_ns, end_ns: int64[n].
        chunk: int[n], 0 where the log has none.
        microbatch: int[n], -1 where the log has none.
        sampled: steps are samples that nothing connects.
    """

    names: tuple[str, ...]
    rules: tuple[OperationRule, ...]
    grid: RankGrid
    steps: Int64Array
    rank: IntArray
    step: IntArray
    segment: Int64Array
    operation: NDArray[np.uint8]
    start_ns: Int64Array
    end_ns: Int64Array
    chunk: IntArray
    microbatch: IntArray
    has_chunks: bool
    sampled: bool

    @property
    def rows(self) -> int:
        """Number of operations n."""
        return len(self.segment)

    @property
    def segments(self) -> int:
        """Number of (rank, step) pairs."""
        return self.grid.ranks * len(self.steps)

    def place(self, row: int) -> str:
        """What errors call a row."""
        name = self.names[self.operation[row]]
        place = self.place_of(int(self.rank[row]), int(self.step[row]))
        return f"{place} operation={name} at {self.start_ns[row]} ns"

    def place_of(self, rank: int, step: int) -> str:
        """What errors call a rank in a step, by their positions."""
        return f"rank={self.grid.source[rank]} step={self.steps[step]}"


def read_operations(paths: Sequence[Path], mapping: ColumnMapping) -> Operations:
    """Read files of one job.

    Raises:
        InputFileError: a file cannot be read.
        SourceFormatError: a column or the meaning of an operation is missing.
        ValidationError: values that cannot be, such as negative durations.
        RankError: ranks and their places in the grid contradict each other.
    """
    table = _read_table(paths, mapping)
    names, codes = _operation_codes(table, mapping, paths[0])
    rules = tuple(mapping.operations[name] for name in names)
    number, rank = rank_numbers(table)
    steps, step = dense_positions(table, "step")
    sampled = mapping.time.origin is Origin.STEP
    # Times within the step are small: sorting them takes fewer bits.
    within, origin = _within_steps(table, step, len(steps), sampled=sampled)
    segment = rank * np.int64(len(steps)) + step
    # Sorted, ranks and steps come in runs.
    lengths = np.bincount(segment, minlength=len(number) * len(steps))
    order = _issue_order(segment, within, rules, codes)
    table = table.drop("operation", "rank", "step", strict=False)[order]
    grid = rank_grid(number, table, lengths.reshape(len(number), len(steps)).sum(axis=1))
    turn = np.arange(len(lengths))
    step = np.repeat((turn % len(steps)).astype(np.int32), lengths)
    start, end = table["start"].to_numpy(), table["end"].to_numpy()
    if sampled:
        shift = origin[step]
        start, end = start + shift, end + shift

    def at_least(name: str, least: int) -> IntArray:
        if name not in table.columns:
            return np.full(len(start), least, np.int16)
        values: IntArray = table[name].to_numpy()
        return np.maximum(values, np.array(least, values.dtype))

    return Operations(
        names=names,
        rules=rules,
        grid=grid,
        steps=steps,
        rank=np.repeat((turn // len(steps)).astype(np.int32), lengths),
        step=step,
        segment=np.repeat(turn, lengths),
        operation=pl.Series(codes).gather(order).to_numpy(),
        start_ns=start,
        end_ns=end,
        chunk=at_least("chunk", 0),
        microbatch=at_least("microbatch", -1),
        has_chunks="chunk" in table.columns,
        sampled=sampled,
    )


def _within_steps(
    table: pl.DataFrame, step: IntArray, steps: int, *, sampled: bool
) -> tuple[Int64Array, Int64Array]:
    """int64[n], start of every row counted from its step; int64[S], where the steps begin."""
    start = table["start"].to_numpy()
    origin = np.zeros(steps, np.int64)
    if sampled:
        # Laid out one after the other, in the order of their numbers.
        np.maximum.at(origin, step, table["end"].to_numpy())
        return start, np.concatenate([[0], np.cumsum(origin)[:-1]])
    origin += start.max()
    np.minimum.at(origin, step, start)
    return start - origin[step], origin


# --- columns ----------------------------------------------------------------------------------


def _read_table(paths: Sequence[Path], mapping: ColumnMapping) -> pl.DataFrame:
    """The mapped columns under our names, times in ns, absent numbers as -1."""
    frames = []
    for path in paths:
        try:
            frame = _scan(path)
            found = frame.collect_schema()
            frames.append(frame.select(_expressions(found, mapping, path)).collect())
        except (OSError, pl.exceptions.PolarsError) as error:
            raise InputFileError(
                f"cannot be read: {str(error).splitlines()[0]}",
                where=str(path),
                hint="an operation-level log is a Parquet or CSV file with a line of names",
            ) from error
        if not frames[-1].height:
            raise InputFileError("the log has no rows", where=str(path))
        _check_values(frames[-1], path)
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="vertical_relaxed")


def _scan(path: Path) -> pl.LazyFrame:
    first = next(read_blocks(path), b"")
    if first.startswith(b"PAR1"):
        return pl.scan_parquet(path, glob=False)
    return pl.scan_csv(path, glob=False)


def _expressions(found: pl.Schema, mapping: ColumnMapping, path: Path) -> list[pl.Expr]:
    columns = mapping.columns
    unit = mapping.time.unit.in_ns

    def required(name: str, meaning: str) -> str:
        if name not in found:
            raise SourceFormatError(
                f"no column {name!r} ({meaning}); there are {', '.join(found)}",
                where=str(path),
                hint="say with --columns FILE.toml which column holds it",
            )
        return name

    def in_ns(value: pl.Expr, *, whole: bool) -> pl.Expr:
        return value * unit if whole else (value * unit).round().cast(pl.Int64, strict=False)

    start, span = required(columns.start, "start"), required(columns.span, "duration or end")
    whole = found[start].is_integer() and found[span].is_integer()
    wide = pl.Int64 if whole else pl.Float64
    begin, last = pl.col(start).cast(wide), pl.col(span).cast(wide)
    if columns.end is None:
        last = begin + last
    chosen = [
        pl.col(required(columns.operation, "operation")).alias("operation"),
        in_ns(begin, whole=whole).alias("start"),
        in_ns(last, whole=whole).alias("end"),
    ]
    for ours in ("step", "rank", "dp_rank", "stage", "tp_rank", "microbatch", "chunk"):
        name = getattr(columns, ours)
        if name is None or (name not in found and ours not in columns.model_fields_set):
            continue
        value = pl.col(required(name, ours.replace("_", " ")))
        if not found[name].is_integer():
            value = value.cast(pl.Int64)
        value = value.fill_null(-1)
        if mapping.absent not in (None, -1):
            value = pl.when(value == mapping.absent).then(-1).otherwise(value)
        chosen.append(value.alias(ours))
    if not {"rank", "dp_rank", "stage"} & {expression.meta.output_name() for expression in chosen}:
        required(columns.rank or "rank", "rank")
    return chosen


def _check_values(table: pl.DataFrame, path: Path) -> None:
    numbers = [name for name in ("step", "rank", "dp_rank", "stage", "tp_rank") if name in table]
    problems = {
        "has no operation": pl.col("operation").is_null(),
        "has no start": pl.col("start").is_null(),
        "has no end": pl.col("end").is_null(),
        "starts before time 0": pl.col("start") < 0,
        "ends before it starts": pl.col("end") < pl.col("start"),
        "lasts longer than a day (is the unit of time right?)": pl.col("end") - pl.col("start")
        > _LONGEST_NS,
    }
    for name in numbers:
        problems[f"has no or a negative {name}"] = pl.col(name) < 0
    for name, largest in _LARGEST.items():
        if name in table.columns:
            problems[f"has an absurd {name}"] = pl.col(name).cast(pl.Int64) > largest
    if _looks_right(table, numbers):
        return
    counts = table.select(
        rule.sum().alias(str(number)) for number, rule in enumerate(problems.values())
    ).row(0)
    for (problem, rule), count in zip(problems.items(), counts, strict=True):
        if count:
            row = int(table.select(rule.fill_null(value=False).arg_max()).item())
            more = f", and {count - 1} more" if count > 1 else ""
            raise ValidationError(
                f"row {row} {problem}{more}: {dict(table.row(row, named=True))}", where=str(path)
            )


def _looks_right(table: pl.DataFrame, numbers: list[str]) -> bool:
    """The same rules over smallest and largest values: much faster, but cannot tell the row."""
    duration = pl.col("end") - pl.col("start")
    if any(table.null_count().row(0)):
        return False
    start, shortest, longest, *rest = table.select(
        pl.col("start").min(),
        shortest=duration.min(),
        longest=duration.max(),
        **{f"low_{name}": pl.col(name).min() for name in numbers},
        **{f"high_{name}": pl.col(name).max() for name in _LARGEST if name in table.columns},
    ).row(0)
    return bool(
        start >= 0
        and shortest >= 0
        and longest <= _LONGEST_NS
        and min(rest[: len(numbers)], default=0) >= 0
        and all(
            high <= largest
            for high, largest in zip(
                rest[len(numbers) :],
                (largest for name, largest in _LARGEST.items() if name in table.columns),
                strict=True,
            )
        )
    )


def _operation_codes(
    table: pl.DataFrame, mapping: ColumnMapping, path: Path
) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    text = table["operation"]
    if not isinstance(text.dtype, pl.Categorical):
        text = text.cast(pl.String).cast(pl.Categorical)
    physical = text.to_physical().to_numpy()
    seen = np.zeros(int(physical.max()) + 1, np.bool_)
    seen[physical] = True
    present = np.flatnonzero(seen)
    # Where each occurs first; nearly always all occur early.
    first = np.full(len(seen), -1, np.int64)
    for part in (physical[:_EARLY_ROWS], physical):
        if (first[present] < 0).any():
            first[part[::-1]] = np.arange(len(part))[::-1]
    spelled = text.gather(first[present]).cast(pl.String).to_list()
    names = sorted(spelled)
    unknown = [name for name in names if name not in mapping.operations]
    if unknown:
        example = f'[operations."{unknown[0]}"]\nkind = "compute"\nphase = "forward"'
        raise SourceFormatError(
            f"no rule says what the operation {', '.join(map(repr, unknown[:8]))} is",
            where=str(path),
            hint=f"add it to the file given with --columns, such as\n{example}",
        )
    if len(names) > 2**8:
        raise SourceFormatError(f"{len(names)} different operations; at most 256", where=str(path))
    code = {name: number for number, name in enumerate(names)}
    table_of_codes = np.zeros(len(seen), np.uint8)
    table_of_codes[present] = [code[name] for name in spelled]
    return tuple(names), table_of_codes[physical]


# --- order ------------------------------------------------------------------------------------


def _issue_order(
    segment: Int64Array,
    within: Int64Array,
    rules: tuple[OperationRule, ...],
    codes: NDArray[np.uint8],
) -> pl.Series:
    """Row numbers in the order (segment, time within the step, turn, operation)."""
    turn = [
        (_TURN.get(rule.kind, _COMMUNICATION_TURN) if rule.kind.is_communication else _COMPUTE_TURN)
        for rule in rules
    ]
    place = np.empty(len(rules), np.int64)
    place[np.argsort(turn, kind="stable")] = np.arange(len(rules))
    turn_bits = len(rules).bit_length()
    low_bits = int(within.max()).bit_length() + turn_bits
    if low_bits + int(segment.max()).bit_length() <= _MOST_BITS:
        key = segment << low_bits
        key |= within << turn_bits
        key |= place[codes]
        return pl.Series(key).arg_sort()
    keys = pl.DataFrame({"a": segment, "b": within, "c": place[codes]})
    return keys.select(pl.arg_sort_by("a", "b", "c")).to_series()
