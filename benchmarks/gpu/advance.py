"""Operations of a plan on one GPU, measured: what they cost the host, and how true their ends are.

PYTHONPATH=. python benchmarks/gpu/advance.py --out FOLDER [--full]

Writes advance.txt (tables) and advance.json (all numbers) and goes on after a part that fails.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from kernels import run_parts, spread

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
from prismreplay.plugin.advancing import Advancer
from prismreplay.plugin.holds import DeviceHolder

LAYOUT = Layout(rounds=4, fixed=(4096, 1024), ring=(1024, 1024))
SET = [Slot(Kind.FIXED, Table.SHARED, number, 1) for number in range(4096)]


def planned(items, transfer_ns=0, round_=0):
    return SimpleNamespace(
        code=encode([], items), round_=round_, transfer_ns=transfer_ns, label="benchmark"
    )


def with_terms(count, transfer_ns=0):
    terms = tuple((slot, 1) for slot in SET[:count])
    target = Slot(Kind.FIXED, Table.SHARED, 4000, 1)
    return planned([Item(terms, target, own=True, final=Final.FIRST)], transfer_ns)


def chain(length):
    """Junctions, each after the one before and two slots."""
    items = []
    for number in range(length):
        terms = [(SET[2 * number], 1), (SET[2 * number + 1], 1)]
        if number:
            terms.append((Slot(Kind.LOCAL, Table.OWN, number - 1), 1))
        items.append(Item(tuple(terms), Slot(Kind.FIXED, Table.OWN, number, 1)))
    items[-1] = items[-1]._replace(own=True, final=Final.FIRST)
    return planned(items)


def fresh(**more):
    """An Advancer all of whose slots are set; its tail is measured."""
    one = Advancer(LAYOUT, **{"limit_ns": 5_000_000_000, **more})
    one.begin(time.monotonic_ns())
    words = np.array([pack_time(0, 1)] * LAYOUT.slots(Table.SHARED), np.int64)
    if "shared" in more:
        target = ctypes.cast(more["shared"], ctypes.POINTER(ctypes.c_int64 * len(words)))
        np.ctypeslib.as_array(target.contents)[:] = words
    else:
        from cuda.bindings import driver

        (status,) = driver.cuMemcpyHtoD(one._shared, words.ctypes.data, words.nbytes)
        assert int(status) == 0, status
    return one


def outcomes(one):
    torch.cuda.synchronize()
    found = list(one.records())
    one.check()
    return found


def ahead(one, stream, begun=20_000_000):
    """Launches get ahead meanwhile: what is measured is the device, not the caller."""
    torch.cuda.synchronize()
    one.launch(None, stream, transfer_ns=begun)


def measure_holds(full):
    """End of a hold against its target: by its own clock, and as the next kernel sees it."""
    one, stream, rows = fresh(), torch.cuda.Stream(), []
    given = with_terms(8)
    for duration_us in (5, 10, 20, 50, 100, 500, 1000, 10_000):
        repeat = (60 if duration_us > 1000 else 300) * (3 if full else 1)
        found = []
        while len(found) < repeat:
            ahead(one, stream)
            for _ in range(60):
                one.launch(given, stream, transfer_ns=duration_us * 1000)
            found += outcomes(one)[1:]
        pairs = [
            (this, following)
            for this, following in pairwise(found)
            if following.ticket == this.ticket + 1
        ]
        rows.append(
            {
                "hold_us": duration_us,
                "next_start_error_ns": spread(
                    [after.began_ns - this.end_ns for this, after in pairs]
                ),
                "lateness_ns": spread([this.lateness_ns for this in found]),
            }
        )
    rows[0]["tail_ns"] = one.tail_ns
    one.close()
    return rows


def measure_tails(_full):
    """What comes after a hold: one of ours, or kernels of torch; gap from end to start."""
    one, stream = fresh(), torch.cuda.Stream()
    holder, rows = DeviceHolder(), [{"tail_ns": one.tail_ns}]
    times = holder.times(2000)
    for transfer_us in (10, 50, 200):
        ahead(one, stream)
        for number in range(200):
            one.launch(None, stream, transfer_ns=transfer_us * 1000)
            holder.stamp(times[number:], stream=stream)
        found = outcomes(one)[1:]
        origin = one._origin_ns
        starts = (times[:200] - origin).tolist()
        errors = [start - each.end_ns for start, each in zip(starts, found, strict=True)]
        rows.append({"transfer_us": transfer_us, "stamp_after_end_ns": spread(errors)})
    one.close()
    return rows


def measure_terms(full):
    """From a kernel's start to its end with all slots there and nothing to hold for."""
    rows, repeat = [], 300 if full else 120
    memory = mmap.mmap(-1, 8 * LAYOUT.slots(Table.SHARED))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for where in ("device", "host"):
        one = fresh(**({"shared": address} if where == "host" else {}))
        stream = torch.cuda.Stream()
        cases = {"none": None} | {f"{count} terms": with_terms(count) for count in (1, 8, 32, 128)}
        cases |= {"1000 terms": with_terms(1000)}
        cases |= {f"{length} junctions": chain(length) for length in (4, 16, 64, 250)}
        for name, given in cases.items():
            ahead(one, stream)
            for _ in range(repeat):
                one.launch(given, stream)
            found = outcomes(one)[1:]
            took = [each.ended_ns - one.tail_ns - each.began_ns for each in found]
            pitch = [after.began_ns - this.began_ns for this, after in pairwise(found)]
            row = {
                "table": where,
                "code": name,
                "words": 0 if given is None else len(given.code.words),
            }
            rows.append({**row, "kernel_ns": spread(took), "start_to_start_ns": spread(pitch)})
        one.close()
    return rows


