"""The plan on a device: operations end on their streams when they would on the cluster.

An operation's kernel (`cuda/advance.cu`) notes when the stream gets there, finds out from a table
of times when the virtual members arrive, and keeps one warp busy until the operation ends:

    plan = DevicePlan(compiled_plan, rank)                  # prismreplay.run.device_plan
    advancer = Advancer(plan.layout, describe=plan.describe)     # some 20 ms
    advancer.begin(origin_ns)                               # CLOCK_MONOTONIC, as the hub says
    program = plan.program(key, round_, queue=stream.stream_id)
    ticket = advancer.launch(program, stream)               # arrival, wait, hold
    ...
    for one in advancer.records():                          # lazily, at a step's end, say
        one.lateness_ns
    advancer.check()                                        # raises: what did not arrive in time

With something to do between arrival and hold (local compensation, which thereby hides in the
transfer):

    ticket = advancer.arrive(program, stream)
    ...                                                     # kernels on the same stream
    advancer.launch(program, stream, ticket=ticket)

Operations that are launched as one (a coalesced send and receive) are one program, `plan.batch`:
launched one after another, a receive holds up the very send that it waits for.

Without a plan (slices) `launch(None, stream)` notes times only. Nothing here synchronises, and no
memory comes from torch's allocator. Without a device, `prismreplay.plugin.advance_simulation`
does the same.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from prismreplay.errors import PluginError, PluginTimeoutError
from prismreplay.plugin.advance_code import Code, Layout, Slot, Table
from prismreplay.plugin.advance_simulation import Status
from prismreplay.plugin.advances import SEEN_WORDS, Advance, advance_of_row
from prismreplay.plugin.device import kernel, require_device
from prismreplay.plugin.driver_memory import DriverMemory
from prismreplay.plugin.prepared_codes import CODE_KERNELS, NOTHING, PreparedCodes

__all__ = ["Advancer", "ClockPair", "Planned"]

Stream = Any
"""A torch.cuda.Stream, or the handle of one."""

TAIL_NS = 1600
"""From a hold's end to the start of the next kernel of the stream, on an H200."""
_LONGEST_TAIL_NS = 20_000
"""A device that takes longer has other things to do."""
STAMPED, OWES = 1, 2
_FIXED = struct.Struct("=16q")
_PER_CALL = struct.Struct("=4q")
_CALL_BYTES = _FIXED.size + _PER_CALL.size
_LANES = 32
_ANSWERING_NS = 10_000_000_000


class Planned(Protocol):
    """What is launched: a `prismreplay.run.device_plan.Program`."""

    @property
    def code(self) -> Code:
        """What the device does; the same object, the same preparation."""

    @property
    def round_(self) -> int:
        """In which repetition of the last step."""

    @property
    def transfer_ns(self) -> int:
        """From when all are there to the end."""

    @property
    def label(self) -> str:
        """Names the operation in messages."""


class ClockPair(NamedTuple):
    """The device's clock showed `device_ns` when CLOCK_MONOTONIC was within `host_ns` ± `half_ns`."""

    device_ns: int
    host_ns: int
    half_ns: int


