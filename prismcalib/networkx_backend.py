"""networkx's own functions on a `prismcalib.Graph`, at the speed of the engines.

    import networkx as nx, prismcalib

    graph, rows = prismcalib.graph_from_trace(trace)
    nx.dag_longest_path_length(graph)           # the makespan
    nx.dag_longest_path(graph)                  # rows of the critical path

`import networkx` loads this module (an entry point names it), so it imports nothing.

What networkx is told: the nodes of the graph are its rows.  Networkx knows no sync instances;
`convert_to_nx` therefore shows an ordinary weighted DiGraph whose longest path is the makespan:
row p has edges of weight duration + lag to the rows that depend on it; the members of a sync
instance g lead to a vertex ("instance", g) instead, from which their followers continue; all
rows lead to the vertex "end", and rows with a release come from "start".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

    from prismcalib.graph import Graph
    from prismcalib.propagation import Timing

__all__ = ["BackendInterface", "get_info"]

_FUNCTIONS = {
    "dag_longest_path": "weights are durations and lags; `weight` names the attribute of "
    "networkx graphs only",
    "dag_longest_path_length": "the makespan of a prismcalib.Graph",
    "find_cycle": "one cycle of any start; sync members count as connected",
    "has_cycle": "operations wait for each other in a circle",
    "is_directed_acyclic_graph": "propagation can reach every row",
    "topological_sort": "rows in an order of completion",
}


def get_info() -> dict[str, Any]:
    """What networkx asks every backend for at import."""
    return {
        "short_summary": "Longest paths through execution graphs of distributed training.",
        "functions": {name: {"additional_docs": text} for name, text in _FUNCTIONS.items()},
    }


class _Named:
    """A networkx graph as arrays: the rows of `graph` are called `names`."""

    __networkx_backend__ = "prismcalib"

    def __init__(self, graph: Graph, names: Sequence[Hashable], edges: frozenset[str]) -> None:
        self.graph = graph
        self.names = names
        self.edges = edges

    def is_directed(self) -> bool:
        return True

    def is_multigraph(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.names)


class BackendInterface:
    """The functions that networkx dispatches to, as attributes."""

    @staticmethod
    def convert_from_nx(
        graph: Any,
        edge_attrs: dict[str, Any] | None = None,
        **_: Any,
    ) -> _Named:
        """Directed networkx graphs with integer weights >= 0; weights become lags."""
        import numpy as np

        from prismcalib.graph import Graph

        names = list(graph)
        number = {name: row for row, name in enumerate(names)}
        attributes = edge_attrs or {}
        if len(attributes) > 1:
            raise NotImplementedError("prismcalib reads one edge attribute: the weight")
        attribute, default = next(iter(attributes.items()), ("weight", 1))
        if default is None:
            default = 1
        deps: list[list[int]] = [[] for _ in names]
        lags: list[list[int]] = [[] for _ in names]
        for before, after, data in graph.edges(data=True):
            weight = data.get(attribute, default)
            if not isinstance(weight, int | np.integer) or weight < 0:
                raise NotImplementedError(
                    f"prismcalib needs integer weights from 0 on, not {weight!r}"
                )
            deps[number[after]].append(number[before])
            lags[number[after]].append(int(weight))
        return _Named(
            Graph.from_lists([0] * len(names), deps, lags_ns=lags), names, frozenset(attributes)
        )

    @staticmethod
    def convert_to_nx(result: Any, **_: Any) -> Any:
        """A graph of ours as a networkx DiGraph; anything else as it is."""
        from prismcalib.graph import Graph

        if isinstance(result, _Named):
            raise NotImplementedError("use the networkx graph that this one was made from")
        return _as_digraph(result) if isinstance(result, Graph) else result

    @staticmethod
    def can_run(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool | str:
        """Whether a call is one we can answer, else why not."""
        if name not in _FUNCTIONS:
            return f"prismcalib does not implement {name}"
        if kwargs.get("source") is not None or kwargs.get("orientation") is not None:
            return "prismcalib finds cycles from anywhere, along the edges"
        if kwargs.get("topo_order") is not None:
            return "prismcalib finds its own order"
        graph = args[0] if args else kwargs.get("G")
        if graph is not None and hasattr(graph, "is_directed") and not graph.is_directed():
            return "prismcalib knows directed graphs only"
        return True

    @staticmethod
    def should_run(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool | str:
        """Converting costs more than one run of networkx: only our own graphs are worth it."""
        del name, kwargs
        ours = args and getattr(args[0], "__networkx_backend__", None) == "prismcalib"
        return True if ours else "converting the graph costs more than networkx needs"

    @staticmethod
    def dag_longest_path_length(
        graph: Graph | _Named, weight: str = "weight", default_weight: int = 1
    ) -> int:
        """The makespan."""
        del weight, default_weight
        return _propagate(_arrays(graph)[0]).makespan_ns

    @staticmethod
    def dag_longest_path(
        graph: Graph | _Named,
        weight: str = "weight",
        default_weight: int = 1,
        topo_order: None = None,
    ) -> list[Any]:
        """Names of the rows of one critical path, first to last."""
        del weight, default_weight, topo_order
        from prismcalib.propagation import critical_rows

        arrays, names = _arrays(graph)
        return [names[row] for row in critical_rows(arrays, _propagate(arrays))]

    @staticmethod
    def topological_sort(graph: Graph | _Named) -> Iterator[Any]:
        """All nodes, each after those it depends on."""
        arrays, names = _arrays(graph)
        rows = _propagate(arrays).order.tolist()
        return (names[row] for row in rows if row < arrays.rows)

    @staticmethod
    def is_directed_acyclic_graph(graph: Graph | _Named) -> bool:
        """Whether every row can start."""
        return _cycle(_arrays(graph)[0]) is None

    @staticmethod
    def has_cycle(graph: Graph | _Named) -> bool:
        """Whether rows wait for each other in a circle."""
        return _cycle(_arrays(graph)[0]) is not None

    @staticmethod
    def find_cycle(
        graph: Graph | _Named, source: None = None, orientation: None = None
    ) -> list[tuple[Any, Any]]:
        """The edges of one cycle."""
        del source, orientation
        import networkx as nx

        arrays, names = _arrays(graph)
        rows = _cycle(arrays)
        if rows is None:
            raise nx.NetworkXNoCycle("No cycle found.")
        found = [names[row] for row in rows]
        return list(zip(found, found[1:] + found[:1], strict=True))


def _arrays(graph: Graph | _Named) -> tuple[Graph, Sequence[Any]]:
    if isinstance(graph, _Named):
        return graph.graph, graph.names
    return graph, range(graph.rows)


def _propagate(graph: Graph) -> Timing:
    """The timing; cycles as networkx reports them."""
    import networkx as nx

    from prismcalib.errors import CycleError
    from prismcalib.propagation import propagate

    try:
        return propagate(graph)
    except CycleError as error:
        raise nx.NetworkXUnfeasible(str(error)) from error


def _cycle(graph: Graph) -> tuple[int, ...] | None:
    from prismcalib.errors import CycleError
    from prismcalib.propagation import propagate

    try:
        propagate(graph)
    except CycleError as error:
        return error.rows
    return None


def _as_digraph(graph: Graph) -> nx.DiGraph[Any]:
    """See the module's text; about 1 kB a row."""
    import networkx as nx
    import numpy as np

    full = graph.expanded
    vertex: list[Hashable] = [*range(graph.rows), *(("arrival", int(r)) for r in graph.arriving)]
    duration, instance = full.duration_ns.tolist(), full.instance.tolist()
    shown: nx.DiGraph[Any] = nx.DiGraph()
    shown.add_nodes_from(vertex)

    def edge(before: Hashable, after: Hashable, weight: int) -> None:
        # Of parallel edges the longest counts.
        known = shown.get_edge_data(before, after, {"weight": 0})["weight"]
        shown.add_edge(before, after, weight=max(weight, known))

    begin = 0
    if full.release_ns is not None and full.rows:
        free = np.diff(full.dep_offsets) == 0
        begin = int(full.release_ns.min(where=free, initial=np.iinfo(np.int64).max))
    for row in range(full.rows):
        if full.release_ns is not None and full.release_ns[row] > begin:
            edge("start", vertex[row], int(full.release_ns[row]) - begin)
        for dep, lag in zip(full.deps(row).tolist(), full.lags(row).tolist(), strict=True):
            before = vertex[dep] if instance[dep] < 0 else ("instance", instance[dep])
            edge(before, vertex[row], duration[dep] + lag)
        after = vertex[row] if instance[row] < 0 else ("instance", instance[row])
        if instance[row] >= 0:
            edge(vertex[row], after, 0)
        edge(after, "end", duration[row])
    return shown
