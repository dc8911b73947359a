"""What an operation gives a rank, computed where its tensors are. Nothing is allocated in here.

Own inputs, and the virtual members' part: given (`combine`) or made from numbers (`make_up`); with
nothing but own inputs, see `prismreplay.runtime.own_parts`. As NCCL does, outputs are written in
place, and autograd does not hear of it. The functions work on tensors of any device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from prismreplay.run.device_shares import Piece, pieces_of
from prismreplay.runtime.operations import REDUCTIONS, Op
from prismreplay.runtime.own_parts import Fill, own_input, place_own
from prismtrace.schema import ReduceOp

__all__ = ["combine", "elementwise", "make_up", "put_pieces"]

Tensor = Any
Tensors = Sequence[Any]


def combine(
    op: Op, inputs: Tensors, outputs: Tensors, pieces: Sequence[Piece], given: Tensors
) -> None:
    """Make outputs from own inputs and what virtual members give.

    Args:
        op: as the rank issued it.
        inputs: its own.
        outputs: to be written.
        pieces: those that virtual members give.
        given: flat tensors of their elements, on the same device.
    """
    if op.call in REDUCTIONS:
        for piece, one in zip(pieces, given, strict=True):
            out = outputs[piece.output]
            _reduce(op, own_input(op, inputs, piece.output), one.view(out.shape), out)
        return
    put_pieces(outputs, pieces, given)
    place_own(op, inputs, outputs)


def put_pieces(outputs: Tensors, pieces: Sequence[Piece], given: Tensors) -> None:
    """Copy what members give to where it belongs in the outputs."""
    for piece, one in zip(pieces, given, strict=True):
        out = outputs[piece.output]
        if piece.elements == out.numel():
            out.copy_(one.view(out.shape))
        else:
            out.view(-1)[piece.start : piece.start + piece.elements].copy_(one)


def make_up(op: Op, inputs: Tensors, outputs: Tensors, fill: Fill) -> None:
    """Make outputs from nothing, but for the rank's own part of them."""
    if op.call in REDUCTIONS:
        for out in outputs:
            fill(out)
        return
    me = op.group.rank
    for piece in pieces_of(op, [one for one in range(op.group.size) if one != me]):
        out = outputs[piece.output]
        fill(
            out
            if piece.elements == out.numel()
            else out.view(-1)[piece.start : piece.start + piece.elements]
        )
    place_own(op, inputs, outputs)


def _reduce(op: Op, own: Tensor, given: Tensor, out: Tensor) -> None:
    """Into `out`, which may be `own`. Of AVG and PREMUL_SUM, see `share_of`."""
    how = op.reduce_op or ReduceOp.SUM
    own = own.view(out.shape)
    real = out.is_floating_point() or out.is_complex()
    if how is ReduceOp.SUM or (how is ReduceOp.PREMUL_SUM and op.premul_factor is None):
        torch.add(own, given, out=out)
    elif how in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) and real:
        factor = 1 / op.group.size if how is ReduceOp.AVG else op.premul_factor or 1.0
        # given + factor * own, rounded once.
        torch.add(given, own, alpha=factor, out=out)
    elif how is ReduceOp.AVG:
        torch.add(own, given, out=out)
        out.floor_divide_(op.group.size)
    elif how is ReduceOp.PREMUL_SUM:
        torch.add(own, given, out=out)
        out.mul_(int(op.premul_factor or 1))
    else:
        _ELEMENTWISE[how](own, given, out=out)


_ELEMENTWISE: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def elementwise(op: Op) -> Callable[..., Any]:
    """What reduces two tensors into a third (`out`); sums of any kind add."""
    found: Callable[..., Any] = _ELEMENTWISE.get(op.reduce_op or ReduceOp.SUM, torch.add)
    return found
