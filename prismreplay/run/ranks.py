"""A sandbox rank in its own process: what makes its trace, and its role.

One that computes on a GPU has those of `prismreplay.run.device_ranks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prismreplay.collect.handover import Place
from prismreplay.collect.pool import Observed
from prismreplay.run.clock import RunClock
from prismreplay.run.holding import Holder
from prismreplay.run.ledger import Ledger
from prismreplay.run.observing import mark_steps, observed
from prismreplay.run.options import RunOptions
from prismreplay.run.spinning import Spinner
from prismtrace.recorder import SpanWriter

if TYPE_CHECKING:
    from prismreplay.run.role import SandboxRole

__all__ = ["observe_rank"]


def observe_rank(
    folder: Path, options: RunOptions, world_size: int, ledger: Ledger, rank: int
) -> Observed:
    """What turns a rank's communications into its trace, and its role; called in the rank.

    `options.sandbox` are the sandbox ranks of this host: only those communicate for real.
    """
    if options.gpus:
        from prismreplay.run.device_ranks import observe_device_rank

        return observe_device_rank(folder, options, world_size, ledger, rank)
    from prismreplay.run.role import SandboxRole
    from prismreplay.runtime.annotations import make_recorder

    options.tensors.prepare_rank()
    clock = RunClock(ledger.machine)
    Holder(clock.machine).hold_until(ledger.origin_ns)
    writer = SpanWriter(folder / f"rank{rank}.spool", rank=rank, world_size=world_size)
    recorder = make_recorder(writer, clock=clock.now)
    spinner = Spinner(options.spins, recorder.position, clock)

    def make_role(connection: Any, place: Place) -> SandboxRole:
        role = SandboxRole(
            connection,
            place,
            rank=rank,
            sandbox=options.sandbox,
            clock=clock,
            ledger=ledger,
            recorder=recorder,
            real_groups=options.real_groups and options.check is None,
            assistants=options.assistants,
            check=options.check is not None,
            contends=options.comm_table is not None,
        )
        mark_steps(rank, recorder, clock, connection)
        return role

    return observed(recorder, writer, spinner, make_role)
