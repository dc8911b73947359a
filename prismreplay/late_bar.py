"""The progress of a run whose ranks are forked from the command's own process.

Without a terminal lines are printed instead, from the beginning on: they need no thread.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

from prismreplay.errors import DeadlockError, RankFailedError
from prismtrace import console

__all__ = ["LateBar"]


class LateBar:
    """A progress bar that is drawn only once ranks run: its thread must not be forked.

    `with` it, a run that fails leaves what its error reports on stderr, below the bar.
    """

    def __init__(self, total: int, doing: str) -> None:
        self._total = total
        self._doing = doing
        self._ended = 0
        self._context: Any = None
        self._bar: Any = None

    def __enter__(self) -> Self:
        if not sys.stderr.isatty():
            self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, error, traceback)
        if isinstance(error, (DeadlockError, RankFailedError)) and error.report:
            print(error.report.rstrip(), file=sys.stderr)

    def show(self, ended: int, text: str) -> None:
        """So many ranks have ended, and what else there is to say."""
        if self._context is None:
            self._begin()
        so_far = "" if sys.stderr.isatty() else f" {ended:,} of {self._total:,}"
        self._bar.describe(f"{self._doing}: {text}; ranks ended{so_far}")
        self._bar.advance(ended - self._ended)
        self._ended = ended

    def _begin(self) -> None:
        what = f"{self._doing} {console.counted(self._total, 'rank')}"
        self._context = console.progress(what, self._total, lines=True)
        self._bar = self._context.__enter__()
