"""From operations to nodes, at communication grain or at kernel grain.

At communication grain everything a stream computes between two communications, or between
two points where it waits for or is waited for by another stream, becomes one span. The span
covers launch gaps inside it; `x_busy_ns` tells how long the device really worked and
`x_kernels` how many kernels it ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import polars as pl

from prismtrace.converters.dep_lists import lists_by_owner
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.kineto.names import short_name
from prismtrace.schema import Kind

__all__ = ["Grain", "build_nodes"]

Grain = str
"""``communication`` or ``kernel``."""


def build_nodes(
    ops: IssuedOps, *, grain: Grain, unit: str = "kernel", extra: pl.DataFrame | None = None
) -> tuple[pl.DataFrame, list[tuple[int, CommOp]]]:
    """Turn one rank's operations into nodes.

    Args:
        ops: operations with deps, step, microbatch and phase filled in.
        grain: ``communication`` or ``kernel``.
        unit: what an operation is called in the name of a span of several.
        extra: at kernel grain, columns to attach by the source event (`row`).

    Returns:
        Node columns without id, rank, group, seq and peer; `stream` is a label. And for
        each communication its index and description.
    """
    if grain == "kernel":
        members: Sequence[Sequence[int]] = [(p,) for p in range(len(ops))]
        first: Sequence[int] = range(len(ops))
        summaries = [_alone(ops, p) for p in first]
        deps = [sorted([p - source for source in sources]) for p, sources in enumerate(ops.deps)]
    else:
        members = _segments(ops)
        first = [positions[0] for positions in members]
        summaries = [_summary(ops, positions, unit) for positions in members]
        deps = _distances(ops, members)
    nodes = pl.DataFrame(
        {
            "index": range(len(members)),
            "kind": [summary.kind.value for summary in summaries],
            "name": [summary.name for summary in summaries],
            "stream": [ops.stream[p] for p in first],
            "batch": [ops.batch[p] for p in first],
            "step": [ops.step[p] for p in first],
            "microbatch": [ops.microbatch[p] for p in first],
            "phase": [None if ops.phase[p] is None else str(ops.phase[p]) for p in first],
            "bytes": [summary.nbytes for summary in summaries],
            "dtype": [_text(ops.comm[p], "dtype") for p in first],
            "reduce_op": [_text(ops.comm[p], "reduce_op") for p in first],
            "start_ns": [ops.start_ns[p] for p in first],
            "dur_ns": [
                summary.end_ns - ops.start_ns[p]
                for summary, p in zip(summaries, first, strict=True)
            ],
            "deps": _lists(deps),
            "x_kernels": [len(positions) for positions in members],
            "x_busy_ns": [summary.busy_ns for summary in summaries],
            "row": [ops.row[p] for p in first],
        },
        schema={
            "index": pl.Int32,
            "kind": pl.String,
            "name": pl.String,
            "stream": pl.String,
            "batch": pl.Int32,
            "step": pl.Int32,
            "microbatch": pl.Int32,
            "phase": pl.String,
            "bytes": pl.Int64,
            "dtype": pl.String,
            "reduce_op": pl.String,
            "start_ns": pl.Int64,
            "dur_ns": pl.Int64,
            "deps": pl.List(pl.UInt32),
            "x_kernels": pl.Int32,
            "x_busy_ns": pl.Int64,
            "row": pl.UInt32,
        },
    )
    if grain == "kernel":
        nodes = nodes.drop("x_kernels", "x_busy_ns")
        if extra is not None and extra.width > 1:
            nodes = nodes.join(extra, on="row", how="left", maintain_order="left")
    found = [
        (index, comm)
        for index, position in enumerate(first)
        if (comm := ops.comm[position]) is not None
    ]
    return nodes.drop("row"), found


def _distances(ops: IssuedOps, members: Sequence[Sequence[int]]) -> list[list[int]]:
    """How far back each node's dependencies lie, in nodes."""
    node_of = [0] * len(ops)
    for index, positions in enumerate(members):
        for position in positions:
            node_of[position] = index
    return [
        sorted(
            {
                index - node_of[source]
                for position in positions
                for source in ops.deps[position]
                if node_of[source] != index
            }
        )
        for index, positions in enumerate(members)
    ]


