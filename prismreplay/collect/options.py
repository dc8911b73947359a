"""How to collect a job's graph, and what has come of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from prismreplay.collect import stale
from prismreplay.collect.gpu_turns import GpuReport
from prismreplay.tensors.choices import TensorChoices
from prismreplay.tensors.recording import RecordingSummary

__all__ = ["CollectOptions", "CollectReport"]


@dataclass(frozen=True)
class CollectOptions:
    """How to collect.

    Args:
        world_size: ranks of the job.
        devices: devices to run them on.
        per_device: ranks that compute on one device at a time.
        local_world_size: ranks of one host, as the program sees it; None: all.
        log_dir: where the output of ranks goes; None: beside the result.
        shown: ranks whose output is passed on.
        quiet_stdout: pass output on to stderr only.
        shm_dir: folder for the tensors that ranks hand over; None: memory.
        mirror_above: payload in bytes of the largest collectives that are performed; of larger ones
            a rank gets what it would if all gave what it gives. None: all are performed.
        gpu_bytes: of each GPU that ranks may take together; None: most of what is free.
        host_bytes: of the host that ranks without room on a GPU may take; None: most of it.
        tensors: what comes and goes with communications.
    """

    world_size: int
    devices: int = 1
    per_device: int = 1
    local_world_size: int | None = None
    log_dir: Path | None = None
    shown: Collection[int] = (0,)
    quiet_stdout: bool = False
    shm_dir: Path | None = None
    mirror_above: int | None = None
    gpu_bytes: int | None = None
    host_bytes: int | None = None
    tensors: TensorChoices = field(default_factory=TensorChoices)

    @property
    def slots(self) -> int:
        """Ranks that compute at a time."""
        return min(self.world_size, self.devices * self.per_device)


@dataclass(frozen=True)
class CollectReport:
    """What was run and written.

    `context_switches` were made; `naive_context_switches` would have been made, on the same
    program, by taking ranks in turn and swapping each out when it blocks (None: too long a program
    to count). `rounds` is the number of turns of the rank that needed most: 1 when every rank ran
    from start to end in one go. `most_running` ranks computed at a time. `peak_memory_bytes` counts
    what all ranks took together, shared pages in parts; `rank_memory_bytes` is the largest resident
    size of one rank, shared pages included. `supplied` communications were answered without
    partners; `mirrored` calls of ranks were of collectives that were not performed; `unreceived`
    messages were sent to ranks that never received them. `folded_ranks` are represented by others
    in the graph, of which `checked_ranks` ran to be compared, and `uneven_all_to_all` of theirs
    differed in size. `gpu` says what sharing GPUs took, where there are any. Times in seconds;
    `start_s` is part of `wall_s`.
    """

    output: Path
    world_size: int
    slots: int
    steps: tuple[int, ...]
    nodes: int
    groups: int
    collectives: int
    messages: int
    supplied: int
    unreceived: int
    context_switches: int
    naive_context_switches: int | None
    rounds: int
    most_running: int
    start_s: float
    wall_s: float
    peak_memory_bytes: int
    rank_memory_bytes: int
    log_dir: Path
    recording: RecordingSummary | None = None
    folded_ranks: int = 0
    checked_ranks: tuple[int, ...] = ()
    uneven_all_to_all: int = 0
    policies: dict[str, int] = field(default_factory=dict)
    cleaned: stale.Cleaned = field(default_factory=stale.Cleaned)
    gpu: GpuReport | None = None
    mirrored: int = 0
