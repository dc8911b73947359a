"""Nsight Systems exports (SQLite): a file holds the processes of a host, each a rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from prismtrace.converters.kineto.annotate import annotate
from prismtrace.converters.kineto.names import CommPatterns
from prismtrace.converters.kineto.rank import gpu_issued, refuse_losses, write_rank
from prismtrace.converters.nsys.database import open_database
from prismtrace.converters.nsys.events import read_export
from prismtrace.converters.nsys.placement import place_processes, plain_pid, world_size
from prismtrace.converters.nsys.session import read_session
from prismtrace.converters.nsys.tables import Process
from prismtrace.converters.profile import Profile
from prismtrace.converters.rank_trace import RankFacts, RankOptions, RankTrace

__all__ = ["convert_processes"]


def convert_processes(
    path: Path, stem: Path, options: RankOptions, given_rank: int | None = None
) -> tuple[RankTrace, ...]:
    """Read an export and write the nodes of each process that ran kernels.

    Args:
        path: the SQLite file, gzipped or not.
        stem: what the names of the Parquet files begin with.
        options: how to read.
        given_rank: rank of its only or first process.

    Raises:
        TraceError: the file cannot be read or used; see the subclasses.
    """
    counts: Counter[str] = Counter()
    patterns = CommPatterns.parse(options.comm_kernels)
    scratch = stem.with_name(f"{stem.name}-unpacked.sqlite")
    with open_database(path, scratch, counts, recover=options.recover) as database:
        session = read_session(database, counts)
        export = read_export(database, path, session.epoch_ns, options.keep_args, patterns, counts)
    pids = [process.pid for process in export.processes]
    rank_of = place_processes(path, pids, session, options, given_rank, counts)
    size = world_size(pids, session)
    traces: list[RankTrace] = []
    for process in export.processes:
        if process.pid not in rank_of:
            continue
        # What was counted in the file as a whole is told once.
        own = counts if not traces else Counter[str]()
        rank = rank_of[process.pid]
        target = stem.with_name(f"{stem.name}-{process.pid}.parquet")
        profile, groups = export.profile(process.pid)
        facts = RankFacts(
            rank=rank,
            world_size=size,
            host=session.host,
            # Each session measures for itself how its times relate to the wall clock.
            clock=f"{session.host} {path.name}",
            groups=groups,
            source="nsys",
        )
        trace = _convert(profile, facts, target, options, own)
        traces.append(
            replace(
                trace,
                process=_described(process, path) if len(pids) > 1 else None,
                pid=plain_pid(process.pid),
                pids=tuple(plain_pid(pid) for pid in pids),
            )
        )
    return tuple(traces)


def _convert(
    profile: Profile, facts: RankFacts, target: Path, options: RankOptions, of_file: Counter[str]
) -> RankTrace:
    counts = Counter(profile.counts) + of_file
    refuse_losses(replace(profile, counts=dict(counts)), options)
    ops = gpu_issued(profile, options, counts)
    annotate(ops, profile, options.step_from, counts)
    return write_rank(profile, ops, facts, target, options, counts)


def _described(process: Process, path: Path) -> str:
    return f"{plain_pid(process.pid)} on device {process.device}, {path.name}"
