"""Compile the plugin's kernels that tests and benchmarks use, on all cores, into the cache.

PYTHONPATH=. python benchmarks/gpu/compile_all.py [--arch sm_90]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import time

PACKED = {"f8_e4m3": 1, "f8_e5m2": 2}
FLOATS = ["f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2"]
INTEGERS = ["i8", "u8", "i16", "i32", "i64"]


def wanted():
    yield "hold", {}
    yield "advance", {}
    yield "pace", {}
    for element in [*FLOATS, "u8", "i32", "i64"]:
        yield "ring", {"ELEMENT": element, "REDUCTION": 0}
    for reduction in (1, 2, 3):
        yield "ring", {"ELEMENT": "f32", "REDUCTION": reduction}
    for element in FLOATS + INTEGERS:
        one = {"ELEMENT": element, "INPUTS": 1, "MODE": 0}
        if element in PACKED:
            one["PACKED"] = PACKED[element]
        yield "compensate", one
        yield "compensate", {"ELEMENT": element, "INPUTS": 3, "MODE": 0}
    for element in ("f32", "bf16"):
        for mode in (0, 1, 2):
            yield "compensate", {"ELEMENT": element, "INPUTS": 2, "MODE": mode}


def compile_one(job):
    from prismreplay.plugin.compiling import cubin

    arch, name, defines = job
    begun = time.perf_counter()
    try:
        size = len(cubin(name, arch, defines))
    except Exception as error:  # noqa: BLE001 - all failures are shown, not only the first
        return f"FAILED {name} {defines}: {error}"
    return f"{time.perf_counter() - begun:.2f} s {size} bytes {name} {defines}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch")
    arch = parser.parse_args().arch
    if arch is None:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader", "-i", "0"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
        arch = "sm_" + answer.stdout.strip().replace(".", "")
    begun = time.perf_counter()
    jobs = [(arch, name, defines) for name, defines in wanted()]
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        results = pool.map(compile_one, jobs, chunksize=1)
    failed = [line for line in results if line.startswith("FAILED")]
    print("\n".join(failed or results[:3]))
    print(
        f"{len(jobs)} kernels for {arch}, {time.perf_counter() - begun:.1f} s, {len(failed)} failed"
    )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
