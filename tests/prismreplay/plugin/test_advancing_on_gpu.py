"""Operations of a plan on a GPU: their times against the simulation and the virtual world."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

# Streams that share one of the driver's queues wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from prismreplay.errors import PluginError, PluginTimeoutError  # noqa: E402
from prismreplay.plugin.advance_code import (  # noqa: E402
    Final,
    Item,
    Kind,
    Layout,
    Slot,
    Table,
    encode,
    pack_time,
)
from prismreplay.plugin.advance_simulation import Running, Status  # noqa: E402
from prismreplay.plugin.advancing import Advancer  # noqa: E402

pytestmark = pytest.mark.gpu

LAYOUT = Layout(rounds=3, fixed=(600, 300), ring=(40, 30), period_ns=1000)


def program(items, arrivals=(), round_=0, transfer_ns=0):
    code = encode(arrivals, items)
    return SimpleNamespace(code=code, round_=round_, transfer_ns=transfer_ns, label="seq=7")


@pytest.fixture
def advancer():
    made = []

    def make(layout=LAYOUT, **more):
        one = Advancer(layout, **{"limit_ns": 10_000_000_000, **more})
        one.begin(time.monotonic_ns())
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()


def put(address, words):
    from cuda.bindings import driver

    words = np.ascontiguousarray(words, np.int64)
    torch.cuda.synchronize()
    assert driver.cuMemcpyHtoD(address, words.ctypes.data, words.nbytes) == (0,)


def get(address, count):
    from cuda.bindings import driver

    words = np.zeros(count, np.int64)
    torch.cuda.synchronize()
    assert driver.cuMemcpyDtoH(words.ctypes.data, address, words.nbytes) == (0,)
    return words


def outcomes(one):
    torch.cuda.synchronize()
    return list(one.records())


def test_an_operation_takes_its_transfer_and_no_memory_of_torch(advancer):
    torch.zeros(1, device="cuda")
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    one = advancer()
    first = one.launch(None, transfer_ns=200_000)
    second = one.launch(program([], transfer_ns=50_000))
    found = outcomes(one)
    assert [each.ticket for each in found] == [first, second]
    assert all(each.status is Status.DONE and each.missing is None for each in found)
    assert found[0].arrival_ns == found[0].ready_ns == found[0].end_ns - 200_000
    # Its kernel ends a known tail before its time.
    assert all(each.lateness_ns >= 0 for each in found)
    assert found[1].began_ns >= found[0].end_ns - one.tail_ns
    assert not list(one.records())
    one.check()
    assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] == before


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
def test_a_code_gives_what_its_simulation_gives(advancer, count, most_terms):
    rng, round_ = np.random.default_rng(count), 11
    one = advancer(limit_ns=3_000_000)
    sizes = [LAYOUT.slots(table) for table in Table]
    for full in (1.0, 1.0, 0.98):
        items = random_items(rng, count, most_terms, 1)
        shared = [0] * sizes[0]
        for item in items:
            for slot, _ in item.terms:
                if slot.kind is not Kind.LOCAL and rng.random() < full:
                    _, at, lap = LAYOUT.find(slot, round_)
                    shared[at] = pack_time(int(rng.integers(10**9)), lap)
        put(one._shared, shared)
        put(one._own, [0] * sizes[1])
        arrivals = [Slot(Kind.RING, Table.OWN, 5, 1)]
        # Nobody stamps it: the arrival is the start of the kernel.
        given = program(items, arrivals, round_)
        one.launch(given)
        (found,) = outcomes(one)
        own = [0] * sizes[1]
        running = Running(LAYOUT, (shared, own), given, found.arrival_ns)
        outcome = running.poll()
        assert get(one._own, sizes[1]).tolist() == own
        if outcome is None:
            assert found.status is Status.LATE_SLOT
            assert found.missing == running.missing
            one._alarm[:] = 0
        else:
            assert (found.status, found.ready_ns) == (Status.DONE, outcome.ready_ns)


def test_streams_wait_for_what_is_launched_later(advancer):
    one, side = advancer(), torch.cuda.Stream()
    slots = [Slot(Kind.RING, Table.SHARED, number, 0) for number in range(2)]
    items = [Item(((slots[1], 5),), own=True, final=Final.FIRST)]
    early = one.launch(program(items, [slots[0]], 4))
    time.sleep(0.01)
    late = one.launch(program([Item(((slots[0], 7),), own=True, final=Final.FIRST)], [slots[1]], 4),
                      side)  # fmt: skip
    found = {each.ticket: each for each in outcomes(one)}
    assert found[early].ready_ns == found[late].arrival_ns + 5
    assert found[late].ready_ns == found[late].arrival_ns
    assert found[late].arrival_ns > found[early].arrival_ns + 5_000_000


def test_an_arrival_may_be_noted_before_other_work(advancer):
    one = advancer()
    ticket = one.arrive(None)
    torch.cuda._sleep(2_000_000)
    assert one.launch(None, transfer_ns=10_000, ticket=ticket) == ticket
    (found,) = outcomes(one)
    assert found.arrival_ns < found.began_ns
    assert found.end_ns == found.arrival_ns + 10_000


def test_what_does_not_arrive_is_named_and_all_others_go_on(advancer):
    one = advancer(limit_ns=20_000_000, describe=lambda slot, _: f"slot {slot.number}")
    slot = Slot(Kind.FIXED, Table.SHARED, 3, 1)
    waiting = program([Item(((slot, 0),), final=Final.FIRST)])
    one.launch(waiting)
    one.launch(waiting)
    one.launch(None, transfer_ns=3_600_000_000_000)
    begun = time.monotonic()
    states = [each.status for each in outcomes(one)]
    assert time.monotonic() - begun < 5
    assert states[0] is Status.LATE_SLOT
    assert states[1] in (Status.LATE_SLOT, Status.RELEASED)
    with pytest.raises(PluginTimeoutError, match=r"\[seq=7\] has waited 0.02 s .* for slot 3"):
        one.check()
    other = advancer()
    put(other._shared + 24, [pack_time(0, 2)])
    other.launch(waiting)
    assert outcomes(other)[0].status is Status.OVERWRITTEN
    with pytest.raises(PluginError, match="overwritten"):
        other.check()


def test_all_are_let_go(advancer):
    one = advancer(limit_ns=600_000_000_000)
    slot = Slot(Kind.FIXED, Table.SHARED, 3, 1)
    one.launch(program([Item(((slot, 0),), final=Final.FIRST)]))
    one.launch(None, transfer_ns=500_000_000_000)
    one.release()
    assert [each.status for each in outcomes(one)] == [Status.RELEASED] * 2
    one.check()


def test_lateness_and_shares_of_time_are_owed(advancer):
    one = advancer()
    begin = one.arrive(None)
    torch.cuda._sleep(10_000_000)
    end = one.arrive(None)
    one.owe(begin, end, 0.5)
    stamps = get(one._stamps, one._kept)
    spent = int(stamps[end] - stamps[begin])
    assert int(get(one._debt, 1)[0]) == spent // 2 > 1_000_000
    ticket = one.arrive(None)
    torch.cuda._sleep(10_000_000)
    one.launch(None, ticket=ticket, transfer_ns=1000, owes=True)
    (late,) = outcomes(one)
    assert late.lateness_ns > 1_000_000
    assert int(get(one._debt, 1)[0]) == spent // 2 + late.lateness_ns


def test_clocks_run_side_by_side(advancer):
    one = advancer()
    first = one.clock_pair()
    time.sleep(0.2)
    second = one.clock_pair()
    assert 0 < first.half_ns < 1_000_000
    passed = (second.device_ns - first.device_ns) / (second.host_ns - first.host_ns)
    assert 0.99 < passed < 1.01
    assert 0 < one.calibrate() < 1_000_000


@pytest.mark.parametrize("sandbox", [[0], [1, 6]], ids=str)
def test_jobs_run_as_in_the_virtual_world(advancer, sandbox):
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
        ones[rank] = advancer(layout, describe=plans[rank].describe, shared=there)
        if ones[rank] is not ones[sandbox[0]]:
            ones[rank]._shared = ones[sandbox[0]]._shared
            ones[rank]._set_call()
        ones[rank].begin(origin_ns)
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
        stream = streams.setdefault(queue, torch.cuda.Stream())
        given = plans[rank].program(key, queue=queue)
        ticket = ones[rank].launch(given, stream, transfer_ns=int(row["start_ns"]) % 5000)
        launched.append((rank, ticket, key))
    torch.cuda.synchronize()
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
