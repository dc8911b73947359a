"""Uses every feature of torch.distributed and of what is built on it, and saves what came out.

An ordinary program: it knows nothing of who runs it. Start one process a rank (four or more, an
even number) with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set::

    features.py RESULT_PREFIX [PART ...]

Each rank writes RESULT_PREFIX.<rank>.json: each feature's name with a digest of its tensors, and
the seconds it took. The first error ends the program.
"""

import hashlib
import json
import random
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

PARTS = ("collectives", "messages", "groups", "wrappers", "pipelines", "compiled", "restart")


def digest(value):
    """One line that differs when a bit of any tensor in `value` does."""
    summary = hashlib.sha256()

    def add(item):
        if isinstance(item, torch.Tensor):
            item = item.full_tensor() if hasattr(item, "full_tensor") else item
            plain = item.detach().contiguous().reshape(-1)
            if plain.dtype is not torch.bool:
                plain = plain.view(torch.uint8) if plain.numel() else plain
            summary.update(f"{item.dtype}{tuple(item.shape)}".encode())
            summary.update(plain.numpy().tobytes() if plain.numel() else b"")
        elif isinstance(item, (list, tuple)):
            for each in item:
                add(each)
        else:
            summary.update(repr(item).encode())

    add(value)
    return summary.hexdigest()[:16]


def main():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    prefix, *parts = sys.argv[1:]
    results, seconds = {}, {}
    timeout = timedelta(seconds=20)
    dist.init_process_group("gloo", timeout=timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    for part in parts or PARTS:
        module = __import__(part)
        for feature in module.FEATURES:
            name = f"{part}.{feature.__name__}"
            started = time.perf_counter()
            torch.manual_seed(1000 + rank)
            random.seed(rank)
            results[name] = digest(feature(rank, size))
            seconds[name] = round(time.perf_counter() - started, 3)
            with open(f"{prefix}.{rank}.json", "w") as file:
                json.dump({"results": results, "seconds": seconds}, file)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
