"""Lets ranks that have a turn onto their GPU, and others off it.

Between the coordinator, which gives turns, and the sockets: what is sent to a rank that is not on
its GPU waits until it is. Moves take seconds, so each GPU has a thread for them; everything else
happens on the thread of the run. Decisions are `residency`'s, moves are `swapping`'s.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from prismreplay.collect.gpu_room import Room
from prismreplay.collect.messages import Message
from prismreplay.collect.residency import Decision, Do, Residency, Whereabouts
from prismreplay.collect.swapping import Swapper
from prismreplay.errors import SwapError

__all__ = ["GpuReport", "GpuTurns", "Meter"]

_ANSWER_SECONDS = 10.0
"""How long a rank may take to give memory back."""
_SLOWEST_BYTES_PER_SECOND = 50e6
_LONGEST_SECONDS = 60.0
_NOT_MOVED = "run fewer ranks, so that all fit on the GPUs and none has to be moved"
_CONTEXT_BYTES = 600 << 20
"""What CUDA itself takes for a process, where it cannot be measured."""


class Meter(Protocol):
    """What is known of a GPU's memory; `prismreplay.collect.gpus.Nvml` is one."""

    def memory(self, token: str) -> tuple[int, int] | None:
        """Bytes in all, and in use."""

    def processes(self, token: str) -> Mapping[int, int]:
        """Bytes by pid, for those processes that are known."""


@dataclass
class GpuReport:
    """What it took to have all ranks on few GPUs.

    `moved_out` and `moved_in` count ranks that left and came back, with bytes as the ranks'
    allocators and CUDA's contexts take them and seconds in which the driver worked; `waited_s` is
    what ranks with a turn waited for room. `trimmed` ranks gave `trimmed_bytes` back. `most_bytes`
    is the most that ranks took of one GPU together, `rank_bytes` the most of one rank, and
    `measured_by` tells how it is known: nvml, or by the ranks themselves.
    """

    gpus: int = 0
    budget_bytes: int = 0
    moved_out: int = 0
    moved_in: int = 0
    spilled: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    seconds_out: float = 0.0
    seconds_in: float = 0.0
    waited_s: float = 0.0
    trimmed: int = 0
    trimmed_bytes: int = 0
    most_bytes: int = 0
    rank_bytes: int = 0
    measured_by: str = "ranks"


class _Done(NamedTuple):
    """A move that has ended."""

    rank: int
    seconds: float
    error: SwapError | None


@dataclass
class _Lane:
    """One GPU: who waits for it, and what is being done."""

    number: int
    residency: Residency
    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    doing: Decision | None = None
    since: float = 0.0
    done: list[_Done] = field(default_factory=list)
    stuck: set[int] = field(default_factory=set)
    """Ranks that could not be moved, until they have computed again."""
    owed: set[int] = field(default_factory=set)
    """Ranks that were moved while they slept with their turn lent: they come back unasked."""


