"""`prismcalib.coarsen` for traces that are read block by block.

Rows are merged within a rank, or within a process group, most of which lie in one block.  So
every block is contracted alone; what is left is put together, and with `microbatch` contracted
once more, for the groups that lie across blocks.  The table of the result is made block by block
as well, when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from prismcalib.block_graph import graph_from_blocks
from prismcalib.blocks import Block, Layout
from prismcalib.coarse_rows import Timeline, coarse_rows, collectives, sequence_numbers
from prismcalib.coarsening import (
    Coarse,
    Grain,
    Sizes,
    coarse_graph,
    coarsen_report,
    fine_net,
    fusable,
    noted,
    probe,
)
from prismcalib.contraction import contract
from prismcalib.graph import Graph, Int32Array
from prismcalib.made_table import made_table
from prismcalib.net import Net
from prismcalib.propagation import propagate
from prismcalib.waiting import waiting_rows
from prismtrace.schema import TraceHeader

__all__ = ["coarsen_by_blocks"]

_COLUMNS = (
    "rank", "step", "microbatch", "chunk", "phase", "kind", "stream", "batch", "group",
    "start_ns", "dur_ns",
)  # fmt: skip
# Beside the graph: what is left of it, twice for a moment, or its times.
_BYTES = 85


def coarsen_by_blocks(layout: Layout, grain: Grain) -> Coarse | None:
    """A calibrated trace made coarser; None if rows of one block depend on those of another.

    Raises:
        TooLargeError: even so there is not enough memory.
    """
    header = layout.trace.header
    fine = graph_from_blocks(layout, also=_BYTES)
    found = _contracted(layout, fine, grain)
    if found is None:
        return None
    joined, open_groups = found
    before = Sizes.of(fine)
    if grain == "exact":
        # What comes next asks for its structure only.
        fine = replace(fine, dep_lag_ns=None, release_ns=None)
    net = joined.net()
    if grain != "exact":
        net = contract(net, group=open_groups)
    coarse = coarse_graph(net, fine)
    rank = np.repeat(layout.ranks, layout.rows)
    probed = probe(fine, coarse, net, rank) if grain != "exact" else None
    del fine, rank
    nothing = np.empty(0, np.int64)
    net = replace(net, owner=nothing, dep=nothing, lag=nothing)
    timing = propagate(coarse)
    report = coarsen_report(grain, before, coarse, net, timing, probed)
    timeline = Timeline.of(coarse, timing, header.kind)
    pieces = _Pieces(layout, net.home, net.head, timeline)
    return Coarse(noted(header, report), pieces.table(), report)


# --- contraction ------------------------------------------------------------------------


def _contracted(layout: Layout, fine: Graph, grain: Grain) -> tuple[_Joined, Int32Array] | None:
    """Every block contracted alone; and int32[G], group of instances that may be fused, or -1."""
    waiting = waiting_rows(fine)
    whole = _Joined(keep=_EXACT if grain == "exact" else _ALL)
    open_groups = np.full(fine.instances, -1, np.int32)
    for block in layout.blocks(_COLUMNS):
        part = block.part
        first, last = fine.dep_offsets[[part.start, part.stop]]
        near = fine.dep_rows[first:last]
        if len(near) and (near.min() < part.start or near.max() >= part.stop):
            return None
        graph, rows = fine.cut(part), block.nodes
        start = rows["start_ns"].to_numpy()
        net = fine_net(graph, rows, start, start + rows["dur_ns"].to_numpy(), waiting[part])
        group = None
        if grain == "microbatch":
            of_block = fusable(graph, rows)
            open_groups = np.maximum(open_groups, of_block)
            group = np.where(_inside(of_block, block, layout), of_block, -1).astype(np.int32)
        whole.add(contract(net, group=group), part.start)
    return whole, open_groups


def _inside(group: Int32Array, block: Block, layout: Layout) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool[G]: whether all ranks of the instance's group (-1: none) lie in the block."""
    header: TraceHeader = layout.trace.header
    here = set(layout.ranks[block.first : block.last].tolist())
    present = set(layout.ranks.tolist())
    most = max((known.id for known in header.groups), default=0)
    inside = np.zeros(most + 2, np.bool_)  # the last one serves -1
    for known in header.groups:
        inside[known.id] = {rank for rank in known.ranks if rank in present} <= here
    return inside[group]


