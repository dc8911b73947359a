"""Collecting many ranks of a tiny model: time to start them, memory that each adds, switches.

python benchmarks/collect_pool.py --ranks 64 256
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)]
model = DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(STEPS):
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
"""


def collect(ranks: int, devices: int, steps: int, folder: Path) -> dict[str, float]:
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("STEPS", str(steps)))
    command = [
        *(sys.executable, "-m", "prismreplay.cli", "collect"),
        *("--world-size", str(ranks), "--devices", str(devices), "--json"),
        *("-o", str(folder / "bare.parquet"), "--show-rank", "none", "--", str(program)),
    ]
    from prismreplay.local_ranks import with_paths

    environment = with_paths({**os.environ, "OMP_NUM_THREADS": "1"}, REPO)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    print("| ranks | to start | whole run | memory of all ranks | a rank | switches | in turn |")
    print("|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            found = collect(ranks, options.devices, options.steps, Path(folder))
        peak = found["peak_memory_bytes"] / 1e6
        print(
            f"| {ranks} | {found['start_s']:.1f} s | {found['wall_s']:.1f} s | {peak:,.0f} MB "
            f"| {peak / ranks:.1f} MB | {found['context_switches']:,} "
            f"| {found['naive_context_switches']:,} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
