"""What recording costs a training step on GPUs: nothing, `prismreplay record`, torch's profiler.

    python benchmarks/gpu/record_overhead_cuda.py --out record_overhead_cuda.json

A GPT of 335 M parameters trains in bf16 with DDP over NCCL, on two GPUs if there are two, else as a
world of one. The ways take turns, each in processes of its own; the median of blocks of steps
counts, each block ended by one synchronisation. Before that: what one mark and one follower cost, how
well the clocks of host and device are laid on each other, and what a recorded trace looks like.

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
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WAYS = ("none", "record", "profiler CUDA", "profiler CPU+CUDA")
BLOCK = 10
WARM_UP = 5
LONGEST_S = 120


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
    return Model().cuda()


def train(options: argparse.Namespace) -> None:
    """One rank: trains, and writes the time of each block of steps."""
    import torch
    import torch.distributed as dist
    from torch import nn

    signal.alarm(LONGEST_S)  # nothing hangs for longer
    local = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    rank = dist.get_rank()
    model = make_model(options.size)
    parameters = sum(each.numel() for each in model.parameters())
    if options.job == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(0, 32000, (options.batch, 1025), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    profiler = None
    if options.way.startswith("profiler"):
        kinds = [torch.profiler.ProfilerActivity.CUDA]
        if "CPU" in options.way:
            kinds.append(torch.profiler.ProfilerActivity.CPU)
        profiler = torch.profiler.profile(activities=kinds)
        profiler.start()
    blocks, issuing = [], []
    for _ in range(options.steps // BLOCK):
        begun = time.perf_counter()
        for _ in range(BLOCK):
            step()
        issuing.append((time.perf_counter() - begun) / BLOCK)
        torch.cuda.synchronize()
        blocks.append((time.perf_counter() - begun) / BLOCK)
    if profiler is not None:
        profiler.stop()
    found = {
        "blocks_s": blocks,
        "issuing_s": issuing,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "parameters": parameters,
    }
    Path(options.folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# The parts -----------------------------------------------------------------------------------


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

        def each(call, count=2000) -> float:
            call()
            begun = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - begun) / count * 1e6

        found = {"mark_us": each(timeline.mark)}
        torch.cuda.synchronize()
        clock = timeline._devices[0]
        begun = time.perf_counter()
        for _ in range(20):
            clock.pair()
        found["pair_us"] = (time.perf_counter() - begun) / 20 * 1e6
        marks = len(timeline._marks)
        begun = time.perf_counter()
        timeline.settle()
        found["settle_us_a_mark"] = (time.perf_counter() - begun) / marks * 1e6
        found["memory_us"] = each(lambda: devices.memory(0))
        found["residual_ns"] = clock.line.residual_ns
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
        found["synchronize_returns_after_ns"] = statistics.median(wrong)
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        tensor = torch.ones(1 << 20, device="cuda")

        def follow() -> None:
            timeline.communication(0, timeline.mark())
            work = dist.all_reduce(tensor, async_op=True)
            timeline.follow(0, work, "group", 0, tensor)
            work.wait()
            timeline.waited(0, timeline.mark())

        def plain() -> None:
            dist.all_reduce(tensor, async_op=True).wait()

        found["all_reduce_us"] = each(plain, 500)
        found["all_reduce_followed_us"] = each(follow, 500)
        torch.cuda.synchronize()
        dist.destroy_process_group()
        timeline.close()
    return found


def in_its_own_process() -> dict[str, float]:
    """`cost_of_a_mark`, so that this process has no part of the device."""
    done = subprocess.run(
        [sys.executable, __file__, "--one-mark"],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def run_once(way: str, ranks: int, options: argparse.Namespace) -> dict[str, object]:
    """A run of a job; times are medians of its blocks, of the slowest rank."""
    from prismreplay.collect.logs import RankLogs
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.local_ranks import run_ranks
    from prismreplay.record import assemble_spools, record_spools

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("--train", way, "--job", options.job, "--steps", str(options.steps))
        words += ("--size", options.size, "--batch", str(options.batch), "--folder", name)
        program = ProgramCall(__file__, words)
        found: dict[str, object] = {"way": way, "job": options.job}
        begun = time.perf_counter()
        try:
            if way == "record":
                record_spools([], folder / "spools", program=program, ranks=ranks)
                made = assemble_spools(folder / "spools", folder / "out.parquet")
                found |= {"nodes": made.nodes, "policies": made.policies}
                found |= describe(folder / "out.parquet", options)
            else:
                logs = RankLogs(folder / "logs", ranks, (0,))
                logs.prepare()
                run_ranks(program, ranks, {**os.environ, "OMP_NUM_THREADS": "1"}, logs)
        except Exception as error:  # noqa: BLE001  told in full, and the rest goes on
            report = getattr(error, "report", "")
            logs = [path.read_text()[-4000:] for path in sorted(folder.rglob("rank-*.log"))]
            found["error"] = "\n".join([traceback.format_exc(), report, *logs])
            return found
        finally:
            found["wall_s"] = round(time.perf_counter() - begun, 1)
        said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    found["step_ms"] = max(statistics.median(one["blocks_s"]) for one in said) * 1e3
    found["issuing_ms"] = max(statistics.median(one["issuing_s"]) for one in said) * 1e3
    found["blocks_ms"] = [[value * 1e3 for value in one["blocks_s"]] for one in said]
    found["peak_bytes"] = said[0]["peak_bytes"]
    found["parameters"] = said[0]["parameters"]
    return found


def describe(path: Path, options: argparse.Namespace) -> dict[str, object]:
    """What a recorded trace says of a steady step."""
    import polars as pl

    import prismcalib
    import prismtrace as pt

    trace = pt.open(path)
    rows = trace.collect()
    steady = rows.filter(pl.col("step").is_between(WARM_UP + BLOCK, WARM_UP + options.steps - 2))
    by_step = (
        steady.filter(pl.col("rank") == 0)
        .group_by("step")
        .agg(begin=pl.col("start_ns").min(), nodes=pl.len())
        .sort("step")
    )
    kinds = (
        steady.filter(pl.col("rank") == 0)
        .group_by("kind")
        .agg(count=pl.len(), median_us=pl.col("dur_ns").median() / 1e3)
        .sort("kind")
    )
    found: dict[str, object] = {
        "findings": [str(each) for each in pt.validate(trace)][:5],
        "untimed": rows["start_ns"].null_count(),
        "recorded_step_ms": by_step["begin"].diff().median() / 1e6 if by_step.height > 1 else None,
        "nodes_a_step": by_step["nodes"].median(),
        "kinds": kinds.with_columns(pl.col("kind").cast(pl.String)).to_dicts(),
        "with_memory": rows["mem_bytes"].count(),
        "memory_peak_bytes": rows["mem_peak_bytes"].max(),
        "uncertainty_ns": [domain.uncertainty_ns for domain in trace.header.clock],
        "streams": len(trace.header.streams),
    }
    try:
        merged = prismcalib.merge(trace).report
        found["merge_difference"] = merged.difference_ns / merged.recorded_ns
    except Exception:  # noqa: BLE001
        found["merge_error"] = traceback.format_exc()
    return found


def part(name: str, results: dict[str, object], call) -> None:
    """Do one part; its error is a result."""
    try:
        results[name] = call()
    except Exception:  # noqa: BLE001
        results[name] = {"error": traceback.format_exc()}
    print(f"{name}: {json.dumps(results[name], indent=1, default=str)}", flush=True)


def show(job: str, runs: list[dict[str, object]]) -> None:
    """The ratio table of a job."""
    of_job = [run for run in runs if run["job"] == job and "error" not in run]
    base = [run["step_ms"] for run in of_job if run["way"] == "none"]
    print(f"\n{job}: {'ms a step (lowest - highest)':<38} ratio    issuing ms   peak GiB")
    for way in WAYS:
        mine = [run for run in of_job if run["way"] == way]
        if not mine:
            print(f"  {way:<18} no run succeeded")
            continue
        steps = [run["step_ms"] for run in mine]
        ratio = statistics.median(steps) / statistics.median(base) - 1 if base else float("nan")
        issuing = statistics.median(run["issuing_ms"] for run in mine)
        print(
            f"  {way:<18} {statistics.median(steps):8.3f} ({min(steps):.3f} - {max(steps):.3f})"
            f"   {ratio:+7.2%}   {issuing:8.2f}   {mine[0]['peak_bytes'] / 2**30:6.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", default="ddp,fsdp")
    parser.add_argument("--size", default="1024x24", help="width x layers")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--budget", type=float, default=420, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("record_overhead_cuda.json"))
    parser.add_argument("--one-mark", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", dest="way", help=argparse.SUPPRESS)
    parser.add_argument("--job", default="ddp", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        train(options)
        return
    if options.one_mark:
        print(json.dumps(cost_of_a_mark()))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("no CUDA device is found: benchmarks/record_overhead.py measures CPU and gloo")
    until = time.monotonic() + options.budget
    ranks = min(2, torch.cuda.device_count())
    results: dict[str, object] = {
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version(),
        "device": torch.cuda.get_device_name(),
        "ranks": ranks,
    }
    if ranks == 1:
        options.jobs = "ddp"  # alone, FSDP communicates nothing
    part("one mark", results, in_its_own_process)
    runs: list[dict[str, object]] = []
    results["runs"] = runs
    for repeat in range(options.repeats):
        for job in options.jobs.split(","):
            for way in WAYS:
                longest = max((run["wall_s"] for run in runs), default=60)
                if time.monotonic() + longest > until:
                    print(f"no time left for {job}, {way}, repeat {repeat}", flush=True)
                    continue
                options.job = job
                run = run_once(way, ranks, options)
                runs.append(run)
                brief = {key: value for key, value in run.items() if key != "blocks_ms"}
                print(json.dumps(brief, default=str), flush=True)
                if "error" in run:
                    print(run["error"], flush=True)
                options.out.write_text(json.dumps(results, indent=1, default=str))
    for job in options.jobs.split(","):
        show(job, runs)
    options.out.write_text(json.dumps(results, indent=1, default=str))


if __name__ == "__main__":
    main()
