"""Typed execution graphs of distributed training jobs: format, converters, exporters.

    import prismtrace as pt

    pt.convert(["rank*.json.gz"], "run.parquet")
    trace = pt.open("run.parquet")
    pt.validate(trace)

Names are loaded on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module

# As checkers know it: importing `typing` for it would take longer than all the rest.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from prismtrace.assembling import AssembleReport, assemble
    from prismtrace.converters import ConvertReport, convert
    from prismtrace.cutting import SliceOutReport, slice_out
    from prismtrace.differences import Difference, diff
    from prismtrace.errors import PrismError, TraceError
    from prismtrace.hangs import HangReport, find_hang
    from prismtrace.joining import ConcatReport, concat
    from prismtrace.querying import query
    from prismtrace.recorder import SpanWriter
    from prismtrace.schema import (
        ClockDomain,
        DType,
        Edge,
        EdgeKind,
        Kind,
        Node,
        Phase,
        ProcessGroup,
        ReduceOp,
        SliceInfo,
        TraceHeader,
        TraceKind,
        TransferSource,
    )
    from prismtrace.trace import Trace, write
    from prismtrace.trace import open_trace as open  # noqa: A004
    from prismtrace.validation import Violation, validate

__all__ = [
    "AssembleReport",
    "ClockDomain",
    "ConcatReport",
    "ConvertReport",
    "DType",
    "Difference",
    "Edge",
    "EdgeKind",
    "HangReport",
    "Kind",
    "Node",
    "Phase",
    "PrismError",
    "ProcessGroup",
    "ReduceOp",
    "SliceInfo",
    "SliceOutReport",
    "SpanWriter",
    "Trace",
    "TraceError",
    "TraceHeader",
    "TraceKind",
    "TransferSource",
    "Violation",
    "assemble",
    "concat",
    "convert",
    "diff",
    "find_hang",
    "open",
    "query",
    "slice_out",
    "validate",
    "write",
]

__version__ = "0.1.0"

_HOMES = {
    "assemble": ("prismtrace.assembling", "assemble"),
    "AssembleReport": ("prismtrace.assembling", "AssembleReport"),
    "concat": ("prismtrace.joining", "concat"),
    "ConcatReport": ("prismtrace.joining", "ConcatReport"),
    "diff": ("prismtrace.differences", "diff"),
    "Difference": ("prismtrace.differences", "Difference"),
    "find_hang": ("prismtrace.hangs", "find_hang"),
    "HangReport": ("prismtrace.hangs", "HangReport"),
    "query": ("prismtrace.querying", "query"),
    "slice_out": ("prismtrace.cutting", "slice_out"),
    "SliceOutReport": ("prismtrace.cutting", "SliceOutReport"),
    "SpanWriter": ("prismtrace.recorder", "SpanWriter"),
    "convert": ("prismtrace.converters", "convert"),
    "ConvertReport": ("prismtrace.converters", "ConvertReport"),
    "PrismError": ("prismtrace.errors", "PrismError"),
    "TraceError": ("prismtrace.errors", "TraceError"),
    "Trace": ("prismtrace.trace", "Trace"),
    "open": ("prismtrace.trace", "open_trace"),
    "write": ("prismtrace.trace", "write"),
    "validate": ("prismtrace.validation", "validate"),
    "Violation": ("prismtrace.validation", "Violation"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'prismtrace' has no attribute {name!r}")
    module, attribute = _HOMES.get(name, ("prismtrace.schema", name))
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
