"""`prismcalib.predict` for traces that are read block by block."""

from __future__ import annotations

import numpy as np
import polars as pl

from prismcalib.block_graph import step_model
from prismcalib.blocks import Layout
from prismcalib.chosen_steps import WHOLE_INDEX, numbered_as_whole
from prismcalib.estimates import EstimateRange, duration_factors, range_of, scaled
from prismcalib.extent import extent_of
from prismcalib.paths import CriticalPath, inner_idle, require_partners
from prismcalib.prediction import Prediction, path_basis, rank_times
from prismcalib.step_times import step_table_of, warmup_of
from prismcalib.trail import marked_path
from prismtrace.schema import TransferSource

__all__ = ["predict_by_blocks"]

_RANK_COLUMNS = ("rank", "kind", "start_ns", "wait_ns")
_FACTOR_COLUMNS = ("id", "rank", "peer", "group", "kind", "transfer_source")
# Beside the graph: two sets of durations, ends, an order and times of a propagation.
_RANGE_BYTES = 60


def predict_by_blocks(layout: Layout, draws: int) -> Prediction:
    """As `prismcalib.predict`, without resampling."""
    header = layout.trace.header
    extent = extent_of(layout.trace, layout)
    require_partners(layout.trace)
    path = marked_path(layout, extent)
    columns: list[str | pl.Expr] = [
        *_RANK_COLUMNS,
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"),
        inner_idle(layout.columns).alias("inner_idle_ns"),
    ]
    ranks = [rank_times(block.nodes, path.length_ns) for block in layout.blocks(columns)]
    why = f"{layout.total} operations are too many to resample"
    return Prediction(
        window_ns=path.length_ns,
        steps=step_table_of(layout, extent.begin_ns, extent.end_ns),
        ranks=pl.concat(ranks),
        basis=path_basis(path),
        why_no_spread=why if draws else "no draws were asked for",
        estimates=_estimates(layout, path),
        warmup=warmup_of(header),
    )


def _estimates(layout: Layout, path: CriticalPath) -> EstimateRange | None:
    measured = TransferSource.MEASURED.value
    source = pl.col("transfer_source").cast(pl.String)
    estimated = any(
        block.nodes.select((source != measured).any()).item()
        for block in layout.blocks(["transfer_source"])
    )
    if not estimated:
        return None
    model = step_model(layout.trace, also=_RANGE_BYTES)
    graph = model.graph
    durations = np.empty((graph.rows, 2), np.int64)
    unknown = []
    of_path = path.segments["id"].implode()
    numbers = [WHOLE_INDEX] if WHOLE_INDEX in layout.columns else []
    for block in layout.blocks([*_FACTOR_COLUMNS, *numbers]):
        low, high, open_ended = duration_factors(block.nodes, layout.trace.header)
        for column, factor in enumerate((low, high)):
            durations[block.part, column] = scaled(graph.duration_ns[block.part], factor)
        ids = numbered_as_whole(block.nodes)["id"].filter(open_ended)
        unknown.append(ids.filter(ids.is_in(of_path)))
    return range_of(model, durations, path, pl.concat(unknown))
