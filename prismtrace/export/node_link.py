"""Node-link JSON: the graph as `networkx.node_link_graph` reads it.

    graph = networkx.node_link_graph(json.load(open("run.json")), edges="edges")

A directed graph without parallel edges. Nodes are called by their id and carry the columns of
their row that are not null. Edges have `kind` and `lag_ns`. A sync instance is shown as in
`Trace.edges`: a star of edges from the member with the lowest id to the others. The graph of
a trace without cycles has none either (a cycle through a star would have to leave the
instance and come back to it), so topological order, reachability and drawing work. A star
says less than its instance, though: members wait for each other in both directions. For
cycles across ranks and for times, contract the sync edges or use prismcalib.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import IO

import polars as pl

from prismtrace.blocks import instance_blocks, rank_blocks
from prismtrace.output import atomic_output
from prismtrace.schema import INDEX_BITS
from prismtrace.trace import PathLike, Trace, directional_edges, sync_edges

__all__ = ["export_node_link"]

_EDGE_COLUMNS = ["id", "rank", "kind", "group", "seq", "peer"]


def export_node_link(
    trace: Trace, path: PathLike, *, advance: Callable[[int], None] | None = None
) -> None:
    """Write a trace as node-link JSON, one node or edge a line, in blocks of rows.

    Edges that come from a rank that is not in the trace are left out. `advance` is called
    with the number of rows that have been written since the last call.

    Raises:
        OutputError: the file cannot be written; what was there before stays.
    """
    header = trace.header.model_dump(mode="json", exclude_defaults=True)
    columns = [
        name
        for name in trace.nodes.collect_schema().names()
        if name not in {"deps", "xdeps", "lag_ns"}
    ]
    with atomic_output(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"directed": true, "multigraph": false, "graph": ')
        file.write(json.dumps(header) + ',\n"nodes": [')
        separator = "\n"
        for rows in rank_blocks(trace.nodes, columns):
            for part in rows.iter_slices(16384):
                separator = _write_rows(file, part, separator)
                if advance is not None:
                    advance(part.height)
        file.write('\n],\n"edges": [')
        _write_edges(file, trace)
        file.write("\n]}\n")


def _write_edges(file: IO[str], trace: Trace) -> None:
    separator = "\n"
    present = trace.nodes.select("rank").unique().collect(engine="streaming")["rank"].to_list()
    names = {"src": "source", "dst": "target"}
    known = (pl.col("source") // (1 << INDEX_BITS)).is_in(present)
    for rows in rank_blocks(trace.nodes, ["id", "deps", "xdeps", "lag_ns"]):
        edges = directional_edges(rows).rename(names).filter(known)
        separator = _write_rows(file, edges, separator)
    for rows in instance_blocks(trace.nodes, _EDGE_COLUMNS):
        separator = _write_rows(file, sync_edges(rows).rename(names), separator)


def _write_rows(file: IO[str], rows: pl.DataFrame, separator: str) -> str:
    """Write rows as objects without nulls; returns the separator for the next ones."""
    for part in rows.iter_slices(16384):
        texts = [
            json.dumps({name: value for name, value in row.items() if value is not None})
            for row in part.iter_rows(named=True)
        ]
        if texts:
            file.write(separator + ",\n".join(texts))
            separator = ",\n"
    return separator
