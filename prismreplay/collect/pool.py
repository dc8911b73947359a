"""The processes of logical ranks, forked from one that has torch loaded.

Importing torch takes a second and 140 MB a process; a fork of a process that has done so takes
milliseconds and shares nearly all of it. What must not be shared is set anew in each rank: random
state, standard streams, `sys.argv`, `__main__`, signals, environment.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import random
import resource
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prismreplay.collect.client import CollectRole, Connection
from prismreplay.collect.failures import failure_message, show
from prismreplay.collect.forking import fork
from prismreplay.collect.handover import Place
from prismreplay.collect.logs import Streams
from prismreplay.collect.messages import Channel
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.rank_memory import RankMemory
from prismreplay.collect.stale import RUN_VARIABLE
from prismreplay.errors import ReplayError
from prismreplay.runtime.exits import before_exit, leave
from prismtrace.errors import PrismError

__all__ = ["Job", "Observed", "RankProcess", "environment", "preload", "start_rank"]

_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.parallel.ddp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.algorithms.join",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.profiler",
    # The first step of any optimizer imports it: 100 MB and most of a second.
    "torch._dynamo",
    "prismreplay.runtime.installing",
)

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch notes its compiler's folder, as a user may have done."""


@dataclass(frozen=True)
class Job:
    """What all ranks of a run have in common.

    `observe` makes what turns a rank's communications into its graph; called in the rank.
    """

    program: ProgramCall
    world_size: int
    local_world_size: int
    run: str
    place: Place
    observe: Callable[[int], Observed]
    master_port: int = 29500
    open_files: tuple[int, int] | None = None
    """The limits of open files that ranks have, when this process has others."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that ranks use in turn, as in CUDA_VISIBLE_DEVICES; empty: all they see."""
    mirror_above: int | None = None
    """Payload in bytes of the largest collectives that are performed; None: all are."""
    placed: tuple[int, ...] = ()
    """Ranks that stay on the GPU that is theirs by their place in here; empty: they take turns."""

    def gpu_of(self, rank: int) -> str | None:
        """The GPU of a rank, by name."""
        if not self.gpus:
            return None
        return self.gpus[(self.placed.index(rank) if self.placed else rank) % len(self.gpus)]

    def limited(self, open_files: tuple[int, int]) -> Job:
        """The same with limits of open files."""
        return replace(self, open_files=open_files)


@dataclass(frozen=True)
class Observed:
    """A `GraphObserver`, how to end its graph, and how to save what it has so far."""

    observer: Any
    finish: Callable[[], None]
    flush: Callable[[], None]
    step: Callable[[], int | None] = lambda: None
    """The training step that the program is in."""
    role: Callable[[Connection, Place], Any] | None = None
    """Makes the rank's role, if it is not the one that collects."""


@dataclass(frozen=True)
class RankProcess:
    """A rank's process, its end of the socket, and a descriptor that tells when it ends."""

    rank: int
    pid: int
    channel: Channel
    pidfd: int


def preload() -> list[str]:
    """Import what training programs import; the names of modules that are not there.

    Call it before any other thread exists. One thread an operation unless OMP_NUM_THREADS says
    otherwise, as torchrun has it: ranks share the machine.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # CUDA does not survive a fork; asked this way, torch.cuda.is_available() does not start it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    with _without_empty_cache():
        missing = _import_all()
    gc.collect()
    # The collector writes into every object that it looks at, which unshares its page.
    gc.freeze()
    return missing


def _import_all() -> list[str]:
    """See `preload`."""
    missing = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _PRELOADED:
            try:
                importlib.import_module(name)
            except ImportError:
                missing.append(name)
    if "torch" in missing:
        # Says itself what is wrong.
        importlib.import_module("torch")
    return missing


@contextlib.contextmanager
def _without_empty_cache() -> Iterator[None]:
    """Remove the folder that torch's compiler makes when it is imported, unless it is used."""
    theirs = _CACHE in os.environ
    try:
        yield
    finally:
        if not theirs and _CACHE in os.environ:
            with contextlib.suppress(OSError):  # not empty
                Path(os.environ[_CACHE]).rmdir()


