"""Is there enough memory?  Asked before it is taken: a process that runs out is just killed."""

from __future__ import annotations

from pathlib import Path

from prismcalib.errors import TooLargeError

__all__ = ["available_bytes", "require_memory"]

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
# Where containers are told their limit: version 2 of control groups, and version 1.
_LIMITS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_HINT = (
    "use a machine with more memory, make the trace smaller with `prismcalib coarsen`, or take "
    "fewer steps"
)


def available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    machine = _numbers(_lines(_MEMORY)).get("MemAvailable:")
    known = [] if machine is None else [machine * 1024]
    for folder, limit, used in _LIMITS:
        most, now = (_first_number(_GROUP / folder / name) for name in (limit, used))
        if most is not None and now is not None:
            # Files that were read count as used, but make room when asked.
            stat = _numbers(_lines(_GROUP / folder / "memory.stat"))
            kept = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            known.append(most - now + kept)
    return min(known, default=None)


def require_memory(needed: int, what: str) -> None:
    """Refuse what would not fit.

    Args:
        needed: bytes, an estimate.
        what: that needs them, for people.

    Raises:
        TooLargeError: less is available.
    """
    there = available_bytes()
    if there is not None and needed > there:
        raise TooLargeError(
            f"{what} would take about {needed / 2**30:.1f} GiB of memory, "
            f"{there / 2**30:.1f} GiB are available",
            hint=_HINT,
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []


def _numbers(lines: list[str]) -> dict[str, int]:
    """The number behind each first word."""
    words = [line.split() for line in lines]
    return {name: int(value) for name, value, *_ in filter(_is_pair, words) if value.isdigit()}


def _is_pair(words: list[str]) -> bool:
    return len(words) > 1


def _first_number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
