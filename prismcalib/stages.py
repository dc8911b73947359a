"""Which ranks form which pipeline stage, read off who sends to whom."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from prismcalib.blocks import Tables
from prismcalib.places import Places, rank_places
from prismtrace.schema import Kind, TraceHeader

__all__ = ["job_places", "pipeline_stages"]


def job_places(header: TraceHeader, nodes: Tables) -> Places:
    """Stages and replicas of all ranks; stages as a report shows them, else as groups tell."""
    pairs = [
        table.filter(pl.col("kind").cast(pl.String) == Kind.SEND.value)
        .select("group", "rank", "peer")
        .unique()
        for table in nodes.tables(["kind", "group", "rank", "peer"])
    ]
    stages = pipeline_stages(header, pl.concat(pairs))
    places = rank_places(header)
    if stages is None:
        return places
    stage = np.full(header.world_size, -1, np.int64)
    stage[list(stages)] = list(stages.values())
    return replace(places, stage=stage)


def pipeline_stages(header: TraceHeader, pairs: pl.DataFrame) -> dict[int, int] | None:
    """Rank -> stage, or None where the trace shows no pipeline.

    Ranks that send to each other, directly or through others, form one pipeline; its ranks in
    ascending order, or in the order of their process group, are its stages. All pipelines must
    be equally long: as long as the axis `pp`, where the header names it.

    Args:
        header: of the trace.
        pairs: group, rank, peer of the sends.
    """
    size = header.axes.get("pp")
    if size == 1:
        return None
    order = {group.id: group.ranks for group in header.groups}
    fitting = [group for group, ranks in order.items() if len(ranks) == size]
    within = pairs.filter(pl.col("group").is_in(fitting)) if fitting else pairs.clear()
    links = within if within.height else pairs
    pipelines = _connected([(rank, peer) for rank, peer in links.select("rank", "peer").rows()])
    lengths = {len(pipeline) for pipeline in pipelines}
    if len(lengths) != 1 or (size is not None and lengths != {size}):
        return _named_stages(header)
    as_listed = {frozenset(ranks): ranks for ranks in order.values()}
    stages: dict[int, int] = {}
    for pipeline in pipelines:
        ranks = as_listed.get(frozenset(pipeline), tuple(sorted(pipeline)))
        stages.update({rank: stage for stage, rank in enumerate(ranks)})
    return stages


def _named_stages(header: TraceHeader) -> dict[int, int] | None:
    places = rank_places(header)
    if places.stages < 2 or (places.stage < 0).any():
        return None
    return dict(enumerate(places.stage.tolist()))


def _connected(pairs: list[tuple[int, int]]) -> list[set[int]]:
    """Sets of ranks that are linked, directly or through others."""
    home: dict[int, set[int]] = {}
    for one, other in pairs:
        first, second = home.setdefault(one, {one}), home.setdefault(other, {other})
        if first is second:
            continue
        small, large = sorted((first, second), key=len)
        large |= small
        for rank in small:
            home[rank] = large
    return list({id(ranks): ranks for ranks in home.values()}.values())
