"""What it takes to fit offsets and rates of many clocks, and how far from the truth they are.

Clocks that were set anew are looked for, too, as `prismcalib merge` does.

    python benchmarks/clocks.py                8, 64, 256 and 1024 clocks
    python benchmarks/clocks.py --clocks 1024

A made-up job of a minute: clocks stand in a square, each has 400 operations with those of its row,
100 with those of its column and 20 with all. Ends vary by 40 us; clocks run up to 50 ppm too fast
or slow and are seconds apart, or all run alike. CPU is of one process, in which everything is warm.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from numpy.typing import NDArray

from prismcalib.clocks import fit_offsets
from prismcalib.drift import fit_drift
from prismcalib.jumps import find_jumps
from prismcalib.relations import Relations

WINDOW_NS = 60 * 10**9
NOISE_NS = 40_000
PPM = 50
OPERATIONS = {"row": 400, "column": 100, "all": 20}


def members(clocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64[m] each: operation and clock of every member."""
    width = int(np.sqrt(clocks))
    square = np.arange(clocks // width * width).reshape(-1, width)
    lines = {"row": square, "column": square.T, "all": square.reshape(1, -1)}
    parts, first = [], 0
    for name, groups in lines.items():
        count = OPERATIONS[name]
        for group in groups:
            instance = np.repeat(first + np.arange(count), len(group))
            parts.append(np.stack([instance, np.tile(group, count)]))
            first += count
    instance, clock = np.concatenate(parts, axis=1)
    return instance, clock


def measured(clocks: int, ppm: float) -> tuple[float, float, float, float, int]:
    """CPU seconds for offsets, rates and jumps, largest error of a rate in ppm, members."""
    random = np.random.default_rng(7)
    instance, clock = members(clocks)
    count = int(clock.max()) + 1
    true = random.integers(0, WINDOW_NS, int(instance.max()) + 1)[instance]
    rate = random.uniform(-ppm, ppm, count) * 1e-6
    origin = random.integers(0, 10**10, count)
    late = random.integers(0, NOISE_NS, len(true))
    end = true + np.rint(true * rate[clock]).astype(np.int64) + origin[clock] + late
    tier = np.zeros(len(end), np.int32)
    begin = time.process_time()
    fit = fit_offsets(instance, clock, end, tier, count)
    middle = time.process_time()
    drift = fit_drift(instance, clock, end, tier, fit.offset_ns, 0)
    third = time.process_time()
    aligned = end + fit.offset_ns[clock] + drift.shift(clock, end)
    found = find_jumps(Relations(instance, clock, tier, count, 0), end, aligned, tier, 0)
    over = time.process_time()
    if found:
        sys.exit(f"no clock was set, but {found[0]}")
    wrong = np.abs(drift.rate * 1e6 - (rate[0] - rate) * 1e6).max()
    return middle - begin, third - middle, over - third, float(wrong), len(end)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clocks", type=int, nargs="+", default=[8, 64, 256, 1024])
    options = parser.parse_args()
    measured(8, PPM)
    print(
        "| clocks | members of operations | run | offsets, CPU | rates, CPU | jumps, CPU | a rate is off by |"
    )
    print("|---|---|---|---|---|---|---|")
    for clocks in options.clocks:
        for ppm, name in ((0, "alike"), (PPM, "apart")):
            offsets, rates, jumps, wrong, count = measured(clocks, ppm)
            times = " | ".join(f"{cpu:.2f} s" for cpu in (offsets, rates, jumps))
            print(f"| {clocks} | {count} | {name} | {times} | {wrong:.4f} ppm |")


if __name__ == "__main__":
    main()
