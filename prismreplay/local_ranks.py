"""The ranks of a job as plain processes of this machine, as torchrun would start them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prismreplay.collect.logs import RankLogs
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.stale import end_groups
from prismreplay.collect.surroundings import uninterrupted
from prismreplay.errors import ProgramError, RankFailedError
from prismreplay.runtime.exits import told_end

__all__ = ["LOST", "run_command", "run_ranks", "with_paths"]

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 3.0
"""What is asked to end has this long before it is killed."""
_PAUSE_SECONDS = 0.005
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What gloo tells a rank whose partner is gone: not why the run failed."""


def with_paths(variables: Mapping[str, str], *folders: str | Path) -> dict[str, str]:
    """An environment whose Python looks into these folders first, then where it did anyway.

    Packages of a machine may be in its PYTHONPATH: it is added to, never replaced.
    """
    paths = [*map(str, folders), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(paths)}


def run_ranks(
    program: ProgramCall, count: int, environment: Mapping[str, str], logs: RankLogs
) -> None:
    """Run `count` ranks of a program to their end.

    Raises:
        RankFailedError: a rank failed; the others were ended.
    """
    words = [sys.executable, "-u"]
    words += ["-m", program.path] if program.is_module else [program.path]
    words += program.arguments
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    with selectors.DefaultSelector() as selector, contextlib.closing(logs):
        try:
            for rank in range(count):
                streams, pipes = logs.open(rank)
                variables = {**environment, **_variables(rank, count, port)}
                processes.append(
                    subprocess.Popen(  # noqa: S603  the program to record
                        words,
                        env=variables,
                        stdin=subprocess.DEVNULL,
                        stdout=streams.out,
                        stderr=streams.err,
                        start_new_session=True,
                    )
                )
                for descriptor in {streams.out, streams.err}:
                    os.close(descriptor)
                for pipe in pipes:
                    selector.register(pipe, selectors.EVENT_READ)
            _watch(processes, selector, logs)
        finally:
            _end(processes)


def _variables(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _watch(
    processes: Sequence[subprocess.Popen[bytes]],
    selector: selectors.BaseSelector,
    logs: RankLogs,
) -> None:
    """Pass output on until all ranks have ended, or one has failed."""
    running = dict(enumerate(processes))
    while running:
        if not selector.get_map():
            time.sleep(_LOOK_SECONDS)
        for key, _ in selector.select(_LOOK_SECONDS):
            if not logs.pump(key.fd):
                selector.unregister(key.fd)
        for rank, process in list(running.items()):
            code = _ended(process)
            if code:
                cause, how = _cause(running, selector, logs)
                raise RankFailedError(
                    f"rank {cause} {told_end(how)}",
                    where=str(logs.path(cause)),
                    report="" if logs.shows(cause) else logs.tail(cause),
                )
            if code == 0:
                del running[rank]


def _cause(
    running: Mapping[int, subprocess.Popen[bytes]],
    selector: selectors.BaseSelector,
    logs: RankLogs,
) -> tuple[int, int]:
    """Of ranks that have failed, the one that did not fail for want of another; its exit code.

    Python takes its time to end a process, and a rank that has lost its partner may be gone first.
    """
    limit = time.monotonic() + _GRACE_SECONDS
    while True:
        codes = {rank: code for rank, one in running.items() if (code := _ended(one))}
        for key in selector.get_map().values():
            logs.pump(key.fd)
        causes = [rank for rank in codes if not any(word in logs.tail(rank) for word in LOST)]
        if causes or len(codes) == len(running) or time.monotonic() > limit:
            rank = (causes or list(codes))[0]
            return rank, codes[rank]
        time.sleep(_LOOK_SECONDS)


def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a process that has ended, negative of a signal; it stays a zombie for now.

    `Popen.poll` takes a lock, and an interrupt at a bad moment leaves it taken: whoever waits then
    waits for ever. This changes nothing, so it may be interrupted anywhere.
    """
    if process.returncode is not None:
        return process.returncode
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # of a caller that ignores the end of its children, as Popen has it
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, at most for this long."""
    limit = time.monotonic() + seconds
    while any(_ended(process) is None for process in processes) and time.monotonic() < limit:
        time.sleep(_PAUSE_SECONDS)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Unless all went well: ask what still runs to end, then kill it and all that ranks started."""
    with uninterrupted():
        if any(_ended(process) != 0 for process in processes):
            for process in processes:
                if _ended(process) is None:
                    _signal(process, signal.SIGTERM)
            _wait(processes, _GRACE_SECONDS)
            end_groups([process.pid for process in processes])
            # A killed process may be in a system call that does not end; it is not waited for.
            _wait(processes, _GRACE_SECONDS)
        for process in processes:
            process.returncode = _ended(process)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def run_command(words: Sequence[str], environment: Mapping[str, str], *, quiet: bool) -> int:
    """Run any launcher to its end; its exit code. With `quiet` all it prints goes to stderr.

    Raises:
        ProgramError: it cannot be started.
    """
    try:
        process = subprocess.Popen(  # noqa: S603  the program to record
            words,
            env=dict(environment),
            stdout=sys.stderr.fileno() if quiet else None,
            start_new_session=True,
        )
    except OSError as error:
        raise ProgramError(
            f"cannot be started: {os.strerror(error.errno or 0)}",
            where=words[0],
            hint="give a launcher such as torchrun, or a script and --nproc-per-node",
        ) from error
    try:
        while (code := _ended(process)) is None:
            time.sleep(_LOOK_SECONDS)
        return code
    finally:
        _end([process])
