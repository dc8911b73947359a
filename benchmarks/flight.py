"""How fast flight-recorder dumps are read, analysed and converted.

    python benchmarks/flight.py
    python benchmarks/flight.py --ranks 256 --entries 2000

Writes dumps of a made-up job (tensor- and data-parallel groups, a rank stuck before its last
all_reduce) as torch pickles them, with four frames an entry, into a temporary folder. Prints
entries/s of one core for read_dump, find_hang and convert (CPU time of a fresh process each, imports
not counted) and the peak memory of each process.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TP = 8
START_NS = 1_800_000_000_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, folder = options.measure
        measure(what, Path(folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        size = sum(write(Path(folder), rank, options) for rank in range(options.ranks))
        entries = options.ranks * options.entries
        print(f"{options.ranks} ranks, {entries:,} entries, {size / 1e6:.1f} MB")
        for what in ("read", "hang", "convert"):
            script = [sys.executable, __file__, "--measure", what, folder]
            done = subprocess.run(script, check=True, capture_output=True, text=True)
            seconds, peak = map(float, done.stdout.split())
            rate = entries / seconds
            print(f"{what:8} {seconds:7.2f} s CPU {rate:10,.0f} entries/s {peak:6.0f} MB peak")


def write(folder: Path, rank: int, options: argparse.Namespace) -> int:
    """Write the dump of a rank; returns its size in bytes."""
    world = options.ranks
    groups = {
        "0": ("default_pg", list(range(world))),
        f"{1 + rank // TP}": ("tp", [r for r in range(world) if r // TP == rank // TP]),
        f"{1001 + rank % TP}": ("dp", [r for r in range(world) if r % TP == rank % TP]),
    }
    _, tensor, data = groups
    entries: list[dict[str, Any]] = []
    number = dict.fromkeys(groups, 0)
    for k in range(options.entries):
        last = k == options.entries - 1
        if last and rank == world // 2:
            break
        group = "0" if last or k == 0 else data if k % 10 == 9 else tensor
        number[group] += 1
        entries.append(entry(k, group, groups[group][0], number[group], completed=not last))
    dump = {
        "version": "2.10",
        "entries": entries,
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in groups.items()
        },
        "pg_status": {},
    }
    data_out = pickle.dumps(dump, protocol=2)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(data_out)
    return len(data_out)


def entry(k: int, group: str, desc: str, seq: int, *, completed: bool) -> dict[str, Any]:
    """One operation as the recorder writes it."""
    created = START_NS + k * 1_000_000
    return {
        "record_id": k,
        "pg_id": 0,
        "process_group": (group, desc),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created,
        "duration_ms": None,
        "input_sizes": [[4096, 1 + k % 10]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 1 + k % 10]],
        "output_dtypes": ["BFloat16"],
        "state": "completed" if completed else "started",
        "time_discovered_started_ns": created + 1000,
        "time_discovered_completed_ns": created + 100_000_000 if completed else None,
        "retired": completed,
        "timeout_ms": 600_000,
        "is_p2p": False,
        "thread_id": "140666067995520",
        "thread_name": "python3",
        "frames": [
            {"name": f"function_{k % 7}", "filename": f"/opt/job/part_{k % 5}.py", "line": k % 900}
            for _ in range(4)
        ],
    }


def measure(what: str, folder: Path) -> None:
    """Print CPU seconds and peak MB of one command in this process."""
    from prismtrace.converters import convert
    from prismtrace.converters.flight.inputs import dump_files
    from prismtrace.converters.flight.reading import read_dump
    from prismtrace.hangs import find_hang

    paths = dump_files(folder)
    start = time.process_time()
    if what == "read":
        for path in paths:
            read_dump(path)
    elif what == "hang":
        report = find_hang(paths)
        assert [culprit.rank for culprit in report.culprits] == [len(paths) // 2]
    else:
        convert(paths, folder / "out.parquet")
    seconds = time.process_time() - start
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
