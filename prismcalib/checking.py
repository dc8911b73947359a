"""Is a trace complete and free of cycles?  `prismcalib check`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from prismcalib.blocks import Layout, is_large
from prismcalib.build import (
    require_all_members,
    require_all_ranks,
    sorted_rows,
    structure_graph,
)
from prismcalib.errors import MissingMemberError
from prismcalib.graph import Graph
from prismcalib.propagation import propagate
from prismtrace.trace import Trace

__all__ = ["check_graph"]


def check_graph(trace: Trace) -> dict[str, int]:
    """ranks, rows, deps, instances, and longest_chain: rows on the longest chain.

    Raises:
        MergeInputError: rows contradict each other, or a rank takes part twice.
        CoverageError: ranks of the job are absent.
        MissingMemberError: a communication lacks members.
        CycleError: operations wait for each other in a circle.
        TooLargeError: the graph would not fit into memory.
    """
    graph, ranks = _chains(trace)
    return {
        "ranks": ranks,
        "rows": graph.rows,
        "deps": len(graph.dep_rows),
        "instances": graph.instances,
        # With durations of 1 the makespan is the number of rows.
        "longest_chain": propagate(graph).makespan_ns,
    }


def _chains(trace: Trace) -> tuple[Graph, int]:
    """The graph with durations of 1, and the number of its ranks."""
    if is_large(trace):
        from prismcalib.block_graph import chains_from_blocks

        layout = Layout.of(trace)
        try:
            return chains_from_blocks(layout), len(layout.ranks)
        except MissingMemberError:
            require_all_ranks(pl.DataFrame({"rank": layout.ranks}), trace.header)
            raise
    rows = sorted_rows(trace)
    graph = structure_graph(rows, trace.header)
    try:
        require_all_members(graph, rows, trace.header)
    except MissingMemberError:
        # Where whole ranks are absent, that is the news.
        require_all_ranks(rows, trace.header)
        raise
    return replace(graph, duration_ns=np.ones(graph.rows, np.int64)), rows["rank"].n_unique()
