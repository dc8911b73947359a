"""Memory of a mixture of experts on a GPU: a real rank among virtual ones against a plain run.

    python benchmarks/gpu/moe_memory_cuda.py --out FOLDER

examples/train_moe.py with 4 ranks, one expert each, of which rank 1 gets a quarter of the tokens or
seven tenths (mock router). For both: the peak of torch's allocator of rank 1 in a run with all ranks
on one GPU through NCCL, and of the same rank alone in the sandbox. Then with a cap between the two
peaks: with the larger share both ways must end out of memory, with the smaller neither. Times
do not matter here: what does not need each other runs at the same time, in two rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.plain_run import plain_run  # noqa: E402

ROUTINGS = {"balanced": "shares = [1, 1, 1, 1]", "skewed": "shares = [1, 7, 1, 1]"}
RANKS, REAL = 4, 1
SMALL = 65536
"""Bytes of the largest communications whose contents are recorded."""
JOB = ["--ep", "4", "--experts", "4", "--top-k", "1", "--steps", "2", "--heads", "16"]
LARGE = ["--layers", "4", "--hidden", "1024", "--length", "512", "--batch-size", "16"]
CAPPED = """
import argparse, runpy, sys
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--cap", type=float, default=0)
options, rest = parser.parse_known_args()
if options.cap and torch.cuda.is_available():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap * 2**30 / total))
sys.path.insert(0, FOLDER)
sys.argv = [PROGRAM, *rest]
runpy.run_path(PROGRAM, run_name="__main__")
"""


class Bench:
    """Folders, programs and what was found."""

    def __init__(self, folder: Path, job: list[str], limit_s: int) -> None:
        self.folder, self.job, self.limit_s = folder, job, limit_s
        self.program = folder / "capped.py"
        program = REPO / "examples" / "train_moe.py"
        constants = f"FOLDER, PROGRAM = {str(program.parent)!r}, {str(program)!r}\n"
        self.program.write_text(constants + CAPPED)
        for name, text in ROUTINGS.items():
            self.routing(name).write_text(text)

    def routing(self, name: str) -> Path:
        """File for the mock router."""
        return self.folder / f"{name}.toml"

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        """A command of prismreplay."""
        from prismreplay.local_ranks import with_paths

        command = [sys.executable, "-m", "prismreplay.cli", *map(str, words)]
        with subprocess.Popen(
            command,
            env=with_paths({"OMP_NUM_THREADS": "1", **os.environ}, REPO),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                out, err = child.communicate(timeout=self.limit_s)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
                try:
                    out, err = child.communicate(timeout=15)
                except subprocess.TimeoutExpired:
                    child.kill()
                    out, err = child.communicate()
                err += f"\nstopped after {self.limit_s} s"
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def words(self, cap_gib: float) -> list[str]:
        """The program's arguments."""
        return [*([f"--cap={cap_gib}"] if cap_gib else []), *self.job]

    def plain(self, routing: str, cap_gib: float = 0) -> dict[str, object]:
        """All ranks are there."""
        folder = self.folder / f"plain-{routing}-{cap_gib}"
        run = plain_run(
            [str(self.program), *self.words(cap_gib)],
            RANKS,
            folder,
            limit_s=self.limit_s,
            mock_router=self.routing(routing),
        )
        rank = run.ranks[REAL]
        if run.failed and not cap_gib:
            raise RuntimeError(run.failed)
        return {
            "peak_bytes": rank.peak_bytes,
            "reserved_bytes": rank.reserved_bytes,
            "ended": rank.failed or "well",
            "wall_s": run.wall_s,
        }

    def collect(self, routing: str) -> dict[str, object]:
        """The graph, and what rank 1 gets from others."""
        begun = time.monotonic()
        done = self.call(
            *("collect", "--world-size", RANKS, "--devices", 1, "--per-device", RANKS, "--json"),
            # How many tokens go where; tokens and gradients need not be the job's.
            *("--record-tensors", "sandbox-facing", "--sandbox", REAL),
            *("--record-below", SMALL, "--mirror-above", SMALL),
            *("--mock-router", self.routing(routing), "-o", self.folder / f"{routing}.parquet"),
            *("--", self.program, *self.words(0)),
        )
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-6000:])
        return {"wall_s": time.monotonic() - begun}

    def sandbox(self, routing: str, cap_gib: float = 0) -> dict[str, object]:
        """Rank 1 alone."""
        begun = time.monotonic()
        output = self.folder / f"run-{routing}-{cap_gib}.parquet"
        done = self.call(
            *("run", self.folder / f"{routing}.parquet", "--early", "--sandbox", REAL, "--json"),
            *("--mock-router", self.routing(routing), "-o", output),
            *("--", self.program, *self.words(cap_gib)),
        )
        found: dict[str, object] = {
            "exit code": done.returncode,
            "wall_s": time.monotonic() - begun,
        }
        if done.returncode == 0:
            (rank,) = json.loads(done.stdout)["ranks"]
            found |= {
                "ended": "well",
                "peak_bytes": rank["peak_allocated_bytes"],
                "report": rank,
            }
        else:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            memory = [line for line in said if "out of memory" in line.lower()]
            found |= {"ended": (memory or said or ["?"])[-1][:300], "stderr": done.stderr[-4000:]}
            if not cap_gib:
                raise RuntimeError(done.stderr[-6000:])
        return found


