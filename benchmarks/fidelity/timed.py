"""A training script, with a note of when each of its steps ended. The script is not changed.

    timed.py SCRIPT [ARGUMENTS]...

Environment: FIDELITY_TIMES is the folder for `rank-N.json` (times of the ends of optimizer steps
in ns) and `spent-N.json` (what each step took, see `SPENT`); FIDELITY_CORES pins ranks to cores, as
in `0:4,1:5+6`: a second one is for all threads but the program's; with FIDELITY_CLAIMS, a folder, each
rank takes a core that no other has, of those it may use, and the one that FIDELITY_BESIDE names for
that, as in `4:20,5:21`; FIDELITY_SLOW makes the layers and the optimizer of a rank take longer, as in
`5:1.2`.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import runpy
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import cores
import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
    register_module_full_backward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

_STEPS_TO_PART_THREADS = 3
"""By then all threads are there that a job has."""
_SLOWED = ("Block", "Embedding", "LayerNorm", "Linear")
"""Classes of layers that compute; what is left is the loss."""

SPENT = ("program_ms", "others_ms", "kept_waiting_ms", "page_faults", "switches")
"""Of a step: processor time of the program's thread (with what the emulator does on it) and of all
others of the process; for how long the program's could have run, but its core had something else to
do; pages that were touched for the first time; how often its core was taken from a thread."""


def _spent() -> list[float]:
    """So far, as in `SPENT`."""
    program, usage = time.thread_time_ns(), resource.getrusage(resource.RUSAGE_SELF)
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        waited = 0
    others = time.process_time_ns() - program
    return [program / 1e6, others / 1e6, waited / 1e6, usage.ru_minflt, usage.ru_nivcsw]


def _of_rank(variable: str, rank: int) -> str | None:
    pairs = (pair.split(":") for pair in os.environ.get(variable, "").split(",") if pair)
    return {int(number): value for number, value in pairs}.get(rank)


def _claim_core(folder: Path) -> tuple[int, int] | None:
    """A core that no other rank has, and the lock that keeps it until this process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for core in sorted(os.sched_getaffinity(0)):
        lock = os.open(folder / str(core), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        return core, lock
    return None


def _slow_down(factor: float) -> None:
    """All layers take `factor` times as long, forward and backward, and so does the optimizer."""
    under_way: dict[str, list[tuple[int, int]]] = {"forward": [], "backward": [], "optimizer": []}

    def begin(way: str) -> Any:
        def note(layer: Any, *_: Any) -> None:
            if way == "optimizer" or type(layer).__name__ in _SLOWED:
                under_way[way].append((id(layer), time.perf_counter_ns()))

        return note

    def end(way: str) -> Any:
        def spin(layer: Any, *_: Any) -> None:
            now = time.perf_counter_ns()
            if not under_way[way] or under_way[way][-1][0] != id(layer):
                return
            _, begun = under_way[way].pop()
            # What is in a layer is slowed down with it.
            until = now + (factor - 1) * (now - begun) if not under_way[way] else now
            while time.perf_counter_ns() < until:
                pass

        return spin

    register_module_forward_pre_hook(begin("forward"))
    register_module_forward_hook(end("forward"))
    register_module_full_backward_pre_hook(begin("backward"))
    register_module_full_backward_hook(end("backward"))
    register_optimizer_step_pre_hook(begin("optimizer"))
    register_optimizer_step_post_hook(end("optimizer"))


def _write_at_the_end(folder: Path, rank: int, ends: list[int], spent: list[list[float]]) -> None:
    """When the program leaves the job, which is over then."""
    leave = dist.destroy_process_group

    def write_and_leave(*groups: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.json").write_text(json.dumps(ends))
        steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(spent)]
        (folder / f"spent-{rank}.json").write_text(json.dumps(steps))
        leave(*groups)

    dist.destroy_process_group = write_and_leave


def main() -> None:
    """Note, pin, slow down, and run the script."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    mine = cores.cores_of(rank)
    claims = os.environ.get("FIDELITY_CLAIMS")
    claimed = _claim_core(Path(claims)) if claims else None
    if claimed is not None:
        core = claimed[0]
        beside = _of_rank("FIDELITY_BESIDE", core)
        mine = (core,) if beside is None else (core, int(beside))
    program = threading.get_native_id()
    if mine:
        cores.stay_on(mine)
    factor = _of_rank("FIDELITY_SLOW", rank)
    if factor is not None:
        _slow_down(float(factor))
    ends: list[int] = []
    spent: list[list[float]] = []

    def note(*_: Any) -> None:
        spent.append(_spent())
        ends.append(time.perf_counter_ns())
        if len(ends) <= _STEPS_TO_PART_THREADS:
            cores.part_threads(mine, program)

    register_optimizer_step_post_hook(note)
    folder = os.environ.get("FIDELITY_TIMES")
    if folder:
        _write_at_the_end(Path(folder), rank, ends, spent)
    script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
