"""One process's profile as tables: what every profiler's reader produces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

__all__ = ["CATEGORIES", "Profile"]

CATEGORIES = (
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_sync",
    "cuda_runtime",
    "cuda_driver",
    "user_annotation",
    "cpu_op",
)
"""What an event is; the names are those of the PyTorch profiler."""


@dataclass(frozen=True)
class Profile:
    """What a profiler saw of one rank.

    `events` has one row per kept complete event: row, cat (one of CATEGORIES), name, tid,
    start_ns (absolute), dur_ns, correlation, stream, bytes, and x_arg_<name> for every argument
    asked for. `comms` and `syncs` add what communication and synchronization events say; their
    `row` joins them to `events`.

    `counts` holds `events` (in the file), `kept`, and under its own name everything that was
    dropped (`dropped-*`), repaired (`repaired-*`), clamped or found missing.
    """

    path: Path
    events: pl.DataFrame
    comms: pl.DataFrame
    syncs: pl.DataFrame
    counts: dict[str, int]
    has_gpu: bool
