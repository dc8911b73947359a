"""What a plan says, for people and as JSON."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from prismreplay.boundary import VertexKind
from prismreplay.plan import Plan
from prismtrace.schema import TraceHeader

__all__ = ["PlanReport", "report_of_plan"]


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan that was compiled and written. Times in ns or s, as their names say.

    A run evaluates the `edges` once per execution of the `boundary_operations`, those of sandbox
    ranks in which virtual ranks take part: `edges_per_operation` is what each of them costs.
    `junctions` of the `vertices` are arrivals among virtual ranks.

    Of the job's `groups` a run makes `real_groups`, whose members all are sandbox ranks, as groups
    of the backend, plays the virtual members of `mixed_groups`, and never makes
    `bypassed_groups`, which have no sandbox member.

    `transfer_share` says how the transfers of boundary operations are known: by source, the share
    of the time that they take together.
    """

    output: Path
    world_size: int
    sandbox: tuple[int, ...]
    steps: int
    period_ns: int
    boundary_operations: int
    vertices: int
    junctions: int
    edges: int
    edges_per_operation: float
    groups: int
    mixed_groups: int
    real_groups: int
    bypassed_groups: int
    transfer_share: dict[str, float]
    wall_s: float
    peak_memory_bytes: int
    file_bytes: int


def report_of_plan(plan: Plan, header: TraceHeader, output: Path, wall_s: float) -> PlanReport:
    """The report of a plan that was written to `output`; its memory is this process's peak.

    Args:
        plan: it.
        header: of the trace that it was compiled from.
        output: where it is.
        wall_s: how long compiling took.
    """
    sandbox = set(plan.sandbox)
    operations = plan.operations.select(
        "group", "seq", "src_rank", "dst_rank", "rank", "transfer_ns", "transfer_source"
    ).unique(["group", "seq", "src_rank", "dst_rank", "rank"])
    real = sum(sandbox.issuperset(group.ranks) for group in plan.groups)
    boundary = plan.boundary
    return PlanReport(
        output=output,
        world_size=plan.world_size,
        sandbox=plan.sandbox,
        steps=len(plan.steps),
        period_ns=plan.period_ns,
        boundary_operations=operations.height,
        vertices=boundary.vertices,
        junctions=int(np.count_nonzero(boundary.kind == VertexKind.JUNCTION)),
        edges=boundary.edges,
        edges_per_operation=boundary.edges / max(1, operations.height),
        groups=len(header.groups),
        mixed_groups=len(plan.groups) - real,
        real_groups=real,
        bypassed_groups=len(header.groups) - len(plan.groups),
        transfer_share=_transfer_share(operations),
        wall_s=wall_s,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        file_bytes=output.stat().st_size,
    )


def _transfer_share(operations: pl.DataFrame) -> dict[str, float]:
    """Source of transfers -> its share of their time, largest first."""
    found = (
        operations.group_by(pl.col("transfer_source").fill_null("none"))
        .agg(pl.col("transfer_ns").sum())
        .sort("transfer_ns", descending=True)
    )
    total = max(1, found["transfer_ns"].sum())
    return {source: time_ns / total for source, time_ns in found.iter_rows()}
