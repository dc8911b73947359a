"""The kernels on a GPU: every type and odd sizes against float64, exact rings, deadlines."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from prismreplay.errors import PluginError, PluginTimeoutError  # noqa: E402
from prismreplay.plugin.communicating import PrunedCommunication, link_memory  # noqa: E402
from prismreplay.plugin.compensating import compensate  # noqa: E402
from prismreplay.plugin.exchange_schedule import exchange  # noqa: E402
from prismreplay.plugin.holds import DeviceHolder  # noqa: E402
from prismreplay.plugin.ring_schedule import (  # noqa: E402
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)
from prismreplay.plugin.tables import Layout  # noqa: E402
from prismreplay.plugin.tree_schedule import tree_all_reduce  # noqa: E402
from prismreplay.run.compensation import contribution  # noqa: E402
from prismtrace.schema import ReduceOp  # noqa: E402

pytestmark = pytest.mark.gpu

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]
SMALL = Layout(channels=4, slots=4, slot_bytes=1024)


def values(count, dtype, seed, scale=1.0):
    made = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=made, dtype=torch.float64) * scale).to(dtype)
    limits = torch.iinfo(dtype)
    low, high = max(limits.min, -(2**40)), min(limits.max, 2**40)
    return torch.randint(low, high, (count,), generator=made).to(dtype)


def whole(count, dtype, seed):
    """Small whole numbers, whose sums are exact in any order and type."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 3, (count,), generator=made).to(dtype)


def same(found, exact):
    """Same bits, or both NaN; says where not."""
    found = found.cpu()
    if found.dtype.is_floating_point:
        found, exact = found.to(torch.float64), exact.to(torch.float64)
        wrong = ~((found == exact) | (found.isnan() & exact.isnan()))
    else:
        wrong = found != exact
    places = wrong.nonzero().flatten().tolist()
    some = [(place, found[place].item(), exact[place].item()) for place in places[:8]]
    assert not places, f"{len(places)} of {len(found)} differ, (place, found, exact): {some}"


# --- compensate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOATS + INTEGERS)
@pytest.mark.parametrize("inputs", [1, 3])
def test_compensate_has_the_bits_of_float64(name, inputs):
    dtype = getattr(torch, name)
    for count in (1, 15, 16, 4099, 1_000_003):
        full = values(count, dtype, 1, 30.0)
        own = [values(count, dtype, 2 + number, 10.0**-number) for number in range(inputs)]
        exact = contribution(full, own, ReduceOp.SUM, group_size=8)
        same(compensate(full.cuda(), [one.cuda() for one in own]), exact)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_compensate_of_all_pairs_of_8_bit_values(name):
    dtype = getattr(torch, name)
    every = torch.arange(256, dtype=torch.uint8)
    full, own = every.repeat(256).view(dtype), every.repeat_interleave(256).view(dtype)
    exact = contribution(full, [own], ReduceOp.SUM, group_size=8)
    if name == "float8_e4m3fn":  # older versions of torch make NaN of what is too large
        wide = full.to(torch.float64) - own.to(torch.float64)
        exact = torch.where(wide.abs() > 448, wide.clamp(-448, 448), exact.to(torch.float64))
    same(compensate(full.cuda(), [own.cuda()]), exact)


@pytest.mark.parametrize("op", [ReduceOp.AVG, ReduceOp.PREMUL_SUM, ReduceOp.PRODUCT, ReduceOp.MAX])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_compensate_of_other_reductions(name, op):
    dtype = getattr(torch, name)
    full, own = values(999, dtype, 1), [values(999, dtype, 2), values(999, dtype, 3)]
    if op is ReduceOp.PRODUCT:
        own[0][::7] = 0
    exact = contribution(full, own, op, group_size=12, factor=0.3)
    found = compensate(full.cuda(), [one.cuda() for one in own], op, group_size=12, factor=0.3)
    same(found, exact)


