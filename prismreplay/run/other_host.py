"""The command on a host that is not the first: its sandbox ranks run here, the hub is elsewhere."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prismreplay.collect import stale
from prismreplay.collect.handover import Place
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.messages import Channel
from prismreplay.collect.pool import Job, RankProcess, preload, start_rank
from prismreplay.collect.programs import ProgramCall
from prismreplay.collect.surroundings import limit_of_open_files, run_folder, uninterrupted
from prismreplay.run.hub import serve_store
from prismreplay.run.ledger import Ledger
from prismreplay.run.options import RunOptions
from prismreplay.run.ranks import observe_rank
from prismreplay.run.relaying import ClockOffset, relay_ranks

__all__ = ["run_elsewhere"]


def run_elsewhere(
    program: ProgramCall,
    world_size: int,
    options: RunOptions,
    channels: dict[int, Channel],
    log_dir: Path,
) -> None:
    """Run the sandbox ranks of this host to their end; what they record goes to the hub.

    Args:
        program: what each rank runs.
        world_size: of the job.
        options: as on the first host, whose sandbox ranks are those of all hosts.
        channels: connections to the hub, by rank of this host.
        log_dir: where the output of the ranks goes.

    Raises:
        ProgramError: the program cannot be started.
        RankFailedError: a rank of this host failed, or the hub ended it.
        OutputError: logs cannot be written.
    """
    here = tuple(channels)
    program.check()
    logs = RankLogs(log_dir, world_size, options.shown or (), options.quiet_stdout)
    logs.prepare()
    stale.clean()
    with run_folder() as folder:
        ledger, offset = Ledger(here), ClockOffset()
        ledger.machine = offset.now
        local = replace(options, sandbox=here)
        job = Job(
            program=program,
            world_size=world_size,
            local_world_size=options.local_world_size or world_size,
            run=folder.name,
            place=Place(options.shm_dir),
            observe=functools.partial(observe_rank, folder, local, world_size, ledger),
        )
        preload()
        with limit_of_open_files(len(here)) as limits:
            ranks: list[RankProcess] = []
            outputs: list[int] = []
            try:
                for rank in here:
                    streams, reads = logs.open(rank)
                    outputs += reads
                    open_here = [n for one in ranks for n in (one.channel.fileno(), one.pidfd)]
                    open_here += [one.fileno() for one in channels.values()]
                    started = start_rank(
                        job.limited(limits), rank, streams, [*open_here, *logs.descriptors]
                    )
                    ranks.append(started)
                stale.note_groups(folder, [one.pid for one in ranks])
                store = serve_store() if len(here) > 1 else None
                if store is not None:
                    ledger.store_port = store[1]
                relay_ranks(
                    ranks,
                    channels,
                    ledger=ledger,
                    offset=offset,
                    place=job.place,
                    folder=folder,
                    logs=logs,
                    outputs=outputs,
                )
            finally:
                with uninterrupted():
                    _end(ranks)


def _end(ranks: list[RankProcess]) -> None:
    """Nothing of this host's ranks is left."""
    import os
    import signal

    for one in ranks:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(one.pid, 0)
