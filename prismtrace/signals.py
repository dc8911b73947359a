"""Being asked to stop: like Ctrl-C, so that temporary files and workers go with the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_signals"]

# A batch system's time limit, and a terminal that is closed. Windows has no SIGHUP.
_STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """While the block runs, SIGTERM and SIGHUP raise KeyboardInterrupt in it.

    Yields the numbers of the signals that came. Only the first counts; cleaning up is not
    interrupted by the next. A signal that the caller ignores (`nohup`) or handles stays as it is.
    """
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped.append(number)
        for other in previous:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOPS:
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
