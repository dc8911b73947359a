"""How fast is propagation?  Nanoseconds of CPU time per row, and ratios taken in one run.

    python benchmarks/propagate.py                 one million rows, 20 seconds
    python benchmarks/propagate.py --data 64 --microbatches 64        sixteen times as many

Needs nothing but prismcalib; the graph is a made-up training step (`training_graph`).
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from prismcalib.graph import Graph
from prismcalib.propagation import Engine, Timing, critical_rows, propagate, slack


@dataclass
class Program:
    """Operations of one rank; all ranks of a pipeline stage run the same."""

    durations_us: list[int] = field(default_factory=list)
    deps: list[list[int]] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    tails: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, stream: str, duration_us: int, after: int | None, channel: str = "") -> int:
        """Append an operation behind its stream and `after`; communication has a channel."""
        row = len(self.deps)
        self.deps.append(
            sorted({dep for dep in (self.tails.get(stream), after) if dep is not None})
        )
        self.durations_us.append(duration_us)
        self.channels.append(channel)
        self.seqs.append(self.counts.get(channel, 0))
        self.counts[channel] = self.counts.get(channel, 0) + 1
        self.tails[stream] = row
        return row


def stage_program(stage: int, stages: int, microbatches: int, layers: int) -> Program:
    """One training step of a stage: 1F1B pipeline, tensor and data parallel groups."""
    program = Program()

    def layer_blocks(row: int | None, blocks: tuple[tuple[int, ...], ...]) -> int | None:
        for durations in blocks * layers:
            for duration in durations:
                row = program.add("compute", duration, row)
            row = program.add("tensor", 180, row, "tensor")
        return row

    def forward() -> None:
        received = None
        if stage > 0:
            received = program.add("recv forward", 90, None, f"forward {stage - 1}")
        row = layer_blocks(received, ((40, 300, 500, 150), (40, 450, 60, 450)))
        if stage < stages - 1:
            program.add("send forward", 90, row, f"forward {stage}")

    def backward() -> None:
        row = program.tails["tensor"]
        if stage < stages - 1:
            row = program.add("recv backward", 90, row, f"backward {stage}")
        last = layer_blocks(row, ((450, 90, 450, 70), (150, 1100, 300, 70)))
        if stage > 0:
            program.add("send backward", 90, last, f"backward {stage - 1}")

    warmup = min(stages - 1 - stage, microbatches)
    for _ in range(warmup):
        forward()
    for _ in range(microbatches - warmup):
        forward()
        backward()
    for _ in range(warmup):
        backward()
    row = program.add("data", 2500, program.tails["tensor"], "data")
    row = program.add("compute", 3000, row)
    program.add("data", 2500, row, "data")
    return program


def training_graph(stages: int, tensor: int, data: int, microbatches: int, layers: int) -> Graph:
    """stages x data x tensor ranks, tensor rank fastest; durations with 10 % jitter."""
    ranks = data * tensor
    rank = np.arange(ranks)
    random = np.random.default_rng(7)
    bases: dict[str, int] = {}
    sizes: list[np.ndarray] = []
    parts: dict[str, list[np.ndarray]] = {"duration": [], "count": [], "dep": [], "instance": []}
    rows = instances = 0
    for stage in range(stages):
        program = stage_program(stage, stages, microbatches, layers)
        k = len(program.deps)
        instance = np.full((ranks, k), -1, np.int32)
        channels, seqs = np.array(program.channels), np.array(program.seqs)
        for channel in sorted(set(program.channels) - {""}):
            # Which of the channel's groups a rank is in, how many groups, members of each.
            group, groups, members = {
                "tensor": (rank // tensor, data, tensor),
                "data": (rank % tensor, tensor, data),
            }.get(channel, (rank, ranks, 2))
            key = f"{channel} {stage}" if channel in ("tensor", "data") else channel
            if key not in bases:
                bases[key] = instances
                instances += groups * program.counts[channel]
                sizes.append(np.full(groups * program.counts[channel], members, np.int32))
            mine = channels == channel
            start = bases[key] + group * program.counts[channel]
            instance[:, mine] = start[:, None] + seqs[mine]
        durations = np.array(program.durations_us) * 1000
        parts["duration"].append(
            (durations * random.uniform(1, 1.1, (ranks, k))).astype(np.int64).ravel()
        )
        parts["count"].append(np.tile([len(deps) for deps in program.deps], ranks))
        local = np.array([dep for deps in program.deps for dep in deps])
        parts["dep"].append((rows + rank[:, None] * k + local).astype(np.int32).ravel())
        parts["instance"].append(instance.ravel())
        rows += ranks * k
    return Graph(
        duration_ns=np.concatenate(parts["duration"]),
        dep_offsets=np.concatenate([[0], np.cumsum(np.concatenate(parts["count"]))]),
        dep_rows=np.concatenate(parts["dep"]),
        instance=np.concatenate(parts["instance"]),
        instance_size=np.concatenate(sizes),
    )


def cpu_ns(work: Callable[[], object], repeats: int) -> float:
    """Least CPU time of several runs, in nanoseconds."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time_ns()
        work()
        best = min(best, time.process_time_ns() - begin)
    return best


