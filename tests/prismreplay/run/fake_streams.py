"""A GPU that is this process: streams are names, work is done at once, on CPU tensors."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager

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

    def bytes_per_ns(self):
        return 1000.0

    def memory(self):
        return 100, 200, 150
