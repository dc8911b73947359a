"""The progress of a run whose ranks are forked from the command's own process."""

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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._context is not None:
            self._context.__exit__(None, None, None)
        if isinstance(error, (DeadlockError, RankFailedError)) and error.report:
            print(error.report.rstrip(), file=sys.stderr)

    def show(self, ended: int, text: str) -> None:
        """So many ranks have ended, and what else there is to say."""
        if self._context is None:
            self._context = console.progress(self._doing, self._total)
            self._bar = self._context.__enter__()
        self._bar.describe(f"{self._doing}: {text}; ranks ended")
        self._bar.advance(ended - self._ended)
        self._ended = ended
