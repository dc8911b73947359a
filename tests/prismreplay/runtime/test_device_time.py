"""Marks in streams of fake devices become times of nodes: late, in order, whatever goes wrong."""

from __future__ import annotations

import pytest

import prismtrace as pt
from prismreplay.runtime import device_time
from prismreplay.runtime.clock_line import ClockLine, Pair
from prismreplay.runtime.device_time import Timeline
from prismtrace.spool import TIMED, read_spool
from tests.prismreplay.runtime.fake_devices import DEFAULT, SIDE, FakeDevices

NEAR_NS = 2_000
US, MS = 1_000, 1_000_000


class Story:
    """A timeline, its devices, and what it has told so far."""

    def __init__(self, folder, **options):
        self.devices = FakeDevices(**options)
        self.writer = pt.SpanWriter(folder / "0.spool", background=False)
        self.told = {}
        self.memory = {}
        self.order = []
        self.facts = {}
        self.writer.timed = self._hear
        self.writer.amend = lambda index, **values: self.memory.__setitem__(index, values)
        self.writer.add = lambda record: (
            self.facts.update(record)
            if isinstance(record, dict)
            else self._hear(record[1], record[2], None)
        )
        self.timeline = Timeline(self.devices, self.writer)

    def _hear(self, index, start, end):
        assert index not in self.told, "told twice"
        self.told[index] = (start, end)
        self.order.append(index)

    def settle(self, after_ns=0):
        self.devices.pass_time(after_ns)
        self.timeline.settle()

    def settle_all(self):
        """As two steps that are long enough."""
        for _ in range(2):
            self.settle(after_ns=device_time.PAIR_EVERY_NS)


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path)


def near(times, start, end):
    assert times[0] == pytest.approx(start, abs=NEAR_NS)
    assert times[1] == pytest.approx(end, abs=NEAR_NS)


def test_a_segment_lasts_as_long_as_its_device_works(story):
    devices, timeline = story.devices, story.timeline
    begin = timeline.mark()
    begun, over = devices.now, devices.launch(3 * MS)
    timeline.segment(0, 0, begin, timeline.mark())
    story.settle()
    assert story.told == {}, "the device is not there yet"
    story.settle_all()
    near(story.told[0], begun, over)


def test_nothing_is_asked_of_a_stream_within_a_step(story):
    story.timeline.mark()
    asked = []
    story.devices.done = asked.append
    for index in range(100):
        begin = story.timeline.mark()
        story.devices.launch(MS)
        story.timeline.segment(index, 0, begin, story.timeline.mark())
    assert asked == []


def test_a_program_without_steps_is_told_in_between(story, monkeypatch):
    monkeypatch.setattr(device_time, "MOST_MARKS", 8)
    for index in range(60):
        story.timeline.communication(index, story.timeline.mark())
        story.timeline.waited(index, story.timeline.mark())
        story.devices.pass_time(device_time.PAIR_EVERY_NS)
    assert len(story.told) > 40
    assert story.devices.made < 60


def test_events_are_used_again(story):
    for index in range(50):
        begin = story.timeline.mark()
        story.devices.launch(US)
        story.timeline.segment(index, 0, begin, story.timeline.mark())
        story.settle_all()
    assert len(story.told) == 50
    stamps = 3 * 2 * 50
    assert story.devices.made - stamps <= 10
    assert story.devices.records >= 100 + stamps


def test_the_clocks_of_device_and_host_drift_apart(tmp_path):
    story = Story(tmp_path, pace=1 + 50e-6)
    expected = {}
    for index in range(40):
        begin = story.timeline.mark()
        begun = max(story.devices.now, story.devices.free[DEFAULT])
        expected[index] = (begun, story.devices.launch(400 * MS))
        story.timeline.segment(index, 0, begin, story.timeline.mark())
        story.settle(after_ns=401 * MS)
    story.settle_all()
    for index, times in expected.items():
        near(story.told[index], *times)
    story.timeline.close()
    assert 0 < story.facts["residual_ns"] < NEAR_NS


def test_a_device_that_is_too_busy_for_stamps_keeps_the_first_pair(tmp_path):
    # All streams share one connection: the clock's own event stands behind the program's work.
    story = Story(tmp_path)
    story.timeline.mark()
    clock = story.devices.private[0]
    for index in range(3):
        begin = story.timeline.mark()
        begun = max(story.devices.now, story.devices.free[DEFAULT])
        over = story.devices.launch(700 * MS)
        story.devices.free[clock] = over
        story.timeline.segment(index, 0, begin, story.timeline.mark())
        story.settle(after_ns=600 * MS)
    story.devices.pass_time(5_000 * MS)
    story.timeline.close()
    near(story.told[2], begun, over)


