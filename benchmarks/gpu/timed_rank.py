"""A training script on a GPU, with a note of its steps, memory and kernels; it is not changed.

    timed_rank.py SCRIPT [ARGUMENTS]...

Environment, all of it optional: FIDELITY_TIMES is the folder for `rank-N.json`, written when the script
leaves its job (see `note`); FIDELITY_KERNELS a step from whose end on two steps are profiled, whose
kernels are noted, too; FIDELITY_LIMIT the seconds after which the process is killed;
FIDELITY_ALONE, if set, has NCCL take the process for a host of its own, so that ranks may share
a GPU. Without FIDELITY_TIMES nothing is noted.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any


class Watch:
    """Called after each of the optimizer's steps."""

    def __init__(self, torch: Any, profiled_from: int | None) -> None:
        self._torch = torch
        self._profiled_from = profiled_from
        self._profile: Any = None
        base = getattr(torch._C, "_CudaEventBase", None)  # none in builds for CPUs
        self._record = getattr(base, "record", None)
        self._events: list[Any] = []
        self._host_ns: list[int] = []
        self.kernels: dict[str, Any] | None = None

    def __call__(self, *_: Any) -> None:
        """A step has ended, on the host, and will on the current stream."""
        self._host_ns.append(time.perf_counter_ns())
        if not self._torch.cuda.is_initialized():
            return
        event = self._torch.cuda.Event(enable_timing=True)
        # Past the recorder's hooks: to them it would be the program's, and end a piece of work.
        self._record(event, self._torch.cuda.current_stream())
        self._events.append(event)
        if self._profiled_from is not None:
            self._take_profile(len(self._host_ns) - 1 - self._profiled_from)

    def _take_profile(self, step: int) -> None:
        profiler = self._torch.profiler
        if step == 0:
            self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
            self._profile.start()
        elif step == 2:
            self._torch.cuda.synchronize()
            self._profile.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(path))
                self.kernels = kernels_of(json.loads(path.read_text()))

    def note(self) -> dict[str, Any]:
        """Steps in ns by the GPU (`steps_ns`) and by the host, peaks in bytes, kernels."""
        cuda = self._torch.cuda
        steps_ns, peaks = [], {}
        if cuda.is_initialized():
            peaks = {
                "peak_bytes": cuda.max_memory_allocated(),
                "reserved_bytes": cuda.max_memory_reserved(),
            }
            cuda.synchronize()
            pairs = pairwise(self._events)
            steps_ns = [round(1e6 * before.elapsed_time(after)) for before, after in pairs]
        ends = self._host_ns
        host_ns = [after - before for before, after in pairwise(ends)]
        kernels = {} if self.kernels is None else {"kernels": self.kernels}
        return {"steps_ns": steps_ns or host_ns, "host_steps_ns": host_ns, **peaks, **kernels}


def kernels_of(trace: dict[str, Any]) -> dict[str, Any]:
    """Kernels of a profile in order: `rows` of (number of the name, stream, start and duration, ns)."""
    names: dict[str, int] = {}
    rows = [
        (
            names.setdefault(event["name"], len(names)),
            event.get("args", {}).get("stream", 0),
            round(1e3 * float(event["ts"])),
            round(1e3 * float(event["dur"])),
        )
        for event in trace["traceEvents"]
        if event.get("cat") == "kernel"
    ]
    return {"names": list(names), "rows": sorted(rows, key=lambda row: row[2])}


def _write_at_the_end(torch: Any, watch: Watch, path: Path) -> None:
    distributed = torch.distributed
    leave = distributed.destroy_process_group

    def write_and_leave(*groups: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(watch.note()))
        leave(*groups)

    distributed.destroy_process_group = write_and_leave


def main() -> None:
    """Note, and run the script."""
    rank, folder = int(os.environ["RANK"]), os.environ.get("FIDELITY_TIMES")
    if limit := os.environ.get("FIDELITY_LIMIT"):
        signal.alarm(int(limit))
    script, *arguments = sys.argv[1:]
    if os.environ.get("FIDELITY_ALONE"):
        from benchmarks.gpu.plain_run import alone_on_its_host

        alone_on_its_host(rank)
    if folder:
        import torch
        import torch.distributed
        from torch.optim.optimizer import register_optimizer_step_post_hook

        begins = os.environ.get("FIDELITY_KERNELS")
        watch = Watch(torch, int(begins) if begins else None)
        register_optimizer_step_post_hook(watch)
        _write_at_the_end(torch, watch, Path(folder) / f"rank-{rank}.json")
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
