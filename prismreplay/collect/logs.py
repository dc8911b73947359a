"""Where the output of ranks goes: a file for each, and the terminal for those that are shown."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from prismtrace.claiming import Claim
from prismtrace.output import output_error

__all__ = ["RankLogs", "Streams"]

_READ_SIZE = 1 << 16
_TAIL_BYTES = 8192
_OUR_FRAMES = f'  File "{Path(__file__).parent}'


@dataclass(frozen=True)
class Streams:
    """Where a rank's output goes: file descriptors, closed here once the rank has them."""

    out: int
    err: int


@dataclass
class _Shown:
    """One stream of a rank that is shown: read here, written to its file and passed on."""

    rank: int
    is_error: bool
    log: int
    unfinished: bytes = b""


@dataclass
class RankLogs:
    """`rank-0007.log` and so on in `folder`; files of an earlier run there are replaced.

    Args:
        folder: made if it is not there.
        world_size: decides how many digits names have.
        shown: ranks whose output is passed on; with several, every line names its rank.
        errors_only: pass everything on to stderr, as stdout is for something else.
    """

    folder: Path
    world_size: int
    shown: Collection[int]
    errors_only: bool = False
    _pipes: dict[int, _Shown] = field(default_factory=dict)
    _claim: Claim | None = None

    def prepare(self) -> None:
        """Make the folder empty of logs, and ours until `close`.

        Raises:
            OutputError: it cannot be made, or another run writes there.
        """
        self._claim = Claim(self.folder)
        try:
            for old in self.folder.glob("rank-*.log"):
                old.unlink()
        except OSError as error:
            raise output_error(self.folder, error.errno or 0) from error

    def path(self, rank: int) -> Path:
        """The log of a rank."""
        digits = max(4, len(str(self.world_size - 1)))
        return self.folder / f"rank-{rank:0{digits}d}.log"

    def open(self, rank: int) -> tuple[Streams, list[int]]:
        """What a new rank writes to, and descriptors to read from for `pump`.

        Raises:
            OutputError: the log cannot be made.
        """
        path = self.path(rank)
        try:
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise output_error(path, error.errno or 0) from error
        if rank not in self.shown:
            return Streams(log, log), []
        ends = []
        for is_error in (False, True):
            read, write = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(read, False)
            self._pipes[read] = _Shown(rank, is_error, log)
            ends.append((read, write))
        return Streams(ends[0][1], ends[1][1]), [read for read, _ in ends]

    @property
    def descriptors(self) -> list[int]:
        """Everything open here, for children to close."""
        claim = [] if self._claim is None else [self._claim.descriptor]
        return [*claim, *self._pipes, *{one.log for one in self._pipes.values()}]

    def pump(self, pipe: int) -> bool:
        """Pass on what a shown rank has written; False at its end."""
        shown = self._pipes.get(pipe)
        if shown is None:
            return False
        while True:
            try:
                data = os.read(pipe, _READ_SIZE)
            except BlockingIOError:
                return True
            if not data:
                self._pass_on(shown, b"", last=True)
                return False
            with contextlib.suppress(OSError):
                os.write(shown.log, data)
            self._pass_on(shown, data)

    def close(self) -> None:
        """Pass on what is left, and close."""
        for pipe in list(self._pipes):
            self.pump(pipe)
            self._pass_on(self._pipes[pipe], b"", last=True)
            os.close(pipe)
        for log in {one.log for one in self._pipes.values()}:
            os.close(log)
        self._pipes.clear()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def shows(self, rank: int) -> bool:
        """Whether all that a rank prints is passed on, so that nobody need print it again."""
        return rank in self.shown

    def tail(self, rank: int) -> str:
        """The end of what a rank has written."""
        try:
            with self.path(rank).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _TAIL_BYTES))
                text = file.read().decode(errors="replace").strip()
        except OSError:
            return ""
        # What Python says of a crash ends with frames that are ours, and a list of modules.
        before, crash, stack = text.rpartition("Fatal Python error")
        return before + crash + stack.partition(_OUR_FRAMES)[0].rstrip() if crash else text

    def _pass_on(self, shown: _Shown, data: bytes, *, last: bool = False) -> None:
        """Whole lines only, so that those of several ranks and streams do not mix."""
        text = shown.unfinished + data
        end = len(text) if last else text.rfind(b"\n") + 1
        lines, shown.unfinished = text[:end], text[end:]
        if not lines:
            return
        if last and not lines.endswith(b"\n"):
            lines += b"\n"
        if len(self.shown) > 1:
            mark = f"[rank {shown.rank}] ".encode()
            lines = b"".join(mark + line for line in lines.splitlines(keepends=True))
        stream = sys.stderr if shown.is_error or self.errors_only else sys.stdout
        # A reader that went away is no reason to stop the run.
        with contextlib.suppress(OSError, ValueError):
            # Through Python's stream: a progress bar on the same terminal makes room.
            stream.write(lines.decode(errors="replace"))
            stream.flush()