def stream_once(graph: Graph, timing: Timing) -> None:
    """Read every input and write every output of the forward pass once, in order."""
    for column in (
        graph.duration_ns, graph.dep_offsets, graph.dep_rows, graph.instance, graph.instance_size
    ):  # fmt: skip
        column.max()
    for column in (timing.start_ns, timing.end_ns, timing.order):
        np.copyto(column, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("stages", 4), ("tensor", 4), ("data", 8), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape = (options.stages, options.tensor, options.data, options.microbatches, options.layers)

    graph = training_graph(*shape)
    begin = time.process_time_ns()
    small = training_graph(2, 2, 2, 8, 2)
    slack(small, propagate(small, "array"), "array")
    first_call_ns = time.process_time_ns() - begin
    timing = propagate(graph, "array")

    def per_row(work: Callable[[], object]) -> float:
        return cpu_ns(work, options.repeats) / graph.rows

    result: dict[str, float] = {
        "ranks": options.stages * options.tensor * options.data,
        "rows": graph.rows,
        "deps": len(graph.dep_rows),
        "first call, s": first_call_ns / 1e9,
        "array, ns/row": per_row(lambda: propagate(graph, "array")),
        "array slack, ns/row": per_row(lambda: slack(graph, timing, "array")),
        "critical path, ns/row": per_row(lambda: critical_rows(graph, timing)),
        "checks of Graph, ns/row": per_row(graph.validate),
    }
    tracemalloc.start()
    propagate(graph, "array")
    # numba's own allocations (link and stack, 8 bytes a row) are not traced.
    result["peak beside the graph, bytes/row"] = tracemalloc.get_traced_memory()[1] / graph.rows + 8
    tracemalloc.stop()
    scratch = propagate(graph, "array")
    streamed = per_row(lambda: stream_once(graph, scratch))
    result["array : streaming the arrays once"] = result["array, ns/row"] / streamed

    medium = training_graph(4, 2, 4, 16, 4)
    engines: tuple[Engine, ...] = ("array", "python", "networkx")
    for engine in engines:
        repeats = 1 if engine == "networkx" else 3
        result[f"{engine} at {medium.rows} rows, ns/row"] = (
            cpu_ns(lambda engine=engine: propagate(medium, engine), repeats) / medium.rows  # type: ignore[misc]
        )
    result["networkx : array"] = (
        result[f"networkx at {medium.rows} rows, ns/row"]
        / result[f"array at {medium.rows} rows, ns/row"]
    )
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:36} {value:14,.2f}".replace(".00", ""))


if __name__ == "__main__":
    main()