class GpuTurns:
    """The ranks of a run and their GPUs.

    Args:
        room: what there is.
        pids: of the ranks' processes.
        tell: sends a message to a rank.
        meter: measures memory; None: ranks' own accounts count.
        load_swapper: makes what moves ranks, the first time that one has to move.
        clock: seconds.
    """

    def __init__(
        self,
        room: Room,
        pids: Mapping[int, int],
        tell: Callable[[int, Message], None],
        *,
        meter: Meter | None,
        load_swapper: Callable[[], Swapper],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        gpus = len(room.gpus)
        self._room = room
        self._pids = dict(pids)
        self._tell = tell
        self._meter = meter
        self._load_swapper = load_swapper
        self._swapper: Swapper | None = None
        self._awaited: Callable[[int], Collection[int]] = lambda _: ()
        self._clock = clock
        self._lanes = [
            _Lane(
                number,
                Residency(room.budget(number), room.host_bytes // gpus, room.disk_bytes // gpus),
            )
            for number in range(gpus)
        ]
        self._context_bytes = _CONTEXT_BYTES
        self._closing = threading.Lock()
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.report = GpuReport(gpus, min(lane.residency.budget for lane in self._lanes))

    def fileno(self) -> int:
        """Readable when a move has ended; for selectors."""
        return self._signal

    def close(self) -> None:
        """Moves that are under way go on, to no purpose."""
        with self._closing:
            os.close(self._signal)
            self._signal = -1

    # --- what happens -----------------------------------------------------------------

    def is_in(self, rank: int) -> bool:
        """Whether the memory of `rank` is on the GPU, and stays there for now."""
        lane = self._lane(rank)
        leaving = lane.doing is not None and lane.doing == Decision(Do.EVICT, rank)
        return not leaving and lane.residency.where(rank) is Whereabouts.GPU

    def has_room(self, rank: int, running: Collection[int]) -> bool:
        """Whether `rank`, which is in and has a new turn, may grow as others did beside `running`."""
        lane = self._lane(rank)
        return lane.residency.has_room(rank, running, free=self._free(lane))

    def take_turn(self, rank: int) -> None:
        """`rank`, which is in, computes or goes on to."""
        lane = self._lane(rank)
        lane.stuck.discard(rank)
        lane.residency.entered(rank)

    def ask(self, rank: int) -> None:
        """`rank` has a turn and is not in, or has no room to grow."""
        lane = self._lane(rank)
        if all(rank != waiting for waiting, _ in lane.waiting):
            lane.waiting.append((rank, self._clock()))

    def hear(self, rank: int, message: Message) -> None:
        """What a rank says of its memory: `memory`, `trimmed` or `spilled`."""
        lane = self._lane(rank)
        if message[0] == "spilled":
            if lane.doing == Decision(Do.SPILL, rank):
                lane.residency.spilled(rank)
                self.report.spilled += 1
                lane.doing = None
            return
        before = lane.residency.size(rank)
        self._measure(lane, rank, *message[1:])
        if message[0] == "trimmed" and lane.doing == Decision(Do.TRIM, rank):
            lane.residency.trimmed(rank)
            self.report.trimmed += 1
            self.report.trimmed_bytes += max(0, before - lane.residency.size(rank))
            lane.doing = None

    def end(self, rank: int) -> None:
        """`rank` has ended."""
        lane = self._lane(rank)
        lane.residency.ended(rank)
        lane.waiting = deque(one for one in lane.waiting if one[0] != rank)
        if lane.doing in (Decision(Do.TRIM, rank), Decision(Do.SPILL, rank)):
            lane.doing = None  # Of moves, a thread tells when they have ended.

    def step(
        self,
        running: Collection[int],
        lent: Collection[int] = (),
        awaited: Callable[[int], Collection[int]] = lambda _: (),
    ) -> list[int]:
        """Do what can be done; the ranks that are let in.

        Args:
            running: ranks that must stay where they are.
                lent: ranks that have lent their turn, and should.
            awaited: whom a blocked rank waits for.

        Raises:
            SwapError: there is no room, or the driver cannot move ranks.
            PluginUnavailableError: nothing here can move ranks.
        """
        let_in: list[int] = []
        self._awaited = awaited
        for lane in self._lanes:
            self._finish(lane, let_in)
            waiting = {rank for rank, _ in lane.waiting}
            inside = [one for one in running if one not in waiting]
            asleep = [one for one in lent if one not in waiting]
            while lane.doing is None and lane.waiting:
                if not self._advance(lane, inside, asleep, let_in):
                    break
            self._check_patience(lane)
        return let_in

    # --- one GPU ----------------------------------------------------------------------

    def _advance(
        self, lane: _Lane, running: Sequence[int], lent: Sequence[int], let_in: list[int]
    ) -> bool:
        """The next thing for the first that waits; False if nothing can be done now."""
        rank, since = lane.waiting[0]
        decision = self._decide(lane, rank, [*running, *lent, *let_in])
        if decision.do is Do.WAIT and not {*running, *let_in} & {*lane.residency.residents()}:
            # Those that sleep may do so until another rank has done something.
            decision = self._decide(lane, rank, ())
            if decision.do is Do.EVICT and decision.rank in lent:
                lane.owed.add(decision.rank)
        if decision.do is Do.WAIT:
            return False
        is_away = lane.residency.where(rank) in (Whereabouts.HOST, Whereabouts.DISK)
        if decision.do is Do.ADMIT and not is_away:
            lane.waiting.popleft()
            self._enter(lane, rank, since, let_in)
        else:
            self._start(lane, decision)
        return True

    def _decide(self, lane: _Lane, rank: int, running: Collection[int]) -> Decision:
        soon = [one for one in lane.residency.residents() if rank in self._awaited(one)]
        free = self._free(lane)
        return lane.residency.decide(rank, running, free=free, stuck=lane.stuck, soon=soon)

    def _start(self, lane: _Lane, decision: Decision) -> None:
        lane.doing, lane.since = decision, self._clock()
        if decision.do in (Do.TRIM, Do.SPILL):
            self._tell(decision.rank, (decision.do.name.lower(), 0))
            return
        if self._swapper is None:
            self._swapper = self._load_swapper()
        move = self._swapper.move_out if decision.do is Do.EVICT else self._swapper.move_in
        arguments = (lane, decision.rank, move, self._pids[decision.rank])
        # A daemon: the driver may hang, and that must not keep this process.
        threading.Thread(target=self._move, args=arguments, daemon=True).start()

    def _move(self, lane: _Lane, rank: int, move: Callable[[int], None], pid: int) -> None:
        """On a thread of its own."""
        begun, error = self._clock(), None
        try:
            move(pid)
        except SwapError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001  must get to the thread of the run
            error = SwapError(f"moving rank {rank} failed: {failure!r}", hint=_NOT_MOVED)
        lane.done.append(_Done(rank, self._clock() - begun, error))
        with self._closing:
            if self._signal >= 0:
                os.eventfd_write(self._signal, 1)

    def _finish(self, lane: _Lane, let_in: list[int]) -> None:
        """Note moves that have ended."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        while lane.done:
            rank, seconds, error = lane.done.pop(0)
            decision, lane.doing = lane.doing, None
            outward = decision is not None and decision.do is Do.EVICT
            known = lane.residency.where(rank) is not Whereabouts.NOWHERE
            if not known:
                continue  # It has ended, and why is told elsewhere.
            if error is not None:
                self._failed(lane, rank, error, outward=outward)
                continue
            size = lane.residency.size(rank)
            if outward:
                lane.residency.left(rank)
                self.report.moved_out += 1
                self.report.bytes_out += size
                self.report.seconds_out += seconds
                if rank in lane.owed:
                    lane.owed.discard(rank)
                    self.ask(rank)
            else:
                self.report.moved_in += 1
                self.report.bytes_in += size
                self.report.seconds_in += seconds
                _, since = lane.waiting.popleft()
                self._enter(lane, rank, since, let_in)

    def _failed(self, lane: _Lane, rank: int, error: SwapError, *, outward: bool) -> None:
        if not (outward and error.usable):
            error.where = f"rank {rank}" + (f", {error.where}" if error.where else "")
            raise error
        # It stays; perhaps others can be moved instead.
        lane.stuck.add(rank)
        movable = [one for one in lane.residency.residents() if one not in lane.stuck]
        if not movable:
            raise error

    def _enter(self, lane: _Lane, rank: int, since: float, let_in: list[int]) -> None:
        lane.residency.entered(rank)
        self.report.waited_s += self._clock() - since
        let_in.append(rank)

    def _check_patience(self, lane: _Lane) -> None:
        """A rank that does not answer, or a driver that hangs, must not keep the run."""
        if lane.doing is None:
            return
        do, rank = lane.doing
        waited = self._clock() - lane.since
        if do is Do.TRIM:
            if waited > _ANSWER_SECONDS:
                lane.residency.trimmed(rank)  # What it keeps is moved with it.
                lane.doing = None
            return
        if waited > _LONGEST_SECONDS + lane.residency.size(rank) / _SLOWEST_BYTES_PER_SECOND:
            raise SwapError(
                f"the driver has been moving rank {rank} for {waited:.0f} s",
                hint="programs that share GPU memory between processes, or use NCCL themselves, "
                "cannot be moved; see `prismreplay doctor`",
            )

    # --- memory -----------------------------------------------------------------------

    def _measure(self, lane: _Lane, rank: int, reserved: int, allocated: int, peak: int) -> None:
        """Note what a rank takes: its allocator's memory, and that of CUDA itself."""
        token = self._room.gpus[lane.number].token
        seen = self._meter.processes(token).get(self._pids[rank]) if self._meter else None
        # In a container the pid may be that of another process outside.
        if seen is not None and seen >= reserved:
            self._context_bytes = max(0, seen - reserved)
            self.report.measured_by = "nvml"
        elif self._meter is not None:
            self._estimate_context(lane, token)
        context = self._context_bytes
        lane.residency.resize(
            rank, reserved + context, cached=reserved - allocated, peak=peak + context
        )
        report, taken = self.report, lane.residency.taken(Whereabouts.GPU)
        report.most_bytes = max(report.most_bytes, taken)
        report.rank_bytes = max(report.rank_bytes, reserved + context, peak + context)

    def _estimate_context(self, lane: _Lane, token: str) -> None:
        """What CUDA takes for a process: the part of the GPU's memory that no allocator has."""
        memory = self._meter.memory(token) if self._meter is not None else None
        residents = [one for one in lane.residency.residents() if lane.residency.size(one)]
        if memory is None or not residents:
            return
        unknown = (
            memory[1]
            - self._room.gpus[lane.number].taken_bytes
            - lane.residency.taken(Whereabouts.GPU)
        )
        # Ranks that have not told yet have memory, too: never more than is usual.
        share = self._context_bytes + unknown // len(residents)
        self._context_bytes = min(max(share, 0), 2 * _CONTEXT_BYTES)

    def _free(self, lane: _Lane) -> int | None:
        memory = self._meter.memory(self._room.gpus[lane.number].token) if self._meter else None
        return None if memory is None else memory[0] - memory[1]

    def _lane(self, rank: int) -> _Lane:
        return self._lanes[self._room.home(rank)]
