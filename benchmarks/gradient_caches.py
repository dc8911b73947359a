"""What it costs a step that its gradients were written on another core.

    python benchmarks/gradient_caches.py          # half a minute, 2 cores or more

Where gloo's threads have a core of their own, reduced gradients are not in the cache of the
program's core; in emulated runs the program's own thread copies them. Here the gradients of the
model of `fidelity_cpu.py` are written by the program's thread or by one on another core, in turn, and
all phases of the step that follows are timed by the processor time of the program's thread. Each is
done with all other cores idle, busy with steps of the same model, or copying memory (`--beside`).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO / "examples"), str(REPO / "benchmarks" / "fidelity")]
import busy  # noqa: E402  its folder is known only now
import train_gpt  # noqa: E402

MODEL = "--layers 4 --hidden 256 --length 64 --batch-size 8"
SETTLE_SECONDS = 0.005
STREAM_ELEMENTS = 8 << 20
PHASES = ("optimizer", "forward", "backward")


class Steps:
    """Steps of one rank on `program`; `other` is the core of the thread that may write."""

    def __init__(self, program: int, other: int) -> None:
        os.sched_setaffinity(0, {program})
        self._other = other
        self._model = train_gpt.GPT(args := train_gpt.parse_arguments())
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, lr=3e-3, foreach=False)
        size = args.batch_size // args.microbatches
        self._batch = train_gpt.draw_batch(0, size, args.length, torch.device("cpu"))
        self._loss().backward()
        self._results = [one.grad.clone() for one in self._parameters]
        self.megabytes = sum(one.nbytes for one in self._results) / 1e6

    def measure(self, *, elsewhere: bool) -> tuple[float, ...]:
        """Milliseconds of processor time of each of `PHASES` once results were written."""
        self._loss()
        if elsewhere:
            thread = threading.Thread(target=self._write_elsewhere)
            thread.start()
            thread.join()
        else:
            self._write()
        taken = [self._timed(self._optimizer.step)]
        for one in self._parameters:
            one.grad = None
        losses: list[Any] = []
        taken.append(self._timed(lambda: losses.append(self._loss())))
        taken.append(self._timed(losses[0].backward))
        return tuple(taken)

    def _loss(self) -> Any:
        inputs, targets = self._batch
        return train_gpt.compute_loss(self._model(inputs), targets)

    def _write(self) -> None:
        for one, result in zip(self._parameters, self._results, strict=True):
            one.grad.copy_(result)

    def _write_elsewhere(self) -> None:
        os.sched_setaffinity(0, {self._other})
        self._write()

    @staticmethod
    def _timed(work: Callable[[], object]) -> float:
        begun = time.thread_time_ns()
        work()
        return (time.thread_time_ns() - begun) / 1e6


def stream(core: int) -> NoReturn:
    """Copy more memory than caches hold, for ever."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    source, target = torch.ones(STREAM_ELEMENTS), torch.ones(STREAM_ELEMENTS)
    while True:
        target.copy_(source)


def forked(work: Callable[[int], NoReturn], cores: list[int]) -> list[int]:
    """A stopped process a core."""
    found = []
    for core in cores:
        number = os.fork()
        if number == 0:
            work(core)
        os.kill(number, signal.SIGSTOP)
        found.append(number)
    return found


def measure(options: argparse.Namespace, cores: list[int]) -> tuple[float, dict[str, list[Any]]]:
    """Megabytes of gradients; of every way, the times of all repeats."""
    program, *others = cores
    ways: dict[str, list[int]] = {"idle": []}
    works = {"same": busy._work, "copying": stream}
    found: dict[str, list[Any]] = {}
    try:
        ways |= {name: forked(works[name], others) for name in options.beside}
        steps = Steps(program, options.other if options.other is not None else others[-1])
        for _ in range(options.repeats):
            for name, processes in ways.items():
                for number in processes:
                    os.kill(number, signal.SIGCONT)
                time.sleep(SETTLE_SECONDS)
                for elsewhere in (False, True):
                    title = f"{name:8} {'another core' if elsewhere else 'its own core'}"
                    found.setdefault(title, []).append(steps.measure(elsewhere=elsewhere))
                for number in processes:
                    os.kill(number, signal.SIGSTOP)
    finally:
        for number in (one for processes in ways.values() for one in processes):
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
    return steps.megabytes, found


def main() -> None:
    """Measure, and print medians with quartiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument(
        "--other", type=int, help="core of the thread that writes; default: the last"
    )
    parser.add_argument(
        "--beside", nargs="*", default=["same", "copying"], choices=["same", "copying"]
    )
    options = parser.parse_args()
    sys.argv = ["train_gpt.py", *MODEL.split()]
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    megabytes, found = measure(options, cores)
    # Workers that keep cores busy have printed dots.
    print(f"\n{megabytes:.1f} MB of gradients; ms of processor time, median and quartiles\n")
    print("| others   | written on   | " + " | ".join(f"{one:21}" for one in PHASES) + " |")
    print("|---" * (len(PHASES) + 2) + "|")
    for title, times in found.items():
        cells = []
        for phase in zip(*times, strict=True):
            low, middle, high = statistics.quantiles(phase, n=4)
            cells.append(f"{middle:6.2f} ({low:5.2f} to {high:5.2f})")
        print(f"| {title[:8]} | {title[9:]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
