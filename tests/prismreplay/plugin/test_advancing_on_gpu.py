"""Operations of a plan on a GPU: their times against the simulation and the virtual world.

The same tests also run on the host, with threads as streams (`host_device.py`).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

# Streams that share one of the driver's queues wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from prismreplay.errors import PluginError, PluginTimeoutError
from prismreplay.plugin import advancing
from prismreplay.plugin.advance_code import (
    Final,
    Item,
    Kind,
    Layout,
    Slot,
    Table,
    encode,
    pack_time,
)
from prismreplay.plugin.advance_simulation import Running, Status
from prismreplay.plugin.advancing import Advancer, ClockPair
from tests.prismreplay.plugin import host_device

LAYOUT = Layout(rounds=3, fixed=(600, 300), ring=(40, 30), period_ns=1000)


def program(items, arrivals=(), round_=0, transfer_ns=0):
    code = encode(arrivals, items)
    return SimpleNamespace(code=code, round_=round_, transfer_ns=transfer_ns, label="seq=7")


class Gpu:
    """What tests need of a device beside `Advancer`."""

    pair = None

    def __init__(self):
        self.torch = pytest.importorskip("torch")
        self.torch.zeros(1, device="cuda")
        self.made = []

    def advancer(self, layout=LAYOUT, **more):
        one = Advancer(layout, **{"limit_ns": 10_000_000_000, "tail_ns": 1600, **more})
        one.begin(time.monotonic_ns(), self.pair)
        self.made.append(one)
        return one

    def stream(self):
        return self.torch.cuda.Stream()

    def allocated(self):
        """Bytes that torch has ever given out."""
        return self.torch.cuda.memory_stats()["allocated_bytes.all.allocated"]

    def busy(self, stream):
        """For more than 2 ms."""
        with self.torch.cuda.stream(stream):
            self.torch.cuda._sleep(10_000_000)

    def synchronize(self):
        self.torch.cuda.synchronize()

    def put(self, address, words):
        from cuda.bindings import driver

        words = np.ascontiguousarray(words, np.int64)
        self.synchronize()
        (status,) = driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes)
        assert int(status) == 0

    def get(self, address, count):
        from cuda.bindings import driver

        words = np.zeros(count, np.int64)
        self.synchronize()
        (status,) = driver.cuMemcpyDtoH(words.ctypes.data, address, words.nbytes)
        assert int(status) == 0
        return words

    def outcomes(self, one):
        self.synchronize()
        return list(one.records())

    def close(self):
        for one in self.made:
            one.close()


class Host(Gpu):
    """The same with threads."""

    pair = ClockPair(0, 0, 0)  # both clocks are one

    def __init__(self, library, monkeypatch):
        self.memories, self.made, self.streams = [], [], itertools.count(2)
        monkeypatch.setattr(advancing, "require_device", lambda _: 0)
        monkeypatch.setattr(advancing, "kernel", host_device.kernel)
        monkeypatch.setattr(advancing, "DriverMemory", lambda _: self._memory(library))

    def _memory(self, library):
        self.memories.append(host_device.HostMemory(library))
        return self.memories[-1]

    def stream(self):
        return next(self.streams)

    def allocated(self):
        return 0

    def busy(self, stream):
        self.memories[-1].busy(stream, 0.003)

    def synchronize(self):
        for one in self.memories:
            one.synchronize()

    def put(self, address, words):
        self.synchronize()
        self._words(address, len(words))[:] = words

    def get(self, address, count):
        self.synchronize()
        return self._words(address, count).copy()

    def _words(self, address, count):
        return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "gpu":
        one = Gpu()
    else:
        one = Host(request.getfixturevalue("host_kernel")("advance"), monkeypatch)
    yield one
    one.close()


def test_an_operation_takes_its_transfer_and_no_memory_of_torch(device):
    before = device.allocated()
    one, stream = device.advancer(), device.stream()
    first = one.launch(None, stream, transfer_ns=200_000)
    second = one.launch(program([], transfer_ns=50_000), stream)
    found = device.outcomes(one)
    assert [each.ticket for each in found] == [first, second]
    assert all(each.status is Status.DONE and each.missing is None for each in found)
    assert found[0].arrival_ns == found[0].ready_ns == found[0].end_ns - 200_000
    # Its kernel ends a known tail before its time.
    assert all(each.lateness_ns >= 0 for each in found)
    assert found[1].began_ns >= found[0].end_ns - one.tail_ns
    assert not list(one.records())
    one.check()
    assert device.allocated() == before


def random_items(rng, count, most_terms, lap):
    items = []
    for number in range(count):
        terms = []
        for _ in range(int(rng.integers(most_terms + 1))):
            if number and rng.random() < 0.3:
                slot = Slot(Kind.LOCAL, Table.OWN, int(rng.integers(number)))
            elif rng.random() < 0.5:
                slot = Slot(Kind.FIXED, Table.SHARED, int(rng.integers(LAYOUT.fixed[0])), lap)
            else:
                back = int(rng.integers(0, 3))
                slot = Slot(Kind.RING, Table.SHARED, int(rng.integers(LAYOUT.ring[0])), back)
            terms.append((slot, int(rng.integers(10**6))))
        floor = int(rng.integers(500)) if rng.random() < 0.3 else None
        target = Slot(Kind.FIXED, Table.OWN, number % LAYOUT.fixed[1], 2)
        items.append(Item(tuple(terms), target, floor, bool(rng.random() < 0.3)))
    items[-1] = items[-1]._replace(final=Final.FIRST)
    return items


@pytest.mark.parametrize(
    ("count", "most_terms"), [(1, 1), (1, 40), (5, 3), (9, 30), (40, 12), (2, 900), (280, 6)]
)
def test_a_code_gives_what_its_simulation_gives(device, count, most_terms):
    rng, round_ = np.random.default_rng(count), 11
    one, stream = device.advancer(limit_ns=3_000_000), device.stream()
    one.begin(time.monotonic_ns() - 10_000_000_000, device.pair)  # nothing to hold for
    sizes = [LAYOUT.slots(table) for table in Table]
    for full in (1.0, 1.0, 0.98):
        items = random_items(rng, count, most_terms, 1)
        shared = [0] * sizes[0]
        for item in items:
            for slot, _ in item.terms:
                if slot.kind is not Kind.LOCAL and rng.random() < full:
                    _, at, lap = LAYOUT.find(slot, round_)
                    shared[at] = pack_time(int(rng.integers(10**9)), lap)
        device.put(one._shared, shared)
        device.put(one._own, [0] * sizes[1])
        arrivals = [Slot(Kind.RING, Table.OWN, 5, 1)]
        # Nobody stamps it: the arrival is the start of the kernel.
        given = program(items, arrivals, round_)
        one.launch(given, stream)
        (found,) = device.outcomes(one)
        own = [0] * sizes[1]
        running = Running(LAYOUT, (shared, own), given, found.arrival_ns)
        outcome = running.poll()
        assert device.get(one._own, sizes[1]).tolist() == own
        if outcome is None:
            assert found.status is Status.LATE_SLOT
            assert found.missing == running.missing
            one._alarm[:] = 0
        else:
            assert (found.status, found.ready_ns) == (Status.DONE, outcome.ready_ns)


def test_streams_wait_for_what_is_launched_later(device):
    one, streams = device.advancer(), [device.stream() for _ in range(2)]
    slots = [Slot(Kind.RING, Table.SHARED, number, 0) for number in range(2)]
    items = [Item(((slots[1], 5),), own=True, final=Final.FIRST)]
    early = one.launch(program(items, [slots[0]], 4), streams[0])
    time.sleep(0.01)
    items = [Item(((slots[0], 7),), own=True, final=Final.FIRST)]
    late = one.launch(program(items, [slots[1]], 4), streams[1])
    found = {each.ticket: each for each in device.outcomes(one)}
    assert found[early].ready_ns == found[late].arrival_ns + 5
    assert found[late].ready_ns == found[late].arrival_ns
    assert found[late].arrival_ns > found[early].arrival_ns


def test_an_arrival_may_be_noted_before_other_work(device):
    one, stream = device.advancer(), device.stream()
    ticket = one.arrive(None, stream)
    device.busy(stream)
    assert one.launch(None, stream, transfer_ns=10_000, ticket=ticket) == ticket
    (found,) = device.outcomes(one)
    assert found.arrival_ns < found.began_ns
    assert found.end_ns == found.arrival_ns + 10_000


def test_what_does_not_arrive_is_named_and_all_others_go_on(device):
    one = device.advancer(limit_ns=20_000_000, describe=lambda slot, _: f"slot {slot.number}")
    slot, stream = Slot(Kind.FIXED, Table.SHARED, 3, 1), device.stream()
    waiting = program([Item(((slot, 0),), final=Final.FIRST)])
    one.launch(waiting, stream)
    one.launch(waiting, stream)
    one.launch(None, stream, transfer_ns=3_600_000_000_000)
    begun = time.monotonic()
    states = [each.status for each in device.outcomes(one)]
    assert time.monotonic() - begun < 5
    assert states[0] is Status.LATE_SLOT
    assert states[1] in (Status.LATE_SLOT, Status.RELEASED)
    with pytest.raises(PluginTimeoutError, match=r"\[seq=7\] has waited 0.02 s .* for slot 3"):
        one.check()
    other = device.advancer()
    device.put(other._shared + 24, [pack_time(0, 2)])
    other.launch(waiting, stream)
    assert device.outcomes(other)[0].status is Status.OVERWRITTEN
    with pytest.raises(PluginError, match="overwritten"):
        other.check()


def test_all_are_let_go(device):
    one = device.advancer(limit_ns=600_000_000_000)
    slot, stream = Slot(Kind.FIXED, Table.SHARED, 3, 1), device.stream()
    one.launch(program([Item(((slot, 0),), final=Final.FIRST)]), stream)
    one.launch(None, stream, transfer_ns=500_000_000_000)
    one.release()
    assert [each.status for each in device.outcomes(one)] == [Status.RELEASED] * 2
    one.check()


def test_lateness_and_shares_of_time_are_owed(device):
    one, stream = device.advancer(), device.stream()
    begin = one.arrive(None, stream)
    device.busy(stream)
    end = one.arrive(None, stream)
    one.owe(begin, end, 0.5, stream)
    stamps = device.get(one._stamps, one._kept)
    spent = int(stamps[end] - stamps[begin])
    assert int(device.get(one._debt, 1)[0]) == spent // 2 > 1_000_000
    ticket = one.arrive(None, stream)
    device.busy(stream)
    one.launch(None, stream, ticket=ticket, transfer_ns=1000, owes=True)
    (late,) = device.outcomes(one)
    assert late.lateness_ns > 1_000_000
    assert int(device.get(one._debt, 1)[0]) == spent // 2 + late.lateness_ns


def test_clocks_run_side_by_side(device):
    one = device.advancer()
    first = one.clock_pair(20)
    time.sleep(0.2)
    second = one.clock_pair(20)
    passed = second.host_ns - first.host_ns
    unsure = first.half_ns + second.half_ns
    assert abs(second.device_ns - first.device_ns - passed) <= unsure + passed // 1000
    assert one.calibrate(20) > 0


@pytest.mark.parametrize("sandbox", [[0], [1, 6]], ids=str)
def test_jobs_run_as_in_the_virtual_world(device, sandbox):
    pytest.importorskip("networkx")
    import polars as pl

    import prismcalib
    from prismcalib import synth
    from prismreplay.plan import OpKey, compile_plan
    from prismreplay.run.device_plan import DevicePlan

    def job(steps):
        spec = synth.JobSpec(pp=2, tp=2, dp=2, microbatches=4, layers_per_stage=2, steps=steps)
        return prismcalib.merge(synth.generate(spec)).trace

    plan = compile_plan(job(2), sandbox)
    world, plans = plan.world(), {rank: DevicePlan(plan, rank) for rank in sandbox}
    layout = plans[sandbox[0]].layout
    memory = mmap.mmap(-1, max(mmap.PAGESIZE, 8 * layout.slots(Table.SHARED)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    shared = None if len(sandbox) == 1 else address
    # Memory is registered once in a process; further ranks of it know its address already.
    ones, origin_ns = {}, time.monotonic_ns()
    for rank in sandbox:
        there = shared if not ones else None
        ones[rank] = device.advancer(layout, describe=plans[rank].describe, shared=there)
        if ones[rank] is not ones[sandbox[0]]:
            ones[rank]._shared = ones[sandbox[0]]._shared
            ones[rank]._set_call()
        ones[rank].begin(origin_ns, device.pair)
    rows = job(5).collect().filter(pl.col("rank").is_in(sandbox) & pl.col("seq").is_not_null())
    streams, launched = {}, []
    for row in rows.sort("start_ns").iter_rows(named=True):
        rank, sender, receiver = row["rank"], -1, -1
        if row["kind"] in ("send", "recv"):
            ends = (rank, row["peer"])
            sender, receiver = ends if row["kind"] == "send" else ends[::-1]
        key = OpKey(row["group"], row["seq"], sender, receiver)
        if not world.is_boundary(key, rank):
            continue
        queue = rank, key.group, sender, receiver
        stream = streams.setdefault(queue, device.stream())
        given = plans[rank].program(key, queue=queue)
        ticket = ones[rank].launch(given, stream, transfer_ns=int(row["start_ns"]) % 5000)
        launched.append((rank, ticket, key))
    device.synchronize()
    found = {(rank, each.ticket): each for rank in sandbox for each in ones[rank].records()}
    for one in ones.values():
        one.check()
    for rank, ticket, key in sorted(launched, key=lambda each: found[each[:2]].arrival_ns):
        world.arrived(key, rank, found[rank, ticket].arrival_ns)
    wrong = [
        (rank, key, found[rank, ticket], world.ready_ns(key, rank))
        for rank, ticket, key in launched
        if found[rank, ticket].ready_ns != world.ready_ns(key, rank)
    ]
    assert not wrong, wrong[:3]
    assert len(launched) > 100
