import networkx as nx

from prismcalib import to_networkx


def test_nodes_and_edges(make_run):
    run = make_run(ranks=4, steps=1)
    graph = to_networkx(run.trace)
    assert graph.number_of_nodes() == len(run.rows)
    kinds = [kind for _, _, kind in graph.edges(data="kind")]
    assert kinds.count("directional") == len(run.rows) - 4
    # Stars of two pairs, one send-recv pair and the world.
    assert kinds.count("sync") == 1 + 1 + 1 + 3
    assert nx.is_directed_acyclic_graph(graph)
    node = graph.nodes[0]
    assert (node["kind"], node["name"], node["rank"]) == ("compute", "forward", 0)
    assert "group" not in node
    assert graph.edges[0, 1]["lag_ns"] == 0


def test_some_ranks(make_run):
    graph = to_networkx(make_run(ranks=4, steps=1).trace, ranks=[2, 3])
    assert {rank for _, rank in graph.nodes(data="rank")} == {2, 3}
    assert all("kind" in data for _, data in graph.nodes(data=True))
