"""Which process groups a program makes, found out by running its rank 0 alone for a moment.

Every rank makes every group, also those that it is not a member of. Rank 0 runs until it
communicates in a group other than the world's, sends or receives, or starts a backward pass.
What it communicates before gives what it would if all ranks contributed what rank 0 does: its
tensors hold sensible numbers, as programs look at them (DistributedDataParallel compares the
shapes of parameters).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prismreplay.collect.coordinator import Coordinator
from prismreplay.collect.executor import Executor
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.pool import Job, Observed, start_rank
from prismreplay.collect.serving import Service
from prismreplay.errors import DeadlockError
from prismreplay.runtime.operations import MESSAGES, Group, Op
from prismreplay.tensors.folding import KnownGroup
from prismreplay.tensors.producing import own_share

__all__ = ["scout"]

_MOST_OPERATIONS = 256


def scout(job: Job, folder: Path) -> tuple[KnownGroup, ...]:
    """The groups that the program makes, in that order.

    Call it in a process without other threads: the scout is forked from it.

    Args:
        job: as all ranks run it.
        folder: of the run; the scout's output goes there.

    Raises:
        RankFailedError: the program fails on rank 0.
    """
    found, logs = folder / "groups.jsonl", RankLogs(folder / "scout", 1, ())
    logs.prepare()
    observing = replace(job, observe=functools.partial(_observe, found))
    streams, _ = logs.open(0)
    coordinator = Coordinator([0], 1, Executor(job.place, _AllAlike()))
    service = Service(coordinator, [start_rank(observing, 0, streams, [])], logs)
    try:
        # It waits for another rank: so it knows all groups that it can know alone.
        with contextlib.suppress(DeadlockError):
            service.run()
    finally:
        service.stop()
    return _read(found)


class _AllAlike:
    """A supplier that takes all ranks to be alike; see `prismreplay.collect.supplying.Supplier`."""

    def supply(self, rank: int, op: Op, inputs: Sequence[Any]) -> Sequence[Any]:
        """The rank's own contribution for everybody's; where it has none, its tensors stay."""
        if op.outputs and not inputs:
            return [None] * len(op.outputs)
        return own_share(rank, op, inputs)


def _read(path: Path) -> tuple[KnownGroup, ...]:
    """What the scout wrote to `path`: the groups in the order in which they were made."""
    if not path.exists():
        return ()
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return tuple(KnownGroup(name, desc, tuple(ranks)) for name, desc, ranks in found)


def _observe(path: Path, _rank: int) -> Observed:
    """In the scout: write all groups that are made to `path`, and end when there is enough."""
    from torch.distributed import distributed_c10d

    seam = "_new_process_group_helper"
    setattr(distributed_c10d, seam, _noted(getattr(distributed_c10d, seam), path))
    return Observed(_Scout(), finish=_nothing, flush=_nothing)


def _noted(make: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Torch's function that makes a group, with a note of its name and members."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def note(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        ranks = given["global_ranks_in_group"] or range(given["group_size"])
        desc = given.get("group_desc")
        line = json.dumps(
            [str(given["group_name"]), "" if desc in (None, "undefined") else desc, list(ranks)]
        )
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return make(*arguments, **keywords)

    return note


def _nothing() -> None:
    pass


class _Scout:
    """Ends the process at the first communication that shows that all groups are there."""

    def __init__(self) -> None:
        self._issued = 0
        self._world: str | None = None

    def joined(self, group: Group) -> None:
        """The first group is the world's."""
        self._world = self._world or group.key

    def issued(self, op: Op) -> int:
        """Nothing is handed over: the process ends first, if this is enough."""
        import torch

        self._issued += 1
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        inner = op.group.key != self._world or op.call in MESSAGES
        if inner or in_backward or self._issued > _MOST_OPERATIONS:
            os._exit(0)
        return self._issued

    def waiting(self, token: int) -> None:
        """Does not matter."""

    def waited(self, token: int, source: int | None = None) -> None:
        """Does not matter."""

    def completed(self, token: int, start_ns: int, end_ns: int) -> None:
        """Does not matter."""
