"""Generate a recorded run: in memory, or streaming into one file per block of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from prismcalib.graph import Int64Array
from prismcalib.propagation import propagate
from prismcalib.synth.assembly import Job
from prismcalib.synth.program import Program
from prismcalib.synth.spec import JobSpec
from prismcalib.synth.times import own_times
from prismtrace.schema import TraceKind
from prismtrace.trace import Trace, conform, write_nodes

__all__ = ["generate", "step_ends_ns", "write_job"]


def generate(spec: JobSpec) -> Trace:
    """The job of a `spec` as a recorded trace in memory; the first operations start at 0.

    For jobs up to some million rows; `write_job` writes the same rows without holding them.
    """
    job = Job(spec)
    nodes = pl.concat(
        [
            _timed(job, program, job.layout.stage_ranks(stage), times)
            for stage, (program, times) in enumerate(_stage_times(job))
        ],
        rechunk=True,
    )
    lazy = conform(nodes.lazy(), nodes.schema, where="synth")
    return Trace(header=job.header(TraceKind.RECORDED), nodes=lazy)


def write_job(
    spec: JobSpec,
    folder: str | os.PathLike[str],
    ranks_per_file: int = 128,
    *,
    kind: Literal["recorded", "bare"] = "recorded",
) -> list[Path]:
    """Write what `generate` returns as files of `ranks_per_file` ranks; returns their paths.

    Rows are made file by file, but a recorded job keeps start and end of every row in memory,
    16 bytes a row, and some 70 bytes for every row of one step.

    Args:
        spec: the job.
        folder: is made if need be; files are `ranks-00000-00127.parquet` and so on.
        ranks_per_file: fewer at the end of a pipeline stage.
        kind: `bare` leaves out times.

    Raises:
        OutputError: a file cannot be written.
    """
    job = Job(spec)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    header = job.header(TraceKind(kind))
    digits = len(str(spec.world_size - 1))
    paths = []
    every = _stage_times(job) if kind == "recorded" else [(p, None) for p in job.programs]
    for stage, (program, times) in enumerate(every):
        ranks = job.layout.stage_ranks(stage)
        for first in range(ranks.start, ranks.stop, ranks_per_file):
            block = range(first, min(first + ranks_per_file, ranks.stop))
            path = target / f"ranks-{block[0]:0{digits}}-{block[-1]:0{digits}}.parquet"
            if times is None:
                rows = job.frame(program, np.array(block)).with_columns(
                    real=pl.lit(value=False), mem_bytes=None, mem_peak_bytes=None
                )
            else:
                rows = _timed(job, program, block, times)
            write_nodes(header, rows.lazy(), path)
            paths.append(path)
    return paths


def step_ends_ns(spec: JobSpec) -> Int64Array:
    """int64[steps], when each step's last operation ends; the first step starts at 0.

    `spec` is the job.
    """
    job = Job(spec)
    stages = _stage_times(job)
    ends: Int64Array = np.max([times.end_ns.max(axis=(0, 2)) for _, times in stages], axis=0)
    return ends


@dataclass(frozen=True, eq=False)
class _Times:
    """True times of the R ranks of a stage: int64[R, steps, T]."""

    start_ns: Int64Array
    end_ns: Int64Array


def _stage_times(job: Job) -> list[tuple[Program, _Times]]:
    """Propagate the job step by step, so that only one step's graph is in memory."""
    spec = job.spec
    size = spec.ranks_per_stage
    shapes = [(size, spec.steps, program.rows) for program in job.programs]
    stages = [_Times(np.empty(shape, np.int64), np.empty(shape, np.int64)) for shape in shapes]
    ranks = np.arange(spec.world_size)
    graph = job.graph(ranks, 1).graph
    for step in range(spec.steps):
        duration, lags, release = graph.duration_ns.copy(), None, None
        if spec.launch_gap_ns:
            lags = np.empty(len(graph.dep_rows), np.int64)
        if step:
            release = np.zeros(graph.rows, np.int64)
        for rows, program, members, times in _blocks(job, stages):
            own = own_times(job.layout, program, members, step)
            duration[rows] = own.duration_ns.ravel()
            first = rows.start + program.rows * np.arange(size)
            if release is not None:
                tails = times.end_ns[:, step - 1, program.rows - program.tails]
                release[first] = tails.max(axis=1)
            if own.gap_ns is not None and lags is not None:
                counts = np.diff(program.dep_offsets)
                edges = graph.dep_offsets[[rows.start, rows.stop]]
                lags[slice(*edges)] = np.repeat(own.gap_ns, counts, axis=1).ravel()
                if release is not None:
                    release[first] += own.gap_ns[:, 0]
        timing = propagate(
            replace(graph, duration_ns=duration, dep_lag_ns=lags, release_ns=release)
        )
        for rows, _, _, times in _blocks(job, stages):
            times.start_ns[:, step] = timing.start_ns[rows].reshape(size, -1)
            times.end_ns[:, step] = timing.end_ns[rows].reshape(size, -1)
    return list(zip(job.programs, stages, strict=True))


def _blocks(job: Job, stages: list[_Times]) -> Iterator[tuple[slice, Program, Int64Array, _Times]]:
    """Graph rows of one step, program, ranks and times of every stage."""
    row = 0
    for stage, (program, times) in enumerate(zip(job.programs, stages, strict=True)):
        members = np.array(job.layout.stage_ranks(stage))
        after = row + program.rows * len(members)
        yield slice(row, after), program, members, times
        row = after


def _timed(job: Job, program: Program, ranks: range, times: _Times) -> pl.DataFrame:
    """Rows of some ranks of a stage, with their true times."""
    first = ranks.start - job.layout.stage_ranks(program.stage).start
    part = slice(first, first + len(ranks))
    start = times.start_ns[part].ravel()
    return job.frame(program, np.array(ranks)).with_columns(
        start_ns=pl.Series(start), dur_ns=pl.Series(times.end_ns[part].ravel() - start)
    )
