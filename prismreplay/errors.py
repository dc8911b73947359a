"""Errors of `prismreplay`, a branch of the tree in `prismtrace.errors`.

ReplayError        a run on this machine cannot start or went wrong
"""

from __future__ import annotations

from prismtrace.errors import PrismError

__all__ = ["ReplayError"]


class ReplayError(PrismError):
    """A run cannot start on this machine, or went wrong."""

    code = "replay"
