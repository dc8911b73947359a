"""What `cuda/advance.cu` is told: slots of a table of times, and how new times follow from them.

No torch, no CUDA. A *slot* is a word of 64 bits that holds a time in ns since the run's origin,
and a *lap* that tells whether it is the one that is meant: slots of rounds are used again in a
ring. There are two tables: one that all sandbox ranks see (`SHARED`), and one of this rank
(`OWN`), with the junctions of the plan.

A `Code` is a list of items. Each gives the latest of some slots, each plus a weight; the last ones
are what the operation waits for. Codes do not say in which round they run, so that a repeated
step uses the same ones again and again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FIRST_LAP",
    "MOST_ITEMS",
    "MOST_TERMS",
    "Code",
    "Final",
    "Item",
    "Kind",
    "Layout",
    "Slot",
    "Table",
    "encode",
    "pack_time",
    "slot_of_word",
    "unpack_time",
    "word_of_slot",
]

MOST_ITEMS = 256
"""Of a chunk: what the kernel holds at once."""
MOST_TERMS = 1024
LAPS = 65_000
FIRST_LAP = 1
"""Of slots that are used once; those of a ring begin with the next."""
TIME_BITS = 48
"""Of a time in a slot: 78 hours."""
BIAS_NS = 1 << 40
"""Added to times in slots: some are before the origin."""
NEVER = -(1 << 62)
ITEM_WORDS, TERM_WORDS = 3, 2
_TIME_MASK = (1 << TIME_BITS) - 1


class Kind(IntEnum):
    """How a slot is found."""

    NONE = 0
    FIXED = 1
    """`number`, with the lap `lap`."""
    RING = 2
    """`number` of those of a round, `lap` rounds before the one that runs."""
    LOCAL = 3
    """Item `number` of the same chunk."""


class Table(IntEnum):
    """Whose table a slot is in."""

    SHARED = 0
    OWN = 1


class Final(IntEnum):
    """What an item means for the operation."""

    NO = 0
    FIRST = 1
    """The operation is ready then."""
    SECOND = 2
    """It is ready then if the first one is not known by then."""


class Slot(NamedTuple):
    """Where a time is, see `Kind`."""

    kind: Kind
    table: Table
    number: int
    lap: int = 0


NOWHERE = Slot(Kind.NONE, Table.SHARED, 0)


class Item(NamedTuple):
    """The latest of `floor_ns` (+ round · period), each term's slot + weight, and 0.

    Attributes:
        terms: (slot, weight in ns). LOCAL ones are earlier items of the code, by their number in
            it; `encode` makes slots of those that fall into another chunk.
        target: where it is written.
        floor_ns: of what happens at a known time; None: nothing.
        own: the operation's own arrival counts, too.
        final: whether the operation waits for it.
    """

    terms: tuple[tuple[Slot, int], ...]
    target: Slot = NOWHERE
    floor_ns: int | None = None
    own: bool = False
    final: Final = Final.NO


@dataclass(frozen=True)
class Layout:
    """Sizes of the tables, in slots: `fixed` ones, then `rounds` times `ring`, by table."""

    rounds: int
    fixed: tuple[int, int]
    ring: tuple[int, int]
    period_ns: int = 0

    def slots(self, table: Table) -> int:
        """All of a table."""
        return self.fixed[table] + self.rounds * self.ring[table]

    def find(self, slot: Slot, round_: int) -> tuple[Table, int, int]:
        """Table, place in it and lap of a FIXED or RING slot, for a code that runs in a round."""
        if slot.kind is Kind.FIXED:
            return slot.table, slot.number, slot.lap
        lap, turn = divmod(round_ - slot.lap - 1, self.rounds)
        at = self.fixed[slot.table] + turn * self.ring[slot.table] + slot.number
        return slot.table, at, FIRST_LAP + 1 + lap % LAPS


@dataclass(frozen=True, eq=False)
class Code:
    """`words` is int64, as the kernel reads it; `items` the same for people and tests."""

    words: NDArray[np.int64]
    arrivals: tuple[Slot, ...]
    items: tuple[Item, ...]


def pack_time(time_ns: int, lap: int) -> int:
    """A slot's 64 bits."""
    return (min(max(time_ns + BIAS_NS, 0), _TIME_MASK)) | lap << TIME_BITS


def unpack_time(word: int) -> tuple[int, int]:
    """Time and lap of a slot's 64 bits; lap 0: never written."""
    word &= (1 << 64) - 1
    return (word & _TIME_MASK) - BIAS_NS, word >> TIME_BITS


def word_of_slot(slot: Slot) -> int:
    """As in codes: number, lap, kind, table."""
    return slot.number | slot.lap << 32 | slot.kind << 48 | slot.table << 52


def slot_of_word(word: int) -> Slot:
    """The other way round."""
    kind, table = Kind(word >> 48 & 15), Table(word >> 52 & 1)
    return Slot(kind, table, word & 0xFFFFFFFF, word >> 32 & 0xFFFF)


def encode(arrivals: Iterable[Slot], items: Sequence[Item]) -> Code:
    """Lay a code out in words.

    arrivals n, chunks m << 32; n slots; per chunk: items k, terms t << 32; k × (terms, final << 32,
    own << 40; target; floor); t × (slot, weight).

    Raises:
        ValueError: an item has more terms than the kernel holds.
    """
    arrivals = tuple(arrivals)
    words = [0, *(word_of_slot(slot) for slot in arrivals)]
    chunks = list(_chunks(items))
    words[0] = len(arrivals) | len(chunks) << 32
    for begin, end in chunks:
        heads: list[int] = []
        terms: list[int] = []
        for item in items[begin:end]:
            heads += [
                len(item.terms) | item.final << 32 | item.own << 40,
                word_of_slot(item.target),
                NEVER if item.floor_ns is None else item.floor_ns,
            ]
            for slot, weight in item.terms:
                terms += [word_of_slot(_seen_from(slot, begin, items)), weight]
        words += [(end - begin) | len(terms) // TERM_WORDS << 32, *heads, *terms]
    return Code(np.array(words, np.int64), arrivals, tuple(items))


def _chunks(items: Sequence[Item]) -> Iterable[tuple[int, int]]:
    begin = terms = 0
    for number, item in enumerate(items):
        if len(item.terms) > MOST_TERMS:
            raise ValueError(f"{len(item.terms)} terms of one time; the kernel holds {MOST_TERMS}")
        if number - begin == MOST_ITEMS or terms + len(item.terms) > MOST_TERMS:
            yield begin, number
            begin, terms = number, 0
        terms += len(item.terms)
    if begin < len(items):
        yield begin, len(items)


def _seen_from(slot: Slot, begin: int, items: Sequence[Item]) -> Slot:
    if slot.kind is not Kind.LOCAL:
        return slot
    if slot.number >= begin:
        return slot._replace(number=slot.number - begin)
    return items[slot.number].target
