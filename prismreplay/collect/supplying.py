"""Results that need no partners: who may answer a communication in place of the other ranks.

The coordinator asks a `Supplier` about every operation of every rank before it looks for
partners. Recordings, rules and folded replicas are suppliers (`prismreplay.tensors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from prismreplay.runtime.operations import Op

__all__ = ["FirstOf", "Supplier"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""


class Supplier(Protocol):
    """Knows what operations give a rank without running their other members."""

    def supply(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """What the operation gives this rank, at once; None: perform it with its partners.

        The result has one entry per output of the operation, of its shape and type; an entry
        None leaves the rank's own tensor as it is. Without outputs (send, barrier) it is empty.
        All members of an operation get results, or none does.

        Args:
            rank: global rank that issued the operation.
            op: as that rank sees it.
            inputs: its input tensors; not to be changed.

        Raises:
            TensorRulesError: the rules contradict each other or cannot make such a tensor.
            TensorRecordingError: the recording does not fit the operation.
        """


class FirstOf:
    """Asks several suppliers in order; the first answer counts."""

    def __init__(self, suppliers: Sequence[Supplier]) -> None:
        self.suppliers = tuple(suppliers)

    def supply(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """See `Supplier.supply`."""
        for supplier in self.suppliers:
            answer = supplier.supply(rank, op, inputs)
            if answer is not None:
                return answer
        return None
