"""Processor time that communication takes beside the program."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prismcalib.comm_logs import Reading
from prismcalib.comm_samples import SCHEMA
from prismcalib.comm_table import CommTable
from prismreplay.run.contention import Contention, ProcessorCosts
from prismreplay.runtime.operations import Call, Group, Op
from prismtrace.schema import DType


class Clock:
    """Processor time of the thread that works: a millisecond each time."""

    def __init__(self) -> None:
        self.pieces = 0

    def work(self) -> None:
        self.pieces += 1

    def now(self) -> int:
        return self.pieces * 1_000_000


@pytest.fixture
def contention():
    clock = Clock()
    made = Contention(clock.now, clock.work)
    made.clock = clock
    return made


def settle(contention, taken_ns):
    """Wait until the thread has taken so much."""
    deadline = time.monotonic() + 20
    while contention.taken_ns < taken_ns and time.monotonic() < deadline:
        time.sleep(0.001)
    return contention.taken_ns


def test_what_operations_cost_is_taken_while_the_program_runs(contention):
    contention.begin(1, 3_000_000)
    contention.begin(2, 2_000_000)
    assert settle(contention, 5_000_000) == 5_000_000
    assert contention.waited(2, 10**9) == 0
    assert contention.waived_ns == 0


def test_nothing_is_taken_while_the_emulator_runs(contention):
    with contention.paused():
        with contention.paused():
            contention.begin(1, 3_000_000)
        time.sleep(0.05)
        assert contention.clock.pieces == 0
    assert settle(contention, 3_000_000) == 3_000_000


def test_while_the_program_waits_the_backend_goes_on(contention):
    with contention.paused():
        contention.begin(1, 3_000_000)
        contention.begin(2, 4_000_000)
        contention.begin(3, 5_000_000)
        # 2 ms of waiting are for the first operation; the second needs 1 + 4 more.
        assert contention.waited(2, 2_000_000) == 5_000_000
        assert contention.waived_ns == 7_000_000
        # Nobody waits for a past end.
        assert contention.waited(2, -5) == 0
        assert contention.waited(3, 6_000_000) == 0
    assert contention.taken_ns == 0


def test_free_operations_start_no_thread(contention):
    before = threading.active_count()
    contention.begin(1, 0)
    assert threading.active_count() == before
    assert contention.waited(1, 100) == 0


@given(
    costs=st.lists(st.integers(1, 1000), max_size=8),
    waits=st.lists(st.tuples(st.integers(0, 8), st.integers(-10, 3000)), max_size=6),
)
def test_all_is_taken_waived_or_owed(costs, waits):
    contention = Contention()
    with contention.paused():
        for number, cost in enumerate(costs):
            contention.begin(number, cost)
        for number, elapsed in waits:
            longer = contention.waited(number, elapsed)
            assert 0 <= longer <= sum(costs[: number + 1])
        owed = sum(one.left_ns for one in contention._owed)
        assert contention.waived_ns + owed == sum(costs)
        contention.waited(len(costs), 0)


class Timer:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.ns = 10**9

    def now(self) -> int:
        return self.ns


def test_a_backend_takes_its_time_bit_by_bit():
    clock, timer = Clock(), Timer()
    contention = Contention(clock.now, clock.work, timer.now)
    contention.begin(1, 8_000_000, 40_000_000)
    time.sleep(0.02)
    assert contention.taken_ns == 0
    timer.ns += 10_000_000
    assert settle(contention, 2_000_000) == 2_000_000
    # What is left falls into the waiting.
    with contention.paused():
        assert contention.waited(1, 30_000_000) == 0
    assert contention.waived_ns == 6_000_000


def test_nothing_is_taken_between_waits_that_follow_each_other():
    clock, timer = Clock(), Timer()
    contention = Contention(clock.now, clock.work, timer.now)
    with contention.paused():
        contention.begin(1, 2_000_000)
        contention.begin(2, 3_000_000)
    for _ in range(5):
        time.sleep(0.005)
        with contention.paused():
            contention.waited(1, 0)
    assert contention.taken_ns == 0
    # The program goes on.
    timer.ns += 1_000_000
    assert settle(contention, 3_000_000) == 3_000_000


def test_two_operations_at_a_time():
    clock, timer = Clock(), Timer()
    contention = Contention(clock.now, clock.work, timer.now)
    with contention.paused():
        for number in range(1, 5):
            contention.begin(number, 1_000_000, 10_000_000)
    timer.ns += 10_000_000
    assert settle(contention, 2_000_000) == 2_000_000
    timer.ns += 10_000_000
    assert settle(contention, 4_000_000) == 4_000_000
    assert contention.waited(4, 0) == 0


def test_real_threads_take_real_time():
    contention = Contention()
    begun = time.process_time_ns()
    contention.begin(1, 5_000_000)
    settle(contention, 5_000_000)
    assert time.process_time_ns() - begun >= 5_000_000


# --- costs -----------------------------------------------------------------------------------


def op(call=Call.ALL_REDUCE, nbytes=4000, members=8):
    group = Group("g", tuple(range(members)), 0, "gloo")
    return Op(call, group, 0, (), (), nbytes, DType.FLOAT32, peer=1 if call is Call.SEND else None)


@pytest.fixture
def costs():
    rows = [
        ("all_reduce", "float32", 2, 1, 4000, True, 900, 100),
        ("all_reduce", "float32", 8, 1, 4000, True, 900, 400),
        ("all_reduce", "float32", 8, 2, 4000, True, 9000, 300),
        ("send", "float32", 2, 1, 4000, False, 900, 70),
        ("broadcast", "float32", 8, 1, 4000, True, 900, None),
    ]
    samples = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    return ProcessorCosts(CommTable.of([Reading(Path("log"), samples, {})]))


def test_measured_groups_cost_what_was_measured(costs):
    assert costs.of(op(), 8) == 400
    assert costs.of(op(), 2) == 100
    assert costs.of(op(Call.SEND), 8) == 70
    assert costs.of(op(Call.RECV), 8) == 70
    assert costs.span_ns(op(), 8) == 900


def test_other_groups_cost_by_the_bytes_a_rank_moves(costs):
    assert costs.of(op(), 4) == pytest.approx(100 * (3 / 4) / (1 / 2))
    assert costs.of(op(), 16) == pytest.approx(400 * (15 / 16) / (7 / 8), abs=1)


def test_what_nobody_measured_costs_nothing(costs):
    assert costs.of(op(Call.BROADCAST), 8) == 0
    assert costs.of(op(Call.ALL_GATHER), 8) == 0
    assert costs.of(op(Call.BARRIER), 8) == 0
    assert costs.of(op(), 1) == 0
    assert costs.span_ns(op(Call.ALL_GATHER), 8) == 0
