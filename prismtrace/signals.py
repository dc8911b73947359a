"""Being asked to stop: like Ctrl-C, so that temporary files and workers go with the command.

KeyboardInterrupt may be lost, and the command would go on as if nothing had been asked of it: while
a module is imported, as extension modules drop errors that they do not expect, or take them for a
missing module; in finalizers, and in what compiled code calls. While a process is started, that
process would be lost. So it waits until that is over.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_signals"]

# A batch system's time limit, and a terminal that is closed. Windows has no SIGHUP.
_STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
# LLVM calls functions of llvmlite (numba's compiler).
_DEAF_FILES = ("<frozen importlib._bootstrap>", f"{os.sep}llvmlite{os.sep}")
# Errors of finalizers and of what Python calls at a fork are dropped; a process that `subprocess` is
# just starting would be left behind.
_DEAF_NAMES = ("__del__", "fork", "_execute_child")
_POLARS = f"{os.sep}polars{os.sep}"
_LAZY = f"{_POLARS}lazyframe{os.sep}"
_LOOK_S = 0.01
_LONGEST_WAIT_S = 60.0
"""A program that is an import itself would never be stopped otherwise."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """While the block runs, SIGTERM and SIGHUP raise KeyboardInterrupt in it, as Ctrl-C does.

    Yields the numbers of the signals that came, without Ctrl-C. Only the first counts, Ctrl-C
    included, which often comes with a SIGTERM from the command that started this one; cleaning up
    is not interrupted by the next, other than Ctrl-C. What comes after the block is over raises
    nothing. A signal that the caller ignores (`nohup`)
    or handles stays as it is.
    """
    stopped: list[int] = []
    over = False
    interruption = _Interruption()

    def stop(number: int, frame: FrameType | None) -> None:
        if over:
            return
        if number != signal.SIGINT:
            stopped.append(number)
        for other in previous.keys() - {signal.SIGINT}:
            signal.signal(other, signal.SIG_IGN)
        interruption.come(frame)

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOPS:
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, stop)
        # The latter is the work of `prismtrace.starting`.
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
            previous[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        over = True
        interruption.forget()
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Interruption:
    """KeyboardInterrupt, as soon as it is not lost."""

    def __init__(self) -> None:
        self._until: float | None = None  # None: nothing is due

    def come(self, frame: FrameType | None) -> None:
        """Raise now, or look again soon."""
        if not _is_deaf(frame) or not self._can_wait():
            raise KeyboardInterrupt
        if self._until is None:
            self._until = time.monotonic() + _LONGEST_WAIT_S
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)

    def forget(self) -> None:
        """What has not been raised by now, is not."""
        if self._until is not None:
            self._until = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def _can_wait(self) -> bool:
        if self._until is not None:
            return time.monotonic() < self._until
        # Windows has no timer; one that somebody else uses is theirs.
        return hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL

    def _look(self, _number: int, frame: FrameType | None) -> None:
        if self._until is not None and (not _is_deaf(frame) or not self._can_wait()):
            self.forget()
            raise KeyboardInterrupt


def _is_deaf(frame: FrameType | None) -> bool:
    """Whether an error raised here may never get to who waits for it."""
    if frame is not None and _POLARS in (name := frame.f_code.co_filename):
        # Rust has called it, and would panic; but whoever collects a lazy frame may be stopped.
        return _LAZY not in name
    while frame is not None:
        code = frame.f_code
        if code.co_name in _DEAF_NAMES or any(name in code.co_filename for name in _DEAF_FILES):
            return True
        frame = frame.f_back
    return False
