"""Words that depend on the trace."""

from __future__ import annotations

from prismtrace.schema import TraceHeader

__all__ = ["idle_inside"]


def idle_inside(header: TraceHeader) -> str:
    """What the time inside spans is called in which nothing ran: a CPU job has no kernels."""
    on_cpu = any(label.startswith("cpu thread") for label in header.streams.values())
    return "idle between operators" if on_cpu else "idle between kernels"