def measure_waits(full):
    """From the arrival that was waited for, on another stream, to the end of who waited."""
    one, rows = fresh(), []
    streams = [torch.cuda.Stream() for _ in range(2)]
    slots = [Slot(Kind.RING, Table.SHARED, number, 0) for number in range(2)]
    for terms in (1, 32, 128):
        others = tuple((slot, 0) for slot in SET[: terms - 1])
        waiting = encode([], [Item(((slots[1], 0), *others), own=True, final=Final.FIRST)])
        coming = encode([slots[1]], [])
        late = []
        for number in range(60 if full else 30):
            round_ = number + 1000 * terms
            one.launch(
                SimpleNamespace(code=waiting, round_=round_, transfer_ns=0, label=""), streams[0]
            )
            one.launch(None, streams[1], transfer_ns=200_000)
            one.launch(
                SimpleNamespace(code=coming, round_=round_, transfer_ns=0, label=""), streams[1]
            )
            first, _, last = sorted(outcomes(one))
            late.append(first.ended_ns - one.tail_ns - last.arrival_ns)
        rows.append({"terms": terms, "from_arrival_to_end_ns": spread(late)})
    one.close()
    return rows


def measure_host_cost(full):
    """Microseconds of the calling thread for each launch."""
    one, stream, repeat = fresh(), torch.cuda.Stream(), 5000 if full else 1500
    handle, small, holder = stream.cuda_stream, torch.ones(1024, device="cuda"), DeviceHolder()
    times = holder.times(2)
    codes = {count: with_terms(count) for count in (1, 8, 32, 128, 1000)}
    calls = {
        "launch nothing": lambda: one.launch(None, stream),
        "launch nothing, handle": lambda: one.launch(None, handle),
        "launch nothing, current stream": lambda: one.launch(None),
        **{f"launch {n} terms": lambda given=given: one.launch(given, handle) for n, given in codes.items()},
        "arrive": lambda: one.arrive(codes[8], handle),
        "hold_for 0 (cuda.core)": lambda: holder.hold_for(0, stream=stream),
        "stamp (cuda.core)": lambda: holder.stamp(times, stream=stream),
        "torch add_": lambda: small.add_(0),
    }  # fmt: skip
    rows = []
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        best = []
        for _ in range(3):
            # A full queue makes the host wait: rounds are shorter than it.
            spent = 0.0
            for _ in range(repeat // 300):
                begun = time.perf_counter()
                for _ in range(100):
                    call()
                spent += time.perf_counter() - begun
                torch.cuda.synchronize()
            best.append(spent / (repeat // 300) / 100 * 1e6)
        list(one.records())
        rows.append({"call": name, "host_us": min(best), "median_us": sorted(best)[1]})
    one.close()
    return rows


def measure_plan(full):
    """Of asking `DevicePlan` for programs of a step that repeats: the same without a GPU."""
    if not full:  # compiling what makes the job takes longer than all the rest
        return []
    import polars as pl

    import prismcalib
    from prismcalib import synth
    from prismreplay.plan import OpKey, compile_plan
    from prismreplay.run.device_plan import DevicePlan

    spec = synth.JobSpec(pp=4, tp=2, dp=2, microbatches=8, layers_per_stage=4, steps=2)
    plan = compile_plan(prismcalib.merge(synth.generate(spec)).trace, [0])
    mine = DevicePlan(plan, 0)
    last = plan.operations.filter(pl.col("step") == plan.steps[-1])
    names = ("group", "seq", "src_rank", "dst_rank")
    keys = list(dict.fromkeys(OpKey(*row) for row in last.select(names).iter_rows()))
    rounds = []
    for round_ in range(1, 60):
        begun = time.perf_counter()
        for key in keys:
            mine.program(key, round_, queue=(key.group, key.sender))
        rounds.append((time.perf_counter() - begun) / len(keys) * 1e6)
    words = [len(mine.program(key, 100, queue=(key.group, key.sender)).code.words) for key in keys]
    rounds = rounds[10:]
    cost = {"host_us": min(rounds), "median_us": sorted(rounds)[len(rounds) // 2]}
    return [cost | {"operations": len(keys), "words": spread(words)}]


def measure_beside_work(full):
    """Lateness, and matrix products of another stream, at the same time and each alone."""
    one, stream = fresh(), torch.cuda.Stream()
    size = 8192
    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    given = with_terms(32)
    products = 40 if full else 20

    def multiply():
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(products):
            torch.mm(left, left, out=out)
        marks[1].record()
        return marks

    multiply()
    torch.cuda.synchronize()
    rows = []
    for name, holds in (("alone", 0), ("beside 50 us holds", 50), ("beside 1 ms holds", 1000)):
        torch.cuda.synchronize()
        marks = multiply()
        for _ in range(products * 1000 // holds if holds else 0):
            one.launch(given, stream, transfer_ns=holds * 1000)
        torch.cuda.synchronize()
        late = [each.lateness_ns for each in one.records()]
        row = {"case": name, "matmul_ms": marks[0].elapsed_time(marks[1]) / products}
        rows.append(row | ({"lateness_ns": spread(late)} if late else {}))
    one.close()
    return rows


def measure_clocks(_full):
    """The device's clock beside the host's, at a few moments."""
    one, rows = fresh(), []
    first = one.clock_pair()
    for wait_s in (0, 0.1, 0.5, 1.5):
        time.sleep(wait_s)
        begun = time.perf_counter()
        pair = one.clock_pair()
        passed = pair.host_ns - first.host_ns
        drift = pair.device_ns - first.device_ns - passed
        rows.append(
            {
                "after_s": passed / 1e9,
                "half_width_ns": pair.half_ns,
                "drift_ns": drift,
                "drift_ppm": drift / max(1, passed) * 1e6,
                "took_ms": (time.perf_counter() - begun) * 1e3,
            }
        )
    tails = [one.calibrate() for _ in range(5)]
    rows.append({"tails_ns": tails})
    one.close()
    return rows


if __name__ == "__main__":
    run_parts(
        "advance",
        __doc__,
        (
            measure_holds,
            measure_host_cost,
            measure_terms,
            measure_waits,
            measure_tails,
            measure_beside_work,
            measure_clocks,
            measure_plan,
        ),
    )
