"""Devices of which a test says what they do, on a clock that only tests and spinning move."""

from __future__ import annotations

from collections import defaultdict

DEFAULT = (0, 0, 1)
SIDE = (7, 0, 1)
LATENCY_NS = 1000
GLANCE_NS = 100


class FakeEvent:
    """`at` is when its stream reached it, on the host's clock."""

    def __init__(self):
        self.at = None


class FakeWork:
    """A communication on the backend's own stream."""

    def __init__(self, end_ns):
        self.end_ns = end_ns
        self.waited_on = []
        self.fails = False


class FakeDevices:
    """Streams in which work takes time. The device's clock is `offset` ahead, and `pace` as fast."""

    def __init__(self, pace=1.0, offset_ns=5_000_000_000, connections=32):
        self.now = 1_000_000
        self.pace, self.offset_ns = pace, offset_ns
        self.free = defaultdict(int)
        self.stream = DEFAULT
        self.is_ready = True
        self.is_stuck = False
        self.is_broken = False
        self.held, self.peak = 0, 0
        self.made = 0
        self.records = 0
        self.memory_ns = 0
        self.private = []
        self._connections = connections

    # What a test does

    def launch(self, duration_ns, stream=None):
        """The program puts work into a stream; returns when it will be over."""
        key = stream or self.stream
        self.free[key] = max(self.now, self.free[key]) + duration_ns
        return self.free[key]

    def communicate(self, duration_ns, behind=0):
        """The backend's stream waits for the current one; returns torch's handle."""
        return FakeWork(max(self.now, self.free[self.stream], behind) + duration_ns)

    def pass_time(self, duration_ns):
        """The host does something else."""
        self.now += duration_ns

    # The seam

    def host_ns(self):
        self.now += GLANCE_NS
        return self.now

    def ready(self):
        return self.is_ready

    def current(self):
        return self.stream

    def new_event(self):
        self.made += 1
        return FakeEvent()

    def record(self, event, stream):
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.records += 1
        event.at = max(self.now + LATENCY_NS, self.free[stream])

    def done(self, event):
        if self.is_broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return not self.is_stuck and event.at <= self.now

    def elapsed_ns(self, earlier, later):
        assert max(earlier.at, later.at) <= self.now, "not there yet"
        return (later.at - earlier.at) * self.pace

    def private_stream(self, device):
        self.private.append((100 + len(self.private), device, 1))
        return self.private[-1]

    def connections(self):
        return self._connections

    def after(self, work, stream):
        if work.fails:
            raise RuntimeError("NCCL error")
        work.waited_on.append(stream)
        self.free[stream] = max(self.free[stream], work.end_ns)

    def memory(self, device):  # noqa: ARG002
        self.now += self.memory_ns
        return self.held, self.peak
