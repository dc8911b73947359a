"""Which ranks' memory is on a GPU: decisions only, nothing is moved in here.

What fits stays. When a rank that has a turn does not fit beside the others, those that have waited
longest go first: each gives back what its allocator only keeps for later, and if that is not
enough, its whole state goes to host memory, and from there to disk when the host has no room.
Ranks that compute, or have just been let in, stay. As memory grows while a rank computes, it
counts with the most that any rank was seen to take: ranks of one program are much alike. So a rank
that is there already needs room, too: all of them may have come while they were small.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from prismreplay.errors import SwapError

__all__ = ["Decision", "Do", "Residency", "Whereabouts"]

WORTH_TRIMMING_BYTES = 64 << 20
"""What an allocator has to keep for later so that asking for it pays."""


class Whereabouts(Enum):
    """Where a rank's GPU memory is."""

    NOWHERE = auto()
    """It has none yet."""
    GPU = auto()
    HOST = auto()
    DISK = auto()


class Do(Enum):
    """What to do so that a rank can compute."""

    ADMIT = auto()
    """Let it in; bring its memory back if it is away."""
    TRIM = auto()
    """Have a rank give back what it does not use."""
    EVICT = auto()
    """Move a rank's memory to the host."""
    SPILL = auto()
    """Move a rank's memory from the host's memory to its disk."""
    WAIT = auto()
    """Until one of those that compute blocks."""


class Decision(NamedTuple):
    """One thing to do, and the rank to do it with."""

    do: Do
    rank: int


@dataclass(slots=True)
class _State:
    size: int = 0
    cached: int = 0
    peak: int = 0
    where: Whereabouts = Whereabouts.NOWHERE
    used: int = 0
    """When it had a turn: a number that grows."""


