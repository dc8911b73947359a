"""The rows of one spool: later words about a node joined to it, values checked, times ordered."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl

from prismtrace.errors import ValidationError
from prismtrace.spool import NODE_FIELDS, Spool
from prismtrace.trace import node_schema

__all__ = ["rank_rows"]

_SAID_LATER = ("mem_bytes", "mem_peak_bytes")
"""Columns that only later words about a node fill."""
_COLUMNS = (*NODE_FIELDS, *_SAID_LATER)
_PLACE = {name: position for position, name in enumerate(_COLUMNS)}
_START, _DURATION = _PLACE["start_ns"], _PLACE["dur_ns"]
_LOCAL = {"group": pl.Int32, "stream": pl.Int32}
"""Numbers within the rank; `assemble` puts those of the trace in their place."""


def rank_rows(spool: Spool, counts: Counter[str]) -> pl.DataFrame:
    """Rows in order of their index: columns `rank`, `NODE_FIELDS`, and what is only said later.

    Counted are communications whose end nobody saw (``unfinished-communication``, they end
    when they start) and rows that were recorded while earlier ones were lost (``lost-rows``).

    Raises:
        ValidationError: a value does not fit its column, or a span ends before it starts.
    """
    where = f"{spool.path} rank={spool.rank}"
    rows = _joined(spool, counts)
    columns = list(zip(*rows, strict=True)) or [() for _ in _COLUMNS]
    series = []
    for name, values in zip(_COLUMNS, columns, strict=True):
        series.append(
            _lists(name, values, where) if name == "deps" else _series(name, values, where)
        )
    frame = pl.DataFrame(series)
    first, last = spool.facts.get("steps_from", 0), spool.facts.get("steps_until", frame.height)
    of_step = pl.col("index").is_between(first, last, closed="left")
    frame = frame.with_columns(step=pl.when(of_step).then(pl.col("step")))
    unfinished = pl.col("start_ns").is_not_null() & pl.col("dur_ns").is_null()
    counts["unfinished-communication"] += frame.select(unfinished.sum()).item()
    frame = frame.with_columns(
        dur_ns=pl.when(unfinished).then(0).otherwise(pl.col("dur_ns")),
        rank=pl.lit(spool.rank, dtype=pl.Int32),
    )
    backward = frame.filter(pl.col("dur_ns") < 0)
    if not backward.is_empty():
        raise ValidationError(
            f"span {backward['name'][0]!r} ends before it starts",
            where=f"{where} index={backward['index'][0]}",
            hint="times are start_ns, end_ns of time.perf_counter_ns()",
        )
    return frame


def _joined(spool: Spool, counts: Counter[str]) -> list[list[Any]]:
    """Nodes 0, 1, … up to the first that is missing, with what was said about them later."""
    rows = sorted(spool.nodes, key=lambda row: row[0])
    whole = next((at for at, row in enumerate(rows) if row[0] != at), len(rows))
    counts["lost-rows"] += len(rows) - whole
    del rows[whole:]
    for row in rows:
        row.extend((None, None))
    for index, start, duration in spool.timed:
        if index < whole:
            rows[index][_START], rows[index][_DURATION] = start, duration
    for index, values in spool.amended:
        if index < whole:
            for name, value in values.items():
                rows[index][_PLACE[name]] = value
    if spool.facts.get("timed_later") and not spool.ended:
        # Cut off before it said when its last nodes were.
        timed = next((at for at, row in enumerate(rows) if row[_START] is None), len(rows))
        counts["lost-rows"] += len(rows) - timed
        del rows[timed:]
    counts["host-times"] += spool.facts.get("host_times", 0)
    counts["ends-at-wait"] += spool.facts.get("ends_at_wait", 0)
    return rows


def _series(name: str, values: tuple[Any, ...], where: str) -> pl.Series:
    dtype = _LOCAL.get(name) or node_schema()[name]
    plain = pl.String() if isinstance(dtype, pl.Enum | pl.Categorical) else dtype
    try:
        return pl.Series(name, values, dtype=plain).cast(dtype)
    except (TypeError, OverflowError, pl.exceptions.PolarsError) as error:
        known = f", one of {', '.join(dtype.categories)}" if isinstance(dtype, pl.Enum) else ""
        raise ValidationError(
            f"a recorded {name} is no {dtype.base_type()}{known}",
            where=where,
            hint="columns are those of docs/reference/columns.md",
        ) from error


def _lists(name: str, values: tuple[list[int], ...], where: str) -> pl.Series:
    """A column of lists, of which few are different: making each on its own is slow."""
    codes: dict[tuple[int, ...], int] = {}
    numbers = [codes.setdefault(tuple(value), len(codes)) for value in values]
    return _series(name, tuple(map(list, codes)), where).gather(numbers)
