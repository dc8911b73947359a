"""Small jobs as bare graphs, and what stands for running a slice of one."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from prismreplay.slicing.cutting import steps_only
from prismreplay.slicing.task import SliceOutcome, SliceTask
from prismtrace.schema import ProcessGroup, SliceInfo, TraceHeader
from prismtrace.trace import Trace, node_ids, node_schema, open_trace, write_nodes


def bare_graph(path, world=4, groups=(("dp", range(4)),), steps=2, each=1):
    """`steps` steps of `each` computations and all_reduces in every group of a rank."""
    known = tuple(
        ProcessGroup(id=number, name=name, desc=name, ranks=tuple(ranks))
        for number, (name, ranks) in enumerate(groups)
    )
    rows = []
    for rank in range(world):
        mine = [group for group in known if rank in group.ranks]
        seqs = dict.fromkeys((group.id for group in mine), 0)
        last: list[int] = []
        index = 0
        for step in range(steps):
            for group in mine * each:
                rows.append(
                    {"rank": rank, "index": index, "step": step, "kind": "compute",
                     "name": "work", "stream": 0, "deps": [index - dep for dep in last]}
                )  # fmt: skip
                rows.append(
                    {"rank": rank, "index": index + 1, "step": step, "kind": "all_reduce",
                     "stream": 1, "group": group.id, "seq": seqs[group.id], "bytes": 8,
                     "deps": [1]}
                )  # fmt: skip
                seqs[group.id] += 1
                last = [index + 1]
                index += 2
    schema = node_schema()
    names = ["rank", "index", "step", "kind", "name", "stream", "group", "seq", "bytes", "deps"]
    nodes = pl.DataFrame(rows, schema={name: schema[name] for name in names}).with_columns(
        id=node_ids(pl.col("rank"), pl.col("index")), real=pl.lit(value=True)
    )
    header = TraceHeader(
        kind="bare",
        world_size=world,
        ranks=tuple(range(world)),
        groups=known,
        streams={0: "program", 1: "network"},
        steps=tuple(range(steps)),
    )
    write_nodes(header, nodes.lazy(), path)
    return Path(path)


def perform(task: SliceTask) -> SliceOutcome:
    """Every row takes 1000 ns on even ranks, 2000 on odd ones."""
    from prismreplay.slicing.fingerprint import KEY

    bare = open_trace(list(task.graph))
    ranks = list(task.execution.ranks)
    rows = bare.nodes.filter(pl.col("rank").is_in(ranks)).collect()
    duration = pl.when(pl.col("rank") % 2 == 0).then(1000).otherwise(2000).cast(pl.Int64)
    ends = pl.col("dur_ns").cum_sum().over("rank")
    rows = rows.with_columns(dur_ns=duration).with_columns(start_ns=ends - pl.col("dur_ns"))
    header = bare.header.model_copy(
        update={
            "kind": "slice",
            "ranks": task.execution.ranks,
            "slice": SliceInfo(index=task.execution.index, real_ranks=task.execution.ranks),
            "extra": {KEY: {"fingerprint": dict(task.fingerprint)}},
        }
    )
    if task.steps is not None:
        whole = Trace(header=header, nodes=rows.lazy())
        header, kept = steps_only(whole, task.steps)
        rows = kept.collect()
    write_nodes(header, rows.lazy(), task.output)
    return SliceOutcome(
        index=task.execution.index,
        repeat=task.execution.repeat,
        ranks=task.execution.ranks,
        output=task.output,
        nodes=rows.height,
        step_ns=(1,),
        whole_operations=0,
        mixed_operations=0,
        wall_s=0.0,
        peak_memory_bytes=0,
    )