def test_compensate_of_tensors_that_lie_anyhow():
    for shifts in ((0, 0, 0), (3, 3, 3), (0, 1, 2)):
        out, full, own = (
            values(5003, torch.bfloat16, seed).cuda()[shift:][:4990]
            for seed, shift in zip((9, 1, 2), shifts, strict=True)
        )
        compensate(full, [own], out=out)
        same(out, contribution(full.cpu(), [own.cpu()], ReduceOp.SUM, group_size=2))
    empty = torch.empty(0, device="cuda")
    assert compensate(empty, [empty]).numel() == 0
    square = torch.zeros(4, 4, device="cuda")
    with pytest.raises(PluginError, match="not contiguous"):
        compensate(square.t(), [square])
    with pytest.raises(PluginError, match="differ"):
        compensate(square, [square.half()])


def test_compensate_in_place_and_on_a_stream_of_its_own():
    full, own = values(70_001, torch.float32, 1), values(70_001, torch.float32, 2)
    on_device, side = full.cuda(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    compensate(on_device, [own.cuda()], out=on_device, stream=side)
    side.synchronize()
    same(on_device, full - own)


# --- hold ----------------------------------------------------------------------------------------


def test_holds_end_after_their_time_and_before_their_limit():
    holder = DeviceHolder(limit_ns=20_000_000)
    times = holder.times(8)
    holder.stamp(times[:1])
    holder.hold_after(times[:1], 300_000, seen=times[1:3])
    holder.stamp(times[3:4])
    holder.hold_for(50_000, seen=times[4:6])
    torch.cuda.synchronize()
    start, end, cut, following, later, later_cut, *_ = times.tolist()
    assert (cut, later_cut) == (0, 0)
    assert start + 300_000 <= end <= following
    assert later >= following + 50_000
    holder.hold_until(end + 3_600_000_000_000, seen=times[4:6])
    holder.hold_until(0, seen=times[6:8])
    torch.cuda.synchronize()
    *_, until, until_cut, past, past_cut = times.tolist()
    assert (until_cut, past_cut) == (1, 0)
    assert until < past
    with pytest.raises(PluginError, match="int64"):
        holder.stamp(torch.zeros(1, device="cuda"))


# --- communication -------------------------------------------------------------------------------


class Group:
    """All members of a group; contributions are whole numbers, so any order gives one sum."""

    def __init__(self, schedule, dtype, layout=SMALL, *, in_place=False, **options):
        self.schedule, self.dtype = schedule, dtype
        self.memory = link_memory(schedule, layout)
        self.communication = PrunedCommunication(
            schedule, dtype, self.memory, layout, limit_ns=5_000_000_000, **options
        )
        self.buffers = {}
        for role in schedule.roles:
            source = torch.zeros(schedule.source_counts[role]).to(dtype).cuda()
            data = torch.full((schedule.data_counts[role],), 7.0).to(dtype).cuda()
            self.buffers[role] = (source, source if in_place else data)

    def give(self, contributions):
        """[size, count] on the CPU."""
        virtual = [rank for rank in range(self.schedule.size) if rank not in self.schedule.sandbox]
        for rank in self.schedule.sandbox:
            self.buffers[rank][0].copy_(contributions[rank])
        if virtual:
            total = sum(contributions[rank].to(torch.float64) for rank in virtual)
            self.buffers[None][0].copy_(total.to(self.dtype))

    def run(self):
        self.communication.launch(self.buffers)
        self.communication.check()


def total(contributions, dtype):
    return sum(one.to(torch.float64) for one in contributions).to(dtype)


@pytest.mark.parametrize("name", [*FLOATS, "uint8", "int32", "int64"])
def test_rings_of_every_type_are_exact(name):
    dtype = getattr(torch, name)
    align = 16 // dtype.itemsize
    for size, sandbox in ((2, [0]), (3, [0, 2]), (8, [1, 2, 5])):
        for count in (0, 1, 997):
            # Sums of an e5m2 stay below the first whole number that it has not.
            given = [
                whole(count, dtype, seed)
                if seed < 3
                else torch.zeros(count, dtype=torch.uint8).to(dtype)
                for seed in range(size)
            ]
            group = Group(ring_all_reduce(size, sandbox, count, align=align), dtype)
            group.give(given)
            group.run()
            for role in group.schedule.roles:
                same(group.buffers[role][1], total(given, dtype))


@pytest.mark.parametrize("size", [2, 3, 8, 32])
@pytest.mark.parametrize("in_place", [False, True])
def test_rings_with_several_sandboxes_again_and_again(size, in_place):
    sandboxes = [[0], [size - 1], [0, size // 2], list(range(0, size, 4)), list(range(size))]
    layout = Layout(channels=4, slots=4, slot_bytes=8192)
    for sandbox in sandboxes:
        count = 100_003
        given = [whole(count, torch.float32, seed) for seed in range(size)]
        schedule = ring_all_reduce(size, sandbox, count, align=4)
        if 4 * len(schedule.programs) > torch.cuda.get_device_properties(0).multi_processor_count:
            continue
        group = Group(schedule, torch.float32, layout, in_place=in_place)
        for _ in range(3):
            group.give(given)
            group.run()
            for role in group.schedule.roles:
                same(group.buffers[role][1], total(given, torch.float32))


@pytest.mark.parametrize("op", [ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN])
def test_other_reductions_of_rings(op):
    given = [values(1001, torch.float32, seed).clamp(-2, 2) for seed in range(5)]
    stack = torch.stack(given)
    reduce = {
        ReduceOp.PRODUCT: lambda of: of.to(torch.float64).prod(0).to(torch.float32),
        ReduceOp.MAX: lambda of: of.amax(0),
        ReduceOp.MIN: lambda of: of.amin(0),
    }[op]
    group = Group(ring_all_reduce(5, [1, 3], 1001, align=4), torch.float32, op=op)
    for rank in (1, 3):
        group.buffers[rank][0].copy_(given[rank])
    group.buffers[None][0].copy_(reduce(stack[[0, 2, 4]]))
    group.run()
    found, exact = group.buffers[1][1].cpu(), reduce(stack)
    torch.testing.assert_close(found, exact, rtol=1e-6 if op is ReduceOp.PRODUCT else 0, atol=0)


def test_reduce_scatter_and_all_gather():
    size, sandbox, count = 6, [0, 1, 4], 3001
    given = [whole(size * count, torch.float32, seed) for seed in range(size)]
    group = Group(ring_reduce_scatter(size, sandbox, count), torch.float32)
    group.give(given)
    group.run()
    for rank in sandbox:
        part = total(given, torch.float32)[rank * count : (rank + 1) * count]
        same(group.buffers[rank][1], part)

    group = Group(ring_all_gather(size, sandbox, count), torch.float32)
    for rank in sandbox:
        mine = slice(rank * count, (rank + 1) * count)
        group.buffers[rank][0].copy_(given[0][mine])
        group.buffers[rank][1][mine].copy_(given[0][mine])
    group.buffers[None][0].copy_(given[0])
    group.run()
    for rank in sandbox:
        same(group.buffers[rank][1], given[0])


def test_trees_and_exchanges():
    for sandbox in ([0], [3], [0, 2, 5, 6]):
        given = [whole(10_001, torch.float32, seed) for seed in range(7)]
        schedule = tree_all_reduce(7, sandbox, 10_001, align=4, pieces=5)
        group = Group(schedule, torch.float32)
        group.give(given)
        group.run()
        for rank in sandbox:
            same(group.buffers[rank][1], total(given, torch.float32))
    size, sandbox = 5, [1, 3]
    counts = [[(37 * row + 211 * column) % 600 for column in range(size)] for row in range(size)]
    group = Group(exchange(size, sandbox, counts), torch.int32)
    part = [
        [torch.arange(counts[i][j], dtype=torch.int32) + 10_000 * i + 1000 * j for j in range(size)]
        for i in range(size)
    ]
    for rank in sandbox:
        group.buffers[rank][0].copy_(torch.cat(part[rank]))
    group.buffers[None][0].copy_(torch.cat([part[v][rank] for rank in sandbox for v in (0, 2, 4)]))
    group.run()
    for rank in sandbox:
        wanted = [part[row][rank] for row in range(size)]
        wanted[rank] = torch.full((counts[rank][rank],), 7, dtype=torch.int32)
        same(group.buffers[rank][1], torch.cat(wanted))


def two_sides(size, sandbox, count, layout, limit_ns):
    """Sandbox ranks and the assistant, each with launches of its own."""
    schedule = ring_all_reduce(size, sandbox, count, align=4)
    memory = link_memory(schedule, layout)
    sides = {
        role: PrunedCommunication(
            schedule, torch.float32, memory, layout, roles=[role], limit_ns=limit_ns
        )
        for role in schedule.roles
    }
    return schedule, sides


def test_roles_on_streams_of_their_own():
    count = 1_000_003
    schedule, sides = two_sides(
        8, [2, 6], count, Layout(channels=8, slots=8, slot_bytes=16384), 5_000_000_000
    )
    given = [whole(count, torch.float32, seed) for seed in range(8)]
    virtual = total([given[rank] for rank in (0, 1, 3, 4, 5, 7)], torch.float32)
    streams = {role: torch.cuda.Stream() for role in schedule.roles}
    tensors = {role: (virtual if role is None else given[role]).cuda() for role in schedule.roles}
    results = {role: torch.empty_like(one) for role, one in tensors.items()}
    torch.cuda.synchronize()
    for _ in range(3):
        for role, side in sides.items():
            side.launch({role: (tensors[role], results[role])}, stream=streams[role])
    for side in sides.values():
        side.check()
    for role in schedule.roles:
        same(results[role], total(given, torch.float32))


def test_a_party_that_does_not_come_is_named_and_a_reset_mends_it():
    schedule, sides = two_sides(4, [1], 1000, SMALL, 400_000_000)
    given = {1: torch.ones(1000, device="cuda"), None: torch.full((1000,), 3.0, device="cuda")}
    results = {role: torch.empty_like(one) for role, one in given.items()}
    torch.cuda.synchronize()
    sides[1].launch({1: (given[1], results[1])})
    with pytest.raises(PluginTimeoutError) as caught:
        sides[1].check()
    assert "the assistant for ranks 0, 2-3 of the group did not arrive" in str(caught.value)
    assert "nothing came from it" in str(caught.value)
    assert "rank 1 of the group in move 0 of 6" in caught.value.where
    for side in sides.values():
        side.reset()
    streams = {role: torch.cuda.Stream() for role in schedule.roles}
    for role, side in sides.items():
        side.launch({role: (given[role], results[role])}, stream=streams[role])
    for side in sides.values():
        side.check()
    assert results[1].eq(4).all()


def test_what_cannot_run_is_refused():
    schedule = ring_all_reduce(4, [1], 1000, align=4)
    with pytest.raises(PluginError, match="blocks wait for each other"):
        Group(schedule, torch.float32, Layout(channels=1000, slots=1, slot_bytes=16))
    with pytest.raises(PluginError, match="no elements of complex64"):
        Group(schedule, torch.complex64)
    group = Group(schedule, torch.float32)
    good = group.buffers[1]
    for source, data, message in (
        (good[0][:5], good[1], "has 5 elements of the 1000"),
        (good[0], good[1].half(), "float16"),
        (torch.zeros(2000, device="cuda")[::2], good[1], "not contiguous"),
        (good[0].cpu(), good[1], "on cpu"),
    ):
        with pytest.raises(PluginError, match=message):
            group.communication.launch({**group.buffers, 1: (source, data)})


@pytest.mark.multi_gpu
def test_roles_on_devices_of_their_own():
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the devices do not see each other's memory")
    # A copy makes torch open each device's memory to the other.
    for one, other in ((0, 1), (1, 0)):
        torch.ones(1, device=f"cuda:{one}").to(f"cuda:{other}")
    count, layout = 1_000_003, Layout()
    schedule = ring_all_reduce(8, [3], count, align=4)
    place = {3: 0, None: 1}
    memory = {
        role: torch.zeros(
            layout.bytes_of(schedule, role), dtype=torch.uint8, device=f"cuda:{number}"
        )
        for role, number in place.items()
    }
    given = [whole(count, torch.float32, seed) for seed in range(8)]
    virtual = total([one for rank, one in enumerate(given) if rank != 3], torch.float32)
    sides, buffers = {}, {}
    for role, number in place.items():
        sides[role] = PrunedCommunication(
            schedule, torch.float32, memory, layout, roles=[role], device=number
        )
        source = (virtual if role is None else given[3]).to(f"cuda:{number}")
        buffers[role] = {role: (source, torch.empty_like(source))}
    for role, side in sides.items():
        side.launch(buffers[role])
    for side in sides.values():
        side.check()
    same(buffers[3][3][1], total(given, torch.float32))
