"""How long does a whole merge take, and what of it?

    python benchmarks/merge.py                      680 thousand rows, 128 ranks
    python benchmarks/merge.py --data 32            four times as many

Writes a made-up recorded trace (the graph of propagate.py, its clocks off by up to 5 ms) into a
temporary folder, then merges it in a fresh process.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
from propagate import training_graph

from prismcalib.graph import Graph
from prismcalib.propagation import propagate
from prismtrace.schema import INDEX_BITS, ProcessGroup, TraceHeader
from prismtrace.trace import node_schema, write_nodes


def recorded_trace(graph: Graph, ranks: int, path: Path) -> None:
    """Write the graph as a recorded trace; every sync instance becomes a group of its own."""
    timing = propagate(graph, "array")
    changes = np.flatnonzero(np.diff(graph.dep_offsets) == 0)
    # The first row of a rank is the first after the last row of the rank before; stages differ in
    # length, so look for rows without deps that open a rank: compute or the first receive.
    starts = changes[np.append(True, np.diff(changes) > 8)]
    assert len(starts) == ranks
    rank = np.searchsorted(starts, np.arange(graph.rows), side="right") - 1
    index = np.arange(graph.rows) - starts[rank]
    member = graph.instance >= 0
    error = np.random.default_rng(1).integers(-5_000_000, 5_000_000, ranks)
    # One group per set of ranks, seq counted within it.
    order = np.lexsort((rank, graph.instance))
    order = order[graph.instance[order] >= 0]
    sets: dict[tuple[int, ...], int] = {}
    used: dict[int, int] = {}
    group = np.full(graph.rows, -1)
    seq = np.full(graph.rows, -1)
    cuts = np.flatnonzero(np.diff(graph.instance[order])) + 1
    for rows in np.split(order, cuts):
        number = sets.setdefault(tuple(rank[rows].tolist()), len(sets))
        group[rows] = number
        seq[rows] = used[number] = used.get(number, -1) + 1
    owner = np.repeat(np.arange(graph.rows), np.diff(graph.dep_offsets))
    deps = (
        pl.DataFrame({"row": owner, "deps": (owner - graph.dep_rows).astype(np.uint32)})
        .group_by("row", maintain_order=True)
        .agg("deps")
    )
    table = (
        pl.DataFrame(
            {
                "row": np.arange(graph.rows),
                "id": (rank.astype(np.int64) << INDEX_BITS) + index,
                "rank": rank.astype(np.int32),
                "index": index.astype(np.int32),
                "kind": np.where(member, "all_reduce", "compute"),
                "stream": np.zeros(graph.rows, np.int16),
                "group": group.astype(np.int32),
                "seq": seq,
                "real": np.ones(graph.rows, np.bool_),
                "start_ns": timing.start_ns + error[rank],
                "dur_ns": timing.end_ns - timing.start_ns,
            }
        )
        .join(deps, on="row", how="left", maintain_order="left")
        .drop("row")
        .with_columns(
            pl.col("deps").fill_null(pl.lit([], pl.List(pl.UInt32))),
            pl.col("kind").cast(node_schema()["kind"]),
            pl.when(pl.col("group") >= 0).then("group"),
            pl.when(pl.col("seq") >= 0).then("seq"),
        )
    )
    header = TraceHeader(
        kind="recorded",
        world_size=ranks,
        ranks=tuple(range(ranks)),
        groups=tuple(ProcessGroup(id=i, name=f"g{i}", ranks=r) for r, i in sets.items()),
    )
    write_nodes(header, table.lazy(), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("stages", 4), ("tensor", 4), ("data", 8), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=64)
    options = parser.parse_args()
    graph = training_graph(
        options.stages, options.tensor, options.data, options.microbatches, options.layers
    )
    ranks = options.stages * options.tensor * options.data
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "run.parquet", Path(folder) / "aligned.parquet"
        recorded_trace(graph, ranks, source)
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "prismcalib.cli", "merge", str(source), "-o", str(target)],
            check=True,
        )
        seconds = time.perf_counter() - begin
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = usage.ru_utime + usage.ru_stime
        print(f"{graph.rows} rows: {seconds:.2f} s wall, {cpu:.2f} s CPU, ", end="")
        print(
            f"{cpu / graph.rows * 1e9:.0f} ns/row, peak {usage.ru_maxrss / 1024:.0f} MiB, ", end=""
        )
        print(f"{usage.ru_maxrss * 1024 / graph.rows:.0f} B/row; ", end="")
        sizes = source.stat().st_size / graph.rows, target.stat().st_size / graph.rows
        print(f"file {sizes[0]:.1f} -> {sizes[1]:.1f} B/row")


if __name__ == "__main__":
    main()
