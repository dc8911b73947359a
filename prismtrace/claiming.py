"""Folders that one run at a time writes to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from prismtrace.errors import OutputError
from prismtrace.output import output_error

__all__ = ["Claim"]


class Claim:
    """Keeps other runs out of a folder until it is closed, or this process is gone.

    It is a lock on the folder itself, so nothing is left behind. Where the file system has no
    locks, all are let in. Forked processes must close `descriptor`, or they keep the claim.

    Args:
        folder: made if it is not there.
        shared: let others in that share it, too: each writes something else.

    Raises:
        OutputError: another run writes there, or the folder cannot be made.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise output_error(folder, error.errno or 0) from error
        # A forked process that has closed it may use the number for something else.
        self._end = weakref.finalize(self, _close, self.descriptor, os.getpid())
        self._end.atexit = False
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise OutputError(
                "another run is writing to this folder",
                where=str(folder),
                hint="wait until it has ended, or name another output",
            ) from error
        except OSError:
            pass

    def close(self) -> None:
        """Let others in."""
        self._end()


def _close(descriptor: int, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.close(descriptor)
