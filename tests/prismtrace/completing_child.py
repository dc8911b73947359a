"""Complete and write ranks that share one file of nodes; print the peak of memory, in bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import polars as pl

from prismtrace.converters.completing import complete_nodes
from prismtrace.converters.placing import Assignment, RankComms
from prismtrace.converters.rank_trace import RankTrace
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.trace import write_nodes


def main(folder: Path, ranks: int, rows: int) -> None:
    labels = ("stream 7", "stream 20")
    nodes = folder / "nodes.parquet"
    index = np.arange(rows)
    pl.DataFrame(
        {
            "index": pl.Series(index, dtype=pl.Int32),
            "kind": ["compute"] * rows,
            "name": [f"kernel {number % 50}" for number in range(rows)],
            "stream": [labels[number % 2] for number in range(rows)],
            "step": pl.Series(index // 1024, dtype=pl.Int32),
            "phase": pl.Series([None] * rows, dtype=pl.String),
            "bytes": pl.Series([None] * rows, dtype=pl.Int64),
            "start_ns": index * 1000,
            "dur_ns": index % 1000,
            "deps": pl.Series(
                [[1] if number else [] for number in index], dtype=pl.List(pl.UInt32)
            ),
            "batch": pl.Series([None] * rows, dtype=pl.Int32),
        }
    ).write_parquet(nodes)
    comms = RankComms(0, index[:0], [], index[:0], index[:0], [], [], [])
    trace = RankTrace(nodes, 0, ranks, None, (), comms, labels, (0,), nodes, rows, {})
    traces = [RankTrace(**{**vars(trace), "rank": rank}) for rank in range(ranks)]
    nothing = dict.fromkeys(range(ranks), Assignment([], [], [], []))
    streams = {label: number for number, label in enumerate(labels)}
    header = TraceHeader(
        kind=TraceKind.RECORDED,
        world_size=ranks,
        ranks=tuple(range(ranks)),
        groups=(),
        streams=dict(enumerate(labels)),
        clock=(),
        steps=(0,),
        created_by="a test",
    )
    whole = complete_nodes(traces, nothing, {}, streams, folder)
    write_nodes(header, whole, folder / f"{ranks}.parquet")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
