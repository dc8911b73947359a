"""networkx in three lines: the graph of a run works in networkx's own functions.

`graph_from_trace` gives a graph of arrays.  networkx hands it to prismcalib, a backend that it
finds by itself once prismllm-toolkit is installed, so that longest paths come at the engine's speed.
"""

import networkx as nx

import prismcalib
from prismcalib import synth

job = synth.JobSpec(pp=2, tp=2, dp=2, microbatches=4, steps=2, seed=8)
trace = prismcalib.merge(synth.generate(job)).trace

graph, rows = prismcalib.graph_from_trace(trace)
length_ns = nx.dag_longest_path_length(graph, backend="prismcalib")
path = rows[nx.dag_longest_path(graph, backend="prismcalib")]

print(f"{graph.rows} operations, longest path {length_ns / 1e6:.2f} ms over {path.height} of them")
print(f"it visits ranks {sorted(set(path['rank']))}")
assert length_ns == prismcalib.critical_path(trace).length_ns

# For everything else that networkx can do, a few ranks as an ordinary DiGraph.  Sync edges mean
# "wait for each other"; left out, the rest has no cycles.
two = prismcalib.to_networkx(trace, ranks=[0, 1])
after = nx.subgraph_view(two, filter_edge=lambda src, dst: two[src][dst]["kind"] == "directional")
last = max(after, key=lambda node: after.nodes[node]["index"])
needed = nx.ancestors(after, last)
print(f"\nranks 0 and 1 alone: {two.number_of_nodes()} nodes, {two.number_of_edges()} edges")
print(f"{after.nodes[last]['name']} of rank {after.nodes[last]['rank']} needs {len(needed)} others")
