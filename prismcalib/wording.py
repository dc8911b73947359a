"""Words that depend on the trace."""

from __future__ import annotations

from prismtrace.schema import TraceHeader

__all__ = ["idle_inside", "parts_of_spans"]


def idle_inside(header: TraceHeader) -> str:
    """What the time inside spans is called in which nothing ran."""
    return f"idle between {parts_of_spans(header)}"


def parts_of_spans(header: TraceHeader) -> str:
    """What spans are made of: a CPU job has no kernels."""
    on_cpu = any(label.startswith("cpu thread") for label in header.streams.values())
    return "operators" if on_cpu else "kernels"
