"""A log as arrays: the chosen columns of Parquet or CSV files, checked, in issue order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismtrace.converters.content import read_blocks
from prismtrace.converters.ops.cutting import cut_into_parts
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
from prismtrace.converters.ops.ordering import IssueOrder, Runs
from prismtrace.errors import InputFileError, RankError, SourceFormatError, ValidationError

__all__ = ["Operations", "read_operations"]

_PLACE = ("step", "rank", "dp_rank", "stage", "tp_rank")

_LARGEST = {
    **dict.fromkeys(("rank", "dp_rank", "stage", "tp_rank"), LARGEST_NUMBER),
    "step": 2**31 - 1,
    "microbatch": 2**31 - 1,
    "chunk": 2**10,
}
_EARLY_ROWS = 2**16
# A day in the unit of the trace: beyond, the unit of the mapping is wrong.
_LONGEST_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, eq=False)
class Operations:
    """The n rows of a log, or of a part of it, sorted by (rank, step, start).

    Attributes:
        names, rules: by operation code.
        grid: the R ranks.
        steps: int64[S], numbers of the steps as in the log.
        begins: int64[R * S + 1], where in the log the rows of each rank and step begin.
        ranks: int32[R * S], the rank in each pair of rank and step.
        within: which pairs of rank and step, numbered ``rank * S + step``, these rows are of.
        segment: int32[n], number of the pair of rank and step; does not decrease.
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
    begins: Int64Array
    ranks: NDArray[np.int32]
    within: range
    segment: NDArray[np.int32]
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
        return len(self.within)

    @property
    def row(self) -> int:
        """Where in the log the first row is."""
        return int(self.begins[self.within.start])

    def parts(self) -> list[Operations]:
        """The log cut where no dependency within a rank crosses: between ranks, or steps."""
        stride = 1 if self.sampled else len(self.steps)
        return [
            self._part(range(units.start * stride, units.stop * stride))
            for units in cut_into_parts(self.begins[::stride])
        ]

    def _part(self, within: range) -> Operations:
        rows = slice(self.begins[within.start], self.begins[within.stop])
        columns = {
            name: getattr(self, name)[rows]
            for name in ("segment", "operation", "start_ns", "end_ns", "chunk", "microbatch")
        }
        return replace(self, within=within, **columns)

    def segment_of(self, rows: Int64Array) -> Int64Array:
        """int64[m], positions of rows in `within`."""
        return self.segment[rows] - np.int64(self.within.start)

    def rank_of(self, rows: Int64Array) -> IntArray:
        """int32[m], positions of the rows' ranks in the grid."""
        return self.ranks[self.segment[rows]]

    def step_of(self, rows: Int64Array) -> IntArray:
        """int32[m], positions of the rows' steps in `steps`."""
        return self.segment[rows] % np.int32(len(self.steps))

    def turn_of(self, rows: Int64Array) -> IntArray:
        """int32[m], equal for rows that the chains of a rank run through."""
        return self.segment[rows] if self.sampled else self.rank_of(rows)

    def counts(self, rows: Int64Array) -> Int64Array:
        """int64[segments], how many of some rows each rank has in each step."""
        return np.bincount(self.segment_of(rows), minlength=self.segments)

    def place(self, row: int) -> str:
        """What errors call a row."""
        name = self.names[self.operation[row]]
        place = self.place_of(*divmod(int(self.segment[row]), len(self.steps)))
        return f"{place} operation={name} at {self.start_ns[row]} ns"

    def place_of_segment(self, segment: int) -> str:
        """What errors call a position in `within`."""
        return self.place_of(*divmod(self.within[segment], len(self.steps)))

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
    table, files = _read_table(paths, mapping)
    names, codes = _operation_codes(table, mapping, paths[0])
    rules = tuple(mapping.operations[name] for name in names)
    first = _first_of_runs(table, files)
    places = table.select(name for name in _PLACE if name in table.columns)[first]
    number, rank = rank_numbers(places)
    steps, step = dense_positions(places, "step")
    grid = rank_grid(number, places, rank)
    runs = Runs(first, table.height, step, rank * np.int64(len(steps)) + step)
    if len(paths) > 1:
        _refuse_repeated(paths, files, runs, number, steps)
    lengths = runs.lengths(len(number) * len(steps))
    begins = np.concatenate([[0], np.cumsum(lengths)])
    columns = {
        "operation": codes,
        "start": table["start"].to_numpy(),
        "end": table["end"].to_numpy(),
        "chunk": _at_least(0, table, "chunk"),
        "microbatch": _at_least(-1, table, "microbatch"),
    }
    sampled = mapping.time.origin is Origin.STEP
    origin = shift = np.zeros(len(steps), np.int64)
    if sampled:
        # Laid out one after the other, in the order of their numbers.
        ends = np.cumsum(runs.highest(columns["end"], len(steps)))
        shift = np.concatenate([[0], ends[:-1]])
    else:
        origin = runs.lowest(columns["start"], len(steps))
    ordered = IssueOrder(runs, begins, rules).applied_to(columns, origin, shift)
    segments = np.arange(len(lengths), dtype=np.int32)
    return Operations(
        names=names,
        rules=rules,
        grid=grid,
        steps=steps,
        begins=begins,
        within=range(len(lengths)),
        ranks=segments // np.int32(len(steps)),
        segment=np.repeat(segments, lengths),
        operation=ordered["operation"].view(np.uint8),
        start_ns=ordered["start"],
        end_ns=ordered["end"],
        chunk=ordered["chunk"],
        microbatch=ordered["microbatch"],
        has_chunks="chunk" in table.columns,
        sampled=sampled,
    )


