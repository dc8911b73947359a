"""Results that need no partners: who may answer a communication in place of the other ranks.

The coordinator asks a `Supplier` about every operation of every rank before it looks for
partners. Recordings, rules and folded replicas are suppliers (`prismreplay.tensors`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from prismreplay.collect.agreement import Form, form_of, require_same_form
from prismreplay.errors import TensorRulesError
from prismreplay.runtime.operations import MESSAGES, Call, Op

__all__ = ["AllOrNone", "FirstOf", "Supplier"]

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


class AllOrNone:
    """Passes answers on as long as all members of an operation get one, or none of them does.

    Otherwise those without would wait for ever. Members that are answered one by one are compared
    here, as partners do not meet: a true backend would hang, or mix up data. It keeps one entry
    per operation that not all members have issued.
    """

    def __init__(self, supplier: Supplier, absent: Collection[int] = ()) -> None:
        """Watch over a supplier; ranks in `absent` do not run."""
        self.supplier = supplier
        self._absent = frozenset(absent)
        # Operation -> first rank that issued it, its form if it got an answer, members to come.
        self._open: dict[tuple[object, ...], tuple[int, Form | None, int]] = {}
        self._forms: dict[Form, Form] = {}
        """One of each, as there are as many entries as operations when ranks run alone."""

    def supply(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """See `Supplier.supply`.

        Raises:
            TensorRulesError: another member got an answer and this one does not, or vice versa.
            MismatchError: another member made another collective in its place.
        """
        answer = self.supplier.supply(rank, op, inputs)
        if op.seq is not None:
            self._note(rank, op, supplied=answer is not None)
        return answer

    def _note(self, rank: int, op: Op, *, supplied: bool) -> None:
        p2p = op.call in MESSAGES
        ends = (rank, op.peer) if op.call is Call.SEND else (op.peer, rank)
        key = (op.group.key, op.seq, *(ends if p2p else ()))
        form = self._form(op) if supplied else None
        first, first_form, left = self._open.pop(key, (rank, form, 0))
        if not left:
            left = 2 if p2p else len(set(op.group.ranks) - self._absent)
        if (first_form is not None) != supplied:
            lone, other = (rank, first) if supplied else (first, rank)
            raise TensorRulesError(
                f"rank {lone} is given the result of {op.call.value}, and rank {other} is not: "
                "it would wait for ever",
                where=f"group={op.group.called} seq={op.seq}",
                hint="make the rule fit all members of the group, or none; shapes and bytes of an "
                "uneven operation differ by rank",
            )
        if first_form is not None and form is not first_form and not p2p:
            require_same_form(rank, op, first, first_form)
        if left > 1:
            self._open[key] = (first, first_form, left - 1)

    def _form(self, op: Op) -> Form:
        form = form_of(op)
        return self._forms.setdefault(form, form)
