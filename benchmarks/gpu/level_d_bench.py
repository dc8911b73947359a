"""What level D measures of a layout: true and emulated runs, and all that these need."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.level_d import compare_kernels, typical
from benchmarks.gpu.level_d_forks import REPO
from benchmarks.gpu.level_d_jobs import (
    SPREAD_OUT,
    bounded,
    gpu_names,
    layouts_of,
    made_up,
    model_of,
    sandbox_sizes,
)
from benchmarks.gpu.level_d_parts import Parts, cores
from benchmarks.gpu.level_d_traces import WARMUP, compare_pieces, transfers

HERE = Path(__file__).parent
KINETO_BYTES = 15 << 20
RING_ROWS = 24
AT_ONCE = 4
"""Ranks that compute on a GPU at a time while a graph is collected."""
RECORD_BELOW = 1 << 16


class Bench(Parts):
    """Measures what a part is called after; on CPUs, to test this, if there are no `gpus`."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any], gpus: int) -> None:
        super().__init__(options, settings)
        self.gpus = gpus
        self.ranks: int = settings["ranks"]
        self.shares = gpus < self.ranks

    def words(self, name: str, size: str = "", more: Sequence[object] = ()) -> list[str]:
        """The program of a layout: a script that is watched."""
        steps = 4 if size else self.settings["steps"]
        model = model_of(size or self.settings["size"], self.ranks)
        return [
            *(str(HERE / "timed_rank.py"), str(REPO / "examples/train_gpt.py"), *model),
            *(*layouts_of(self.ranks)[name], "--steps", str(steps), *map(str, more)),
        ]

    def sizes(self) -> list[int]:
        """Numbers of sandbox ranks."""
        return sandbox_sizes(self.ranks, self.gpus)

    # --- what takes no times --------------------------------------------------------------

    def one_gpu(self, place: int) -> tuple[dict[str, str], int]:
        """For a command that needs no more than one: which, and how many devices that are.

        Ranks of large models need all.
        """
        if not self.gpus:
            return {}, min(self.ranks, cores())
        if self.settings["size"] not in SPREAD_OUT:
            return {}, self.gpus
        names = gpu_names()
        return {"CUDA_VISIBLE_DEVICES": names[place % len(names)]}, 1

    def gather(
        self, folder: Path, words: Sequence[str], place: int, recorded: Sequence[object]
    ) -> tuple[dict[str, str], int]:
        """`collect`, with these options; where it was."""
        variables, devices = self.one_gpu(place)
        self.ours(
            *("collect", "--world-size", self.ranks, "--devices", devices),
            *(("--per-device", AT_ONCE) if self.gpus else ()),
            *("--record-tensors", "all", *recorded, "--show-rank", "none"),
            *("-o", folder / "bare.parquet", "--", *words),
            variables=variables,
        )
        return variables, devices

    def collect(self, name: str, place: int) -> dict[str, Any]:
        """The graph of a layout; large tensors are not recorded, virtual ranks mirror them."""
        begun = time.monotonic()
        less = ("--record-below", RECORD_BELOW, "--mirror-above", RECORD_BELOW)
        words, recorded = self.words(name), less if self.gpus else ()
        self.gather(self.work / name / "emulation", words, place, recorded)
        return {"wall_s": time.monotonic() - begun}

    def emulated_losses(self, name: str, place: int) -> list[float]:
        """Of a small model, all of whose communications are recorded; virtual ranks are early."""
        folder = self.work / f"{name}-losses"
        variables, _ = self.gather(folder, self.words(name, "tiny"), place, ())
        self.ours(
            *("run", folder / "bare.parquet", "--early", "--sandbox", 0),
            *("--tensors", folder / "bare.tensors", "--show-rank", "none"),
            *("-o", folder / "run.parquet"),
            *("--", *self.words(name, "tiny", ("--results", folder / "emulated"))),
            variables=variables,
        )
        return losses_of(folder / "emulated")

    def true_losses(self, name: str) -> list[float]:
        """The same with all ranks truly there."""
        folder = self.work / f"{name}-losses" / "true"
        self.true_run(self.words(name, "tiny", ("--results", folder)))
        return losses_of(folder)

    # --- true and emulated runs -----------------------------------------------------------

    def true_variables(self, times: Path | None = None) -> dict[str, str]:
        """For ranks of a true run, and for where they note times."""
        limit = {"FIDELITY_LIMIT": str(max(1, int(min(150, self.left_s()))))}
        if self.shares and self.gpus:
            limit["FIDELITY_ALONE"] = "1"
        if times is not None:
            shutil.rmtree(times, ignore_errors=True)
            limit["FIDELITY_TIMES"] = str(times)
        return limit

    def true_run(self, words: Sequence[str], times: Path | None = None, **more: str) -> None:
        """All ranks truly there, plain processes."""
        variables = self.true_variables(times) | more
        self.runner.job(words, self.ranks, min(150.0, self.left_s()), variables)

    def timed_run(self, name: str, **more: str) -> dict[str, Any]:
        """What the first rank of a true run has noted."""
        times = self.work / name / "times-true"
        self.true_run(self.words(name), times, **more)
        return noted(times)

    def emulated_run(self, name: str, size: int, kept: str = "run", **more: str) -> dict[str, Any]:
        """Some ranks, all others virtual; the trace is `kept` under a name."""
        folder = self.work / name
        files, times = folder / "emulation", folder / f"times-{size}"
        shutil.rmtree(times, ignore_errors=True)
        told = self.ours(
            *("run", files / "calibrated.parquet", "--sandbox", f"0-{size - 1}"),
            *("--tensors", files / "bare.tensors", "--show-rank", "none"),
            *("-o", folder / f"{kept}-{size}.parquet", "--", *self.words(name)),
            variables={"FIDELITY_TIMES": str(times), **more},
        )
        names = ("predicted_step_ns", "interference", "ranks", "groups", "wall_s", "policies")
        found = noted(times)
        return {
            **found,
            **{key: told[key] for key in names},
            "seen_step_ns": found["step_ns"],
            "steps": told["steps"],
            "step_ns": typical([step["emulated_ns"] for step in told["steps"]]),
        }

    @property
    def table(self) -> Path:
        """Of what communications take."""
        return self.work / "table.parquet"

    def make_table(self) -> Any:
        """What communications take here; of ranks that share a GPU, made up."""
        if self.shares:
            samples = self.work / "made-up.csv"
            samples.write_text("\n".join(made_up(self.ranks)))
            return self.ours("comm-table", samples, "-o", self.table, package="prismcalib")
        sizes = ("--sizes", "1K-256M", "--factor", "8", "--rounds", "3")
        backend = ("--backend", "nccl", "--nproc", self.ranks)
        return self.ours("comm-bench", *backend, *sizes, "-o", self.table)

    def slices(self, name: str) -> dict[str, Any]:
        """slice and merge, as `emulate` has them: one rank a slice."""
        files, begun = self.work / name / "emulation", time.monotonic()
        bare, table = files / "bare.parquet", ("--comm-table", self.table)
        sliced = self.ours(
            *("slice", bare, "--sandbox-size", 1),
            *("--devices", self.gpus or min(self.ranks, cores()) + 1),
            *("--tensors", files / "bare.tensors", *table, "-o", files / "slices"),
            *("--", *self.words(name)),
        )
        merged = self.ours(
            *("merge", files / "slices", "--bare", bare, "--clock", "keep"),
            *("--ranks-per-host", self.ranks, *table, "-o", files / "calibrated.parquet"),
            package="prismcalib",
        )
        return {"wall_s": time.monotonic() - begun, "slice": sliced, "merge": merged}

    # --- what explains their times --------------------------------------------------------

    def record(self, name: str) -> Any:
        """A true run, recorded and merged."""
        folder = self.work / name
        told = self.ours(
            *("record", "--nproc-per-node", self.ranks, "-o", folder / "true.parquet"),
            *("--", *self.words(name)),
            variables=self.true_variables(folder / "times-recorded"),
        )
        merged = self.ours(
            *("merge", folder / "true.parquet", "-o", folder / "true-merged.parquet"),
            package="prismcalib",
        )
        return {"record": told, "merge": merged, **noted(folder / "times-recorded")}

    def compare(self, name: str) -> dict[str, Any]:
        """Pieces of computation, and transfers, of the recorded run and of emulated ones."""
        folder = self.work / name
        true = folder / "true.parquet"
        return {
            "pieces": {
                str(size): compare_pieces(true, folder / f"run-{size}.parquet", 0)
                for size in self.sizes()
                if (folder / f"run-{size}.parquet").is_file()
            },
            "true_transfers": transfers(folder / "true-merged.parquet", 0),
            "emulated_transfers": transfers(folder / "emulation" / "calibrated.parquet", 0),
        }

    def kernels(self, name: str) -> dict[str, Any]:
        """Kernels of the first rank, profiled in a true and an emulated run."""
        if not self.gpus:
            return {}
        more = {"FIDELITY_KERNELS": str(WARMUP)}
        true = self.timed_run(name, **more)["kernels"]
        emulated = self.emulated_run(name, 1, "profiled", **more)["kernels"]
        return {"compared": compare_kernels(true, emulated)}

    # --- peers ----------------------------------------------------------------------------

    def peers(self) -> list[dict[str, Any]]:
        """Rings over peer memory, and NCCL."""
        words = [str(HERE / "ring_peers.py"), "--out", str(self.work), "--ranks"]
        self.runner.job(words, self.gpus, min(120, self.left_s()), {})
        rows = json.loads((self.work / "ring_peers.json").read_text())
        return [row for row in rows if row.get("K", row.get("nccl")) == self.ranks][:RING_ROWS]

    def vanilla(self) -> list[dict[str, Any]]:
        """Every rank a process on one GPU; the pruned ring with as many ranks, on one GPU."""
        script, found = HERE / "vanilla.py", self.work / "vanilla.json"
        budget = min(130.0, self.left_s() - 10)
        words = (sys.executable, script, "--out", self.work, "--ranks", self.ranks)
        try:
            more = {"CUDA_VISIBLE_DEVICES": gpu_names()[0]}
            bounded((*words, "--budget", budget), budget + 5, more)
        except RuntimeError:
            if not found.is_file():
                raise
        return json.loads(found.read_text())

    def kineto(self, job: str) -> dict[str, Any]:
        """Profiles of all ranks, as files, and what the converter makes of them."""
        folder = self.work / "kineto"
        words = (sys.executable, HERE / "record_kineto.py", "--out", folder)
        limit_s = min(200, self.left_s())
        bounded((*words, "--world-size", self.ranks, "--only", job), limit_s, {})
        converted, target = {}, self.work / "converted.parquet"
        for variant in (job, f"{job}-nosync"):
            told = self.ours("convert", folder / variant, "-o", target, package="prismtrace")
            merged = self.ours(
                *("merge", target, "-o", self.work / "merged.parquet"), package="prismcalib"
            )
            converted[variant] = {"convert": told, "merge": merged}
        files = [one for one in folder.glob(f"{job}*/*") if one.is_file()]
        return {"bytes": sum(one.stat().st_size for one in files), "converted": converted}

    def pack(self) -> None:
        """Profiles for --out, as many as fit."""
        used, left_out = 0, []
        with tarfile.open(self.out / "kineto.tar", "w") as archive:
            for folder in sorted((self.work / "kineto").glob("*")):
                size = sum(one.stat().st_size + 1024 for one in folder.glob("*"))
                if used + size > KINETO_BYTES:
                    left_out.append(folder.name)
                    continue
                used += size
                archive.add(folder, folder.name)
        if left_out:
            print(f"kineto.tar: no room for {', '.join(left_out)}")


def noted(times: Path) -> dict[str, Any]:
    """What the first rank has left: steps and memory."""
    found = json.loads((times / "rank-0.json").read_text())
    return {**found, "step_ns": typical(found["steps_ns"])}


def losses_of(results: Path) -> list[float]:
    """Of the first rank."""
    said = json.loads((results / "rank-0000.json").read_text())
    return [float.fromhex(one) for one in said["losses"]]
