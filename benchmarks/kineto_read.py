"""How fast and in how much memory Kineto traces are read.

    python benchmarks/kineto_read.py rank0.json.gz rank1.json.gz
    python benchmarks/kineto_read.py --synthetic 100 rank0.json.gz

Prints, for each file: events in it (dropped ones too), uncompressed MB, CPU seconds of
read_kineto (gunzip included, all threads), events/s, the same for gzip.decompress +
orjson.loads in the same process (what a reader that does nothing with the events would need),
and the peak memory of a fresh process that reads it, above that process's memory after the
imports, as a share of the uncompressed size. Times are the best of `--repeat`.
`--synthetic N` also repeats the first file's events, shifted in time, to at least N MB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prismtrace.converters.kineto.reader import read_kineto


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--synthetic", type=int, default=0, metavar="MB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_bytes(options.files[0]))
        return
    print(
        f"{'file':32} {'events':>9} {'MB':>7} {'s CPU':>7} {'events/s':>9}"
        f" {'orjson/s':>9} {'ratio':>6} {'peak MB':>8} {'of file':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        files = options.files
        if options.synthetic:
            files = [*files, synthetic(files[0], options.synthetic, Path(folder))]
        for path in files:
            measure(path, 1 if path.parent == Path(folder) else options.repeat)


def measure(path: Path, repeat: int) -> None:
    events = read_kineto(path).counts["events"]
    size = len(text_of(path))
    ours = best(lambda: read_kineto(path), repeat)
    plain = best(lambda: decode_everything(path), repeat)
    script = [sys.executable, __file__, "--peak", str(path)]
    peak = int(subprocess.run(script, check=True, capture_output=True, text=True).stdout)
    print(
        f"{path.name[-32:]:32} {events:9,} {size / 1e6:7.1f} {ours:7.3f} {events / ours:9,.0f}"
        f" {events / plain:9,.0f} {plain / ours:5.2f}x {peak / 1e6:8.1f} {peak / size:7.2f}x"
    )


def best(call: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def text_of(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data


def decode_everything(path: Path) -> Any:
    import orjson

    return orjson.loads(text_of(path))


def peak_bytes(path: Path) -> int:
    """Growth of this process's peak memory; numpy and polars are imported and warm before."""
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm.json"
        warm.write_text('[{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":1}]')
        read_kineto(warm)
    before = high_water_mark()
    read_kineto(path)
    return high_water_mark() - before


def high_water_mark() -> int:
    # Not getrusage: its maximum survives exec, so a child starts with its parent's.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def synthetic(path: Path, megabytes: int, folder: Path) -> Path:
    """The events of `path` over and over, each time later and with other correlations."""
    whole = json.loads(text_of(path))
    events = whole.pop("traceEvents")
    span = max(e["ts"] for e in events) - min(e["ts"] for e in events) + 1
    step = 1 + max(e.get("args", {}).get("correlation", 0) for e in events)
    target = folder / f"synthetic-{megabytes}MB.json.gz"
    size = 0
    turn = 0
    with gzip.open(target, "wt", compresslevel=6) as file:
        file.write(json.dumps(whole, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        while size < megabytes * 1_000_000:
            for i, event in enumerate(events):
                size += file.write((",\n" if turn or i else "") + pretty(event))
                event["ts"] += span
                if "correlation" in event.get("args", {}):
                    event["args"]["correlation"] += step
            turn += 1
        file.write("\n  ]\n}\n")
    return target


def pretty(event: dict[str, Any]) -> str:
    """The layout of the profiler's own exporter."""
    fields = {k: v for k, v in event.items() if k != "args"}
    text = "  {\n    " + json.dumps(fields)[1:-1]
    if "args" in event:
        text += ',\n    "args": {\n      ' + json.dumps(event["args"])[1:-1] + "\n    }"
    return text + "\n  }"


if __name__ == "__main__":
    main()