class Advancer:
    """Runs a sandbox rank's operations on one device.

    Launches may come from several threads; their order on a stream is that of the calls.

    Args:
        layout: of the tables; None without a plan.
        device: its number; by default the current one.
        tail_ns: what the stream's next kernel takes to start after a hold; None: it is measured.
        limit_ns: longest wait for a slot, and longest hold.
        kept: operations whose outcome is kept until it is read; a power of two.
        shared: address of the memory that all sandbox ranks have in common (mapped by each, zeros
            at first), `layout.slots(Table.SHARED)` words; None: there is only this rank.
        describe: what a slot is, for messages: `DevicePlan.describe`.

    Raises:
        PluginUnavailableError: there is no such device.
        PluginError: the driver refuses memory.
    """

    def __init__(
        self,
        layout: Layout | None = None,
        *,
        device: int | None = None,
        tail_ns: int | None = None,
        limit_ns: int = 60_000_000_000,
        kept: int = 16384,
        shared: int | None = None,
        describe: Callable[[Slot, int], str] | None = None,
    ) -> None:
        if kept < 1 or kept & (kept - 1):
            raise ValueError("kept is a power of two")
        self.layout = layout or Layout(rounds=1, fixed=(1, 1), ring=(0, 0))
        self.device = require_device(device)
        self.tail_ns = TAIL_NS if tail_ns is None else tail_ns
        self._limit_ns, self._kept = limit_ns, kept
        self._describe = describe
        self.memory = memory = DriverMemory(self.device)
        words = self.layout.slots(Table.SHARED)
        self._shared = (
            memory.on_device(8 * words) if shared is None else memory.register(shared, 8 * words)
        )
        self._own = memory.on_device(8 * self.layout.slots(Table.OWN))
        self._debt = memory.on_device(8)
        self._stamps = memory.on_device(8 * kept)
        # Written on the device, where that costs the stream's next kernel nothing, and fetched.
        self._seen_at = memory.on_device(8 * kept * SEEN_WORDS)
        self._seen = memory.pinned(kept * SEEN_WORDS)[1].reshape(kept, SEEN_WORDS)
        self._alarm_at, self._alarm = memory.pinned(8)
        self._box = memory.pinned(8)
        self._call = ctypes.create_string_buffer(_CALL_BYTES)
        self._driver_launch = memory.launcher()
        self._kernels = {
            name: kernel("advance", name, self.device).address
            for name in ("owe", "answer", *CODE_KERNELS)
        }
        self._codes = PreparedCodes(self._kernels, memory, ctypes.addressof(self._call))
        self._lock = threading.Lock()
        self._programs: list[Planned | None] = [None] * kept
        self._next = 0
        self._open: list[int] = []
        """Launched, and not read yet."""
        self.lost = 0
        """Operations whose outcome was overwritten before it was read."""
        self._origin_ns = 0
        self._set_call()
        self._load_kernels()
        if tail_ns is None:
            self.calibrate()

    def prepare(self, codes: Iterable[Code]) -> None:
        """Get codes ready before they are launched for the first time."""
        for code in codes:
            self._codes.prepare(code)

    def begin(self, origin_ns: int, pair: ClockPair | None = None) -> None:
        """Count times from here on since `origin_ns` of CLOCK_MONOTONIC.

        Operations that were launched before keep the old count. Takes the two clocks' difference
        from `pair`, by default a new one.
        """
        pair = pair or self.clock_pair()
        self._origin_ns = origin_ns - pair.host_ns + pair.device_ns
        with self._lock:
            self._set_call()

    def launch(
        self,
        program: Planned | None,
        stream: Stream = None,
        *,
        transfer_ns: int | None = None,
        ticket: int | None = None,
        owes: bool = False,
    ) -> int:
        """Have a stream go through an operation: its arrival, the wait for all, the transfer.

        Args:
            program: of the plan; None: nobody else takes part.
            stream: by default the current one of the device.
            transfer_ns: in place of the plan's.
            ticket: of `arrive`, if that has noted the arrival.
            owes: if it ends late, all that the rank does later counts as so much earlier. For
                operations that the whole program waits for.

        Returns the ticket.

        Raises:
            PluginError: the driver refuses; an error of an earlier kernel also shows here.
        """
        if program is not None and transfer_ns is None:
            transfer_ns = program.transfer_ns
        flags = (0 if ticket is None else STAMPED) | (OWES if owes else 0)
        return self._start(program, stream, transfer_ns or 0, ticket, flags, arrives=False)

    def arrive(self, program: Planned | None, stream: Stream = None) -> int:
        """Note that a stream gets to an operation; `launch` it on the same stream later.

        What follows from the arrival at once is known to other streams from then on.
        """
        return self._start(program, stream, 0, None, 0, arrives=True)

    def owe(self, begin: int, end: int, share: float, stream: Stream = None) -> None:
        """Count a share of the time between two `arrive`s of the same stream as not spent.

        A negative share counts it as spent in addition. For what the device does from here on, and
        for holds under way that do not end within 4 us.
        """
        at = [self._stamps + 8 * (ticket & (self._kept - 1)) for ticket in (begin, end)]
        values = [ctypes.c_uint64(one) for one in (self._debt, *at)] + [ctypes.c_double(share)]
        self._run("owe", 1, values, self._handle(stream))

    def records(self) -> Iterator[Advance]:
        """Operations that the device has finished since the last call, each once.

        Costs some 100 us, and waits for none of the program's streams.
        """
        with self._lock:
            tickets, self._open = np.array(self._open, np.int64), []
            self._fetch()
            ahead = ((self._seen[tickets & (self._kept - 1), 0] >> 32) - tickets - 1) & 0xFFFFFFFF
            done, lost = ahead == 0, (ahead != 0) & (ahead < 1 << 31)
            self.lost += int(lost.sum())
            self._open = tickets[~(done | lost)].tolist()
            finished = tickets[done]
            self._fetch()  # what was under way while the first words were fetched
            rows = self._seen[finished & (self._kept - 1)].tolist()
        for ticket, row in zip(finished.tolist(), rows, strict=True):
            yield advance_of_row(ticket, row)

    def check(self) -> None:
        """Raise if an operation gave up waiting; looks at a word of the host's memory.

        Raises:
            PluginTimeoutError: a slot was not written in time; says whose.
            PluginError: a slot was overwritten.
        """
        failed = int(self._alarm[0])
        if not failed:
            return
        at = (failed - 1) & (self._kept - 1)
        with self._lock:
            self._fetch()
            one, program = advance_of_row(failed - 1, self._seen[at].tolist()), self._programs[at]
        name = "an operation" if program is None else f"the operation [{program.label}]"
        what = "its end"
        if one.missing is not None and program is not None and self._describe is not None:
            what = self._describe(one.missing, program.round_)
        if one.status is Status.OVERWRITTEN:
            raise PluginError(
                f"{name} needs {what}, whose time was overwritten by a later step's",
                hint="operations of one stream are several steps behind those of another",
            )
        raise PluginTimeoutError(
            f"{name} has waited {self._limit_ns / 1e9:g} s on the device for {what}",
            where=f"device {self.device}",
            hint="the program does something else than when it was collected, or a rank hangs",
        )

    def release(self) -> None:
        """Let all operations go, those under way and later ones: somebody has failed."""
        self._alarm[1] = 1

    def clock_pair(self, tries: int = 200) -> ClockPair:
        """The device's clock beside the host's: the narrowest of some questions and answers.

        Raises:
            PluginError: the device does not answer.
        """
        at, box = self._box
        box[:] = 0
        values = [ctypes.c_uint64(one) for one in (at, tries, _ANSWERING_NS)]
        now, best = time.monotonic_ns, ClockPair(0, 0, _ANSWERING_NS)
        self._run("answer", 1, values, self.memory.stream)
        deadline = now() + _ANSWERING_NS
        for number in range(1, tries + 1):
            asked = now()
            box[0] = number
            while box[2] != number:
                if now() > deadline:
                    raise PluginError(
                        f"device {self.device} does not answer", hint="it is busy or hangs"
                    )
            half = (now() - asked) // 2
            if half < best.half_ns:
                best = ClockPair(int(box[1]), asked + half, half)
        return best

    def calibrate(self, repeats: int = 100) -> int:
        """Measure `tail_ns` on a stream that nobody else uses, and use it from here on; waits."""
        before, stream = self.tail_ns, self.memory.stream
        self.tail_ns = 0
        with self._lock:
            self._set_call()
        # The first hold lets launches get ahead: what is measured is the device, not the caller.
        self.launch(None, stream, transfer_ns=5_000_000)
        first = self._next
        for _ in range(repeats):
            self.launch(None, stream, transfer_ns=30_000)
        self.memory.synchronize(stream)
        with self._lock:
            self._open = [one for one in self._open if one < first - 1]
            self._fetch()
        rows = self._seen[np.arange(first, first + repeats) & (self._kept - 1)]
        late = (rows[:, 0] & 0xFFFFFFFF).astype(np.int32)
        gaps = np.sort(rows[1:, 1] - rows[:-1, 4] - late[:-1])
        tail_ns = int(gaps[len(gaps) // 2])
        self.tail_ns = tail_ns if 0 < tail_ns < _LONGEST_TAIL_NS else before
        with self._lock:
            self._set_call()
        return self.tail_ns

    def close(self) -> None:
        """Give all memory back, once the device has finished what was launched."""
        self.release()
        self.memory.close()

    def _start(
        self,
        program: Planned | None,
        stream: Stream,
        transfer_ns: int,
        ticket: int | None,
        flags: int,
        *,
        arrives: bool,
    ) -> int:
        code = NOTHING if program is None else program.code
        prepared = self._codes.get(code) or self._codes.prepare(code)
        handle = stream if type(stream) is int else self._handle(stream)
        with self._lock:
            if ticket is None:
                ticket = self._next
                self._next += 1
            self._programs[ticket & (self._kept - 1)] = program
            round_ = 0 if program is None else program.round_
            _PER_CALL.pack_into(self._call, _FIXED.size, ticket, round_, transfer_ns, flags)
            status = self._driver_launch(
                prepared.arrive if arrives else prepared.advance,
                1, 1, 1, _LANES, 1, 1, 0, handle, prepared.arguments, None,
            )  # fmt: skip
            if not arrives:
                self._open.append(ticket)
        if status:
            raise _refused(status)
        return ticket

    def _handle(self, stream: Stream) -> int:
        if stream is None:
            import torch

            return int(torch._C._cuda_getCurrentRawStream(self.device))  # noqa: SLF001
        return stream if isinstance(stream, int) else int(stream.cuda_stream)

    def _load_kernels(self) -> None:
        """Run each kernel once: loading one later may have to wait for all that run."""
        for prepared in self._codes.samples():
            for entry in (prepared.arrive, prepared.advance):
                self._driver_launch(
                    entry, 1, 1, 1, _LANES, 1, 1, 0, self.memory.stream, prepared.arguments, None
                )  # fmt: skip
        self.memory.synchronize(self.memory.stream)
        self.memory.clear(self._seen_at, 8 * self._kept * SEEN_WORDS)

    def _fetch(self) -> None:
        self.memory.fetch(self._seen_at, self._seen)

    def _set_call(self) -> None:
        layout = self.layout
        _FIXED.pack_into(
            self._call,
            0,
            self._shared, self._own, self._seen_at, self._alarm_at, self._debt, self._stamps,
            self._kept, *layout.fixed, *layout.ring, layout.rounds, layout.period_ns,
            self._origin_ns, self._limit_ns, self.tail_ns,
        )  # fmt: skip

    def _run(self, entry: str, lanes: int, values: list[Any], stream: int) -> None:
        """Launch a kernel that is not on any hot path."""
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
        handle = self._kernels[entry]
        status = self._driver_launch(handle, 1, 1, 1, lanes, 1, 1, 0, stream, arguments, None)
        if status:
            raise _refused(status)


def _refused(status: int) -> PluginError:
    return PluginError(
        f"an operation cannot be launched: cuLaunchKernel returned {status}",
        hint="an error of an earlier kernel shows here, too; CUDA_LAUNCH_BLOCKING=1",
    )