def test_communication_on_the_program_s_own_stream_ends_at_the_wait(story):
    devices, timeline = story.devices, story.timeline
    devices.launch(MS)
    timeline.communication(0, timeline.mark())
    begun, over = devices.free[DEFAULT], devices.launch(2 * MS)
    timeline.follow(0, None, "group", 0)
    timeline.waited(0, timeline.mark())
    story.settle_all()
    near(story.told[0], begun, over)
    assert len(devices.private) == 1, "the clock's"


def test_communication_beside_computation_ends_where_its_follower_sees_it(story):
    devices, timeline = story.devices, story.timeline
    timeline.communication(0, timeline.mark())
    work = devices.communicate(2 * MS)
    begun = devices.now
    timeline.follow(0, work, "group", 0)
    assert work.waited_on == [devices.private[1]]
    devices.launch(9 * MS)
    timeline.waited(0, timeline.mark())
    story.settle_all()
    near(story.told[0], begun, work.end_ns)
    # The next one of the queue has the same follower, another queue one of its own.
    for index, queue in ((1, "group"), (2, "other")):
        timeline.communication(index, timeline.mark())
        timeline.follow(index, devices.communicate(MS), queue, 0)
    assert len(devices.private) == 3


def test_a_wait_and_a_follower_agree_on_the_end(story):
    devices, timeline = story.devices, story.timeline
    timeline.communication(0, timeline.mark())
    work = devices.communicate(2 * MS)
    timeline.follow(0, work, "group", 0)
    devices.free[DEFAULT] = work.end_ns
    entry = timeline._open[0]
    entry.end.event.at += 700  # the follower's event comes a little later
    timeline.waited(0, timeline.mark())
    timeline.segment(1, 0, timeline.mark(), timeline.mark())
    story.settle_all()
    assert story.told[0][1] <= story.told[1][0]


def test_with_few_connections_nobody_follows(tmp_path):
    story = Story(tmp_path, connections=1)
    devices, timeline = story.devices, story.timeline
    timeline.communication(0, timeline.mark())
    work = devices.communicate(MS)
    timeline.follow(0, work, "group", 0)
    devices.launch(3 * MS)
    timeline.waited(0, timeline.mark())
    assert work.waited_on == []
    story.settle_all()
    assert story.told[0][1] == pytest.approx(devices.free[DEFAULT], abs=NEAR_NS)
    timeline.close()
    assert story.facts["ends_at_wait"] == 1


def test_a_batch_has_one_follower_and_one_end(story):
    devices, timeline = story.devices, story.timeline
    for index in range(3):
        timeline.communication(index, timeline.mark())
    work = devices.communicate(MS)
    timeline.follow_all(range(3), work, "group", 0)
    assert len(work.waited_on) == 1
    devices.free[DEFAULT] = work.end_ns
    for index in range(3):
        timeline.waited(index, timeline.mark())
    story.settle_all()
    assert len({end for _, end in story.told.values()}) == 1


def test_a_communication_of_the_host_ends_when_the_backend_says_so(story):
    devices, timeline = story.devices, story.timeline
    timeline.communication(0, timeline.mark())
    devices.pass_time(2 * MS)
    timeline.ended(0, devices.now)
    over = devices.now
    devices.pass_time(MS)
    timeline.waited(0, timeline.mark())
    story.settle_all()
    assert story.told[0][1] == over


def test_a_communication_of_the_host_that_the_device_is_behind_takes_no_time(story):
    devices, timeline = story.devices, story.timeline
    devices.launch(10 * MS)
    issued = timeline.mark()
    timeline.communication(0, issued)
    devices.pass_time(MS)
    timeline.ended(0, devices.now)
    timeline.waited(0, timeline.mark())
    story.settle_all()
    start, end = story.told[0]
    assert start == end == pytest.approx(devices.free[DEFAULT], abs=NEAR_NS)


def test_an_end_that_comes_steps_later_is_told_then(story):
    devices, timeline = story.devices, story.timeline
    timeline.communication(0, timeline.mark())
    timeline.segment(1, 0, timeline.mark(), timeline.mark())
    story.settle_all()
    assert list(story.told) == [1]
    timeline.ended(0, devices.now)
    story.settle_all()
    assert 0 in story.told
    timeline.communication(2, timeline.mark())
    story.settle_all()
    timeline.waited(2, timeline.mark())
    story.settle_all()
    assert 2 in story.told
    assert timeline._open == {}


def test_each_stream_is_waited_for_on_its_own(story):
    devices, timeline = story.devices, story.timeline
    begin = timeline.mark()
    slow_begin = timeline.mark(SIDE)
    over = devices.launch(900 * MS, SIDE)
    timeline.segment(0, 1, slow_begin, timeline.mark(SIDE))
    timeline.segment(1, 0, begin, timeline.mark())
    story.settle(after_ns=device_time.PAIR_EVERY_NS)
    story.settle()
    assert story.told == {}, "a stream is not there yet"
    story.settle_all()
    assert story.told[0][1] == pytest.approx(over, abs=NEAR_NS)


