"""Real gloo, one process a rank, forked from the test's: what it computes for given inputs."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_gloo(size: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(rank)` of every rank, within one gloo group of them all."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(rank, size, work, Path(folder)) for rank in range(size)]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert statuses == [0] * size, "a rank failed; its traceback is above"
        return [pickle.loads((Path(folder) / f"result{rank}").read_bytes()) for rank in range(size)]


def _fork(rank: int, size: int, work: Callable[[int], Any], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size
        )
        (folder / f"result{rank}").write_bytes(pickle.dumps(work(rank)))
        dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)
