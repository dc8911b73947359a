"""Several measurements of the same rows become one value each, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prismcalib.assembly import Values
from prismcalib.graph import Int64Array
from prismcalib.rows import Rows, runs

__all__ = ["Reduce", "combine", "part_of", "pool_steps", "reduce_samples"]

Reduce = Literal["median", "mean", "min", "last"]
"""What one duration becomes of those of several steps or executions."""

_LARGEST = np.iinfo(np.int64).max


def combine(samples: Sequence[Values], how: Reduce) -> Values:
    """One value per row from executions of the same rows.

    Transfers are combined within the best source that a row has only: a measured time and one
    from a model are not averaged.
    """
    if len(samples) == 1:
        return samples[0]
    duration = np.stack([sample.duration for sample in samples])
    source = np.stack([sample.source for sample in samples])
    best = source.min(axis=0)
    reduced, spread = reduce_samples(duration, how, source == best)
    return Values(
        duration=reduced,
        source=best,
        gap=_reduced([sample.gap for sample in samples], how),
        release=_reduced([sample.release for sample in samples], how),
        spread=spread,
    )


def _reduced(samples: Sequence[Int64Array | None], how: Reduce) -> Int64Array | None:
    given = [sample for sample in samples if sample is not None]
    if not given:
        return None
    zeros = np.zeros_like(given[0])
    return reduce_samples(np.stack([zeros if s is None else s for s in samples]), how)[0]


def reduce_samples(
    samples: Int64Array, how: Reduce, valid: NDArray[np.bool_] | None = None
) -> tuple[Int64Array, Int64Array]:
    """Reduce int64[k, n] over k; returns the values and largest minus least, int64[n] each.

    Every column needs a valid sample. The median of an even number is the mean of the middle
    two, rounded down; the mean is rounded down.
    """
    k, n = samples.shape
    if valid is None or valid.all():
        valid = np.ones((1, n), np.bool_)
        count = np.full(n, k)
    else:
        count = valid.sum(axis=0)
    ordered = np.sort(np.where(valid, samples, _LARGEST), axis=0)
    column = np.arange(n)
    largest = ordered[count - 1, column]
    spread = largest - ordered[0]
    if how == "min":
        return ordered[0], spread
    if how == "median":
        low, high = ordered[(count - 1) // 2, column], ordered[count // 2, column]
        return low + (high - low) // 2, spread
    if how == "mean":
        return np.where(valid, samples, 0).sum(axis=0) // count, spread
    last = k - 1 - np.argmax(np.broadcast_to(valid, samples.shape)[::-1], axis=0)
    return samples[last, column], spread


def part_of(values: Values, rows: Int64Array | slice) -> Values:
    """The values of some rows."""

    def chosen(column: Int64Array | None) -> Int64Array | None:
        return None if column is None else column[rows]

    return Values(
        duration=values.duration[rows],
        source=values.source[rows],
        gap=chosen(values.gap),
        release=chosen(values.release),
        spread=chosen(values.spread),
    )


def pool_steps(rows: Rows, samples: Sequence[Values], how: Reduce, warmup: int) -> Values:
    """One value for the same operation of all steps of a rank, given back to every step.

    The first `warmup` steps are left out, where later ones exist.  Steps of other operations than
    most of a rank's steps have, such as DDP's before it cuts its buckets anew, keep their own
    values.
    """
    single = combine(samples, how)
    duration, source = single.duration.copy(), single.source.copy()
    spread = np.zeros(len(rows), np.int64) if single.spread is None else single.spread.copy()
    gap = None if single.gap is None else single.gap.copy()
    for _, first, last in rows.rank_runs:
        blocks = [
            (first + begin, first + end)
            for begin, end in runs(rows.step[first:last])
            if rows.step[first + begin] >= 0
        ]
        used, blocks = _alike(rows, blocks, warmup)
        if len(blocks) < 2:
            continue
        stacked = [slice(*block) for block in used]
        values = np.concatenate([[s.duration[part] for part in stacked] for s in samples])
        sources = np.concatenate([[s.source[part] for part in stacked] for s in samples])
        best = sources.min(axis=0)
        value, width = reduce_samples(values, how, sources == best)
        gaps = None
        if gap is not None:
            none = np.zeros(len(rows), np.int64)
            kept = [none if s.gap is None else s.gap for s in samples]
            gaps = reduce_samples(
                np.concatenate([[g[part] for part in stacked] for g in kept]), how
            )
        for begin, end in blocks:
            duration[begin:end], spread[begin:end] = value, width
            source[begin:end] = best
            if gap is not None and gaps is not None:
                gap[begin:end] = gaps[0]
    return replace(single, duration=duration, source=source, gap=gap, spread=spread)


_Block = tuple[int, int]
"""First row of a step of a rank, and the one after its last."""


def _alike(rows: Rows, blocks: list[_Block], warmup: int) -> tuple[list[_Block], list[_Block]]:
    """Steps of the same kinds of operations in the same groups, most of those after the warm-up.

    Returns:
        Those after the warm-up (the last step if there is none), and with those in the warm-up.
    """
    shapes: dict[bytes, list[int]] = {}
    for number, (begin, end) in enumerate(blocks):
        shape = rows.kind[begin:end].tobytes() + rows.group[begin:end].tobytes()
        shapes.setdefault(shape, []).append(number)
    first = min(warmup, len(blocks) - 1)
    most: list[int] = max(
        shapes.values(),
        key=lambda numbers: (sum(one >= first for one in numbers), numbers[-1]),
        default=[],
    )
    return [blocks[one] for one in most if one >= first], [blocks[one] for one in most]
