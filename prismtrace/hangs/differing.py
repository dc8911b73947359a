"""Members of a group that enqueued different collectives under the same number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prismtrace.converters.sequences import OpSequence, agree

__all__ = ["Difference", "first_difference"]

_LOOKAHEAD = 8


@dataclass(frozen=True)
class Difference:
    """The first collective in which members differ."""

    number: int
    ranks: tuple[int, ...]
    """Those that differ from most; all of them when there is no majority."""
    what: dict[int, str]
    """Rank -> what it enqueued."""
    guess: str = ""
    """What may have happened, when one explanation fits the operations that follow."""

    def instead_of(self, rank: int) -> str:
        """What most of the others enqueued, of those that enqueued something else than this rank."""
        others = [text for text in self.what.values() if text != self.what.get(rank)]
        # Of as many the first, so that the answer hangs on nothing else.
        return Counter(others).most_common(1)[0][0] if others else self.what[rank]


def first_difference(
    sequences: Mapping[int, OpSequence], numbers: Mapping[int, Sequence[int]]
) -> Difference | None:
    """Find it; null when all common collectives look alike.

    Args:
        sequences: rank -> its collectives.
        numbers: rank -> number of each of them.
    """
    reference = max(sequences, key=lambda rank: (len(sequences[rank]), -rank))
    place = {number: k for k, number in enumerate(numbers[reference])}
    first: int | None = None
    for rank, sequence in sequences.items():
        pairs = [(place[n], k) for k, n in enumerate(numbers[rank]) if n in place]
        if rank == reference or not pairs:
            continue
        at, bt = np.array(pairs, dtype=np.int64).T
        wrong = np.flatnonzero(~agree(sequences[reference], sequence, at, bt, p2p=False))
        if len(wrong):
            number = numbers[rank][int(bt[wrong[0]])]
            first = number if first is None else min(first, number)
    if first is None:
        return None
    where = {rank: list(found).index(first) for rank, found in numbers.items() if first in found}
    return _difference(sequences, where, first)


def _difference(
    sequences: Mapping[int, OpSequence], where: Mapping[int, int], number: int
) -> Difference:
    what = {rank: _words(sequences[rank], k) for rank, k in where.items()}
    # Ranks that look alike; what one rank does not tell agrees with anything.
    alike: dict[int, list[int]] = {
        rank: [
            other for other, j in where.items() if _same(sequences[rank], k, sequences[other], j)
        ]
        for rank, k in where.items()
    }
    sizes = Counter({rank: len(others) for rank, others in alike.items()})
    usual, most = max(sizes.items(), key=lambda item: (item[1], -item[0]))
    if 2 * most <= len(where):
        return Difference(number, tuple(sorted(where)), what)
    odd = tuple(sorted(rank for rank in where if rank not in alike[usual]))
    guess = _guess(sequences[usual], where[usual], sequences[odd[0]], where[odd[0]])
    return Difference(number, odd, what, guess if len(odd) == 1 else "")


def _words(sequence: OpSequence, k: int) -> str:
    return sequence.describe(k).rstrip(",")


def _same(a: OpSequence, i: int, b: OpSequence, j: int) -> bool:
    at, bt = np.array([i]), np.array([j])
    return bool(agree(a, b, at, bt, p2p=False)[0])


def _guess(usual: OpSequence, i: int, odd: OpSequence, j: int) -> str:
    """Whether the odd one has left an operation out, or has one more."""
    if _follows(usual, i + 1, odd, j):
        return f"as if it had left out {_words(usual, i)}"
    if _follows(odd, j + 1, usual, i):
        return f"as if {_words(odd, j)} were one more than the others have"
    return ""


def _follows(a: OpSequence, i: int, b: OpSequence, j: int) -> bool:
    size = min(_LOOKAHEAD, len(a) - i, len(b) - j)
    if size < 1:
        return False
    at, bt = np.arange(i, i + size), np.arange(j, j + size)
    return bool(agree(a, b, at, bt, p2p=False).all())
