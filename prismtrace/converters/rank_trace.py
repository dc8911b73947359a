"""What every format's reader is told and gives back: one rank's nodes and communications."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.placing import RankComms

__all__ = ["Beside", "RankFacts", "RankOptions", "RankTrace", "beside_of"]


@dataclass(frozen=True)
class Beside:
    """A file that tells more about the rank of another one; size and time tell its versions."""

    rank: int | None
    """Null: the only one, of the only other file."""
    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class RankOptions:
    """How to read each file; see `prismtrace.converters.convert`."""

    grain: str = "communication"
    step_from: str = "auto"
    comm_kernels: tuple[str, ...] = ()
    keep_args: tuple[str, ...] = ()
    recover: bool = False
    rank_of_pid: tuple[tuple[str, int], ...] = ()
    """``PID`` or ``FILE:PID`` -> rank, for files that hold several processes."""
    execution_traces: tuple[Beside, ...] = ()
    """Execution traces beside profiles of the same ranks."""


@dataclass(frozen=True)
class RankFacts:
    """Which rank a profile is of, and what it says about the job."""

    rank: int
    world_size: int | None
    host: str | None
    clock: str | None
    """Ranks with one clock have equal texts; null: a clock of its own."""
    groups: tuple[NamedGroup, ...]
    source: str
    """Whose clock the times are in, as the header's clock domains name it."""


@dataclass(frozen=True)
class RankTrace:
    """What a file holds of one rank. The nodes are in a temporary Parquet file, the rest is small.

    `nodes` has all columns but id, rank, group, seq and peer; its `stream` is a label.
    """

    path: Path
    rank: int
    world_size: int | None
    host: str | None
    groups: tuple[NamedGroup, ...]
    comms: RankComms
    streams: tuple[str, ...]
    steps: tuple[int, ...]
    nodes: Path
    rows: int
    counts: dict[str, int]
    source: str = "kineto"
    """Whose clock the times are in, as the header's clock domains name it."""
    process: str | None = None
    """Which process of its file it is, for people, where a file holds several."""
    pid: int | None = None
    """Number of its process, in files that hold processes."""
    pids: tuple[int, ...] = ()
    """Those of all processes of its file that ran kernels."""
    timed: bool = True
    """The nodes have times."""
    highest_rank: int = 0
    """Of those that communications name as partners."""


def beside_of(beside: Sequence[Beside], rank: int) -> Path | None:
    """The file that tells more about a rank, if there is one."""
    return next((Path(entry.path) for entry in beside if entry.rank in (rank, None)), None)