def environment(job: Job, rank: int) -> dict[str, str]:
    """What torchrun would set for `rank`."""
    local = job.local_world_size
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(-(-job.world_size // local)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(job.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": job.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        RUN_VARIABLE: job.run,
    }


def start_rank(job: Job, rank: int, streams: Streams, inherited: Iterable[int]) -> RankProcess:
    """Fork the process of `rank`; it waits for its first turn.

    Args:
        job: what it runs.
        rank: global rank.
        streams: its output.
        inherited: descriptors that it must not keep, such as those of other ranks.
    """
    child = fork(lambda channel: _rank_main(job, rank, streams, channel), inherited)
    os.close(streams.out)
    if streams.err != streams.out:
        os.close(streams.err)
    return RankProcess(rank, *child)


# --- in the rank ---------------------------------------------------------------------------


def _rank_main(job: Job, rank: int, streams: Streams, channel: Channel) -> int:
    _connect_streams(streams)
    if job.open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, job.open_files)
    os.environ.update(environment(job, rank))
    gpu = job.gpu_of(rank)
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    _prepare_torch()
    faulthandler.enable()
    observed: Observed | None = None

    def stop() -> None:
        """Nobody needs this rank any more."""
        if observed is not None:
            with contextlib.suppress(Exception):
                observed.flush()
        leave(0)

    moves = gpu is not None and not job.placed
    connection = Connection(channel, stop, RankMemory() if moves else None)
    connection.await_turn()
    if gpu is not None:
        from prismreplay.collect.virtual_gpus import show_gpus

        show_gpus(job.local_world_size, gpu, timed=bool(job.placed))
    observed = job.observe(rank)
    return _run(job, connection, observed)


def _run(job: Job, connection: Connection, observed: Observed) -> int:
    """Run the program; its exit code."""
    from prismreplay.runtime.installing import install

    role: Any
    if observed.role is None and job.mirror_above is not None:
        from prismreplay.collect.mirroring import MirroringRole

        role = MirroringRole(connection, job.place, observed.step, above=job.mirror_above)
    elif observed.role is None:
        role = CollectRole(connection, job.place, observed.step)
    else:
        role = observed.role(connection, job.place)
    install(role, observed.observer)
    before_exit(lambda code: observed.flush() if code else observed.finish())
    rank_pid = os.getpid()
    code = 0

    def tell(error: BaseException) -> None:
        if os.getpid() == rank_pid:
            with contextlib.suppress(ReplayError):  # then it is in the log only
                connection.tell(failure_message(error, alone=bool(job.placed)))
        show(error)

    try:
        job.program.run()
    except SystemExit as exit_:
        code = _exit_code(exit_)
    except BaseException as error:  # noqa: BLE001  whatever it is, it is the program's
        code = 1
        tell(error)
    if os.getpid() != rank_pid:
        pass  # A process that the program forked comes here, too; it has nothing to hand in.
    elif code == 0:
        connection.tell_memory()
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  as the interpreter
        try:
            observed.finish()
        except PrismError as error:  # the disk is full, say
            code = 1
            tell(error.with_traceback(None))  # no line of the program
        atexit._run_exitfuncs()  # noqa: SLF001
    else:
        with contextlib.suppress(PrismError):  # the program's failure is what counts
            observed.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    return code


def _connect_streams(streams: Streams) -> None:
    """Standard streams as in a fresh process, flushed at each line."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, streams.out, streams.err)):
        os.dup2(descriptor, number)
    for descriptor in {nothing, streams.out, streams.err}:
        if descriptor > 2:
            os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _text_stream(1, "strict")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _text_stream(2, "backslashreplace")  # type: ignore[misc]


def _text_stream(number: int, errors: str) -> Any:
    return open(number, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)


def _prepare_torch() -> None:
    """What torch reads when it is imported: here that was before the fork.

    Random state that nobody has set is unlike in other ranks, as in separate processes.
    """
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))
    torch.seed()
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _exit_code(exit_: SystemExit) -> int:
    if exit_.code is None:
        return 0
    if isinstance(exit_.code, int):
        return exit_.code & 0xFF
    print(exit_.code, file=sys.stderr)
    return 1
