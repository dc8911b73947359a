"""PrismTrace v1: what a trace is made of. Read this module first.

A trace is a header (`TraceHeader`) and a table of nodes (`Node` describes one row). A node is
a span of computation or one communication of one rank. Edges are of two kinds: *directional*
ones are stored in the node they lead to (`deps`, `xdeps`, `lag_ns`); *sync* edges are not
stored, all nodes with the same (`group`, `seq`) form one sync instance (for p2p: the same
`group`, sender, receiver and `seq`).

The models here are the definition. `schemas/*.schema.json` is generated from them, the
Parquet column types are read off `Node`, and the vectorised rules of `prismtrace.validation`
accept exactly the rows that `Node` accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from prismtrace.ranks import MOST_RANKS, format_ranks, parse_ranks

__all__ = [
    "CALIBRATED_COLUMNS",
    "FORMAT_VERSION",
    "INDEX_BITS",
    "ClockDomain",
    "ColumnType",
    "DType",
    "Edge",
    "EdgeKind",
    "Kind",
    "Node",
    "Phase",
    "ProcessGroup",
    "RankList",
    "ReduceOp",
    "SliceInfo",
    "StepList",
    "TraceHeader",
    "TraceKind",
    "TransferSource",
    "column_types",
]

FORMAT_VERSION = "1.0.0"
INDEX_BITS = 32
"""A node's id is ``rank << INDEX_BITS | index``."""


class TraceKind(StrEnum):
    """How the timing of a trace came about."""

    BARE = "bare"
    SLICE = "slice"
    RECORDED = "recorded"
    CALIBRATED = "calibrated"


class Kind(StrEnum):
    """What a node does. Order is part of the format: new kinds are appended."""

    COMPUTE = "compute"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"
    MEMCPY = "memcpy"
    OTHER_COMM = "other_comm"

    @property
    def is_p2p(self) -> bool:
        """True for send and recv."""
        return self in P2P_KINDS

    @property
    def is_communication(self) -> bool:
        """True for every kind that belongs to a process group."""
        return self not in LOCAL_KINDS


LOCAL_KINDS = frozenset({Kind.COMPUTE, Kind.MEMCPY})
P2P_KINDS = frozenset({Kind.SEND, Kind.RECV})
ROOTED_KINDS = frozenset({Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER})
REDUCING_KINDS = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE, Kind.OTHER_COMM})


class Phase(StrEnum):
    """Part of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class ReduceOp(StrEnum):
    """Reduction of a reducing collective, in torch's spelling."""

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    PREMUL_SUM = "premul_sum"


class DType(StrEnum):
    """Element type of a payload, in torch's spelling."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    FLOAT4_E2M1FN_X2 = "float4_e2m1fn_x2"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        return _ITEMSIZE[self]


_ITEMSIZE: dict[DType, int] = {
    dtype: size
    for size, dtypes in {
        16: (DType.COMPLEX128,),
        8: (DType.FLOAT64, DType.INT64, DType.UINT64, DType.COMPLEX64),
        4: (DType.FLOAT32, DType.INT32, DType.UINT32),
        2: (DType.FLOAT16, DType.BFLOAT16, DType.INT16, DType.UINT16),
        1: (
            DType.FLOAT8_E4M3FN,
            DType.FLOAT8_E4M3FNUZ,
            DType.FLOAT8_E5M2,
            DType.FLOAT8_E5M2FNUZ,
            DType.FLOAT8_E8M0FNU,
            DType.FLOAT4_E2M1FN_X2,
            DType.INT8,
            DType.UINT8,
            DType.BOOL,
        ),
    }.items()
    for dtype in dtypes
}


class TransferSource(StrEnum):
    """Where a transfer time comes from, best first."""

    MEASURED = "measured"
    TABLE = "table"
    RING = "ring"
    MODEL = "model"
    REDUCED = "reduced"
    NONE = "none"


class EdgeKind(StrEnum):
    """`directional`: dst starts after src ends; `sync`: all members wait for each other."""

    DIRECTIONAL = "directional"
    SYNC = "sync"


# --- header ---------------------------------------------------------------------------


def _rank_tuple(value: Any) -> Any:
    return parse_ranks(value) if isinstance(value, str) else value


RankList = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**31)], ...],
    BeforeValidator(_rank_tuple),
    PlainSerializer(format_ranks, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "description": "ranks in order, as runs first-last/stride, e.g. '0-7' or '0-56/8,3'",
            "pattern": r"^(\d+(-\d+(/\d+)?)?(,\d+(-\d+(/\d+)?)?)*)?$",
        }
    ),
]
"""Ranks in order; JSON holds them as text such as ``"0-7"``, or ``"0-56/8"``: every eighth."""


StepList = Annotated[tuple[int, ...], AfterValidator(lambda steps: tuple(sorted(set(steps))))]
"""Numbers of steps, ascending, each once: what follows what is read off their order."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ProcessGroup(_Model):
    """A process group. `ranks` are global ranks in group-rank order."""

    id: Annotated[int, Field(ge=0, lt=2**31)]
    """The number that rows of the table name it by."""
    name: str
    """As the source calls it; of torch's groups their number, as text."""
    desc: str = ""
    """What the program calls it, where it does."""
    ranks: RankList
    """Global ranks of the members."""

    @model_validator(mode="after")
    def _ranks_unique(self) -> Self:
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"group {self.name!r} lists a rank twice")
        return self


