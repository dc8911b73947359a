"""How fast and in how much memory Chakra traces are read, converted and written.

    python benchmarks/chakra.py [--nodes 1000000]

Nodes are made up: two dependencies and a stream each, every tenth a collective. They wait for
the two before them or, a second time, for two of the fifty before. Rates are nodes
a second of CPU time (user and system, all threads: of a core), each measured in a fresh
process: reading the frames into columns; the same with the protobuf library, a Python object
for each message, reading the same fields and nothing else; a whole conversion, written to
Parquet; and the export of its result.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("PRISM_TEST_DATA") or REPO.parent / "shared" / "data") / "chakra"
BLOCK = 512 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--task", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, *arguments = options.task
        import prismtrace.converters.chakra.rank
        import prismtrace.converters.pipeline
        import prismtrace.exporting  # noqa: F401 - what is imported before is not measured

        before = resource.getrusage(resource.RUSAGE_SELF)
        done = TASKS[task](*arguments)
        used = resource.getrusage(resource.RUSAGE_SELF)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps({"nodes": done, "cpu_s": cpu, "peak_kb": used.ru_maxrss}))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "made.0.et"
        path.write_bytes(made_up(options.nodes))
        (folder / "groups.json").write_text('{"3": [0]}')
        show("made up", path)
        for task in ("decode", "library", "convert", "export"):
            measure(task, str(path))
        path.write_bytes(made_up(options.nodes, beside=True))
        show("made up, nodes run beside each other", path)
        measure("convert", str(path))
        recorded = DATA / "chakra.0.et.gz"
        if recorded.exists():
            plain = folder / "recorded.0.et"
            text = gzip.decompress(recorded.read_bytes())
            plain.write_bytes(text[1 + text[0] :] * 20)  # without the message about the file
            show("recorded (50 dependencies a node)", plain)
            for task in ("decode", "library"):
                measure(task, str(plain))


def show(title: str, path: Path) -> None:
    print(f"{title}: {path.stat().st_size / 1e6:.1f} MB")


def measure(task: str, path: str) -> None:
    command = [sys.executable, __file__, "--task", task, path]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rate = found["nodes"] / found["cpu_s"]
    print(f"  {task:8} {rate:10,.0f} nodes/s of a core, peak {found['peak_kb'] / 1e3:,.0f} MB")


def made_up(nodes: int, *, beside: bool = False) -> bytes:
    from prismtrace.converters.chakra.messages import message_class

    node_class = message_class("Node")
    text = bytearray()
    for number in range(nodes):
        deps = {number - 1, number - 2}
        if beside:
            deps = {number - 2 - number * 7919 % 48, number - 3 - number * 104729 % 47}
        node = node_class(
            id=number,
            name=f"kernel_{number % 500}",
            type=4 if number % 10 else 7,
            data_deps=sorted(dep for dep in deps if dep >= 0),
            duration_micros=number % 1000,
        )
        node.attr.add(name="is_cpu_op", bool_val=False)
        node.attr.add(name="stream", int64_val=number % 4)
        if number % 10 == 0:
            node.attr.add(name="comm_type", int64_val=0)
            node.attr.add(name="comm_size", int64_val=1 << 20)
            node.attr.add(name="pg_name", string_val="3")
        message = node.SerializeToString()
        assert len(message) < 1 << 14
        length = len(message)
        text += bytes([length]) if length < 128 else bytes([length & 127 | 128, length >> 7])
        text += message
    return bytes(text)


def decode(path: str) -> int:
    from prismtrace.converters.chakra.frames import read_frames
    from prismtrace.converters.content import read_blocks

    frames = read_frames(read_blocks(Path(path)), where=path, counts=Counter())
    return len(frames.nodes)


def library(path: str) -> int:
    from prismtrace.converters.chakra.messages import message_class

    node_class = message_class("Node")
    text, at, nodes, values = Path(path).read_bytes(), 0, 0, []
    while at < len(text):
        length = shift = 0
        while True:
            byte = text[at]
            at += 1
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if nodes or text[at] == 8:  # not the metadata
            node = node_class.FromString(text[at : at + length])
            values += [node.id, node.name, node.type, node.start_time_micros, node.duration_micros]
            values += [*node.data_deps, *node.ctrl_deps]
            for item in node.attr:
                values += [item.name, getattr(item, item.WhichOneof("value"))]
            values.clear()
        nodes += 1
        at += length
    return nodes


def convert(path: str) -> int:
    from prismtrace.converters import convert as convert_files

    folder = Path(path).parent
    report = convert_files(path, folder / "made.parquet", groups=folder / "groups.json")
    return report.nodes


def export(path: str) -> int:
    from prismtrace.exporting import export as export_trace
    from prismtrace.trace import Trace

    folder = Path(path).parent
    trace = Trace.open(folder / "made.parquet")
    export_trace(trace, folder / "out", to="chakra")
    return trace.collect().height


TASKS = {"decode": decode, "library": library, "convert": convert, "export": export}


if __name__ == "__main__":
    main()
