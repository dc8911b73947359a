"""Which cores and GPUs slices run on, and how many of them at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Places", "gpu_places", "places_of"]


@dataclass(frozen=True)
class Places:
    """Cores for each slice that runs at a time; an empty room means all cores.

    `timing_true`: every rank has a core of its own, and the emulator has one, too; or every rank
    has a GPU of its own. `gpus` are those of each room.
    """

    rooms: tuple[tuple[int, ...], ...]
    timing_true: bool
    gpus: tuple[tuple[str, ...], ...] = ()

    @property
    def at_once(self) -> int:
        """Slices that run at a time."""
        return len(self.rooms)


def places_of(
    devices: int | None,
    rotation: Sequence[Sequence[int]],
    usable: Sequence[int] | None = None,
    assistants: int = 0,
) -> Places:
    """Rooms for the slices of a rotation.

    A slice needs a core for each of its ranks and one for the emulator, which hands data over and
    plays the virtual ranks; assistants need one each, too. With too few cores one slice runs at a
    time, on all of them.

    Args:
        devices: cores to use; None: all that this process may.
        rotation: the ranks of every slice.
        usable: numbers of the cores that this process may use; None: ask the system.
        assistants: of every slice.
    """
    cores = sorted(os.sched_getaffinity(0)) if usable is None else list(usable)
    wanted = devices or len(cores)
    needed = max(map(len, rotation), default=1) + 1 + assistants
    if wanted > len(cores) or wanted < needed:
        # More than there are: cores are shared, and the times show it.
        shared = () if wanted >= len(cores) else tuple(cores[:wanted])
        count = max(1, wanted // needed)
        return Places((shared,) * min(count, max(1, len(rotation))), timing_true=False)
    count = min(wanted // needed, max(1, len(rotation)))
    rooms = [tuple(cores[at * needed : (at + 1) * needed]) for at in range(count)]
    return Places(tuple(rooms), timing_true=True)


def gpu_places(
    devices: int | None,
    rotation: Sequence[Sequence[int]],
    gpus: Sequence[str],
    usable: Sequence[int] | None = None,
) -> Places:
    """Rooms for the slices of a rotation whose ranks compute on GPUs, one each.

    Cores are shared out evenly, two or more for every rank; where there are fewer, rooms have all
    of them.

    Args:
        devices: GPUs to use; None: all.
        rotation: the ranks of every slice.
        gpus: names of those that there are.
        usable: as for `places_of`.
    """
    cores = sorted(os.sched_getaffinity(0)) if usable is None else list(usable)
    used = list(gpus[: devices or len(gpus)])
    needed = max(map(len, rotation), default=1)
    if needed > len(used):
        return Places(((),), timing_true=False, gpus=(tuple(used),))
    count = min(len(used) // needed, max(1, len(rotation)))
    each = len(cores) // count
    apart = count > 1 and each >= 2 * needed
    return Places(
        tuple(tuple(cores[at * each : (at + 1) * each]) if apart else () for at in range(count)),
        timing_true=True,
        gpus=tuple(tuple(used[at * needed : (at + 1) * needed]) for at in range(count)),
    )
