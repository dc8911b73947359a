"""Who hangs: what the flight recorders of a job's ranks say about a job that stands still."""

from __future__ import annotations

from prismtrace.hangs.finding import find_hang
from prismtrace.hangs.report import Culprit, GroupProgress, HangReport, PendingOperation, Reason

__all__ = [
    "Culprit",
    "GroupProgress",
    "HangReport",
    "PendingOperation",
    "Reason",
    "find_hang",
]
