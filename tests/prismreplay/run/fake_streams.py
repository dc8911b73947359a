"""A GPU that is this process: streams are names, work is done at once, on CPU tensors."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch

DEFAULT = (0, 0, 1)


class NoDevices:
    """For the timeline: no device is in use, marks are the host's."""

    def __init__(self):
        self.host_ns = time.perf_counter_ns

    def ready(self):
        return False


class FakeStreams:
    """See `prismreplay.run.device_streams.Streams`; `said` is what it was told."""

    def __init__(self):
        self.said = []
        self.numbers = itertools.count(1)
        self.here = DEFAULT
        self.is_done = True
        self.generator = torch.Generator().manual_seed(1)

    def current(self):
        return self.here

    def new_stream(self):
        return (next(self.numbers), 0, 1)

    def new_event(self):
        return ["event", next(self.numbers)]

    def record(self, event, stream):
        self.said.append(("record", tuple(event), stream))

    def wait(self, stream, event):
        self.said.append(("wait", stream, tuple(event)))

    def done(self, _event):
        return self.is_done

    def lend(self, stream, tensors):
        self.said.append(("lend", stream, len(tensors)))

    @contextmanager
    def using(self, stream):
        before, self.here = self.here, stream or self.here
        try:
            with torch.no_grad():
                yield
        finally:
            self.here = before

    def synchronize(self, stream):
        self.said.append(("synchronize", stream))

    def buffers(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    def outside(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def scratch(self, elements, dtype):
        return torch.empty(elements, dtype=dtype)

    def noise(self, tensor):
        if tensor.is_floating_point():
            tensor.normal_(generator=self.generator)
        else:
            tensor.zero_()

    def uniform(self, tensor, low, high):
        if tensor.is_floating_point():
            tensor.uniform_(low, high, generator=self.generator)
        else:
            tensor.random_(int(low), int(high), generator=self.generator)

    def handle(self, stream):
        return stream[0]

    def allocations(self):
        return 7

    def memory(self):
        return 100, 200, 150


class FakePacing:
    """`prismreplay.plugin.advancing.Advancer`, with the host in place of the device."""

    def __init__(self, plan, *, slots):
        from prismreplay.plugin import advance_simulation

        self.simulation = advance_simulation
        self.layout = plan.layout
        shared = None if slots is None else memoryview(slots).cast("q")
        self.tables = advance_simulation.new_tables(self.layout, shared)
        self.describe = plan.describe
        self.running = {}
        self.debt_ns = 0
        self.told = []
        self.next = 0

    def begin(self, origin_ns):
        self.origin_ns = origin_ns

    def prepare(self, codes):
        self.prepared = list(codes)

    def now(self):
        return time.monotonic_ns() - self.origin_ns - self.debt_ns

    def arrive(self, program, _stream):
        self.next += 1
        self.running[self.next] = self.simulation.Running(
            self.layout, self.tables, program, self.now()
        )
        return self.next

    def launch(self, program, stream, *, ticket=None, owes=False):
        ticket = ticket or self.arrive(program, stream)
        one = self.running.pop(ticket)
        while (outcome := one.poll()) is None:
            if self.now() > 5_000_000_000:
                raise TimeoutError(self.describe(one.missing, program.round_))
            time.sleep(0.001)
        end = outcome.ready_ns + program.transfer_ns
        while self.now() < end:
            time.sleep(1e-5)
        ended = self.now()
        if owes:
            self.debt_ns += ended - end
        self.told.append(SimpleNamespace(lateness_ns=ended - end))
        return ticket

    def records(self):
        told, self.told = self.told, []
        return told

    def check(self):
        """Nothing waits in vain unseen."""

    def release(self):
        """Nothing is held."""


class FakeNccl:
    """Gloo, with what NCCL can do and gloo cannot."""

    def __init__(self, name, place, size, port, _backends):
        from prismreplay.run.real_group import gloo_group

        self.real = gloo_group(name, place, size, port)
        self.place, self.size = place, size

    def __getattr__(self, name):
        return getattr(self.real, name)

    def alltoall(self, outs, ins, _options):
        works, got = [], []
        for other in range(self.size):
            if ins[other].numel():
                works.append(self.real.send([ins[other].contiguous()], other, 0))
            if outs[other].numel():
                there = torch.empty_like(outs[other], memory_format=torch.contiguous_format)
                works.append(self.real.recv([there], other, 0))
                got.append((outs[other], there))
        for work in works:
            work.wait()
        for out, there in got:
            out.copy_(there)