def _lists(values: Sequence[Sequence[int]]) -> pl.Series:
    """A list column."""
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    flat = np.fromiter(chain.from_iterable(values), dtype=np.uint32, count=lengths.sum())
    owner = np.repeat(np.arange(len(values)), lengths)
    return lists_by_owner(owner, flat, len(values))


def _text(comm: CommOp | None, attribute: str) -> str | None:
    value = getattr(comm, attribute) if comm is not None else None
    return None if value is None else str(value)


def _segments(ops: IssuedOps) -> list[list[int]]:
    """Positions of each node, ordered by first position: spans of computation, communications."""
    starts_node, ends_node = _cuts(ops)
    segments: list[list[int]] = []
    open_segment: dict[str, list[int]] = {}
    for position, stream in enumerate(ops.stream):
        current = open_segment.get(stream)
        previous = current[-1] if current else None
        joins = (
            previous is not None
            and ops.comm[position] is None
            and not starts_node[position]
            and not ends_node[previous]
            and ops.step[position] == ops.step[previous]
            and ops.microbatch[position] == ops.microbatch[previous]
            and ops.phase[position] == ops.phase[previous]
        )
        if joins and current is not None:
            current.append(position)
            continue
        segment = [position]
        segments.append(segment)
        if ops.comm[position] is None:
            open_segment[stream] = segment
        else:
            open_segment.pop(stream, None)
    return segments


def _cuts(ops: IssuedOps) -> tuple[list[bool], list[bool]]:
    """Operations that must be first and last of their span, because an edge leads in or out."""
    starts_node = [False] * len(ops)
    ends_node = [False] * len(ops)
    for position, deps in enumerate(ops.deps):
        for source in deps:
            if ops.stream[source] != ops.stream[position]:
                starts_node[position] = True
                ends_node[source] = True
    return starts_node, ends_node


class _Summary(NamedTuple):
    kind: Kind
    name: str
    nbytes: int | None
    end_ns: int
    busy_ns: int


def _summary(ops: IssuedOps, positions: Sequence[int], unit: str) -> _Summary:
    if len(positions) == 1:
        return _alone(ops, positions[0])
    time_by_name: Counter[str] = Counter()
    for position in positions:
        time_by_name[ops.name[position]] += ops.dur_ns[position]
    copies = all(ops.kind[position] is Kind.MEMCPY for position in positions)
    sizes = [ops.nbytes[position] for position in positions if copies]
    longest = max(sorted(time_by_name), key=lambda name: time_by_name[name])
    return _Summary(
        Kind.MEMCPY if copies else Kind.COMPUTE,
        _span_name(short_name(longest), len(positions) - 1, "copy" if copies else unit),
        sum(size or 0 for size in sizes) if sizes else None,
        max(ops.end_ns(position) for position in positions),
        _union_ns(ops, positions),
    )


def _alone(ops: IssuedOps, position: int) -> _Summary:
    busy_ns = ops.dur_ns[position]
    return _Summary(
        ops.kind[position],
        short_name(ops.name[position]),
        ops.nbytes[position],
        ops.start_ns[position] + busy_ns,
        busy_ns,
    )


def _span_name(longest: str, others: int, unit: str) -> str:
    """A span of several operations must not pass for the one that takes most of its time."""
    plural = "copies" if unit == "copy" else f"{unit}s"
    return f"{longest} +{others} {unit if others == 1 else plural}"


def _union_ns(ops: IssuedOps, positions: Sequence[int]) -> int:
    """Time during which at least one operation ran (same-stream overlaps do occur)."""
    total = 0
    reached = ops.start_ns[positions[0]]
    for position in positions:
        end = ops.end_ns(position)
        if end > reached:
            total += end - max(reached, ops.start_ns[position])
            reached = end
    return total