class Residency:
    """The ranks of one GPU.

    Args:
        budget: bytes of the GPU that they may take together.
        host: bytes of host memory for those that had to leave.
        disk: bytes that the host can swap to disk.
    """

    def __init__(self, budget: int, host: int, disk: int = 0) -> None:
        self.budget = budget
        self._host, self._disk = host, disk
        self._ranks: dict[int, _State] = {}
        self._most = 0
        self._turns = 0

    # --- what has happened ------------------------------------------------------------

    def resize(self, rank: int, size: int, *, cached: int = 0, peak: int = 0) -> None:
        """`rank` takes `size` bytes, `cached` of them for later; it took `peak` at the most."""
        state = self._ranks.setdefault(rank, _State())
        state.size, state.cached = size, cached
        state.peak = max(state.peak, peak, size)
        self._most = max(self._most, state.peak)

    def entered(self, rank: int) -> None:
        """`rank` is let in: it computes now, or will at once."""
        state = self._ranks.setdefault(rank, _State())
        state.where = Whereabouts.GPU
        self._turns += 1
        state.used = self._turns

    def trimmed(self, rank: int) -> None:
        """`rank` was asked to give back what it does not use; `resize` tells what is left."""
        self._ranks[rank].cached = 0

    def left(self, rank: int) -> None:
        """The memory of `rank` is in the host's now."""
        self._ranks[rank].where = Whereabouts.HOST

    def spilled(self, rank: int) -> None:
        """The memory of `rank` is on disk now."""
        self._ranks[rank].where = Whereabouts.DISK

    def ended(self, rank: int) -> None:
        """`rank` and its memory are gone."""
        self._ranks.pop(rank, None)

    # --- what there is ----------------------------------------------------------------

    def where(self, rank: int) -> Whereabouts:
        """Where the memory of `rank` is."""
        state = self._ranks.get(rank)
        return Whereabouts.NOWHERE if state is None else state.where

    def size(self, rank: int) -> int:
        """Bytes that `rank` takes, wherever they are."""
        state = self._ranks.get(rank)
        return 0 if state is None else state.size

    def residents(self) -> list[int]:
        """Ranks whose memory is on the GPU, the one that had a turn longest ago first."""
        return self._in(Whereabouts.GPU)

    def taken(self, where: Whereabouts) -> int:
        """Bytes that ranks take there."""
        return sum(state.size for state in self._ranks.values() if state.where is where)

    def expected(self, rank: int) -> int:
        """Bytes that `rank` will take in its turn, as far as can be known."""
        return min(self.budget, max(self.size(rank), self._most))

    # --- what to do -------------------------------------------------------------------

    def has_room(self, rank: int, running: Collection[int], *, free: int | None = None) -> bool:
        """Whether `rank` may compute as things are; arguments as in `decide`."""
        busy, idle = self._others(rank, running)
        return self.where(rank) is Whereabouts.GPU and self._fits(rank, busy, idle, free)

    def decide(
        self,
        rank: int,
        running: Collection[int],
        *,
        free: int | None = None,
        stuck: Collection[int] = (),
        soon: Collection[int] = (),
    ) -> Decision:
        """The next thing to do so that `rank` can compute; ask again when it is done.

        Args:
            rank: has a turn.
            running: ranks that compute, and must stay.
            free: bytes that the GPU has, if that is known: others may use it, too.
            stuck: ranks that the driver could not move.
            soon: ranks that wait for `rank`, and leave last.

        Raises:
            SwapError: it cannot be made to fit.
        """
        busy, idle = self._others(rank, running)
        if self._fits(rank, busy, idle, free):
            return Decision(Do.ADMIT, rank)
        keeping = [one for one in idle if self._ranks[one].cached >= WORTH_TRIMMING_BYTES]
        if keeping:
            return Decision(Do.TRIM, keeping[0])
        movable = [one for one in idle if self.size(one) and one not in stuck]
        movable.sort(key=lambda one: one in soon)
        staying = [one for one in idle if one not in movable]
        enough = self._fits(rank, busy, staying, None) or not busy
        if movable and enough:
            return self._make_room(movable[0])
        if busy:
            return Decision(Do.WAIT, rank)
        is_away = self.where(rank) is not Whereabouts.GPU
        if is_away and (stuck or self._is_short(rank, free)):
            raise self._no_room(rank, free)
        # Nothing is left to move, and nobody computes: it may still be enough.
        return Decision(Do.ADMIT, rank)

    def _others(self, rank: int, running: Collection[int]) -> tuple[list[int], list[int]]:
        """Those on the GPU that compute, and those that do not."""
        others = [one for one in self.residents() if one != rank]
        return (
            [one for one in others if one in running],
            [one for one in others if one not in running],
        )

    def _fits(self, rank: int, busy: Iterable[int], idle: Iterable[int], free: int | None) -> bool:
        if self._is_short(rank, free):
            return False
        taken = sum(self.expected(one) for one in busy) + sum(self.size(one) for one in idle)
        return taken == 0 or taken + self.expected(rank) <= self.budget

    def _is_short(self, rank: int, free: int | None) -> bool:
        """Whether the memory that a rank left with, or is to get beside its own, finds no room."""
        if self.where(rank) is Whereabouts.GPU:
            return free is not None and free < self.expected(rank) - self.size(rank)
        return free is not None and free < self.size(rank)

    def _make_room(self, victim: int) -> Decision:
        size = self.size(victim)
        if self.taken(Whereabouts.HOST) + size <= self._host:
            return Decision(Do.EVICT, victim)
        away = self._in(Whereabouts.HOST)
        if away and self.taken(Whereabouts.DISK) + self.size(away[0]) <= self._disk:
            return Decision(Do.SPILL, away[0])
        raise SwapError(
            f"ranks that left the GPU take {_gib(self.taken(Whereabouts.HOST))} of host memory, "
            f"which has no room for {_gib(size)} more",
            where=f"rank {victim}",
            hint="use more GPUs, a smaller model or batch, or --fold dp; --host-memory raises the "
            "limit, and swap space on a disk adds to it",
        )

    def _no_room(self, rank: int, free: int | None) -> SwapError:
        known = "" if free is None else f"; {_gib(free)} of the GPU are free"
        return SwapError(
            f"there is no room for the {_gib(self.size(rank))} of rank {rank}{known}",
            hint="does another program use the GPU? See nvidia-smi",
        )

    def _in(self, where: Whereabouts) -> list[int]:
        found = [rank for rank, state in self._ranks.items() if state.where is where]
        return sorted(found, key=lambda rank: self._ranks[rank].used)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
