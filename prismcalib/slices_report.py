"""What merging slices found and did, in numbers, and what of it goes into the header."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from prismcalib.comm_costs import CostReport
from prismcalib.gathering import Gathering
from prismcalib.graph import Graph
from prismcalib.measuring import SOURCES, ExecutionReport
from prismcalib.propagation import Timing
from prismcalib.rows import ranks_text
from prismcalib.step_times import StepTimes
from prismcalib.waiting import waiting_rows
from prismtrace.headers import CORE_WAIT
from prismtrace.schema import ClockDomain, TraceHeader, TraceKind, TransferSource

__all__ = ["SlicesReport", "header_of", "report_of"]

_NONE = SOURCES.index(TransferSource.NONE)
_BLOCK_ROWS = 1 << 22


@dataclass(frozen=True)
class SlicesReport:
    """What merging slices found and did; times in ns, ranks as text.

    Attributes:
        ranks, rows, instances: size of the result.
        slices, executions: slices, and files with repeats.
        before_ns: longest step that any slice saw by itself, before alignment.
        step_ns: the step after alignment: median of the steps after warm-up.
        steps_ns: every step.
        propagated_ns: first start to last end.
        wait_ns, transfer_ns: sums over all members of instances.
        sources: members by where their transfer comes from.
        late_virtual: samples of transfers dropped because a virtual rank came last.
        unknown_transfers: members without any other sample; kept as observed.
        gaps_ns: idle time kept as lags, sum over rows.
        gaps_on_critical_path_ns: the part that the whole job waits for.
        overlap_clamps, transfer_clamps, clamped_ns: rows that started before a dependency
            ended, members that ended before the last member started, and the time of both.
        chained: rows that the end of the step before had to release.
        unmatched: communications that wait for nobody.
        checked_against: what the structure was compared with.
        resized: all_to_all whose size differs from the bare graph's.
        kept, folded, twins, untimed: ranks from the base; ranks another stands for; ranks
            with another's durations; ranks without durations.
        reduce, pooled, warmup: how samples were reduced.
        executions_seen: the files, one by one.
        comm_costs: what transfers that were not measured come from, if that was asked for.
    """

    ranks: int
    rows: int
    instances: int
    slices: int
    executions: int
    before_ns: int
    step_ns: int
    steps_ns: tuple[int, ...]
    propagated_ns: int
    wait_ns: int
    transfer_ns: int
    sources: dict[str, int]
    late_virtual: int
    unknown_transfers: int
    gaps_ns: int
    gaps_on_critical_path_ns: int
    overlap_clamps: int
    transfer_clamps: int
    clamped_ns: int
    chained: int
    unmatched: int
    checked_against: str
    resized: int
    kept: str
    folded: str
    twins: str
    untimed: str
    reduce: str
    pooled: bool
    warmup: int
    executions_seen: tuple[ExecutionReport, ...]
    comm_costs: CostReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values (lists, not tuples)."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return fields


def report_of(
    job: Gathering,
    graph: Graph,
    instances: int,
    timing: Timing,
    steps: list[tuple[int, int]],
) -> SlicesReport:
    """What happened, in numbers; `steps` is the critical path."""
    campaign, options, seen = job.campaign, job.options, job.seen
    ends = job.assembly.step_runs().ends(timing.end_ns)
    first, last = int(timing.start_ns.min()), int(timing.end_ns.max())
    times = StepTimes.between(first, list(ends.values()), last)
    source = np.zeros(256, np.int64)
    for first_row in range(0, graph.rows, _BLOCK_ROWS):
        codes = job.assembly.source[first_row : first_row + _BLOCK_ROWS]
        source += np.bincount(codes, minlength=256)
    synced = waiting_rows(graph)
    gaps = [
        int(timing.start_ns[reached] - timing.end_ns[left])
        for (_, left), (reached, _) in pairwise(steps)
    ]
    sources = {SOURCES[code].value: int(source[code]) for code in range(len(SOURCES))}
    against = "the bare graph" if campaign.bare else "the base" if campaign.base else None
    return SlicesReport(
        ranks=len(job.assembly.ranks),
        rows=graph.rows,
        instances=instances,
        slices=len(campaign.slices),
        executions=len(seen),
        before_ns=max(report.step_ns for report in seen),
        step_ns=times.steady_ns(options.warmup),
        steps_ns=times.durations_ns,
        propagated_ns=timing.makespan_ns,
        wait_ns=_waits_ns(timing),
        transfer_ns=int(graph.duration_ns[synced].sum()),
        sources={name: count for name, count in sources.items() if count},
        late_virtual=sum(report.late_virtual for report in seen),
        unknown_transfers=int(source[_NONE]),
        gaps_ns=job.assembly.gaps_ns,
        gaps_on_critical_path_ns=sum(gaps),
        overlap_clamps=sum(report.overlap_clamps for report in seen),
        transfer_clamps=sum(report.transfer_clamps for report in seen),
        clamped_ns=sum(report.clamped_ns for report in seen),
        chained=sum(report.chained for report in seen),
        unmatched=job.unmatched,
        checked_against=against or "one another",
        resized=job.resized,
        kept=ranks_text(campaign.kept),
        folded=ranks_text(rank for rank, _ in campaign.folded),
        twins=ranks_text(job.twins),
        untimed=ranks_text(campaign.untimed),
        reduce=options.reduce,
        pooled=options.pool_steps,
        warmup=options.warmup,
        executions_seen=tuple(seen),
        comm_costs=job.cost_report,
    )


def _waits_ns(timing: Timing) -> int:
    """Sum of all waits, block by block: whole columns would double the memory of a large job."""
    total = 0
    for first in range(0, len(timing.end_ns), _BLOCK_ROWS):
        part = slice(first, first + _BLOCK_ROWS)
        waits = timing.end_ns[part] - timing.start_ns[part] - timing.duration_ns[part]
        total += int(waits.sum())
    return total


def header_of(job: Gathering, report: SlicesReport) -> TraceHeader:
    """The header of the result."""
    policies: Counter[str] = Counter()
    sources: set[str] = set()
    waited = 0.0
    for part in job.campaign.slices:
        for header in part.headers:
            waited = max(waited, header.extra.get(CORE_WAIT, 0.0))
            policies.update(header.policies)
            sources.update(header.sources)
    if job.campaign.base is not None and job.campaign.kept:
        sources.update(job.campaign.base.header.sources)
    policies.update(
        {
            "merge.overlap-clamped": report.overlap_clamps,
            "merge.transfer-clamped": report.transfer_clamps,
            "merge.unmatched-kept": report.unmatched,
            "merge.late-virtual-dropped": report.late_virtual,
            "merge.steps-chained": report.chained,
        }
    )
    first = job.campaign.header
    ranks = tuple(job.assembly.ranks)
    return first.model_copy(
        update={
            "kind": TraceKind.CALIBRATED,
            "ranks": ranks,
            "slice": None,
            "clock": (ClockDomain(id=0, ranks=ranks, source="propagated", offset_ns=0),),
            "symmetry": job.campaign.place or None,
            "sources": tuple(sorted(sources)),
            "policies": dict(sorted(policies.items())),
            "extra": {
                **first.extra,
                **({CORE_WAIT: waited} if waited else {}),
                "merge": {"from": "slices", **report.as_dict()},
            },
        }
    )
