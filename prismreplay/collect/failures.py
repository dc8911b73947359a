"""A program's failure in a rank: how the coordinator is told of it, and how it is printed."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
import types
from importlib import util
from pathlib import Path

from prismtrace.errors import PrismError

__all__ = ["failure_message", "show"]

_NOT_THE_PROGRAM = tuple(
    str(Path(found.origin).parent)
    for name in ("torch", "prismreplay")
    if (found := util.find_spec(name)) is not None and found.origin
)
"""Code that is not the program's own."""
_OURS = str(Path(__file__).parent.parent) + os.sep
_MOST_CHARACTERS = 300
_NO_GPU = (
    "has no attribute '_cuda_",
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
)
"""What torch says when a program asks for a GPU that is not there."""


def failure_message(
    error: BaseException, *, alone: bool = False
) -> tuple[str, str | None, str, str | None, str | None, str]:
    """The message that tells the coordinator of it; whether the rank has been `alone` on its GPU."""
    report = "".join(
        traceback.format_exception(type(error), error, _own_frames(error.__traceback__))
    )
    if isinstance(error, PrismError):
        places = [place for place in (_last_line(error), error.where) if place]
        return "failed", error.code, error.message, ", ".join(places) or None, error.hint, report
    text = "".join(traceback.format_exception_only(type(error), error)[-1:])
    return "failed", None, _in_one_line(text), None, _hint(error, alone=alone), report


def _in_one_line(text: str) -> str:
    """The beginning of an exception's text; all of it is in the traceback."""
    own, cut, _ = text.partition("Traceback (most recent call last)")
    words = " ".join(own.split())
    if len(words) > _MOST_CHARACTERS:
        words, cut = words[:_MOST_CHARACTERS], "cut"
    return f"{words} ..." if cut else words


def _hint(error: BaseException, *, alone: bool) -> str | None:
    """What else to say of some failures."""
    spawning = sys.modules.get("torch.multiprocessing.spawn")
    if spawning is not None and isinstance(error, spawning.ProcessException):
        return (
            "if the processes that the program starts are its ranks: let it be one rank, as under "
            "torchrun, which takes RANK and WORLD_SIZE from the environment"
        )
    if type(error).__name__ == "OutOfMemoryError" and alone:
        return (
            "the rank had this GPU to itself, and allocated what it allocates on the cluster: on a "
            "GPU of this size the job ends there, too"
        )
    if type(error).__name__ == "OutOfMemoryError" and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return (
            "other ranks were on that GPU, too: if this one alone would fit, leave more room for "
            "growth with a smaller --gpu-memory"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space: is it the disk that the output of ranks goes to (--log-dir)?"
    if any(text in str(error) for text in _NO_GPU):
        return (
            "the program wants a GPU, and there is none here, or torch is a build for CPUs: where "
            "torch.cuda.is_available() says no, let it compute on the CPU"
        )
    if isinstance(error, EOFError) and "when reading a line" in str(error):
        return (
            "the standard input of ranks is empty: give the program what it asks for as arguments"
        )
    return None


def _last_line(error: BaseException) -> str:
    """The program's own line that was being executed: `train.py:41`."""
    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(_own_frames(error.__traceback__))
        if not frame.filename.startswith(_NOT_THE_PROGRAM)
    ]
    return lines[-1] if lines else ""


def show(error: BaseException) -> None:
    """Print it as the interpreter would; of our own errors only the program's part."""
    error.__traceback__ = _own_frames(error.__traceback__)
    hint = None
    if isinstance(error, PrismError):
        _cut_at_ours(error.__traceback__)
        error.__cause__, error.__suppress_context__ = None, True
        hint = error.hint
    with contextlib.suppress(Exception):
        sys.excepthook(type(error), error, error.__traceback__)
        if hint:
            print(f"  hint: {hint}", file=sys.stderr)


def _own_frames(found: types.TracebackType | None) -> types.TracebackType | None:
    """Without the frames that started the program."""
    first = found
    while found is not None:
        path = found.tb_frame.f_code.co_filename
        if "prismreplay/collect" not in path and not path.startswith("<frozen"):
            return found
        found = found.tb_next
    return first


def _cut_at_ours(found: types.TracebackType | None) -> None:
    """End a traceback where the program's call comes into this package."""
    while found is not None:
        after = found.tb_next
        if after is not None and after.tb_frame.f_code.co_filename.startswith(_OURS):
            found.tb_next = None
        found = found.tb_next
