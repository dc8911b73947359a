"""What the names in a Kineto trace mean: kernels, collectives, element types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from prismtrace.errors import SourceFormatError
from prismtrace.schema import DType, Kind, ReduceOp

__all__ = [
    "CommPatterns",
    "collective_kind",
    "dtype_of",
    "kernel_dtype",
    "kernel_kind",
    "kernel_reduce_op",
    "peer_in_name",
    "short_name",
]

# Spellings across NCCL releases: ncclKernel_, ncclDevKernel_, ncclSymDevKernel_,
# ncclSymkDevKernel_; RCCL uses the same with Generic.
_NCCL_KERNEL = re.compile(r"nccl(?:Dev|Symk?)?(?:Dev)?Kernel")

_KINDS = {
    "allreduce": Kind.ALL_REDUCE,
    "allreducecoalesced": Kind.ALL_REDUCE,
    "allreducesparse": Kind.ALL_REDUCE,
    "broadcast": Kind.BROADCAST,
    "broadcastoop": Kind.BROADCAST,
    "reduce": Kind.REDUCE,
    "reduceoop": Kind.REDUCE,
    "allgather": Kind.ALL_GATHER,
    "allgatherbase": Kind.ALL_GATHER,
    "allgatherv": Kind.ALL_GATHER,
    "allgathercoalesced": Kind.ALL_GATHER,
    "allgatherintotensor": Kind.ALL_GATHER,
    "allgatherintotensorcoalesced": Kind.ALL_GATHER,
    "reducescatter": Kind.REDUCE_SCATTER,
    "reducescatterbase": Kind.REDUCE_SCATTER,
    "reducescatterv": Kind.REDUCE_SCATTER,
    "reducescattertensor": Kind.REDUCE_SCATTER,
    "reducescattertensorcoalesced": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
    "alltoallv": Kind.ALL_TO_ALL,
    "alltoallbase": Kind.ALL_TO_ALL,
    "alltoallsingle": Kind.ALL_TO_ALL,
    "send": Kind.SEND,
    "recv": Kind.RECV,
    "recvanysource": Kind.RECV,
    "gather": Kind.GATHER,
    "scatter": Kind.SCATTER,
    "barrier": Kind.BARRIER,
    "allreducebarrier": Kind.BARRIER,
}
"""Collective names with everything but letters removed."""

_KERNEL_KINDS = {
    "AllReduce": Kind.ALL_REDUCE,
    "AllGatherV": Kind.ALL_GATHER,
    "AllGather": Kind.ALL_GATHER,
    "ReduceScatter": Kind.REDUCE_SCATTER,
    "Broadcast": Kind.BROADCAST,
    "Reduce": Kind.REDUCE,
}

_DTYPES = {
    "float": DType.FLOAT32,
    "double": DType.FLOAT64,
    "half": DType.FLOAT16,
    "c10::half": DType.FLOAT16,
    "bfloat16": DType.BFLOAT16,
    "c10::bfloat16": DType.BFLOAT16,
    "long": DType.INT64,
    "long int": DType.INT64,
    "int": DType.INT32,
    "short": DType.INT16,
    "short int": DType.INT16,
    "char": DType.INT8,
    "signed char": DType.INT8,
    "byte": DType.UINT8,
    "unsigned char": DType.UINT8,
    "complexfloat": DType.COMPLEX64,
    "complexdouble": DType.COMPLEX128,
    "c10::complex<float>": DType.COMPLEX64,
    "c10::complex<double>": DType.COMPLEX128,
    "c10::float8_e4m3fn": DType.FLOAT8_E4M3FN,
    "c10::float8_e5m2": DType.FLOAT8_E5M2,
    **{dtype.value: dtype for dtype in DType},
}
"""Scalar type names of `record_param_comms` (lower case) and of "Input type"."""

_KERNEL_DTYPES = {
    "f16": DType.FLOAT16,
    "half": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "__nv_bfloat16": DType.BFLOAT16,
    "f32": DType.FLOAT32,
    "float": DType.FLOAT32,
    "f64": DType.FLOAT64,
    "double": DType.FLOAT64,
    "u8": DType.UINT8,
    "uint8_t": DType.UINT8,
    "i8": DType.INT8,
    "int8_t": DType.INT8,
    "u32": DType.UINT32,
    "uint32_t": DType.UINT32,
    "i32": DType.INT32,
    "int32_t": DType.INT32,
    "u64": DType.UINT64,
    "uint64_t": DType.UINT64,
    "i64": DType.INT64,
    "int64_t": DType.INT64,
    "f8e4m3": DType.FLOAT8_E4M3FN,
    "f8e5m2": DType.FLOAT8_E5M2,
}
_KERNEL_OPS = {
    "Sum": ReduceOp.SUM,
    "Prod": ReduceOp.PRODUCT,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "PreMulSum": ReduceOp.PREMUL_SUM,
    "SumPostDiv": ReduceOp.AVG,
}
_REDUCING_KERNEL = re.compile(
    r"Kernel_(?:AllReduce|ReduceScatter|Reduce)_"
    r"(?:(?P<op>[A-Z]\w+?)_(?P<type>[a-z]\w*?)_(?:RING|TREE|COLLNET|NVLS|PAT)"
    r"|[A-Z0-9]+_(?:LL128|LL|SIMPLE)_(?P<old_op>[A-Z]\w+?)_(?P<old_type>\w+))"
)
_PEER = re.compile(r"(?:send|recv)\s+(\d+)\s*(?:->|<-)\s*(\d+)")


def collective_kind(name: str) -> Kind | None:
    """Kind of a collective as torch names it; null for wait, init and unknown names."""
    return _collective_kind(name.removeprefix("nccl:").removeprefix("gloo:"))


@cache
def _collective_kind(name: str) -> Kind | None:
    if _PEER.match(name):
        return Kind(name[:4])
    return _KINDS.get(re.sub(r"[^a-z]", "", name.removeprefix("c10d::").lower()))


def peer_in_name(name: str) -> int | None:
    """Group rank of the other side in names such as ``nccl:send 0->1``."""
    match = _PEER.search(name)
    return int(match[2]) if match else None


def dtype_of(name: str | None) -> DType | None:
    """Element type from a scalar type name (``Half``, ``long int``); null when unknown."""
    return None if name is None else _DTYPES.get(name.lower())


@cache
def kernel_kind(name: str) -> Kind | None:
    """Kind by kernel name alone; `other_comm` for NCCL kernels whose name does not tell.

    SendRecv kernels carry all_to_all as well as send and recv. Null: not an NCCL kernel.
    """
    own = name.partition("(")[0]  # arguments name types of NCCL, too
    match = _NCCL_KERNEL.search(own)
    if match is None:
        return None
    rest = own[match.end() :].lstrip("_")
    for prefix, kind in _KERNEL_KINDS.items():
        if rest.startswith(prefix):
            return kind
    return Kind.OTHER_COMM


@cache
def kernel_dtype(name: str) -> DType | None:
    """Element type in the name of a reducing NCCL kernel; null elsewhere.

    Copying kernels name int8 whatever they carry.
    """
    match = _REDUCING_KERNEL.search(name)
    return _KERNEL_DTYPES.get(match["type"] or match["old_type"] or "") if match else None


@cache
def kernel_reduce_op(name: str) -> ReduceOp | None:
    """Reduction in the name of a reducing NCCL kernel."""
    match = _REDUCING_KERNEL.search(name)
    return _KERNEL_OPS.get(match["op"] or match["old_op"] or "") if match else None


@cache
def short_name(name: str) -> str:
    """A kernel's name without return type, template arguments and parameters."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    cleaned = name.replace("(anonymous namespace)", "{anonymous}").removeprefix("void ")
    return re.split(r"[<(]", cleaned, maxsplit=1)[0] or name


