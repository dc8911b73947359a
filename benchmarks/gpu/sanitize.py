"""A little of every kernel, for compute-sanitizer: blocks that wait for each other in one launch.

compute-sanitizer --tool memcheck python benchmarks/gpu/sanitize.py
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from prismreplay.plugin import advance_code
from prismreplay.plugin.advance_code import Final, Item, Kind, Slot, Table, encode
from prismreplay.plugin.advancing import Advancer
from prismreplay.plugin.communicating import PrunedCommunication, link_memory
from prismreplay.plugin.compensating import compensate
from prismreplay.plugin.exchange_schedule import exchange
from prismreplay.plugin.holds import DeviceHolder
from prismreplay.plugin.pacing import Stretcher
from prismreplay.plugin.ring_schedule import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from prismreplay.plugin.tables import Layout
from prismreplay.plugin.tree_schedule import tree_all_reduce

LAYOUT = Layout(channels=2, slots=2, slot_bytes=256)


def perform(schedule, dtype):
    communication = PrunedCommunication(
        schedule, dtype, link_memory(schedule, LAYOUT), LAYOUT, limit_ns=20 * 10**9, lanes=64
    )
    buffers = {
        role: (
            torch.ones(schedule.source_counts[role]).to(dtype).cuda(),
            torch.ones(schedule.data_counts[role]).to(dtype).cuda(),
        )
        for role in schedule.roles
    }
    communication.launch(buffers)
    communication.check()
    print("performed", schedule.name, dtype, flush=True)


def advance():
    """Operations with few and many terms, one that waits for another stream's."""
    layout = advance_code.Layout(rounds=3, fixed=(2000, 10), ring=(4, 4))
    # Under racecheck a launch with many terms takes seconds.
    one, streams = Advancer(layout, limit_ns=20 * 10**9), [torch.cuda.Stream() for _ in range(2)]
    one.begin(time.monotonic_ns())
    slots = [Slot(Kind.FIXED, Table.SHARED, number, 1) for number in range(1000)]
    for count in (1, 40, 1000):
        for slot in slots[:count]:
            one.launch(planned([slot], []), streams[0])
        terms = tuple((slot, 1) for slot in slots[:count])
        target = Slot(Kind.RING, Table.OWN, 1, 0)
        one.launch(planned([], [Item(terms, target, own=True, final=Final.FIRST)]), streams[1])
    for count in (1, 40, 1000):  # a kernel for each length of code
        ticket = one.arrive(planned(slots[:count], []), streams[1])
        one.launch(None, streams[1], ticket=ticket, transfer_ns=20_000, owes=True)
    first, second = (one.arrive(None, streams[1]) for _ in range(2))
    one.owe(first, second, 0.5, streams[1])
    torch.cuda.synchronize()
    print("advanced", len(list(one.records())), flush=True)
    one.check()
    one.close()


def stretch():
    """A piece of a stream that takes longer."""
    stretcher, stream = Stretcher(), torch.cuda.current_stream().cuda_stream
    note = stretcher.note(stream)
    torch.cuda._sleep(10_000)
    stretcher.stretch(note, 2.0, stream)
    torch.cuda.synchronize()
    stretcher.close()
    print("stretched", flush=True)


def planned(arrivals, items):
    code = encode(arrivals, items)
    return SimpleNamespace(code=code, round_=7, transfer_ns=0, label="sanitizer")


def main():
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        perform(ring_all_reduce(4, [1, 3], 333, align=16), dtype)
    perform(ring_reduce_scatter(4, [0, 1], 77), torch.float32)
    perform(ring_all_gather(4, [0, 1], 77), torch.float32)
    perform(tree_all_reduce(5, [0, 3], 333, align=4, pieces=3), torch.float32)
    perform(exchange(4, [0, 2], [[5, 17, 200, 3]] * 4), torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        for count, inputs in ((1, 1), (5003, 1), (5003, 3)):
            own = [torch.ones(count).to(dtype).cuda() for _ in range(inputs)]
            compensate(torch.ones(count).to(dtype).cuda(), own)
    shifted = torch.ones(1000).cuda()
    compensate(shifted[3:900], [shifted[1:898]], out=torch.empty(897, device="cuda"))
    advance()
    stretch()
    holder = DeviceHolder()
    times = holder.times(4)
    holder.stamp(times)
    holder.hold_after(times[:1], 20_000, seen=times[2:])
    holder.hold_for(1000)
    holder.hold_until(0)
    torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
