"""A collective by hand: what the executor makes of the inputs of all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prismreplay.collect.executor import Executor
from prismreplay.collect.handover import ParcelWriter, Place, torch_dtype
from prismreplay.collect.matching import Matcher
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismreplay.runtime.payloads import spec_of
from prismtrace.schema import ReduceOp


def group_of(size: int, rank: int, **more: Any) -> Group:
    return Group("0", tuple(range(size)), rank, "gloo", **more)


def op_of(
    call: Call,
    size: int,
    rank: int,
    inputs: Sequence[TensorSpec] = (),
    outputs: Sequence[TensorSpec] = (),
    *,
    seq: int = 0,
    **more: Any,
) -> Op:
    if call in (Call.ALL_REDUCE, Call.REDUCE, Call.REDUCE_SCATTER, Call.REDUCE_SCATTER_SINGLE):
        more.setdefault("reduce_op", ReduceOp.SUM)
    return Op(
        call,
        more.pop("group", None) or group_of(size, rank),
        seq,
        tuple(inputs),
        tuple(outputs),
        payload_bytes=0,
        **more,
    )


def perform(
    call: Call,
    inputs: Sequence[Sequence[Any]],
    outputs: Sequence[Sequence[Any]],
    *,
    each: Sequence[dict[str, Any]] | None = None,
    place: Place | None = None,
    **more: Any,
) -> list[list[Any]]:
    """Outputs of each member, given its inputs and tensors that are like its outputs."""
    size = len(inputs)
    matcher, executor = Matcher(), Executor(place or Place())
    requests = []
    for rank in range(size):
        writer = ParcelWriter(place or Place())
        for tensor in inputs[rank]:
            writer.put_tensor(tensor)
        op = op_of(
            call,
            size,
            rank,
            [spec_of(tensor) for tensor in inputs[rank]],
            [spec_of(tensor) for tensor in outputs[rank]],
            **more,
            **(each[rank] if each else {}),
        )
        request, complete = matcher.arrive(rank, 1, op, writer.finish())
        requests.append(request)
        assert complete == (rank == size - 1)
    results = []
    for request, (parcel, spans) in zip(requests, executor.perform(requests), strict=True):
        specs = request.op.outputs
        assert [span.nbytes for span in spans] == [spec.nbytes for spec in specs]
        results.append(
            [
                parcel.part(span.offset, spec.shape, torch_dtype(spec))
                for span, spec in zip(spans, specs, strict=True)
            ]
        )
    return results
