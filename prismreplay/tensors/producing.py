"""Tensors that stand for what the other ranks would have sent.

An operation's outputs are made up, except for the part that the rank itself contributes: its
place in a gather, what it sends to itself, its own tensors where it is the root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prismreplay.collect.handover import torch_dtype
from prismreplay.errors import TensorRulesError
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismtrace.schema import ReduceOp

__all__ = ["Request", "filled", "mirrored", "own_share", "seed_of", "uniform", "with_own_part"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

Make = Callable[[TensorSpec, int], Tensor]
"""Makes an output: its shape and type, and its place among the outputs."""

_SAME_EVERYWHERE = frozenset(
    {Call.ALL_REDUCE, Call.BROADCAST, Call.REDUCE, Call.ALL_GATHER, Call.ALL_GATHER_SINGLE}
)
"""Calls that give all members the same tensors."""


@dataclass(frozen=True)
class Request:
    """What a function named by a rule is asked for.

    It returns one tensor per entry of `op.outputs`, of that shape and type. For p2p, `rank` is
    the receiver and `op` as the receiver sees it.
    """

    rank: int
    op: Op
    inputs: Sequence[Tensor]
    """The rank's own input tensors, as in the table of `prismreplay.runtime.operations`."""
    seed: int

    def generator(self, place: int = 0) -> Any:
        """A torch.Generator for output number `place`; the same in every run."""
        return _generator(seed_of(self.seed, self.rank, self.op, place))


def seed_of(seed: int, rank: int, op: Op, place: int) -> int:
    """A seed for one tensor: of the operation, and of the rank where members get different ones."""
    who = () if op.call in _SAME_EVERYWHERE else (rank, op.peer if op.call is Call.RECV else None)
    text = repr((seed, op.group.key, op.seq, op.call.value, place, *who))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _generator(seed: int) -> Any:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def filled(spec: TensorSpec, value: float) -> Tensor:
    """A tensor of one value."""
    dtype = torch_dtype(spec)
    # fp4 can be zero, and nothing else.
    return (
        torch.full(spec.shape, value, dtype=dtype)
        if value
        else torch.zeros(spec.shape, dtype=dtype)
    )


def uniform(spec: TensorSpec, low: float, high: float, seed: int) -> Tensor:
    """Random numbers from `low` on, below `high`; whole ones for integer types."""
    dtype, generator = torch_dtype(spec), _generator(seed)
    if not (dtype.is_floating_point or dtype.is_complex):
        numbers = torch.randint(
            int(low), max(int(high), int(low) + 1), spec.shape, generator=generator
        )
        return numbers.to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.rand(spec.shape, dtype=wide, generator=generator) * (high - low) + low).to(dtype)


def with_own_part(rank: int, op: Op, inputs: Sequence[Tensor], make: Make) -> list[Tensor | None]:
    """Outputs of an operation: made up, with the rank's own part in its place."""
    me, size = op.group.ranks.index(rank), op.group.size
    root = op.root == rank
    if op.call is Call.BROADCAST and root:
        return [None] * len(op.outputs)
    if op.call is Call.SCATTER and root:
        return [inputs[me]]
    made: list[Tensor | None] = [make(spec, place) for place, spec in enumerate(op.outputs)]
    if op.call in (Call.ALL_GATHER, Call.GATHER):
        for place, tensor in enumerate(inputs):
            made[place * size + me] = tensor
    elif op.call is Call.ALL_TO_ALL:
        made[me] = inputs[me]
    elif op.call is Call.ALL_GATHER_SINGLE:
        for out, tensor in zip(made, inputs, strict=True):
            _flat(out).tensor_split(size)[me].copy_(_flat(tensor))
    elif op.call is Call.ALL_TO_ALL_SINGLE:
        _pieces(made[0], op.output_splits, size)[me].copy_(
            _pieces(inputs[0], op.input_splits, size)[me]
        )
    return made


