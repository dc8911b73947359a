"""The `reduced` transport: which real communications stand for one with virtual members.

A group of N ranks, S of which are sandbox ranks, has a real group of S + 1: an assistant plays all
the virtual ones. An operation of the large group becomes *steps* of the small one, chosen so that
as many bytes go into and out of each sandbox rank as in the large one, in as few operations:

=====================  ==================================================================
of N                   of S + 1
=====================  ==================================================================
all_reduce             all_reduce
broadcast, reduce      the same; a virtual root is the assistant
all_gather             all_gather; the assistant broadcasts what the other virtual ones give
gather                 gather; the assistant sends the root what the others give
scatter                scatter; the root sends the assistant what the others get
reduce_scatter         reduce_scatter; reduce to the assistant of what the others get
all_to_all             all_to_all, the assistant's parts as large as all virtual ones' together
send, recv             with the assistant
=====================  ==================================================================

How long a ring of N takes depends on N as well: what is measured here is the small group's time,
and is called so (`reduced`) wherever it is used.

Nothing of this is in the results: a rank takes its outputs from the hub, exact to the bit
(`prismreplay.run.compensation` says why the small group cannot give them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _distributed_c10d as native

from prismreplay.collect.handover import torch_dtype
from prismreplay.runtime.operations import MESSAGES, Call, Op, TensorSpec
from prismtrace.schema import DType, ReduceOp

__all__ = ["Step", "assistants_steps", "is_reducible", "members_of", "perform", "steps_of"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

_REDUCTIONS = {
    ReduceOp.MAX: native.ReduceOp.MAX,
    ReduceOp.MIN: native.ReduceOp.MIN,
    ReduceOp.PRODUCT: native.ReduceOp.PRODUCT,
    ReduceOp.BAND: native.ReduceOp.BAND,
    ReduceOp.BOR: native.ReduceOp.BOR,
    ReduceOp.BXOR: native.ReduceOp.BXOR,
}
"""All others add, as members scale by themselves."""


class Step(NamedTuple):
    """A communication of the small group. Places are those in it, the assistant's is the last.

    `elements` are what a member contributes, of a scatter and a reduce_scatter what it gets;
    a send goes from `root` to `peer`. `sends` and `receives` are the parts of an all_to_all, by
    place.
    """

    call: Call
    elements: int = 0
    dtype: DType = DType.UINT8
    root: int = 0
    peer: int = 0
    reduce_op: ReduceOp = ReduceOp.SUM
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def members_of(ranks: Sequence[int], sandbox: frozenset[int]) -> tuple[int, ...]:
    """Sandbox members of a group, in its order; their places in the small group."""
    return tuple(rank for rank in ranks if rank in sandbox)


def is_reducible(op: Op, sandbox: frozenset[int]) -> bool:
    """Whether an operation of a mixed group has steps: messages have, from and to virtual ranks."""
    if op.call in MESSAGES:
        return op.peer is not None and op.peer not in sandbox
    return True


def steps_of(op: Op, members: Sequence[int], rank: int) -> tuple[Step, ...]:
    """What sandbox rank `rank` does in the small group.

    Args:
        op: as the rank issued it.
        members: sandbox members of the group, in group order.
        rank: one of them.
    """
    return _STEPS[op.call](_Seen(op, {member: place for place, member in enumerate(members)}, rank))


class _Seen(NamedTuple):
    """An operation as a sandbox rank sees it; `places` are those of all sandbox members."""

    op: Op
    places: Mapping[int, int]
    rank: int

    @property
    def me(self) -> int:
        """This rank's place."""
        return self.places[self.rank]

    @property
    def assistant(self) -> int:
        """The assistant's place."""
        return len(self.places)

    @property
    def root(self) -> int:
        """The root's place."""
        return self.places.get(-1 if self.op.root is None else self.op.root, self.assistant)

    @property
    def others(self) -> int:
        """Virtual members beside one, for whom the assistant has a place of its own."""
        return int(self.op.group.size) - len(self.places) - 1

    @property
    def given(self) -> int:
        """Bytes that the rank contributes."""
        return sum(spec.nbytes for spec in self.op.inputs)

    @property
    def got(self) -> int:
        """Bytes that it gets."""
        return sum(spec.nbytes for spec in self.op.outputs)


_Steps = tuple[Step, ...]


def _send_steps(seen: _Seen) -> _Steps:
    return (Step(Call.SEND, seen.given, root=seen.me, peer=seen.assistant),)


def _receive_steps(seen: _Seen) -> _Steps:
    return (Step(Call.SEND, seen.got, root=seen.assistant, peer=seen.me),)


def _broadcast_steps(seen: _Seen) -> _Steps:
    return tuple(Step(Call.BROADCAST, spec.nbytes, root=seen.root) for spec in seen.op.outputs)


