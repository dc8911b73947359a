"""A trace as a networkx graph, for scripts that look at a few ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import polars as pl

from prismtrace.trace import Trace

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["to_networkx"]


def to_networkx(trace: Trace, ranks: Iterable[int] | None = None) -> nx.DiGraph[int]:
    """Nodes and both kinds of edges of some `ranks` of a `trace`, by default of all.

    Nodes are node ids with the non-null columns as attributes, lists of edges left out.
    Directional edges carry `kind="directional"` and `lag_ns`.  Every sync instance is a star
    of edges `kind="sync"` from its lowest id; they mean "wait for each other", not "after".
    Edges to ranks that were left out are dropped.

    About 1 kB a node: meant for thousands of nodes, not millions.
    """
    import networkx as nx

    chosen = trace if ranks is None else trace.ranks(ranks)
    nodes = chosen.collect()
    edges = chosen.edges().filter(pl.col("src").is_in(nodes["id"].implode()))
    graph: nx.DiGraph[int] = nx.DiGraph()
    for node in nodes.drop("deps", "xdeps", "lag_ns").iter_rows(named=True):
        known = {name: value for name, value in node.items() if value is not None}
        graph.add_node(known.pop("id"), **known)
    for src, dst, kind, lag_ns in edges.iter_rows():
        if kind == "directional":
            graph.add_edge(src, dst, kind=kind, lag_ns=lag_ns)
        else:
            graph.add_edge(src, dst, kind=kind)
    return graph
