"""Stages of a chain of commands: each leaves files, and a note by which it is known to be done.

A stage is one command in a process of its own: what it imports, forks and allocates is its own
affair, and it can be typed again as it is printed. The note beside its files holds what the
command was made from and what it reported. When the chain is started again, stages whose note
still fits are not repeated.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismreplay.collect.surroundings import uninterrupted
from prismreplay.digests import file_digest, texts_digest
from prismreplay.errors import ReplayError
from prismtrace import __version__
from prismtrace.output import atomic_output
from prismtrace.progress_bar import WITHIN

__all__ = ["Note", "Stage", "StageError", "inputs_digest", "kept_note", "run_stage"]

_GRACE_SECONDS = 10.0
_ROOT = str(Path(__file__).resolve().parent.parent.parent)
# Not `-m`: that puts the current folder first, where the user's own modules may bear any name.
_CALL = "import sys; sys.path.append(sys.argv.pop(1)); from {} import main; main()"


class StageError(Exception):
    """The command of a stage has failed, and has said why. `code` is its exit code."""

    def __init__(self, stage: str, code: int) -> None:
        super().__init__(f"{stage} failed with exit code {code}")
        self.stage = stage
        self.code = code


@dataclass(frozen=True)
class Stage:
    """One command of a chain.

    Attributes:
        name: of the stage.
        words: the command line, as it is typed; it is called with --json besides.
        made: patterns of the files that it leaves, in the work folder.
        inputs: digests of what else its result depends on.
    """

    name: str
    words: tuple[str, ...]
    made: tuple[str, ...]
    inputs: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """To be typed again."""
        return shlex.join(self.words)

    @property
    def fingerprint(self) -> str:
        """What the stage's result was made from."""
        return texts_digest(__version__, _torch(), *self.words, *self.inputs)


@dataclass(frozen=True)
class Note:
    """What a stage leaves beside its files.

    Attributes:
        report: what its command printed.
        wall_s: how long it took.
        token: differs for every execution, so that what was made from it can tell.
    """

    report: dict[str, Any]
    wall_s: float
    token: str


def kept_note(folder: Path, stage: Stage) -> Note | None:
    """The note of a stage that need not be repeated; None if it has to be."""
    try:
        text = json.loads(_note(folder, stage).read_text(encoding="utf-8"))
        if text["fingerprint"] != stage.fingerprint or text["files"] != _files(folder, stage):
            return None
        return Note(text["report"], text["wall_s"], text["token"])
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        return None


def run_stage(folder: Path, stage: Stage) -> Note:
    """Run the command of a stage, and leave its note.

    Raises:
        StageError: the command failed; its message has been printed.
        OutputError: the note cannot be written.
    """
    note = _note(folder, stage)
    with contextlib.suppress(FileNotFoundError):
        note.unlink()
    begun = time.monotonic()
    printed = _call(stage)
    try:
        report = json.loads(printed)
    except json.JSONDecodeError as error:
        raise ReplayError(
            f"{stage.name} did not print its report as JSON",
            where=stage.line,
            hint="run that command by itself: what else does it print?",
        ) from error
    wall = time.monotonic() - begun
    made = Note(report, wall, texts_digest(stage.fingerprint, str(time.time_ns())))
    text = {
        "command": stage.line,
        "fingerprint": stage.fingerprint,
        "token": made.token,
        "wall_s": wall,
        "files": _files(folder, stage),
        "report": report,
    }
    with atomic_output(note) as temporary:
        temporary.write_text(json.dumps(text, indent=1), encoding="utf-8")
    return made


def inputs_digest(paths: Iterable[Path], other: Path | None = None) -> str:
    """Of the content of files; of a recording's folder, of what describes it.

    Raises:
        InputFileError: a file cannot be read.
    """
    named = [*paths, *([] if other is None else [other])]
    return texts_digest(*(f"{path} {_content(path)}" for path in named))


def _note(folder: Path, stage: Stage) -> Path:
    return folder / f"{stage.name}.json"


def _files(folder: Path, stage: Stage) -> dict[str, list[int]]:
    """The files of a stage with their sizes and times of writing.

    Raises:
        FileNotFoundError: there are none for a pattern.
    """
    found: dict[str, list[int]] = {}
    for pattern in stage.made:
        paths = sorted(folder.glob(pattern))
        if not paths:
            raise FileNotFoundError(pattern)
        for path in paths:
            status = path.stat()
            found[str(path.relative_to(folder))] = [status.st_size, status.st_mtime_ns]
    return found


def _call(stage: Stage) -> str:
    """Run the command; what it prints on stdout. What it says on stderr passes through."""
    command, *rest = stage.words
    dashes = rest.index("--") if "--" in rest else len(rest)
    words = [*rest[:dashes], "--json", *rest[dashes:]]
    # Polars makes system calls go on after Ctrl-C: waiting for the stage would, too.
    signal.siginterrupt(signal.SIGINT, True)
    call = [sys.executable, "-P", "-c", _CALL.format(f"{command}.cli"), _ROOT, *words]
    env = {**os.environ, WITHIN: "emulate"}
    with subprocess.Popen(  # noqa: S603  our own command
        call, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env
    ) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            # A second Ctrl-C would leave the stage behind.
            with uninterrupted():
                _end(process)
            raise
    if process.returncode:
        raise StageError(stage.name, _exit_code(process.returncode))
    return printed.decode("utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it clean up, and kill it if it does not come to an end."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code


def _content(path: Path) -> str:
    if path.is_dir():
        path = path / "manifest.json"
    # Some are no files, such as rules that come with the package.
    return file_digest(path) if path.exists() else "none"


def _torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return f"none in {os.path.realpath(sys.executable)}"