def _reducing_steps(seen: _Seen) -> _Steps:
    op = seen.op
    return tuple(
        Step(op.call, spec.elements, spec.dtype, seen.root, reduce_op=op.reduce_op or ReduceOp.SUM)
        for spec in op.inputs
    )


def _reduce_scatter_steps(seen: _Seen) -> _Steps:
    steps: list[Step] = []
    reduce_op = seen.op.reduce_op or ReduceOp.SUM
    for spec in seen.op.outputs:
        one = Step(Call.REDUCE_SCATTER_SINGLE, spec.elements, spec.dtype, reduce_op=reduce_op)
        rest = one._replace(
            call=Call.REDUCE, elements=seen.others * spec.elements, root=seen.assistant
        )
        steps += _with(one, rest)
    return tuple(steps)


def _all_gather_steps(seen: _Seen) -> _Steps:
    # An uneven one is shared out evenly.
    one = seen.got // seen.op.group.size
    more = Step(Call.BROADCAST, seen.others * one, root=seen.assistant)
    return _with(Step(Call.ALL_GATHER_SINGLE, one), more)


def _gather_steps(seen: _Seen) -> _Steps:
    one = Step(Call.GATHER, seen.given, root=seen.root)
    if seen.root == seen.assistant:
        return (one,)
    return _with(
        one, Step(Call.SEND, seen.others * seen.given, root=seen.assistant, peer=seen.root)
    )


def _scatter_steps(seen: _Seen) -> _Steps:
    one = Step(Call.SCATTER, seen.got, root=seen.root)
    if seen.root == seen.assistant:
        return (one,)
    more = Step(Call.SEND, seen.others * seen.got, root=seen.root, peer=seen.assistant)
    return _with(one, more)


def _all_to_all_steps(seen: _Seen) -> _Steps:
    op, size = seen.op, seen.op.group.size
    if op.call is Call.ALL_TO_ALL:
        given = [spec.nbytes for spec in op.inputs]
        got = [spec.nbytes for spec in op.outputs]
    else:
        given = _rows(op.inputs[0], op.input_splits, size)
        got = _rows(op.outputs[0], op.output_splits, size)
    sends, receives = [0] * (seen.assistant + 1), [0] * (seen.assistant + 1)
    for member, sent, received in zip(op.group.ranks, given, got, strict=True):
        place = seen.places.get(member, seen.assistant)
        sends[place] += sent
        receives[place] += received
    return (Step(Call.ALL_TO_ALL_SINGLE, sends=tuple(sends), receives=tuple(receives)),)