_EXACT = (
    "home", "head", "duration", "start", "end", "owner", "dep", "lag", "instance",
)  # fmt: skip
_ALL = (*_EXACT, "tail", "position", "mergeable", "place", "sort", "lane")
_ROWS_OF_TRACE = {"head": np.int32, "tail": np.int32, "position": np.int64}
_ROWS_OF_NET = {"home": np.int32, "owner": np.int32, "dep": np.int32}


class _Joined:
    """Contracted blocks, put behind each other."""

    def __init__(self, keep: tuple[str, ...]) -> None:
        self._parts: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in keep}
        self._rows = self._places = self._uneven = 0

    def add(self, net: Net, first: int) -> None:
        """Append a block whose first row in the trace is `first`."""
        for name, parts in self._parts.items():
            values = getattr(net, name)
            if name in _ROWS_OF_TRACE:
                values = (values + first).astype(_ROWS_OF_TRACE[name])
            elif name in _ROWS_OF_NET:
                values = (values + self._rows).astype(_ROWS_OF_NET[name])
            elif name == "place":
                values = values + np.int32(self._places)
            parts.append(values)
        self._rows += len(net)
        self._places += int(net.place.max(initial=-1)) + 1
        self._uneven = max(self._uneven, net.uneven_ns)

    def net(self) -> Net:
        """All of it; what was not kept is empty."""
        columns: dict[str, Any] = {}
        for name in _ALL:
            # Freed one by one, so that they are not all held twice.
            parts = self._parts.pop(name, None)
            columns[name] = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if len(columns["place"]):
            for name in ("owner", "dep"):
                # Keys of two row numbers are made from these.
                columns[name] = columns[name].astype(np.int64)
        return Net(**columns, uneven_ns=self._uneven)


# --- table ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pieces:
    """The contracted trace, of which blocks are made when they are asked for.

    Attributes:
        layout: of the original trace of N rows.
        home: int32[N], head: int32[n]: as of `Net`.
        timeline: of the n rows.
    """

    layout: Layout
    home: Int32Array
    head: Int32Array
    timeline: Timeline

    def table(self) -> pl.LazyFrame:
        """The node table; read block by block."""
        make = self._maker(sequence_numbers(self._collectives()))

        def blocks(_: list[str] | None) -> Iterator[pl.DataFrame]:
            return (make(block) for block in self.layout.blocks())

        sample = next(iter(self.layout.blocks(block_rows=1)))
        return made_table(blocks, make(sample).schema)

    def _maker(self, numbers: pl.DataFrame) -> Callable[[Block], pl.DataFrame]:
        def make(block: Block) -> pl.DataFrame:
            part = self._rows_of(block)
            return coarse_rows(
                block.nodes,
                self.home[block.part] - np.int32(part.start),
                self.head[part] - np.int32(block.row),
                self.timeline.cut(part),
                numbers,
            )

        return make

    def _rows_of(self, block: Block) -> slice:
        """Where the rows are that a block has become."""
        homes = self.home[block.part]
        return slice(int(homes.min()), int(homes.max()) + 1)

    def _collectives(self) -> pl.DataFrame:
        found = [
            collectives(block.nodes[self.head[self._rows_of(block)] - np.int32(block.row)])
            for block in self.layout.blocks(["kind", "group", "seq"])
        ]
        kind = pl.lit("all_reduce").alias("kind")
        return pl.concat(found).unique().with_columns(kind)
