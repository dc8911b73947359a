"""Reading ahead: bounded, in order, and never wrong."""

from __future__ import annotations

import threading
import time

import pytest

from prismreplay.collect.handover import Parcel
from prismreplay.errors import TensorRecordingError
from prismreplay.tensors.prefetching import Contribution, Prefetcher, Wanted


class Disk:
    def __init__(self, size=10):
        self.reads, self.size = [], size
        self.thread = threading.current_thread()

    def load(self, wanted):
        if wanted.seq < 0:
            raise TensorRecordingError("damaged")
        self.reads.append((wanted, threading.current_thread() is self.thread))
        return Contribution((), Parcel(bytes(self.size), None, self.size))


def wait_until(true):
    deadline = time.monotonic() + 10
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert true()


def operations(count):
    return [[Wanted(1, "0/0", seq), Wanted(2, "0/0", seq)] for seq in range(count)]


def test_what_is_read_ahead_is_not_read_again():
    disk = Disk()
    ahead = Prefetcher(disk.load, operations(50), most_bytes=100)
    ahead.start()
    for number, operation in enumerate(operations(50)):
        wait_until(lambda number=number: len(disk.reads) >= 2 * number + 2)
        for wanted in operation:
            assert ahead.take(wanted).parcel.nbytes == 10
    report = ahead.stop()
    assert report.hits + report.misses == 100
    assert report.misses <= 2
    assert len(disk.reads) <= 102
    assert report.peak_bytes <= 110


def test_the_pool_is_bounded():
    disk = Disk()
    ahead = Prefetcher(disk.load, operations(1_000), most_bytes=100)
    ahead.start()
    wait_until(lambda: len(disk.reads) >= 10)
    time.sleep(0.05)
    assert len(disk.reads) == 10
    ahead.stop()


def test_what_the_program_leaves_out_makes_room():
    disk = Disk()
    ahead = Prefetcher(disk.load, operations(1_000), most_bytes=100)
    ahead.start()
    wait_until(lambda: len(disk.reads) >= 10)
    for seq in range(500, 600):
        ahead.take(Wanted(1, "0/0", seq))
    report = ahead.stop()
    assert report.evicted > 0
    assert report.misses > 0


def test_what_cannot_be_read_is_told_to_who_needs_it():
    ahead = Prefetcher(Disk().load, [[Wanted(1, "0/0", -1)]], most_bytes=100)
    ahead.start()
    with pytest.raises(TensorRecordingError, match="damaged"):
        ahead.take(Wanted(1, "0/0", -1))
    ahead.stop()


@pytest.mark.parametrize("most_bytes", [100, 1_000])
def test_what_is_needed_again_is_there_again(most_bytes):
    disk = Disk()
    last = operations(7)[4:]
    ahead = Prefetcher(disk.load, operations(7), most_bytes, last)
    ahead.start()
    for operation in [*operations(7), *last * 20]:
        for wanted in operation:
            wait_until(lambda wanted=wanted: ahead.holds(wanted))
            assert ahead.take(wanted).parcel.nbytes == 10
    report = ahead.stop()
    assert (report.hits, report.misses) == (14 + 6 * 20, 0)
    assert report.peak_bytes <= most_bytes + 10
    # Where there is room it is read only once.
    assert (len(disk.reads) == 14) == (most_bytes == 1_000)


def test_what_is_needed_again_and_damaged_is_not_tried_for_ever():
    bad = [[Wanted(1, "0/0", -1)]]
    ahead = Prefetcher(Disk().load, bad, 100, bad)
    ahead.start()
    for _ in range(2):
        with pytest.raises(TensorRecordingError, match="damaged"):
            ahead.take(Wanted(1, "0/0", -1))
    wait_until(lambda: not ahead.reads)
    ahead.stop()