def _rows(spec: TensorSpec, splits: Sequence[int], size: int) -> list[int]:
    rows = spec.shape[0] if spec.shape else 1
    row = spec.nbytes // rows if rows else 0
    return [count * row for count in splits or (rows // size,) * size]


def _with(first: Step, more: Step) -> _Steps:
    return (first, more) if more.elements else (first,)


_STEPS: dict[Call, Callable[[_Seen], _Steps]] = {
    Call.ALL_REDUCE: _reducing_steps,
    Call.REDUCE: _reducing_steps,
    Call.BROADCAST: _broadcast_steps,
    Call.ALL_GATHER: _all_gather_steps,
    Call.ALL_GATHER_SINGLE: _all_gather_steps,
    Call.GATHER: _gather_steps,
    Call.SCATTER: _scatter_steps,
    Call.REDUCE_SCATTER: _reduce_scatter_steps,
    Call.REDUCE_SCATTER_SINGLE: _reduce_scatter_steps,
    Call.ALL_TO_ALL: _all_to_all_steps,
    Call.ALL_TO_ALL_SINGLE: _all_to_all_steps,
    Call.BARRIER: lambda _: (Step(Call.BARRIER),),
    Call.SEND: _send_steps,
    Call.RECV: _receive_steps,
}


def assistants_steps(ops: Mapping[int, Op], members: Sequence[int]) -> tuple[Step, ...]:
    """What the assistant does, from what all sandbox members (or the one of a message) issued."""
    rank, op = next(iter(ops.items()))
    steps = steps_of(op, members, rank)
    if steps[0].call is not Call.ALL_TO_ALL_SINGLE:
        return steps
    parts = [steps_of(ops[member], members, member)[0] for member in members]
    return (
        Step(
            Call.ALL_TO_ALL_SINGLE,
            sends=(*(part.receives[-1] for part in parts), 0),
            receives=(*(part.sends[-1] for part in parts), 0),
        ),
    )


# --- performing ----------------------------------------------------------------------------


class Buffers:
    """Memory for steps: the program's own where the results overwrite it anyway, else new.

    Args:
        outputs: of the operation, which get their contents from the hub afterwards.
    """

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        self._own = [
            one.detach() for one in outputs if one.device.type == "cpu" and one.is_contiguous()
        ]

    def of(self, count: int, dtype: DType) -> Tensor:
        """Flat, of so many elements. The program's has the type that it has."""
        wanted = torch_dtype(TensorSpec((), dtype))
        for number, own in enumerate(self._own):
            flat = own.view(-1)
            flat = flat if flat.dtype == wanted else flat.view(torch.uint8)
            if flat.dtype == wanted and flat.numel() == count:
                del self._own[number]
                return flat
        return torch.zeros(count, dtype=wanted)


def perform(
    steps: Sequence[Step], group: Any, place: int, tag: int, buffers: Buffers
) -> list[tuple[Any, Any]]:
    """Start the steps; torch's Work of each that this place takes part in, and its memory."""
    started = []
    for number, step in enumerate(steps):
        begun = _START[step.call](step, group, place, (tag << 2) + number, buffers)
        if begun is not None:
            started.append(begun)
    return started


def _all_reduce(step: Step, group: Any, _place: int, _tag: int, buffers: Buffers) -> Any:
    data = buffers.of(step.elements, step.dtype)
    options = native.AllreduceOptions()
    options.reduceOp = _reduction(step)
    return group.allreduce([data], options), data


def _reduce(step: Step, group: Any, _place: int, _tag: int, buffers: Buffers) -> Any:
    data = buffers.of(step.elements, step.dtype)
    options = native.ReduceOptions()
    options.reduceOp, options.rootRank = _reduction(step), step.root
    return group.reduce([data], options), data


def _broadcast(step: Step, group: Any, _place: int, _tag: int, buffers: Buffers) -> Any:
    data = buffers.of(step.elements, step.dtype)
    options = native.BroadcastOptions()
    options.rootRank, options.rootTensor = step.root, 0
    return group.broadcast([data], options), data


def _all_gather(step: Step, group: Any, _place: int, _tag: int, buffers: Buffers) -> Any:
    mine, all_ = (
        buffers.of(step.elements, step.dtype),
        buffers.of(step.elements * group.size(), step.dtype),
    )
    return group._allgather_base(all_, mine), (mine, all_)  # noqa: SLF001


def _gather(step: Step, group: Any, place: int, _tag: int, buffers: Buffers) -> Any:
    mine, options = buffers.of(step.elements, step.dtype), native.GatherOptions()
    options.rootRank = step.root
    parts = _parts_at_root(step, group, place, buffers)
    return group.gather(parts, [mine], options), (mine, parts)


def _scatter(step: Step, group: Any, place: int, _tag: int, buffers: Buffers) -> Any:
    mine, options = buffers.of(step.elements, step.dtype), native.ScatterOptions()
    options.rootRank = step.root
    parts = _parts_at_root(step, group, place, buffers)
    return group.scatter([mine], parts, options), (mine, parts)


def _parts_at_root(step: Step, group: Any, place: int, buffers: Buffers) -> list[list[Tensor]]:
    if place != step.root:
        return []
    return [list(buffers.of(step.elements * group.size(), step.dtype).chunk(group.size()))]


def _reduce_scatter_single(step: Step, group: Any, _place: int, _tag: int, buffers: Buffers) -> Any:
    all_ = torch.zeros(step.elements * group.size(), dtype=torch_dtype(TensorSpec((), step.dtype)))
    mine, options = buffers.of(step.elements, step.dtype), native.ReduceScatterOptions()
    options.reduceOp = _reduction(step)
    return group._reduce_scatter_base(mine, all_, options), (mine, all_)  # noqa: SLF001


def _all_to_all(step: Step, group: Any, _place: int, _tag: int, buffers: Buffers) -> Any:
    given = torch.zeros(sum(step.sends), dtype=torch.uint8)
    got = buffers.of(sum(step.receives), DType.UINT8)
    work = group.alltoall_base(
        got, given, list(step.receives), list(step.sends), native.AllToAllOptions()
    )
    return work, (given, got)


def _send(step: Step, group: Any, place: int, tag: int, buffers: Buffers) -> Any:
    if place not in (step.root, step.peer):
        return None
    data = buffers.of(step.elements, step.dtype)
    if place == step.root:
        return group.send([data], step.peer, tag), data
    return group.recv([data], step.root, tag), data


def _barrier(_step: Step, group: Any, _place: int, _tag: int, _buffers: Buffers) -> Any:
    return group.barrier(), None


def _reduction(step: Step) -> Any:
    return _REDUCTIONS.get(step.reduce_op, native.ReduceOp.SUM)


_START = {
    Call.ALL_REDUCE: _all_reduce,
    Call.REDUCE: _reduce,
    Call.BROADCAST: _broadcast,
    Call.ALL_GATHER_SINGLE: _all_gather,
    Call.GATHER: _gather,
    Call.SCATTER: _scatter,
    Call.REDUCE_SCATTER_SINGLE: _reduce_scatter_single,
    Call.ALL_TO_ALL_SINGLE: _all_to_all,
    Call.SEND: _send,
    Call.BARRIER: _barrier,
}
