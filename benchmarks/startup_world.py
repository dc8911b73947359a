"""How long until one rank of a large world trains, and in which memory?

    python benchmarks/startup_world.py                          8 192 ranks, one of them for real
    python benchmarks/startup_world.py --ranks 64 --ranks 8192
    python benchmarks/startup_world.py --vanilla 2 --vanilla 8  one gloo process per rank instead

Collects `examples/train_gpt.py --tp 2` on four ranks, widens the graph to the world (the replicas
are alike), gives it durations and compiles a plan. Counted is `prismreplay run --plan`: from the
start of the command to the end of the first training step, beside what importing torch alone takes
in the same minute.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from prismcalib.build import graph_from_trace
from prismcalib.propagation import propagate
from prismtrace.schema import ProcessGroup, TraceKind
from prismtrace.trace import Trace, node_ids, open_trace, write

PROGRAM = Path(__file__).parent.parent / "examples" / "train_gpt.py"
ARGUMENTS = ["--tp", "2", "--layers", "1", "--microbatches", "1", "--steps", "2"]
TP = 2
SMALL = 4
COMPUTE_NS, TRANSFER_NS = 1_000_000, 200_000

# Rank 0 is the root of all it takes part in: what it has is what all have.
RULES = """
[[rule]]
kind = ["broadcast"]
produce = "keep"