class ClockDomain(_Model):
    """The clock that stamped the times of some ranks.

    Adding `offset_ns` to a time of this domain gives the trace's common time; null means that
    no offset has been estimated. `uncertainty_ns` is the spread that remained.
    """

    id: Annotated[int, Field(ge=0)]
    """Its number."""
    ranks: RankList
    """Ranks whose times it stamped."""
    host: str | None = None
    """Where it ran, if known."""
    source: str = "unknown"
    """What kind of clock it is, as the recorder calls it."""
    offset_ns: int | None = None
    """To add to its times."""
    uncertainty_ns: Annotated[int, Field(ge=0)] | None = None
    """By how much the offset may be off."""


class SliceInfo(_Model):
    """Which part of a slicing campaign a slice is."""

    index: Annotated[int, Field(ge=0)]
    """Files with the same index and real ranks are repeats: executions of the same slice."""
    real_ranks: RankList
    """Ranks that ran for real; of all others there are stand-ins."""
    virtual_ranks_policy: str = "early"
    """How those took part: `early`, as soon as they could, or not at all (`none`)."""
    origin_ns: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """When all ranks were let go, in the clock of the lowest real rank: rows that depend on nothing
    start as long after it in every execution. Null: when the first row of a real rank starts."""


class TraceHeader(_Model):
    """Everything about a trace that is not a row. Stored as JSON in the Parquet metadata."""

    model_config = ConfigDict(extra="ignore", frozen=True, use_attribute_docstrings=True)

    format_version: str = FORMAT_VERSION
    """Version of the format; see schema evolution."""
    kind: TraceKind
    """How the timing came about: recorded, bare (none), slice or calibrated."""
    world_size: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    """Ranks of the job, present or not."""
    ranks: RankList
    """Ranks that have rows; in files as text such as ``0-7``."""
    axes: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Sizes of the parallel axes, where known: tp, pp, dp, cp, ep."""
    groups: tuple[ProcessGroup, ...] = ()
    """Process groups: id, name, desc, and ranks in group-rank order."""
    streams: dict[int, str] = {}
    """Logical stream -> what the source called it (CUDA stream id, thread)."""
    clock: tuple[ClockDomain, ...] = ()
    """Clocks that stamped the times: their ranks, host, source, offset and its uncertainty."""
    slice: SliceInfo | None = None
    """Of a slice: which part of a campaign it is."""
    symmetry: dict[int, int] | None = None
    """Rank -> representative rank, when identical data-parallel replicas are folded."""
    steps: StepList = ()
    """Numbers of the training steps, as the program counted them."""
    fold_order: str | None = None
    """In which order results of reductions were added up over ranks, where it is known."""
    created_by: str = ""
    """Command and version that wrote the trace first."""
    sources: tuple[str, ...] = ()
    """Names of the files it was converted from."""
    policies: dict[str, int] = {}
    """What was repaired, dropped or assumed, and how many times."""
    extra: dict[str, Any] = {}
    """Notes of commands, such as the report of a merge; not part of the format."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError("ranks lists a rank twice")
        if self.ranks and max(self.ranks) >= self.world_size:
            raise ValueError(
                f"rank {max(self.ranks)} is outside the world of {self.world_size} ranks"
            )
        ids = [group.id for group in self.groups]
        if len(set(ids)) != len(ids):
            raise ValueError("two process groups have the same id")
        for group in self.groups:
            if group.ranks and max(group.ranks) >= self.world_size:
                raise ValueError(f"group {group.name!r} has a rank outside the world")
        return self


