"""Small traces written by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import polars as pl
import pytest

from prismtrace.schema import ProcessGroup, TraceHeader
from prismtrace.trace import Trace, node_schema


def build_trace(*rows: dict[str, Any], schema: pl.Schema | None = None, **header: Any) -> Trace:
    """A trace of rows given as a few columns each; rank 0, stream 0 and compute by default.

    `index` counts within the rank, `id` follows from both; the header lists the ranks that
    have rows, one group 0 of all ranks, and the streams 0 and 1.
    """
    schema = node_schema() if schema is None else schema
    counts: Counter[int] = Counter()
    full = []
    for row in rows:
        rank = row.get("rank", 0)
        plain = {"rank": rank, "index": counts[rank], "kind": "compute", "stream": 0}
        plain |= {"real": True, "deps": []}
        merged = {**dict.fromkeys(schema), **plain, **row}
        if "id" not in row:
            merged["id"] = merged["rank"] << 32 | merged["index"]
        counts[rank] = merged["index"] + 1
        full.append(merged)
    ranks = tuple(sorted({row["rank"] for row in full}))
    facts: dict[str, Any] = {
        "kind": "slice",
        "ranks": ranks,
        "world_size": max(ranks, default=0) + 1,
    }
    facts |= {"groups": (ProcessGroup(id=0, name="world", ranks=ranks),)}
    facts |= {"streams": {0: "7", 1: "20"}, **header}
    return Trace(TraceHeader(**facts), pl.DataFrame(full, schema=schema).lazy())


@pytest.fixture
def make_trace():
    return build_trace


@pytest.fixture
def job() -> Trace:
    """Two ranks: compute, an all_reduce for which rank 0 waits 20 ns, compute, a send."""
    comm = {"kind": "all_reduce", "stream": 1, "group": 0, "seq": 0, "bytes": 64}
    comm |= {"dtype": "float32", "reduce_op": "sum", "deps": [1], "step": 0}
    gemm = {"name": 'gemm<128, "x">', "step": 0}
    return build_trace(
        {**gemm, "rank": 0, "start_ns": 1_000, "dur_ns": 30},
        {**comm, "rank": 0, "start_ns": 1_030, "dur_ns": 50, "wait_ns": 20, "transfer_ns": 30},
        {**gemm, "rank": 0, "start_ns": 1_080, "dur_ns": 5, "deps": [1, 2], "lag_ns": [0, 7]},
        {"rank": 0, "kind": "send", "stream": 1, "group": 0, "seq": 0, "peer": 1, "bytes": 8}
        | {"start_ns": 1_085, "dur_ns": 10, "deps": [1, 2], "wait_ns": 0, "transfer_ns": 10},
        {**gemm, "rank": 1, "start_ns": 1_000, "dur_ns": 50, "critical": True},
        {**comm, "rank": 1, "start_ns": 1_050, "dur_ns": 30, "wait_ns": 0, "transfer_ns": 30}
        | {"critical": True, "slack_ns": 0},
        {"rank": 1, "kind": "recv", "stream": 1, "group": 0, "seq": 0, "peer": 0, "bytes": 8}
        | {"start_ns": 1_080, "dur_ns": 15, "deps": [1], "wait_ns": 5, "transfer_ns": 10},
        kind="calibrated",
        steps=(0,),
    )
