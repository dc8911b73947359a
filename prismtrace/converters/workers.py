"""Run a function over many tasks in separate processes.

`multiprocessing` re-imports the caller's script in each worker unless it forks, and Polars'
threads do not survive a fork; a script without a ``__main__`` guard would start itself again.
Here a worker is a fresh interpreter that runs this module and nothing of the caller.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from prismtrace.errors import InputFileError

__all__ = ["run_tasks"]

Result = TypeVar("Result")

_LOOK_S = 0.5  # how often a worker looks whether its parent is still there


class _Worker:
    """One interpreter that answers pickled tasks, one at a time."""

    def __init__(self, threads: int) -> None:
        code = (
            # Whoever stops it at a bad moment gets no traceback.
            "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from prismtrace.converters.workers import serve; serve()"
        )
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for this process; it stops its workers.
            process_group=0,
            env={"POLARS_MAX_THREADS": str(threads), **os.environ},
        )

    def call(self, function: Callable[..., Result], arguments: Sequence[Any]) -> Result:
        source, sink = self._process.stdout, self._process.stdin
        try:
            if source is None or sink is None:
                raise EOFError
            pickle.dump((function, arguments), sink)
            sink.flush()
            succeeded, value = pickle.load(source)  # noqa: S301 - our own child wrote it
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise InputFileError(
                "a worker process died, probably for lack of memory",
                where=str(arguments[0]),
                hint="use fewer --jobs",
            ) from error
        if not succeeded:
            raise value
        result: Result = value
        return result

    def kill(self) -> None:
        self._process.kill()

    def clear(self) -> None:
        """Wait for the end of a process that was killed."""
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # half of a task may still wait to be sent
                    pipe.close()


def run_tasks(
    function: Callable[..., Result], tasks: Sequence[Sequence[Any]], jobs: int
) -> Generator[Result, None, None]:
    """Results of ``function(*task)`` in the order of the tasks.

    Args:
        function: importable by name.
        tasks: argument lists; the first argument names the task in errors.
        jobs: processes at a time; 1 runs in this process.

    Raises:
        InputFileError: a worker died.
        Exception: what `function` raised, for the first task that fails.
    """
    if jobs <= 1:
        for task in tasks:
            yield function(*task)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    workers = [_Worker(threads) for _ in range(jobs)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(task: Sequence[Any]) -> Result:
        worker = idle.get()
        try:
            return worker.call(function, task)
        finally:
            idle.put(worker)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
            # All at once first: waiting may be interrupted.
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.clear()


def serve() -> None:
    """Answer tasks from standard input until it closes."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing that is printed may mix with the answers
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            function, arguments = pickle.load(source)  # noqa: S301 - our own parent wrote it
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            answer = (False, _portable(error))
        try:
            pickle.dump(answer, sink)
            sink.flush()
        except BrokenPipeError:
            os._exit(1)  # the parent was killed


def _end_with(parent: int) -> None:
    """End this process soon after its parent, also in the middle of a task."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives the way to the caller, else its text."""
    error.add_note(f"in a worker process:\n{traceback.format_exc()}")
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever its class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
