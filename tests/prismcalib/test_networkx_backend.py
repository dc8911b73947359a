import itertools
import random
import subprocess

import networkx as nx
import pytest

from prismcalib.build import graph_from_trace
from prismcalib.graph import Graph
from prismcalib.merging import merge
from prismcalib.networkx_backend import BackendInterface, get_info
from prismcalib.propagation import propagate
from prismcalib.waiting import WaitRules

CONVERSATION = """
import sys
import networkx as nx
assert not {"polars", "numba", "prismcalib.graph"} & set(sys.modules)
assert "prismcalib.networkx_backend" in sys.modules
from prismcalib.graph import Graph
graph = Graph.from_lists(
    [10, 4, 5, 30, 6, 5], [[], [0], [1], [], [3], [4]], instances=[-1, 0, -1, -1, 0, -1]
)
assert nx.dag_longest_path_length(graph, backend="prismcalib") == 41
assert nx.dag_longest_path_length(graph) == 41
assert nx.dag_longest_path(graph) == [3, 4, 5]
assert sorted(nx.topological_sort(graph)) == list(range(6))
assert nx.is_directed_acyclic_graph(graph)
circle = Graph.from_lists([1, 1, 1], [[2], [0], [1]])
assert not nx.is_directed_acyclic_graph(circle)
assert len(nx.find_cycle(circle)) == 3
try:
    nx.find_cycle(graph)
except nx.NetworkXNoCycle:
    pass
else:
    raise AssertionError
try:
    nx.dag_longest_path_length(circle)
except nx.NetworkXUnfeasible:
    pass
else:
    raise AssertionError
nx.config.cache_converted_graphs = False  # or networkx warns about it
ordinary = nx.DiGraph()
ordinary.add_weighted_edges_from([("a", "b", 3), ("b", "c", 4), ("a", "c", 5)])
assert nx.dag_longest_path(ordinary, backend="prismcalib") == ["a", "b", "c"]
assert nx.dag_longest_path_length(ordinary, backend="prismcalib") == 7
assert nx.dag_longest_path_length(ordinary) == 7
assert list(nx.topological_sort(ordinary, backend="prismcalib")) == ["a", "b", "c"]
try:
    nx.pagerank(graph)
except (NotImplementedError, TypeError):
    pass
else:
    raise AssertionError
"""


def test_networkx_dispatches_to_us(command_env):
    answer = subprocess.run(
        ["python", "-W", "error::RuntimeWarning", "-c", CONVERSATION],
        env=command_env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def random_graph(seed):
    draw = random.Random(seed)
    n = draw.randint(1, 30)
    deps = [draw.sample(range(row), min(row, draw.choice([0, 1, 2]))) for row in range(n)]
    instances, sizes = [-1] * n, 0
    waits = [[] for _ in range(n)]
    free = [row for row in range(n - 1) if draw.random() < 0.4]
    for row in free:
        if instances[row] >= 0 or instances[row + 1] >= 0 or row in deps[row + 1]:
            continue
        instances[row] = instances[row + 1] = sizes
        sizes += 1
    for row in range(n):
        if instances[row] < 0 and row and draw.random() < 0.2:
            waits[row] = [draw.randrange(row)]
    return Graph.from_lists(
        [draw.randint(0, 100) for _ in range(n)],
        deps,
        lags_ns=[[draw.choice([0, 7]) for _ in row] for row in deps],
        instances=instances,
        releases_ns=[draw.randint(-50, 50) for _ in range(n)] if draw.random() < 0.5 else None,
        waits=waits if draw.random() < 0.5 else None,
    )


@pytest.mark.parametrize("seed", range(80))
def test_the_digraph_that_we_show_has_the_makespan_as_longest_path(seed):
    graph = random_graph(seed)
    shown = BackendInterface.convert_to_nx(graph)
    if nx.is_directed_acyclic_graph(shown):
        assert nx.dag_longest_path_length(shown) == propagate(graph).makespan_ns
        order = list(BackendInterface.topological_sort(graph))
        assert sorted(order) == list(graph)
    else:
        assert not BackendInterface.is_directed_acyclic_graph(graph)
        assert BackendInterface.has_cycle(graph)


@pytest.mark.parametrize("seed", range(40))
def test_ordinary_graphs(seed):
    draw = random.Random(seed)
    graph = nx.gnp_random_graph(12, 0.3, seed=seed, directed=True)
    dag = nx.DiGraph(
        (f"n{a}", f"n{b}", {"cost": draw.randint(0, 9)}) for a, b in graph.edges if a < b
    )
    ours = BackendInterface.convert_from_nx(dag, edge_attrs={"cost": 1})
    assert len(ours) == len(dag)
    assert list(ours) == list(dag)
    length = BackendInterface.dag_longest_path_length(ours)
    assert length == nx.dag_longest_path_length(dag, weight="cost")
    path = BackendInterface.dag_longest_path(ours)
    assert sum(dag.edges[pair]["cost"] for pair in itertools.pairwise(path)) == length
    position = {name: i for i, name in enumerate(BackendInterface.topological_sort(ours))}
    assert all(position[a] < position[b] for a, b in dag.edges)


def test_what_it_cannot_do_it_says():
    directed, undirected = nx.DiGraph([(1, 2)]), nx.Graph([(1, 2)])
    can = BackendInterface.can_run
    assert can("topological_sort", (directed,), {}) is True
    assert "directed" in can("has_cycle", (undirected,), {})
    assert "pagerank" in can("pagerank", (directed,), {})
    assert "anywhere" in can("find_cycle", (directed,), {"source": 1})
    assert "order" in can("dag_longest_path", (directed,), {"topo_order": [1, 2]})
    assert isinstance(BackendInterface.should_run("topological_sort", (directed,), {}), str)
    assert BackendInterface.should_run("topological_sort", (Graph.from_lists([], []),), {}) is True
    with pytest.raises(NotImplementedError, match="integer weights"):
        BackendInterface.convert_from_nx(
            nx.DiGraph([(1, 2, {"weight": 0.5})]), edge_attrs={"weight": 1}
        )
    assert set(get_info()["functions"]) <= set(vars(BackendInterface))


def test_a_merged_run(make_run):
    for rules in (WaitRules(), WaitRules(eager_below=1 << 30)):
        result = merge(make_run().trace, rules=rules)
        graph, _ = graph_from_trace(result.trace)
        length = BackendInterface.dag_longest_path_length(graph)
        assert length == result.report.propagated_ns
        assert length == nx.dag_longest_path_length(BackendInterface.convert_to_nx(graph))
        assert 3 in graph
        assert graph.rows not in graph
