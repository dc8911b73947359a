"""What the columns and operations of a log mean: the default, and a team's own as TOML.

    [columns]                       # our word = your column
    operation = "event"
    start = "begin_us"
    end = "end_us"

    [time]
    unit = "us"
    origin = "run"

    [operations.fwd]                # your name of an operation
    kind = "compute"
    phase = "forward"

Everything that a file does not say stays as in the default, which is the layout of the public
data set of ByteDance's straggler analysis (columns `dp_rank`, `stage`, `optype`, `start_ts`, …).
"""

from __future__ import annotations

import os
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from prismtrace.errors import InputFileError, SourceFormatError
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, Kind, Phase

__all__ = [
    "ColumnMapping",
    "Columns",
    "OperationRule",
    "Origin",
    "Scope",
    "TimeRules",
    "TimeUnit",
    "load_mapping",
]


class Scope(StrEnum):
    """Which ranks take part in a communication, relative to the rank that logged it."""

    TP = "tp"
    """The tensor-parallel ranks of one stage and replica."""
    DP = "dp"
    """The same stage of all data-parallel replicas."""
    PP = "pp"
    """All stages of one replica; for send and recv, the neighbour stage."""
    PP_ENDS = "pp-ends"
    """First and last stage of one replica (shared embeddings)."""
    WORLD = "world"


class TimeUnit(StrEnum):
    """Unit of the time columns."""

    S = "s"
    MS = "ms"
    US = "us"
    NS = "ns"

    @property
    def in_ns(self) -> int:
        """Nanoseconds in one unit."""
        return {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[self.value]


class Origin(StrEnum):
    """What times are counted from."""

    STEP = "step"
    """The start of the row's own step: steps are samples, nothing connects them."""
    RUN = "run"
    """One instant for the whole file: a step goes on where the one before ended."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OperationRule(_Strict):
    """What an operation is.

    A `send` or `recv` of phase forward goes to the next stage (comes from the one before), of
    phase backward the other way.  `blocking` communications run in one chain with the
    computations: what follows on the rank waits for them.
    """

    kind: Kind
    phase: Phase = Phase.OTHER
    scope: Scope | None = None
    blocking: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind in P2P_KINDS:
            if self.phase not in (Phase.FORWARD, Phase.BACKWARD):
                raise ValueError("send and recv need phase = 'forward' or 'backward'")
            if self.scope not in (None, Scope.PP):
                raise ValueError("send and recv go along the pipeline: leave scope out")
        elif self.kind in LOCAL_KINDS:
            if self.scope is not None:
                raise ValueError(f"{self.kind} communicates with nobody: leave scope out")
        elif self.scope is None:
            raise ValueError("a collective needs scope: tp, dp, pp, pp-ends or world")
        return self


class Columns(_Strict):
    """Names of the columns; the optional ones may be absent from the file."""

    operation: str = "optype"
    start: str = "start_ts"
    duration: str | None = None
    """This or `end`; `duration` if neither is named."""
    end: str | None = None
    step: str | None = "step"
    rank: str | None = "rank"
    dp_rank: str | None = "dp_rank"
    stage: str | None = "stage"
    tp_rank: str | None = "tp_rank"
    microbatch: str | None = "mb_id"
    chunk: str | None = "mc"

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.duration is not None and self.end is not None:
            raise ValueError("name duration or end, not both")
        return self

    @property
    def span(self) -> str:
        """The column that tells how long a row lasts or when it ends."""
        return self.end or self.duration or "duration"


class TimeRules(_Strict):
    """How times are written."""

    unit: TimeUnit = TimeUnit.S
    origin: Origin = Origin.STEP


_FORWARD, _BACKWARD, _OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER

_DEFAULT_OPERATIONS = {
    "forward-compute": OperationRule(kind=Kind.COMPUTE, phase=_FORWARD),
    "backward-compute": OperationRule(kind=Kind.COMPUTE, phase=_BACKWARD),
    "forward-send": OperationRule(kind=Kind.SEND, phase=_FORWARD),
    "forward-recv": OperationRule(kind=Kind.RECV, phase=_FORWARD),
    "backward-send": OperationRule(kind=Kind.SEND, phase=_BACKWARD),
    "backward-recv": OperationRule(kind=Kind.RECV, phase=_BACKWARD),
    "params-all-gather": OperationRule(kind=Kind.ALL_GATHER, phase=_FORWARD, scope=Scope.DP),
    "grads-reduce-scatter": OperationRule(
        kind=Kind.REDUCE_SCATTER, phase=_BACKWARD, scope=Scope.DP
    ),
    "layernorm-grads-all-reduce": OperationRule(
        kind=Kind.ALL_REDUCE, phase=_BACKWARD, scope=Scope.TP
    ),
    "embedding-grads-all-reduce": OperationRule(
        kind=Kind.ALL_REDUCE, phase=_BACKWARD, scope=Scope.PP_ENDS
    ),
    "optimizer-clip-main-grad": OperationRule(
        kind=Kind.ALL_REDUCE, phase=_OPTIMIZER, scope=Scope.WORLD
    ),
    "optimizer": OperationRule(kind=Kind.COMPUTE, phase=_OPTIMIZER),
    "gc": OperationRule(kind=Kind.COMPUTE),
}


class ColumnMapping(_Strict):
    """Columns, times and operations of a log; `absent` is the number that stands for none."""

    columns: Columns = Columns()
    time: TimeRules = TimeRules()
    absent: int | None = -1
    operations: dict[str, OperationRule] = {}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        # A frozen model is filled in the one place where it is made.
        self.__dict__["operations"] = {**_DEFAULT_OPERATIONS, **self.operations}
        return self


def load_mapping(path: str | os.PathLike[str] | None) -> ColumnMapping:
    """The mapping in a TOML file, completed by the default; the default without a file.

    Raises:
        InputFileError: the file cannot be read or is not TOML.
        SourceFormatError: it names something unknown, or contradicts itself.
    """
    if path is None:
        return ColumnMapping()
    where = str(path)
    try:
        raw: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputFileError(
            f"cannot be read: {error.strerror}", where=where, hint="check the path"
        ) from error
    except ValueError as error:
        raise InputFileError(
            f"not TOML: {error}", where=where, hint="texts need quotes, numbers none"
        ) from error
    try:
        return ColumnMapping.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise SourceFormatError(
            f"{message} at {place or 'the top'}",
            where=where,
            hint="the sections are columns, time and operations.NAME; see the guide on "
            "operation-level logs",
        ) from error
