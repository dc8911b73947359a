"""One trace out of the spools that the ranks of a job wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prismtrace.errors import InputFileError
from prismtrace.input_files import PathLike, files_of, unreadable
from prismtrace.output import refuse_inputs
from prismtrace.recorded_job import LastCommunication, RecordedJob

if TYPE_CHECKING:
    import polars as pl

    from prismtrace.schema import TraceHeader

__all__ = ["AssembleReport", "LastCommunication", "assemble"]


@dataclass(frozen=True)
class AssembleReport:
    """What became of the spools.

    `cut_ranks` were ended before they closed their spool (killed, crashed); then `dropped`
    rows that do not belong to steps finished by all ranks were left out, and `last` says where
    every rank stood. `policies` counts what was assumed, as in the trace's header.
    """

    output: Path
    """The trace."""
    world_size: int
    """Ranks of the job, with a spool or without."""
    ranks: tuple[int, ...]
    """Ranks that have a spool."""
    missing_ranks: tuple[int, ...]
    """Ranks of the world that have none."""
    steps: tuple[int, ...]
    """Numbers of the steps in the trace."""
    nodes: int
    """Rows of the trace."""
    groups: int
    """How many process groups it lists."""
    cut_ranks: tuple[int, ...] = ()
    dropped: int = 0
    policies: dict[str, int] = field(default_factory=dict)
    last: tuple[LastCommunication, ...] = ()


def assemble(
    spools: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    header: TraceHeader | None = None,
    axis_of: Callable[[str, str], str | None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> AssembleReport:
    """Write one trace of all ranks' spools.

    A rank whose spool has no end was cut off, or says that the program failed: then only the
    steps that all ranks finished are kept, if there is any.

    Args:
        spools: a folder of them, a pattern, a file or a list of files.
        output: the trace.
        header: what is known about the job beyond the spools; its ranks, streams, clock and
            steps are made here, groups that ranks joined are added to its own. By default a
            recorded trace.
        axis_of: the parallel axis that a group serves, from its name and description; sizes
            of axes that are equal on all groups go into the header.
        progress: called with 1 after each rank.

    Raises:
        InputFileError: no spool is there, or one is unreadable.
        RankError: two spools are of one rank, or a rank is outside the world.
        ValidationError: recorded values break the format; all rows are named by rank and index.
        OutputError: the trace cannot be written.
    """
    import polars as pl

    from prismtrace.converters.parts import disk_errors, workspace
    from prismtrace.queueing import begun_later
    from prismtrace.spool import read_spool
    from prismtrace.trace import write_nodes

    target, paths = Path(output), _spool_files(spools)
    refuse_inputs(target, paths)
    job = RecordedJob()
    with workspace(target) as folder:
        for path in paths:
            spool = read_spool(path)
            frame = job.take(spool)
            with disk_errors(target):
                frame.write_parquet(folder / f"{spool.rank}.parquet", compression="lz4")
            (progress or (lambda _: None))(1)
        job.check_ranks(header)
        made = job.header(header, axis_of)
        parts = {
            rank: job.complete(rank, pl.scan_parquet(folder / f"{rank}.parquet", glob=False), made)
            for rank in sorted(job.ranks)
        }
        if job.queued:
            later = begun_later(pl.concat(parts.values()))
            job.counts["queued-communication"] += later.height
            parts = {rank: _moved(rows, later, rank) for rank, rows in parts.items()}
        made = made.model_copy(update={"policies": job.policies(header)})
        with disk_errors(target):
            write_nodes(made, pl.concat(parts.values()), target)
    return AssembleReport(
        output=target,
        world_size=made.world_size,
        ranks=made.ranks,
        missing_ranks=tuple(sorted(set(range(made.world_size)) - set(made.ranks))),
        steps=made.steps,
        nodes=sum(job.ranks.values()) - job.dropped,
        groups=len(made.groups),
        cut_ranks=tuple(sorted(job.cut)),
        dropped=job.dropped,
        policies=made.policies,
        last=tuple(job.last[rank] for rank in sorted(job.last)) if job.cut else (),
    )


def _spool_files(spools: PathLike | Sequence[PathLike]) -> list[Path]:
    from prismtrace.spool import SPOOL_SUFFIX

    given = [spools] if isinstance(spools, str | os.PathLike) else list(spools)
    found: list[Path] = []
    for item in given:
        try:
            found += files_of(
                item,
                (SPOOL_SUFFIX,),
                what=f"{SPOOL_SUFFIX} file",
                hint="name the folder that the ranks wrote their spools into",
            )
        except OSError as error:
            raise unreadable(item, error) from error
    if not found:
        raise InputFileError("no spool was given", hint="name at least one")
    return found


def _moved(rows: pl.LazyFrame, later: pl.DataFrame, rank: int) -> pl.LazyFrame:
    """A rank's rows with the times of those that began later."""
    import polars as pl

    mine = later.lazy().filter(pl.col("rank") == rank).drop("rank")
    found = rows.join(mine, on="index", how="left", maintain_order="left", suffix="_later")
    times = ("start_ns", "dur_ns")
    return found.with_columns(
        pl.coalesce(f"{name}_later", name).alias(name) for name in times
    ).drop([f"{name}_later" for name in times])
