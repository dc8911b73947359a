from __future__ import annotations

import json

import pytest

from prismtrace import blocks
from prismtrace.errors import OutputError
from prismtrace.export.node_link import export_node_link

networkx = pytest.importorskip("networkx", reason="the graph is read back with networkx")


def read_graph(trace, folder):
    export_node_link(trace, folder / "run.json")
    content = json.loads((folder / "run.json").read_text())
    return networkx.node_link_graph(content, edges="edges")


def test_networkx_reads_nodes_and_edges(job, tmp_path):
    graph = read_graph(job, tmp_path)
    rows = job.collect()
    assert type(graph) is networkx.DiGraph
    assert list(graph) == rows["id"].to_list()
    edges = [(src, dst, data["kind"], data["lag_ns"]) for src, dst, data in graph.edges(data=True)]
    assert sorted(edges) == sorted(job.edges().rows())
    assert graph.graph["world_size"] == 2


def test_nodes_carry_what_is_not_null(job, tmp_path):
    graph = read_graph(job, tmp_path)
    assert graph.nodes[0] == {
        "rank": 0,
        "index": 0,
        "kind": "compute",
        "name": 'gemm<128, "x">',
        "stream": 0,
        "step": 0,
        "start_ns": 1000,
        "dur_ns": 30,
        "real": True,
    }
    assert graph.nodes[1]["wait_ns"] == 20


def test_the_graph_of_a_sound_trace_has_no_cycle(job, tmp_path):
    graph = read_graph(job, tmp_path)
    assert networkx.is_directed_acyclic_graph(graph)
    assert networkx.has_path(graph, 0, (1 << 32) + 2)


def test_a_deadlock_shows_when_sync_edges_are_contracted(make_trace, tmp_path):
    """Two ranks run two collectives in opposite order."""
    rows = [
        {"rank": rank, "kind": "barrier", "group": 0, "seq": seq, "deps": [1] if i else []}
        for rank, order in enumerate([(0, 1), (1, 0)])
        for i, seq in enumerate(order)
    ]
    graph = read_graph(make_trace(*rows), tmp_path)
    assert networkx.is_directed_acyclic_graph(graph)  # all stars lead away from rank 0
    merged = networkx.Graph(
        (src, dst) for src, dst, kind in graph.edges(data="kind") if kind == "sync"
    )
    instances = list(networkx.connected_components(merged))
    quotient = networkx.quotient_graph(graph, instances)
    assert not networkx.is_directed_acyclic_graph(quotient)


def test_edges_to_ranks_that_are_left_out(make_trace, tmp_path):
    trace = make_trace({}, {"rank": 1}, {"rank": 1, "deps": [1], "xdeps": [0]})
    assert read_graph(trace, tmp_path).number_of_edges() == 2
    part = read_graph(trace.ranks([1]), tmp_path)
    assert list(part) == [1 << 32, (1 << 32) + 1]
    assert part.number_of_edges() == 1


def test_extra_columns_are_kept(make_trace, tmp_path):
    trace = make_trace({})
    extended = trace.nodes.with_columns(x_note=trace.nodes.collect()["id"] + 5)
    assert read_graph(type(trace)(trace.header, extended), tmp_path).nodes[0]["x_note"] == 5


def test_blocks_change_nothing(job, tmp_path, monkeypatch):
    whole = read_graph(job, tmp_path)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 2)
    assert networkx.utils.graphs_equal(read_graph(job, tmp_path), whole)


def test_an_empty_trace(make_trace, tmp_path):
    assert read_graph(make_trace(), tmp_path).number_of_nodes() == 0


def test_a_path_that_cannot_be_written(job, tmp_path):
    with pytest.raises(OutputError):
        export_node_link(job, tmp_path / "absent" / "run.json")
