"""The source of `cuda/advance.cu`, run on the host, against its simulation in Python."""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prismreplay.plugin.advance_code import (
    MOST_ITEMS,
    MOST_TERMS,
    Final,
    Item,
    Kind,
    Layout,
    Slot,
    Table,
    encode,
    pack_time,
    slot_of_word,
    unpack_time,
    word_of_slot,
)
from prismreplay.plugin.advance_simulation import Running, Status
from prismreplay.plugin.advances import advance_of_row

KEPT = 8
CALL = [
    "shared", "own", "seen", "alarm", "debt", "stamps", "kept", "fixed", "fixed_own", "ring",
    "ring_own", "rounds", "period_ns", "origin_ns", "limit_ns", "tail_ns", "ticket", "round",
    "transfer_ns", "flags",
]  # fmt: skip
LAYOUT = Layout(rounds=3, fixed=(6, 5), ring=(4, 3), period_ns=1000)


class Machine:
    """Tables and launches, as `Advancer` has them on a device."""

    def __init__(self, host_kernel, layout=LAYOUT):
        self.library, self.layout = host_kernel("advance"), layout
        self.tables = tuple(np.zeros(layout.slots(table), np.int64) for table in Table)
        self.seen = np.zeros((KEPT, 8), np.int64)
        self.alarm, self.debt = np.zeros(2, np.int64), np.zeros(1, np.int64)
        self.stamps = np.zeros(KEPT, np.int64)

    def call(self, ticket, round_=0, *, stamp=None, **more):
        if stamp is not None:
            self.stamps[ticket % KEPT] = stamp
        values = {
            "shared": self.tables[0].ctypes.data,
            "own": self.tables[1].ctypes.data,
            "seen": self.seen.ctypes.data,
            "alarm": self.alarm.ctypes.data,
            "debt": self.debt.ctypes.data,
            "stamps": self.stamps.ctypes.data,
            "kept": KEPT,
            "fixed": self.layout.fixed[0],
            "fixed_own": self.layout.fixed[1],
            "ring": self.layout.ring[0],
            "ring_own": self.layout.ring[1],
            "rounds": self.layout.rounds,
            "period_ns": self.layout.period_ns,
            "origin_ns": 0,
            "limit_ns": 0,
            "tail_ns": 0,
            "ticket": ticket,
            "round": round_,
            "transfer_ns": 0,
            "flags": 0 if stamp is None else 1,
        } | more
        return np.array([values[name] for name in CALL], np.int64)

    def outcome(self, ticket):
        return advance_of_row(ticket, self.seen[ticket % KEPT].tolist())

    def run(self, *launches):
        """Operations side by side; (call, code)."""
        calls = np.concatenate([call for call, _ in launches])
        codes = (ctypes.c_void_p * len(launches))(*(code.words.ctypes.data for _, code in launches))
        self.library.run(len(launches), ctypes.c_void_p(calls.ctypes.data), codes)


def random_slot(rng, table=None):
    table = Table(int(rng.integers(2))) if table is None else table
    if rng.random() < 0.5:
        return Slot(
            Kind.FIXED, table, int(rng.integers(LAYOUT.fixed[table])), int(rng.integers(1, 3))
        )
    return Slot(Kind.RING, table, int(rng.integers(LAYOUT.ring[table])), int(rng.integers(0, 3)))


def random_items(rng, count, most_terms):
    items = []
    for number in range(count):
        terms = []
        for _ in range(int(rng.integers(most_terms + 1))):
            if number and rng.random() < 0.3:
                slot = Slot(Kind.LOCAL, Table.OWN, int(rng.integers(number)))
            else:
                slot = random_slot(rng, Table.SHARED)
            terms.append((slot, int(rng.integers(100))))
        items.append(
            Item(
                tuple(terms),
                # What is written is not read from the tables in the same pass.
                random_slot(rng, Table.OWN),
                int(rng.integers(500)) if rng.random() < 0.3 else None,
                bool(rng.random() < 0.3),
            )
        )
    finals = rng.permutation(count)[:2]
    for final, number in zip((Final.FIRST, Final.SECOND), finals, strict=False):
        items[number] = items[number]._replace(final=final)
    return items


