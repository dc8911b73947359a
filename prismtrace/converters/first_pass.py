"""First pass of a conversion: each file is read once, alone, here or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from prismtrace import __version__
from prismtrace.converters.archives import is_called
from prismtrace.converters.files import convert_file
from prismtrace.converters.kept import load_part, make_part, part_key
from prismtrace.converters.rank_trace import RankOptions, RankTrace
from prismtrace.converters.workers import run_tasks
from prismtrace.errors import RankError

__all__ = ["Task", "read_files", "read_kept", "require_processes", "traces_by_rank"]

Task = tuple[Path, RankOptions, int | None]
"""A file, how to read it, and the rank that the user gave it."""

Results = Generator[tuple[RankTrace, ...], None, None]
"""What each file holds, in the order of the files."""


def read_files(tasks: Sequence[Task], folder: Path, jobs: int) -> Results:
    """Read files by `jobs` processes at a time (0: one per core); nodes go into `folder`."""
    calls = [
        (path, folder / str(number), options, rank)
        for number, (path, options, rank) in enumerate(tasks)
    ]
    return run_tasks(convert_file, calls, _processes(jobs, calls))


def read_kept(tasks: Sequence[Task], folder: Path, jobs: int, dask: str | None) -> Results:
    """The same by way of parts in `folder` that outlive this process.

    Parts that are there are not made again. The workers of a Dask cluster make the others, if
    its address is given.
    """
    keys = [part_key(*task) for task in tasks]
    calls = [
        (path.absolute(), folder, key, _absolute(options), rank, __version__)
        for key, (path, options, rank) in zip(keys, tasks, strict=True)
    ]
    if dask is None:
        made = run_tasks(make_part, calls, _processes(jobs, calls))
    else:
        from prismtrace.converters.clusters import run_on_cluster

        made = run_on_cluster(make_part, calls, dask)
    with closing(made):
        for key, (path, _, _), _ in zip(keys, tasks, made, strict=True):
            yield load_part(path, folder, key)


def _absolute(options: RankOptions) -> RankOptions:
    """The same for a process in another folder."""
    beside = tuple(
        replace(found, path=str(Path(found.path).absolute())) for found in options.execution_traces
    )
    return replace(options, execution_traces=beside)


def _processes(jobs: int, tasks: Sequence[object]) -> int:
    return min(jobs or os.cpu_count() or 1, len(tasks))


def traces_by_rank(
    results: Results, paths: Sequence[Path], progress: Callable[[int], None] | None
) -> list[RankTrace]:
    """All ranks, ascending; `progress` is called with the size of each file.

    Raises:
        RankError: a rank is in two files.
    """
    done = progress or (lambda _: None)
    seen: dict[int, RankTrace] = {}
    # Closed here, not by the garbage collector, in which Ctrl-C would be lost.
    with closing(results):
        for path, found in zip(paths, results, strict=True):
            for trace in found:
                if trace.rank in seen:
                    raise RankError(
                        f"rank {trace.rank} is in two files",
                        where=f"{seen[trace.rank].path} and {trace.path}",
                        hint="give one file per rank, or set ranks with --rank FILE=N",
                    )
                seen[trace.rank] = trace
            done(path.stat().st_size)
    return [seen[rank] for rank in sorted(seen)]


def require_processes(traces: Sequence[RankTrace], options: RankOptions) -> None:
    """Refuse ranks that the user gave to processes of which no file tells.

    Raises:
        RankError: see above.
    """
    for process, rank in options.rank_of_pid:
        file, _, number = process.rpartition(":")
        if not any(
            (trace.rank, str(trace.pid)) == (rank, number)
            and (not file or is_called(trace.path, file))
            for trace in traces
        ):
            raise RankError(
                f"no file has a process {process} that ran kernels",
                where=f"--rank-of-pid {process}={rank}",
                hint=_processes_of(traces),
            )


def _processes_of(traces: Sequence[RankTrace]) -> str:
    listed = {trace.path: trace.pids for trace in traces if trace.pids}
    if not listed:
        return "it names processes of Nsight Systems exports; other files: --rank FILE=N"
    return "processes that did: " + "; ".join(
        f"{', '.join(map(str, pids))} in {path.name}" for path, pids in listed.items()
    )
