"""Run one slice: its ranks are real, the others virtual; write what it took.

A communication whose members are all real takes its time on the real backend. One with virtual
members has none of its own: it is over as soon as the last real member has come, and its transfer
is left to a table or a model (`prismcalib merge --comm-table`), or, when slices are refined, is
what the timeline of the round before says. With assistants it takes the time of a real group of
few, which counts for want of others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import polars as pl

from prismreplay.plan import compile_plan
from prismreplay.run.marks import CORE_WAIT_BOUND, core_wait
from prismreplay.slicing.completeness import require_whole
from prismreplay.slicing.cutting import steps_only
from prismreplay.slicing.fingerprint import KEY
from prismreplay.slicing.task import SliceOutcome, SliceTask
from prismtrace.headers import CORE_WAIT
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, SliceInfo, TransferSource
from prismtrace.trace import Trace, node_schema, open_trace, write_nodes

if TYPE_CHECKING:
    from prismreplay.run.options import Timing
    from prismreplay.run.running import RunOutcome

__all__ = ["perform", "prepare"]


def prepare() -> None:
    """Import what all slices need, torch among it."""
    from prismreplay.collect.pool import preload

    preload()
    importlib.import_module("prismreplay.run.running")


def perform(task: SliceTask) -> SliceOutcome:
    """Run a slice and write it. Call it in a process without other threads.

    Raises:
        SliceError: its ranks did not make the graph's communications.
        ReplayError: see `prismreplay.run.running.run_sandbox`.
    """
    from prismreplay.run.options import RunOptions
    from prismreplay.run.running import run_sandbox

    _stay_on(task.cores)  # and so will the ranks
    execution = task.execution
    graph = open_trace(list(task.graph) if task.arrivals is None else task.arrivals)
    # No temporary folder that Python removes: forked ranks would do so at their end.
    raw = task.output.with_name(f".{task.output.stem}.raw.parquet")
    try:
        ran = run_sandbox(
            task.program,
            graph,
            raw,
            RunOptions(
                sandbox=execution.ranks,
                tensors=task.tensors,
                local_world_size=task.local_world_size,
                log_dir=task.log_dir,
                shown=task.shown,
                quiet_stdout=task.quiet_stdout,
                shm_dir=task.shm_dir,
                assistants=task.assistants,
                comm_table=task.comm_table,
                gpus=task.gpus,
                slice=SliceInfo(
                    index=execution.index,
                    real_ranks=execution.ranks,
                    virtual_ranks_policy="early" if task.arrivals is None else "planned",
                ),
            ),
            _timing(task, graph),
        )
        return _finished(task, graph, open_trace(raw), ran)
    finally:
        with suppress(OSError):
            raw.unlink(missing_ok=True)


def _timing(task: SliceTask, graph: Trace) -> Callable[[], Timing]:
    from prismreplay.run.options import Timing

    def timing() -> Timing:
        if task.timing_true:
            # The ranks are there, and may use all cores; the emulator keeps out of their way.
            _stay_on(task.cores[-1:])
        if task.arrivals is None:
            return Timing()
        return Timing(plan=compile_plan(graph, task.execution.ranks))

    return timing


def _stay_on(cores: Sequence[int]) -> None:
    """Run on these cores; empty: wherever. A core that is gone meanwhile is no reason to fail."""
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def _finished(task: SliceTask, graph: Trace, raw: Trace, ran: RunOutcome) -> SliceOutcome:
    """Write the slice as it is merged: with sources of transfers, and what it was made from."""
    job = open_trace(list(task.graph))
    require_whole(raw.nodes, job, task.execution, task.steps)
    mixed = _is_mixed(_real_groups(ran, raw))
    rows = raw.nodes.with_columns(_source(mixed, task))
    if task.arrivals is not None:
        rows = _with_planned_transfers(rows, mixed, graph)
    waited = core_wait(ran.marks)
    header = raw.header.model_copy(
        update={
            "axes": job.header.axes,
            "symmetry": job.header.symmetry,
            "extra": {
                **raw.header.extra,
                **({CORE_WAIT: round(waited, 4)} if waited > CORE_WAIT_BOUND else {}),
                KEY: {
                    "fingerprint": dict(task.fingerprint),
                    "repeat": task.execution.repeat,
                    "timing_true": task.timing_true,
                },
            },
        }
    )
    done = Trace(header=header, nodes=rows, paths=raw.paths)
    if task.steps is not None:
        header, rows = steps_only(done, task.steps)
    write_nodes(header, rows, task.output)
    counted = rows.select(
        pl.len(), mixed.sum().alias("mixed"), _is_communication().sum().alias("all")
    ).collect()
    nodes, virtual, all_ = counted.row(0)
    summaries = ran.summaries.values()
    return SliceOutcome(
        index=task.execution.index,
        repeat=task.execution.repeat,
        ranks=task.execution.ranks,
        output=task.output,
        nodes=nodes,
        step_ns=_step_times(ran),
        whole_operations=all_ - virtual,
        mixed_operations=virtual,
        wall_s=ran.wall_s,
        peak_memory_bytes=_peak_memory(ran),
        virtual_late=(
            sum(one.late_answers for one in summaries),
            sum(one.late_ns for one in summaries),
        ),
        policies=dict(ran.made.policies),
        core_wait=waited,
    )


# --- which transfers were real -------------------------------------------------------------


def _real_groups(ran: RunOutcome, raw: Trace) -> list[int]:
    """Groups that the real backend performed."""
    numbers = {(group.ranks, group.name): group.id for group in raw.header.groups}
    return [
        numbers[use.ranks, use.name] for use in ran.coordinator.uses.values() if use.real_operations
    ]


def _is_communication() -> pl.Expr:
    return ~pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])


def _is_mixed(real: list[int]) -> pl.Expr:
    """Communications that the hub performed: the others' transfers were measured."""
    return _is_communication() & ~pl.col("group").is_in(real)