# --- rows -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnType:
    """Storage type of a column: name of a Polars type, or the enum whose values it takes."""

    name: str
    values: type[StrEnum] | None = None


_I8, _I16, _I32, _I64 = (ColumnType(f"Int{bits}") for bits in (8, 16, 32, 64))
_BOOL = ColumnType("Boolean")
_INT16 = Field(ge=0, lt=2**15)
_INT32 = Field(ge=0, lt=2**31)
_INT64 = Field(ge=0, lt=2**63)


class Node(BaseModel):
    """One row of the node table. Times in ns, sizes in bytes; null means not applicable.

    Further columns are allowed when their name starts with ``x_``.
    """

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    id: Annotated[int, _I64, _INT64]
    """``rank << 32 | index``; unique in a trace."""
    rank: Annotated[int, _I32, _INT32]
    """Global rank."""
    index: Annotated[int, _I32, _INT32]
    """Position in the rank's issue order, counted from 0 over all steps."""
    kind: Annotated[Kind, ColumnType("Enum", Kind)]
    """What it does: computation, copies between host and device, or one kind of communication."""
    name: Annotated[str | None, ColumnType("Categorical")] = None
    """What a person would call it: kernel, layer or annotation name. A span of several is named
    after the one that takes most of its time: ``gemm +8 kernels``."""
    stream: Annotated[int, _I16, _INT16]
    """Logical stream; nodes of one rank and stream run in order, except within a batch."""
    batch: Annotated[int | None, _I32, _INT32] = None
    """Operations of one coalesced launch share it: unordered among each other."""
    step: Annotated[int | None, _I32, _INT32] = None
    """Training step, as the program counted it; null outside of steps."""
    microbatch: Annotated[int | None, _I32, _INT32] = None
    """Microbatch within the step, from 0."""
    chunk: Annotated[int | None, _I16, _INT16] = None
    """Model chunk (interleaved pipeline schedules)."""
    phase: Annotated[Phase | None, ColumnType("Enum", Phase)] = None
    """Part of the step."""
    group: Annotated[int | None, _I32, _INT32] = None
    """Process group id of a communication; null for compute and memcpy, and for a
    communication that was launched before the recorded window and does not tell."""
    seq: Annotated[int | None, _I64, _INT64] = None
    """Number of the operation within its group (p2p: within group, sender and receiver).

    Null on a communication whose partners lie outside the recorded window or are unknown: it
    is kept with its duration and waits for nobody."""
    peer: Annotated[int | None, _I32, _INT32] = None
    """Global rank of the other side of send and recv; root of rooted collectives."""
    bytes: Annotated[int | None, _I64, _INT64] = None
    """Payload as nccl-tests counts it."""
    dtype: Annotated[DType | None, ColumnType("Enum", DType)] = None
    """Element type of the payload."""
    reduce_op: Annotated[ReduceOp | None, ColumnType("Enum", ReduceOp)] = None
    """Reduction, for kinds that reduce."""
    start_ns: Annotated[int | None, _I64, Field(ge=-(2**63), lt=2**63)] = None
    """Start, in the clock of the rank's domain; after a merge in the one clock of the trace."""
    dur_ns: Annotated[int | None, _I64, _INT64] = None
    """Duration; for a communication wait plus transfer, for a span of several kernels idle time
    between them, too (see `x_busy_ns`)."""
    transfer_ns: Annotated[int | None, _I64, _INT64] = None
    """Duration of a communication without waiting for late members."""
    transfer_source: Annotated[TransferSource | None, ColumnType("Enum", TransferSource)] = None
    """Where `transfer_ns` comes from."""
    real: Annotated[bool, _BOOL]
    """Measured on a real rank (true) or filled in by a virtual one."""
    deps: Annotated[list[int], ColumnType("List(UInt32)"), Field(max_length=2**20)]
    """Directional edges from the same rank, as distances back: ``index - dep.index``."""
    xdeps: Annotated[list[int] | None, ColumnType("List(Int64)")] = None
    """Directional edges from other ranks, as node ids (rare)."""
    lag_ns: Annotated[list[int] | None, ColumnType("List(Int64)")] = None
    """Least delay of each entry of `deps`, then `xdeps`: idle time that the recording shows; null:
    all zero."""
    mem_bytes: Annotated[int | None, _I64, _INT64] = None
    """Bytes that the device's allocator holds at the end of the node."""
    mem_peak_bytes: Annotated[int | None, _I64, _INT64] = None
    """The most it held within the node."""
    wait_ns: Annotated[int | None, _I64, _INT64] = None
    """Calibrated traces: time until the last member arrived."""
    slack_ns: Annotated[int | None, _I64, _INT64] = None
    """Calibrated traces: how much later the node may end without delaying the trace's end."""
    critical: Annotated[bool | None, _BOOL] = None
    """Calibrated traces: lies on the critical path."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        broken = [name for name, holds in self._row_rules() if not holds]
        if any(not name.startswith("x_") for name in self.model_extra or {}):
            broken.append("unknown-column")
        if broken:
            raise ValueError("breaks " + ", ".join(broken))
        return self

    def _row_rules(self) -> list[tuple[str, bool]]:
        """Rules that need more than one field; names are those of `prismtrace.validation`."""
        local = self.kind in LOCAL_KINDS
        p2p = self.kind in P2P_KINDS
        edges = len(self.deps) + len(self.xdeps or [])
        return [
            ("id-mismatch", self.id == self.rank << INDEX_BITS | self.index),
            ("local-with-group", not local or (self.group is None and self.seq is None)),
            ("seq-without-group", self.seq is None or self.group is not None),
            ("p2p-without-peer", not p2p or self.peer is not None),
            ("p2p-with-itself", not p2p or self.peer != self.rank),
            ("peer-without-meaning", p2p or self.kind in ROOTED_KINDS or self.peer is None),
            ("reduce-op-without-meaning", self.kind in REDUCING_KINDS or self.reduce_op is None),
            ("half-timed", (self.start_ns is None) == (self.dur_ns is None)),
            (
                "end-out-of-range",
                self.start_ns is None or self.dur_ns is None or self.start_ns + self.dur_ns < 2**63,
            ),
            ("local-with-transfer", not local or self.transfer_ns is None),
            (
                "transfer-longer-than-span",
                self.transfer_ns is None or self.dur_ns is None or self.transfer_ns <= self.dur_ns,
            ),
            ("dep-not-earlier", all(1 <= distance <= self.index for distance in self.deps)),
            ("dep-twice", len(set(self.deps)) == len(self.deps)),
            (
                "xdep-of-same-rank",
                all(dep >> INDEX_BITS != self.rank for dep in self.xdeps or []),
            ),
            ("xdep-out-of-range", all(0 <= dep < 2**63 for dep in self.xdeps or [])),
            ("lag-length", self.lag_ns is None or len(self.lag_ns) == edges),
            ("lag-out-of-range", all(0 <= lag < 2**63 for lag in self.lag_ns or [])),
            (
                "peak-below-level",
                self.mem_bytes is None
                or self.mem_peak_bytes is None
                or self.mem_peak_bytes >= self.mem_bytes,
            ),
        ]


CALIBRATED_COLUMNS = ("wait_ns", "slack_ns", "critical")
"""Columns that only calibrated traces have."""


class Edge(_Model):
    """One edge as `Trace.edges` shows it; ids as in the node table."""

    src: Annotated[int, _INT64]
    """Node that it comes from."""
    dst: Annotated[int, _INT64]
    """Node that it leads to."""
    kind: EdgeKind
    """What waits for what."""
    lag_ns: Annotated[int, _INT64] = 0
    """Least time from the end of the one to the start of the other."""


def column_types() -> dict[str, ColumnType]:
    """Storage type of every column of the node table, in order."""
    types: dict[str, ColumnType] = {}
    for name, field in Node.model_fields.items():
        types[name] = next(item for item in field.metadata if isinstance(item, ColumnType))
    return types


def nullable_columns() -> frozenset[str]:
    """Columns that may hold null (and may therefore be absent from a file)."""
    return frozenset(name for name, field in Node.model_fields.items() if not field.is_required())


Schema = Literal["trace-header", "node", "edge"]
MODELS: dict[Schema, type[BaseModel]] = {"trace-header": TraceHeader, "node": Node, "edge": Edge}
"""The models that `schemas/<name>.schema.json` is generated from."""


def json_schema(name: Schema) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one of `MODELS`."""
    schema = MODELS[name].model_json_schema(mode="serialization")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"prismtrace/{name}/{FORMAT_VERSION}",
        **schema,
    }
