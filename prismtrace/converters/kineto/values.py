"""Columns from what JSON gave: exact integers, exact nanoseconds, free-form arguments."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

__all__ = ["free_series", "int64", "int64_series", "nanoseconds"]

_LARGEST_TIME_US = 9.2e15  # beyond it int64 nanoseconds overflow


def int64(value: Any, counts: Counter[str]) -> int | None:
    """`value` as int64: an int, an integral number or a numeric string; None otherwise.

    What is neither null nor an int64 is counted as `dropped-field`.
    """
    if value is None:
        return None
    try:
        number = value if type(value) is int else int(value)
        same = number is value or (not isinstance(value, bool) and number == Decimal(value))
        if same and -(2**63) <= number < 2**63:
            return number
    except (TypeError, ValueError, ArithmeticError):
        pass
    counts["dropped-field"] += 1
    return None


def int64_series(values: list[Any], counts: Counter[str]) -> pl.Series:
    """An Int64 series; fast when every value is an int64 or None."""
    try:
        return pl.Series(values, dtype=pl.Int64)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        return pl.Series([int64(v, counts) for v in values], dtype=pl.Int64)


def nanoseconds(times_us: list[Any], counts: Counter[str]) -> npt.NDArray[np.int64]:
    """Microseconds (int, float or Decimal) as exact int64 nanoseconds.

    Rounding `us * 1000` is off by one above 4.5e12 us, because the product needs more bits than
    a float64 has. Whole and fractional part are exact each, so they are converted apart.
    Times beyond int64 become 0 and are counted as `dropped-field`.
    """
    us = np.array(times_us, dtype=np.float64)
    bad = ~(np.abs(us) < _LARGEST_TIME_US)
    if bad.any():
        counts["dropped-field"] += int(bad.sum())
        times_us = [0 if b else t for t, b in zip(times_us, bad.tolist(), strict=True)]
        us[bad] = 0
    if Decimal in set(map(type, times_us)):
        exact = [int((Decimal(t) * 1000).to_integral_value(ROUND_HALF_EVEN)) for t in times_us]
        return np.array(exact, dtype=np.int64)
    whole = np.floor(us)
    ns: npt.NDArray[np.int64] = whole.astype(np.int64) * 1000
    ns += np.rint((us - whole) * 1000).astype(np.int64)
    return ns


def free_series(name: str, values: Sequence[Any]) -> pl.Series:
    """A column of arguments whose type nobody declared: Boolean, Int64, Float64 or String.

    Lists and objects become JSON text; so does everything where kinds are mixed.
    """
    plain = [_plain(v) for v in values]
    kinds = {type(v) for v in plain if v is not None}
    if kinds == {bool}:
        return pl.Series(name, plain, dtype=pl.Boolean)
    if kinds == {int} and all(v is None or -(2**63) <= v < 2**63 for v in plain):
        return pl.Series(name, plain, dtype=pl.Int64)
    if kinds and kinds <= {int, float}:
        return pl.Series(name, [None if v is None else float(v) for v in plain], dtype=pl.Float64)
    texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in plain]
    return pl.Series(name, texts, dtype=pl.String)


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode(errors="replace") or None
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return value
