"""Processes forked from this one, each at the other end of a channel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from prismreplay.collect.messages import Channel
from prismreplay.runtime.exits import leave

__all__ = ["Child", "fork"]

_PR_SET_PDEATHSIG = 1
_FAILED = 70


class Child(NamedTuple):
    """A forked process: `pidfd` becomes readable when it ends."""

    pid: int
    channel: Channel
    pidfd: int


def fork(run: Callable[[Channel], int], inherited: Iterable[int]) -> Child:
    """Fork a process that ends with what `run` returns, and with this one at the latest.

    It has a process group of its own, and the signal handlers of a fresh one.

    Args:
        run: called in it, with its end of the channel.
        inherited: descriptors that it must not keep, such as those of its siblings.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forks beside threads; torch's idle ones hold no lock that ranks need.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = _FAILED
        try:
            ours.close()
            for descriptor in inherited:
                os.close(descriptor)
            _detach(parent)
            code = run(Channel(theirs))
        except BaseException:  # noqa: BLE001  nothing may return into the parent's code
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            leave(code)
    with contextlib.suppress(OSError):  # the child does it, too; who is first does not matter
        os.setpgid(pid, pid)
    theirs.close()
    return Child(pid, Channel(ours), os.pidfd_open(pid))


def _detach(parent: int) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        leave(1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _leave_to_parent()


def _leave_to_parent() -> None:
    """What finalizers would do at the end is the parent's: remove its temporary folders, say.

    Exit functions stay, as those of libraries serve programs, which find these imported.
    """
    known: Any = weakref.finalize
    for finalizer in known._registry:  # noqa: SLF001
        finalizer.atexit = False
