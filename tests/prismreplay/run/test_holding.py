"""Holds end at their deadlines, whatever the kernel makes of a sleep. Time is a fake."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from prismreplay.run.holding import Holder


class Clock:
    """Every look costs 100 ns; sleeps end late by what the test says."""

    def __init__(self, oversleeps=()):
        self.now = 0
        self.slept = 0
        self.oversleeps = list(oversleeps)

    def __call__(self):
        self.now += 100
        return self.now

    def sleep(self, seconds):
        late = self.oversleeps.pop(0) if self.oversleeps else 0
        self.slept += round(seconds * 1e9)
        self.now += round(seconds * 1e9) + late


@given(st.lists(st.tuples(st.integers(0, 5_000_000), st.integers(0, 300_000)), max_size=30))
def test_never_early_and_late_only_by_what_a_sleep_overslept(holds):
    clock = Clock([late for _, late in holds])
    holder = Holder(clock, clock.sleep)
    for wait, _ in holds:
        deadline = clock.now + wait
        late = holder.hold_until(deadline)
        assert clock.now >= deadline
        assert late == clock.now - deadline
        assert late <= 300_200
    report = holder.report()
    assert report.holds + report.late_calls == len(holds)


def test_margin_follows_the_kernel():
    clock = Clock([900_000, *[0] * 100])
    holder = Holder(clock, clock.sleep)
    holder.hold_until(clock.now + 2_000_000)
    # Once bitten, it wakes up in time even if that happens again.
    clock.oversleeps.insert(0, 900_000)
    assert holder.hold_until(clock.now + 10_000_000) <= 200
    before = clock.slept
    for _ in range(100):
        holder.hold_until(clock.now + 10_000_000)
    # And it does not spin long for ever after.
    assert clock.slept - before > 100 * 9_600_000


def test_deadlines_that_have_passed_are_counted_apart():
    clock = Clock()
    holder = Holder(clock, clock.sleep)
    clock.now = 5_000
    assert holder.hold_until(2_000) == 3_100
    report = holder.report()
    assert (report.holds, report.late_calls, report.called_late_ns) == (0, 1, 3_100)


def test_on_the_real_clock():
    holder = Holder()
    for wait in (0, 50_000, 3_000_000):
        deadline = time.monotonic_ns() + wait
        holder.hold_until(deadline)
        assert time.monotonic_ns() >= deadline
