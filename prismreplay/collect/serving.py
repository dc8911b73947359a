"""The coordinator's process: sockets and processes of ranks on one side, `Coordinator` on the other.

One thread, one loop: read what ranks say, let the coordinator decide, send what it answers.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Sequence

from prismreplay.collect import stale
from prismreplay.collect.coordinator import Coordinator
from prismreplay.collect.gpu_turns import GpuTurns
from prismreplay.collect.handover import Parcel
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.messages import Message, unpack_op
from prismreplay.collect.pool import RankProcess
from prismreplay.collect.questions import Sent
from prismreplay.collect.watching import IdleWatch, MemoryWatch, cpu_seconds
from prismreplay.errors import RankFailedError
from prismreplay.runtime.exits import told_end
from prismreplay.runtime.operations import Group
from prismtrace.errors import PrismError

__all__ = ["Service"]

_TICK_SECONDS = 0.5
_STOP_SECONDS = 1.0
"""How long ranks may take to write down what they have, once they are told to stop."""
_SURE_SECONDS = 5.0
"""How long threads beside blocked ones may stay silent before it counts as a deadlock."""
_SILENT_SECONDS = 30.0
_DISPUTE_SECONDS = 5.0
"""How long a third rank has to tell which of two that differ is wrong."""


class Service:
    """Runs the ranks to their end.

    Args:
        coordinator: knows what to do.
        ranks: their processes, which wait for their first turn.
        logs: their output.
        progress: told twice a second how many ranks have ended, and what else there is to say.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        ranks: Sequence[RankProcess],
        logs: RankLogs,
        progress: Callable[[int, str], None] | None = None,
    ) -> None:
        self.memory = MemoryWatch()
        self.largest_rank_bytes = 0
        self._coordinator = coordinator
        self._alive = {one.rank: one for one in ranks}
        self._logs = logs
        self._progress = progress
        self._idle = IdleWatch()
        self._failures: dict[int, Message] = {}
        self._gpus: GpuTurns | None = None
        self._held: dict[int, list[Sent]] = {}
        self._turn_of: dict[int, int] = {}
        """The last turn in which a rank was let onto its GPU, as `Turns.taken` counts them."""
        """What is to be sent to ranks once they are on their GPU."""
        self._selector = selectors.DefaultSelector()
        self._silent_since = time.monotonic()
        self._told_silence = False
        self._told_standing = ""
        self._disputed_since: float | None = None
        for one in ranks:
            self._selector.register(one.channel, selectors.EVENT_READ, (self._hear, one))
            self._selector.register(one.pidfd, selectors.EVENT_READ, (self._bury, one))

    def use_gpus(self, gpus: GpuTurns) -> None:
        """Let ranks compute only while their memory is on their GPU."""
        self._gpus = gpus
        self._selector.register(gpus, selectors.EVENT_READ, (self._note_move, None))

    def tell(self, rank: int, message: Message) -> None:
        """Send a message to a rank; one that has just died is noticed by its process."""
        one = self._alive.get(rank)
        if one is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                one.channel.send(message)

    def watch_output(self, descriptors: Sequence[int]) -> None:
        """Pass on what comes out of these pipes."""
        for descriptor in descriptors:
            self._selector.register(descriptor, selectors.EVENT_READ, (self._pump, descriptor))

    def run(self) -> None:
        """Until all ranks have ended.

        Raises:
            RankFailedError: one of them failed.
            DeadlockError: they cannot go on.
            MismatchError: their communications do not fit.
        """
        for rank in self._alive:
            self._coordinator.begin(rank)
        next_tick = time.monotonic() + _TICK_SECONDS
        while not self._coordinator.finished:
            self._coordinator.grant()
            self._send()
            self._let_in()
            if self._coordinator.stuck:
                self._get_unstuck()
                continue
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                handle, what = key.data
                handle(what)
            now = time.monotonic()
            if now >= next_tick:
                self._tick(now)
                next_tick = now + _TICK_SECONDS

    def stop(self) -> None:
        """End all ranks that are left: politely for a second, then at once. Never fails."""
        for one in self._alive.values():
            with contextlib.suppress(OSError):
                one.channel.send(("stop", 0))
        deadline = time.monotonic() + _STOP_SECONDS
        while self._alive and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                handle, what = key.data
                if handle == self._pump:
                    self._pump(what)
            self._reap(block=False)
        stale.end_groups([one.pid for one in self._alive.values()])
        self._reap(block=True)
        self._selector.close()
        if self._gpus is not None:
            self._gpus.close()
        self._logs.close()

    # --- events -----------------------------------------------------------------------

    def _hear(self, one: RankProcess) -> None:
        """Read what a rank says."""
        try:
            messages = one.channel.receive_available()
        except EOFError:
            with contextlib.suppress(KeyError):
                self._selector.unregister(one.channel)
            return
        self._idle.forget(one.rank)
        self._silent_since = time.monotonic()
        for message, file in messages:
            self._handle(one.rank, message, file)

    def _handle(self, rank: int, message: Message, file: int | None) -> None:
        to = self._coordinator
        name = message[0]
        if name == "submit":
            _, ticket, packed, data, waits = message
            op = unpack_op(packed, to.groups_of(rank))
            nbytes = sum(spec.nbytes for spec in op.inputs)
            to.submit(rank, ticket, op, Parcel(data, file, nbytes), waits=waits)
        elif name == "wait":
            to.wait(rank, *message[1:])
        elif name == "poll":
            to.poll(rank, *message[1:])
        elif name == "store":
            to.ask_store(rank, *message[1:])
        elif name == "join":
            to.join(rank, *_group(message))
        elif name == "mirrored":
            to.counts.mirrored += 1
        elif name in ("memory", "trimmed", "spilled"):
            if self._gpus is not None:
                self._gpus.hear(rank, message)
        elif name == "failed":
            self._failures[rank] = message
            raise self._failure(rank, 1)
        else:
            raise ValueError(f"rank {rank} says {name!r}")

    def _bury(self, one: RankProcess) -> None:
        """A rank's process has ended."""
        with contextlib.suppress(KeyError):
            # It may have said something before.
            self._selector.get_key(one.channel)
            self._hear_all(one)
        status = self._collect_status(one, os.WNOHANG)
        if status is None:
            return
        code = os.waitstatus_to_exitcode(status)
        if code != 0:
            raise self._failure(one.rank, code)
        self._coordinator.end(one.rank, code)

    def _hear_all(self, one: RankProcess) -> None:
        while True:
            try:
                messages = one.channel.receive_available()
            except EOFError:
                return
            if not messages:
                return
            for message, file in messages:
                self._handle(one.rank, message, file)

    def _pump(self, descriptor: int) -> None:
        if not self._logs.pump(descriptor):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(descriptor)

    def _send(self) -> None:
        outbox = self._coordinator.outbox
        while outbox:
            sent = outbox.popleft()
            if self._gpus is None:
                self._deliver(sent)
            elif sent.rank not in self._held and self._may_go_on(self._gpus, sent.rank):
                self._gpus.take_turn(sent.rank)
                self._deliver(sent)
            elif sent.rank in self._alive:
                self._held.setdefault(sent.rank, []).append(sent)
                self._gpus.ask(sent.rank)

    def _deliver(self, sent: Sent) -> None:
        one = self._alive.get(sent.rank)
        if one is None:
            return
        file = None if sent.parcel is None else sent.parcel.file
        # A rank that has just died is noticed by its process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            one.channel.send(sent.message, file)

    # --- GPUs -------------------------------------------------------------------------

    def _may_go_on(self, gpus: GpuTurns, rank: int) -> bool:
        """Whether `rank` is on its GPU; and, in a new turn, whether it may grow there."""
        turns = self._coordinator.turns
        is_new = self._turn_of.get(rank) != turns.taken[rank]
        if not gpus.is_in(rank) or (is_new and not gpus.has_room(rank, turns.running)):
            return False
        self._turn_of[rank] = turns.taken[rank]
        return True

    def _let_in(self) -> None:
        """Send what was held back for ranks that are on their GPU now."""
        if self._gpus is None:
            return
        to = self._coordinator
        for rank in self._gpus.step(to.turns.running, to.lent, to.awaited):
            self._idle.forget(rank)
            self._turn_of[rank] = to.turns.taken[rank]
            for sent in self._held.pop(rank, ()):
                self._deliver(sent)

    def _note_move(self, _: None) -> None:
        """A move has ended; `_let_in` sees to it."""

    # --- time -------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        dispute = self._coordinator.dispute
        if dispute is not None:
            self._disputed_since = self._disputed_since or now
            if now - self._disputed_since > _DISPUTE_SECONDS:
                raise dispute
        turns = self._coordinator.turns
        running = [
            (rank, self._alive[rank].pid)
            for rank in turns.running
            if rank in self._alive and rank not in self._held
        ]
        idle = self._idle.idle(running, now)
        if turns.ready:
            for rank in idle:
                self._coordinator.lend(rank)
        if not self._told_silence and now - self._silent_since > _SILENT_SECONDS and idle:
            self._told_silence = True
            print(
                f"note: rank {idle[0]} neither computes nor communicates, for "
                f"{_SILENT_SECONDS:.0f} s now; its output is in {self._logs.path(idle[0])}",
                file=sys.stderr,
            )
            self.tell_standing()
        self.memory.sample([one.pid for one in self._alive.values()], now)
        if self._progress is not None:
            done = self._coordinator.counts.communications
            self._progress(len(self._coordinator.ended), f"{done:,} communications")

    def tell_standing(self) -> None:
        """Print who waits for whom, if nobody has said anything for some seconds; once."""
        standing = self._coordinator.standing()
        if standing == self._told_standing:
            return
        if standing and time.monotonic() - self._silent_since > _SURE_SECONDS:
            self._told_standing = standing
            print(standing, file=sys.stderr)

    def _get_unstuck(self) -> None:
        """Nobody can go on: let a wait with a time limit fail, or say who waits for whom."""
        if self._coordinator.unsure and self._somebody_speaks():
            return
        if self._coordinator.time_out():
            return
        raise self._coordinator.dispute or self._coordinator.deadlock()

    def _somebody_speaks(self) -> bool:
        """Wait for threads that are not blocked; False if they do not communicate."""
        deadline = time.monotonic() + _SURE_SECONDS
        used = None
        while time.monotonic() < deadline:
            events = self._selector.select(0.25)
            if events:
                for key, _ in events:
                    handle, what = key.data
                    handle(what)
                return True
            now_used = sum(cpu_seconds(one.pid) for one in self._alive.values())
            if used is not None and now_used > used:
                deadline = time.monotonic() + _SURE_SECONDS
            used = now_used
        return False

    # --- ends -------------------------------------------------------------------------

    def _failure(self, rank: int, code: int) -> Exception:
        """What to say about a rank that failed."""
        told = self._failures.get(rank)
        log = self._logs.path(rank)
        if told is not None:
            _, kind, message, where, hint, report = told
            own = _error_class(kind)
            if own is not None:
                place = f"rank {rank}" + (f", {where}" if where else "")
                return own(message, where=place, hint=hint)
            return RankFailedError(
                f"rank {rank} failed: {message}",
                where=str(log),
                report="" if self._logs.shows(rank) else report,
                hint=hint or "the traceback of that rank is above; the other ranks were stopped",
            )
        printed = self._logs.tail(rank)
        report = "" if self._logs.shows(rank) else printed
        hint = "the other ranks were stopped"
        if printed:
            hint = "the end of what it printed is above; the other ranks were stopped"
        what = told_end(code)
        if -code == signal.SIGKILL:
            hint = (
                "most likely the machine ran out of memory: use fewer ranks or a smaller model, or "
                "look into the kernel's log (dmesg)"
            )
        return RankFailedError(f"rank {rank} {what}", where=str(log), report=report, hint=hint)

    def _collect_status(self, one: RankProcess, flags: int) -> int | None:
        pid, status, usage = os.wait4(one.pid, flags)
        if pid == 0:
            return None
        self.largest_rank_bytes = max(self.largest_rank_bytes, usage.ru_maxrss * 1024)
        self._alive.pop(one.rank, None)
        if self._gpus is not None:
            self._held.pop(one.rank, None)
            self._gpus.end(one.rank)
        # Workers that it started and did not end.
        stale.end_groups([one.pid])
        for registered in (one.channel, one.pidfd):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(registered)
        one.channel.close()
        os.close(one.pidfd)
        return int(status)

    def _reap(self, *, block: bool) -> None:
        for one in list(self._alive.values()):
            self._collect_status(one, 0 if block else os.WNOHANG)


def _group(message: Message) -> tuple[Group, str]:
    """A group, and the program's line that made it."""
    _, _, name, ranks, place, backend, generation, desc, site = message
    return Group(name, tuple(ranks), place, backend, generation, desc), site


def _error_class(code: str | None) -> type[PrismError] | None:
    """The class of our errors that a rank raised."""
    from prismreplay import errors
    from prismtrace import errors as of_traces

    return next(
        (
            kind
            for kind in (*vars(errors).values(), *vars(of_traces).values())
            if isinstance(kind, type)
            and issubclass(kind, PrismError)
            and code is not None
            and kind.code == code
        ),
        None,
    )