[[rule]]
produce = "own"
"""


# --- a large world from a small one ----------------------------------------------------------


def widen(small: Trace, world: int) -> Trace:
    """The graph of `world` ranks from that of four: replica 0 is replica 0, all others are 1.

    Groups have the names that the program gives them in such a world.
    """
    replicas = world // TP
    by_desc = {group.id: group.desc for group in small.header.groups}
    rows = small.collect().with_columns(
        tensor=pl.col("rank") % TP,
        group_desc=pl.col("group").replace_strict(by_desc, return_dtype=pl.String),
    )
    parts = []
    for like, ranks in ((0, [0]), (1, range(1, replicas))):
        mine = rows.filter(pl.col("rank") // TP == like)
        parts.append(mine.join(pl.DataFrame({"replica": list(ranks)}), how="cross"))
    wide = pl.concat(parts)
    rank = (pl.col("replica") * TP + pl.col("tensor")).cast(pl.Int32)
    kind = pl.col("group_desc")
    group = (
        pl.when(kind == "mesh_tp")
        .then(1 + TP + pl.col("replica"))
        .when(kind == "mesh_dp")
        .then(1 + pl.col("tensor"))
        .when(kind == "default_pg")
        .then(0)
    )
    # Roots: the same place of a tensor group, replica 0 of a data group.
    peer = (
        pl.when(kind == "mesh_tp")
        .then(pl.col("replica") * TP + pl.col("peer") % TP)
        .otherwise(pl.col("peer"))
    )
    wide = (
        wide.with_columns(
            rank=rank, group=group.cast(pl.Int32), peer=peer.cast(pl.Int32), id=pl.lit(0)
        )
        .with_columns(id=node_ids(pl.col("rank"), pl.col("index")))
        .select(rows.columns[:-2])
        .sort("rank", "index")
    )
    header = small.header.model_copy(
        update={
            "world_size": world,
            "ranks": tuple(range(world)),
            "axes": {"dp": replicas, "tp": TP},
            "groups": _groups(world),
        }
    )
    return Trace(header, wide.lazy())


def _groups(world: int) -> tuple[ProcessGroup, ...]:
    ranks = [("default_pg", range(world))]
    ranks += [("mesh_dp", range(place, world, TP)) for place in range(TP)]
    ranks += [("mesh_tp", range(first, first + TP)) for first in range(0, world, TP)]
    return tuple(
        ProcessGroup(id=number, name=str(number), desc=desc, ranks=tuple(members))
        for number, (desc, members) in enumerate(ranks)
    )


def calibrated(bare: Trace) -> Trace:
    """The graph with made-up durations, and the times that follow from them."""
    timed = pl.when(pl.col("group").is_null()).then(COMPUTE_NS).otherwise(TRANSFER_NS)
    rows = bare.collect().with_columns(dur_ns=timed.cast(pl.Int64))
    graph, rows = graph_from_trace(Trace(bare.header, rows.lazy()))
    timing = propagate(graph)
    member = pl.Series(graph.instance >= 0)
    rows = rows.with_columns(
        start_ns=pl.Series(timing.start_ns),
        dur_ns=pl.Series(timing.end_ns - timing.start_ns),
        wait_ns=pl.when(member).then(pl.Series(timing.wait_ns)),
        transfer_ns=pl.when(member).then(pl.Series(timing.duration_ns)),
    )
    header = bare.header.model_copy(update={"kind": TraceKind.CALIBRATED})
    return Trace(header, rows.lazy())


# --- measuring -------------------------------------------------------------------------------


@dataclass
class Cost:
    """Seconds from the start of a command, and bytes. `cpu_s` and memory as of the first step."""

    first_step_s: float = 0.0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    memory_bytes: int = 0


def watched(command: list[str]) -> Cost:
    """Run a command; when it prints the end of the first step, and what all of it holds then."""
    begun = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    cost, said = Cost(), []

    def listen() -> None:
        for line in process.stderr or ():
            said.append(line)
            note(line)

    def note(line: str) -> None:
        if line.startswith("step 0") and not cost.first_step_s:
            cost.first_step_s = time.perf_counter() - begun
            cost.memory_bytes, cost.cpu_s = held(process.pid)

    listener = threading.Thread(target=listen)
    listener.start()
    for line in process.stdout or ():
        note(line)
    listener.join()
    if process.wait():
        sys.exit(f"{' '.join(command)}:\n{''.join(said)[-3000:]}")
    cost.wall_s = time.perf_counter() - begun
    return cost


def held(pid: int) -> tuple[int, float]:
    """Memory of a process and all below it, and their CPU time; shared pages count once."""
    total, cpu = 0, 0.0
    process = Path(f"/proc/{pid}")
    try:
        lines = (process / "smaps_rollup").read_text(encoding="ascii").splitlines()
        total = sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        ticks = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        cpu = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
        for task in (process / "task").iterdir():
            for child in (task / "children").read_text(encoding="ascii").split():
                more, longer = held(int(child))
                total, cpu = total + more, cpu + longer
    except OSError:  # it has just ended
        pass
    return total, cpu


def torch_alone() -> tuple[float, float]:
    """Seconds, and of CPU, to import torch and what training programs import of it."""
    code = "from prismreplay.collect.pool import preload; preload()"
    begun, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return time.perf_counter() - begun, cpu


def prismreplay(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "prismreplay.cli", *map(str, arguments)]


def prepare(world: int, folder: Path) -> None:
    """The calibrated trace and the plan of a world."""
    begun = time.perf_counter()
    small = folder / "small.parquet"
    if not small.exists():
        collect = ["collect", "--world-size", SMALL, "--devices", 2, "-o", small, "--show-rank", ""]
        subprocess.run(
            prismreplay(*collect, "--", PROGRAM, *ARGUMENTS), check=True, capture_output=True
        )
    trace = folder / f"{world}.parquet"
    write(calibrated(widen(open_trace(small), world)), trace)
    made = time.perf_counter() - begun
    subprocess.run(
        prismreplay("plan", trace, "--sandbox", 0, "-o", folder / f"{world}.plan.parquet"),
        check=True,
        capture_output=True,
    )
    rows = open_trace(trace).nodes.select(pl.len()).collect().item()
    total = time.perf_counter() - begun
    print(f"# {world} ranks: {rows:,} rows made in {made:.0f} s, plan in {total - made:.0f} s")


def emulated(world: int, folder: Path) -> Cost:
    """One rank of the world for real."""
    rules = folder / "rules.toml"
    rules.write_text(RULES, encoding="utf-8")
    command = prismreplay(
        *("run", folder / f"{world}.parquet", "--plan", folder / f"{world}.plan.parquet"),
        *("--sandbox", 0, "--tensors", rules, "-o", folder / "run.parquet"),
        *("--json", "--", PROGRAM, *ARGUMENTS),
    )
    return watched(command)


def vanilla(world: int, _folder: Path) -> Cost:
    """All ranks for real, each a process of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return watched([sys.executable, *launcher, os.fspath(PROGRAM), *ARGUMENTS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="size of the world")
    parser.add_argument("--vanilla", type=int, action="append", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="make (or find) the small graph here")
    options = parser.parse_args()
    sizes = [(world, emulated) for world in options.ranks or ([] if options.vanilla else [8192])]
    sizes += [(world, vanilla) for world in options.vanilla]
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        print("  ranks mode       first step s, CPU    torch s, CPU   memory MB  whole s")
        for world, way in sizes:
            if way is emulated and not (folder / f"{world}.plan.parquet").exists():
                prepare(world, folder)
            for _ in range(options.repeats):
                torch_s, torch_cpu_s = torch_alone()
                cost = way(world, folder)
                print(
                    f"{world:7} {way.__name__:9} {cost.first_step_s:12.1f} {cost.cpu_s:6.1f} "
                    f"{torch_s:9.1f} {torch_cpu_s:6.1f} {cost.memory_bytes / 1e6:11.0f} "
                    f"{cost.wall_s:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
