"""Keep cores as busy as the ranks of a job would: training steps of the same layers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch


def _work(core: int) -> NoReturn:
    import train_gpt

    os.sched_setaffinity(0, {core})
    args = train_gpt.parse_arguments()
    model = train_gpt.GPT(args)
    size = args.batch_size // args.microbatches
    inputs, targets = train_gpt.draw_batch(core, size, args.length, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    os.write(1, b".")
    while True:
        for _ in range(args.microbatches):
            train_gpt.compute_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def keep_busy(cores: Sequence[int], words: Sequence[str]) -> None:
    """Fork one worker a core; each prints a dot when it begins, and goes on until it is killed.

    Args:
        cores: where they are pinned to.
        words: `train_gpt.py` with its arguments.
    """
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    sys.argv = list(words)
    for core in cores[1:]:
        if os.fork() == 0:
            _work(core)
    _work(cores[0])
