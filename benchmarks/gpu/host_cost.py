"""Where the host's time goes for each operation that is recorded or emulated on a GPU.

    python benchmarks/gpu/host_cost.py --out host_cost.json

(a) What `record` does for buckets as DDP makes them: 50 all-reduces a step in a world of one, waited for by
futures at the step's end; whole, with parts of it left out, and piece by piece. (b) `emulate` of a world of
two: the sandbox role's all-reduces, waited for at once or later, piece by piece and step by step. Times of
pieces are without those of pieces that they call, and with some 0.4 us of the clock each. At most 60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

STEPS, CALLS, LIMIT_S = 4, 20, 58
WARM_S = 1.1
"""Twice as long as between two looks at the clocks of host and device."""
RUNTIME = str(REPO / "prismreplay/runtime/host_cost.py")
FOLDER_VARIABLE = "HOST_COST_FOLDER"


class Pieces:
    """Times of functions, each without what it calls of the others."""

    def __init__(self):
        self.times: dict[str, list[float]] = defaultdict(list)
        self.inside = [0]
        self.totals: list[float] = []
        self.undo = []

    def timed(self, call, name: str):
        """The same function, timed."""
        now, inside, times = time.perf_counter_ns, self.inside, self.times[name]

        def measured(*arguments, **named):
            inside.append(0)
            begun = now()
            try:
                return call(*arguments, **named)
            finally:
                took = now() - begun
                within = inside.pop()
                inside[-1] += took
                times.append(took - within)

        # The recorder looks at its callers, up to the first that is not of the runtime.
        measured.__code__ = measured.__code__.replace(co_filename=RUNTIME)
        return measured

    def watch(self, owner, *names: str) -> None:
        """Time methods of a class, or functions that a module knows."""
        for name in names:
            found = vars(owner).get(name) or getattr(owner, name)
            self.undo.append((owner, name, found))
            label = f"{getattr(owner, '__name__', owner).rpartition('.')[2]}.{name}"
            setattr(owner, name, self.timed(found, label))

    def leave(self) -> None:
        """Time nothing any more."""
        for owner, name, found in reversed(self.undo):
            setattr(owner, name, found)
        self.undo.clear()

    def take(self, operations: int) -> list[dict[str, object]]:
        """What was measured since the last call, by piece."""
        rows = [
            {
                "piece": name,
                "calls an operation": round(len(times) / operations, 2),
                "us an operation": round(sum(times) / operations / 1e3, 2),
                "median us": round(statistics.median(times) / 1e3, 2),
            }
            for name, times in self.times.items()
            if times
        ]
        for times in self.times.values():
            times.clear()
        self.inside[:] = [0]
        return sorted(rows, key=lambda row: -row["us an operation"])


def show(name: str, rows: list[dict[str, object]]) -> None:
    """A table."""
    print(f"\n{name}\n{'us/op':>8} {'calls':>7} {'median':>8}  piece")
    for row in rows:
        print(
            f"{row['us an operation']:8.2f} {row['calls an operation']:7.2f}"
            f" {row['median us']:8.2f}  {row['piece']}"
        )
    print(f"{sum(row['us an operation'] for row in rows):8.2f} in all", flush=True)


# (a) record ----------------------------------------------------------------------------------


def watch_recording(pieces: Pieces) -> None:
    """All that a recorded operation goes through."""
    import torch

    from prismreplay.runtime import call_sequence, process_group, recording
    from prismreplay.runtime.call_sequence import CallSequence
    from prismreplay.runtime.cuda_streams import CudaDevices
    from prismreplay.runtime.device_time import Timeline
    from prismreplay.runtime.futures import FutureQueue, PendingFuture
    from prismreplay.runtime.graph_recorder import GraphRecorder
    from prismreplay.runtime.lanes import Lanes
    from prismreplay.runtime.process_group import PrismProcessGroup
    from prismreplay.runtime.recording import RecordRole
    from prismreplay.runtime.shelves import Shelf
    from prismreplay.runtime.works import PrismWork
    from prismtrace.recorder import SpanWriter

    watch = pieces.watch
    watch(PrismProcessGroup, "allreduce", "_on_real")
    watch(CallSequence, "issue", "_number")
    watch(process_group, "plain")
    watch(call_sequence, "spec_of", "payload_bytes", "reduction", "Op")
    watch(GraphRecorder, "issued", "waiting", "waited", "_add_segment", "_enqueue", "_go_on")
    watch(Lanes, "find")
    watch(SpanWriter, "add", "amend")
    watch(Timeline, "mark", "follow_all", "communication", "segment", "waited", "_note_memory")
    watch(CudaDevices, "record", "ready", "current", "after", "new_event", "memory")
    watch(RecordRole, "submit", "_put_beside")
    watch(recording, "found_by_backend")
    watch(Shelf, "issued", "keep")
    watch(PrismWork, "__init__", "get_future", "_finish")
    watch(PendingFuture, "__init__", "complete", "set_result")
    watch(FutureQueue, "hand_out", "finish_all")
    watch(torch._jit_internal, "_extract_tensors")


def record_costs() -> dict[str, object]:
    """Of buckets."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    tensor = torch.ones(1 << 20 if on_gpu else 4, device="cuda" if on_gpu else "cpu")
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = Buckets(None, tensor, synchronize)
        found["NCCL alone, us"] = plain.median()
        for name in VARIANTS:
            found[f"{name}, us"] = Buckets(Path(folder), tensor, synchronize, name).median()
            print(f"{name}: {found[f'{name}, us']:.1f} us", flush=True)
        pieces = Pieces()
        whole = Buckets(Path(folder), tensor, synchronize, pieces=pieces)
        watch_recording(pieces)
        whole.median(1)
        pieces.take(1)
        whole.warm_up = lambda: None
        found["all pieces, us"] = whole.median(20)
        found["pieces"] = pieces.take(20 * Buckets.count)
        pieces.leave()
        found["NCCL alone again, us"] = plain.median()
    synchronize()
    print(json.dumps({key: one for key, one in found.items() if key != "pieces"}, indent=1))
    show("record: a bucket", found["pieces"])
    dist.destroy_process_group()
    return found


