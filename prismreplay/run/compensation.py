"""What the virtual members together contribute to a group that was made smaller.

A group of N ranks of which few are sandbox ranks is instantiated with the sandbox members and
one assistant, who contributes for all virtual members: the full result minus what the sandbox
contributes itself, computed in float64 (in the tensor's own type the difference loses most of
its digits where they cancel). Real bytes flow, and the small group's result is the full one up
to rounding.

Bit for bit it is not, and cannot be: a sum of few large numbers has a coarser grid than a sum
of many, so for 10 to 26 % of random float32 elements no contribution at all gives the full
result (`docs/experiment-log.md`). Runs with recorded tensors therefore take the exact result
from the recording after the real communication; see the paper's section 6.3 for the idea.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from prismtrace.schema import ReduceOp

__all__ = ["contribution", "difference", "finished"]

Tensor = Any


def contribution(
    result: Tensor,
    inputs: Sequence[Tensor],
    op: ReduceOp,
    *,
    group_size: int,
    factor: float | None = None,
) -> Tensor:
    """What the assistant sends in an all_reduce of a reduced group.

    Args:
        result: what the full group's all_reduce gives.
        inputs: of the sandbox members; same shape and type as `result`.
        op: reduction. With AVG and PREMUL_SUM the reduced group sums: members scale by
            themselves, since a smaller group would divide by the wrong size. See `finished`.
        group_size: members of the full group, for AVG.
        factor: of PREMUL_SUM.

    Raises:
        ValueError: shapes differ.
    """
    if any(one.shape != result.shape for one in inputs):
        raise ValueError("inputs and result differ in shape")
    if op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR):
        return result.clone()
    if op is ReduceOp.BXOR:
        total = result.clone()
        for one in inputs:
            total ^= one
        return total
    if result.is_floating_point() or result.is_complex():
        wide = result.to(torch.complex128 if result.is_complex() else torch.float64)
    else:
        wide = result.to(torch.int64)
    if op is ReduceOp.AVG:
        wide = wide * group_size
    for one in inputs:
        other = one.to(wide.dtype)
        if op is ReduceOp.PRODUCT:
            # Where a sandbox rank multiplies with zero, nothing that others send matters.
            wide = torch.where(other == 0, torch.ones_like(wide), wide / other).to(wide.dtype)
        else:
            wide = wide - (other * factor if op is ReduceOp.PREMUL_SUM and factor else other)
    return wide.to(result.dtype)


def finished(total: Tensor, op: ReduceOp, group_size: int) -> Tensor:
    """What a member makes of the reduced group's sum: AVG divides by the full group's size."""
    if op is not ReduceOp.AVG:
        return total
    if total.is_floating_point() or total.is_complex():
        return total / group_size
    return torch.div(total, group_size, rounding_mode="trunc")


def difference(found: Tensor, exact: Tensor) -> float:
    """The largest difference of two results, in steps of their type at the largest element.

    Of whole numbers: the largest difference itself.
    """
    if exact.numel() == 0:
        return 0.0
    if exact.is_complex():
        found, exact = torch.view_as_real(found), torch.view_as_real(exact)
    if not exact.is_floating_point():
        return float((found.to(torch.int64) - exact.to(torch.int64)).abs().max())
    wide, right = found.to(torch.float64), exact.to(torch.float64)
    largest = float(right.abs().max())
    step = float(torch.finfo(exact.dtype).eps) * (largest or 1.0)
    return float((wide - right).abs().max()) / step
