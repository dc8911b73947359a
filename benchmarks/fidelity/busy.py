"""Keep cores as busy as the ranks of a job would: forward and backward of the same layers.

    busy.py --cores 4,5,6 -- train_gpt.py ARGUMENTS...

Ends when its standard input does.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch


def _work(core: int) -> None:
    import train_gpt

    os.sched_setaffinity(0, {core})
    args = train_gpt.parse_arguments()
    model = train_gpt.GPT(args)
    size = args.batch_size // args.microbatches
    inputs, _ = train_gpt.draw_batch(core, size, args.length, torch.device("cpu"))
    while True:
        model(inputs).sum().backward()
        for value in model.parameters():
            value.grad = None


def main() -> None:
    """Fork one worker a core, and end them all in the end."""
    _, cores, _, script, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = [script, *arguments]
    workers = []
    for core in map(int, cores.split(",")):
        pid = os.fork()
        if pid == 0:
            try:
                _work(core)
            finally:
                os._exit(1)
        workers.append(pid)
    print("busy", flush=True)
    sys.stdin.read()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
