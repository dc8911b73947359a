"""Run a command to its end: whatever happens becomes an exit code and one clear message.

0 good, 1 the input or the run is bad, 2 wrong usage, 130 interrupted, 143 and 129 told to stop
(SIGTERM, SIGHUP).
"""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

import typer

from prismtrace.completion import answer_completion
from prismtrace.console import print_error, print_failure
from prismtrace.errors import PrismError
from prismtrace.signals import stop_signals

__all__ = ["run"]

# Modules that come only with an extra: a missing one is the installation's fault, and the
# person needs the name of the extra, not a traceback.
_EXTRA_OF_MODULE = {
    "networkx": "calib",
    "numba": "calib",
    "safetensors": "replay",
    "torch": "replay",
    "cuda": "cuda",
    "dask": "dask",
    "distributed": "dask",
}


def run(app: typer.Typer) -> NoReturn:
    """Run `app` on `sys.argv` and exit; turn every expected failure into one clear message.

    Typer itself exits with 2 on wrong usage and 130 on Ctrl-C. A `PrismError`, an `OSError`
    nobody handled or a missing optional dependency ends with 1 and no traceback. Any other
    exception is a bug of ours and keeps its traceback.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    answer_completion(Path(sys.argv[0]).name)
    with stop_signals() as stopped:
        try:
            code = _exit_code(app)
        except KeyboardInterrupt:
            code = 130
    if stopped:
        code = 128 + stopped[0]
    if stopped or code == 130:
        # To collect what torch leaves takes longer than all else that ends a command.
        atexit.register(gc.freeze)
        atexit.register(gc.disable)
    # Ctrl-C while the interpreter shuts down ends it without a traceback.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)
    _flush_stdout()
    sys.exit(code)


def _exit_code(app: typer.Typer) -> int | str | None:
    """Run `app`; what it ends with, after telling what went wrong."""
    code: int | str | None = 0
    try:
        try:
            _require_threads()
            app()
        except SystemExit as exit_:
            code = exit_.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 1
    except PrismError as error:
        print_error(error)
        code = 1
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF_MODULE.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print_failure(
            f"this command needs the Python package {error.name}",
            hint=f"pip install 'prismllm-toolkit[{extra}]'",
        )
        code = 1
    except OSError as error:
        _print_os_error(error)
        code = 1
    except MemoryError:
        print_failure(
            "out of memory",
            where=" ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]),
            hint="use fewer --jobs where the command has them, fewer ranks at a time, or a machine "
            "with more memory",
        )
        code = 1
    except BaseException as error:
        # Polars' panics are no Exception; these are no bugs of anybody's.
        if type(error).__name__ != "PanicException":
            raise
        if "KeyboardInterrupt" in str(error):
            # Raised in a function that Polars' own code calls, which makes no use of errors.
            return 130
        if "spawn worker thread" not in str(error):
            raise
        print_failure(
            str(error),
            where="Polars",
            hint="allow more processes (ulimit -u), or have it use fewer: POLARS_MAX_THREADS=1",
        )
        code = 1
    return code


def _require_threads() -> None:
    """Polars does not start without threads, and would say so in a page of its own.

    Raises:
        PrismError: the environment allows none.
    """
    said = os.environ.get("POLARS_MAX_THREADS")
    if said and not said.strip("0"):
        raise PrismError(
            "Polars cannot work with 0 threads",
            where=f"POLARS_MAX_THREADS={said}",
            hint="unset it, or set it to 1 or more",
        )


def _open_closed_streams() -> None:
    """Connect standard streams that the caller closed (`>&-`) with nothing.

    Python has None in their place, and the next file that is opened would get their number.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
        # Left open: it is a standard stream from now on.
        setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _flush_stdout() -> bool:
    """Flush now, so that an output that takes no more costs no message at shutdown.

    False if stdout takes no more: its reader went away (`| head`), or its disk is full.
    """
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    except ValueError:  # already closed
        pass
    return True


def _is_stdout_full() -> bool:
    """Whether it was stdout that took no more: writing to it fails without a name."""
    if not _flush_stdout():
        return True
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return False
    try:
        # Nothing may be left to flush if stdout is unbuffered; devices refuse even no bytes.
        os.write(number, b"")
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        return regular and os.statvfs(number).f_bavail == 0
    except OSError:
        return True


def _print_os_error(error: OSError) -> None:
    """An error of the operating system that no part of the toolkit expected."""
    hints = {
        errno.ENOENT: "check the path",
        errno.EACCES: "check who may read and write it",
        errno.ENOSPC: "free some space, or write to another disk",
        errno.EDQUOT: "free some space, or write to another disk",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    hint = hints.get(error.errno or 0, "check the disk or device")
    where = error.filename
    if where is None:
        where = "stdout" if _is_stdout_full() else "a temporary file or a device"
    print_failure(error.strerror or str(error), where=where, hint=hint)
