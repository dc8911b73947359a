"""What a pruned communication consists of: links, and the moves that each role makes on them.

A *role* is a sandbox rank, or the assistant (None) that plays every absent member. A role runs
one or more *programs* side by side; a program is a list of *moves*, and a move sends one span of
elements on one link, receives one from another, or does both. The kernel in `cuda/ring.cu` runs
these lists as they are, so what `prismreplay.plugin.simulation` proves of a schedule holds for
what the device does.

Every role has two buffers: `source`, its own contribution, which is only read, and `data`, which
receives. They may be the same memory where the schedule says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Link", "Move", "Part", "Program", "Role", "Schedule", "Span", "shares"]

Role = int | None
"""A sandbox rank's place in its group; None is the assistant."""


class Part(IntEnum):
    """Where a sent or an added span comes from."""

    SOURCE = 0
    DATA = 1
    IDENTITY = 2
    """Nothing of the role's own: what leaves the receiver's values as they are."""


@dataclass(frozen=True, slots=True)
class Span:
    """`count` elements from `at` on."""

    at: int
    count: int


class Link(NamedTuple):
    """One direction between two programs, by their numbers in the schedule."""

    sender: int
    receiver: int


class Move(NamedTuple):
    """A send and a receive that go on together, piece by piece; either may be missing.

    `send_link` and `receive_link` are numbers of the schedule's links. What is received goes to
    `receive` in `data`, as it is (`own` None) or reduced with as many elements of `own_part`
    from `own` on.
    """

    send_link: int | None = None
    send: Span = Span(0, 0)
    send_part: Part = Part.DATA
    receive_link: int | None = None
    receive: Span = Span(0, 0)
    own: int | None = None
    own_part: Part = Part.SOURCE


@dataclass(frozen=True)
class Program:
    """What one group of thread blocks does, in order.

    `members` are the places of the ranks it plays: itself, or virtual ones.
    """

    role: Role
    members: tuple[int, ...]
    moves: tuple[Move, ...]

    def __str__(self) -> str:
        if self.role is not None:
            return f"rank {self.role} of the group"
        return f"the assistant for {_listed(self.members)}"


@dataclass(frozen=True)
class Schedule:
    """One communication of a group of `size`, few of whose members are there.

    `source_counts` and `data_counts` are elements that each role's buffers need. With
    `in_place`, both may be one and the same memory, for every role.
    """

    name: str
    size: int
    sandbox: tuple[int, ...]
    programs: tuple[Program, ...]
    links: tuple[Link, ...]
    source_counts: dict[Role, int]
    data_counts: dict[Role, int]
    in_place: bool

    @property
    def roles(self) -> tuple[Role, ...]:
        """Sandbox ranks in order, then the assistant, if there is something to play."""
        played = {program.role for program in self.programs}
        return (*self.sandbox, None) if None in played else self.sandbox

    def sent(self) -> Counter[int]:
        """Elements that go over each link, by its number."""
        counts: Counter[int] = Counter()
        for program in self.programs:
            for move in program.moves:
                if move.send_link is not None:
                    counts[move.send_link] += move.send.count
        return counts


def shares(count: int, parts: int, align: int = 1) -> list[Span]:
    """`count` elements in so many spans, whose starts are multiples of `align`.

    All are equally long but the last that hold something, and those after it, which are empty.
    """
    each = -(-count // parts)
    each = -(-each // align) * align
    return [
        Span(min(number * each, count), max(0, min(each, count - number * each)))
        for number in range(parts)
    ]


def _listed(members: Sequence[int]) -> str:
    """Members in runs: 'ranks 0, 3-6 of the group'."""
    runs: list[list[int]] = []
    for one in sorted(members):
        if runs and runs[-1][-1] == one - 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    text = ", ".join("-".join(str(end) for end in run) for run in runs)
    return f"{'rank' if len(members) == 1 else 'ranks'} {text} of the group"
