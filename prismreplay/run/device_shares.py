"""Which parts of an operation's outputs come from virtual members, and what they are. No device.

A rank on a GPU computes an operation's result itself: from its own inputs, which never leave the
GPU, and what the virtual members give. That is a list of *pieces*, end to end in one parcel:
of a reduction one for every output, the virtual members' inputs reduced; else one for every part
of an output that a virtual member's tensor fills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from prismreplay.collect.handover import Parcel, ParcelWriter, Place, torch_dtype
from prismreplay.collect.matching import Request
from prismreplay.run.virtual_members import VirtualMembers
from prismreplay.runtime.operations import REDUCTIONS, Call, Op
from prismreplay.runtime.own_parts import row_cuts
from prismtrace.schema import ReduceOp

__all__ = ["Piece", "pieces_of", "share_of"]

Tensor = Any


class Piece(NamedTuple):
    """A run of elements of an output. `member`: the place in the group that gives it; -1: several."""

    output: int
    start: int
    elements: int
    member: int = -1


def pieces_of(op: Op, members: Sequence[int]) -> list[Piece]:
    """The pieces of a rank's outputs that some members of the group give, in order.

    Args:
        op: as the rank issued it.
        members: their places in the group, ascending; not the rank's own.
    """
    if not op.outputs or (not members and op.call is not Call.RECV):
        return []
    if op.call in REDUCTIONS or op.call is Call.RECV:
        return [Piece(number, 0, spec.elements) for number, spec in enumerate(op.outputs)]
    if op.call in (Call.BROADCAST, Call.SCATTER):
        root = op.group.ranks.index(op.root if op.root is not None else op.group.ranks[0])
        if root not in members:
            return []
        return [Piece(number, 0, spec.elements, root) for number, spec in enumerate(op.outputs)]
    size = op.group.size
    if op.call is Call.ALL_GATHER_SINGLE:
        return [
            Piece(number, one * (spec.elements // size), spec.elements // size, one)
            for number, spec in enumerate(op.outputs)
            for one in members
        ]
    if op.call is Call.ALL_TO_ALL_SINGLE:
        cuts = row_cuts(op.outputs[0].shape, op.output_splits, size)
        return [Piece(0, cuts[one], cuts[one + 1] - cuts[one], one) for one in members]
    # Lists: all_gather, gather, all_to_all.
    inputs = max(1, len(op.outputs) // size)
    return [
        Piece(number * size + one, 0, op.outputs[number * size + one].elements, one)
        for number in range(inputs)
        for one in members
    ]


def share_of(
    members: VirtualMembers, rank: int, op: Op, virtual: Sequence[int], place: Place
) -> Parcel:
    """What virtual members give a rank in an operation: its pieces, end to end.

    Sums are made in a wider type and rounded once. AVG and PREMUL_SUM of numbers that are not
    whole come divided, or multiplied.

    Args:
        members: say what virtual ranks contribute.
        rank: that issued the operation.
        op: as that rank sees it.
        virtual: places of the virtual members in the group.
        place: where the parcel is kept.

    Raises:
        TensorRulesError, TensorRecordingError: see `VirtualMembers`.
    """
    if op.call is Call.RECV:
        return members.message(rank, op)[0]
    pieces = pieces_of(op, virtual)
    if not pieces:
        return Parcel(b"", None, 0)
    writer = ParcelWriter(place)
    if op.call in REDUCTIONS:
        for tensor in _reduced(members, rank, op, virtual):
            writer.put_tensor(tensor)
        return writer.finish()
    requests: dict[int, Request] = {}
    tensors: dict[int, list[Tensor]] = {}
    for piece in pieces:
        one = piece.member
        if one not in requests:
            requests[one] = members.contribution(op.group.ranks[one], rank, op)
            tensors[one] = requests[one].inputs.tensors(requests[one].op.inputs)
        writer.put_tensor(_moved(op, rank, piece, requests[one].op, tensors[one]))
    return writer.finish()


def _moved(op: Op, rank: int, piece: Piece, theirs: Op, given: Sequence[Tensor]) -> Tensor:
    """What one member gives for one piece."""
    me, size = op.group.ranks.index(rank), op.group.size
    if op.call is Call.ALL_GATHER:
        return given[piece.output // size]
    if op.call is Call.ALL_GATHER_SINGLE or op.call is Call.BROADCAST:
        return given[piece.output]
    if op.call in (Call.ALL_TO_ALL, Call.SCATTER):
        return given[me]
    if op.call is Call.ALL_TO_ALL_SINGLE:
        cuts = row_cuts(theirs.inputs[0].shape, theirs.input_splits, size)
        return given[0].reshape(-1)[cuts[me] : cuts[me + 1]]
    return given[0]


def _reduced(members: VirtualMembers, rank: int, op: Op, virtual: Sequence[int]) -> list[Tensor]:
    """The virtual members' inputs, reduced: one tensor for every output."""
    me, size = op.group.ranks.index(rank), op.group.size
    totals: list[Tensor] = []
    fold = _FOLDS[op.reduce_op or ReduceOp.SUM]
    for number, one in enumerate(virtual):
        request = members.contribution(op.group.ranks[one], rank, op)
        given = request.inputs.tensors(request.op.inputs)
        if op.call is Call.REDUCE_SCATTER:
            given = [given[me]]
        elif op.call is Call.REDUCE_SCATTER_SINGLE:
            given = [tensor.reshape(-1).tensor_split(size)[me] for tensor in given]
        wide = [_widened(tensor) for tensor in given]
        totals = wide if not number else [fold(a, b) for a, b in zip(totals, wide, strict=True)]
    factor = op.premul_factor if op.reduce_op is ReduceOp.PREMUL_SUM else None
    if op.reduce_op is ReduceOp.AVG:
        factor = 1 / size
    done = []
    for total, spec in zip(totals, op.outputs, strict=True):
        dtype = torch_dtype(spec)
        if factor is not None and (dtype.is_floating_point or dtype.is_complex):
            done.append((total * factor).to(dtype))
        else:
            done.append(total.to(dtype))
    return done


def _widened(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float64) or tensor.is_complex():
        return tensor
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor


_FOLDS: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
