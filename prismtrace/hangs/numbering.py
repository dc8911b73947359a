"""Which operations of a group's members are the same collective, when a job stands still.

A trace is refused when ranks do not fit together; here that is what is looked for, so that the
recorder's numbers are believed, unless laying the sequences on each other explains much more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prismtrace.converters.sequences import OpSequence, agree, best_overlay

__all__ = ["Numbered", "number_collectives"]


@dataclass(frozen=True)
class Numbered:
    """The collectives of a group: equal numbers are the same one."""

    numbers: dict[int, list[int]]
    """Rank -> number of each of its operations, ascending."""
    seq: dict[int, int | None]
    """Number -> the recorder's own."""
    by_order: bool
    """The recorder's numbers contradict each other and were not used."""


def number_collectives(
    sequences: Mapping[int, OpSequence], seqs: Mapping[int, Sequence[int | None]]
) -> Numbered:
    """Number the operations of all members.

    Args:
        sequences: rank -> its operations in the group, oldest first.
        seqs: rank -> the recorder's numbers of the same operations.
    """
    reference = max(sequences, key=lambda rank: (len(sequences[rank]), -rank))
    by_seq = _by_seq(seqs)
    # Where each rank counts for itself, shifted sequences agree where numbers do not.
    if by_seq is not None and len(sequences) > 1:
        agreeing, common = _agreeing(sequences, by_seq, reference)
        if 2 * agreeing >= common:
            return _named(by_seq, seqs, by_order=False)
    by_order = {
        rank: [k + (0 if rank == reference else shift) for k in range(len(sequence))]
        for rank, sequence in sequences.items()
        for shift in [best_overlay(sequences[reference].without_steps(), sequence).shift]
    }
    if by_seq is None:
        return _named(by_order, seqs, by_order=False)
    better = _agreeing(sequences, by_order, reference)[0] > _agreeing(sequences, by_seq, reference)[
        0
    ] + len(sequences)
    return _named(by_order if better else by_seq, seqs, by_order=better)


def _by_seq(seqs: Mapping[int, Sequence[int | None]]) -> dict[int, list[int]] | None:
    """Numbers from the recorder's; operations of one launch share one and keep their order."""
    keys: dict[int, list[tuple[int, int]]] = {}
    for rank, values in seqs.items():
        seen: Counter[int] = Counter()
        keys[rank] = []
        for value in values:
            if value is None:
                return None
            keys[rank].append((value, seen[value]))
            seen[value] += 1
        if any(a >= b for a, b in zip(keys[rank], keys[rank][1:], strict=False)):
            return None
    order = {key: number for number, key in enumerate(sorted(set().union(*keys.values())))}
    return {rank: [order[key] for key in values] for rank, values in keys.items()}


def _agreeing(
    sequences: Mapping[int, OpSequence], numbers: Mapping[int, Sequence[int]], reference: int
) -> tuple[int, int]:
    """Operations that look like the reference's of the same number, and those in common."""
    place = {number: k for k, number in enumerate(numbers[reference])}
    looking_alike = common = 0
    for rank, sequence in sequences.items():
        pairs = [(place[n], k) for k, n in enumerate(numbers[rank]) if n in place]
        if rank == reference or not pairs:
            continue
        at, bt = np.array(pairs, dtype=np.int64).T
        looking_alike += int(agree(sequences[reference], sequence, at, bt, p2p=False).sum())
        common += len(pairs)
    return looking_alike, common


def _named(
    numbers: dict[int, list[int]], seqs: Mapping[int, Sequence[int | None]], *, by_order: bool
) -> Numbered:
    seq: dict[int, int | None] = {}
    for rank in sorted(numbers):
        for number, value in zip(numbers[rank], seqs[rank], strict=True):
            seq.setdefault(number, value)
    return Numbered(numbers, seq, by_order)
