"""Named pieces at another pace on a GPU: a fake one, whose streams take the time that they are told."""

from __future__ import annotations

import pytest

import prismtrace as pt
from prismreplay.run.device_spinning import DevicePace, PaceKernels
from prismreplay.run.spinning import Spinner, read_spin
from prismreplay.runtime import device_time
from prismreplay.runtime.device_clock import Mark
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.paces import Paces
from prismreplay.runtime.program_position import ProgramPosition
from tests.prismreplay.runtime.fake_devices import DEFAULT, SIDE, FakeDevices

MS = 1_000_000
NEAR_NS = 5_000


class Stretcher:
    def __init__(self, devices):
        self.devices = devices

    def time(self, stream):
        return max(self.devices.now, self.devices.free[stream])

    def note(self, stream):
        return self.time(stream)

    def stretch(self, note, more, stream):
        self.devices.launch(round((self.time(stream) - note) * more), stream)


class Advancer:
    """Owes what it is told."""

    def __init__(self, devices):
        self.devices, self.owed = devices, 0.0

    def arrive(self, program, stream):
        assert program is None
        return max(self.devices.now, self.devices.free[stream])

    def owe(self, begin, end, share, stream):  # noqa: ARG002
        self.owed += (end - begin) * share


class Rank:
    def __init__(self, folder, *spins):
        self.devices = devices = FakeDevices()
        self.times, self.next = {}, 0
        writer = pt.SpanWriter(folder / "0.spool", background=False)
        writer.timed = lambda index, start, end: self.times.__setitem__(index, (start, end))
        self.timeline = Timeline(devices, writer)
        self.advancer = Advancer(devices)
        kernels = PaceKernels(lambda key: key, lambda: Stretcher(devices), lambda: self.advancer)
        self.pace = DevicePace(self.timeline, kernels)
        self.position = ProgramPosition(cut=lambda _: None)
        read = [read_spin(where, factor) for where, factor in spins]
        self.spinner = Spinner(read, self.position, self.pace)

    def compute(self, duration_ns, name=None):
        """A segment of the trace; returns its index."""
        begin = self.timeline.mark()
        if name is not None:
            self.position.begin_range(name)
        self.devices.launch(duration_ns)
        if name is not None:
            self.position.end_range(name)
        self.timeline.segment(self.next, 0, begin, self.timeline.mark())
        self.next += 1
        return self.next - 1

    def durations(self):
        for _ in range(2):
            self.devices.pass_time(device_time.PAIR_EVERY_NS)
            self.timeline.settle()
        return [end - start for _, (start, end) in sorted(self.times.items())]


def near(*expected):
    return pytest.approx(list(expected), abs=NEAR_NS)


def test_a_slower_piece_keeps_its_stream_busy(tmp_path):
    rank = Rank(tmp_path, ("name = attention", 2.5))
    for name in (None, "attention", "mlp"):
        rank.compute(4 * MS, name)
    assert rank.durations() == near(4 * MS, 10 * MS, 4 * MS)
    assert rank.advancer.owed == 0
    assert rank.spinner.entered == 1


@pytest.mark.parametrize("factor", [0.25, 0.0])
def test_a_faster_piece_sets_the_rank_s_clock_back(tmp_path, factor):
    rank = Rank(tmp_path, ("name = attention", factor))
    for name in (None, "attention", "mlp"):
        rank.compute(4 * MS, name)
    assert rank.durations() == near(4 * MS, 4 * MS * factor, 4 * MS)
    assert rank.advancer.owed == pytest.approx(4 * MS * (1 - factor), abs=NEAR_NS)
    ends = [end for _, (_, end) in sorted(rank.times.items())]
    starts = [start for _, (start, _) in sorted(rank.times.items())]
    assert starts[2] == pytest.approx(ends[1], abs=NEAR_NS), "later ones are earlier"


def test_the_innermost_counts_and_communication_takes_its_time(tmp_path):
    rank = Rank(tmp_path, ("name = a", 2.0), ("name = b", 0.5))
    begin = rank.timeline.mark()
    rank.position.begin_range("a")
    rank.devices.launch(MS)
    rank.position.begin_range("b")
    rank.devices.launch(4 * MS)
    with rank.pace.at_its_own_pace():
        rank.devices.launch(8 * MS)
    rank.position.end_range("b")
    rank.devices.launch(3 * MS)
    rank.position.end_range("a")
    rank.timeline.segment(0, 0, begin, rank.timeline.mark())
    assert rank.pace.pace == 1.0
    with rank.pace.at_its_own_pace():
        pass
    assert rank.durations() == pytest.approx([2 * MS + 2 * MS + 8 * MS + 6 * MS], abs=4 * NEAR_NS)


def test_a_piece_belongs_to_the_stream_where_it_began(tmp_path):
    rank = Rank(tmp_path, ("name = a", 3.0))
    rank.position.begin_range("a")
    rank.devices.launch(MS)
    rank.devices.stream = SIDE
    rank.position.end_range("a")
    assert rank.devices.free[SIDE] == 0
    assert rank.devices.free[DEFAULT] - rank.devices.now == pytest.approx(3 * MS, abs=NEAR_NS)


def test_before_the_program_uses_its_gpu_there_is_no_pace(tmp_path):
    rank = Rank(tmp_path, ("name = a", 3.0))
    rank.devices.is_ready = False
    rank.position.begin_range("a")
    rank.devices.is_ready = True
    rank.position.end_range("a")
    assert rank.devices.free[DEFAULT] == 0


def test_without_a_plan_a_faster_piece_is_faster_in_the_trace_only():
    kernels = PaceKernels(lambda key: key, None, lambda: None)
    note = kernels.begin(0.5, DEFAULT)
    kernels.end(note, 0.5, DEFAULT)
    assert note is None


def test_times_between_paces():
    paces = Paces()
    assert not paces
    marks = [Mark(ns) for ns in (50, 100, 200, 300)]
    paces.add(marks[1], 0.5)
    paces.add(marks[2], 1.0)
    later = Mark(0, DEFAULT, object())
    paces.add(later, 2.0)
    assert paces
    paces.apply(marks)
    assert [mark.ns for mark in marks] == [50, 100, 150, 250]
    later.ns = 400
    paces.apply([later, Mark(500)])
    assert (later.ns, paces.time_of(500)) == (350, 550)
