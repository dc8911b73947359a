"""One pass over a calibrated trace, block of ranks by block of ranks: everything counted there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from prismcalib.blocks import Block, Layout
from prismcalib.extent import Extent
from prismcalib.graph import Int64Array
from prismcalib.paths import inner_idle
from prismcalib.report.coverage import cover
from prismcalib.report.grids import Grid, GridWriter, grid_shapes
from prismcalib.step_times import begun_before
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS

__all__ = ["MEMORY_BINS", "PARTS", "Scan", "scan"]

PARTS = ("compute", "inner_idle", "transfer", "wait")
"""What a rank does at an instant, first that applies; `inner_idle` is a share of `compute` spans.
The rest is a gap: no span at all."""

MEMORY_BINS = 256

# Rows of a block: some 60 bytes each in the columns that are read, as much again to sort them.
_BLOCK_ROWS = 2_000_000
# And its ranks: each takes some 100 bytes a bin while cells are computed.
_BLOCK_RANKS = 512

LOCAL = [kind.value for kind in LOCAL_KINDS]
_P2P = [kind.value for kind in P2P_KINDS]


@dataclass(frozen=True, eq=False, kw_only=True)
class Scan:
    """What one pass counts.

    Attributes:
        ranks: rank, rows; compute_ns, inner_idle_ns, transfer_ns, wait_ns, gap_ns: the window
            divided by `PARTS` (where several apply the first counts); hidden_ns: transfers
            beside computation; peak_bytes (null if unknown).
        traffic: group (id, null if unknown), kind; members (rows of matched communications),
            unmatched, wait_ns, transfer_ns, bytes: sums over rows.
        late: group, rank, arrivals: in how many collectives the rank arrived last.
        kinds: kind, rows, dur_ns: sums over all ranks.
        sources: transfer_source, rows, transfer_ns, of matched communications.
        step_ends: step, start_ns (first), end_ns (last), microbatches and chunks (how many; null if
            not numbered).
        pairs: group, rank, peer: who sends to whom.
        virtual_rows: rows that no real rank measured.
        memory_bytes: int64[R, MEMORY_BINS], highest level in each bin; None if unknown.
        grids: what every rank does when.
    """

    ranks: pl.DataFrame
    traffic: pl.DataFrame
    late: pl.DataFrame
    kinds: pl.DataFrame
    sources: pl.DataFrame
    step_ends: pl.DataFrame
    pairs: pl.DataFrame
    virtual_rows: int
    memory_bytes: Int64Array | None
    grids: tuple[Grid, ...]


def scan(
    layout: Layout,
    extent: Extent,
    *,
    cells: int,
    block_rows: int = _BLOCK_ROWS,
    on_rows: Callable[[int], None] | None = None,
) -> Scan:
    """Read every row once.

    Args:
        layout: of a calibrated trace.
        extent: of that trace.
        cells: most cells of a grid.
        block_rows: rows in memory at a time, unless one rank has more.
        on_rows: is told how many more rows have been read.
    """
    shapes = grid_shapes(len(extent.ranks), cells)
    writers = [GridWriter(shape, len(extent.ranks), len(PARTS)) for shape in shapes]
    fold = _Fold(extent, begun=begun_before(layout.trace.header))
    columns: list[str | pl.Expr] = [*_COLUMNS, inner_idle(layout.columns).alias("inner_idle_ns")]
    blocks = layout.blocks(
        columns,
        block_rows=block_rows,
        ranks_at_once=_BLOCK_RANKS,
        step=shapes[0].ranks_per_line,
    )
    for block in blocks:
        nodes = block.nodes
        lane = np.searchsorted(extent.ranks[block.first : block.last], nodes["rank"].to_numpy())
        fold.add(nodes, _lanes(block, lane, extent, shapes[0].bins, writers))
        fold.remember(block.first, nodes, lane)
        if on_rows is not None:
            on_rows(nodes.height)
    return fold.result(grids=tuple(writer.grid for writer in writers))


_COLUMNS = (
    "rank", "index", "kind", "group", "seq", "peer", "bytes", "step", "microbatch", "chunk",
    "phase", "start_ns", "dur_ns", "wait_ns", "transfer_ns", "transfer_source", "real",
    "mem_bytes", "mem_peak_bytes",
)  # fmt: skip


def _lanes(
    block: Block, lane: Int64Array, extent: Extent, bins: int, writers: list[GridWriter]
) -> pl.DataFrame:
    """What each rank of a block does when: times per rank; cells go to the writers."""
    nodes, lanes = block.nodes, block.last - block.first
    stride = extent.window_ns + 1
    base = lane * stride - extent.begin_ns
    start = nodes["start_ns"].to_numpy() + base
    end = start + nodes["dur_ns"].to_numpy()
    ready = start + nodes["wait_ns"].fill_null(0).to_numpy()
    local = nodes["kind"].cast(pl.String).is_in(LOCAL).to_numpy()
    share = nodes["inner_idle_ns"].to_numpy() / np.maximum(nodes["dur_ns"].to_numpy(), 1)

    edges = np.arange(lanes)[:, None] * stride + extent.window_ns * np.arange(bins + 1) // bins
    computing = cover(start[local], end[local], share[local])
    compute, idle = computing.per_cell(edges)
    busy, _ = cover(np.where(local, start, ready), end).per_cell(edges)
    spent, _ = cover(start, end).per_cell(edges)
    sent, _ = cover(ready[~local], end[~local]).per_cell(edges[:, [0, -1]])
    if idle is None:  # a measure was given, so there is one
        raise AssertionError
    parts = np.stack([compute - idle, idle, busy - compute, spent - busy])
    for writer in writers:
        writer.add(block.first, parts, extent.window_ns)
    # Rounded so that the parts still add up to the window.
    idle_ns = np.rint(idle.sum(axis=1)).astype(np.int64)
    transfer = (busy - compute).sum(axis=1)
    spent_ns = spent.sum(axis=1)
    return pl.DataFrame(
        {
            "rank": extent.ranks[block.first : block.last],
            "compute_ns": compute.sum(axis=1) - idle_ns,
            "inner_idle_ns": idle_ns,
            "transfer_ns": transfer,
            "wait_ns": (spent - busy).sum(axis=1),
            "gap_ns": extent.window_ns - spent_ns,
            "hidden_ns": sent[:, 0] - transfer,
        }
    )


class _Fold:
    """Sums over blocks."""

    def __init__(self, extent: Extent, *, begun: bool) -> None:
        self._extent = extent
        self._begun = begun
        self._tables: dict[str, list[pl.DataFrame]] = {}
        self._memory = np.full((len(extent.ranks), MEMORY_BINS), -1, np.int64)
        self._virtual = 0

    def add(self, block: pl.DataFrame, times: pl.DataFrame) -> None:
        """Count a block; `times` are those of its ranks."""
        matched = pl.col("transfer_ns").is_not_null() & pl.col("seq").is_not_null()
        comm = block.filter(~pl.col("kind").cast(pl.String).is_in(LOCAL))
        end = pl.col("start_ns") + pl.col("dur_ns")
        both = comm.filter(matched)
        tables = {
            "ranks": times.join(
                block.group_by("rank").agg(
                    rows=pl.len(), peak_bytes=pl.max_horizontal("mem_peak_bytes", "mem_bytes").max()
                ),
                on="rank",
                how="left",
                maintain_order="left",
            ),
            "traffic": comm.group_by("group", "kind").agg(
                members=matched.sum(),
                unmatched=(~matched).sum(),
                wait_ns=pl.col("wait_ns").sum(),
                transfer_ns=pl.coalesce("transfer_ns", "dur_ns").sum(),
                bytes=pl.col("bytes").sum(),
            ),
            "late": both.filter((pl.col("wait_ns") == 0) & ~pl.col("kind").is_in(_P2P))
            .group_by("group", "rank")
            .agg(arrivals=pl.len()),
            "kinds": block.group_by("kind").agg(rows=pl.len(), dur_ns=pl.col("dur_ns").sum()),
            "sources": both.group_by("transfer_source").agg(
                rows=pl.len(), transfer_ns=pl.col("transfer_ns").sum()
            ),
            "steps": block.filter(pl.col("step").is_not_null())
            .group_by("step")
            .agg(
                pl.col("start_ns").min(),
                end_ns=end.max(),
                microbatches=pl.col("microbatch").max() + 1,
                chunks=pl.col("chunk").max() + 1,
            ),
            "pairs": comm.filter(pl.col("kind").cast(pl.String) == "send")
            .select("group", "rank", "peer")
            .unique(),
        }
        for name, table in tables.items():
            self._tables.setdefault(name, []).append(table)
        self._virtual += int((~block["real"]).sum())

    def remember(self, first: int, block: pl.DataFrame, lane: Int64Array) -> None:
        """Take the memory levels of a block whose first rank has number `first`."""
        level = pl.max_horizontal("mem_bytes", "mem_peak_bytes")
        known = block.select(
            lane=pl.Series(lane),
            bytes=level,
            bin=(pl.col("start_ns") + pl.col("dur_ns") - self._extent.begin_ns)
            * MEMORY_BINS
            // (self._extent.window_ns + 1),
        ).drop_nulls("bytes")
        lanes, bins, levels = (known[name].to_numpy() for name in ("lane", "bin", "bytes"))
        np.maximum.at(self._memory, (first + lanes, bins), levels)

    def result(self, *, grids: tuple[Grid, ...]) -> Scan:
        """The sums over all blocks."""
        whole = {name: pl.concat(parts) for name, parts in self._tables.items()}
        sums = ("members", "unmatched", "wait_ns", "transfer_ns", "bytes")
        return Scan(
            ranks=whole["ranks"],
            traffic=whole["traffic"].group_by("group", "kind").agg(pl.col(sums).sum())
            .sort("group", "kind"),
            late=whole["late"].group_by("group", "rank").agg(pl.col("arrivals").sum())
            .sort("group", "rank"),
            kinds=whole["kinds"].group_by("kind").agg(pl.col("rows", "dur_ns").sum())
            .sort("kind"),
            sources=whole["sources"].group_by("transfer_source")
            .agg(pl.col("rows", "transfer_ns").sum()).sort("transfer_source"),
            step_ends=whole["steps"].group_by("step")
            .agg(pl.col("start_ns").min(), pl.col("end_ns", "microbatches", "chunks").max())
            .sort("step"),
            pairs=whole["pairs"].sort("group", "rank", "peer"),
            virtual_rows=self._virtual,
            memory_bytes=_filled(self._memory, begun=self._begun),
            grids=grids,
        )  # fmt: skip


def _filled(levels: Int64Array, *, begun: bool) -> Int64Array | None:
    """Levels with every unknown bin (-1) holding what was known before it; None if none is.

    Before anything is known that is 0, in steps that follow others what is known first.
    """
    if levels.max(initial=-1) < 0:
        return None
    first = (levels >= 0).argmax(axis=1) if begun else np.zeros(len(levels), np.int64)
    known = np.where(levels >= 0, np.arange(levels.shape[1]), first[:, None])
    np.maximum.accumulate(known, axis=1, out=known)
    return np.maximum(np.take_along_axis(levels, known, axis=1), 0)
