"""The graph of a calibrated trace that is too large for a table, block of ranks by block.

Equal to that of `prismcalib.build.graph_from_trace`, but for the order in which sync instances
are numbered, which nothing depends on.  Takes about 45 bytes a row, edges included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from prismcalib.assembly import Assembly, Values
from prismcalib.blocks import Block, Layout, is_large
from prismcalib.build import graph_from_trace, node_text, require_own_columns, require_rows_of_ranks
from prismcalib.errors import MergeInputError
from prismcalib.graph import Graph, Int64Array
from prismcalib.instances import Channels, members_of
from prismcalib.memory import require_memory
from prismcalib.rows import ABSENT, COLUMNS, Rows, UInt8Array, rows_of
from prismcalib.step_times import laid_out
from prismcalib.steps import StepModel
from prismcalib.waiting import SEND_BYTES, WaitRules, apply_wait_rules, waiting_rows
from prismtrace.group_names import group_labels
from prismtrace.schema import TraceKind
from prismtrace.trace import Trace

__all__ = ["GRAPH_BYTES", "chains_from_blocks", "graph_from_blocks", "step_model", "table_of"]

GRAPH_BYTES = 75
"""Memory a row: the arrays of a graph, and what is in use while they are made."""

_RULE_COLUMNS = ("kind", "rank", "group", "peer", "bytes")


def graph_from_blocks(layout: Layout, rules: WaitRules | None = None, *, also: int = 0) -> Graph:
    """The graph of a calibrated trace; see `prismcalib.build.graph_from_trace`.

    Args:
        layout: of the trace.
        rules: see there.
        also: bytes a row that what comes next will take.

    Raises:
        MergeInputError: ids, deps or groups contradict each other, or rows lack times.
        CoverageError: rows of ranks are absent that the header lists.
        MissingMemberError: an operation lacks members.
        TooLargeError: the graph would not fit into memory.
    """
    trace, header = layout.trace, layout.trace.header
    require_own_columns(trace)
    if header.kind == TraceKind.CALIBRATED:
        require_rows_of_ranks(set(layout.ranks.tolist()), trace)
    require_memory((GRAPH_BYTES + also) * layout.total, f"a graph of {layout.total:,} operations")
    assembly = _assembly(layout)
    roots: list[tuple[Int64Array, Int64Array]] = []
    lasting: list[Int64Array] = []
    first = 0
    for block, rows in _numbered_rows(layout, timed=True):
        members = members_of(rows, header)
        duration = rows.dur.copy()
        known = members.row[rows.transfer[members.row] >= 0]
        duration[known] = rows.transfer[known]
        assembly.place(rows, members, Values(duration=duration, source=_no_source(rows)))
        near = np.diff(rows.offsets) == 0
        near[rows.far_row] = False
        free = np.flatnonzero(near)
        roots.append((free + block.row, rows.start[free]))
        if rules or WaitRules.of(header):
            lasting.append(rows.dur)
        first = min(first, int(rows.start.min())) if block.first else int(rows.start.min())
    graph = assembly.graph(_labels(layout))
    release = np.full(layout.total, first, np.int64)
    for number, start in roots:
        release[number] = start
    graph = replace(graph, release_ns=release)
    return _with_rules(graph, layout, WaitRules.of(header) if rules is None else rules, lasting)


def chains_from_blocks(layout: Layout) -> Graph:
    """The graph of any trace with durations of 1, no lags and no releases.

    Raises:
        MergeInputError, MissingMemberError, TooLargeError: see `graph_from_blocks`.
    """
    require_own_columns(layout.trace)
    require_memory(GRAPH_BYTES * layout.total, f"a graph of {layout.total:,} operations")
    assembly = _assembly(layout)
    for _, rows in _numbered_rows(layout, timed=False):
        values = Values(duration=np.ones(len(rows), np.int64), source=_no_source(rows))
        assembly.place(rows, members_of(rows, layout.trace.header), values)
    return replace(assembly.graph(_labels(layout)), dep_lag_ns=None)


def _assembly(layout: Layout) -> Assembly:
    header = layout.trace.header
    here = set(header.ranks)
    place = {rank: like for rank, like in (header.symmetry or {}).items() if rank not in here}
    counts = zip(layout.ranks.tolist(), layout.rows.tolist(), strict=True)
    return Assembly(dict(counts), Channels(header, place))


def _no_source(rows: Rows) -> UInt8Array:
    return np.full(len(rows), ABSENT, np.uint8)


def _numbered_rows(layout: Layout, *, timed: bool) -> Iterator[tuple[Block, Rows]]:
    where = ", ".join(str(path) for path in layout.trace.paths[:3]) or "trace"
    for block in layout.blocks(COLUMNS):
        start, dur = block.nodes["start_ns"], block.nodes["dur_ns"]
        broken = start.is_null() | dur.is_null() | (dur < 0)
        broken |= dur > 2**63 - 1 - start.clip(lower_bound=0)
        if timed and broken.any():
            rank, index = block.nodes.select("rank", "index").row(int(broken.arg_max() or 0))
            raise MergeInputError(
                "a row has no start or duration, or an impossible one",
                where=f"{where} rank={rank} index={index}",
                hint="merge again what the trace was made from",
            )
        yield block, rows_of(block.nodes, layout.trace.header, where)


def _with_rules(graph: Graph, layout: Layout, rules: WaitRules, lasting: list[Int64Array]) -> Graph:
    if not rules:
        return graph
    extra = [SEND_BYTES] if SEND_BYTES in layout.columns else []
    loosened = apply_wait_rules(
        graph, table_of(layout, [*_RULE_COLUMNS, *extra]), layout.trace.header, rules
    )
    # Members that now wait for nobody, and nobody for them, last as long as they did.
    free = (graph.instance >= 0) & ~waiting_rows(loosened)
    duration = np.where(free, np.concatenate(lasting), graph.duration_ns)
    return replace(loosened, duration_ns=duration)


def step_model(trace: Trace, rules: WaitRules | None = None, *, also: int = 0) -> StepModel:
    """The graph of a calibrated trace of any size, and its steps.

    Arguments and errors as of `graph_from_blocks`; `also` counts for large traces only.
    """
    if not is_large(trace):
        return StepModel.of(*graph_from_trace(trace, rules=rules), trace.header)
    layout = Layout.of(trace)
    graph = graph_from_blocks(layout, rules, also=also)
    times = ["start_ns", "dur_ns"] if laid_out(trace.header) else []
    return StepModel.of(graph, table_of(layout, ["step", *times]), trace.header)


def table_of(layout: Layout, columns: Sequence[str | pl.Expr]) -> pl.DataFrame:
    """Some columns of all rows, in order."""
    parts = [block.nodes for block in layout.blocks(columns)]
    return pl.concat(parts, rechunk=True)


def _labels(layout: Layout) -> Callable[[int], str]:
    """Names rows in error texts; reads them only then."""
    names = group_labels(layout.trace.header.groups)

    def label(row: int) -> str:
        found = layout.rows_at(np.array([row], np.int32))
        return node_text(found.row(0, named=True), names)

    return label
