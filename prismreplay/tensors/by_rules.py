"""A supplier that follows rules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prismreplay.collect.supplying import Supplier
from prismreplay.errors import TensorRulesError
from prismreplay.runtime.operations import Call, Op
from prismreplay.tensors import producing
from prismreplay.tensors.producing import Request
from prismreplay.tensors.rules import Produce, Rule, RuleSet

__all__ = ["RuleSupplier"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

Function = Callable[[Request], Any]


class RuleSupplier:
    """Supplies what the rules of one file say; see `prismreplay.collect.supplying.Supplier`.

    A send is decided as the receive that takes it. A receive from anyone is always performed,
    because only its partner knows who that is.
    """

    def __init__(
        self,
        rules: RuleSet,
        recorded: Callable[[str | None], Supplier],
        after: Supplier | None = None,
    ) -> None:
        """Take rules.

        Args:
            rules: of one file.
            recorded: gives the recording in a folder; None: the one given beside the rules.
            after: is asked about operations that no rule is about.

        Raises:
            TensorRulesError: a function that a rule names cannot be imported.
        """
        self.rules = rules
        self._after = after
        self._functions: dict[str, Function] = {}
        self._recordings: dict[str | None, Supplier] = {}
        for number, rule in enumerate(rules.rule, 1):
            where = _place(rules, number, rule)
            if rule.python is not None:
                self._functions[rule.python] = _imported(rule.python, rules, where)
            if rule.recorded is not None or rule.produce is Produce.RECORDED:
                folder = None if rule.recorded is None else str(rules.folder / rule.recorded)
                self._recordings[rule.recorded] = recorded(folder)

    def supply(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor | None] | None:
        """See `Supplier.supply`."""
        if op.call is Call.RECV and op.peer is None:
            return None
        receiver, seen = _as_received(rank, op)
        found = self.rules.first(receiver, seen)
        if found is None:
            if self.rules.otherwise == "real":
                return None if self._after is None else self._after.supply(rank, op, inputs)
            raise TensorRulesError(
                f"no rule says what {op.call.value} gives",
                where=f"{self.rules.source}, {described(rank, op)}",
                hint='add a rule, or set otherwise = "real"',
            )
        number, rule = found
        if rule.produce is Produce.REAL:
            return None
        if op.call in (Call.SEND, Call.BARRIER):
            return []
        where = f"{_place(self.rules, number, rule)}: {described(rank, op)}"
        return self._made(rule, where, Request(rank, op, inputs, self.rules.seed))

    def _made(self, rule: Rule, where: str, asked: Request) -> Sequence[Tensor | None] | None:
        rank, op, inputs = asked.rank, asked.op, asked.inputs
        if rule.produce is Produce.KEEP:
            return [None] * len(op.outputs)
        if rule.produce is Produce.OWN:
            return producing.own_share(rank, op, inputs)
        if rule.produce is Produce.MIRROR:
            return producing.mirrored(rank, op, inputs, self.rules.seed)
        if rule.recorded is not None or rule.produce is Produce.RECORDED:
            return self._recordings[rule.recorded].supply(rank, op, inputs)
        if rule.python is not None:
            return _answer_of(self._functions[rule.python], asked, where)
        try:
            if rule.uniform is not None:
                low, high = (self.rules.value(number) for number in rule.uniform)
                return producing.with_own_part(
                    rank,
                    op,
                    inputs,
                    lambda spec, place: producing.uniform(
                        spec, low, high, producing.seed_of(self.rules.seed, rank, op, place)
                    ),
                )
            value = 0 if rule.constant is None else rule.constant
            return producing.with_own_part(
                rank, op, inputs, lambda spec, _: producing.filled(spec, value)
            )
        except (RuntimeError, NotImplementedError, OverflowError) as error:
            raise TensorRulesError(
                f"no such tensor can be made: {str(error).splitlines()[0]}", where=where
            ) from error


def _as_received(rank: int, op: Op) -> tuple[int, Op]:
    """The operation from the side that decides: the receiver's, where there is one."""
    if op.call is not Call.SEND or op.peer is None:
        return rank, op
    return op.peer, replace(op, call=Call.RECV, inputs=(), outputs=op.inputs, peer=rank)


def described(rank: int, op: Op) -> str:
    """An operation in error texts."""
    who = f" peer={op.peer}" if op.peer is not None else ""
    site = f" at {op.site}" if op.site else ""
    return f"rank={rank} {op.call.value} group={op.group.called} seq={op.seq}{who}{site}"


def _place(rules: RuleSet, number: int, rule: Rule) -> str:
    return f"{rules.source}, rule {number}" + (f" ({rule.name})" if rule.name else "")


def _imported(name: str, rules: RuleSet, where: str) -> Function:
    """The function ``module:function``, found from the rules' folder too."""
    module, _, function = name.partition(":")
    folder = str(rules.folder.resolve())
    sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise TensorRulesError(
            f"cannot import {name}: {error}",
            where=where,
            hint="modules are looked for beside the rules file and on the Python path",
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise TensorRulesError(f"{name} is no function", where=where)
    result: Function = found
    return result


def _answer_of(function: Function, asked: Request, where: str) -> list[Tensor | None]:
    """What a rule's function returns, if it is what the operation gives."""
    op = asked.op
    try:
        answer = function(asked)
    except Exception as error:
        raise TensorRulesError(
            f"the function raised {type(error).__name__}: {error}", where=where
        ) from error
    tensors = list(answer) if isinstance(answer, list | tuple) else [answer]
    shapes = [
        None if tensor is None else (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors
        if tensor is None or hasattr(tensor, "dtype")
    ]
    wanted = [(spec.shape, spec.dtype.value) for spec in op.outputs]
    fits = len(shapes) == len(tensors) == len(wanted) and all(
        shape in (None, expected) for shape, expected in zip(shapes, wanted, strict=True)
    )
    if not fits:
        raise TensorRulesError(
            f"the function returned {shapes or answer!r} where {wanted} is expected", where=where
        )
    return tensors