@dataclass(frozen=True)
class CommPatterns:
    """Which kernels communicate, beyond NCCL's own: pairs of a pattern and its kind."""

    custom: tuple[tuple[re.Pattern[str], Kind], ...] = ()
    _known: dict[str, Kind | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def parse(cls, rules: Sequence[str]) -> CommPatterns:
        """Read rules ``REGEX=KIND``, e.g. ``internode::dispatch=all_to_all``.

        Raises:
            SourceFormatError: no ``=``, an invalid pattern or a kind that does not communicate.
        """
        custom: list[tuple[re.Pattern[str], Kind]] = []
        for rule in rules:
            pattern, _, kind = rule.rpartition("=")
            kinds = [member.value for member in Kind if member.is_communication]
            if not pattern or kind not in kinds:
                raise SourceFormatError(
                    f"communication kernel rule {rule!r} is not REGEX=KIND",
                    hint=f"KIND is one of {', '.join(kinds)}",
                )
            try:
                custom.append((re.compile(pattern), Kind(kind)))
            except re.error as error:
                raise SourceFormatError(
                    f"communication kernel rule {rule!r} is no valid pattern: {error}",
                    hint="REGEX is a regular expression of Python; write \\ before ( [ . * + ?",
                ) from error
        return cls(tuple(custom))

    def kind(self, name: str) -> Kind | None:
        """Kind of a communication kernel by its name; null for other kernels."""
        if name not in self._known:
            custom = (kind for pattern, kind in self.custom if pattern.search(name))
            self._known[name] = next(custom, None) or kernel_kind(name)
        return self._known[name]
