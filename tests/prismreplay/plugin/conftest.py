"""The plugin's kernels on the host: the same sources, compiled by the host's C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from prismreplay.plugin.compiling import source_folder

HERE = Path(__file__).parent

ENTRIES = {
    "ring": """
extern "C" void run(unsigned channels, unsigned programs, const i64* tables, i64 moves_at,
                    i64 outs_at, i64 ins_at, const Buffers* buffers, Report* report, u64 limit_ns,
                    i64 slots, i64 slot_elements, u64 identity) {
    run_grid(channels, programs, 1, [=] {
        perform(tables, moves_at, outs_at, ins_at, buffers, nullptr, nullptr, report, limit_ns,
                slots, slot_elements, identity);
    });
}""",
    "compensate": """
extern "C" void run(unsigned blocks, Stored* result, const Stored* full, const Stored** of,
                    i64 count, i64 head, double scale, double factor) {
    run_grid(blocks, 1, 4, [=] {
        compensate(result, full, of[0], of[1], of[2], of[3], of[4], of[5], of[6], of[7], count,
                   head, scale, factor);
    });
}""",
    "advance": """
extern "C" void run(unsigned operations, const Call* calls, const i64** codes) {
    run_grid(operations, 1, 1, [=] { perform(calls[blockIdx.x], codes[blockIdx.x]); });
}
extern "C" void arrive(const Call* call, const i64* code) {
    run_grid(1, 1, 1, [=] { stamp_arrival(*call, code); });
}
extern "C" void owe_once(u64* debt, const u64* begin, const u64* end, double share) {
    owe(debt, begin, end, share);
}
extern "C" void answer_once(u64* box, u64 count, u64 limit_ns) { answer(box, count, limit_ns); }""",
}


@pytest.fixture(scope="session")
def host_kernel(tmp_path_factory):
    """`host_kernel("ring", ELEMENT="f32")`: a library whose `run` runs a grid as threads."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("host_kernels")

    @functools.cache
    def _library(name, defines):
        stem = "_".join([name, *(f"{value}" for _, value in defines)])
        source, library = folder / f"{stem}.cpp", folder / f"{stem}.so"
        source.write_text(f'#include "host_cuda.h"\n#include "{name}.cu"\n{ENTRIES[name]}\n')
        command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
        command += [f"-D{key}={value}" for key, value in defines]
        command += [f"-I{HERE}", f"-I{source_folder()}", "-pthread", str(source), "-o"]
        made = subprocess.run([*command, str(library)], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return ctypes.CDLL(str(library))

    return lambda name, **defines: _library(name, tuple(sorted(defines.items())))
