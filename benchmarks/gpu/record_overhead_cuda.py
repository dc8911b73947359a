"""What recording costs a training step on GPUs: nothing, `prismreplay record`, torch's profiler.

    python benchmarks/gpu/record_overhead_cuda.py --out record_overhead_cuda.json

A GPT of 335 M parameters trains in bf16 with DDP over NCCL, on two GPUs if there are two, else as a
world of one; once with so small a batch that the host cannot keep the device busy (launch-bound), and
once with a larger one (device-bound). All ways run as processes of their own that are there at the same
time and take turns of ten steps, so that a machine that changes its pace does not count. Medians of
blocks and their ratio to the block of `none` in the same round count; each block ends with one
synchronisation. Before that: what marks, followers and their parts cost the host.

Parts that fail are reported in full, and the rest goes on; `--budget` bounds it all in seconds.
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
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = ("none", "record", "profiler CUDA", "profiler CPU+CUDA")
BLOCK = 10
WARM_UP = 6
LONGEST_S = 170
LOOK_S = 0.002


# One rank of a job ---------------------------------------------------------------------------


def make_model(size: str):
    """A GPT; `size` is width x layers."""
    import torch
    from torch import nn

    width, layers = (int(number) for number in size.split("x"))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            batch, length, _ = x.shape
            heads = self.qkv(self.before(x)).view(batch, length, 3, width // 64, 64)
            query, key, value = heads.permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
            return x + self.down(nn.functional.gelu(self.up(self.after(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(32000, width)
            self.layers = nn.ModuleList(Block() for _ in range(layers))
            self.head = nn.Linear(width, 32000, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            x = self.tokens(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    return Model()


def train(options: argparse.Namespace) -> None:
    """One rank: trains a block of steps whenever it is its turn, and writes how long it took."""
    import torch
    import torch.distributed as dist
    from torch import nn

    signal.alarm(LONGEST_S)  # nothing hangs for longer
    on_gpu = torch.cuda.is_available()
    device, synchronize = torch.device("cpu"), lambda: None
    if on_gpu:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        synchronize = torch.cuda.synchronize
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    rank, folder = dist.get_rank(), Path(options.folder)
    model = make_model(options.size).to(device)
    parameters = sum(each.numel() for each in model.parameters())
    if options.fsdp:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_gpu)
    done = 0

    def steps(batch: int, count: int) -> None:
        nonlocal done
        shape = (batch, options.length + 1)
        tokens = torch.randint(0, 32000, shape, device=device)
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        done += count

    def block(batch: int) -> dict[str, float]:
        steps(batch, 2)
        synchronize()
        profiler = None
        if options.way.startswith("profiler"):
            kinds = [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
            if "CPU" in options.way or not on_gpu:
                kinds.append(torch.profiler.ProfilerActivity.CPU)
            profiler = torch.profiler.profile(activities=kinds)
            profiler.start()
        first, begun = done, time.perf_counter()
        steps(batch, BLOCK)
        issued = time.perf_counter()
        synchronize()
        over = time.perf_counter()
        if profiler is not None:
            profiler.stop()
        return {
            "first_step": first,
            "step_ms": (over - begun) / BLOCK * 1e3,
            "issuing_ms": (issued - begun) / BLOCK * 1e3,
        }

    batches = [int(each) for each in options.batches.split(",")]
    steps(batches[0], WARM_UP)
    synchronize()
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    for batch in batches[1:]:
        steps(batch, WARM_UP)
    synchronize()
    tell(folder / f"ready-{rank}", {"peak_bytes": peak, "parameters": parameters})
    number = 0
    while True:
        turn = folder / f"turn-{number}"
        if not turn.exists():
            time.sleep(LOOK_S)
            continue
        batch = json.loads(turn.read_text())
        if batch is None:
            break
        tell(folder / f"done-{number}-{rank}", block(batch))
        number += 1
    dist.barrier()
    dist.destroy_process_group()


def tell(path: Path, what: object) -> None:
    """Leave a file that is whole as soon as it is there."""
    path.with_suffix(".part").write_text(json.dumps(what))
    path.with_suffix(".part").rename(path)


# The parts -----------------------------------------------------------------------------------


def each_us(call, count=1000) -> float:
    """Microseconds of a call."""
    call()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count * 1e6


def cost_of_a_mark() -> dict[str, float]:
    """Microseconds on the host, and how wide pairs of stamps of both clocks are."""
    import torch
    import torch.distributed as dist

    import prismtrace as pt
    from prismreplay.runtime.cuda_streams import CudaDevices
    from prismreplay.runtime.device_time import Timeline

    torch.cuda.set_device(0)
    torch.ones(1, device="cuda")
    devices = CudaDevices()
    with tempfile.TemporaryDirectory() as folder:
        timeline = Timeline(devices, pt.SpanWriter(Path(folder) / "0.spool"))
        timeline.mark()
        clock = timeline._devices[0]

        def settle() -> float:
            """Have all marks told, so that their events are used again; microseconds a mark."""
            torch.cuda.synchronize()
            marks = len(timeline._marks)
            timeline.settle()
            clock.pair()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            timeline.settle()
            assert len(clock.pool) >= marks
            return (time.perf_counter() - begun) / max(marks, 1) * 1e6

        found = {"mark_of_a_new_event_us": each_us(timeline.mark)}
        found["settle_us_a_mark"] = settle()
        found["mark_us"] = each_us(timeline.mark, 500)
        settle()
        here, event = devices.current(), clock.event()
        found["parts: event into a stream, us"] = each_us(lambda: devices.record(event, here))
        found["parts: ready, us"] = each_us(devices.ready)
        found["parts: current stream, us"] = each_us(devices.current)
        found["parts: new event, us"] = each_us(devices.new_event)
        found["pair_us"] = each_us(clock.pair, 20)
        found["memory_us"] = each_us(lambda: devices.memory(0))
        # The same place in a stream, seen by the host: it waits until the device is there.
        wrong = []
        for _ in range(50):
            torch.cuda._sleep(200_000)
            mark = timeline.mark()
            torch.cuda.synchronize()
            seen = devices.host_ns()
            clock.pair()
            clock.place()
            wrong.append(seen - clock.time_of(mark))
        found["residual_ns"] = clock.line.residual_ns
        found["synchronize_returns_after_ns"] = statistics.median(wrong)
        settle()
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        tensor = torch.ones(1 << 20, device="cuda")
        index = iter(range(1 << 30))

        def follow() -> None:
            number = next(index)
            timeline.communication(number, timeline.mark())
            work = dist.all_reduce(tensor, async_op=True)
            timeline.follow(number, work, "group", 0)
            work.wait()
            timeline.waited(number, timeline.mark())

        def plain() -> None:
            dist.all_reduce(tensor, async_op=True).wait()

        work = dist.all_reduce(tensor, async_op=True)
        follower = timeline._follower("group", 0)
        found["parts: a stream waits for a work, us"] = each_us(
            lambda: devices.after(work, follower)
        )
        for _ in range(3):
            each_us(follow, 300)
            settle()
        found["all_reduce_us"] = each_us(plain, 500)
        torch.cuda.synchronize()
        found["all_reduce_followed_us"] = each_us(follow, 300)
        torch.cuda.synchronize()
        found |= cost_of_a_bucket(Path(folder), tensor)
        dist.destroy_process_group()
        timeline.close()
    return found


def cost_of_a_bucket(folder: Path, tensor) -> dict[str, float]:
    """Microseconds of the host for each of 50 all-reduces that are waited for by futures, in the end,
    as DDP does; all that recording does included, and what it does at the end of a step.
    """
    import torch
    import torch.distributed as dist

    import prismtrace as pt
    from prismreplay.runtime.cuda_streams import CudaDevices, current_stream
    from prismreplay.runtime.device_time import Timeline
    from prismreplay.runtime.futures import FutureQueue
    from prismreplay.runtime.graph_recorder import GraphRecorder
    from prismreplay.runtime.operations import Group
    from prismreplay.runtime.process_group import PrismProcessGroup
    from prismreplay.runtime.recording import RecordRole

    real, count = dist.group.WORLD, 50
    options = dist.AllreduceOptions()
    options.asyncOp = True
    writer = pt.SpanWriter(folder / "bucket.spool")
    timeline = Timeline(CudaDevices(), writer)
    recorder = GraphRecorder(writer, timeline=timeline, current_stream=current_stream)
    futures = FutureQueue(recorder.waits_together)
    group, role = Group("0", (0,), 0, "nccl"), RecordRole(recorder, timeline)
    ours = PrismProcessGroup(group, role, recorder, futures, None, {"cuda": "nccl"}, real=real)

    def step(pg, finish) -> None:
        works = [pg.allreduce([tensor], options) for _ in range(count)]
        finish([work.get_future() for work in works])

    def wait(waiting) -> None:
        for future in waiting:
            future.wait()

    def wait_together(waiting) -> None:
        futures._waiting += waiting
        futures.finish_all()

    def cost(pg, finish) -> tuple[float, float]:
        issuing, ending = [], []
        for _ in range(60):
            begun = time.perf_counter()
            step(pg, finish)
            issuing.append((time.perf_counter() - begun) / count * 1e6)
            torch.cuda.synchronize()
            for clock in timeline._devices.values():
                clock.pair()  # so that all is told at once
            torch.cuda.synchronize()
            begun = time.perf_counter()
            recorder.position.step_over()
            ending.append((time.perf_counter() - begun) / count * 1e6)
        return statistics.median(issuing[20:]), statistics.median(ending[20:])

    found = {"bucket_us": cost(real, wait)[0]}
    both = cost(ours, wait_together)
    found["bucket_recorded_us"], found["bucket_at_the_end_of_a_step_us"] = both
    recorder.finish()
    return found


def in_its_own_process() -> dict[str, float]:
    """`cost_of_a_mark`, so that this process has no part of the device."""
    done = subprocess.run(
        [sys.executable, __file__, "--one-mark"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


class Job:
    """The ranks of one way, which wait for their turns."""

    def __init__(self, way: str, ranks: int, folder: Path, options: argparse.Namespace) -> None:
        self.way, self.ranks, self.folder = way, ranks, folder
        self.error: str | None = None
        self.turns = 0
        self.rounds: dict[int, list[dict[str, float]]] = {}
        words = ["--train", way, "--size", options.size, "--batches", options.batches]
        words += [
            "--length",
            str(options.length),
            "--folder",
            str(folder),
            *(["--fsdp"] if options.fsdp else []),
        ]
        folder.mkdir()
        self._thread = threading.Thread(target=self._run, args=(tuple(words),), daemon=True)
        self._thread.start()

    def _run(self, words: tuple[str, ...]) -> None:
        from prismreplay.collect.logs import RankLogs
        from prismreplay.collect.programs import ProgramCall
        from prismreplay.local_ranks import run_ranks
        from prismreplay.record import record_spools

        program = ProgramCall(__file__, words)
        try:
            if self.way == "record":
                record_spools([], self.folder / "spools", program=program, ranks=self.ranks)
            else:
                logs = RankLogs(self.folder / "logs", self.ranks, ())
                logs.prepare()
                run_ranks(program, self.ranks, {**os.environ, "OMP_NUM_THREADS": "1"}, logs)
        except Exception as error:  # noqa: BLE001  told in full, and the rest goes on
            ends = [path.read_text()[-4000:] for path in sorted(self.folder.rglob("rank-*.log"))]
            report = getattr(error, "report", "")
            self.error = "\n".join([traceback.format_exc(), report, *ends])

    def _told(self, name: str, until: float) -> list[dict[str, float]] | None:
        """What all ranks have written; None if they do not in time."""
        paths = [self.folder / f"{name}-{rank}" for rank in range(self.ranks)]
        while self.error is None and time.monotonic() < until:
            if all(path.exists() for path in paths):
                return [json.loads(path.read_text()) for path in paths]
            time.sleep(LOOK_S)
        self.error = self.error or f"{name} is missing"
        return None

    def ready(self, until: float) -> list[dict[str, float]] | None:
        """Wait until it is warm."""
        return self._told("ready", until)

    def turn(self, batch: int, until: float) -> float | None:
        """Have it train a block; milliseconds a step of its slowest rank."""
        tell(self.folder / f"turn-{self.turns}", batch)
        told = self._told(f"done-{self.turns}", until)
        self.turns += 1
        if told is None:
            return None
        slowest = max(told, key=lambda one: one["step_ms"])
        self.rounds.setdefault(batch, []).append(slowest)
        return slowest["step_ms"]

    def end(self) -> None:
        """It has had its last turn."""
        tell(self.folder / f"turn-{self.turns}", None)
        self._thread.join(25)


def measure(ranks: int, options: argparse.Namespace, until: float) -> dict[str, object]:
    """All ways, round by round."""
    batches = [int(each) for each in options.batches.split(",")]
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        jobs = [Job(way, ranks, Path(name, str(at)), options) for at, way in enumerate(WAYS)]
        for job in jobs:
            ready = job.ready(until - 20)
            if ready is not None:
                found[job.way] = {key: ready[0][key] for key in ("peak_bytes", "parameters")}
        longest, rounds = 0.0, 0
        while rounds < options.rounds and time.monotonic() + 1.3 * longest < until - 15:
            begun = time.monotonic()
            for batch in batches:
                for job in jobs[rounds % 4 :] + jobs[: rounds % 4]:
                    if job.error is None:
                        job.turn(batch, until - 10)
            longest = max(longest, time.monotonic() - begun)
            rounds += 1
        for job in jobs:
            job.end()
        for job in jobs:
            entry = found.setdefault(job.way, {})
            entry["rounds"] = {batch: job.rounds.get(batch, []) for batch in batches}
            if job.error is not None:
                entry["error"] = job.error
                print(f"{job.way}: {job.error}", flush=True)
        record = jobs[WAYS.index("record")]
        if record.error is None:
            try:
                found["trace"] = describe(record)
            except Exception:  # noqa: BLE001
                found["trace"] = {"error": traceback.format_exc()}
    return found


def describe(job: Job) -> dict[str, object]:
    """What the recorded trace says of the steps of each batch's last block."""
    import polars as pl

    import prismcalib
    import prismtrace as pt
    from prismreplay.record import assemble_spools

    path = job.folder / "out.parquet"
    made = assemble_spools(job.folder / "spools", path)
    trace = pt.open(path)
    rows = trace.collect()
    mine = rows.filter(rank=0)
    found: dict[str, object] = {
        "nodes": made.nodes,
        "policies": made.policies,
        "findings": [str(each) for each in pt.validate(trace)][:5],
        "untimed": rows["start_ns"].null_count(),
        "memory_peak_bytes": rows["mem_peak_bytes"].max(),
        "uncertainty_ns": [domain.uncertainty_ns for domain in trace.header.clock],
        "streams": len(trace.header.streams),
    }
    for batch, blocks in job.rounds.items():
        first = blocks[-1]["first_step"]
        block = mine.filter(pl.col("step").is_between(first, first + BLOCK - 1))
        starts = block.group_by("step").agg(begin=pl.col("start_ns").min(), nodes=pl.len())
        found[f"batch {batch}"] = {
            "measured_step_ms": blocks[-1]["step_ms"],
            "recorded_step_ms": starts.sort("step")["begin"].diff().median() / 1e6,
            "nodes_a_step": starts["nodes"].median(),
            "communications_a_step": block.filter(pl.col("kind") != "compute").height / BLOCK,
        }
    merged = prismcalib.merge(trace).report
    found["merge_difference"] = merged.difference_ns / merged.recorded_ns
    return found


