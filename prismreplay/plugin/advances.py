"""How operations went on a device, as the kernel of `cuda/advance.cu` has noted it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prismreplay.plugin.advance_code import Slot, slot_of_word
from prismreplay.plugin.advance_simulation import Status

__all__ = ["SEEN_WORDS", "Advance", "advance_of_row"]

SEEN_WORDS = 8
"""Words of a row, of which the kernel writes one for each operation."""


class Advance(NamedTuple):
    """How an operation went on the device. Times in ns since the run's beginning, less debts.

    Attributes:
        ticket: of `Advancer.launch`.
        began_ns: start of the kernel.
        arrival_ns: when the stream got to the operation.
        ready_ns: when all members were there.
        end_ns: when it was to end.
        ended_ns: when the stream's next kernel could start.
        status: anything but DONE: it ended too early, and `missing` may say why.
        missing: the slot that was waited for in vain.
    """

    ticket: int
    began_ns: int
    arrival_ns: int
    ready_ns: int
    end_ns: int
    ended_ns: int
    status: Status
    missing: Slot | None

    @property
    def lateness_ns(self) -> int:
        """By how much it ended after its time; a little below zero: before."""
        return self.ended_ns - self.end_ns


def advance_of_row(ticket: int, row: Sequence[int]) -> Advance:
    """What the kernel has written of an operation, in SEEN_WORDS words."""
    first, began, arrival, ready, end, status, missing, _ = row
    late = (first & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)
    slot = slot_of_word(missing) if missing else None
    return Advance(ticket, began, arrival, ready, end, end + late, Status(status), slot)
