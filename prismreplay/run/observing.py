"""What the process of a sandbox rank tells the hub beside its communications: steps, and the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prismreplay.collect.handover import Place
from prismreplay.collect.pool import Observed
from prismreplay.run.clock import RunClock
from prismreplay.run.marks import Memory, StepMark, core_times
from prismreplay.run.spinning import Spinner

__all__ = ["mark_steps", "observed"]


def observed(
    recorder: Any, writer: Any, spinner: Spinner, make_role: Callable[[Any, Place], Any]
) -> Observed:
    """A rank whose role tells its summary at the end.

    Args:
        recorder: makes nodes of what the rank does.
        writer: of the recorder.
        spinner: knows how many ranges had another pace.
        make_role: makes the rank's `SandboxRole`.
    """
    roles: list[Any] = []

    def make(connection: Any, place: Place) -> Any:
        role = make_role(connection, place)
        roles.append(role)
        return role

    def finish() -> None:
        recorder.finish()
        roles[0].tell_summary(spinner.entered)

    return Observed(
        recorder,
        finish=finish,
        flush=writer.flush,
        step=lambda: recorder.position.step,
        role=make,
    )


def mark_steps(
    rank: int, recorder: Any, clock: RunClock, connection: Any, memory: Any = None
) -> None:
    """Tell the hub of every step that is over, with what `memory` says; see `Memory`."""
    memory, position = memory or Memory(), recorder.position
    over = position.step_over

    def mark() -> None:
        over()
        with clock.at_its_own_pace():
            tell()

    def tell() -> None:
        begun = clock.machine()
        resident, peak, allocated = memory.read()
        on_core, queued = core_times()
        mark = StepMark(
            rank=rank,
            step=position.step_done,
            end_ns=begun,
            debt_ns=clock.debt_ns,
            late_ns=clock.late_ns,
            handing_ns=clock.handing_ns,
            resident_bytes=resident,
            peak_resident_bytes=peak,
            allocated_bytes=allocated,
            on_core_ns=on_core,
            queued_ns=queued,
        )
        connection.tell(("step", tuple(mark)))
        clock.handed_over(clock.machine() - begun)

    position.step_over = mark
