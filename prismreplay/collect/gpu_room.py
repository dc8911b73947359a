"""What memory there is for ranks: of which GPUs, and of the host for those that have to leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismcalib.memory import available_bytes
from prismreplay.collect.gpus import Gpu, Nvml, find_gpus
from prismreplay.collect.rank_memory import swap_space

__all__ = ["Room", "find_room", "visible_gpus"]

GPU_SHARE = 0.85
"""Of a GPU's free memory, what ranks may take; the rest is for growth that nobody foresees."""
HOST_SHARE = 0.8
"""Of the host's available memory, what ranks that have left their GPU may take."""


@dataclass(frozen=True)
class Room:
    """Where ranks' memory may be.

    Args:
        gpus: that ranks use; rank r is on the one with number r modulo how many there are.
        gpu_bytes: of each GPU that ranks may take; None: most of what is free.
        host_bytes: of the host for ranks that had to leave.
        disk_bytes: of its swap space.
    """

    gpus: Sequence[Gpu]
    gpu_bytes: int | None = None
    host_bytes: int = 0
    disk_bytes: int = 0

    def home(self, rank: int) -> int:
        """The number of the GPU of `rank`."""
        return rank % len(self.gpus)

    def budget(self, number: int) -> int:
        """Bytes of a GPU that ranks may take."""
        gpu = self.gpus[number]
        free = gpu.total_bytes - gpu.taken_bytes
        return int(free * GPU_SHARE) if self.gpu_bytes is None else min(self.gpu_bytes, free)


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that ranks can use: none if torch is built without CUDA."""
    import torch

    return find_gpus(Nvml.load()) if torch.version.cuda is not None else ()


def find_room(most: int, gpu_bytes: int | None, host_bytes: int | None) -> Room | None:
    """The memory of this machine; None where there is no GPU.

    Args:
        most: GPUs to use.
        gpu_bytes: of each that ranks may take; None: most of what is free.
        host_bytes: of the host that ranks may take; None: most of what is available.
    """
    gpus = visible_gpus()[:most]
    if not gpus:
        return None
    if host_bytes is None:
        host_bytes = int((available_bytes() or 0) * HOST_SHARE)
    return Room(gpus, gpu_bytes, host_bytes, swap_space())
