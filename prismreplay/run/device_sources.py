"""Where a rank on a GPU gets from what virtual members give: decided in the rank, op by op.

What a rule makes is made on the GPU; what was recorded comes from the hub. Where neither says
anything, virtual members mirror the rank: they give what it gives. Then data are well-formed and
take the time that they take, but losses are not the job's, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from prismreplay.errors import TensorRulesError
from prismreplay.run.device_numerics import make_up
from prismreplay.runtime.operations import Call, Op
from prismreplay.runtime.own_parts import mirror
from prismreplay.tensors.by_rules import described
from prismreplay.tensors.rules import Produce, Rule, RuleSet
from prismreplay.tensors.scope import RecordingScope

__all__ = ["MIRROR", "NOTHING", "RECORDING", "DeviceSources", "Way", "follow_rule"]

Tensor = Any
Tensors = Sequence[Any]


class Way(NamedTuple):
    """How an operation gets its outputs.

    Attributes:
        kind: mirror, rule, recording, or nothing.
        rule: that says so.
        rules: it is one of.
    """

    kind: str
    rule: Rule | None = None
    rules: RuleSet | None = None


MIRROR, RECORDING, NOTHING = Way("mirror"), Way("recording"), Way("nothing")


class DeviceSources:
    """Rules and recordings in the order in which they are asked.

    Args:
        sources: rules, and folders of recordings.
        step: the training step that the program is in.
    """

    def __init__(
        self, sources: Sequence[RuleSet | Path], step: Callable[[], int | None] = lambda: None
    ) -> None:
        self._sources = [
            RecordingScope.read(one) if isinstance(one, Path) else one for one in sources
        ]
        self._step = step
        self._by_step = any(
            rule.step is not None or rule.in_step is not None
            for one in self._sources
            if isinstance(one, RuleSet)
            for rule in one.rule
        )

    def way(self, rank: int, op: Op) -> Way:
        """How an operation with virtual members gets its outputs.

        Raises:
            TensorRulesError: a rule refuses it, or cannot be followed on a GPU.
        """
        if op.call in (Call.SEND, Call.BARRIER):
            return NOTHING
        if self._by_step:
            op = replace(op, step=self._step())
        for source in self._sources:
            if isinstance(source, RecordingScope):
                if source.covers(op):
                    return RECORDING
                continue
            found = source.first(rank, op)
            if found is None:
                if source.otherwise == "error":
                    raise TensorRulesError(
                        f"no rule says what {op.call.value} gives",
                        where=f"{source.source}, {described(rank, op)}",
                        hint='add a rule, or set otherwise = "real"',
                    )
                continue
            rule = found[1]
            if rule.produce is Produce.REAL:
                continue
            if rule.produce is Produce.RECORDED or rule.recorded is not None:
                return RECORDING
            if rule.python is not None:
                raise TensorRulesError(
                    "a function cannot make tensors of a GPU without copying all inputs to the host",
                    where=f"{source.source}, {described(rank, op)}",
                    hint='use produce, constant, uniform or a recording; or produce = "mirror"',
                )
            return MIRROR if rule.produce is Produce.MIRROR else Way("rule", rule, source)
        return MIRROR


class _Filling(Protocol):
    def noise(self, tensor: Tensor) -> None: ...

    def uniform(self, tensor: Tensor, low: float, high: float) -> None: ...


def follow_rule(way: Way, op: Op, inputs: Tensors, outputs: Tensors, filling: _Filling) -> None:
    """Make outputs as a rule says, on the GPU."""
    rule = way.rule
    if rule is None:
        return
    if rule.produce is Produce.OWN:
        mirror(op, inputs, outputs, torch.Tensor.zero_, multiply=False)
    elif rule.produce is Produce.ZEROS:
        make_up(op, inputs, outputs, torch.Tensor.zero_)
    elif rule.constant is not None:
        constant = rule.constant
        make_up(op, inputs, outputs, lambda tensor: tensor.fill_(constant))
    elif rule.uniform is not None and way.rules is not None:
        low, high = (way.rules.value(number) for number in rule.uniform)
        make_up(op, inputs, outputs, lambda tensor: filling.uniform(tensor, low, high))
    # KEEP: nothing to do
