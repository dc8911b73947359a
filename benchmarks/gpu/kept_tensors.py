"""When a program's memory is free again after communications: by itself, and recorded, side by side.

    python benchmarks/gpu/kept_tensors.py

Prints what torch's allocator has given out, in blocks (allocated) and as asked for (requested: without
what blocks are larger), after each action: an all-reduce that is waited for by a future, as DDP does, and
communications after it, at once or 0.3 s later; and steps of DDP around the one in which it makes new
buckets. Two plain runs are beside the recorded one: where these two differ (~), a thread of torch's that looks ten
times a second decides; where the recorded one is like neither and they are alike, there is a star. At most 60 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
LIMIT_S = 50
MIB = 1 << 20


def program() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def tell(what: str) -> None:
        held = torch.cuda.memory_stats()
        said = [held[f"{kind}_bytes.all.{when}"] for kind in KINDS for when in ("current", "peak")]
        print("HELD", what.replace(" ", "_"), *said, flush=True)

    small = torch.ones(8, device=device)
    dist.all_reduce(small)
    calls = {
        "broadcast at once": lambda: dist.broadcast(small, 0),
        "broadcast beside": lambda: dist.broadcast(small, 0, async_op=True).wait(),
        "all-reduce at once": lambda: dist.all_reduce(small),
        "all-reduce beside": lambda: dist.all_reduce(small, async_op=True).wait(),
    }
    for pause in (0.0, 0.3):
        for name, call in calls.items():
            # What is complete when the backend's thread looks, and when the program communicates next.
            large = torch.ones(4 * MIB, device=device)
            work = dist.all_reduce(large, async_op=True)
            work.get_future().wait()
            torch.cuda.synchronize()
            del work, large
            tell(f"{pause} s, {name}: before")
            time.sleep(pause)
            call()
            tell(f"{pause} s, {name}: after one")
            call()
            tell(f"{pause} s, {name}: after two")
            time.sleep(0.3)
            dist.all_reduce(small, async_op=True).wait()
            tell(f"{pause} s, {name}: after a later all-reduce")
    for pause in (0.0, 0.3):
        steps(pause, tell, device)
    dist.destroy_process_group()


def steps(pause: float, tell, device) -> None:
    """Of DDP."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to(device)
    tell(f"DDP, {pause} s: a model")
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=5)
    tell(f"DDP, {pause} s: its buckets")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        loss = model(torch.randn(64, 1024, device=device)).square().mean()
        tell(f"DDP, {pause} s, step {step}: forward")
        loss.backward()
        tell(f"DDP, {pause} s, step {step}: backward")
        optimizer.step()
        optimizer.zero_grad()
        tell(f"DDP, {pause} s, step {step}: over")
        time.sleep(pause)


KINDS = ("allocated", "requested")


def main() -> None:
    if "RANK" in os.environ:
        program()
        return
    from prismreplay.local_ranks import with_paths

    plain = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    record = ["-m", "prismreplay.cli", "record", "--nproc-per-node", "1", "-o"]
    with tempfile.TemporaryDirectory() as name:
        calls = {
            "plain": ([__file__], {**plain, "MASTER_PORT": "29771"}),
            "plain again": ([__file__], {**plain, "MASTER_PORT": "29772"}),
            "recorded": ([*record, f"{name}/run.parquet", "--", __file__], {}),
        }
        running = {
            way: subprocess.Popen(
                [sys.executable, *map(str, words)],
                env=with_paths({"OMP_NUM_THREADS": "1", **os.environ, **more}, REPO),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for way, (words, more) in calls.items()
        }
        until, told = time.monotonic() + LIMIT_S, {}
        for way, child in running.items():
            try:
                said = child.communicate(timeout=max(1.0, until - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                child.kill()
                said = child.communicate()[0]
            if child.returncode:
                print(f"{way} ended with {child.returncode}: {said[-4000:]}", flush=True)
            # `record` may put a rank before each line.
            lines = [line.partition("HELD ")[2].split() for line in said.splitlines()]
            told[way] = {words[0]: [int(one) for one in words[1:]] for words in lines if words}
    print(
        "allocated now, peak; requested now, peak: plain | plain again less plain | recorded less plain"
    )
    stars = 0
    for what, held in told["plain"].items():
        again, recorded = (told[way].get(what) for way in ("plain again", "recorded"))
        mark = "~" if again != held else " " if recorded == held else "*"
        stars += mark == "*"
        less = f"{_less(again, held)} | {_less(recorded, held)}"
        print(f"{mark} {what:<55} {' '.join(map(str, held))} | {less}", flush=True)
    print(f"{stars} lines in which plain runs are alike and the recorded one is not")


def _less(other, held) -> str:
    """Differences, in short."""
    if other is None:
        return "?"
    differences = [one - was for one, was in zip(other, held, strict=True)]
    return " ".join(f"{one:+d}" for one in differences) if any(differences) else "="


if __name__ == "__main__":
    main()
