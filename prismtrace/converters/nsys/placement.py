"""Which rank each process of an export is.

An export does not say it. Best first: what the user says, the environment of the program that
was started, the file's name; several processes of a host take consecutive ranks in the order
of their devices, as every launcher gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from prismtrace.converters.archives import is_called
from prismtrace.converters.inputs import rank_in_name
from prismtrace.converters.nsys.session import Session
from prismtrace.converters.rank_trace import RankOptions
from prismtrace.errors import RankError
from prismtrace.ranks import MOST_RANKS

__all__ = ["place_processes", "plain_pid", "world_size"]

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_WORLD = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_HOST = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")


def plain_pid(global_pid: int) -> int:
    """The operating system's number of a process."""
    return global_pid >> 24 & 0xFFFFFF


def place_processes(
    path: Path,
    pids: Sequence[int],
    session: Session,
    options: RankOptions,
    given: int | None,
    counts: Counter[str],
) -> dict[int, int]:
    """The ranks of processes that ran kernels.

    Args:
        path: the export.
        pids: their globalPids, ordered by device.
        session: what it says about itself.
        options: `rank_of_pid` names processes; others of its file are then left out.
        given: rank of the file's only or first process.
        counts: assumptions are counted here.

    Raises:
        RankError: nothing tells, or the user names a process that is not there.
    """
    named = _named(path, pids, options)
    if named:
        counts["dropped-process"] += len(pids) - len(named)
        return named
    if len(pids) == 1:
        (pid,) = pids
        rank = given
        if rank is None:
            rank = session.number(*_RANK)
        if rank is None:
            rank = rank_in_name(path)
        if rank is None:
            raise RankError(
                "the export does not say which rank its process is (no RANK in the environment "
                "of the program, no rank in the file's name)",
                where=str(path),
                hint=f"say it: --rank {quote(path.name)}=N",
            )
        return {pid: _believable(rank, path)}
    counts["assumed-rank-order"] += len(pids)
    first = given
    if first is None:
        host = session.option("node_rank")
        host = session.number(*_HOST) if host is None else host
        first = (host or 0) * len(pids)
    return {pid: _believable(first + place, path) for place, pid in enumerate(pids)}


def _believable(rank: int, path: Path) -> int:
    if not 0 <= rank < MOST_RANKS:
        raise RankError(
            f"rank {rank}; a job has at most {MOST_RANKS} ranks",
            where=str(path),
            hint=f"correct it with --rank {quote(path.name)}=N",
        )
    return rank


def _named(path: Path, pids: Sequence[int], options: RankOptions) -> dict[int, int]:
    named: dict[int, int] = {}
    listed = ", ".join(str(plain_pid(pid)) for pid in pids)
    for key, rank in options.rank_of_pid:
        file, colon, number = key.rpartition(":")
        if colon and not is_called(path, file):
            continue
        fitting = [pid for pid in pids if str(plain_pid(pid)) == number]
        if len(fitting) == 1:
            named[fitting[0]] = _believable(rank, path)
        elif colon or fitting:
            raise RankError(
                f"{'several processes' if fitting else 'no process'} with number {number} ran "
                "kernels",
                where=str(path),
                hint=f"processes that did: {listed}",
            )
    if len(set(named.values())) < len(named):
        raise RankError(
            "two processes are given the same rank",
            where=str(path),
            hint=f"--rank-of-pid gives each a rank of its own; processes: {listed}",
        )
    return named


def world_size(pids: Sequence[int], session: Session) -> int | None:
    """Ranks of the job, where the environment or the launcher's options tell."""
    if len(pids) == 1:
        return session.number(*_WORLD) or None
    hosts, each = session.option("nnodes"), session.option("nproc_per_node")
    return hosts * each or None if hosts and each else None
