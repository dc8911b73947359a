"""What a run takes from its machine, and gives back: a folder, open files, Ctrl-C."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from prismreplay.collect import stale
from prismreplay.errors import ReplayError
from prismtrace.output import output_error

__all__ = ["limit_of_open_files", "run_folder", "uninterrupted"]

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AS_IT_IS = (signal.SIG_IGN, None)  # what the caller ignores, or handles outside of Python
_RESERVED_FILES = 64
_FILES_PER_RANK = 4


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """The folder of this run, named so that a later run can tell whether this one is alive."""
    folder = Path(tempfile.gettempdir()) / stale.run_name()
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise output_error(folder, error.errno or 0) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def limit_of_open_files(world_size: int) -> Iterator[tuple[int, int]]:
    """Allow this process the open files that `world_size` ranks take; yields the old limits.

    Raises:
        ReplayError: the machine does not allow so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES_PER_RANK * world_size + _RESERVED_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise ReplayError(
            f"{world_size} ranks need {wanted} open files; the machine allows {hard}",
            hint="raise the hard limit (ulimit -Hn), or collect a smaller job",
        )
    most = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield soft, hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep what asks this process to stop away while ranks are ended, which takes a second at most.

    It counts afterwards, unless an error is cleaned up after, which ends the command anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends_anyway = sys.exc_info()[1] is not None
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _STOPS}
    kept = {number: handler for number, handler in handlers.items() if handler not in _AS_IT_IS}
    for number in kept:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        if came and not ends_anyway:
            signal.raise_signal(came[0])
