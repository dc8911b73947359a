"""Every error the toolkit raises on purpose, as one tree.

    PrismError
    ├── TraceError                 the trace file or the foreign input is at fault
    │   ├── InputFileError         unreadable, empty, truncated beyond use, not JSON
    │   ├── SourceFormatError      recognised, but not something `convert` can read
    │   ├── MixedRanksError        two ranks wrote into one file
    │   ├── RankError              rank unknown, duplicated or outside the world size
    │   ├── GroupError             a communication names no process group, several fit
    │   ├── AlignmentError         communications of different ranks do not match
    │   ├── StepError              the requested steps are not in the trace
    │   ├── FormatVersionError     written by an incompatible version
    │   ├── ValidationError        rows or header break a rule of the format
    │   ├── QueryError             a query is not valid SQL, or asks for what is not there
    │   ├── JoinError              traces are not pieces of one job, or do not fit together
    │   └── OutputError            the result cannot be written
    ├── prismcalib.errors.CalibError
    └── prismreplay.errors.ReplayError

An error carries a stable `code` (one heading in docs/reference/errors.md), the place
(`where`: path, row, rank, group, seq) and a `hint`: the next thing to do.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AlignmentError",
    "FormatVersionError",
    "GroupError",
    "InputFileError",
    "JoinError",
    "MixedRanksError",
    "OutputError",
    "PrismError",
    "QueryError",
    "RankError",
    "SourceFormatError",
    "StepError",
    "TraceError",
    "ValidationError",
]

_HINT = "hint: "


class PrismError(Exception):
    """Base of all errors raised on purpose.

    `str(error)` is one line: the message and, in brackets, the place. Where nothing better is
    known when it is raised, the hint is the `usual_hint` of the class; a traceback ends with it.
    """

    code: ClassVar[str] = "prism"
    usual_hint: ClassVar[str | None] = None

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint if hint is not None else self.usual_hint

    @property
    def hint(self) -> str | None:
        """The next thing to do."""
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint
        notes = [note for note in getattr(self, "__notes__", ()) if not note.startswith(_HINT)]
        self.__notes__ = [*notes, *([f"{_HINT}{hint}"] if hint else [])]

    def __str__(self) -> str:
        return f"{self.message} [{self.where}]" if self.where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders in parallel conversion; keyword-only arguments are
        # not part of `args`, so the default pickling would lose them.
        return (_rebuild, (type(self), self.message, self.where, self.hint))


def _rebuild(
    kind: type[PrismError], message: str, where: str | None, hint: str | None
) -> PrismError:
    return kind(message, where=where, hint=hint)


class TraceError(PrismError):
    """The trace or the foreign input is at fault."""

    code = "trace"


class InputFileError(TraceError):
    """A file cannot be read: missing, unreadable, empty, truncated beyond use, not JSON."""

    code = "input-file"


class SourceFormatError(TraceError):
    """The file's format is known or unknown, but `convert` has no reader for it."""

    code = "source-format"


class MixedRanksError(TraceError):
    """One file holds events of more than one rank."""

    code = "mixed-ranks"


class RankError(TraceError):
    """A file's rank is unknown, given twice, or outside the world size."""

    code = "rank"
    usual_hint = "say which rank a file is of: --rank FILE=N, counted from 0"


class GroupError(TraceError):
    """A communication cannot be assigned to exactly one process group."""

    code = "process-group"


class AlignmentError(TraceError):
    """Communications of different ranks cannot be matched with each other."""

    code = "not-alignable"


class StepError(TraceError):
    """The requested step boundaries are not in the trace."""

    code = "steps"


class FormatVersionError(TraceError):
    """The trace was written by an incompatible version of the format."""

    code = "format-version"


class ValidationError(TraceError):
    """Rows or header of a trace break a rule of the format."""

    code = "invalid-trace"
    usual_hint = "write the trace again from its sources; `prismtrace validate` lists what is wrong"


class QueryError(TraceError):
    """A query about a trace is not valid SQL, or asks for what is not there."""

    code = "query"


class JoinError(TraceError):
    """Traces are not pieces of one job, or do not fit together."""

    code = "not-joinable"


class OutputError(TraceError):
    """The result cannot be written (disk full, read-only folder, path in use)."""

    code = "output"
