"""What a communication's tensors say: shapes, element types, payload, reduction, caller.

Sizes follow nccl-tests, as the converter of profiler traces does, so that a collected graph and
a converted trace of the same job carry the same numbers.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import prismreplay
from prismreplay.errors import UnsupportedOperationError
from prismreplay.runtime.operations import Call, TensorSpec
from prismtrace.schema import DType, ReduceOp

__all__ = ["calling_line", "payload_bytes", "plain", "reduction", "spec_of"]

Tensor = Any

_KNOWN = 4096
"""Shapes that are remembered: programs repeat theirs in every step."""
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_DTYPES: dict[Any, DType] = {
    getattr(torch, dtype.value): dtype for dtype in DType if hasattr(torch, dtype.value)
}
# Files of these folders are never the program's own line.
_FOREIGN = tuple(
    str(Path(module.__file__ or "").resolve().parent) + os.sep for module in (torch, prismreplay)
)
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep


def plain(tensor: Tensor) -> Tensor:
    """The dense strided tensor to communicate.

    Results of functional collectives that nobody has waited for are waited for here: torch's
    dispatcher would do so, and we come before it.

    Raises:
        UnsupportedOperationError: it is sparse or has no data.
    """
    if type(tensor) not in _PLAIN_TYPES:
        wait = getattr(tensor, "trigger_wait", None)
        if wait is not None:
            tensor = wait()
    if tensor.layout is not torch.strided:
        raise UnsupportedOperationError(
            f"communication of a {str(tensor.layout).removeprefix('torch.')} tensor",
            where=f"shape={tuple(tensor.shape)}",
            hint="communicate dense tensors; for embeddings pass sparse=False",
        )
    if tensor.is_meta:
        raise UnsupportedOperationError(
            "communication of a tensor without data (device meta)",
            where=f"shape={tuple(tensor.shape)}",
        )
    return tensor


def spec_of(tensor: Tensor) -> TensorSpec:
    """Shape and element type.

    Raises:
        UnsupportedOperationError: no such element type in traces (quantized types).
    """
    return _spec(tensor.shape, tensor.dtype)


@functools.lru_cache(_KNOWN)
def _spec(shape: Sequence[int], dtype: Any) -> TensorSpec:
    known = _DTYPES.get(dtype)
    if known is None:
        raise UnsupportedOperationError(
            f"communication of {dtype} elements", where=f"shape={tuple(shape)}"
        )
    return TensorSpec(tuple(shape), known)


@functools.lru_cache(_KNOWN)
def payload_bytes(
    call: Call, size: int, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]
) -> int:
    """Payload as nccl-tests counts it: what the whole group ends up with or starts from.

    All-gather: all that a rank receives; gather and scatter: all that the root has. All-to-all:
    what this rank sends.

    Args:
        call: form of the communication.
        size: members of the group.
        inputs: of this rank.
        outputs: of this rank.
    """
    if call in (Call.ALL_GATHER, Call.ALL_GATHER_SINGLE, Call.BROADCAST, Call.RECV):
        return sum(spec.nbytes for spec in outputs)
    if call is Call.GATHER:
        return size * sum(spec.nbytes for spec in inputs)
    if call is Call.SCATTER:
        return size * sum(spec.nbytes for spec in outputs)
    return sum(spec.nbytes for spec in inputs)


# By number: torch's own names for them are new objects each time, which are slow to compare.
_REDUCTIONS: dict[Any, ReduceOp] = {
    getattr(torch.distributed.ReduceOp.RedOpType, op.name).value: op
    for op in ReduceOp
    if hasattr(torch.distributed.ReduceOp.RedOpType, op.name)
}


def reduction(op: Any) -> tuple[ReduceOp, float | None]:
    """Reduction and, for a sum of scaled values, its factor.

    Args:
        op: `torch.distributed.ReduceOp`, or one of its values.

    Raises:
        UnsupportedOperationError: a reduction that traces do not know.
    """
    value = getattr(op, "op", op)
    known = _REDUCTIONS.get(getattr(value, "value", None))
    if known is None:
        raise UnsupportedOperationError(f"reduction {value}")
    if known is not ReduceOp.PREMUL_SUM:
        return known, None
    # Before torch 2.13 only the pickled state shows the factor.
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return known, float(factor)


def calling_line() -> str:
    """The program's own line that is being executed: ``tools.py:6 in mean, from train.py:41 in train``.

    The two innermost frames outside torch and prismreplay: many programs communicate in one
    function that others call. Empty when there is none.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  the way to look at one's callers
    found: list[str] = []
    while frame is not None and len(found) < 2:
        path = frame.f_code.co_filename
        if _is_programs(path):
            name = path.rpartition("/")[2]
            found.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
            if frame.f_code.co_name == "<module>":
                break
        frame = frame.f_back
    return ", from ".join(found)


@functools.cache
def _is_programs(path: str) -> bool:
    """Whether code of this file is the program's, or of a library that it uses."""
    if path.startswith(("<", *_FOREIGN)) or path.endswith("/typing_extensions.py"):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "-packages/" in path
