"""Durations as people write them: `500us`, `630.8 ms`."""

from __future__ import annotations

import re
from decimal import Decimal

__all__ = ["format_ns", "parse_ns"]

_UNITS = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")


def parse_ns(text: str) -> int:
    """Nanoseconds of a text such as `500us`, `1.5 ms` or `2s`.

    Raises:
        ValueError: not a number with one of the units ns, us, ms, s; or more than 64 bits hold.
    """
    match = _DURATION.fullmatch(text.strip())
    shown = text if len(text) <= 40 else text[:40] + "..."
    if match is None:
        raise ValueError(f"not a duration: {shown!r} (expected e.g. 500us, 1.5ms or 2s)")
    ns = round(Decimal(match[1]) * _UNITS[match[2]])
    if ns >= 2**63:
        raise ValueError(f"too long a duration: {shown!r} (no more than 292 years)")
    return ns


def format_ns(ns: int) -> str:
    """A duration with the unit that suits its size, to three decimals."""
    for unit, scale in (("s", 10**10), ("ms", 10**6), ("us", 10**3)):
        if abs(ns) >= scale:
            return f"{ns / _UNITS[unit]:,.3f} {unit}"
    return f"{ns} ns"
