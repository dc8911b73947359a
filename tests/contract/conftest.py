"""Small traces for code blocks to work on, shaped like those of a gloo DDP job."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EPOCH_NS = 1_700_000_000_000_000_000
STEP_US = 1000.0


def _spans(rank: int, steps: int) -> list[dict[str, Any]]:
    """Per step: compute until the rank is ready, then one all_reduce that ends for all at 900."""
    events: list[dict[str, Any]] = []
    main, worker = 10 + rank, 100 + rank

    def add(cat: str, name: str, tid: int, start: float, end: float, **args: Any) -> None:
        numbers = {"External id": len(events) + 1, "Record function id": 0, "Ev Idx": len(events)}
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": main,
                "tid": tid,
                "ts": start,
                "dur": end - start,
                "args": {**numbers, **args},
            }
        )

    for step in range(steps):
        origin = step * STEP_US
        ready = origin + 400 + 100 * rank
        add("user_annotation", f"ProfilerStep#{step}", main, origin, origin + STEP_US - 10)
        add("cpu_op", "aten::mm", main, origin + 20, ready)
        add(
            "user_annotation",
            "gloo:all_reduce",
            worker,
            ready + 5,
            origin + 900 + rank,
            **{
                "Concrete Inputs": [""],
                "Input type": ["float"],
                "Input Strides": [[1]],
                "Input Dims": [[4096]],
            },
        )
        add("cpu_op", "aten::_fused_adamw_", main, origin + 920, origin + 970)
    return events


@pytest.fixture(scope="session")
def write_gloo_traces() -> Callable[..., list[Path]]:
    """`write_gloo_traces(folder, world_size=4, steps=3)` writes rank<r>.json.gz files."""

    def write(folder: Path, *, world_size: int = 4, steps: int = 3) -> list[Path]:
        paths = []
        for rank in range(world_size):
            group = {
                "pg_name": "0",
                "pg_desc": "default_pg",
                "backend_config": "cpu:gloo,cuda:gloo",
                "pg_size": world_size,
                "ranks": list(range(world_size)),
            }
            document = {
                "schemaVersion": 1,
                "deviceProperties": [],
                "distributedInfo": {
                    "backend": "gloo",
                    "rank": rank,
                    "world_size": world_size,
                    "pg_count": 1,
                    "pg_config": [group],
                },
                "displayTimeUnit": "ms",
                "baseTimeNanoseconds": EPOCH_NS,
                "traceEvents": _spans(rank, steps),
            }
            path = folder / f"rank{rank}.json.gz"
            path.write_bytes(gzip.compress(json.dumps(document).encode(), mtime=0))
            paths.append(path)
        return paths

    return write
