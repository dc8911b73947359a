"""How far a command has come, on stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["WITHIN", "Progress", "progress"]

WITHIN = "PRISMTRACE_WITHIN"
"""Environment variable: the name of a command that runs this one, and says when it begins and ends."""

_LINES_SECONDS = 30.0


class Progress:
    """What `progress` yields. Without a terminal lines are printed now and then, while it lasts long."""

    def __init__(
        self,
        description: str,
        total: int | None = None,
        bar: RichProgress | None = None,
        task: TaskID | None = None,
        *,
        lines: bool = False,
    ) -> None:
        self._description = description
        self._total = total
        self._done = 0
        self._bar = bar
        self._task = task
        self._lines = lines
        self._begun = self._last_line = time.monotonic()

    def advance(self, n: int = 1) -> None:
        """Count `n` more items or bytes as done. May be called from several threads."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, n)
        else:
            self._done += n
            if self._lines:
                self._print_line()

    def describe(self, description: str) -> None:
        """Replace the text in front of the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=description)
        else:
            self._description = description
            if self._lines:
                self._print_line()

    @contextlib.contextmanager
    def by_the_clock(self) -> Iterator[None]:
        """Print lines while the block runs, though nothing may be told or counted in it."""
        ended = threading.Event()

        def go_on() -> None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads them
                while not ended.wait(_LINES_SECONDS):
                    self._print_line()

        printing = threading.Thread(target=go_on, name="progress", daemon=True)
        printing.start()
        try:
            yield
        finally:
            ended.set()
            printing.join()

    def _print_line(self) -> None:
        now = time.monotonic()
        if now - self._last_line < _LINES_SECONDS:
            return
        self._last_line = now
        share = f", {self._done / self._total:.0%}" if self._total and self._done else ""
        text = f"{self._description} ({now - self._begun:.0f} s{share})"
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(
    description: str,
    total: int | None = None,
    *,
    unit: Literal["items", "bytes"] = "items",
    lines: bool = False,
) -> Iterator[Progress]:
    """Show a progress bar on stderr while the block runs; where it is no terminal, lines.

    `total` counts items or bytes (`unit`); None means unknown, shown as a moving bar. A line with
    the newest description is printed every half a minute. With `lines`, for what starts ranks, only
    when something is told or counted, as a thread of ours would be in the way of a fork; there is
    also one at the beginning and, unless it fails, at the end.
    """
    if not sys.stderr.isatty():
        told = lines and WITHIN not in os.environ
        begun = time.monotonic()
        if told:
            print(f"{description} ...", file=sys.stderr, flush=True)
        made = Progress(description, total, lines=lines)
        with contextlib.nullcontext() if lines else made.by_the_clock():
            yield made
        if told:
            seconds = time.monotonic() - begun
            print(f"{description}: done in {seconds:.1f} s", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    count = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    bar = RichProgress(
        "{task.description}",
        BarColumn(),
        count,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        yield Progress(description, total, bar, bar.add_task(escape(description), total=total))
