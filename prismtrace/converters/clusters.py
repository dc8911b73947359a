"""Run a function over many tasks on a Dask cluster that is already there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from prismtrace.errors import InputFileError

__all__ = ["run_on_cluster"]

Result = TypeVar("Result")

_CONNECT_S = 30
_LOGGERS = ("distributed", "distributed.client", "distributed.core", "tornado.application")


def run_on_cluster(
    function: Callable[..., Result], tasks: Sequence[Sequence[Any]], address: str
) -> Generator[Result, None, None]:
    """Results of ``function(*task)`` in the order of the tasks, each computed by some worker.

    The scheduler gives the task of a worker that dies to another one.

    Args:
        function: importable by name on the workers.
        tasks: argument lists; the first argument names the task in errors.
        address: of the scheduler, e.g. ``tcp://head:8786``.

    Raises:
        InputFileError: the cluster does not answer or goes away, or the same task killed several
            workers.
        Exception: what `function` raised, for the first task that fails.
    """
    from distributed import Client
    from distributed.client import FutureCancelledError
    from distributed.comm import CommClosedError
    from distributed.scheduler import KilledWorker

    with _silent_loggers():
        try:
            client = Client(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise InputFileError(
                f"no Dask scheduler answers: {_first_line(error)}",
                where=address,
                hint="start one with `dask scheduler`, and give the address that it prints",
            ) from error
        with client:
            futures = [client.submit(function, *task, pure=False) for task in tasks]
            try:
                for task, future in zip(tasks, futures, strict=True):
                    try:
                        yield future.result()
                    except KilledWorker as error:
                        raise InputFileError(
                            "several workers died on this file, probably for lack of memory",
                            where=str(task[0]),
                            hint="give workers more memory or fewer threads, then run again with "
                            "--resume",
                        ) from error
                    except (CommClosedError, FutureCancelledError) as error:
                        raise InputFileError(
                            "the cluster went away",
                            where=address,
                            hint="start it again, then run again with --resume",
                        ) from error
            finally:
                # There may be nobody left who could be told.
                with suppress(Exception):
                    client.cancel(futures)


@contextmanager
def _silent_loggers() -> Iterator[None]:
    """Dask tells what it does about lost connections in tracebacks; the caller gets an error."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
