"""A schedule as the kernel reads it: memory of each role, and tables of 8-byte words.

Addresses are plain integers here, so the same tables serve the device and, in tests, the host.
The layout of the words is that of the structs in `cuda/ring.cu`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from prismreplay.plugin.moves import Role, Schedule

__all__ = ["MOST_LINKS", "Layout", "Tables", "encode"]

MOST_LINKS = 32
"""Links that a program can have in each direction."""
_LINE_BYTES = 128
_LINK_WORDS = 4
_NO_LINK = _NO_REDUCTION = -1


@dataclass(frozen=True)
class Layout:
    """How a role's links lie in its memory: counts of all channels first, then the inboxes.

    `slots` pieces of `slot_bytes` per link and channel may be under way. More channels (blocks of
    the device) move more bytes a second, and cost more memory: each link has an inbox of
    channels * slots * slot_bytes.
    """

    channels: int = 32
    slots: int = 8
    slot_bytes: int = 65536

    def __post_init__(self) -> None:
        if self.channels < 1 or self.slots < 1 or self.slots & (self.slots - 1):
            raise ValueError("channels and slots are positive, slots a power of two")
        if self.slot_bytes < 16 or self.slot_bytes % 16:
            raise ValueError("slot_bytes is a positive multiple of 16")

    @property
    def flag_bytes(self) -> int:
        """Of one count per channel, each on a line of its own."""
        return self.channels * _LINE_BYTES

    @property
    def inbox_bytes(self) -> int:
        """Of one link."""
        return self.channels * self.slots * self.slot_bytes

    def counts_bytes(self, schedule: Schedule, role: Role) -> int:
        """The part of a role's memory that must be zero before the first launch."""
        outs, ins = _links_of(schedule, role)
        return 2 * (len(outs) + len(ins)) * self.flag_bytes

    def bytes_of(self, schedule: Schedule, role: Role) -> int:
        """A role's memory."""
        return (
            self.counts_bytes(schedule, role) + len(_links_of(schedule, role)[1]) * self.inbox_bytes
        )


@dataclass(frozen=True)
class Tables:
    """What a launch of some roles reads.

    `words` are Programs, Moves, outgoing and incoming Links; `moves_at`, `outs_at` and `ins_at`
    say where, in words. `programs` are the numbers in the schedule of the grid's rows, `outs` and
    `ins` the schedule's links of each, in the order of the tables.
    """

    words: NDArray[np.int64]
    moves_at: int
    outs_at: int
    ins_at: int
    roles: tuple[Role, ...]
    programs: tuple[int, ...]
    outs: tuple[tuple[int, ...], ...]
    ins: tuple[tuple[int, ...], ...]

    def count_address(self, row: int, place: int) -> int:
        """Where the receiver of incoming link `place` of a grid's row keeps its own count."""
        before = sum(len(links) for links in self.ins[:row])
        return int(self.words[self.ins_at + _LINK_WORDS * (before + place) + 2])


def encode(
    schedule: Schedule,
    roles: Sequence[Role],
    layout: Layout,
    bases: Mapping[Role, int],
    element_bytes: int,
) -> Tables:
    """Tables for a launch that performs `roles`.

    Args:
        schedule: which communication.
        roles: of this launch; their order is that of the kernel's `buffers`.
        layout: of all roles' memory; all have the same.
        bases: address of each role's memory, as this device sees it, of those in `roles` and of
            all that they have links with.
        element_bytes: size of an element.

    Raises:
        ValueError: a program has too many links.
    """
    rows = tuple(
        number for number, program in enumerate(schedule.programs) if program.role in roles
    )
    outs = tuple(_ends(schedule, 0, number) for number in rows)
    ins = tuple(_ends(schedule, 1, number) for number in rows)
    most = max((len(links) for links in (*outs, *ins)), default=0)
    if most > MOST_LINKS:
        raise ValueError(f"{most} links of one program; the kernel holds {MOST_LINKS}")
    addresses = _Addresses(schedule, layout, bases)
    programs: list[list[int]] = []
    moves: list[list[int]] = []
    out_rows: list[list[int]] = []
    in_rows: list[list[int]] = []
    for number, out, into in zip(rows, outs, ins, strict=True):
        program = schedule.programs[number]
        programs.append(
            [
                len(moves),
                len(program.moves),
                len(out_rows),
                len(out),
                len(in_rows),
                len(into),
                roles.index(program.role),
                0,
            ]
        )
        sending = {link: place for place, link in enumerate(out)} | {None: _NO_LINK}
        taking = {link: place for place, link in enumerate(into)} | {None: _NO_LINK}
        moves += [
            [
                sending[move.send_link],
                move.send.at,
                move.send.count,
                _each(move.send.count, layout.channels, element_bytes),
                move.send_part,
                taking[move.receive_link],
                move.receive.at,
                move.receive.count,
                _each(move.receive.count, layout.channels, element_bytes),
                _NO_REDUCTION if move.own is None else move.own,
                move.own_part,
            ]
            for move in program.moves
        ]
        out_rows += [addresses.sender(link) for link in out]
        in_rows += [addresses.receiver(link) for link in into]
    parts = [
        np.array(table, dtype=np.int64).reshape(-1)
        for table in (programs, moves, out_rows, in_rows)
    ]
    _, moves_at, outs_at, ins_at = accumulate((len(part) for part in parts[:3]), initial=0)
    words = np.concatenate(parts)
    return Tables(words, moves_at, outs_at, ins_at, tuple(roles), rows, outs, ins)


def _each(count: int, channels: int, element_bytes: int) -> int:
    """A channel's elements of a span: shared out evenly, in whole vectors of 16 bytes."""
    vector = 16 // element_bytes
    each = -(-count // channels)
    return -(-each // vector) * vector


def _ends(schedule: Schedule, end: int, program: int) -> tuple[int, ...]:
    """Links that a program sends on (end 0), or receives from (end 1)."""
    return tuple(number for number, link in enumerate(schedule.links) if link[end] == program)


def _links_of(schedule: Schedule, role: Role) -> tuple[list[int], list[int]]:
    """A role's outgoing and incoming links, in order of their numbers."""
    mine = {number for number, one in enumerate(schedule.programs) if one.role == role}
    return (
        [number for number, link in enumerate(schedule.links) if link.sender in mine],
        [number for number, link in enumerate(schedule.links) if link.receiver in mine],
    )


class _Addresses:
    """Where the counts and inboxes of links are.

    A role's memory holds, per outgoing link, its credit and the sender's own count; per incoming
    one, ready and the receiver's own count; then the inboxes.
    """

    def __init__(self, schedule: Schedule, layout: Layout, bases: Mapping[Role, int]) -> None:
        self._credit, self._ready, self._inbox = {}, {}, {}
        for role, base in bases.items():
            outs, ins = _links_of(schedule, role)
            for place, link in enumerate(outs):
                self._credit[link] = base + 2 * place * layout.flag_bytes
            for place, link in enumerate(ins):
                self._ready[link] = base + 2 * (len(outs) + place) * layout.flag_bytes
                first = base + layout.counts_bytes(schedule, role)
                self._inbox[link] = first + place * layout.inbox_bytes
        self._flag_bytes = layout.flag_bytes

    def sender(self, link: int) -> list[int]:
        """What is read, what is written at the other end, the own count, the inbox."""
        credit = self._credit[link]
        return [credit, self._ready[link], credit + self._flag_bytes, self._inbox[link]]

    def receiver(self, link: int) -> list[int]:
        ready = self._ready[link]
        return [ready, self._credit[link], ready + self._flag_bytes, self._inbox[link]]
