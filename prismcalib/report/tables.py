"""From what was counted to the tables of a report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from prismcalib.computing import longer_than_others, others_median
from prismcalib.extent import Extent
from prismcalib.graph import Int64Array
from prismcalib.paths import CriticalPath
from prismcalib.report.scan import Scan
from prismtrace.group_names import group_family, group_labels
from prismtrace.schema import P2P_KINDS, TraceHeader

__all__ = [
    "Memory",
    "Pipeline",
    "groups_table",
    "memory_of",
    "pipeline_of",
    "ranks_table",
    "traffic_table",
]

_P2P = [kind.value for kind in P2P_KINDS]


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a run.

    Attributes:
        stage_of: rank -> stage.
        stages: how many.
        microbatches, chunks: per step and rank; None if the trace does not number them.
        stage_table: stage, ranks (how many), compute_ns, inner_idle_ns, transfer_ns, wait_ns,
            gap_ns (mean over its ranks), bubble (waiting and gaps as a share of the window),
            path_share.
    """

    stage_of: dict[int, int]
    stages: int
    microbatches: int | None
    chunks: int | None
    stage_table: pl.DataFrame

    @property
    def bubble(self) -> float:
        """Mean share of the window in which a rank waits or does nothing."""
        weighted = self.stage_table["bubble"] * self.stage_table["ranks"]
        return float(weighted.sum()) / max(int(self.stage_table["ranks"].sum()), 1)

    @property
    def least_bubble(self) -> float | None:
        """What a perfect (interleaved) 1F1B schedule of this shape wastes.

        Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
        Using Megatron-LM" (SC 2021), sections 2.2.1 and 2.2.2.
        """
        if self.microbatches is None:
            return None
        passes = self.microbatches * (self.chunks or 1)
        return (self.stages - 1) / (passes + self.stages - 1)


@dataclass(frozen=True, eq=False)
class Memory:
    """Allocated bytes over time.

    Attributes:
        names: what the lines are: ranks, stages (highest of their ranks) or, of many ranks
            without stages, highest, median and lowest rank.
        levels: int64[lines, bins], highest level in each bin of the window.
    """

    names: tuple[str, ...]
    levels: Int64Array


def ranks_table(
    times: pl.DataFrame, path: CriticalPath, stage_of: dict[int, int] | None
) -> pl.DataFrame:
    """`RunSummary.ranks`."""
    shares = path.shares("rank").select("rank", path_share="share")
    stage = (
        pl.lit(None, pl.Int32)
        if stage_of is None
        else pl.col("rank").replace_strict(stage_of, default=None, return_dtype=pl.Int32)
    )
    sent = pl.col("hidden_ns") + pl.col("transfer_ns")
    placed = times.with_columns(stage=stage)
    peers = others_median(placed["compute_ns"], placed["stage"])
    return (
        placed.with_columns(peers_ns=peers)
        .join(shares, on="rank", how="left", maintain_order="left")
        .select(
            *("rank", "stage", "rows", "compute_ns", "inner_idle_ns", "transfer_ns", "wait_ns"),
            *("gap_ns", "hidden_ns"),
            pl.when(sent > 0).then(pl.col("hidden_ns") / sent).alias("overlap"),
            pl.col("path_share").fill_null(0.0),
            "peers_ns",
            longer_than_others("compute_ns", "peers_ns").alias("excess"),
            "peak_bytes",
        )
    )


def pipeline_of(
    stage_of: dict[int, int], ranks: pl.DataFrame, counted: Scan, extent: Extent
) -> Pipeline:
    """The pipeline with its stages."""
    parts = ("compute_ns", "inner_idle_ns", "transfer_ns", "wait_ns", "gap_ns")
    table = (
        ranks.drop_nulls("stage")
        .group_by("stage")
        .agg(
            pl.len().alias("ranks"),
            *(pl.col(part).mean().round().cast(pl.Int64) for part in parts),
            bubble=(pl.col("wait_ns") + pl.col("gap_ns")).mean() / max(extent.window_ns, 1),
            path_share=pl.col("path_share").sum(),
        )
        .sort("stage")
    )
    microbatches, chunks = counted.step_ends.select(
        pl.col("microbatches").max(), pl.col("chunks").max()
    ).row(0)
    return Pipeline(
        stage_of=stage_of,
        stages=max(stage_of.values()) + 1,
        microbatches=microbatches,
        chunks=chunks,
        stage_table=table,
    )