def _at_least(least: int, table: pl.DataFrame, name: str) -> IntArray:
    """int[n], a column without what is below; where there is none, the least everywhere."""
    if name not in table.columns:
        return np.full(table.height, least, np.int16)
    values: IntArray = table[name].to_numpy()
    return values if values.min() >= least else np.maximum(values, np.array(least, values.dtype))


def _first_of_runs(table: pl.DataFrame, files: Int64Array) -> Int64Array:
    """The first of every run of rows that are of one rank and step: logs are written in runs.

    None goes on in the next file; `files` says where each begins.
    """
    new = np.zeros(table.height, np.bool_)
    new[files] = True
    for name in _PLACE:
        if name in table.columns:
            values = table[name].to_numpy()
            new[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(new)


def _refuse_repeated(
    paths: Sequence[Path], files: Int64Array, runs: Runs, number: Int64Array, steps: Int64Array
) -> None:
    """Files may hold other ranks or other steps of a job, not the same ones again.

    Raises:
        RankError: a rank is in two files in the same step.
    """
    owner = np.full(len(number) * len(steps), -1, np.int32)
    ends = np.searchsorted(runs.first, [*files[1:], runs.rows])
    begin = 0
    for file, end in enumerate(ends):
        own = runs.segment[begin:end]
        again = own[owner[own] >= 0]
        if len(again):
            rank, step = divmod(int(again.min()), len(steps))
            raise RankError(
                f"rank {number[rank]} is in two files in step {steps[step]}",
                where=f"{paths[owner[again.min()]]} and {paths[file]}",
                hint="give the log of one run, once; its files may be several, with other ranks "
                "or other steps in each",
            )
        owner[own] = file
        begin = end


# --- columns ----------------------------------------------------------------------------------


def _read_table(paths: Sequence[Path], mapping: ColumnMapping) -> tuple[pl.DataFrame, Int64Array]:
    """The mapped columns under our names, times in ns, absent numbers as -1.

    Beside them, int64[files], the first row of each file.
    """
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
            raise InputFileError(
                "the log has no rows", where=str(path), hint="check what wrote it, or leave it out"
            )
        _check_values(frames[-1], path)
    table = frames[0] if len(frames) == 1 else pl.concat(frames, how="vertical_relaxed")
    return table, np.cumsum([0, *(frame.height for frame in frames[:-1])], dtype=np.int64)


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
                f"row {row} {problem}{more}: {dict(table.row(row, named=True))}",
                where=str(path),
                hint="mend the row, or say with --columns what the columns mean",
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
        raise SourceFormatError(
            f"{len(names)} different operations; at most 256",
            where=str(path),
            hint="take numbers out of their names, which belong into columns of their own",
        )
    code = {name: number for number, name in enumerate(names)}
    table_of_codes = np.zeros(len(seen), np.uint8)
    table_of_codes[present] = [code[name] for name in spelled]
    return tuple(names), table_of_codes[physical]
