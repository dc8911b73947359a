"""Write a trace in a form that other tools read."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from prismtrace.output import refuse_inputs
from prismtrace.reading import reading
from prismtrace.trace import PathLike, Trace

__all__ = ["ExportFormat", "export"]


class ExportFormat(StrEnum):
    """What `export` can write."""

    PERFETTO = "perfetto"
    """Chrome trace JSON for ui.perfetto.dev; gzipped when the name ends in .gz."""
    NODE_LINK = "node-link"
    """JSON for `networkx.node_link_graph`."""
    CHAKRA = "chakra"
    """A folder of Chakra execution traces, one a rank, with a file of the process groups."""


def export(
    trace: Trace,
    path: PathLike,
    *,
    to: ExportFormat | str = ExportFormat.PERFETTO,
    advance: Callable[[int], None] | None = None,
) -> dict[str, int]:
    """Write `trace` to `path` for another tool; an existing file is replaced when whole.

    `advance` is called with the number of rows written since its last call.

    Returns:
        What the format cannot say, and how often it was rounded or left out; empty if it says
        all that it is asked for.

    Raises:
        ValueError: `to` is no `ExportFormat`.
        TraceError: a trace without times cannot be drawn.
        OutputError: the file cannot be written, or is one of the trace's.
    """
    refuse_inputs(path, trace.paths)
    # The formats are independent of each other; only the one asked for is loaded.
    if ExportFormat(to) is ExportFormat.CHAKRA:
        from prismtrace.export.chakra import export_chakra

        with reading(trace.paths):
            return export_chakra(trace, path, advance=advance)
    if ExportFormat(to) is ExportFormat.PERFETTO:
        from prismtrace.export.perfetto import export_perfetto as write_export
    else:
        from prismtrace.export.node_link import export_node_link as write_export
    with reading(trace.paths):
        write_export(trace, path, advance=advance)
    return {}
