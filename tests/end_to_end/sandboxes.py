"""Jobs, their true runs, and runs of a few of their ranks among virtual ones."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.schema import LOCAL_KINDS, SliceInfo, TraceKind
from prismtrace.trace import open_trace, write_nodes

REPO = Path(__file__).resolve().parents[2]
STEPS = 5


@dataclass(frozen=True)
class Job:
    script: str
    flags: str = ""
    ranks: int = 8
    slow: bool = False


JOBS = {
    "dp8": Job("train_gpt.py"),
    "tp2-dp4": Job("train_gpt.py", "--tp 2"),
    "pp4-dp2": Job("train_gpt.py", "--pp 4"),
    "pp4-dp2-interleaved": Job("train_gpt.py", "--pp 4 --layers 8 --schedule interleaved"),
    "tp2-pp2-dp2": Job("train_gpt.py", "--tp 2 --pp 2"),
    "fsdp2-8": Job("train_gpt.py", "--fsdp 8"),
    "ep4-dp2": Job("train_moe.py", "--ep 4"),
    "pp2-zero-bubble": Job("train_gpt.py", "--pp 2 --schedule zero-bubble", ranks=4, slow=True),
    "pp2-zbv": Job("train_gpt.py", "--pp 2 --schedule zbv", ranks=2, slow=True),
    "hsdp-2-2-tp2": Job("train_gpt.py", "--fsdp 2 --tp 2", slow=True),
}


@dataclass(frozen=True)
class Case:
    """A run of some ranks of a job; picklable."""

    graph: Path
    tensors: Path
    words: tuple[str, ...]
    sandbox: tuple[int, ...]
    output: Path
    transport: str = "local"


def program(job: Job) -> list[str]:
    return [str(REPO / "examples" / job.script), *job.flags.split(), "--steps", str(STEPS)]


def results(folder: Path) -> dict[int, Any]:
    """Rank -> its losses and the hash of its parameters."""
    return {
        int(path.stem.partition("-")[2]): json.loads(path.read_text())
        for path in sorted(folder.iterdir())
    }


def run(words: list[object], environment: dict[str, str]) -> str:
    done = subprocess.run(
        list(map(str, words)),
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def make_truth(folder: Path, job: Job, environment: dict[str, str]) -> None:
    """A job's true runs and its collection, once for all processes of a test session.

    ==================== ============================================================
    true                 results of a plain run, one process a rank over gloo
    recorded, .parquet   results and graph of a recorded one
    collected            results of the ranks when collected, two at a time
    bare.parquet, .json  graph and report of that; tensors beside it
    calibrated.parquet   the graph with times
    ==================== ============================================================
    """
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "calibrated.parquet").is_file():
            return
        words = program(job)
        # Ranks that are forked need not import torch each.
        launcher = REPO / "benchmarks" / "fidelity" / "true_run.py"
        truly = [sys.executable, launcher, "--ranks", job.ranks, "--", *words, "--results"]
        run([*truly, folder / "true"], environment)
        record = ["prismreplay", "record", "-o", folder / "recorded.parquet", "--"]
        run([*record, *truly, folder / "recorded"], environment)
        collect = ["prismreplay", "collect", "--world-size", job.ranks, "--devices", 2, "--json"]
        collect += ["--record-tensors", "all", "-o", folder / "bare.parquet", "--", *words]
        told = run([*collect, "--results", folder / "collected"], environment)
        (folder / "bare.json").write_text(told)
        calibrate(folder / "bare.parquet", folder / "calibrated.parquet")


def calibrate(bare: Path, output: Path) -> None:
    """Give every row of a graph a time, by slices of one rank that are made up.

    Ranks are of different speed, so that they wait for each other.
    """
    from prismcalib import merge
    from prismcalib.slices import SliceOptions

    job = open_trace(bare)
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    duration = pl.when(local).then(20_000 + 5_000 * (pl.col("rank") % 3)).otherwise(10_000)
    paths = []
    for rank in job.header.ranks:
        rows = job.nodes.filter(pl.col("rank") == rank).sort("index").collect()
        rows = rows.with_columns(dur_ns=duration.cast(pl.Int64)).with_columns(
            start_ns=pl.col("dur_ns").cum_sum() - pl.col("dur_ns")
        )
        info = SliceInfo(index=rank, real_ranks=(rank,))
        update = {"kind": TraceKind.SLICE, "ranks": (rank,), "slice": info}
        paths.append(bare.with_name(f"made-up-{rank}.parquet"))
        write_nodes(job.header.model_copy(update=update), rows.lazy(), paths[-1])
    merge(paths, clock="keep", slices=SliceOptions(bare=bare)).write(output)
    for path in paths:
        path.unlink()


# --- in a process of its own: see prismreplay.slicing.workers ----------------------------------


def prepare() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    from prismreplay.collect.pool import preload

    preload()


def perform(case: Case) -> dict[int, Any]:
    """Run the sandbox of a case; what its ranks left."""
    from prismreplay.collect.programs import program_of
    from prismreplay.plan import compile_plan
    from prismreplay.run.options import RunOptions, Timing
    from prismreplay.run.running import run_sandbox
    from prismreplay.tensors.choices import read_choices

    graph = open_trace(case.graph)
    folder = case.output.with_suffix(".results")
    run_sandbox(
        program_of([*case.words, "--results", str(folder)]),
        graph,
        case.output,
        RunOptions(
            sandbox=case.sandbox,
            tensors=read_choices(tensors=[str(case.tensors)]),
            shown=(),
            quiet_stdout=True,
            assistants=len(case.sandbox) if case.transport == "reduced" else 0,
        ),
        lambda: Timing(plan=compile_plan(graph, case.sandbox)),
    )
    return results(folder)
