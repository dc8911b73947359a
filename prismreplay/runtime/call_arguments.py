"""Arguments of torch's communication calls: lists or one tensor, options or what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

__all__ = [
    "as_list",
    "as_lists",
    "chosen",
    "if_given",
    "installed_name",
    "parts_of",
    "reduction_of",
    "root_of",
]

Tensor = Any
Tensors = Sequence[Any]


def as_list(tensors: Any) -> list[Tensor]:
    """Tensors of a call that takes one or several."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(lists: Any, beside: Any) -> Sequence[Tensors]:
    """The lists of a call; where the tensor beside them stands alone, the list does, too."""
    return [lists] if isinstance(beside, torch.Tensor) else lists


def if_given(opts: Any) -> tuple[Any, ...]:
    """An options object as the arguments to pass on: none where none was given."""
    return () if opts is None else (opts,)


def chosen(more: Sequence[Any], named: dict[str, Any], *names: str) -> Any:
    """An argument that was passed by position, or else by one of its names."""
    return more[0] if more else next((named[name] for name in names if name in named), None)


def root_of(opts: Any) -> int:
    """Root of an options object, or the root itself."""
    if opts is None:
        return 0
    return int(opts if isinstance(opts, int) else opts.rootRank)


def reduction_of(opts: Any) -> Any:
    """Reduction of an options object, or the reduction itself; a sum when nothing is said."""
    if opts is None:
        return torch.distributed.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def parts_of(tensor: Tensor, count: int) -> list[Tensor]:
    """A tensor as so many flat ones."""
    return list(tensor.view(-1).chunk(count))


# Older name of each method that torch 2.13 renamed.
_OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def installed_name(method: str) -> str:
    """What the torch that is installed calls it."""
    return method if hasattr(ProcessGroup, method) else _OLD_NAMES[method]