def _named_groups(header: TraceHeader) -> pl.DataFrame:
    """Columns group, name (its label), family, ranks (how many)."""
    labels = group_labels(header.groups)
    rows = [
        (group.id, labels[group.id], group_family(group), len(group.ranks))
        for group in header.groups
    ]
    schema = {"group": pl.Int32, "name": pl.String, "family": pl.String, "ranks": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def _operations() -> pl.Expr:
    """How many operations a group's member rows stand for."""
    size = pl.when(pl.col("kind").is_in(_P2P)).then(1).otherwise(pl.col("ranks"))
    return (pl.col("members") / size.clip(lower_bound=1)).round().cast(pl.Int64)


def traffic_table(counted: Scan, header: TraceHeader, extent: Extent) -> pl.DataFrame:
    """`RunSummary.traffic`."""
    named = counted.traffic.with_columns(pl.col("kind").cast(pl.String)).join(
        _named_groups(header), on="group", how="left"
    )
    rows = pl.col("members") + pl.col("unmatched")
    members = pl.col("members").sum().clip(lower_bound=1)
    whole = pl.col("ranks").sum() * max(extent.window_ns, 1)
    return (
        named.with_columns(operations=_operations(), family=pl.col("family").fill_null("unknown"))
        .group_by("family", "kind")
        .agg(
            groups=pl.col("group").n_unique(),
            operations=pl.col("operations").sum(),
            unmatched=pl.col("unmatched").sum(),
            wait_ns=(pl.col("wait_ns").sum() / members).round().cast(pl.Int64),
            transfer_ns=(pl.col("transfer_ns").sum() / rows.sum()).round().cast(pl.Int64),
            bytes=(pl.col("bytes").sum() / rows.sum()).round().cast(pl.Int64),
            wait_share=(pl.col("wait_ns").sum() / whole).fill_null(0.0).fill_nan(0.0),
        )
        .sort("wait_share", "family", "kind", descending=[True, False, False])
    )


def groups_table(counted: Scan, header: TraceHeader) -> pl.DataFrame:
    """`RunSummary.groups`."""
    names = _named_groups(header)
    traffic = counted.traffic.with_columns(pl.col("kind").cast(pl.String)).join(names, on="group")
    collective = ~pl.col("kind").is_in(_P2P)
    last = (
        counted.late.sort("arrivals", "rank", descending=[True, False])
        .group_by("group", maintain_order=True)
        .first()
    )
    members = pl.col("members").clip(lower_bound=1)
    return (
        traffic.with_columns(operations=_operations())
        .group_by("group", "name", "ranks")
        .agg(
            pl.col("members", "operations", "wait_ns", "transfer_ns").sum(),
            collectives=pl.col("operations").filter(collective).sum(),
        )
        .join(last, on="group", how="left")
        .sort("wait_ns", "group", descending=[True, False])
        .select(
            *("group", "name", "ranks", "members", "operations"),
            (pl.col("wait_ns") / members).round().cast(pl.Int64).alias("wait_ns"),
            (pl.col("transfer_ns") / members).round().cast(pl.Int64).alias("transfer_ns"),
            pl.col("wait_ns").alias("total_wait_ns"),
            pl.col("rank").alias("last_rank"),
            (pl.col("arrivals") / pl.col("collectives")).alias("last_share"),
        )
    )


def memory_of(
    levels: Int64Array | None, extent: Extent, pipeline: Pipeline | None
) -> Memory | None:
    """`RunSummary.memory`, from levels int64[R, bins]."""
    if levels is None:
        return None
    ranks = extent.ranks.tolist()
    if len(ranks) <= 8:
        return Memory(tuple(f"rank {rank}" for rank in ranks), levels)
    if pipeline is not None:
        stage = np.array([pipeline.stage_of.get(rank, -1) for rank in ranks])
        numbers = [number for number in range(pipeline.stages) if (stage == number).any()]
        return Memory(
            tuple(f"stage {number}" for number in numbers),
            np.stack([levels[stage == number].max(axis=0) for number in numbers]),
        )
    middle = np.median(levels, axis=0).astype(np.int64)
    lines = np.stack([levels.max(axis=0), middle, levels.min(axis=0)])
    return Memory(("highest rank", "median rank", "lowest rank"), lines)
