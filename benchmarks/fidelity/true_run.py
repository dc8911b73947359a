"""The ranks of a true run, forked from one process that has torch loaded.

true_run.py --ranks 8 -- timed.py train_gpt.py ...
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _be_rank(rank: int, ranks: int, port: int, words: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001  told, then this process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Fork, and wait for all; the first that fails ends all."""
    _, ranks, _, *words = sys.argv[1:]
    torch.set_num_threads(1)
    port, count = _free_port(), int(ranks)
    running = set()
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, count, port, words)
        running.add(pid)
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        if status and not failed:
            failed = 1
            for other in running:
                os.kill(other, 9)
    sys.exit(failed)


if __name__ == "__main__":
    main()
