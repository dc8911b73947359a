"""The role of a sandbox rank that computes on a GPU.

What it communicates from GPU to GPU never leaves its GPU: the rank makes an operation's result
itself, of its own inputs and of what virtual members give, on the stream on which NCCL would run
it, and holds that stream until the operation ends in the virtual world. The host waits for nothing.
Groups of sandbox ranks only are NCCL's own. What is communicated from host to host goes through
the hub as on CPUs (`prismreplay.run.role`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from prismreplay.collect.handover import bytes_of
from prismreplay.errors import PlanError
from prismreplay.run.device_fetching import Fetcher
from prismreplay.run.device_numerics import combine
from prismreplay.run.device_pruned import PrunedGroup
from prismreplay.run.device_shares import Piece, pieces_of
from prismreplay.run.device_sources import (
    MIRROR,
    NOTHING,
    DeviceSources,
    Way,
    follow_rule,
)
from prismreplay.run.device_spinning import DevicePace
from prismreplay.run.device_streams import Streams
from prismreplay.run.device_uses import GroupUses
from prismreplay.run.device_work import DeviceWork, Launcher, is_asynchronous
from prismreplay.run.following import GraphFollower, Placed
from prismreplay.run.marks import DeviceSummary
from prismreplay.run.outside_memory import BufferPool
from prismreplay.run.real_group import real_group
from prismreplay.run.role import SandboxRole
from prismreplay.runtime.device_clock import StreamKey
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op
from prismreplay.runtime.own_parts import alone, mirror
from prismreplay.runtime.recording import RecordRole
from prismreplay.runtime.roles import Pending
from prismtrace.schema import ReduceOp

__all__ = ["DeviceRole", "Pacer"]

Tensor = Any

_ALIGNED = 16


class Pacer(Protocol):
    """Holds streams until operations end in the virtual world; see `PlanPacer`."""

    def arrive(self, works: Sequence[DeviceWork], stream: int, *, computes: bool) -> Any:
        """Operations that are launched as one get to the front of a stream."""

    def hold(self, held: Any) -> None:
        """Hold the stream until all of them end."""

    def summarize(self, summary: DeviceSummary) -> DeviceSummary:
        """How well ends were met."""


class DeviceRole(SandboxRole):
    """See `SandboxRole` for the other arguments.

    Args:
        streams: of the rank's GPU.
        timeline: of the recorder.
        follower: knows where operations are in the graph.
        sources: say what virtual members give.
        pacer: holds streams; None: virtual members are always there, and transfers take no time.
        shares: another sandbox rank computes on the same GPU.
        pace: of named pieces of the program; None: all run at their own.
        is_on_device: whether an operation's tensors, which it is given, are on the GPU.
    """

    def __init__(
        self,
        *arguments: Any,
        streams: Streams,
        timeline: Timeline,
        follower: GraphFollower,
        sources: DeviceSources,
        pacer: Pacer | None = None,
        shares: bool = False,
        pace: DevicePace | None = None,
        is_on_device: Callable[[Op, Sequence[Tensor]], bool],
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._streams = streams
        self._follower = follower
        self._sources = sources
        self._pacer = pacer
        self._shares = shares
        self._is_on_device = is_on_device
        self._launcher = Launcher(streams, timeline, self._perform, pace)
        self._recording = RecordRole(self.recorder, timeline)
        self._fetcher = Fetcher(self.connection, follower, self._step)
        self._buffers = BufferPool(streams.buffers, streams.done)
        self._outside = BufferPool(lambda size: (streams.outside(size),) * 2, streams.done)
        self._borrowed: list[tuple[Tensor, Tensor]] = []
        self._pruned: dict[str, PrunedGroup] = {}
        self._batches: dict[int, list[DeviceWork]] = {}
        self._virtual: dict[str, list[int]] = {}
        self._uses = GroupUses(self._sandbox)
        self._issuing = array("q")
        self._operations = self._mirrored = 0

    def make_real_group(self, group: Group, backends: dict[str, str]) -> Any:
        """NCCL's own, of ranks that are all in the sandbox; else as on CPUs.

        Where some are, and each has a GPU, these have one among themselves (`PrunedGroup`).
        """
        members = [place for place, rank in enumerate(group.ranks) if rank in self._sandbox]
        if "nccl" not in backends.values():
            return super().make_real_group(group, backends)
        if not self._makes_groups or self._shares or len(members) == 1:
            return None
        port = self.ledger.store_port
        if len(members) == group.size:
            self._real.add(group.key)
            return real_group(f"real/{group.key}", group.rank, group.size, port, backends)
        me, kinds = members.index(group.rank), {"cuda": "nccl"}
        made = real_group(f"pruned/{group.key}", me, len(members), port, kinds)
        self._pruned[group.key] = PrunedGroup(made, members, me, self._scratch)
        return None

    def submit(
        self,
        op: Op,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        call: Callable[[], Any],
    ) -> Pending:
        """See `prismreplay.runtime.roles.Role`."""
        begun = time.monotonic_ns()
        placed = self._follower.place(op)
        if not self._is_on_device(op, inputs or outputs):
            self._connection.tell(("placed", placed))
            if self._pacer is not None:
                self._pass(op, placed)
            return super().submit(op, inputs, outputs, call)
        self._uses.note(op, placed, real=op.group.key in self._real)
        if op.group.key in self._real:
            return self._recording.submit(op, inputs, outputs, call)
        if self._shares:
            self._require_own_gpu(op.group)
        work = DeviceWork(
            self._launcher,
            op,
            self.recorder.latest[0],
            placed,
            (inputs, outputs),
            asynchronous=is_asynchronous(op, call),
        )
        if op.batch is None:
            self._launch([work])
        else:
            self._batches.setdefault(op.batch, []).append(work)
        self._issuing.append(time.monotonic_ns() - begun)
        return work

    def batch_over(self, number: int) -> None:
        """All operations of a batch are submitted: they are launched as one."""
        works = self._batches.pop(number, None)
        if works:
            begun = time.monotonic_ns()
            self._launch(works)
            self._issuing[-1] += time.monotonic_ns() - begun

    def tell_summary(self, spun: int = 0) -> None:
        """Tell the hub how it went, at the rank's end."""
        super().tell_summary(spun)
        _, peak_reserved, peak_allocated = self._streams.memory()
        summary = DeviceSummary(
            rank=self.rank,
            operations=self._operations,
            issuing_ns=max(0, sum(self._issuing) - self._fetcher.waited_ns),
            issuing_median_ns=round(statistics.median(self._issuing or [0])),
            mirrored=self._mirrored,
            fetched=self._fetcher.fetched,
            fetched_late=self._fetcher.late,
            fetching_ns=self._fetcher.waited_ns,
            peak_allocated_bytes=peak_allocated,
            peak_reserved_bytes=peak_reserved,
            allocations=self._streams.allocations(),
            outside_bytes=self._buffers.nbytes + self._outside.nbytes,
        )
        if self._pacer is not None:
            summary = self._pacer.summarize(summary)
        follower = self._follower
        followed = follower.followed
        self._connection.tell(("device", tuple(summary), tuple(followed), self._uses.told()))

    def _pass(self, op: Op, placed: Placed) -> None:
        """An operation of the host goes through the hub; the device has to know when it was.

        What the program puts into its current stream next comes after the operation's end.
        """
        work = DeviceWork(self._launcher, op, -1, placed, ((), ()), asynchronous=False)
        current = self._streams.current()
        if self._pacer is not None:
            held = self._pacer.arrive([work], self._streams.handle(current), computes=False)
            if held is not None:
                self._pacer.hold(held)

    # --- one launch ------------------------------------------------------------------------

    def _launch(self, works: Sequence[DeviceWork]) -> None:
        for work in works:
            work.scratch = self._backends_memory(work.op)
        self._launcher.launch(works)

    def _perform(self, works: Sequence[DeviceWork], stream: StreamKey) -> None:
        """Put operations into a stream."""
        self._operations += len(works)
        ways = [self._way(work.op) for work in works]
        self._mirrored += sum(way is MIRROR for way in ways)
        busy = [
            (work, way) for work, way in zip(works, ways, strict=True) if self._computes(work, way)
        ]
        held = None
        if self._pacer is not None:
            held = self._pacer.arrive(works, self._streams.handle(stream), computes=bool(busy))
        if busy:
            with self._streams.using(stream):
                for work, way in busy:
                    self._compute(work, way, stream)
        if held is not None and self._pacer is not None:
            self._pacer.hold(held)

    def _way(self, op: Op) -> Way | None:
        """None: there is nobody else in the group."""
        if not self._virtual_members(op) and not (op.call is Call.RECV and op.peer is None):
            return None
        return self._sources.way(self.rank, op)

    def _compute(self, work: DeviceWork, way: Way | None, stream: StreamKey) -> None:
        op, inputs = work.op, work.inputs
        # As NCCL writes: autograd does not notice.
        outputs = [one.data for one in work.outputs]
        pruned = self._together(op, way)
        if pruned is not None:
            self._perform_together(pruned, work, outputs, way, stream)
        elif way is None:
            alone(op, inputs, outputs)
        elif way.kind == "recording":
            self._combine(work, outputs, stream)
        elif way.kind == "rule":
            follow_rule(way, op, inputs, outputs, self._streams)
        elif way.kind == "mirror":
            mirror(op, inputs, outputs, self._streams.noise)

    def _computes(self, work: DeviceWork, way: Way | None) -> bool:
        """Whether the device has something to do for an operation's result."""
        if self._together(work.op, way) is not None:
            return way is not NOTHING
        return _computes(work, way)

    def _together(self, op: Op, way: Way | None) -> PrunedGroup | None:
        """The group of the sandbox ranks that perform an operation among themselves."""
        pruned = self._pruned.get(op.group.key)
        if pruned is None or way is None:
            return pruned
        message = op.call in MESSAGES
        return None if message or way.kind == "rule" else pruned

    def _perform_together(
        self,
        pruned: PrunedGroup,
        work: DeviceWork,
        outputs: Sequence[Tensor],
        way: Way | None,
        stream: StreamKey,
    ) -> None:
        """With other sandbox ranks of the group, by NCCL, and the virtual members' part."""
        op = work.op
        pieces = pieces_of(op, self._virtual_members(op)) if way is not None else []
        given: list[Tensor] | None = None
        pair = None
        if way is not None and way.kind == "recording":
            given = []
            if pieces and pruned.needs_share(op):
                given, pair = self._given(work, outputs, pieces)
            else:
                pieces = []
        pruned.perform(op, work.inputs, outputs, pieces, given)
        over = self._streams.new_event()
        self._streams.record(over, stream)
        if pair is not None:
            self._buffers.give(pair, over)
        while self._borrowed:
            self._outside.give(self._borrowed.pop(), over)

    def _scratch(self, elements: int, dtype: Any) -> Tensor:
        """Memory past torch's allocator, for an operation of the current stream."""
        pair = self._outside.take(elements * dtype.itemsize)
        self._borrowed.append(pair)
        return pair[0][: elements * dtype.itemsize].view(dtype)

    def _combine(self, work: DeviceWork, outputs: Sequence[Tensor], stream: StreamKey) -> None:
        """With what the hub knows of the virtual members' part."""
        op = work.op
        pieces = pieces_of(op, self._virtual_members(op))
        if not pieces:
            combine(op, work.inputs, outputs, pieces, [])
            return
        given, pair = self._given(work, outputs, pieces)
        combine(op, work.inputs, outputs, pieces, given)
        over = self._streams.new_event()
        self._streams.record(over, stream)
        self._buffers.give(pair, over)

    def _given(
        self, work: DeviceWork, outputs: Sequence[Tensor], pieces: Sequence[Piece]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """Those pieces on the device, and the buffers that they are in."""
        op = work.op
        parcel = self._fetcher.fetch(op, work.placed)
        sizes = [piece.elements * outputs[piece.output].element_size() for piece in pieces]
        places = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        pair = self._buffers.take(places[-1])
        pinned, there = pair
        memory, offset = bytes_of(pinned), 0
        for size, place in zip(sizes, places, strict=False):
            parcel.read_into(memory[place : place + size], offset)
            offset += size
        parcel.close()
        there[: places[-1]].copy_(pinned[: places[-1]], non_blocking=True)
        given = [
            there[place : place + size].view(outputs[piece.output].dtype)
            for piece, size, place in zip(pieces, sizes, places, strict=False)
        ]
        return given, pair

    def _backends_memory(self, op: Op) -> Any:
        """What NCCL's group allocates with torch for an operation, and keeps until it is over."""
        if op.call is Call.BARRIER:
            return self._streams.scratch(1, torch.float32)
        if op.call is Call.ALL_GATHER:
            specs = op.outputs
        elif op.call is Call.REDUCE_SCATTER:
            specs = op.inputs
        else:
            return None
        if len({spec.shape for spec in specs}) != 1:
            return None
        count = sum(spec.elements for spec in specs)
        return self._streams.scratch(count, getattr(torch, specs[0].dtype.value))

    # --- groups and graph ------------------------------------------------------------------

    def _virtual_members(self, op: Op) -> list[int]:
        """Places of the virtual members that take part."""
        group = op.group
        if op.call in MESSAGES:
            if op.peer is None or op.peer in self._sandbox:
                return []
            return [group.ranks.index(op.peer)]
        found = self._virtual.get(group.key)
        if found is None:
            found = [n for n, rank in enumerate(group.ranks) if rank not in self._sandbox]
            self._virtual[group.key] = found
        return found

    def _require_own_gpu(self, group: Group) -> None:
        if self._shares:
            raise PlanError(
                "sandbox ranks share a GPU: they would not take the time that they take",
                where=f"rank {self.rank}, group {group.called}",
                hint="as many sandbox ranks as there are GPUs, at the most; a program that shall "
                "run on CPUs does so with CUDA_VISIBLE_DEVICES empty",
            )


def _computes(work: DeviceWork, way: Way | None) -> bool:
    """Whether the device has to compute something for an operation's result."""
    op = work.op
    if not work.outputs or way is NOTHING:
        return False
    if way is None:
        return not (work.inputs is work.outputs and op.premul_factor is None)
    if way is MIRROR:
        if op.call is Call.BROADCAST:
            return False
        own = op.reduce_op in _OWN and op.call in (Call.ALL_REDUCE, Call.REDUCE)
        return not own
    return True


_OWN = (ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR)
"""Reductions in which mirrored partners leave the rank's own numbers as they are."""
