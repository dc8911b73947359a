"""Large communications that are not performed while a graph is collected.

A job's graph does not depend on what its gradients are. With `collect --mirror-above`, a rank gets
from larger collectives what it would get if all members gave what it gives: nothing is copied, not
even from a GPU. Whole numbers (tokens, sizes, objects) and messages are always performed, and so is
what may be large on one member and small on another (exchanges of all with all): either all members
leave an operation out, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from prismreplay.collect.client import CollectRole
from prismreplay.runtime.operations import Call, Op
from prismreplay.runtime.own_parts import mirror
from prismreplay.runtime.roles import Pending
from prismreplay.tensors.scope import is_large

__all__ = ["MirroringRole"]

Tensor = Any

_ALIKE = frozenset(
    {
        Call.ALL_REDUCE,
        Call.BROADCAST,
        Call.REDUCE,
        Call.ALL_GATHER,
        Call.ALL_GATHER_SINGLE,
        Call.REDUCE_SCATTER,
        Call.REDUCE_SCATTER_SINGLE,
    }
)
"""Calls with a payload that all members agree on."""


class MirroringRole(CollectRole):
    """A `CollectRole` that performs small communications only.

    Args:
        arguments: of `CollectRole`.
        above: payload in bytes of the largest collectives that are performed.
    """

    def __init__(self, *arguments: Any, above: int) -> None:
        super().__init__(*arguments)
        self._above = above

    def submit(
        self,
        op: Op,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        call: Callable[[], Any],
    ) -> Pending:
        """See `prismreplay.runtime.roles.Role`."""
        if op.call not in _ALIKE or not is_large(op, self._above):
            return super().submit(op, inputs, outputs, call)
        with torch.no_grad():
            # On the program's own stream, before whatever it does next.
            mirror(op, inputs, [one.data for one in outputs], torch.Tensor.zero_)
        self._connection.tell(("mirrored",))
        return _Done()


class _Done:
    """It was over at once."""

    source: int | None = None

    def wait(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """True."""
        return True
