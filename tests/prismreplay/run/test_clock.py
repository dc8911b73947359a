"""A rank's clock: debts set it back, paces stretch it."""

from __future__ import annotations

import pytest

from prismreplay.run.clock import RunClock


class Machine:
    def __init__(self):
        self.now = 1_000

    def __call__(self):
        return self.now


@pytest.fixture
def machine():
    return Machine()


def test_what_the_emulator_costs_is_no_time(machine):
    clock = RunClock(machine)
    machine.now += 70
    clock.handed_over(50)
    machine.now += 30
    clock.late(20)
    clock.take_over(5)
    assert clock.now() == 1_000 + 100 - 75
    assert (clock.debt_ns, clock.late_ns, clock.late_answers, clock.handing_ns) == (75, 20, 1, 50)


def test_a_piece_at_another_pace(machine):
    clock = RunClock(machine)
    clock.run_at(0.5)
    machine.now += 100
    assert clock.now() == 1_050
    clock.run_at(2.0)
    machine.now += 100
    assert clock.now() == 1_250
    clock.run_at(1.0)
    machine.now += 10
    assert clock.now() == 1_260
    assert clock.debt_ns == machine.now - clock.now()


def test_waits_keep_their_own_pace(machine):
    clock = RunClock(machine)
    clock.run_at(0.5)
    with clock.at_its_own_pace():
        machine.now += 100
        assert clock.now() == 1_100
    assert clock.pace == 0.5
    machine.now += 100
    assert clock.now() == 1_150


def test_costs_within_a_piece_do_not_turn_time_back(machine):
    clock = RunClock(machine)
    clock.run_at(0.1)
    machine.now += 100
    before = clock.now()
    with clock.at_its_own_pace():
        machine.now += 50
        clock.handed_over(50)
    assert clock.now() == before
