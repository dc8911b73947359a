"""Keep cores as busy as the ranks of a job do: training steps of the same layers, with pauses."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch


class _Pauses:
    """Sleeps now and then, so that a share of the time is work."""

    def __init__(self, share: float) -> None:
        self._rest = 1.0 / max(share, 0.05) - 1.0
        self._begun = time.perf_counter()

    def pause(self) -> None:
        """As long as the work since the last pause is worth."""
        time.sleep(self._rest * (time.perf_counter() - self._begun))
        self._begun = time.perf_counter()


def _work(core: int, share: float) -> NoReturn:
    import train_gpt

    os.sched_setaffinity(0, {core})
    args = train_gpt.parse_arguments()
    model = train_gpt.GPT(args)
    size = args.batch_size // args.microbatches
    inputs, targets = train_gpt.draw_batch(core, size, args.length, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    os.write(1, b".")
    pauses = _Pauses(share)
    while True:
        for _ in range(args.microbatches):
            loss = train_gpt.compute_loss(model(inputs), targets)
            pauses.pause()
            loss.backward()
            pauses.pause()
        optimizer.step()
        optimizer.zero_grad()
        pauses.pause()


def keep_busy(cores: Sequence[int], words: Sequence[str], share: float) -> None:
    """Fork one worker a core; each prints a dot when it begins, and goes on until it is killed.

    Args:
        cores: where they are pinned to.
        words: `train_gpt.py` with its arguments.
        share: of the time that is work; the rest is sleep, after each pass, as waits are.
    """
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    sys.argv = list(words)
    for core in cores[1:]:
        if os.fork() == 0:
            _work(core, share)
    _work(cores[0], share)
