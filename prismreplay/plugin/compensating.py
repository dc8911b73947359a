"""What an assistant contributes to a smaller group, on the device.

The same numbers as `prismreplay.run.compensation` computes on the CPU, whose page says what
they are for, at the speed of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prismreplay.errors import PluginError
from prismreplay.plugin.device import kernel, require_device
from prismreplay.plugin.elements import element_of
from prismtrace.schema import ReduceOp

__all__ = ["MOST_INPUTS", "compensate"]

Tensor = Any
Stream = Any

MOST_INPUTS = 8
_THREADS = 256
_VECTOR_BYTES = 16
_PACKED = {"f8_e4m3": 1, "f8_e5m2": 2}
_DIFFERENCE, _SCALED, _QUOTIENT, _EXCLUSIVE_OR = range(4)
_AS_IT_IS = (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR)


def compensate(
    full: Tensor,
    inputs: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    *,
    group_size: int = 1,
    factor: float = 1.0,
    out: Tensor | None = None,
    stream: Stream = None,
) -> Tensor:
    """The adjusted contribution, on the current stream or on `stream`.

    Args:
        full: result of the full group, or the virtual members' maximum, minimum or product.
        inputs: of the sandbox ranks, 1 to 8; shape, type and device as `full`.
        op: reduction. AVG and PREMUL_SUM become sums, as members scale by themselves.
        group_size: members of the full group, for AVG.
        factor: of PREMUL_SUM.
        out: where to; may be `full`. A new tensor if None.
        stream: a torch.cuda.Stream.

    Raises:
        PluginError: tensors differ, are not contiguous, or of a type without kernel.
        PluginUnavailableError: there is no such device.
    """
    import torch

    out = torch.empty_like(full) if out is None else out
    _check(full, [*inputs, out])
    if full.numel() == 0:
        return out
    on = torch.cuda.current_stream(full.device) if stream is None else stream
    if op in _AS_IT_IS or not inputs:
        with torch.cuda.stream(on):
            return out.copy_(full)
    element = element_of(full.dtype)
    mode, scale, own_factor = _mode(op, group_size, factor)
    defines: dict[str, str | int] = {"ELEMENT": element, "INPUTS": len(inputs), "MODE": mode}
    if mode == _DIFFERENCE and len(inputs) == 1 and element in _PACKED:
        defines["PACKED"] = _PACKED[element]
    device = require_device(full.device.index)
    addresses = [int(one.data_ptr()) for one in (out, full, *inputs)]
    kernel("compensate", "compensate", device, **defines).launch(
        _grid(full, len(inputs)),
        _THREADS,
        *addresses,
        *[0] * (MOST_INPUTS - len(inputs)),
        np.int64(full.numel()),
        np.int64(_head(addresses, full.numel(), full.element_size())),
        np.float64(scale),
        np.float64(own_factor),
        stream=on,
    )
    return out


def _mode(op: ReduceOp, group_size: int, factor: float) -> tuple[int, float, float]:
    """The kernel's mode, what `full` is multiplied with, and what the inputs are."""
    if op is ReduceOp.PRODUCT:
        return _QUOTIENT, 1.0, 1.0
    if op is ReduceOp.BXOR:
        return _EXCLUSIVE_OR, 1.0, 1.0
    if op is ReduceOp.AVG:
        return _SCALED, float(group_size), 1.0
    if op is ReduceOp.PREMUL_SUM:
        return _SCALED, 1.0, factor
    return _DIFFERENCE, 1.0, 1.0


def _head(addresses: Sequence[int], count: int, element_bytes: int) -> int:
    """Elements before the first vector: all of them, where the tensors lie differently."""
    offsets = {address % _VECTOR_BYTES for address in addresses}
    if len(offsets) != 1 or next(iter(offsets)) % element_bytes:
        return count
    return min(count, -next(iter(offsets)) % _VECTOR_BYTES // element_bytes)


def _grid(full: Tensor, inputs: int) -> tuple[int]:
    """A block per stretch that it takes in one turn, up to what grids hold."""
    import torch

    turn = _THREADS * (4 if inputs <= 2 else 2) * (_VECTOR_BYTES // full.element_size())
    most = 64 * torch.cuda.get_device_properties(full.device).multi_processor_count
    return (max(1, min(most, -(-full.numel() // turn))),)


def _check(full: Tensor, others: Sequence[Tensor]) -> None:
    if not full.is_cuda:
        raise PluginError(
            f"the tensor is on {full.device}", hint="prismreplay.run.compensation is for CPUs"
        )
    if len(others) - 1 > MOST_INPUTS:
        raise PluginError(
            f"{len(others) - 1} inputs; one call takes {MOST_INPUTS}",
            hint="reduce some of them first",
        )
    for one in (full, *others):
        if (one.shape, one.dtype, one.device) != (full.shape, full.dtype, full.device):
            raise PluginError(
                f"tensors differ: {one.dtype} {tuple(one.shape)} on {one.device}, and "
                f"{full.dtype} {tuple(full.shape)} on {full.device}",
                hint="give tensors of one type and shape on one device",
            )
        if not one.is_contiguous():
            raise PluginError(
                f"a tensor of shape {tuple(one.shape)} is not contiguous",
                where=f"strides {one.stride()}",
                hint="call contiguous() on it",
            )
