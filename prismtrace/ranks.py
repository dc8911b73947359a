"""Sets of ranks as short text: `0-7`, `0-56/8`, `3,1,2`.

8 600 groups over 8 192 ranks must fit into less than 1 MB of header, so a list of ranks is
stored as runs `first-last/stride`, in the order of the list (the order is the group rank).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["MOST_RANKS", "format_ranks", "name_ranks", "parse_numbers", "parse_ranks"]

MOST_RANKS = 2**22
"""The largest job that is believed: a larger number is a mistake, and would fill the memory."""

_RUN = re.compile(r"([0-9]+)(?:-([0-9]+)(?:/([0-9]+))?)?")
_LONGEST_RUN = 200


def format_ranks(ranks: Sequence[int], *, strided: bool = True) -> str:
    """Write ranks as runs, keeping their order; ``[0, 8, 16, 3]`` becomes ``"0-16/8,3"``.

    Without `strided` only runs of consecutive numbers are joined, as people write them.
    """
    return ",".join(_runs(list(ranks), strided=strided))


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: ``"rank 2"``, ``"ranks 0-3"``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + format_ranks(ranks)


def _runs(ranks: list[int], *, strided: bool) -> Iterable[str]:
    i = 0
    while i < len(ranks):
        first = ranks[i]
        stride = ranks[i + 1] - first if i + 1 < len(ranks) else 0
        if not strided and stride != 1:
            stride = 0
        j = i
        while stride > 0 and j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == stride:
            j += 1
        # A strided pair is no shorter than two single ranks and would swallow the start of
        # the run that follows it.
        if j - i >= 2 or (j - i == 1 and stride == 1):
            yield f"{first}-{ranks[j]}" + (f"/{stride}" if stride != 1 else "")
            i = j + 1
        else:
            yield str(first)
            i += 1


def parse_ranks(text: str) -> tuple[int, ...]:
    """Read what `format_ranks` writes.

    Raises:
        ValueError: the text is not a list of runs, or a rank is not below MOST_RANKS.
    """
    return parse_numbers(text, "rank", MOST_RANKS)


def parse_numbers(text: str, what: str, below: int) -> tuple[int, ...]:
    """As `parse_ranks`, numbers of something else, such as steps, all of them below a limit.

    Raises:
        ValueError: the text is not a list of runs, a number is not below the limit, or there are
            as many numbers as ranks can be.
    """
    numbers: list[int] = []
    for part in text.split(",") if text.strip() else []:
        # More digits than any number has; Python refuses to read thousands of them.
        match = _RUN.fullmatch(part.strip()) if len(part) < _LONGEST_RUN else None
        if match is None:
            raise ValueError(
                f"not a list of {what}s: {_shortened(text)!r} (expected e.g. '0-7' or '0-56/8')"
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        stride = int(match[3]) if match[3] else 1
        if last < first or stride < 1:
            raise ValueError(f"a run of {what}s must ascend: {part.strip()!r}")
        if last >= below:
            raise ValueError(f"{what}s go up to {below - 1}: {part.strip()!r}")
        if len(numbers) + (last - first) // stride >= MOST_RANKS:
            raise ValueError(f"more than {MOST_RANKS} {what}s: {part.strip()!r}")
        numbers.extend(range(first, last + 1, stride))
    return tuple(numbers)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_RUN else text[:_LONGEST_RUN] + "…"
