"""Ends of a program that Python does not hear of, and how an end is told."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

__all__ = ["before_exit", "leave", "told_end"]

leave = os._exit
"""Ends the process at once, and calls nothing."""


def before_exit(finish: Callable[[int], None]) -> None:
    """Call `finish` with the exit code when the program ends this process by `os._exit`.

    Programs do that so as not to wait for threads or for NCCL; it runs no exit functions. In
    processes forked from this one `finish` is not called.
    """
    pid = os.getpid()

    def exit_(status: int) -> None:
        if os.getpid() == pid:
            with contextlib.suppress(Exception):
                finish(status)
        leave(status)

    os._exit = exit_  # type: ignore[assignment]


def told_end(code: int) -> str:
    """What an exit code, or the number of a signal below 0, says of a rank."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # one of the real-time signals, most of which have no name
        return f"was killed by signal {-code}"
