"""What a sandbox rank's process is given when it computes on a GPU: its recorder and its role.

The hub writes what the rank has to know of the job's graph into a file of the run's folder before
ranks begin. Nothing here touches the GPU before the program does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prismreplay.collect.handover import Place
from prismreplay.collect.pool import Observed
from prismreplay.errors import PlanError
from prismreplay.run.clock import RunClock
from prismreplay.run.device_pacing import Pacing, PlanPacer
from prismreplay.run.device_plan import DevicePlan
from prismreplay.run.device_role import DeviceRole
from prismreplay.run.device_sources import DeviceSources
from prismreplay.run.device_spinning import DevicePace, PaceKernels
from prismreplay.run.device_streams import CudaStreams, Streams
from prismreplay.run.following import GraphFollower
from prismreplay.run.holding import Holder
from prismreplay.run.ledger import Ledger
from prismreplay.run.observing import mark_steps, observed
from prismreplay.run.spinning import Spinner
from prismreplay.runtime.annotations import make_recorder
from prismreplay.runtime.cuda_streams import CudaDevices
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.operations import Op
from prismreplay.runtime.recording import on_device
from prismtrace.recorder import SpanWriter

if TYPE_CHECKING:
    from prismreplay.run.options import RunOptions

__all__ = ["DeviceMemory", "Orders", "is_on_device", "observe_device_rank", "write_orders"]

Tensor = Any

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Orders:
    """What a rank has to know of its job.

    Attributes:
        follower: where its operations are in the graph.
        shares: another sandbox rank computes on the same GPU.
        plan: when virtual ranks arrive; None: they are always there.
    """

    follower: GraphFollower
    shares: bool = False
    plan: DevicePlan | None = None


def write_orders(folder: Path, orders: Mapping[int, Orders]) -> None:
    """Leave them for the ranks, which have not begun."""
    for rank, one in orders.items():
        _path(folder, rank).write_bytes(pickle.dumps(one))


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.orders"


class DeviceClock(RunClock):
    """The host's time beside a GPU's: nothing is taken off it, as the GPU's time is what counts."""

    def late(self, delay_ns: int) -> None:
        """See `RunClock`; only counted."""
        self.late_ns += delay_ns
        self.late_answers += delay_ns > 0

    def handed_over(self, cost_ns: int) -> None:
        """See `RunClock`; only counted."""
        self.handing_ns += cost_ns

    def take_over(self, debt_ns: int) -> None:
        """See `RunClock`; nothing to do."""


class DeviceMemory:
    """A rank's GPU memory in place of its host memory; see `prismreplay.run.marks.Memory`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def read(self) -> tuple[int, int, int]:
        """Reserved by torch's allocator, the most reserved, the most allocated; no peak begins anew."""
        return self._streams.memory()


def is_on_device(op: Op, tensors: Sequence[Tensor]) -> bool:
    """Whether NCCL would perform it. A barrier has no tensors: if the program uses a GPU."""
    return on_device(op, tensors, ()) and (bool(tensors) or torch.cuda.is_initialized())


def make_devices() -> tuple[CudaDevices, Streams]:
    """The rank's GPU, for its timeline and for its role."""
    devices = CudaDevices()
    return devices, CudaStreams(devices)


def make_pacing(plan: DevicePlan, *, slots: mmap.mmap | None) -> Pacing:
    """What launches holds on the program's current GPU.

    Args:
        plan: of the rank.
        slots: memory that ranks on several GPUs share; None: there is but one.

    Raises:
        PlanError: there are more operations than it has room for.
    """
    from prismreplay.plugin.advance_code import Table
    from prismreplay.plugin.advancing import Advancer

    if slots is None:
        return Advancer(plan.layout, describe=plan.describe)
    if 8 * plan.layout.slots(Table.SHARED) > len(slots):
        raise PlanError(
            "the plan has more operations than ranks on several GPUs have room for",
            hint="fewer steps, or one sandbox rank",
        )
    address = ctypes.addressof(ctypes.c_char.from_buffer(slots))
    return Advancer(plan.layout, describe=plan.describe, shared=address)


def make_stretching() -> Any:
    """What keeps streams busy behind pieces that shall be slower."""
    from prismreplay.plugin.pacing import Stretcher

    return Stretcher()


def observe_device_rank(
    folder: Path,
    options: RunOptions,
    world_size: int,
    ledger: Ledger,
    rank: int,
) -> Observed:
    """As `prismreplay.run.ranks.observe_rank`, for a rank that has a GPU; called in the rank.

    Args:
        folder: of the run.
        options: of the run.
        world_size: ranks of the job.
        ledger: what the processes of the run share.
        rank: global rank.
    """
    # Streams that wait must not hold up others; as `record` has it.
    os.environ.setdefault(_CONNECTIONS, "32")
    options.tensors.prepare_rank()
    orders: Orders = pickle.loads(_path(folder, rank).read_bytes())  # noqa: S301  our own
    clock = DeviceClock(ledger.machine)
    devices, streams = make_devices()
    devices.host_ns = clock.now
    Holder(clock.machine).hold_until(ledger.origin_ns)
    writer = SpanWriter(folder / f"rank{rank}.spool", rank=rank, world_size=world_size)
    timeline = Timeline(devices, writer)
    recorder = make_recorder(writer, timeline=timeline, cuda=True)
    pacer = None
    if orders.plan is not None:
        pacing = partial(make_pacing, slots=ledger.slots)
        pacer = PlanPacer(orders.plan, ledger.origin_ns, pacing)
    pace = None
    if options.spins:
        kernels = PaceKernels(
            streams.handle, make_stretching, lambda: None if pacer is None else pacer.pacing
        )
        pace = DevicePace(timeline, kernels)
    spinner = Spinner(options.spins, recorder.position, pace or clock)

    def make_role(connection: Any, place: Place) -> DeviceRole:
        role = DeviceRole(
            connection,
            place,
            rank=rank,
            sandbox=options.sandbox,
            clock=clock,
            ledger=ledger,
            recorder=recorder,
            real_groups=options.real_groups,
            streams=streams,
            timeline=timeline,
            follower=orders.follower,
            sources=DeviceSources(options.tensors.sources, lambda: recorder.position.step),
            pacer=pacer,
            shares=orders.shares,
            pace=pace,
            is_on_device=is_on_device,
        )
        mark_steps(rank, recorder, clock, connection, DeviceMemory(streams))
        return role

    return observed(recorder, writer, spinner, make_role)
