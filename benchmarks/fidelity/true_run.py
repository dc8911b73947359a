"""The ranks of a true run, forked from one process that has torch loaded.

A rank's process ends where its program gives the default group back. On busy machines gloo now and
then hangs in there, or when the group's last reference goes.

true_run.py --ranks 8 -- timed.py train_gpt.py ...
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

_GRACE_SECONDS = 20.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _leave(group: object = None) -> None:
    if group is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _be_rank(rank: int, ranks: int, port: int, words: Sequence[str], *, is_module: bool) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.argv = list(words)
    if not is_module:
        dist.destroy_process_group = _leave
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    run = runpy.run_module if is_module else runpy.run_path
    code = 1
    try:
        run(words[0], run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001  told, then this process ends
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_ranks(
    words: Sequence[str],
    ranks: int,
    *,
    is_module: bool = False,
    begin: Callable[[int], object] = int,
) -> int:
    """Fork the ranks of a job and wait for all; 1 if one failed, which ends the others.

    Ranks that are left long after the others have ended well are ended, too.

    Args:
        words: the program, with its arguments.
        ranks: how many.
        is_module: whether the program is the name of a module.
        begin: called first in each rank, with its number.
    """
    port = _free_port()
    running = set()
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            begin(rank)
            _be_rank(rank, ranks, port, words, is_module=is_module)
        running.add(pid)
    return _wait(running)


def _wait(running: set[int]) -> int:
    """Wait for all ranks; the first that fails ends all. 0 if none did.

    Ranks that are left long after the others have ended well are ended, too.
    """
    last = time.monotonic()
    some_done = False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if some_done and time.monotonic() - last > _GRACE_SECONDS:
                print(f"{len(running)} ranks did not come to their end", file=sys.stderr)
                _kill(running)
                return 0
            time.sleep(0.05)
            continue
        running.discard(pid)
        last, some_done = time.monotonic(), True
        if status:
            _kill(running)
            return 1
    return 0


def _kill(ranks: set[int]) -> None:
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    """Fork, and wait for all."""
    _, ranks, _, *words = sys.argv[1:]
    torch.set_num_threads(1)
    sys.exit(run_ranks(words, int(ranks)))


if __name__ == "__main__":
    main()