def _source(mixed: pl.Expr, task: SliceTask) -> pl.Expr:
    """What times of mixed communications are: a small group's where an assistant took part."""
    kind = node_schema()["transfer_source"]
    none, reduced = (
        pl.lit(source.value).cast(kind) for source in (TransferSource.NONE, TransferSource.REDUCED)
    )
    # Messages between real ranks go through the emulator alone, in a mixed group.
    is_message = pl.col("kind").cast(pl.String).is_in([one.value for one in P2P_KINDS])
    alone = is_message & pl.col("peer").is_in(task.execution.ranks)
    played = pl.lit(task.assistants > 0) & ~alone.fill_null(value=False)
    return (
        pl.when(mixed & played)
        .then(reduced)
        .when(mixed)
        .then(none)
        .otherwise(pl.col("transfer_source"))
        .alias("transfer_source")
    )


def _with_planned_transfers(rows: pl.LazyFrame, mixed: pl.Expr, graph: Trace) -> pl.LazyFrame:
    """Transfers of operations with virtual members, as the graph has them, if it knows any.

    What it does not know, the run has measured again if it has assistants.
    """
    unknown = [TransferSource.NONE.value, TransferSource.REDUCED.value]
    is_reduced = pl.col("transfer_source").cast(pl.String) == TransferSource.REDUCED.value
    is_unknown = pl.col("planned_source").cast(pl.String).is_in(unknown)
    planned = mixed & ~(is_reduced & is_unknown).fill_null(value=False)
    known = graph.nodes.select(
        "rank", "index", planned_ns="transfer_ns", planned_source="transfer_source"
    )
    return (
        rows.join(known, on=["rank", "index"], how="left", maintain_order="left")
        .with_columns(
            transfer_ns=pl.when(planned).then("planned_ns").otherwise("transfer_ns"),
            transfer_source=pl.when(planned).then("planned_source").otherwise("transfer_source"),
        )
        .drop("planned_ns", "planned_source")
    )


# --- numbers -------------------------------------------------------------------------------


def _step_times(ran: RunOutcome) -> tuple[int, ...]:
    """From the end of a step on the last rank to that of the next, less what emulation cost.

    Of GPUs, as these have it.
    """
    if ran.devices:
        from prismreplay.run.results import step_times

        return tuple(step_times(open_trace(ran.output), ran.coordinator.sandbox).values())
    ends: dict[int, int] = {}
    for mark in ran.marks:
        end = mark.end_ns - mark.debt_ns
        ends[mark.step] = max(ends.get(mark.step, end), end)
    times = [ran.origin_ns, *(ends[step] for step in sorted(ends))]
    return tuple(after - before for before, after in pairwise(times))


def _peak_memory(ran: RunOutcome) -> int:
    peaks: dict[int, int] = {}
    for mark in ran.marks:
        peaks[mark.rank] = max(peaks.get(mark.rank, 0), mark.peak_resident_bytes)
    return sum(peaks.values())
