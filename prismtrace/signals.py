"""Being asked to stop: like Ctrl-C, so that temporary files and workers go with the command.

KeyboardInterrupt may be lost, and the command would go on as if nothing had been asked of it: while
an extension module imports others, as it may drop errors that it does not expect, or take them for
a missing module; in finalizers, and in what compiled code calls, such as Pydantic's while it makes
a validator. While a process is started, that process would be lost. So it waits until that is over.

Imports by Python code are interrupted: on a busy machine those of torch take half a minute. Should
one of them drop the error nevertheless, it is raised again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from opcode import opmap
from types import FrameType

__all__ = ["stop_signals"]

# A batch system's time limit, and a terminal that is closed. Windows has no SIGHUP.
_STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
# LLVM calls functions of it (numba's compiler).
_LLVMLITE = f"{os.sep}llvmlite{os.sep}"
_IMPORTLIB = "<frozen importlib._bootstrap"
_IMPORTING = ("_find_and_load", "_handle_fromlist")
"""What the interpreter itself calls of importlib, for an `import` and for compiled code."""
_IMPORTING_MORE = ("_find_and_load_unlocked", "_handle_fromlist")
_IMPORT_NAME = opmap["IMPORT_NAME"]
# Errors of finalizers and of what Python calls at a fork are dropped; a process that `subprocess` is
# just starting would be left behind.
_DEAF_NAMES = ("__del__", "fork", "_execute_child")
_POLARS = f"{os.sep}polars{os.sep}"
_LAZY = f"{_POLARS}lazyframe{os.sep}"
_PYDANTIC = f"{os.sep}pydantic{os.sep}"
_LOOK_S = 0.01
_ONE_REQUEST_S = 0.5
"""`timeout` and terminals send Ctrl-C to a process and to its group: what comes twice is one."""
_LONGEST_WAIT_S = 60.0
"""A program that is an import itself would never be stopped otherwise."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """While the block runs, SIGTERM and SIGHUP raise KeyboardInterrupt in it, as Ctrl-C does.

    Yields the numbers of the signals that came, without Ctrl-C. Only the first counts, Ctrl-C
    included, which often comes with a SIGTERM from the command that started this one; cleaning up
    is not interrupted by the next, other than by Ctrl-C half a second later. What comes after the
    block is over raises nothing. A signal that the caller ignores (`nohup`) or handles stays as it
    is.
    """
    stopped: list[int] = []
    asked_at: float | None = None
    over = False
    interruption = _Interruption()

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        again = asked_at is not None and (
            number != signal.SIGINT or now - asked_at < _ONE_REQUEST_S
        )
        # Not SIG_IGN in its place: of a signal that is on its way then, Python prints a traceback.
        if over or again:
            return
        asked_at = now
        if number != signal.SIGINT:
            stopped.append(number)
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
        self._raised: KeyboardInterrupt | None = None
        self._importing: FrameType | None = None
        """What imported when it was raised: where that goes on, it was lost."""

    def come(self, frame: FrameType | None) -> None:
        """Raise now, or look again soon."""
        may_wait = self._can_wait()
        if self._until is None and may_wait:
            self._until = time.monotonic() + _LONGEST_WAIT_S
            signal.signal(signal.SIGALRM, self._look)
            signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
        if not _is_deaf(frame) or not may_wait:
            self._raise(frame)

    def forget(self) -> None:
        """What has not been raised by now, is not."""
        self._importing = None
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
        if self._until is None:
            return
        if self._raised is not None and not self._is_lost(frame):
            return
        if not _is_deaf(frame) or not self._can_wait():
            self._raise(frame)

    def _raise(self, frame: FrameType | None) -> None:
        self._raised = KeyboardInterrupt()
        self._importing = _importer(frame)
        if self._importing is None:
            self.forget()
        raise self._raised

    def _is_lost(self, frame: FrameType | None) -> bool:
        """Whether the program goes on, instead of cleaning up."""
        if all(one is not self._importing for one in _stack(frame)):
            self.forget()  # it has left that function
            return False
        handled = sys.exc_info()[1]
        while handled is not None and handled is not self._raised:
            handled = handled.__context__
        return handled is None


def _is_deaf(frame: FrameType | None) -> bool:
    """Whether an error raised here may never get to who waits for it."""
    if frame is not None and _POLARS in (name := frame.f_code.co_filename):
        # Rust has called it, and would panic; but whoever collects a lazy frame may be stopped.
        return _LAZY not in name
    if frame is not None and _PYDANTIC in frame.f_code.co_filename:
        return True  # what it compiles drops errors of types that it looks at
    if frame is not None and _is_importlib(frame):
        return True  # it may hold a lock; what it imports does not
    return any(
        one.f_code.co_name in _DEAF_NAMES
        or _LLVMLITE in one.f_code.co_filename
        or _is_compiled_code_importing(one)
        for one in _stack(frame)
    )


def _is_compiled_code_importing(frame: FrameType) -> bool:
    """Whether this is what an extension module called to import, or when it was imported."""
    name, back = frame.f_code.co_name, frame.f_back
    if back is None or (_is_importlib(frame) and name not in _IMPORTING):
        return False
    if not _is_importlib(back):
        code = back.f_code.co_code
        return _is_importlib(frame) and code[back.f_lasti] != _IMPORT_NAME
    if back.f_code.co_name != "_call_with_frames_removed":
        return False
    # Either importlib imports a package for what is in it, or it runs a module.
    before = back.f_back
    of_importlib = before is not None and before.f_code.co_name in _IMPORTING_MORE
    return not of_importlib and name != "<module>"


def _importer(frame: FrameType | None) -> FrameType | None:
    """Who began the import that this is part of; None if it is part of none."""
    outermost = None
    for one in _stack(frame):
        if _is_importlib(one) or one.f_code is import_module.__code__:
            outermost = one.f_back
    return outermost


def _is_importlib(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_IMPORTLIB)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """`frame` and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back
