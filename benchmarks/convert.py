"""How fast and in how much memory whole jobs are converted.

    python benchmarks/convert.py                      all of it (some minutes)
    python benchmarks/convert.py --megabytes 30       a quicker look

Recorded traces (PRISM_TEST_DATA, default ../shared/data) are repeated, shifted in time, to
files of the wanted size. Everything that is printed was measured in fresh processes:

* speed: events/s of CPU time (user and system, all threads, so: a core) of one whole
  conversion, gunzip and writing included, beside gzip.decompress + orjson.loads of the same
  file alone, which is what a reader that does nothing with the events would need;
* memory: peak of the process above its own after the imports, as a share of the largest
  uncompressed file; once more with 4 and 16 ranks of equal size, and with two jobs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kineto_read import pretty  # beside this script

Event = dict[str, Any]

REPO = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("PRISM_TEST_DATA") or REPO.parent / "shared" / "data") / "kineto"
MEGATRON = sorted((DATA / "megatron-tp8").glob("*.gz"))
METADATA = DATA / "edge-cases" / "nccl_metadata_base_time_last.json.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=120, help="size of the largest file")
    parser.add_argument("--task", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, *arguments = options.task
        print(json.dumps({"convert": convert_once, "orjson": decode_once}[task](*arguments)))
        return
    if not MEGATRON:
        sys.exit(f"no recorded traces at {DATA}; set PRISM_TEST_DATA")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("Speed of one file")
        for title, source in (("Megatron, torch 2.2", MEGATRON[0]), ("NCCL metadata", METADATA)):
            path = folder / "rank0.json.gz"
            size = repeat(source, path, options.megabytes, world_size=8)
            for grain in ("communication", "kernel"):
                report(f"{title}, {grain}", [path], size, grain=grain, compare=grain != "kernel")
        print("\nMemory by number of ranks (Megatron, communication grain)")
        part = max(4, options.megabytes // 4)
        files = [folder / f"rank{rank}.json.gz" for rank in range(16)]
        sizes = [
            repeat(MEGATRON[rank % 8], path, part, world_size=16) for rank, path in enumerate(files)
        ]
        for count, jobs in ((1, 1), (4, 1), (16, 1), (16, 2)):
            report(f"{count} x {part} MB, {jobs} at a time", files[:count], max(sizes), jobs=jobs)


def report(
    title: str,
    paths: list[Path],
    size: int,
    *,
    grain: str = "communication",
    jobs: int = 1,
    compare: bool = False,
) -> None:
    found = task("convert", grain, str(jobs), *map(str, paths))
    line = (
        f"{title:34} {found['events']:9,} events {found['cpu_s']:6.2f} s"
        f" {found['events'] / found['cpu_s']:9,.0f} events/s, peak {found['peak'] / 1e6:6.1f} MB"
        f" = {found['peak'] / size:4.2f} x the largest file"
    )
    if compare:
        plain = task("orjson", str(paths[0]))
        line += f"; gunzip + orjson {found['events'] / plain['cpu_s']:9,.0f} events/s"
    print(line, flush=True)


def task(*arguments: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--task", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def convert_once(grain: str, jobs: str, *paths: str) -> dict[str, float]:
    """Convert in this process; a tiny conversion before warms up what is imported lazily."""
    from prismtrace.converters import convert

    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "rank0.json"
        tiny.write_text(
            '[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1},'
            '{"ph":"X","cat":"kernel","name":"ncclDevKernel_AllGather_RING_LL","ts":3,"dur":1}]'
        )
        output = Path(folder) / "run.parquet"
        convert(tiny, output)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = cpu_seconds()
        result = convert(list(paths), output, grain=grain, jobs=int(jobs))
        spent = cpu_seconds() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = after - before
    if int(jobs) > 1:
        # The largest worker; its imports are those of this process.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss - before
    return {"events": result.events, "cpu_s": spent, "peak": peak * 1024}


def cpu_seconds() -> float:
    """CPU time of this process and of its workers that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def decode_once(path: str) -> dict[str, float]:
    import orjson

    start = time.process_time()
    orjson.loads(gzip.decompress(Path(path).read_bytes()))
    return {"cpu_s": time.process_time() - start}


# --- files of any size --------------------------------------------------------------------------


def repeat(source: Path, target: Path, megabytes: int, world_size: int) -> int:
    """Write the events of `source` over and over; returns the uncompressed size.

    Each time later, with other correlations and step numbers. The rank is left to the name.
    """
    whole = json.loads(gzip.decompress(source.read_bytes()))
    events = whole.pop("traceEvents")
    whole["distributedInfo"] |= {"world_size": world_size}
    del whole["distributedInfo"]["rank"]
    for group in whole["distributedInfo"].get("pg_config", []):
        group["ranks"] = list(range(world_size))
    head = json.dumps(whole, indent=2)[:-2] + ',\n  "traceEvents": [\n'
    size = len(head)
    with gzip.open(target, "wt", compresslevel=1) as file:
        file.write(head)
        for number, event in enumerate(endless(events, world_size)):
            if size >= megabytes * 1_000_000 and number % len(events) == 0:
                break
            size += file.write((",\n" if number else "") + pretty(event))
        size += file.write("\n  ]\n}\n")
    return size


def endless(events: list[Event], world_size: int) -> Iterator[Event]:
    # Whole seconds: every rank of a job repeats with the same period.
    span = ((max(e["ts"] for e in events) - min(e["ts"] for e in events)) // 10**6 + 1) * 10**6
    step = 1 + max(e.get("args", {}).get("correlation", 0) for e in events)
    for event in events:
        args = event.get("args", {})
        if args.get("Concrete Inputs", [])[-1:] == ["8"]:
            args["Concrete Inputs"][-1] = str(world_size)
        if "Process Group Ranks" in args and args.get("Group size", 1) > 1:
            args["Process Group Ranks"] = str(list(range(world_size)))
            args["Group size"] = world_size
    while True:
        for event in events:
            yield event
            event["ts"] += span
            if "correlation" in event.get("args", {}):
                event["args"]["correlation"] += step
            if event["name"].startswith("ProfilerStep#"):
                event["name"] = re.sub(r"\d+", lambda n: str(int(n[0]) + 10), event["name"])


if __name__ == "__main__":
    main()
