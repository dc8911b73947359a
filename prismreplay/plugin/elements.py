"""Element types and reductions of the plugin's kernels, in torch's words and in the kernels'."""

from __future__ import annotations

from typing import Any

from prismreplay.errors import PluginError
from prismtrace.schema import ReduceOp

__all__ = ["element_of", "identity_bits", "reduction_of"]

_ELEMENTS = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "int8": "i8",
    "uint8": "u8",
    "bool": "u8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
}
_REDUCTIONS = {
    ReduceOp.SUM: 0,
    ReduceOp.AVG: 0,
    ReduceOp.PREMUL_SUM: 0,
    ReduceOp.PRODUCT: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
    ReduceOp.BAND: 4,
    ReduceOp.BOR: 5,
    ReduceOp.BXOR: 6,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def element_of(dtype: Any) -> str:
    """The kernels' name of a torch.dtype.

    Raises:
        PluginError: they have no such type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _ELEMENTS:
        raise PluginError(
            f"the plugin has no elements of {name}", hint=f"it has {', '.join(_ELEMENTS)}"
        )
    return _ELEMENTS[name]


def reduction_of(op: ReduceOp, dtype: Any) -> int:
    """The kernel's number of a reduction; averages and scaled sums add what is scaled already.

    Raises:
        PluginError: the type has no such reduction.
    """
    if op in _BITWISE and dtype.is_floating_point:
        raise PluginError(
            f"{op.value} of {dtype} has no meaning", hint="reduce whole numbers so, or add"
        )
    return _REDUCTIONS[op]


def identity_bits(op: ReduceOp, dtype: Any) -> int:
    """The bits of the value that changes no other: minus zero of sums, infinities of extremes."""
    import torch

    floating = dtype.is_floating_point
    if op is ReduceOp.PRODUCT:
        value = 1.0
    elif op in (ReduceOp.MAX, ReduceOp.MIN):
        limits = torch.finfo(dtype) if floating else torch.iinfo(dtype)
        value = limits.min if op is ReduceOp.MAX else limits.max
        if floating and dtype != torch.float8_e4m3fn:
            value = float("-inf") if op is ReduceOp.MAX else float("inf")
    elif op is ReduceOp.BAND:
        value = -1 if dtype.is_signed else torch.iinfo(dtype).max
    else:
        value = -0.0 if floating else 0
    one = torch.tensor([value], dtype=torch.float64 if floating else torch.int64).to(dtype)
    return int.from_bytes(bytes(one.view(torch.uint8).tolist()), "little")
