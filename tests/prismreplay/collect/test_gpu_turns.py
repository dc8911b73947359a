from __future__ import annotations

import threading
import time

import pytest

from prismreplay.collect.gpu_room import Room
from prismreplay.collect.gpu_turns import GpuTurns
from prismreplay.collect.gpus import Gpu
from prismreplay.errors import PluginUnavailableError, SwapError

GIB = 1 << 30
CONTEXT = 600 << 20


class Driver:
    """Plays the driver: moves processes at once, or fails as told."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, int]] = []
        self.refuses: dict[int, SwapError] = {}
        self.hold: threading.Event | None = None

    def move_out(self, pid):
        self._move("out", pid)

    def move_in(self, pid):
        self._move("in", pid)

    def _move(self, way, pid):
        if self.hold is not None:
            self.hold.wait(5)
        if pid in self.refuses:
            raise self.refuses[pid]
        self.moves.append((way, pid))


class Setting:
    """Some ranks with processes 100, 101, ... on GPUs of 10 GiB."""

    def __init__(self, gpus=1, ranks=4, meter=None, host=100 * GIB, disk=0) -> None:
        room = Room([Gpu(str(n), 10 * GIB) for n in range(gpus)], 10 * GIB, host, disk)
        self.driver = Driver()
        self.told: list[tuple[int, tuple]] = []
        self.now = 0.0
        self.turns = GpuTurns(
            room,
            {rank: 100 + rank for rank in range(ranks)},
            lambda rank, message: self.told.append((rank, message)),
            meter=meter,
            load_swapper=lambda: self.driver,
            clock=lambda: self.now,
        )

    def come(self, rank, running=(), lent=(), seconds=5.0):
        """`rank` has a turn; wait until it is in. Ranks that are let in on the way."""
        self.turns.ask(rank)
        return self.until(lambda let_in: rank in let_in, [*running, rank], lent, seconds)

    def until(self, done, running=(), lent=(), seconds=5.0):
        let_in, deadline = [], time.monotonic() + seconds
        while time.monotonic() < deadline:
            let_in += self.turns.step(running, lent)
            if done(let_in):
                return let_in
            time.sleep(0.001)
        raise AssertionError(f"not in after {seconds} s: {self.told}, {self.driver.moves}")

    def takes(self, rank, gib, allocated=None):
        """`rank` says that it takes so much, CUDA itself included."""
        reserved = int(gib * GIB) - CONTEXT
        kept = reserved if allocated is None else int(allocated * GIB)
        self.turns.hear(rank, ("memory", reserved, kept, reserved))


@pytest.fixture
def make():
    made = []

    def make(**more):
        made.append(Setting(**more))
        return made[-1]

    yield make
    for one in made:
        one.turns.close()


def test_ranks_that_fit_are_let_in_at_once_and_nothing_moves(make):
    here = make()
    for rank in range(3):
        assert here.come(rank) == [rank]
        here.takes(rank, 3)
    assert all(here.turns.is_in(rank) for rank in range(3))
    assert here.driver.moves == []
    assert here.turns.report.moved_out == 0
    assert here.turns.report.most_bytes == 9 * GIB


def test_a_rank_that_does_not_fit_takes_the_place_of_another_and_back(make):
    here = make()
    for rank in range(2):
        here.come(rank)
        here.takes(rank, 4)
    here.come(2)
    here.takes(2, 4)
    assert here.driver.moves == [("out", 100)]
    assert not here.turns.is_in(0)
    here.come(0)
    assert here.driver.moves == [("out", 100), ("out", 101), ("in", 100)]
    report = here.turns.report
    assert (report.moved_out, report.moved_in) == (2, 1)
    assert (report.bytes_out, report.bytes_in) == (8 * GIB, 4 * GIB)
    assert report.rank_bytes == 4 * GIB


def test_a_rank_that_is_in_has_others_leave_before_it_grows(make):
    here = make()
    for rank in range(3):
        here.come(rank)
        here.takes(rank, 1)
    here.takes(0, 6)
    assert here.turns.is_in(1)
    assert not here.turns.has_room(1, running=[1])
    assert here.come(1) == [1]
    assert here.driver.moves == [("out", 100)]
    assert here.turns.has_room(1, running=[1])


def test_while_a_rank_leaves_it_is_not_in_and_comes_back_when_it_has_a_turn(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.driver.hold = threading.Event()
    here.turns.ask(1)
    assert here.turns.step([1]) == []
    assert not here.turns.is_in(0)
    here.turns.ask(0)
    here.driver.hold.set()
    here.until(lambda let_in: 1 in let_in, [0, 1])
    here.takes(1, 8)
    here.until(lambda let_in: 0 in let_in, [0])
    assert here.driver.moves == [("out", 100), ("out", 101), ("in", 100)]


def test_what_allocators_keep_is_asked_for_before_anyone_is_moved(make):
    here = make()
    here.come(0)
    here.takes(0, 9, allocated=2)
    here.turns.ask(1)
    assert here.turns.step([1]) == []
    assert here.told == [(0, ("trim", 0))]
    here.turns.hear(0, ("trimmed", GIB, GIB, 9 * GIB - CONTEXT))
    # It may grow to nine again, but not while it waits.
    here.until(lambda let_in: 1 in let_in or here.driver.moves, [1])
    assert here.turns.report.trimmed == 1
    assert here.turns.report.trimmed_bytes == 8 * GIB - CONTEXT


def test_a_rank_that_does_not_answer_is_moved_as_it_is(make):
    here = make()
    here.come(0)
    here.takes(0, 9, allocated=2)
    here.turns.ask(1)
    here.turns.step([1])
    here.now += 11
    here.turns.step([1])
    here.until(lambda let_in: 1 in let_in, [1])
    assert here.driver.moves == [("out", 100)]


def test_a_computing_rank_stays_until_it_blocks(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.turns.ask(1)
    assert here.turns.step([0, 1]) == []
    assert here.driver.moves == []
    assert here.until(lambda let_in: 1 in let_in, [1]) == [1]


def test_a_sleeping_rank_leaves_last_and_comes_back_unasked(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.come(1, lent=[0])
    here.takes(1, 8)
    assert here.driver.moves == [("out", 100)]
    assert here.until(lambda let_in: 0 in let_in) == [0]


def test_where_the_driver_refuses_another_rank_is_moved(make):
    here = make()
    for rank in range(2):
        here.come(rank)
        here.takes(rank, 4)
    here.driver.refuses[100] = SwapError("busy", usable=True)
    here.come(2)
    assert here.driver.moves == [("out", 101)]


def test_a_rank_that_is_lost_ends_the_run(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.driver.refuses[100] = SwapError("it broke")
    with pytest.raises(SwapError, match="it broke") as caught:
        here.come(1)
    assert caught.value.where == "rank 0"


def test_what_the_swapper_raises_otherwise_is_told_too(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.driver.refuses[100] = ZeroDivisionError("odd")  # type: ignore[assignment]
    with pytest.raises(SwapError, match="moving rank 0 failed"):
        here.come(1)


def test_a_driver_that_hangs_does_not_keep_the_run(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.driver.hold = threading.Event()
    here.turns.ask(1)
    here.turns.step([1])
    here.now += 59
    here.turns.step([1])
    here.now += 300
    with pytest.raises(SwapError, match="moving rank 0 for 359 s"):
        here.turns.step([1])
    here.driver.hold.set()


def test_without_anything_to_move_ranks_it_is_needed_only_when_they_do_not_fit(make):
    here = make()

    def nothing():
        raise PluginUnavailableError("no cuda-python")

    here.turns._load_swapper = nothing
    here.come(0)
    here.takes(0, 8)
    with pytest.raises(PluginUnavailableError):
        here.come(1)


def test_gpus_do_not_wait_for_each_other(make):
    here = make(gpus=2)
    here.come(0)
    here.takes(0, 8)
    here.driver.hold = threading.Event()
    here.turns.ask(2)
    assert here.turns.step([2]) == []
    assert here.come(1, running=[2]) == [1]
    here.driver.hold.set()
    here.until(lambda let_in: 2 in let_in, [2])


def test_ranks_spill_to_disk(make):
    here = make(host=9 * GIB, disk=100 * GIB)
    for rank in range(2):
        here.come(rank)
        here.takes(rank, 8)
    here.turns.ask(2)
    here.until(lambda _: here.told, [2])
    assert here.told == [(0, ("spill", 0))]
    here.turns.hear(0, ("spilled", 8 * GIB))
    here.until(lambda let_in: 2 in let_in, [2])
    assert here.driver.moves == [("out", 100), ("out", 101)]
    assert here.turns.report.spilled == 1


def test_a_rank_that_ends_makes_room(make):
    here = make()
    here.come(0)
    here.takes(0, 8)
    here.turns.end(0)
    assert here.come(1) == [1]
    assert here.driver.moves == []


class Nvml:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.used = 0
        self.by_pid: dict[int, int] = {}

    def memory(self, _token):
        return 10 * GIB, self.used

    def processes(self, _token):
        return self.by_pid


def test_nvmls_account_of_a_process_counts(make):
    nvml = Nvml()
    here = make(meter=nvml)
    here.come(0)
    nvml.by_pid[100] = 3 * GIB
    here.turns.hear(0, ("memory", 2 * GIB, 2 * GIB, 2 * GIB))
    assert here.turns.report.rank_bytes == 3 * GIB
    assert here.turns.report.measured_by == "nvml"


def test_where_nvml_does_not_know_processes_cuda_is_estimated_from_the_whole(make):
    nvml = Nvml()
    here = make(meter=nvml)
    for rank in range(2):
        here.come(rank)
        here.turns.hear(rank, ("memory", 2 * GIB, 2 * GIB, 2 * GIB))
    nvml.used = 4 * GIB + 2 * (300 << 20)
    here.turns.hear(0, ("memory", 2 * GIB, 2 * GIB, 2 * GIB))
    here.turns.hear(1, ("memory", 2 * GIB, 2 * GIB, 2 * GIB))
    assert here.turns._context_bytes < CONTEXT
    assert here.turns.report.measured_by == "ranks"


def test_no_return_before_the_gpu_has_room_for_what_left_it(make):
    nvml = Nvml()
    here = make(meter=nvml)
    here.come(0)
    here.takes(0, 8)
    here.come(1)
    here.takes(1, 8)
    nvml.used = 9 * GIB
    with pytest.raises(SwapError, match="there is no room"):
        here.come(0)
    assert ("in", 100) not in here.driver.moves