def same_as_simulated(machine, items, round_, arrival, rng, filled):
    words = machine.tables[0]
    for table in Table:
        machine.tables[table][:] = 0
    for at in range(len(words)):
        if rng.random() < filled:
            words[at] = pack_time(int(rng.integers(1000)), int(rng.integers(1, 4)))
    if filled == 1:
        for item in items:
            for slot, _ in item.terms:
                if slot.kind is not Kind.LOCAL:
                    table, at, lap = LAYOUT.find(slot, round_)
                    words[at] = pack_time(unpack_time(int(words[at]))[0], lap)
    arrivals = [random_slot(rng, Table.OWN)]
    code = encode(arrivals, items)
    tables = tuple(table.tolist() for table in machine.tables)
    program = SimpleNamespace(code=code, round_=round_)
    running = Running(LAYOUT, tables, program, arrival)
    outcome = running.poll()
    machine.alarm[:] = 0
    machine.run((machine.call(3, round_, stamp=arrival), code))
    found = machine.outcome(3)
    ready, status = found.ready_ns, found.status
    assert (machine.seen[3, 0] >> 32, found.arrival_ns, found.end_ns) == (4, arrival, ready)
    for table, expected in zip(machine.tables, tables, strict=True):
        assert table.tolist() == expected
    if outcome is None:
        assert status == Status.LATE_SLOT
        assert found.missing == running.missing
    else:
        assert (ready, status) == (outcome.ready_ns, outcome.status)
    assert machine.alarm.tolist() == [0 if status == Status.DONE else 4, 0]
    return Status(status)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 12), st.sampled_from([0.7, 1]))
def test_one_pass_over_any_code(host_kernel, seed, count, most_terms, filled):
    rng = np.random.default_rng(seed)
    machine = Machine(host_kernel)
    items = random_items(rng, count, most_terms)
    round_, arrival = int(rng.integers(3, 1000)), int(rng.integers(2000))
    same_as_simulated(machine, items, round_, arrival, rng, filled)


def test_codes_of_several_chunks(host_kernel):
    rng = np.random.default_rng(1)
    machine, layout = Machine(host_kernel), LAYOUT
    slots = [Slot(Kind.FIXED, Table.SHARED, number, 1) for number in range(layout.fixed[0])]
    items = [
        Item(
            (
                (slots[number % 6], 1),
                *([(Slot(Kind.LOCAL, Table.OWN, number - 1), 1)] if number else []),
                # A local one of another chunk is read from where it was written.
                *([(Slot(Kind.LOCAL, Table.OWN, 0), 1)] if number else []),
            ),
            Slot(Kind.FIXED, Table.OWN, min(number, 1), 2),
        )
        for number in range(MOST_ITEMS + 44)
    ]
    items[MOST_ITEMS - 1] = items[MOST_ITEMS - 1]._replace(target=Slot(Kind.FIXED, Table.OWN, 2, 2))
    for number in range(MOST_ITEMS, len(items)):
        items[number] = items[number]._replace(target=Slot(Kind.FIXED, Table.OWN, 3, 2))
    items[-1] = items[-1]._replace(final=Final.FIRST)
    assert encode([], items).words[0] >> 32 == 2
    assert same_as_simulated(machine, items, 5, 7, rng, 1) is Status.DONE
    many = [Item(tuple((slots[number % 6], number) for number in range(MOST_TERMS)))] * 2
    many[1] = many[1]._replace(final=Final.FIRST)
    assert encode([], many).words[0] >> 32 == 2
    assert same_as_simulated(machine, many, 5, 7, rng, 1) is Status.DONE
    with pytest.raises(ValueError, match="1025 terms"):
        encode([], [Item((*many[0].terms, (slots[0], 1)))])


def test_slots_keep_their_names_and_times():
    for kind in Kind:
        for table in Table:
            slot = Slot(kind, table, 123_456_789, 40_000)
            assert slot_of_word(word_of_slot(slot)) == slot
    for time_ns in (0, -5, 1, 10**14):
        assert unpack_time(pack_time(time_ns, 64_999)) == (time_ns, 64_999)
        as_signed = int(np.array(pack_time(time_ns, 64_999), np.uint64).astype(np.int64))
        assert unpack_time(as_signed) == (time_ns, 64_999)
    assert unpack_time(0)[1] == 0


