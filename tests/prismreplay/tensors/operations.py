"""Operations as the process group would make them, for tests."""

from __future__ import annotations

from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType


def group(ranks, rank, name="0", desc=""):
    return Group(
        name=name, ranks=tuple(ranks), rank=tuple(ranks).index(rank), backend="gloo", desc=desc
    )


def spec(*shape, dtype="float32"):
    return TensorSpec(shape, DType(dtype))


def op(call, ranks, rank, *, inputs=(), outputs=(), seq=0, name="0", desc="", **more):
    own = Group(
        name=name, ranks=tuple(ranks), rank=list(ranks).index(rank), backend="gloo", desc=desc
    )
    payload = max((sum(s.nbytes for s in side) for side in (inputs, outputs)), default=0)
    first = next(iter((*outputs, *inputs)), None)
    return Op(
        call=Call(call), group=own, seq=seq, inputs=tuple(inputs), outputs=tuple(outputs),
        payload_bytes=payload, dtype=first.dtype if first else None, **more,
    )  # fmt: skip