class HostOnly:
    """To try the script itself."""

    host_ns = staticmethod(time.perf_counter_ns)

    def ready(self):
        """Never."""
        return False


VARIANTS = (
    "recorded",
    "without followers",
    "futures without devices",
    "without asking for memory",
    "nothing kept",
    "without a thread that writes",
)


class Buckets:
    """Steps of all-reduces, recorded (or not, without a folder)."""

    count = 50

    def __init__(self, folder, tensor, synchronize, variant="recorded", pieces=None):
        import torch.distributed as dist

        self.tensor, self.synchronize, self.futures = tensor, synchronize, None
        self.options = dist.AllreduceOptions()
        self.options.asyncOp = True
        self.group = real = dist.group.WORLD
        self.step_over = lambda: None
        if folder is None:
            return
        if pieces is not None:
            real = SimpleNamespace(allreduce=pieces.timed(real.allreduce, "NCCL's allreduce"))
        self.record(folder, variant, real)

    def record(self, folder, variant, real):
        """What `recording.start` makes, less the hooks on the program."""
        import prismtrace as pt
        from prismreplay.runtime.cuda_streams import CudaDevices, current_stream
        from prismreplay.runtime.device_time import Timeline
        from prismreplay.runtime.futures import FutureQueue, PendingFuture
        from prismreplay.runtime.graph_recorder import GraphRecorder
        from prismreplay.runtime.operations import Group
        from prismreplay.runtime.process_group import PrismProcessGroup
        from prismreplay.runtime.recording import RecordRole
        from prismreplay.runtime.shelves import Kept

        self.devices = CudaDevices() if self.tensor.is_cuda else HostOnly()
        beside = variant != "without a thread that writes"
        writer = pt.SpanWriter(folder / f"{variant}-{id(self)}.spool", background=beside)
        timeline = Timeline(self.devices, writer)
        recorder = GraphRecorder(writer, timeline=timeline, current_stream=current_stream)
        self.futures = FutureQueue(recorder.waits_together)
        role = RecordRole(recorder, timeline)
        if variant == "without followers":
            self.devices.connections = lambda: 0
        if variant == "without asking for memory":
            timeline._note_memory = lambda *_: None
        if variant == "nothing kept":
            kept = Kept(None, lambda: True)
            role._shelves["0/0"] = SimpleNamespace(issued=lambda: None, keep=lambda *_: kept)
        self.bare = variant == "futures without devices"
        self.make_future = PendingFuture
        self.group = PrismProcessGroup(
            Group("0", (0,), 0, "nccl"), role, recorder, self.futures, None,
            {"cuda": "nccl"}, real=real,
        )  # fmt: skip
        self.step_over = recorder.position.step_over

    def step(self):
        """50 operations; what DDP's reducer and the end of a backward pass do with them."""
        works = [self.group.allreduce([self.tensor], self.options) for _ in range(self.count)]
        if self.futures is None:
            for future in [work.get_future() for work in works]:
                future.wait()
            return
        if self.bare:
            for work in works:
                work._future = self.make_future(work._wait_by_future, ready=work.is_completed)
        self.futures._waiting += [work.get_future() for work in works]
        self.futures.finish_all()

    def warm_up(self):
        """Until events that were put into streams are given out again, as in a program that runs on."""
        until = time.monotonic() + WARM_S
        while time.monotonic() < until:
            self.step()
            self.synchronize()
            self.step_over()

    def median(self, steps=40):
        """Microseconds an operation."""
        took = []
        self.warm_up()
        for _ in range(steps):
            begun = time.perf_counter()
            self.step()
            took.append((time.perf_counter() - begun) / self.count * 1e6)
            self.synchronize()
            self.step_over()
        return statistics.median(took[steps // 3 :])


# (b) the sandbox role -------------------------------------------------------------------------


def watch_emulation(pieces: Pieces) -> bool:
    """What an operation of a sandbox rank goes through; False: it has no GPU."""
    if "prismreplay.run.device_role" not in sys.modules:
        return False
    import torch

    from prismreplay.plugin.advancing import Advancer
    from prismreplay.plugin.prepared_codes import PreparedCodes
    from prismreplay.run import device_role
    from prismreplay.run.device_codes import PlaceCodes
    from prismreplay.run.device_pacing import PlanPacer
    from prismreplay.run.device_plan import DevicePlan
    from prismreplay.run.device_role import DeviceRole
    from prismreplay.run.device_sources import DeviceSources
    from prismreplay.run.device_streams import CudaStreams
    from prismreplay.run.device_uses import GroupUses
    from prismreplay.run.device_work import DeviceWork, Launcher
    from prismreplay.run.following import GraphFollower
    from prismreplay.runtime.call_sequence import CallSequence

    watch = pieces.watch
    watch(DeviceRole, "submit", "_launch", "_perform", "_way", "_computes", "_compute")
    watch(DeviceRole, "_given", "_combine")
    watch(device_role, "DeviceWork", "mirror", "is_asynchronous")
    watch(GraphFollower, "place")
    watch(GroupUses, "note")
    watch(Launcher, "launch", "wait", "_shelf")
    watch(DeviceWork, "forget_tensors")
    watch(CudaStreams, "current", "record", "wait", "new_event", "handle", "using", "new_stream")
    watch(DeviceSources, "way")
    watch(PlanPacer, "arrive", "hold", "_programs", "_begin", "_look")
    watch(DevicePlan, "program", "is_boundary", "batch")
    watch(PlaceCodes, "code", "_arrive", "_encoded")
    watch(Advancer, "check", "arrive", "launch", "_start", "__init__", "begin")
    watch(PreparedCodes, "prepare")
    watch(CallSequence, "issue")
    watch_recording_of_runs(pieces)
    watch(torch, "add")
    return True


def watch_recording_of_runs(pieces: Pieces) -> None:
    """What the rank's recorder does beside it."""
    from prismreplay.runtime.device_time import Timeline
    from prismreplay.runtime.graph_recorder import GraphRecorder
    from prismreplay.runtime.works import PrismWork

    pieces.watch(GraphRecorder, "issued", "waiting", "waited")
    pieces.watch(Timeline, "mark", "end_in", "_note_memory", "settle", "waited")
    pieces.watch(PrismWork, "__init__", "_finish")


def program() -> None:
    """A rank of the emulated job."""
    import torch
    import torch.distributed as dist

    signal.alarm(LIMIT_S)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group(backend)
    tensor = torch.ones(1 << 20, device="cuda" if backend == "nccl" else "cpu")
    pieces, found = Pieces(), {}
    watched = watch_emulation(pieces)
    for step in range(STEPS):
        with torch.profiler.record_function(f"step {step}"):
            for name, later in (("waited for at once", False), ("waited for later", True)):
                begun = time.perf_counter()
                works = [dist.all_reduce(tensor, async_op=later) for _ in range(CALLS)]
                issued = time.perf_counter()
                for work in works if later else ():
                    work.wait()
                over = time.perf_counter()
                found[f"step {step}, {name}"] = {
                    "issuing, us": (issued - begun) / CALLS * 1e6,
                    "waiting, us": (over - issued) / CALLS * 1e6,
                    "pieces": pieces.take(CALLS),
                }
        if backend == "nccl":
            torch.cuda.synchronize()
    if watched:
        path = Path(os.environ[FOLDER_VARIABLE], f"{time.time_ns()}-{dist.get_rank()}.json")
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def emulation_costs(limit_s: float) -> dict[str, object]:
    """Of slices (no plan) and of the run (with one)."""
    from prismreplay.local_ranks import with_paths

    with tempfile.TemporaryDirectory() as name:
        told = Path(name, "told")
        told.mkdir()
        command = [sys.executable, "-m", "prismreplay.cli", "emulate", "--world-size", "2"]
        command += ["--sandbox", "0", "--json", "-o", f"{name}/emulation"]
        command += ["--", __file__, "--program"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, FOLDER_VARIABLE: str(told)}
        with subprocess.Popen(
            command, env=with_paths(environment, REPO),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as child:  # fmt: skip
            try:
                said = child.communicate(timeout=limit_s)[0]
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGINT)
                try:
                    said = child.communicate(timeout=5)[0]
                except subprocess.TimeoutExpired:
                    os.killpg(child.pid, signal.SIGKILL)
                    said = child.communicate()[0]
        files = sorted(told.glob("*.json"))
        if child.returncode or not files:
            print(f"emulate ended with {child.returncode}: {said[-4000:]}", flush=True)
        runs = [json.loads(path.read_text()) for path in files]
    for number, run in enumerate(runs):
        kind = "the run" if number == len(runs) - 1 and not child.returncode else "a slice"
        for title, one in run.items():
            print(f"{kind}, {title}: {one['issuing, us']:.1f} us, wait {one['waiting, us']:.1f} us")
            if title.startswith(("step 0", f"step {STEPS - 1}")) and number in (0, len(runs) - 1):
                show(f"{kind}, {title}", one["pieces"])
    return {"runs": runs, "exit code": child.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("host_cost.json"))
    parser.add_argument("--program", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.program:
        program()
        return
    if options.record:
        options.out.write_text(json.dumps(record_costs()))
        return
    until = time.monotonic() + LIMIT_S
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        there = Path(name, "record.json")
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        command = [sys.executable, __file__, "--record", "--out", there]
        try:
            subprocess.run(command, env=environment, timeout=0.6 * LIMIT_S, check=True)
            results["record"] = json.loads(there.read_text())
        except (subprocess.SubprocessError, OSError) as error:
            results["record"] = {"failed": str(error)}
            print(f"record: {error}", flush=True)
    results["emulate"] = emulation_costs(until - 6 - time.monotonic())
    options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
