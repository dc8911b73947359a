"""The ring kernel's own source, run on the host: tables, counts, pieces, odd sizes, deadlines."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from prismreplay.plugin.exchange_schedule import exchange
from prismreplay.plugin.ring_schedule import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from prismreplay.plugin.tables import Layout, encode
from prismreplay.plugin.tree_schedule import tree_all_reduce

TYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "u8": np.uint8, "i64": np.int64}
SMALL = Layout(channels=3, slots=2, slot_bytes=64)
SECOND_NS = 1_000_000_000


def zeros(count, dtype, offset=0):
    """Aligned to 128 bytes, or so many elements beside that."""
    size = np.dtype(dtype).itemsize
    raw = np.zeros((count + offset) * size + 256, np.uint8)
    start = -raw.ctypes.data % 128 + offset * size
    return raw[start : start + count * size].view(dtype)


class OnHost:
    """All roles of a schedule in one grid of host threads; some may stay away."""

    def __init__(self, host_kernel, schedule, element="f32", layout=SMALL, reduction=0, offset=0):
        self.schedule, self.layout, self.dtype = schedule, layout, TYPES[element]
        self.library = host_kernel("ring", ELEMENT=element, REDUCTION=reduction)
        self.memory = {
            role: zeros(layout.bytes_of(schedule, role), np.uint8) for role in schedule.roles
        }
        self.bases = {role: memory.ctypes.data for role, memory in self.memory.items()}
        self.source = {
            role: zeros(schedule.source_counts[role], self.dtype, offset) for role in schedule.roles
        }
        self.data = {
            role: zeros(schedule.data_counts[role], self.dtype, offset) for role in schedule.roles
        }
        self.report = np.zeros(8, np.int64)

    def run(self, roles=None, limit_ns=20 * SECOND_NS, identity=0):
        roles = self.schedule.roles if roles is None else roles
        size = np.dtype(self.dtype).itemsize
        tables = encode(self.schedule, roles, self.layout, self.bases, size)
        buffers = np.array(
            [[self.source[role].ctypes.data, self.data[role].ctypes.data] for role in roles],
            np.int64,
        )
        words = (tables.moves_at, tables.outs_at, tables.ins_at)
        self.library.run(
            self.layout.channels,
            len(tables.programs),
            ctypes.c_void_p(tables.words.ctypes.data),
            *map(ctypes.c_longlong, words),
            ctypes.c_void_p(buffers.ctypes.data),
            ctypes.c_void_p(self.report.ctypes.data),
            ctypes.c_ulonglong(limit_ns),
            ctypes.c_longlong(self.layout.slots),
            ctypes.c_longlong(self.layout.slot_bytes // size),
            ctypes.c_ulonglong(identity),
        )
        return tables


def contributions(size, count, dtype, seed=1):
    return np.random.default_rng(seed).integers(0, 5, (size, count)).astype(dtype)


def virtual(schedule):
    return [rank for rank in range(schedule.size) if rank not in schedule.sandbox]


@pytest.mark.parametrize("element", TYPES)
@pytest.mark.parametrize(
    ("size", "sandbox", "count"), [(2, [1], 3), (3, [0, 2], 97), (8, [1, 2, 5], 1000), (5, [4], 0)]
)
def test_all_reduce_of_odd_sizes_in_place_and_not(host_kernel, element, size, sandbox, count):
    align = 16 // np.dtype(TYPES[element]).itemsize
    schedule = ring_all_reduce(size, sandbox, count, align=align)
    given = contributions(size, count, TYPES[element])
    total = given.sum(0, dtype=TYPES[element])
    for in_place in (False, True):
        host = OnHost(host_kernel, schedule, element)
        if in_place:
            host.data = host.source
        for _ in range(3):  # counts go on where they were
            for rank in sandbox:
                host.source[rank][:] = given[rank]
            host.source[None][:] = given[virtual(schedule)].sum(0, dtype=TYPES[element])
            host.run()
            assert host.report[0] == 0
            for role in schedule.roles:
                np.testing.assert_array_equal(host.data[role], total)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_buffers_beside_16_byte_boundaries(host_kernel, offset):
    schedule = ring_all_reduce(4, [0, 2], 333, align=4)
    host = OnHost(host_kernel, schedule, offset=offset)
    given = contributions(4, 333, np.float32)
    for rank in (0, 2):
        host.source[rank][:] = given[rank]
    host.source[None][:] = given[1] + given[3]
    host.run()
    np.testing.assert_array_equal(host.data[0], given.sum(0))


@pytest.mark.parametrize(("reduction", "numpy"), [(1, np.prod), (2, np.max), (3, np.min)])
def test_other_reductions(host_kernel, reduction, numpy):
    schedule = ring_all_reduce(6, [2, 3], 50, align=4)
    host = OnHost(host_kernel, schedule, reduction=reduction)
    given = contributions(6, 50, np.float32)
    for rank in (2, 3):
        host.source[rank][:] = given[rank]
    host.source[None][:] = numpy(given[[0, 1, 4, 5]], axis=0)
    host.run()
    np.testing.assert_array_equal(host.data[3], numpy(given, axis=0))


def test_reduce_scatter_and_all_gather(host_kernel):
    count, size, sandbox = 37, 6, [0, 1, 4]
    given = contributions(size, size * count, np.float32)
    schedule = ring_reduce_scatter(size, sandbox, count)
    host = OnHost(host_kernel, schedule)
    for rank in sandbox:
        host.source[rank][:] = given[rank]
    host.source[None][:] = given[[2, 3, 5]].sum(0)
    host.run()
    for rank in sandbox:
        np.testing.assert_array_equal(
            host.data[rank], given.sum(0)[rank * count : (rank + 1) * count]
        )

    schedule = ring_all_gather(size, sandbox, count)
    host = OnHost(host_kernel, schedule)
    whole = given[0]
    for rank in sandbox:
        host.source[rank][:] = whole[rank * count : (rank + 1) * count]
        host.data[rank][rank * count : (rank + 1) * count] = host.source[rank]
    host.source[None][:] = whole
    host.run()
    for rank in sandbox:
        np.testing.assert_array_equal(host.data[rank], whole)


@pytest.mark.parametrize("sandbox", [[0], [3], [1, 2], [0, 2, 5, 6], range(7)])
def test_tree(host_kernel, sandbox):
    schedule = tree_all_reduce(7, sandbox, 1001, align=4, pieces=5)
    host = OnHost(host_kernel, schedule)
    given = contributions(7, 1001, np.float32)
    for rank in sandbox:
        host.source[rank][:] = given[rank]
    if None in schedule.roles:
        host.source[None][:] = given[virtual(schedule)].sum(0)
    minus_zero = int(np.array(-0.0, np.float32).view(np.uint32))
    host.run(identity=minus_zero)
    for rank in sandbox:
        np.testing.assert_array_equal(host.data[rank], given.sum(0))


def test_all_to_all_of_uneven_parts(host_kernel):
    size, sandbox = 5, [1, 3]
    counts = np.random.default_rng(2).integers(0, 90, (size, size))
    schedule = exchange(size, sandbox, counts.tolist())
    host = OnHost(host_kernel, schedule, "i32")
    part = {
        (i, j): np.arange(counts[i, j]) + 1000 * i + 100 * j
        for i in range(size)
        for j in range(size)
    }
    for rank in sandbox:
        host.source[rank][:] = np.concatenate([part[rank, j] for j in range(size)])
    host.source[None][:] = np.concatenate([part[v, rank] for rank in sandbox for v in (0, 2, 4)])
    host.run()
    for rank in sandbox:
        wanted = np.concatenate([part[i, rank] * (i != rank) for i in range(size)])
        np.testing.assert_array_equal(host.data[rank], wanted)


def test_who_does_not_come_is_named_and_nobody_hangs(host_kernel):
    schedule = ring_all_reduce(4, [0, 2], 100, align=4)
    host = OnHost(host_kernel, schedule)
    roles = (0, None)
    tables = host.run(roles, limit_ns=SECOND_NS // 5)
    state, row, channel, _move, receives, place, wanted, found = host.report.tolist()
    assert (state, wanted) == (1, found + 1)
    assert channel < SMALL.channels
    # The gap behind rank 2 waits for it, all others for each other, and any may be first to say so.
    link = schedule.links[(tables.ins if receives else tables.outs)[row][place]]
    other = link.sender if receives else link.receiver
    assert schedule.programs[other].role in {0, 2, None}
    if receives:
        receiver = schedule.programs[link.receiver].role
        at = tables.count_address(row, place) - host.bases[receiver]
        assert 0 < at < SMALL.counts_bytes(schedule, receiver)


def test_one_who_waits_names_the_one_that_is_missing(host_kernel):
    schedule = ring_all_reduce(3, [0], 100, align=4)
    host = OnHost(host_kernel, schedule)
    tables = host.run((0,), limit_ns=SECOND_NS // 10)
    state, row, _channel, move, receives, place, wanted, found = host.report.tolist()
    assert (state, row, move, receives, wanted, found) == (1, 0, 0, 1, 1, 0)
    link = schedule.links[tables.ins[row][place]]
    assert str(schedule.programs[link.sender]) == "the assistant for ranks 1-2 of the group"
