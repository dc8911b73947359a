"""The kernel of `cuda/advance.cu` in plain Python: word for word what a device does with a code.

Tests run programs of sandbox ranks on it, and compare the kernel's own source with it.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from prismreplay.plugin.advance_code import (
    ITEM_WORDS,
    LAPS,
    NEVER,
    TERM_WORDS,
    Code,
    Final,
    Kind,
    Layout,
    Slot,
    Table,
    pack_time,
    slot_of_word,
    unpack_time,
)

__all__ = ["Outcome", "Running", "Status", "Tables", "new_tables"]

Tables = tuple[MutableSequence[int], MutableSequence[int]]
"""Words of the shared and of the rank's own table."""


class Status(IntEnum):
    """How an operation went on the device."""

    DONE = 0
    LATE_SLOT = 1
    """A slot that it reads was not written within its limit."""
    OVERWRITTEN = 2
    """A slot that it reads belongs to a later round already."""
    RELEASED = 3
    """Another operation had failed, or the host let all go."""


@dataclass(frozen=True)
class Outcome:
    """What a code has found: when the operation is ready, or what is missing."""

    ready_ns: int
    status: Status = Status.DONE
    missing: Slot | None = None


class HasCode(Protocol):
    """A `prismreplay.run.device_plan.Program`, or anything that looks like one."""

    @property
    def code(self) -> Code:
        """What to do."""

    @property
    def round_(self) -> int:
        """In which repetition."""


def new_tables(layout: Layout, shared: MutableSequence[int] | None = None) -> Tables:
    """Empty tables of a rank; `shared`: the one of all ranks, if there is one already."""
    if shared is None:
        shared = [0] * layout.slots(Table.SHARED)
    return shared, [0] * layout.slots(Table.OWN)


class Running:
    """An operation whose kernel has started at `arrival_ns`, since the origin.

    Its arrival is known to all from here on. `poll` looks whether it is ready.
    """

    def __init__(self, layout: Layout, tables: Tables, program: HasCode, arrival_ns: int) -> None:
        self._layout, self._tables = layout, tables
        self._round, self._arrival_ns = program.round_, arrival_ns
        words: list[int] = program.code.words.tolist()
        arrivals, self._chunks = words[0] & 0xFFFFFFFF, words[0] >> 32
        for word in words[1 : 1 + arrivals]:
            self._write(slot_of_word(word), arrival_ns)
        self._words = words[1 + arrivals :]
        self.missing: Slot | None = None
        self._overwritten: Slot | None = None

    def poll(self) -> Outcome | None:
        """One pass over the code; None if the operation is not ready yet.

        A slot of a later round gives an `OVERWRITTEN`. `self.missing` is the first slot that was
        waited for.
        """
        self.missing = self._overwritten = None
        if not self._chunks:
            return Outcome(self._arrival_ns)
        finals: dict[Final, int] = {}
        at = 0
        for _ in range(self._chunks):
            at = self._chunk(at, finals)
        for final in (Final.FIRST, Final.SECOND):
            if final in finals:
                return Outcome(max(finals[final], self._arrival_ns))
        return self._given_up()

    def _given_up(self) -> Outcome | None:
        if self._overwritten is not None:
            return Outcome(self._arrival_ns, Status.OVERWRITTEN, self._overwritten)
        return None

    def _chunk(self, at: int, finals: dict[Final, int]) -> int:
        words = self._words
        items, terms = words[at] & 0xFFFFFFFF, words[at] >> 32
        head = at + 1
        term = head + items * ITEM_WORDS
        end = term + terms * TERM_WORDS
        results: list[int | None] = []
        for number in range(items):
            first, target, floor = words[head + number * ITEM_WORDS :][:ITEM_WORDS]
            count, final, own = first & 0xFFFFFFFF, Final(first >> 32 & 255), first >> 40 & 1
            found = self._latest(words[term : term + count * TERM_WORDS], results)
            term += count * TERM_WORDS
            if found is not None:
                if floor != NEVER:
                    found = max(found, floor + self._round * self._layout.period_ns)
                if own:
                    found = max(found, self._arrival_ns)
                self._write(slot_of_word(target), found)
                if final:
                    finals[final] = found
            results.append(found)
        return end

    def _latest(self, terms: Sequence[int], results: Sequence[int | None]) -> int | None:
        latest: int | None = 0
        for word, weight in zip(terms[::2], terms[1::2], strict=True):
            there = self._read(slot_of_word(word), results)
            if there is None:
                latest = None
            elif latest is not None:
                latest = max(latest, there + weight)
        return latest

    def _read(self, slot: Slot, results: Sequence[int | None]) -> int | None:
        if slot.kind is Kind.LOCAL:
            return results[slot.number]
        table, at, lap = self._layout.find(slot, self._round)
        time_ns, there = unpack_time(self._tables[table][at])
        if there == lap:
            return time_ns
        if self.missing is None:
            self.missing = slot
        if there and (there - lap) % LAPS < LAPS // 2 and self._overwritten is None:
            self._overwritten = slot
        return None

    def _write(self, slot: Slot, time_ns: int) -> None:
        if slot.kind is not Kind.NONE:
            table, at, lap = self._layout.find(slot, self._round)
            self._tables[table][at] = pack_time(time_ns, lap)
