"""Processes that do pieces of work, forked from one that has torch loaded.

Each slice needs a process of its own that forks its ranks, and must not have had threads before.
So there is a *nursery*, which imports what all need, and does nothing but fork.

    this process  --request, pipe-->  nursery  --fork-->  worker  --result through pipe-->
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from prismreplay.errors import ReplayError
from prismtrace.errors import PrismError

__all__ = ["Nursery", "WorkError", "Worker", "serve"]

_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES = 1 << 17
_REPORT = "this is a bug of ours, please report it with what is above; slices that are done stay"


class WorkError(Exception):
    """A worker failed with an error of ours; `report` goes before it."""

    def __init__(self, error: BaseException, report: str = "") -> None:
        super().__init__(str(error))
        self.error = error
        self.report = report


@dataclass
class Worker:
    """A piece of work that is being done. Readable when its result, or its end, is there."""

    task: Any
    pipe: int

    def fileno(self) -> int:
        """For selectors."""
        return self.pipe

    def result(self) -> Any:
        """Wait for what the work returns.

        Raises:
            WorkError: it raised, or its process died.
        """
        data = bytearray()
        with open(self.pipe, "rb") as file:  # noqa: PTH123  a descriptor
            while block := file.read(1 << 16):
                data += block
        if not data:
            raise WorkError(
                ReplayError(
                    "the process that ran a slice was killed",
                    hint="most likely the machine ran out of memory: fewer slices at once "
                    "(--devices), fewer ranks in a slice (--sandbox-size)",
                )
            )
        kind, value, report = pickle.loads(data)  # noqa: S301  a process that we forked wrote it
        if kind == "failed":
            raise WorkError(value, report)
        return value


class Nursery:
    """A process that forks workers; use it in a `with`.

    Args:
        prepare: called once in the nursery: imports.
        work: called with a task in each worker. Both are functions of modules; tasks and
            results are pickled.
    """

    def __init__(self, prepare: Callable[[], object], work: Callable[[Any], Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call = f"from {__name__} import serve; serve({theirs.fileno()}, {os.getpid()})"
        self._process = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
            pass_fds=[theirs.fileno()],
            # Ctrl-C is for this process, which says what is to end.
            process_group=0,
        )
        theirs.close()
        self._socket = ours
        self._open = True
        self._socket.send(pickle.dumps((prepare, work)))

    def start(self, task: Any) -> Worker:
        """Begin a piece of work.

        Raises:
            ReplayError: the nursery is gone.
        """
        read, write = os.pipe()
        try:
            request = pickle.dumps(task)
            if len(request) > _REQUEST_BYTES:
                raise ValueError(f"a task of {len(request)} bytes")
            socket.send_fds(self._socket, [request], [write])
        except (BrokenPipeError, ConnectionResetError) as error:
            os.close(read)
            raise ReplayError(
                "the process that starts slices has ended", hint="its output is above"
            ) from error
        finally:
            os.close(write)
        return Worker(task, read)

    def close(self) -> None:
        """End all workers, as Ctrl-C would, and wait until they are gone."""
        if not self._open:
            return
        self._open = False
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(descriptor: int, parent: int) -> None:
    """The nursery: fork for each request until there are no more."""
    _end_with(parent)
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare, work = pickle.loads(requests.recv(_REQUEST_BYTES))  # noqa: S301  from our parent
    prepare()
    me = os.getpid()
    children: set[int] = set()
    while True:
        request, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 1)
        _bury(children, os.WNOHANG)
        if not request:
            break
        pid = os.fork()
        if pid == 0:
            requests.close()
            _end_with(me)
            _work(request, files[0], work)
        os.close(files[0])
        children.add(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
    _bury(children, 0)


def _bury(children: set[int], flags: int) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, flags)[0] == 0:
                continue
        children.discard(pid)


def _work(request: bytes, pipe: int, work: Callable[[Any], Any]) -> None:
    """A worker: do it, say how it went, end."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        answer = _answer(request, work)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        os._exit(130)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError), open(pipe, "wb") as file:
        file.write(pickle.dumps(answer))
    os._exit(0)


def _answer(request: bytes, work: Callable[[Any], Any]) -> tuple[str, Any, str]:
    try:
        return "done", work(pickle.loads(request)), ""  # noqa: S301  from our own parent
    except PrismError as error:
        return "failed", error, str(getattr(error, "report", ""))
    except Exception as error:  # noqa: BLE001  whatever it is, somebody has to be told
        told = ReplayError(f"a slice failed: {type(error).__name__}: {error}", hint=_REPORT)
        return "failed", told, traceback.format_exc()


def _end_with(parent: int) -> None:
    """Be killed when the process that forked this one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