def at_once(parts: dict[str, Callable[[], dict[str, object]]], results: dict[str, object]) -> None:
    """Do some parts at the same time; an error is a result."""
    with ThreadPoolExecutor(len(parts)) as pool:
        futures = {name: pool.submit(call) for name, call in parts.items()}
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except Exception:  # noqa: BLE001
                results[name] = {"failed": traceback.format_exc()}
                print(f"{name}: {results[name]['failed']}", flush=True)


def measure(bench: Bench, results: dict[str, object], until: float) -> None:
    """All of it."""
    at_once(
        {f"collect {one}": lambda one=one: bench.collect(one) for one in ROUTINGS}
        | {f"plain {one}": lambda one=one: bench.plain(one) for one in ROUTINGS},
        results,
    )
    parts = {f"sandbox {one}": lambda one=one: bench.sandbox(one) for one in ROUTINGS}
    fits, large = (results[f"plain {one}"].get("peak_bytes", 0) for one in ROUTINGS)
    reserved = results["plain balanced"].get("reserved_bytes", 0)
    results["cap_gib"] = cap = round((max(fits, reserved) + large) / 2 / 2**30, 2)
    if 0 < reserved < cap * 2**30 < large:
        for one in ROUTINGS:
            parts[f"sandbox {one}, capped"] = lambda one=one: bench.sandbox(one, cap)
            parts[f"plain {one}, capped"] = lambda one=one: bench.plain(one, cap)
    else:
        print(f"no cap lies between the two: {reserved} B reserved, {large} B at the peak")
    if time.monotonic() > until:
        print("no time is left for the sandbox")
        return
    at_once(parts, results)


def show(results: dict[str, object]) -> None:
    """The table."""
    print("| routing | plain run, B | in the sandbox, B | difference, B |\n|---|---|---|---|")
    for one in ROUTINGS:
        plain, mine = (results.get(f"{how} {one}", {}).get("peak_bytes") for how in HOWS)
        off = mine - plain if plain is not None and mine is not None else "?"
        print(f"| {one} | {plain} | {mine} | {off} |")
    print(
        f"\n| routing | with {results.get('cap_gib')} GiB, plain | in the sandbox |\n|---|---|---|"
    )
    for one in ROUTINGS:
        plain, mine = (results.get(f"{how} {one}, capped", {}).get("ended") for how in HOWS)
        print(f"| {one} | {plain} | {mine} |")


HOWS = ("plain", "sandbox")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--budget", type=float, default=90, help="seconds")
    parser.add_argument("--small", action="store_true", help="to try the script itself")
    options = parser.parse_args()
    until = time.monotonic() + 0.55 * options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, object] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            job = JOB + ([] if options.small else LARGE)
            measure(Bench(Path(name), job, int(0.45 * options.budget)), results, until)
    finally:
        (options.out / "moe_memory_cuda.json").write_text(json.dumps(results, indent=1))
        show(results)
    sys.exit(any("failed" in one for one in results.values() if isinstance(one, dict)))


if __name__ == "__main__":
    main()
