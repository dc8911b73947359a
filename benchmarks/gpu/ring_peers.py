"""Pruned rings over peer memory, a GPU for each sandbox rank and one for the assistant.

PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/gpu/ring_peers.py [--out FOLDER]

Beside them, NCCL's own all_reduce among as many GPUs; with two GPUs, K = 2 is the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist

from prismreplay.plugin.communicating import PrunedCommunication
from prismreplay.plugin.peers import peer_link_memory
from prismreplay.plugin.ring_schedule import ring_all_reduce
from prismreplay.plugin.tables import Layout

MIB = 1 << 20


def timed(work, repeat=10):
    """Median milliseconds of this rank, by events, everybody starting together."""
    found = []
    for number in range(repeat + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def ring_case(size, size_bytes, layout, rank, world):
    count, sandbox = size_bytes // 4, [number * size // world for number in range(world - 1)]
    schedule = ring_all_reduce(size, sandbox, count, align=4)
    roles = dict(enumerate(schedule.roles))
    memory = peer_link_memory(schedule, layout, roles, dist.group.WORLD)
    mine = roles[rank]
    communication = PrunedCommunication(
        schedule, torch.float32, memory, layout, roles=[mine], limit_ns=5_000_000_000
    )
    source = torch.full((count,), rank + 1.0, device="cuda")
    result = torch.empty_like(source)
    ms = timed(lambda: communication.launch({mine: (source, result)}))
    communication.check()
    error = float((result - sum(range(1, world + 1))).abs().max())
    steps = 2 * (size - 1)
    return {
        "K": size,
        "bytes": size_bytes,
        "channels": layout.channels,
        "ms": ms,
        "us_per_step": ms * 1000 / steps,
        "bus_gb_s": steps / size * size_bytes / ms / 1e6,
        "max_error": error,
    }


def nccl_case(size_bytes, world):
    data = torch.zeros(size_bytes // 4, device="cuda")
    ms = timed(lambda: dist.all_reduce(data))
    return {"nccl": world, "bytes": size_bytes, "ms": ms}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[8, 32, 128], help="beside all GPUs"
    )
    options = parser.parse_args()
    out = options.out
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = []
    for size_bytes in (MIB, 16 * MIB, 256 * MIB):
        rows.append(nccl_case(size_bytes, world))
        for size in sorted({world, *options.ranks}):
            for channels in (8, 16, 32):
                rows.append(ring_case(size, size_bytes, Layout(channels=channels), rank, world))
                if rank == 0:
                    print(rows[-1], flush=True)
    if rank == 0 and out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ring_peers.json").write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