def part(name: str, results: dict[str, object], call) -> None:
    """Do one part; its error is a result."""
    try:
        results[name] = call()
    except Exception:  # noqa: BLE001
        results[name] = {"error": traceback.format_exc()}
    brief = {
        key: {name: each for name, each in value.items() if name not in ("rounds", "error")}
        if isinstance(value, dict)
        else value
        for key, value in results[name].items()
    }
    print(f"{name}: {json.dumps(brief, indent=1, default=str)}", flush=True)


def show(found: dict[str, object], batches: list[int]) -> None:
    """The table of ratios."""
    plain = found["none"]["rounds"]
    for batch in batches:
        base = [one["step_ms"] for one in plain[batch]]
        issuing = [one["issuing_ms"] for one in plain[batch]]
        if not base:
            print(f"batch {batch}: no block succeeded")
            continue
        bound = "launch-bound" if min(issuing) > 0.9 * min(base) else "device-bound"
        print(
            f"\nbatch {batch}, {bound}: ms a step (least - most) | ratio in a round | issuing ms | peak"
        )
        for way in WAYS:
            mine = found[way].get("rounds", {}).get(batch, [])
            if not mine:
                print(f"  {way:<18} no block succeeded")
                continue
            ms = [one["step_ms"] for one in mine]
            ratios = [one / other - 1 for one, other in zip(ms, base, strict=False)]
            issued = statistics.median(one["issuing_ms"] for one in mine)
            print(
                f"  {way:<18} {statistics.median(ms):8.3f} ({min(ms):.3f} - {max(ms):.3f})"
                f"   {statistics.median(ratios):+7.2%} ({min(ratios):+.2%} to {max(ratios):+.2%})"
                f"   {issued:8.2f}   {found[way].get('peak_bytes')} B",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--size", default="1024x24", help="width x layers")
    parser.add_argument("--batches", default="4,16", help="launch-bound, device-bound")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--fsdp", action="store_true", help="sharded, with several GPUs")
    parser.add_argument("--budget", type=float, default=140, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("record_overhead_cuda.json"))
    parser.add_argument("--one-mark", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", dest="way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        train(options)
        return
    if options.one_mark:
        print(json.dumps(cost_of_a_mark()))
        return
    import torch

    until = time.monotonic() + options.budget
    gpus = torch.cuda.device_count()
    ranks = max(1, min(2, gpus))
    results: dict[str, object] = {"torch": torch.__version__, "ranks": ranks}
    if gpus:
        results |= {"nccl": torch.cuda.nccl.version(), "device": torch.cuda.get_device_name()}
        part("one mark", results, in_its_own_process)
    else:
        print("no CUDA device is found: this only tries the script itself on CPUs")
    part("jobs", results, lambda: measure(ranks, options, until))
    options.out.write_text(json.dumps(results, indent=1, default=str))
    if "none" in results["jobs"]:
        show(results["jobs"], [int(each) for each in options.batches.split(",")])


if __name__ == "__main__":
    main()