def test_segments_of_a_stream_never_overlap(story):
    timeline = story.timeline
    marks = [timeline.mark() for _ in range(4)]
    marks[1].event.at += 5_000  # a place that events of two streams stand for
    timeline.segment(0, 0, marks[0], marks[1])
    timeline.segment(1, 0, marks[2], marks[3])
    story.settle_all()
    assert story.told[0][1] <= story.told[1][0] <= story.told[1][1]


def test_while_no_device_is_in_use_times_are_the_host_s(story):
    devices, timeline = story.devices, story.timeline
    devices.is_ready = False
    begin = timeline.mark()
    devices.pass_time(MS)
    timeline.segment(0, 0, begin, timeline.mark())
    story.settle()
    assert story.told[0] == (begin.host_ns, begin.host_ns + MS + 100)
    assert devices.made == 0
    timeline.close()
    assert story.facts == {}


def test_after_a_long_pause_marks_are_counted_from_a_new_pair(story):
    first = story.timeline.mark()
    story.devices.pass_time(device_time.LONGEST_NS)
    second = story.timeline.mark()
    assert second.anchor.number == first.anchor.number + 1


def test_nothing_is_asked_while_a_graph_is_captured(story):
    devices, timeline = story.devices, story.timeline
    begin = timeline.mark()
    timeline.segment(0, 0, begin, timeline.mark())
    devices.is_ready = False
    devices.done = None
    assert timeline.mark().event is None
    story.settle(after_ns=device_time.PAIR_EVERY_NS)
    assert story.told == {}
    del devices.done
    devices.is_ready = True
    story.settle_all()
    assert 0 in story.told


def test_what_a_stuck_device_never_reached_has_the_host_s_times(story, monkeypatch):
    monkeypatch.setattr(device_time, "LAST_WORDS_S", 0.05)
    devices, timeline = story.devices, story.timeline
    begin = timeline.mark()
    timeline.segment(0, 0, begin, timeline.mark())
    timeline.communication(1, timeline.mark())
    devices.is_stuck = True
    timeline.close()
    assert story.told[0][0] == begin.host_ns
    assert story.told[1][1] is None, "nobody saw it end"
    assert story.facts["host_times"] == 3


def test_a_failed_kernel_breaks_no_program(story):
    devices, timeline = story.devices, story.timeline
    begin = timeline.mark()
    timeline.segment(0, 0, begin, timeline.mark())
    devices.is_broken = True
    story.settle(after_ns=device_time.PAIR_EVERY_NS)
    later = timeline.mark()
    assert later.event is None
    timeline.segment(1, 0, later, timeline.mark())
    timeline.close()
    assert set(story.told) == {0, 1}


def test_a_failed_communication_is_left_to_the_program(story):
    devices, timeline = story.devices, story.timeline
    timeline.communication(0, timeline.mark())
    work = devices.communicate(MS)
    work.fails = True
    timeline.follow(0, work, "group", 0)
    timeline.close()
    assert story.told[0][1] is None


def test_memory_is_asked_for_as_often_as_is_cheap(story):
    devices, timeline = story.devices, story.timeline
    devices.memory_ns = 10 * US
    devices.held, devices.peak = 100, 300
    for index in range(20):
        timeline.segment(index, 0, timeline.mark(), timeline.mark())
        devices.pass_time(device_time.MEMORY_SHARE * 2 * US)
    assert story.memory[0] == {"mem_bytes": 100, "mem_peak_bytes": 300}
    assert 2 <= len(story.memory) <= 5
    assert story.memory[max(story.memory)] == {"mem_bytes": 100}, "the peak has not risen"


def test_a_spool_of_a_program_that_was_cut_off_ends_where_times_do(tmp_path):
    writer = pt.SpanWriter(tmp_path / "0.spool", background=False)
    writer.add_fact({"timed_later": True})
    for step in range(3):
        writer.span("work", None, None, step=step)
    writer.add((TIMED, 0, 10, 5))
    writer.flush()
    report = pt.assemble(tmp_path / "0.spool", tmp_path / "out.parquet")
    assert read_spool(tmp_path / "0.spool").ended is False
    assert report.policies["lost-rows"] == 2
    writer.close()


def test_a_line_through_pairs_leaves_wide_ones_out():
    line = ClockLine()
    assert not line
    for number in range(5):
        line.add(Pair(number * 1000, number * 1001 + 7, 2))
    line.add(Pair(4500, 9_000, 500))
    line.add(Pair(6000, 6013, 3))
    assert [line.host_ns(time) for time in (-1000, 0, 500, 4000, 5000, 7000)] == [
        -994, 7, 507, 4011, 5012, 7014
    ]  # fmt: skip
    assert line.residual_ns == 2
