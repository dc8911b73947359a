"""Reductions bit for bit as gloo's ring computes them.

gloo's ring all-reduce (gloo/allreduce.cc) cuts the data into segments: their number is
the larger of the number of started MiB and twice the ring's size, rounded up to a multiple of the
ring's size N. Chunk c is the c-th N-th of the segments. It starts its way on rank c - 1 and
moves downwards, so its elements are x[c-1] + x[c-2] + ... + x[c-N] (ranks modulo N), added from
the left. Its reduce works alike. Neither the machine nor the timing takes part in that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from prismtrace.schema import ReduceOp

__all__ = ["FOLD_ORDER", "Chunk", "Spread", "chunks", "reduce_in_order"]

Tensor = Any

FOLD_ORDER = "gloo-ring"
"""What headers call it."""

_MOST_SEGMENT_BYTES = 1 << 20


class Chunk(NamedTuple):
    """Elements from `start` to `stop` that are folded over `members` from the left."""

    start: int
    stop: int
    members: tuple[int, ...]


def chunks(elements: int, itemsize: int, size: int) -> Iterator[Chunk]:
    """The chunks of a reduction, in order; empty ones are left out.

    Args:
        elements: number of elements of the tensor.
        itemsize: bytes of an element.
        size: members of the group.
    """
    nbytes = elements * itemsize
    # A segment holds whole elements, also where they do not divide a MiB.
    most = itemsize * max(1, _MOST_SEGMENT_BYTES // itemsize)
    segments = _up(max(-(-nbytes // most), 2 * size), size)
    segment = _up(-(-nbytes // segments), itemsize)
    step = segment * (segments // size) // itemsize
    for place in range(size):
        start, stop = min(elements, place * step), min(elements, (place + 1) * step)
        if start < stop:
            yield Chunk(start, stop, tuple((place - 1 - hop) % size for hop in range(size)))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _max(total: Tensor, other: Tensor) -> None:
    # As std::max(other, total): the new one stays unless it is less; nothing is less than NaN.
    torch.where(other < total, total, other, out=total)


def _min(total: Tensor, other: Tensor) -> None:
    torch.where(total < other, total, other, out=total)


def _add(total: Tensor, other: Tensor) -> None:
    if total.dtype is torch.bool:
        total.logical_or_(other)
    else:
        total.add_(other)


def _multiply(total: Tensor, other: Tensor) -> None:
    if total.dtype is torch.bool:
        total.logical_and_(other)
    else:
        total.mul_(other)


_FOLDS: dict[ReduceOp, Callable[[Tensor, Tensor], object]] = {
    ReduceOp.SUM: _add,
    ReduceOp.AVG: _add,
    ReduceOp.PREMUL_SUM: _add,
    ReduceOp.PRODUCT: _multiply,
    ReduceOp.MIN: _min,
    ReduceOp.MAX: _max,
    ReduceOp.BAND: lambda total, other: total.bitwise_and_(other),
    ReduceOp.BOR: lambda total, other: total.bitwise_or_(other),
    ReduceOp.BXOR: lambda total, other: total.bitwise_xor_(other),
}


Spread = Callable[[Callable[[Chunk], Tensor], Iterable[Chunk]], Iterable[Tensor]]
"""As `map`, perhaps in several threads."""


def reduce_in_order(
    read: Callable[[int, int, int], Tensor],
    elements: int,
    itemsize: int,
    size: int,
    op: ReduceOp,
    factor: float | None = None,
    *,
    spread: Spread = map,
) -> Iterator[Tensor]:
    """The reduced tensor, chunk by chunk.

    Args:
        read: `read(member, start, stop)` gives a 1-D tensor with those elements; it is not changed.
        elements: number of elements of each member's tensor.
        itemsize: bytes of an element.
        size: members of the group.
        op: reduction; AVG divides the sum by `size`, in whole numbers towards zero.
        factor: of PREMUL_SUM: every input is multiplied with it first.
        spread: computes chunks, whose results do not depend on each other.
    """

    def reduced(chunk: Chunk) -> Tensor:
        return _fold_chunk(read, chunk, op, factor, size)

    yield from spread(reduced, chunks(elements, itemsize, size))


def _fold_chunk(
    read: Callable[[int, int, int], Tensor],
    chunk: Chunk,
    op: ReduceOp,
    factor: float | None,
    size: int,
) -> Tensor:
    fold = _FOLDS[op]
    total: Tensor = None
    # Said anew in each thread, as each has a state of its own.
    with torch.no_grad():
        for member in chunk.members:
            part = read(member, chunk.start, chunk.stop)
            if op is ReduceOp.PREMUL_SUM and factor is not None:
                part = part.clone().mul_(factor)
            if total is None:
                total = part.clone()
            else:
                fold(total, part)
        if op is ReduceOp.AVG:
            if total.is_floating_point() or total.is_complex():
                total.div_(size)
            else:
                total = torch.div(total, size, rounding_mode="trunc")
    return total