def own_share(rank: int, op: Op, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Outputs as if every partner contributed what this rank does.

    Sums are the rank's own share of them, not multiplied by the number of members.

    Raises:
        TensorRulesError: the rank contributes nothing to the operation.
    """
    me, size = op.group.ranks.index(rank), op.group.size
    if op.call is Call.BROADCAST:
        return [None] * len(op.outputs)
    if op.call is Call.SCATTER and op.root == rank:
        return [inputs[me]]
    if not op.outputs:
        return []
    if not inputs:
        raise TensorRulesError(
            f"{op.call.value} takes nothing from this rank that could stand for the others",
            where=f"rank={rank} group={op.group.called} seq={op.seq}",
            hint='produce "zeros", uniform = [low, high] or constant = number instead of "own"',
        )
    if op.call in (Call.ALL_GATHER, Call.GATHER):
        # All of input 0 first, then all of input 1: one share of the outputs each.
        sources = [tensor for tensor in inputs for _ in range(size)]
    elif op.call in (Call.REDUCE_SCATTER, Call.ALL_TO_ALL):
        sources = [inputs[me]] * len(op.outputs)
    elif op.call is Call.REDUCE_SCATTER_SINGLE:
        sources = [_flat(tensor).tensor_split(size)[me] for tensor in inputs]
    elif op.call is Call.ALL_TO_ALL_SINGLE:
        return [_dispatched(me, op, inputs[0])]
    else:
        sources = list(inputs)
    return [_resized(tensor, spec) for tensor, spec in zip(sources, op.outputs, strict=True)]


def mirrored(rank: int, op: Op, inputs: Sequence[Tensor], seed: int) -> list[Tensor | None]:
    """Outputs as if every partner contributed what this rank does, and sums were made of it.

    Where the rank contributes nothing: random numbers; zeros where they are not real.
    """
    if op.outputs and not inputs and op.call is not Call.BROADCAST:
        return [_noise(spec, seed_of(seed, rank, op, n)) for n, spec in enumerate(op.outputs)]
    made = own_share(rank, op, inputs)
    how, size = op.reduce_op, op.group.size
    for number, tensor in enumerate(made):
        if tensor is None or how is None or tensor.dtype is torch.bool:
            continue
        if how is ReduceOp.SUM:
            made[number] = tensor * size
        elif how is ReduceOp.PREMUL_SUM:
            made[number] = tensor * (size * (op.premul_factor or 1.0))
        elif how is ReduceOp.PRODUCT:
            made[number] = tensor**size
        elif how is ReduceOp.BXOR and size % 2 == 0:
            made[number] = torch.zeros_like(tensor)
    return made


def _noise(spec: TensorSpec, seed: int) -> Tensor:
    dtype = torch_dtype(spec)
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return filled(spec, 0)
    return torch.randn(spec.shape, generator=_generator(seed)).to(dtype)


def _dispatched(me: int, op: Op, tensor: Tensor) -> Tensor:
    """What every partner would send this rank if it sent what this rank sends itself."""
    size, spec = op.group.size, op.outputs[0]
    mine = _pieces(tensor, op.input_splits, size)[me]
    out = torch.zeros(spec.shape, dtype=torch_dtype(spec))
    for piece in _pieces(out, op.output_splits, size):
        # Where it sends itself nothing, something from the rest of its rows will do.
        source = mine if mine.numel() else tensor
        piece.copy_(_resized(source, TensorSpec(tuple(piece.shape), spec.dtype)))
    return out


def _pieces(tensor: Tensor, splits: Sequence[int], size: int) -> Sequence[Tensor]:
    """A tensor cut along its first dimension, evenly or as `splits` say."""
    pieces: Sequence[Tensor] = tensor.split(list(splits)) if splits else tensor.tensor_split(size)
    return pieces


def _resized(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """The numbers of a tensor, repeated or cut to fill another shape."""
    if tuple(tensor.shape) == spec.shape:
        return tensor
    flat, wanted = _flat(tensor), spec.elements
    if not flat.numel():
        return torch.zeros(spec.shape, dtype=torch_dtype(spec))
    if flat.numel() < wanted:
        flat = flat.repeat(-(-wanted // flat.numel()))
    return flat[:wanted].reshape(spec.shape)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)
