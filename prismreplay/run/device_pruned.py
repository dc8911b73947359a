"""Groups of several sandbox ranks and virtual ones: NCCL among the former, and the others' part.

The sandbox members, each on a GPU of its own, have a real group of their own. An operation's result
is what they give each other through it, and what the virtual members give: of a sum, one of them
adds that to its own part before; else each puts the pieces that are for it in their places. What
virtual members give is handed in; None: they mirror the rank that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from prismreplay.run.device_numerics import elementwise, put_pieces
from prismreplay.run.device_shares import Piece
from prismreplay.runtime.operations import MESSAGES, Call, Op
from prismreplay.runtime.own_parts import fill_from, place_own, rows_of
from prismtrace.schema import ReduceOp

__all__ = ["PrunedGroup"]

Tensor = Any
Tensors = Sequence[Any]

_SUMS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


class PrunedGroup:
    """The sandbox members of a group, as one of them holds it.

    Args:
        real: torch's group of them, in the order of `members`.
        members: their places in the whole group, ascending.
        me: which of them this rank is.
        scratch: memory that is not torch's: so many elements of a type; for the current stream.
    """

    def __init__(
        self,
        real: Any,
        members: Sequence[int],
        me: int,
        scratch: Callable[[int, Any], Tensor],
    ) -> None:
        self._real = real
        self.members = tuple(members)
        self._me = me
        self._scratch = scratch

    def needs_share(self, op: Op) -> bool:
        """Whether this rank has to know what the virtual members give."""
        if op.call is Call.REDUCE:
            return self._me == self._root(op)
        return op.call is not Call.ALL_REDUCE or self._me == 0

    def perform(
        self,
        op: Op,
        inputs: Tensors,
        outputs: Tensors,
        pieces: Sequence[Piece],
        given: Tensors | None,
    ) -> None:
        """Put an operation into the current stream.

        Args:
            op: as this rank issued it.
            inputs: its own.
            outputs: to be written.
            pieces: of the outputs, those that virtual members give.
            given: flat tensors of their elements, if this rank needs them; None: mirror.
        """
        if op.call in MESSAGES:
            self._message(op, inputs, outputs)
        elif op.call in (Call.ALL_REDUCE, Call.REDUCE):
            self._reduce(op, inputs, outputs, given)
        elif op.call in (Call.REDUCE_SCATTER, Call.REDUCE_SCATTER_SINGLE):
            self._reduce_scatter(op, inputs, outputs, given)
        elif op.call is Call.BROADCAST and self._root(op) is not None:
            for out in outputs:
                self._call("broadcast", [out], "BroadcastOptions", rootRank=self._root(op))
        elif op.call is not Call.BARRIER:
            self._move(op, inputs, outputs)
            place_own(op, inputs, outputs)
            if given is not None:
                put_pieces(outputs, pieces, given)
            else:
                self._mirror(op, inputs, outputs, pieces)

    # --- messages and moves ----------------------------------------------------------------

    def _message(self, op: Op, inputs: Tensors, outputs: Tensors) -> None:
        peer = self.members.index(op.group.ranks.index(op.peer if op.peer is not None else -1))
        if op.call is Call.SEND:
            work = self._real.send(list(inputs), peer, op.tag)
        else:
            work = self._real.recv(list(outputs), peer, op.tag)
        if work is not None:
            work.wait()  # of the current stream

    def _move(self, op: Op, inputs: Tensors, outputs: Tensors) -> None:
        """What the sandbox members give each other."""
        size, root = op.group.size, self._root(op)
        places = self.members
        if op.call is Call.ALL_GATHER_SINGLE:
            for out, own in zip(outputs, inputs, strict=True):
                parts = out.view(size, -1)
                self._exchange([parts[place] for place in places], [own.view(-1)] * len(places))
        elif op.call is Call.ALL_GATHER:
            for number, own in enumerate(inputs):
                outs = [outputs[number * size + place] for place in places]
                self._exchange(outs, [own] * len(places))
        elif op.call is Call.ALL_TO_ALL:
            self._exchange([outputs[one] for one in places], [inputs[one] for one in places])
        elif op.call is Call.ALL_TO_ALL_SINGLE:
            there = rows_of(outputs[0], op.output_splits, size)
            here = rows_of(inputs[0], op.input_splits, size)
            self._exchange([there[one] for one in places], [here[one] for one in places])
        elif op.call is Call.GATHER and root is not None:
            none = inputs[0].new_empty(0)
            outs = [outputs[one] if outputs else none for one in places]
            ins = [inputs[0] if number == root else none for number in range(len(places))]
            self._exchange(outs, ins)
        elif op.call is Call.SCATTER and root is not None:
            none = outputs[0].new_empty(0)
            outs = [outputs[0] if number == root else none for number in range(len(places))]
            self._exchange(outs, [inputs[one] if inputs else none for one in places])

    def _exchange(self, outs: Tensors, ins: Tensors) -> None:
        """Each member sends each other one a tensor; its own is left to `place_own`."""
        none = ins[0].new_empty(0)
        got, sent = list(outs), list(ins)
        got[self._me] = sent[self._me] = none
        self._call("alltoall", got, sent, "AllToAllOptions")

    def _mirror(self, op: Op, inputs: Tensors, outputs: Tensors, pieces: Sequence[Piece]) -> None:
        """Virtual members give what this rank gives."""
        me, size = op.group.rank, op.group.size
        for piece in pieces:
            target = outputs[piece.output].view(-1)[piece.start : piece.start + piece.elements]
            if op.call is Call.ALL_GATHER_SINGLE:
                source = inputs[piece.output]
            elif op.call in (Call.ALL_GATHER, Call.GATHER):
                source = inputs[piece.output // size]
            elif op.call is Call.ALL_TO_ALL:
                source = inputs[me]
            elif op.call is Call.ALL_TO_ALL_SINGLE:
                source = rows_of(inputs[0], op.input_splits, size)[me]
            else:
                continue  # a virtual root's: what is there stays
            fill_from(target, source.reshape(-1))

    # --- reductions ------------------------------------------------------------------------

    def _reduce(self, op: Op, inputs: Tensors, outputs: Tensors, given: Tensors | None) -> None:
        if op.call is Call.REDUCE and self._root(op) is None:
            return  # nobody here sees the result
        for number, own in enumerate(inputs):
            # Of a reduce, inputs are to stay as they are.
            inside = op.call is Call.ALL_REDUCE
            total = own.data if inside else self._copy(own)
            self._prepare(op, total, mirrored=given is None)
            if given:
                elementwise(op)(total, given[number].view(total.shape), out=total)
            self._call("allreduce", [total], "AllreduceOptions", reduceOp=_real_op(op))
            self._finish(op, total, mirrored=given is None)
            if not inside and outputs:
                outputs[number].copy_(total)

    def _reduce_scatter(
        self, op: Op, inputs: Tensors, outputs: Tensors, given: Tensors | None
    ) -> None:
        size, count = op.group.size, len(self.members)
        for number, out in enumerate(outputs):
            if op.call is Call.REDUCE_SCATTER:
                parts = [inputs[place].view(-1) for place in self.members]
            else:
                whole = inputs[number].view(size, -1)
                parts = [whole[place] for place in self.members]
            got = list(self._scratch(count * out.numel(), out.dtype).view(count, -1))
            got[self._me].copy_(parts[self._me])
            self._exchange(got, parts)
            fold, total = elementwise(op), out.view(-1)
            total.copy_(got[0])
            for one in got[1:]:
                fold(total, one, out=total)
            self._prepare(op, total, mirrored=given is None)
            if given is not None:
                fold(total, given[number], out=total)
            self._finish(op, total, mirrored=given is None)

    def _prepare(self, op: Op, total: Tensor, *, mirrored: bool) -> None:
        """Scale a part of a sum as `share_of` has scaled the virtual members'.

        Mirrored, each sandbox member stands for its share of the virtual ones, too.
        """
        how, size = op.reduce_op or ReduceOp.SUM, op.group.size
        if how not in _SUMS or total.dtype is torch.bool:
            return
        real = total.is_floating_point() or total.is_complex()
        factor = 1.0
        if how is ReduceOp.AVG and real:
            factor = 1 / size
        elif how is ReduceOp.PREMUL_SUM and real:
            factor = op.premul_factor or 1.0
        if mirrored and (real or how is not ReduceOp.AVG):
            factor *= size / len(self.members)
        if factor != 1.0:
            total.mul_(factor if real else int(factor))

    def _finish(self, op: Op, total: Tensor, *, mirrored: bool) -> None:
        """Whole numbers are divided, or multiplied, at the end."""
        real = total.is_floating_point() or total.is_complex() or total.dtype is torch.bool
        if real:
            return
        if op.reduce_op is ReduceOp.AVG:
            total.floor_divide_(len(self.members) if mirrored else op.group.size)
        elif op.reduce_op is ReduceOp.PREMUL_SUM:
            total.mul_(int(op.premul_factor or 1))

    def _copy(self, tensor: Tensor) -> Tensor:
        made = self._scratch(tensor.numel(), tensor.dtype).view(tensor.shape)
        made.copy_(tensor)
        return made

    # --- the backend -----------------------------------------------------------------------

    def _root(self, op: Op) -> int | None:
        """Which sandbox member is the root; None: a virtual one."""
        if op.root is None:
            return None
        place = op.group.ranks.index(op.root)
        return self.members.index(place) if place in self.members else None

    def _call(self, method: str, *arguments: Any, **options: Any) -> None:
        """Have the backend do something on the current stream."""
        *tensors, kind = arguments
        made = getattr(distributed, kind)()
        made.asyncOp = False
        for name, value in options.items():
            setattr(made, name, value)
        work = getattr(self._real, method)(*tensors, made)
        if work is not None:
            work.wait()  # of the current stream


def _real_op(op: Op) -> Any:
    how = op.reduce_op or ReduceOp.SUM
    kinds = distributed.ReduceOp
    return kinds.SUM if how in _SUMS else getattr(kinds, how.name)
