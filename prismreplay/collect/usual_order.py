"""What members of a group usually make next, and what one that differs has probably done.

A communication that one rank leaves out shows only where its next one meets the others', and that
one is at another line of the program. What the group made in the steps before tells which line it
is. No torch and no input or output in here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prismreplay.runtime.operations import Call, Op
from prismtrace.ranks import name_ranks

__all__ = ["UsualOrder"]

_KEPT = 2048
"""Collectives of a group that are remembered: some steps of most programs."""
_NEXT = 64
"""How many a rank may have left out for it to be noticed."""


class _Made(NamedTuple):
    """A collective as it is recognised when it comes again."""

    call: Call
    nbytes: int
    root: int | None
    site: str

    def __str__(self) -> str:
        size = "" if self.call is Call.BARRIER else f" of {self.nbytes:,} bytes"
        return f"the {self.call.value}{size}" + (f" at {self.site}" if self.site else "")


class UsualOrder:
    """The last collectives of each group, in order, as the first member to come made them."""

    def __init__(self) -> None:
        self._groups: dict[str, deque[tuple[int, _Made]]] = {}
        self._known: dict[_Made, _Made] = {}

    def note(self, op: Op) -> None:
        """`op` is the first of its number in its group."""
        made = _made(op)
        if len(self._known) > _KEPT:  # sizes that never come again
            self._known.clear()
        kept = self._groups.get(op.group.key)
        if kept is None:
            kept = self._groups[op.group.key] = deque(maxlen=_KEPT)
        kept.append((op.seq or 0, self._known.setdefault(made, made)))

    def guess(self, ops: Mapping[int, Op], later: Mapping[int, Sequence[Op]]) -> str:
        """What ranks have probably done that differ from what came at this place before.

        Args:
            ops: rank -> what it made under one number.
            later: rank -> what it made in the same group after that, without waiting.

        Returns:
            As in `as if rank 5 had left out the all_reduce ... in step 3`; empty when what came
            before does not tell.
        """
        first = next(iter(ops.values()))
        before = [
            made for seq, made in self._groups.get(first.group.key, ()) if seq < (first.seq or 0)
        ]
        expected = _continued(before)
        if not expected:
            return ""
        odd = sorted(rank for rank, op in ops.items() if _made(op) != expected[0])
        usual = [rank for rank in ops if rank not in odd]
        made = {_made(ops[rank]) for rank in odd}
        if len(made) != 1 or len(odd) > len(usual):
            return ""  # most do what is new here, as an evaluation
        return _words(odd, made.pop(), expected, ops[usual[0]].step, later.get(odd[0], ()))


def _words(
    odd: Sequence[int],
    made: _Made,
    expected: Sequence[_Made],
    step: int | None,
    later: Sequence[Op],
) -> str:
    who = f"as if {name_ranks(odd)}"
    when = "" if step is None else f" in step {step}"
    swapped = f"{who} had made {made} before {expected[0]}, not after it{when}"
    if made not in expected:
        if made[:-1] in [one[:-1] for one in expected[1:]]:
            return swapped  # by another line
        return f"{who} had made {made} in addition to what came here before{when}"
    place = expected.index(made)
    if expected[0] in (_made(op) for op in later):
        return swapped
    more = "" if place == 1 else f" and {place - 1} more after it"
    return f"{who} had left out {expected[0]}{more}{when}, or makes it later"


def _made(op: Op) -> _Made:
    return _Made(op.call, op.payload_bytes, op.root, op.site)


def _continued(before: Sequence[_Made]) -> Sequence[_Made]:
    """What followed when these came last: where most of them came in the same order."""
    best, most = len(before), 0
    for place in range(len(before) - 1, 0, -1):
        alike = 0
        while alike < place and before[place - 1 - alike] == before[-1 - alike]:
            alike += 1
            if alike > _NEXT:
                return before[place : place + _NEXT]
        if alike > most:
            best, most = place, alike
    return before[best : best + _NEXT]