def test_operations_wait_for_each_other_side_by_side(host_kernel):
    """Each one waits for the next one's arrival, whatever the order in which they start."""
    machine = Machine(host_kernel)
    slots = [Slot(Kind.RING, Table.SHARED, number, 0) for number in range(4)]
    launches = []
    for number in range(4):
        others = [(slot, 100) for slot in slots if slot is not slots[number]]
        item = Item(tuple(others), own=True, final=Final.FIRST)
        call = machine.call(
            number, 9, stamp=10 * number, limit_ns=10**10, origin_ns=time.monotonic_ns()
        )
        launches.append((call, encode([slots[number]], [item])))
    machine.run(*launches)
    assert machine.seen[:4, 5].tolist() == [Status.DONE] * 4
    assert machine.seen[:4, 3].tolist() == [130, 130, 130, 120]


def test_holds_end_after_their_time_and_lateness_is_owed(host_kernel):
    machine = Machine(host_kernel)
    origin = time.monotonic_ns()
    code = encode([], [])
    later = {"origin_ns": origin, "limit_ns": 10**10}
    machine.run((machine.call(0, transfer_ns=3_000_000, tail_ns=1000, **later), code))
    found = machine.outcome(0)
    assert found.status is Status.DONE
    assert 0 <= found.began_ns == found.arrival_ns == found.ready_ns == found.end_ns - 3_000_000
    assert found.lateness_ns >= 0
    assert machine.debt[0] == 0
    machine.run((machine.call(1, stamp=0, transfer_ns=5, flags=3, **later), code))
    found = machine.outcome(1)
    assert (found.arrival_ns, found.end_ns) == (0, 5)
    assert machine.debt[0] == found.lateness_ns > 3_000_000
    machine.run((machine.call(2, **later), code))
    assert machine.seen[2, 2] < time.monotonic_ns() - origin - 3_000_000
    machine.library.arrive(
        ctypes.c_void_p(machine.call(4, **later).ctypes.data),
        ctypes.c_void_p(encode([Slot(Kind.FIXED, Table.OWN, 2, 1)], []).words.ctypes.data),
    )
    assert unpack_time(int(machine.tables[1][2])) == (machine.stamps[4], 1)


def test_a_debt_made_meanwhile_moves_the_end_of_a_hold(host_kernel):
    machine = Machine(host_kernel)
    begun, minute = time.monotonic_ns(), 60_000_000_000
    call = machine.call(0, transfer_ns=2 * minute, origin_ns=begun, limit_ns=4 * minute)
    holding = threading.Thread(target=machine.run, args=((call, encode([], [])),))
    holding.start()
    while not machine.seen[0, 4]:
        time.sleep(0.001)
    assert machine.seen[0, 0] == 0
    machine.debt[0] = -2 * minute  # as if a piece had been that much faster than it should be
    holding.join()
    ended = time.monotonic_ns()
    assert ended - begun < minute
    found = machine.outcome(0)
    assert found.status is Status.DONE
    assert 0 <= found.lateness_ns <= ended - (begun - 2 * minute) - found.end_ns


def test_all_go_when_one_has_given_up(host_kernel):
    machine = Machine(host_kernel)
    slot = Slot(Kind.FIXED, Table.SHARED, 1, 1)
    code = encode([], [Item(((slot, 0),), final=Final.FIRST)])
    machine.run(
        (machine.call(0, limit_ns=20_000_000), code),
        (machine.call(1, limit_ns=10**11), code),
        (
            machine.call(2, limit_ns=10**11, transfer_ns=10**11, origin_ns=time.monotonic_ns()),
            encode([], []),
        ),
    )
    assert machine.seen[:3, 5].tolist() == [Status.LATE_SLOT, Status.RELEASED, Status.RELEASED]
    assert machine.outcome(0).missing == slot
    assert machine.alarm.tolist() == [1, 0]
    machine.tables[0][1] = pack_time(3, 2)
    machine.alarm[:] = 0
    machine.run((machine.call(5, limit_ns=10**11), code))
    assert machine.seen[5, 5:7].tolist() == [Status.OVERWRITTEN, word_of_slot(slot)]
