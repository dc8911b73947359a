"""Measuring communications on the real backend; what each rank does.

An operation is timed as merging defines a transfer: from when the last member starts it to when
it is over. All members come out of a barrier, then everybody notes when it starts and ends:

- one host, CPU tensors: all have one clock; last end minus last start.
- several hosts, or GPUs: there are only durations. Who came last had the shortest, so of what all
  members finish together (all_reduce and the like) that is it; of the rest, the members' median.

What a backend on the CPU takes of the ranks' processors is the time of the process's other threads
meanwhile, the mean of the members.

Where a rank has few cores, its program and the backend's threads get in each other's way, and an
operation takes longer beside computation than by itself. So the program can be made to compute, as
a job's does, before an operation begins and until it has ended. Sends do without: a program that
sends to the next stage of a pipeline goes on, but who receives waits.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import distributed

from prismcalib.comm_samples import SCHEMA
from prismreplay.comm_bench.spec import BenchSpec, Placement, placements
from prismreplay.errors import CommBenchError
from prismtrace.schema import Kind

__all__ = ["Measured", "take_part"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

_IN_PLACE = (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE)
_TOGETHER = (
    Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.BARRIER,
)  # fmt: skip
_LEAST_TIMES, _MOST_TIMES = 3, 200
_WARM_UPS = 2
_COMPUTING_NS = 2_000_000
"""So long a program has computed when an operation begins: longer than a scheduler lets it run before
others have their turn."""
_ROWS, _WIDTH = 32, 256
"""Of the matrices that are multiplied meanwhile: some 50 us a product."""
_PATIENCE = timedelta(hours=6)
"""Ranks that are in no group that is being measured wait."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What rank 0 gets.

    Attributes:
        samples: columns of `prismcalib.comm_samples.SCHEMA`; one for every round.
        ranks: that were there.
        hosts: that they were on.
        skipped: operations that the backend cannot do, and why.
    """

    samples: pl.DataFrame
    ranks: int
    hosts: int
    skipped: dict[str, str]


def take_part(spec: BenchSpec) -> Measured | None:
    """Measure as one of the ranks of a launcher; the result on rank 0, None on the others.

    RANK, WORLD_SIZE, MASTER_ADDR and so on are as torchrun sets them.

    Raises:
        CommBenchError: the backend is not here, or groups are larger than the world.
    """
    with _world(spec) as device:
        names: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(names, _host())
        groups = placements(names, spec.group_sizes)
        pairs = () if any(len(each.ranks) == 2 for each in groups) else placements(names, (2,))
        rows: list[dict[str, Any]] = []
        skipped: dict[str, str] = {}
        for placement in (*pairs, *groups):
            only_pairs = placement in pairs
            kinds = [kind for kind in spec.kinds if len(placement.ranks) == 2 or kind != Kind.SEND]
            kinds = [kind for kind in kinds if not only_pairs or kind == Kind.SEND]
            if not kinds:
                continue
            bench = _Bench(spec, placement, device, one_clock=len(set(names)) == 1)
            if bench.is_member:
                rows += bench.run(kinds, skipped)
            distributed.barrier()
        if distributed.get_rank():
            return None
        return Measured(pl.DataFrame(rows, schema=SCHEMA), len(names), len(set(names)), skipped)


@contextmanager
def _world(spec: BenchSpec) -> Iterator[Any]:
    """All ranks, over gloo, which also keeps them in step; where their tensors are."""
    device = torch.device("cpu")
    if spec.backend == "nccl":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if not distributed.is_nccl_available() or local >= torch.cuda.device_count():
            raise CommBenchError(
                f"NCCL needs a GPU for every rank, and {torch.cuda.device_count()} are here",
                hint="start fewer ranks, or measure --backend gloo",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield device
    finally:
        distributed.destroy_process_group()


def _host() -> str:
    """The same for all ranks of a machine, containers of one name apart."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text(encoding="ascii") if boot.exists() else "")


def _other_threads_ns() -> int:
    """Processor time of all threads of this process but this one."""
    return time.process_time_ns() - time.thread_time_ns()


