"""Errors of `prismcalib`, a branch of the tree in `prismtrace.errors`.

CalibError
├── CycleError            operations wait for each other in a circle
├── MissingMemberError    a collective or p2p pair lacks one of its members
├── ClockError            clocks of one execution do not fit together
├── CoverageError         ranks that no slice measured
├── StructureError        the same node or operation differs between slices, or from the graph
├── PredicateError        a condition on rows that cannot be read, or fits no row
├── ScenarioError         edits of a what-if that make no sense
├── ComparisonError       two traces that cannot be compared
├── CommLogError          measured times of communications that cannot be read or used
├── CoarsenError          a trace that cannot be made coarser in the way asked for
├── TooLargeError         more memory is needed than there is
└── MergeInputError       slices that do not belong to one job
"""

from __future__ import annotations

from prismtrace.errors import PrismError

__all__ = [
    "CalibError",
    "ClockError",
    "CoarsenError",
    "CommLogError",
    "ComparisonError",
    "CoverageError",
    "CycleError",
    "MergeInputError",
    "MissingMemberError",
    "PredicateError",
    "ScenarioError",
    "StructureError",
    "TooLargeError",
]


class CalibError(PrismError):
    """Graph, clocks or slices cannot be turned into one timeline."""

    code = "calib"


class CycleError(CalibError):
    """Operations wait for each other in a circle.

    `rows` are the rows of one circle: each waits for the row before it, and the first waits
    for the last.  (Lost, like `instance` below, when the error crosses a process border.)
    """

    code = "cycle"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.rows = rows


class MissingMemberError(CalibError):
    """A sync instance has fewer members than its process group has ranks.

    `instance` is its number, `rows` are the members that are present.
    """

    code = "missing-member"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        instance: int | None = None,
        rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.instance = instance
        self.rows = rows


class ClockError(CalibError):
    """The clocks of one execution leave a larger residual than allowed.

    `domains` are the numbers of clocks that nothing connects with the others.
    """

    code = "clock-residual"

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        domains: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.domains = domains


class CoverageError(CalibError):
    """Some ranks were measured by no slice."""

    code = "missing-ranks"


class StructureError(CalibError):
    """A slice does not have the nodes and edges that the bare graph or another slice has."""

    code = "structure-differs"


class PredicateError(CalibError):
    """A condition on rows cannot be read or evaluated, or fits no row; `where` is the condition."""

    code = "predicate"


class ScenarioError(CalibError):
    """Edits of a what-if make no sense: an impossible value, or a broken scenario file."""

    code = "scenario"
    usual_hint = "docs/guides/decisions.md shows edits, and files of scenarios"


class ComparisonError(CalibError):
    """Two traces cannot be compared: no times, or nothing in common."""

    code = "not-comparable"


class CommLogError(CalibError):
    """A log or table of communication times is broken, ambiguous or contradicts itself."""

    code = "comm-log"
    usual_hint = "docs/guides/communication-costs.md shows which logs are understood"


class CoarsenError(CalibError):
    """A trace cannot be made coarser: it has no common timeline yet, or is a part of a job."""

    code = "coarsen"


class TooLargeError(CalibError):
    """What was asked for needs more memory than there is."""

    code = "too-large"


class MergeInputError(CalibError):
    """The slices do not belong to one job: structure, world size or groups differ."""

    code = "merge-input"
    usual_hint = "docs/guides/slices.md says what goes into a merge"
