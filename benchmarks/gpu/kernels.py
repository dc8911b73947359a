"""The plugin's kernels, measured: holds, compensation, pruned rings on one GPU.

PYTHONPATH=. python benchmarks/gpu/kernels.py --out FOLDER [--full]

Writes kernels.txt (tables) and kernels.json (all numbers) and goes on after a part that fails.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import traceback
from pathlib import Path

import torch

from prismreplay.plugin.communicating import PrunedCommunication, link_memory
from prismreplay.plugin.compensating import compensate
from prismreplay.plugin.holds import DeviceHolder
from prismreplay.plugin.ring_schedule import ring_all_reduce
from prismreplay.plugin.tables import Layout

MIB, GIB = 1 << 20, 1 << 30
LIMIT_NS = 3_000_000_000


def spread(values):
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "min": ordered[0],
        "median": statistics.median(ordered),
        "p99": ordered[last * 99 // 100],
        "max": ordered[-1],
    }


def timed(work, *, warm=3, repeat=10):
    """Milliseconds of each of `repeat` runs, by events."""
    for _ in range(warm):
        work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
    torch.cuda.synchronize()
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def measure_holds(full):
    """Errors of ends, in ns; the gap until the next kernel of the stream starts."""
    holder, rows = DeviceHolder(), []
    for duration_us in (5, 10, 20, 50, 100, 500, 1000, 10_000):
        repeat = 400 if duration_us <= 1000 else 60
        repeat *= 3 if full else 1
        times = holder.times(8 * repeat)
        for number in range(repeat):
            if number % 60 == 0:
                # Launches get ahead meanwhile: what is measured is the device, not the caller.
                torch.cuda.synchronize()
                holder.hold_for(10_000_000)
            mine = times[8 * number :]
            holder.stamp(mine)
            holder.hold_after(mine[:1], duration_us * 1000, seen=mine[2:])
            holder.stamp(mine[4:])
            holder.hold_for(duration_us * 1000, seen=mine[6:])
        torch.cuda.synchronize()
        found = times.view(repeat, 8).tolist()[repeat // 10 :]
        rows.append(
            {
                "hold_us": duration_us,
                "end_error_ns": spread([row[2] - row[0] - duration_us * 1000 for row in found]),
                "next_kernel_gap_ns": spread([row[4] - row[2] for row in found]),
                "hold_for_error_ns": spread(
                    [row[6] - row[4] - duration_us * 1000 for row in found]
                ),
                "cut": sum(row[3] + row[7] for row in found),
            }
        )
    return rows


def measure_host_cost(full):
    """Microseconds of the calling thread for each launch."""
    holder, repeat = DeviceHolder(), 5000 if full else 1000
    times = holder.times(2)
    rows = []
    calls = {"stamp": lambda: holder.stamp(times), "hold_for 0": lambda: holder.hold_for(0)}
    small = torch.ones(1024, device="cuda")
    calls["compensate 1024"] = lambda: compensate(small, [small], out=small)
    calls["torch add_"] = lambda: small.add_(0)
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(repeat):
            call()
        spent = time.perf_counter() - begun
        torch.cuda.synchronize()
        rows.append({"call": name, "host_us": spent / repeat * 1e6})
    return rows


def measure_compensation(full):
    """Bandwidth against a copy on the device that moves as large tensors."""
    size_bytes = GIB if full else 512 * MIB
    one, other = (torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_ms = statistics.median(timed(lambda: other.copy_(one), repeat=20))
    copy = 2 * size_bytes / copy_ms / 1e6
    rows = [{"dtype": "copy_", "inputs": 0, "gb_s": copy, "of_copy": 1.0, "ms": copy_ms}]
    cases = [(name, 1) for name in ("float32", "float16", "bfloat16", "float8_e4m3fn")]
    cases += [(name, 1) for name in ("float8_e5m2", "float64", "int8", "int32", "int64")]
    cases += [("float32", 2), ("bfloat16", 2), ("float8_e4m3fn", 3), ("bfloat16", 3)]
    for name, inputs in cases:
        ms = compensation_ms(getattr(torch, name), inputs, size_bytes)
        speed = (inputs + 2) * size_bytes / ms / 1e6
        rows.append(
            {"dtype": name, "inputs": inputs, "gb_s": speed, "of_copy": speed / copy, "ms": ms}
        )
    return rows


def compensation_ms(dtype, inputs, size_bytes):
    # Bytes below 120 are a finite value of every type.
    made = torch.randint(0, 120, (size_bytes,), dtype=torch.uint8, device="cuda")
    full = made.view(dtype)
    own = [made.flip(0).view(dtype) for _ in range(inputs)]
    out = torch.empty_like(full)
    return statistics.median(timed(lambda: compensate(full, own, out=out), repeat=20))


def ring_case(size, sandbox, size_bytes, layout, *, streams=False, lanes=512, repeat=8):
    count = size_bytes // 4
    schedule = ring_all_reduce(size, sandbox, count, align=4)
    memory = link_memory(schedule, layout)
    sides = [(role,) for role in schedule.roles] if streams else [schedule.roles]
    parts = [
        PrunedCommunication(
            schedule, torch.float32, memory, layout, roles=roles, limit_ns=LIMIT_NS, lanes=lanes
        )
        for roles in sides
    ]
    given = {role: torch.zeros(count, device="cuda") for role in schedule.roles}
    for number, one in enumerate(given.values()):
        one.fill_(number + 1.0)
    expected = float(sum(range(1, len(given) + 1)))
    results = {role: torch.empty_like(one) for role, one in given.items()}
    others = [torch.cuda.Stream() for _ in parts[1:]]

    def run():
        now = torch.cuda.current_stream()
        for other in others:
            other.wait_stream(now)
        for number, part in enumerate(parts):
            buffers = {role: (given[role], results[role]) for role in part.roles}
            part.launch(buffers, stream=others[number - 1] if number else None)
        for other in others:
            now.wait_stream(other)

    found = timed(run, warm=2, repeat=repeat)
    for part in parts:
        part.check()
    wrong = max(float((one - expected).abs().max()) for one in results.values())
    ms, steps = statistics.median(found), 2 * (size - 1)
    return {
        "K": size,
        "sandbox": list(sandbox),
        "bytes": size_bytes,
        "channels": layout.channels,
        "slot_bytes": layout.slot_bytes,
        "slots": layout.slots,
        "lanes": lanes,
        "launches": len(parts),
        "ms": ms,
        "min_ms": min(found),
        "us_per_step": ms * 1000 / steps,
        "bus_gb_s": steps / size * size_bytes / ms / 1e6,
        "max_error": wrong,
    }


def ring_cases(full):
    wide = Layout()
    for size in (2, 8, 32, 128):
        for size_bytes in (64 << 10, MIB, 16 * MIB, 256 * MIB):
            for channels in (1, 8, 32) if size_bytes <= MIB else (8, 32, 64):
                yield size, [0], size_bytes, Layout(channels=channels), {}
    for sandbox in ([0, 1, 2, 3], [0, 2, 4, 6], [0, 4]):
        for size_bytes in (MIB, 256 * MIB):
            yield 8, sandbox, size_bytes, Layout(channels=16), {}
    for size_bytes in (MIB, 256 * MIB):
        yield 8, [0], size_bytes, wide, {"streams": True}
        yield 8, [0], size_bytes, wide, {"lanes": 256}
        yield 8, [0], size_bytes, Layout(slot_bytes=16384), {}
        yield 8, [0], size_bytes, Layout(slot_bytes=262144, slots=4), {}
    if full:
        for size in (256, 1024):
            for size_bytes in (MIB, 256 * MIB):
                yield size, [0], size_bytes, wide, {}


def measure_rings(full):
    rows = []
    for size, sandbox, size_bytes, layout, more in ring_cases(full):
        try:
            rows.append(ring_case(size, sandbox, size_bytes, layout, **more))
        except Exception as error:  # noqa: BLE001 - one case must not end the others
            case = {"K": size, "sandbox": sandbox, "bytes": size_bytes, **more}
            rows.append({**case, "channels": layout.channels, "failed": f"{error!r} {error}"})
            if "CUDA" in repr(error) or "cuda" in repr(error):
                break
    return rows


def machine():
    properties = torch.cuda.get_device_properties(0)
    from cuda.bindings import nvrtc

    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": list(nvrtc.nvrtcVersion()[1:]),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def lines(rows):
    """A table of what fits into one; spreads as median/p99/max."""

    def cell(value):
        if isinstance(value, dict):
            return "/".join(f"{value[key]:.0f}" for key in ("median", "p99", "max"))
        return f"{value:.4g}" if isinstance(value, float) else str(value)[:160]

    heads = list(dict.fromkeys(key for row in rows for key in row))
    table = [heads, *([cell(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(heads))]
    for row in table:
        yield "  ".join(one.rjust(width) for one, width in zip(row, widths, strict=True))


def run_parts(name, about, parts):
    """Run measurements, each of which gives rows; goes on after one that fails, and exits."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results, text, failed = {"machine": machine()}, [str(machine())], False
    for part in parts:
        begun = time.perf_counter()
        try:
            results[part.__name__] = part(arguments.full)
            text += ["", part.__name__, *lines(results[part.__name__])]
        except Exception:  # noqa: BLE001 - the next part may work
            failed = True
            results[part.__name__] = traceback.format_exc()
            text += ["", f"{part.__name__} FAILED", traceback.format_exc()]
        text.append(f"({time.perf_counter() - begun:.1f} s)")
        print("\n".join(text), flush=True)
        (arguments.out / f"{name}.json").write_text(json.dumps(results, indent=1))
        with (arguments.out / f"{name}.txt").open("a") as file:
            file.write("\n".join(text) + "\n")
        text = []
    raise SystemExit(failed)


if __name__ == "__main__":
    run_parts(
        "kernels",
        __doc__,
        (measure_holds, measure_host_cost, measure_compensation, measure_rings),
    )
