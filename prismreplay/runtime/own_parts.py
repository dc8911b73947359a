"""What a rank makes of an operation from its own inputs alone, where its tensors are.

Its part of the outputs in its place (`place_own`), the operation in a group of nobody else
(`alone`), and as if every partner gave what this rank does (`mirror`). As NCCL does, outputs are
written in place, and autograd does not hear of it; nothing is allocated in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from prismreplay.runtime.operations import REDUCTIONS, Call, Op
from prismtrace.schema import ReduceOp

__all__ = ["Fill", "alone", "fill_from", "mirror", "own_input", "place_own", "row_cuts", "rows_of"]

Tensor = Any
Tensors = Sequence[Any]
Fill = Callable[[Tensor], None]
"""Fills a tensor, in place."""


def place_own(op: Op, inputs: Tensors, outputs: Tensors) -> None:
    """Put the rank's own part of outputs that are moved, not reduced, in its place."""
    me, size = op.group.rank, op.group.size
    if not inputs or not outputs:
        return
    if op.call in (Call.ALL_GATHER, Call.GATHER):
        for number, own in enumerate(inputs):
            _copy(outputs[number * size + me], own)
    elif op.call is Call.ALL_GATHER_SINGLE:
        for out, own in zip(outputs, inputs, strict=True):
            count = own.numel()
            _copy(out.view(-1)[me * count : (me + 1) * count], own.view(-1))
    elif op.call is Call.ALL_TO_ALL:
        _copy(outputs[me], inputs[me])
    elif op.call is Call.ALL_TO_ALL_SINGLE:
        source, target = (
            rows_of(inputs[0], op.input_splits, size),
            rows_of(outputs[0], op.output_splits, size),
        )
        _copy(target[me], source[me])
    elif op.call is Call.SCATTER:
        _copy(outputs[0], inputs[me])


def alone(op: Op, inputs: Tensors, outputs: Tensors) -> None:
    """The operation in a group of nobody else."""
    if op.call in REDUCTIONS:
        for number, out in enumerate(outputs):
            own = own_input(op, inputs, number)
            if own.data_ptr() != out.data_ptr():
                out.copy_(own.view(out.shape))
            if op.reduce_op is ReduceOp.PREMUL_SUM and op.premul_factor is not None:
                out.mul_(op.premul_factor)
    else:
        place_own(op, inputs, outputs)


def mirror(
    op: Op, inputs: Tensors, outputs: Tensors, noise: Fill, *, multiply: bool = True
) -> None:
    """Make outputs as if every partner gave what this rank does.

    Sums are so many times the own share; what the rank has nothing to give for (messages, a root's
    tensors that are scattered) is noise; what a root broadcasts is what the rank has there already.

    Args:
        op: as the rank issued it.
        inputs: its own.
        outputs: to be written.
        noise: fills a tensor with numbers that come from nowhere.
        multiply: False: sums are the rank's own share.
    """
    if op.call in REDUCTIONS:
        for number, out in enumerate(outputs):
            own = own_input(op, inputs, number)
            if own.data_ptr() != out.data_ptr():
                out.copy_(own.view(out.shape))
            if multiply:
                _repeat(op, out)
    elif op.call is Call.RECV or (op.call is Call.SCATTER and not inputs):
        for out in outputs:
            noise(out)
    elif op.call in (Call.ALL_GATHER, Call.GATHER, Call.ALL_GATHER_SINGLE):
        _gather_own(op, inputs, outputs)
    elif op.call in (Call.ALL_TO_ALL, Call.ALL_TO_ALL_SINGLE):
        _mirror_exchange(op, inputs, outputs)
    elif op.call is not Call.BROADCAST:
        place_own(op, inputs, outputs)


def own_input(op: Op, inputs: Tensors, number: int) -> Tensor:
    """The part of the rank's inputs that goes into an output."""
    if op.call is Call.REDUCE_SCATTER:
        return inputs[op.group.rank]
    if op.call is Call.REDUCE_SCATTER_SINGLE:
        count = op.outputs[number].elements
        return inputs[number].view(-1)[op.group.rank * count : (op.group.rank + 1) * count]
    return inputs[number]


def fill_from(target: Tensor, source: Tensor) -> None:
    """As many elements as there are; the rest is zero."""
    count = min(target.numel(), source.numel())
    if count == target.numel():
        if target.data_ptr() != source.data_ptr() or not count:
            target.copy_(source[:count])
        return
    target[:count].copy_(source[:count])
    target[count:].zero_()


def rows_of(tensor: Tensor, splits: Sequence[int], size: int) -> list[Tensor]:
    """Parts of a tensor that is cut along its first dimension, each flat."""
    cuts = row_cuts(tuple(tensor.shape), splits, size)
    flat = tensor.view(-1)
    return [flat[cuts[one] : cuts[one + 1]] for one in range(size)]


def row_cuts(shape: Sequence[int], splits: Sequence[int], size: int) -> list[int]:
    """Where the parts of a tensor that is cut along its first dimension begin, in elements."""
    rows = shape[0] if shape else 1
    each = 1
    for extent in shape[1:]:
        each *= extent
    cuts = [0]
    for count in splits or (rows // size,) * size:
        cuts.append(cuts[-1] + count * each)
    return cuts


def _copy(out: Tensor, own: Tensor) -> None:
    if own.data_ptr() != out.data_ptr() or own.numel() == 0:
        out.copy_(own.view(out.shape))


def _repeat(op: Op, out: Tensor) -> None:
    """The reduction of as many copies of `out` as there are members, in its place."""
    how, size = op.reduce_op or ReduceOp.SUM, op.group.size
    if out.dtype is torch.bool:
        if how is ReduceOp.BXOR and size % 2 == 0:
            out.zero_()
    elif how is ReduceOp.SUM:
        out.mul_(size)
    elif how is ReduceOp.PREMUL_SUM:
        out.mul_(size * (op.premul_factor or 1.0))
    elif how is ReduceOp.PRODUCT:
        out.pow_(size)
    elif how is ReduceOp.BXOR and size % 2 == 0:
        out.zero_()


def _gather_own(op: Op, inputs: Tensors, outputs: Tensors) -> None:
    size = op.group.size
    if op.call is Call.ALL_GATHER_SINGLE:
        for out, own in zip(outputs, inputs, strict=True):
            # Where the input lies in the output, it is written to with what is there.
            out.view(size, -1).copy_(own.view(1, -1).expand(size, -1))
        return
    for number, out in enumerate(outputs):
        fill_from(out.view(-1), inputs[number // size].view(-1))


def _mirror_exchange(op: Op, inputs: Tensors, outputs: Tensors) -> None:
    """Every partner sends this rank what it sends itself."""
    me, size = op.group.rank, op.group.size
    if op.call is Call.ALL_TO_ALL:
        targets = [out.view(-1) for out in outputs]
        mine = inputs[me].view(-1)
    else:
        targets = rows_of(outputs[0], op.output_splits, size)
        mine = rows_of(inputs[0], op.input_splits, size)[me]
        if not op.output_splits and not op.input_splits:
            outputs[0].view(size, -1).copy_(mine.view(1, -1).expand(size, -1))
            return
    for target in targets:
        fill_from(target, mine)
