"""Hooks on torch.cuda's streams and events, with classes in their place that need no device."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest

pytest.importorskip("torch")

import torch

from prismreplay.runtime import cuda_streams
from prismreplay.runtime.cuda_streams import CudaDevices, watch_streams


class Stream:
    def __init__(self, number):
        self.stream_id, self.device_index, self.device_type = number, 0, 1


class Event:
    calls: ClassVar[list] = []

    def record(self, stream=None):
        self.calls.append(("record", stream.stream_id))

    def wait(self, stream=None):
        self.calls.append(("wait", stream.stream_id))


class Lanes:
    def __init__(self, calls):
        self.calls = calls

    def leave(self, stream):
        self.calls.append(("leave", stream[0]))

    def find(self):
        self.calls.append(("find",))

    def event_recorded(self, stream):
        self.calls.append(("announce", stream[0]))
        return (4, stream[0])

    def wait_for_event(self, stream, known, wait):
        self.calls.append(("before", stream[0], known))
        wait()


@pytest.fixture
def calls(monkeypatch):
    Event.calls = calls = []
    now = {"stream": Stream(0)}

    def set_stream(stream):
        calls.append(("set", stream.stream_id))
        now["stream"] = stream

    fakes = {
        "Stream": Stream,
        "Event": type("Hooked", (Event,), {"record": Event.record, "wait": Event.wait}),
        "set_stream": set_stream,
        "current_stream": lambda *_: now["stream"],
        "is_initialized": lambda: True,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(cuda_streams, "current_stream", lambda: cuda_streams._key(now["stream"]))
    watch_streams(Lanes(calls))
    return calls


def test_a_change_of_streams_is_told_before_and_after(calls):
    torch.cuda.set_stream(Stream(0))
    assert calls == [("set", 0)], "it is there already"
    torch.cuda.set_stream(Stream(3))
    assert calls[1:] == [("leave", 0), ("set", 3), ("find",)]


def test_an_event_carries_what_is_ahead_of_it(calls):
    event = torch.cuda.Event()
    event.wait(Stream(1))
    assert calls == [("wait", 1)], "nobody has recorded it"
    event.record()
    event.wait(Stream(1))
    assert calls[1:] == [("announce", 0), ("record", 0), ("before", 1, (4, 0)), ("wait", 1)]


def test_other_threads_are_none_of_the_program(calls):
    def load():
        torch.cuda.set_stream(Stream(3))
        event = torch.cuda.Event()
        event.record(Stream(3))
        event.wait(Stream(0))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert calls == [("set", 3), ("record", 3), ("wait", 0)]


def test_streams_that_are_none_of_cuda_s_are_let_be(calls):
    class Other:
        stream_id = 9

    event = torch.cuda.Event()
    event.record(Other())
    event.wait(Other())
    assert calls == [("record", 9), ("wait", 9)]


@pytest.mark.parametrize(
    ("said", "blocking", "expected"),
    [(None, None, 8), ("1", None, 1), ("99", None, 32), ("many", None, 8), ("32", "1", 0)],
)
def test_connections_are_those_that_the_driver_was_told(monkeypatch, said, blocking, expected):
    for name, value in (
        ("CUDA_DEVICE_MAX_CONNECTIONS", said),
        ("TORCH_NCCL_BLOCKING_WAIT", blocking),
    ):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_CudaEventBase", Event)
    assert CudaDevices().connections() == expected