class _Bench:
    """Measures in one group; made by all ranks, run by its members."""

    def __init__(
        self, spec: BenchSpec, placement: Placement, device: Any, *, one_clock: bool
    ) -> None:
        ranks = list(placement.ranks)
        self._spec, self._placement, self._device = spec, placement, device
        self._one_clock = one_clock and device.type == "cpu"
        self._group = distributed.new_group(ranks, backend=spec.backend, timeout=_PATIENCE)
        self._control = distributed.new_group(ranks, backend="gloo", timeout=_PATIENCE)
        self._waiter = ThreadPoolExecutor(1)
        self._product = torch.ones((_ROWS, _WIDTH))
        self._factors = torch.ones((_ROWS, _WIDTH)), torch.ones((_WIDTH, _WIDTH))
        self.is_member = distributed.get_rank() in ranks

    def run(self, kinds: Sequence[Kind], skipped: dict[str, str]) -> list[dict[str, Any]]:
        """Samples of all kinds and sizes, in rounds, so that slow changes show in each of them."""
        times: dict[tuple[Kind, int], int] = {}
        rows = []
        for _ in range(self._spec.rounds):
            for kind in kinds:
                for size in self._spec.sizes_of(kind):
                    if kind in skipped:
                        continue
                    call, nbytes = self._operation(kind, size)
                    if (kind, size) not in times:
                        try:
                            times[kind, size] = self._repetitions(call)
                        except (RuntimeError, NotImplementedError) as error:
                            # Alike on all members: nothing was sent.
                            skipped[kind] = str(error).partition("\n")[0]
                            continue
                    found = self._sample(kind, call, times[kind, size])
                    rows.append(self._row(kind, nbytes, *found))
        return rows

    def _row(self, kind: Kind, nbytes: int, time_ns: int, cpu_ns: int | None) -> dict[str, Any]:
        ranks, hosts = len(self._placement.ranks), self._placement.hosts
        values = (
            kind.value, self._spec.dtype.value, ranks, hosts, nbytes, kind in _IN_PLACE, time_ns,
            cpu_ns,
        )  # fmt: skip
        return dict(zip(SCHEMA, values, strict=True))

    def _repetitions(self, call: Callable[[], None]) -> int:
        """Warm up, and find out how often an operation fits into a round."""
        for _ in range(_WARM_UPS):
            call()
        self._finish()
        begun = time.monotonic()
        call()
        self._finish()
        took = torch.tensor([time.monotonic() - begun], dtype=torch.float64)
        distributed.all_reduce(took, distributed.ReduceOp.MAX, group=self._control)
        fitting = self._spec.round_s / max(took.item(), 1e-6)
        return int(min(max(fitting, _LEAST_TIMES), _MOST_TIMES))

    def _sample(self, kind: Kind, call: Callable[[], None], times: int) -> tuple[int, int | None]:
        """Time and processor time, in ns; medians of a round."""
        own = torch.zeros((times, 3), dtype=torch.int64)
        on_device = self._device.type == "cuda"
        time_one = self._time_on_device if on_device else self._time_here
        for number in range(times):
            distributed.barrier(group=self._control)
            own[number] = torch.tensor(time_one(call))
        members = [torch.empty_like(own) for _ in self._placement.ranks]
        distributed.all_gather(members, own, group=self._control)
        spans = torch.stack(members).numpy()
        if self._one_clock:
            found = spans[:, :, 1].max(axis=0) - spans[:, :, 0].max(axis=0)
        else:
            durations = (spans[:, :, 1] - spans[:, :, 0]).tolist()
            choose = min if kind in _TOGETHER else statistics.median
            found = [choose(each) for each in zip(*durations, strict=True)]
        cpu_ns = None if on_device else round(statistics.median(spans[:, :, 2].mean(axis=0)))
        return max(1, round(statistics.median(map(float, found)))), cpu_ns

    def _compute(self) -> None:
        torch.mm(*self._factors, out=self._product)

    def _compute_until_done(self, kind: Kind, work: Any) -> None:
        done = work.is_completed
        if kind is Kind.REDUCE_SCATTER:
            # gloo makes it of all_reduces, and says that it is completed only when it is waited for.
            done = self._waiter.submit(work.wait).done
        while not done():
            self._compute()
        work.wait()

    def _time_here(self, call: Callable[[], None]) -> tuple[int, int, int]:
        if self._spec.computing:
            until = time.monotonic_ns() + _COMPUTING_NS
            while time.monotonic_ns() < until:
                self._compute()
        others, start = _other_threads_ns(), time.monotonic_ns()
        call()
        end = time.monotonic_ns()
        return start, end, _other_threads_ns() - others

    def _time_on_device(self, call: Callable[[], None]) -> tuple[int, int, int]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return 0, round(begin.elapsed_time(end) * 1e6), 0

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _operation(self, kind: Kind, size: int) -> tuple[Callable[[], None], int]:
        """What performs the operation, and its payload: `size` or a little less."""
        ranks, group = self._placement.ranks, self._group
        members, root = len(ranks), ranks[0]
        is_root = distributed.get_rank() == root
        itemsize = self._spec.dtype.itemsize
        part = max(1, size // itemsize // members)
        elements = max(1, size // itemsize)

        def make(count: int) -> Tensor:
            dtype = getattr(torch, self._spec.dtype.value)
            return torch.zeros(count, dtype=dtype, device=self._device)

        def parts() -> list[Tensor]:
            return list(make(part * members).chunk(members))

        if kind is Kind.SEND:
            whole = make(elements)
            if is_root:
                return lambda: distributed.send(whole, ranks[1], group=group), elements * itemsize
            return lambda: distributed.recv(whole, root, group=group), elements * itemsize
        how = {"group": group, "async_op": self._spec.computing}
        if kind is Kind.BARRIER:
            on = None if self._device.index is None else [self._device.index]
            return self._performed(kind, lambda: distributed.barrier(device_ids=on, **how)), 0
        if kind in (Kind.ALL_REDUCE, Kind.BROADCAST, Kind.REDUCE):
            whole = make(elements)
            calls: dict[Kind, Callable[[], Any]] = {
                Kind.ALL_REDUCE: lambda: distributed.all_reduce(whole, **how),
                Kind.BROADCAST: lambda: distributed.broadcast(whole, src=root, **how),
                Kind.REDUCE: lambda: distributed.reduce(whole, dst=root, **how),
            }
            return self._performed(kind, calls[kind]), elements * itemsize
        one, many = make(part), make(part * members)
        others = parts() if is_root else None
        calls = {
            Kind.ALL_GATHER: lambda: distributed.all_gather_into_tensor(many, one, **how),
            Kind.REDUCE_SCATTER: lambda: distributed.reduce_scatter_tensor(one, many, **how),
            Kind.GATHER: lambda: distributed.gather(one, others, dst=root, **how),
            Kind.SCATTER: lambda: distributed.scatter(one, others, src=root, **how),
        }
        if kind is Kind.ALL_TO_ALL:
            out = make(part * members)
            calls[kind] = lambda: distributed.all_to_all_single(out, many, **how)
        return self._performed(kind, calls[kind]), part * members * itemsize

    def _performed(self, kind: Kind, start: Callable[[], Any]) -> Callable[[], None]:
        """Start it and, if that is how it is measured, compute until it is over."""
        if not self._spec.computing:
            return start
        return lambda: self._compute_until_done(kind, start())
