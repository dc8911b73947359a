"""Slices of a job, each measured in an execution of its own, become one timeline of all ranks.

    files  --measure-->  durations, transfers, gaps  --place-->  one graph  --propagate-->  times

Nothing but durations is taken from a slice.  When things happen follows from the graph of the
whole job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prismcalib.calibrated import Calibrated
from prismcalib.campaign import open_campaign
from prismcalib.gathering import Gathering
from prismcalib.graph import Graph
from prismcalib.measuring import Clocks
from prismcalib.propagation import Engine, Timing, critical_steps, propagate, slack
from prismcalib.slice_options import SliceOptions
from prismcalib.slices_report import SlicesReport, header_of, report_of
from prismcalib.waiting import WaitRules, apply_wait_rules
from prismtrace.trace import PathLike

__all__ = ["SliceOptions", "SlicesReport", "merge_slices"]


def merge_slices(
    paths: Sequence[PathLike],
    options: SliceOptions,
    *,
    engine: Engine = "auto",
    clocks: Clocks,
    rules: WaitRules,
    check: Callable[[Graph, Timing, NDArray[np.int64]], None] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[Calibrated, SlicesReport]:
    """Merge the files of a campaign; see `prismcalib.merge` for arguments and errors.

    `check` is called with the propagated result, `advance` with every file done.
    """
    campaign = open_campaign(
        paths,
        bare=options.bare,
        base=options.base,
        missing=options.missing,
        unfold=options.unfold,
    )
    work = Gathering(campaign, options, clocks)
    for part, executions in work.executions():
        work.add(part, executions)
        advance(len(executions))
    work.add_kept()
    work.add_untimed()
    work.finish_costs()
    graph = work.assembly.graph(work.label)
    instances = graph.instances
    if rules:
        result = work.result(graph, _no_timing(graph), np.zeros(graph.rows, np.bool_))
        columns = ["rank", "kind", "group", "seq", "peer", "bytes"]
        rows = result.table()
        extra = [name for name in ("x_send_bytes",) if name in result.schema]
        graph = apply_wait_rules(
            graph, rows.select(*columns, *extra).collect(), campaign.header, rules
        )
    timing = propagate(graph, engine)
    late = slack(graph, timing, engine)
    if check is not None:
        check(graph, timing, late)
    steps = critical_steps(graph, timing)
    critical = np.zeros(graph.rows, np.bool_)
    critical[[reached for reached, _ in steps]] = True
    report = report_of(work, graph, instances, timing, steps)
    result = work.result(graph, timing, critical, late)
    return replace(result, header=rules.note_in(header_of(work, report))), report


def _no_timing(graph: Graph) -> Timing:
    nothing = np.zeros(graph.rows, np.int64)
    return Timing(
        start_ns=nothing, end_ns=nothing, duration_ns=graph.duration_ns, order=np.empty(0, np.int32)
    )
