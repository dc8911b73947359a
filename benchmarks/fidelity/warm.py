"""Commands and true runs as forks of one process that has imported what they need.

A fresh interpreter that imports torch, polars and numba takes 5 to 10 s, and measuring a job takes
some 14 commands. So one process imports all of it, uses none of it, and forks for each of them; what
commands would start as fresh interpreters (ranks of `record` and `comm-bench`, the process that
forks slices) they fork, too. What a fork runs is what the command line would run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import selectors
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

_MODULES = (
    "networkx",
    "numba",
    "prismcalib.cli",
    "prismcalib.comm_table",
    "prismcalib.merging",
    "prismcalib.prediction",
    "prismcalib.propagation",
    "prismreplay.boundary_engine",
    "prismreplay.cli",
    "prismreplay.collect.collecting",
    "prismreplay.comm_bench.benchmark",
    "prismreplay.comm_bench.rank",
    "prismreplay.record",
    "prismreplay.run.results",
    "prismreplay.run.running",
    "prismreplay.runtime.recording",
    "prismreplay.slicing.campaigning",
    "prismreplay.slicing.running",
)
_PR_SET_PDEATHSIG = 1


def prepare(*, on_gpus: bool = False) -> None:
    """Import everything; from here on this process only forks.

    It must not have used torch or polars before, nor do so later: their threads do not survive forks,
    nor does CUDA. GPUs are hidden unless forks are to compute `on_gpus`.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if not on_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from prismreplay.collect.pool import preload

    preload()
    for name in _MODULES:
        importlib.import_module(name)
    import torch
    import true_run  # noqa: F401

    from prismreplay import record
    from prismreplay.comm_bench import benchmark
    from prismreplay.slicing import campaigning

    torch.set_num_threads(1)
    record.run_ranks = benchmark.run_ranks = _run_ranks
    campaigning.Nursery = _nursery_class()
    gc.collect()
    gc.freeze()


# --- one fork ------------------------------------------------------------------------------


@dataclass
class Fork:
    """A forked process; `started` is when, `title` what for."""

    title: str
    pid: int
    pidfd: int
    started: float

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None when it has not ended by then."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pidfd, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        os.close(self.pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(10.0)


def start(
    title: str,
    run: Callable[[], object],
    *,
    output: Path,
    errors: Path,
    environment: Mapping[str, str] | None = None,
    cores: Sequence[int] = (),
) -> Fork:
    """Fork a process that does something, on these cores; what it prints goes to files."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Of threads that did nothing yet: Python tells of all.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        _end_with(parent)
        _redirect(0, os.devnull, os.O_RDONLY)
        _redirect(1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        _redirect(2, errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.environ.update(environment or {})
        if cores:
            os.sched_setaffinity(0, set(cores))
        _perform(run)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return Fork(title, pid, os.pidfd_open(pid), time.monotonic())


def _perform(run: Callable[[], object]) -> NoReturn:
    """Run it, and end this process with what it ends with."""
    code: Any = 1
    try:
        code = run() or 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:  # noqa: BLE001  told, then this process ends
        traceback.print_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _redirect(descriptor: int, path: str | Path, flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, descriptor)
    os.close(opened)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def command(package: str, words: Sequence[str]) -> Callable[[], None]:
    """One of our commands."""

    def run() -> None:
        sys.argv = [package, *words]
        importlib.import_module(f"{package}.cli").main()

    return run


# --- ranks ---------------------------------------------------------------------------------


def _begin_rank(rank: int, *, is_module: bool) -> None:
    """Pin a rank, with all threads that it will start, and record it, if wanted."""
    import cores

    from prismreplay.runtime.bootstrap import autoload

    mine = cores.cores_of(rank)
    if mine and is_module:
        # Nothing in it will part its threads, as `timed.py` does.
        cores.keep_threads_apart(mine)
    elif mine:
        cores.stay_on(mine)
    # Where the command prints its report is no place for what programs print.
    os.dup2(2, 1)
    # As the end of `import torch` does it.
    autoload()


def run_job(words: Sequence[str], count: int, *, is_module: bool = False) -> int:
    """The ranks of a true run; 1 if one failed."""
    import true_run

    begin = partial(_begin_rank, is_module=is_module)
    return true_run.run_ranks(words, count, is_module=is_module, begin=begin)


def _run_ranks(program: Any, count: int, environment: Mapping[str, str], logs: Any) -> None:
    """In place of `prismreplay.local_ranks.run_ranks`."""
    from prismreplay.errors import RankFailedError

    os.environ.update(environment)
    code = run_job([program.path, *program.arguments], count, is_module=program.is_module)
    logs.close()
    if code:
        raise RankFailedError("a rank failed; its output is in the benchmark's log")


def _nursery_class() -> type:
    from prismreplay.slicing import workers

    class ForkedNursery(workers.Nursery):
        """Forked from this process, which has imported all that its workers need."""

        def __init__(self, prepare: Callable[[], object], work: Callable[[Any], Any]) -> None:
            import pickle
            import socket

            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                ours.close()
                os.setpgid(0, 0)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                _perform(lambda: workers.serve(theirs.detach(), parent))
            theirs.close()
            self._process = _Forked(pid)
            self._socket = ours
            self._open = True
            self._socket.send(pickle.dumps((prepare, work)))

    return ForkedNursery


class _Forked:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def wait(self) -> None:
        os.waitpid(self._pid, 0)
