"""A pruned communication on devices: memory of its links, launches, and who did not arrive.

Roles may be spread over processes and devices that see each other's memory: each process makes a
`PrunedCommunication` for the roles it performs, with the addresses of the others' memory (torch's
symmetric memory, or CUDA IPC). Within a process, several roles can go into one launch, or into
launches on streams that run at the same time. Blocks wait for each other, so all blocks of a
device must run at once: two processes that share a device take turns on it, and time out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from prismreplay.errors import PluginError, PluginTimeoutError
from prismreplay.plugin.device import Kernel, kernel, require_device
from prismreplay.plugin.elements import element_of, identity_bits, reduction_of
from prismreplay.plugin.moves import Role, Schedule
from prismreplay.plugin.tables import Layout, encode
from prismtrace.schema import ReduceOp

__all__ = ["PrunedCommunication", "link_memory"]

Tensor = Any
Stream = Any

_REPORT_WORDS = 8
_WORD_BYTES = 8


def link_memory(
    schedule: Schedule, layout: Layout, *, device: int | None = None
) -> dict[Role, Tensor]:
    """Memory of all roles of a communication on one device, zeroed.

    For several devices or processes, each role's is `layout.bytes_of(schedule, role)` bytes of
    memory that the others see, of which the first `layout.counts_bytes` are zero.
    """
    import torch

    number = require_device(device)
    return {
        role: torch.zeros(
            layout.bytes_of(schedule, role), dtype=torch.uint8, device=f"cuda:{number}"
        )
        for role in schedule.roles
    }


class PrunedCommunication:
    """Performs a schedule's roles, as often as wanted.

    Args:
        schedule: which communication; counts are elements of `dtype`.
        dtype: a torch.dtype.
        memory: each role's, as tensor or as address on this device: of all roles that `roles`
            have links with, and of `roles` themselves.
        layout: of that memory; the same for all.
        op: reduction. AVG and PREMUL_SUM add: members scale by themselves.
        roles: that this object's launches perform; by default all.
        device: its number; by default the current one.
        limit_ns: longest wait for another party.
        lanes: threads of a block, 32 to 512.

    Raises:
        PluginError: the device cannot run all blocks at once, or has no kernel for the type.
        PluginUnavailableError: there is no such device.
    """

    def __init__(
        self,
        schedule: Schedule,
        dtype: Any,
        memory: Mapping[Role, Tensor | int],
        layout: Layout,
        *,
        op: ReduceOp = ReduceOp.SUM,
        roles: Iterable[Role] | None = None,
        device: int | None = None,
        limit_ns: int = 30_000_000_000,
        lanes: int = 512,
    ) -> None:
        import torch

        self.schedule, self.layout, self.dtype = schedule, layout, dtype
        self.roles = schedule.roles if roles is None else tuple(roles)
        self.device = require_device(device)
        self._lanes, self._limit = lanes, np.uint64(limit_ns)
        self._memory = memory
        try:
            self._tables = encode(
                schedule,
                self.roles,
                layout,
                {role: _address(one) for role, one in memory.items()},
                dtype.itemsize,
            )
        except ValueError as error:
            raise PluginError(
                str(error), where=schedule.name, hint="see what the layout and the memory are of"
            ) from error
        self._grid = (layout.channels, len(self._tables.programs))
        self._fits()
        on = f"cuda:{self.device}"
        self._words = torch.from_numpy(self._tables.words).to(on)
        self._report = torch.zeros(_REPORT_WORDS, dtype=torch.int64, device=on)
        self._buffers: dict[tuple[int, ...], Tensor] = {}
        self._identity = np.uint64(identity_bits(op, dtype))
        self._kernel = self._loaded(op)

    def launch(
        self, buffers: Mapping[Role, tuple[Tensor, Tensor]], *, stream: Stream = None
    ) -> None:
        """Start it on `stream`, by default the current one.

        Args:
            buffers: of each role performed here: its `source` and its `data`, which hold at
                least as many elements as the schedule says, and may be one tensor if that says so.
            stream: a torch.cuda.Stream.

        Raises:
            PluginError: a buffer is too small, not contiguous, of another type or elsewhere.
        """
        if not self._tables.programs:
            return
        for role in self.roles:
            self._check(role, *buffers[role])
        source, data, table = 0, 0, 0
        if len(self.roles) == 1:
            source, data = (int(one.data_ptr()) for one in buffers[self.roles[0]])
        else:
            table = self._table(buffers)
        self._start(self._grid, int(self._words.data_ptr()), table, source, data, stream)

    def check(self) -> None:
        """Wait for the launches so far, and see whether everybody had arrived.

        Raises:
            PluginTimeoutError: somebody had not. All sides must `reset` before they go on.
        """
        import torch

        torch.cuda.synchronize(self.device)
        report = self._report.tolist()
        if report[0]:
            raise self._timeout(report)

    def reset(self) -> None:
        """Forget all that was under way, in the memory of this object's roles.

        Nobody else may be communicating: every side resets, and waits until all have.
        """
        import torch

        torch.cuda.synchronize(self.device)
        self._report.zero_()
        for role in self.roles:
            memory = self._memory[role]
            if isinstance(memory, int):
                raise PluginError(
                    "memory given as an address must be zeroed by whoever made it",
                    hint="zero it there, or give the memory as tensors",
                )
            memory[: self.layout.counts_bytes(self.schedule, role)].zero_()
        torch.cuda.synchronize(self.device)

    def _loaded(self, op: ReduceOp) -> Kernel:
        """The kernel, launched once with nothing to do.

        Loading code may wait for the device, which must not happen while another party's blocks
        already wait for ours.
        """
        import torch

        element = element_of(self.dtype)
        reduction = reduction_of(op, self.dtype)
        loaded = kernel("ring", "perform", self.device, ELEMENT=element, REDUCTION=reduction)
        self._kernel = loaded
        nothing = torch.zeros(8, dtype=torch.int64, device=f"cuda:{self.device}")
        self._start((1, 1), int(nothing.data_ptr()), 0, 0, 0, None)
        torch.cuda.synchronize(self.device)
        return loaded

    def _start(
        self, grid: tuple[int, ...], words: int, table: int, source: int, data: int, stream: Stream
    ) -> None:
        tables = self._tables
        self._kernel.launch(
            grid,
            self._lanes,
            words,
            np.int64(tables.moves_at),
            np.int64(tables.outs_at),
            np.int64(tables.ins_at),
            table,
            source,
            data,
            int(self._report.data_ptr()),
            self._limit,
            np.int64(self.layout.slots),
            np.int64(self.layout.slot_bytes // self.dtype.itemsize),
            self._identity,
            stream=stream,
        )

    def _fits(self) -> None:
        import torch

        # A block of 512 threads has a multiprocessor for itself, whatever it is compiled to.
        room = int(torch.cuda.get_device_properties(self.device).multi_processor_count)
        blocks = self._grid[0] * self._grid[1]
        if blocks > room:
            raise PluginError(
                f"{blocks} blocks wait for each other, and the device runs {room} at once",
                where=f"{self._grid[1]} programs of {self._grid[0]} channels",
                hint="use fewer channels",
            )

    def _table(self, buffers: Mapping[Role, tuple[Tensor, Tensor]]) -> int:
        """The address of all roles' addresses, which are copied once for each set of tensors."""
        import torch

        words = tuple(int(one.data_ptr()) for role in self.roles for one in buffers[role])
        if words not in self._buffers:
            table = torch.tensor(words, dtype=torch.int64).to(f"cuda:{self.device}")
            torch.cuda.synchronize(self.device)
            self._buffers[words] = table
        return int(self._buffers[words].data_ptr())

    def _check(self, role: Role, source: Tensor, data: Tensor) -> None:
        schedule = self.schedule
        if source.data_ptr() == data.data_ptr() and data.numel() and not schedule.in_place:
            raise PluginError(
                f"{schedule.name} needs two buffers",
                where=_named(role),
                hint="give data that is another tensor than source",
            )
        for name, one, count in (
            ("source", source, schedule.source_counts[role]),
            ("data", data, schedule.data_counts[role]),
        ):
            if one.dtype != self.dtype or not one.is_cuda or one.device.index != self.device:
                fault = f"is {one.dtype} on {one.device}, not {self.dtype} on cuda:{self.device}"
            elif not one.is_contiguous():
                fault = "is not contiguous"
            elif one.numel() < count:
                fault = f"has {one.numel()} elements of the {count} that {schedule.name} needs"
            else:
                continue
            raise PluginError(
                f"{name} {fault}",
                where=_named(role),
                hint=f"make it contiguous, {self.dtype}, on cuda:{self.device}, of {count} elements",
            )

    def _timeout(self, report: list[int]) -> PluginTimeoutError:
        """Who waited for whom; `report` is what the kernel wrote."""
        _, row, channel, move, receives, place, wanted, found = report
        tables = self._tables
        number = (tables.ins if receives else tables.outs)[row][place]
        waiting = self.schedule.programs[tables.programs[row]]
        link = self.schedule.links[number]
        other = self.schedule.programs[link.sender if receives else link.receiver]
        if receives:
            before = self._counted(waiting.role, tables.count_address(row, place), channel)
            came = found if before is None else found - before
            done = f"{came} pieces came" if came else "nothing came from it"
        else:
            done = f"it took {found} pieces of all so far, {wanted} were needed"
        seconds = float(self._limit) / 1e9
        return PluginTimeoutError(
            f"{other} did not arrive within {seconds:g} s: {done}",
            where=f"{self.schedule.name}, {waiting} in move {move} of {len(waiting.moves)}, "
            f"channel {channel}",
            hint="what that party does, or that it failed, is the cause; all must reset",
        )

    def _counted(self, role: Role, address: int, channel: int) -> int | None:
        """A count that only the waiting side writes, at the end: what it was before the launch."""
        memory = self._memory[role]
        if isinstance(memory, int):
            return None
        line = self.layout.flag_bytes // self.layout.channels
        at = address - int(memory.data_ptr()) + channel * line
        return int.from_bytes(bytes(memory[at : at + _WORD_BYTES].tolist()), "little")


def _address(memory: Tensor | int) -> int:
    return memory if isinstance(memory, int) else int(memory.data_ptr())


def _named(role: Role) -> str:
    return "the assistant" if role is None else f"rank {role} of the group"
