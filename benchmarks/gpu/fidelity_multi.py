"""True jobs on all GPUs of a host beside emulated ones: step times, memory, losses, kernels.

    benchmarks/gpu/fidelity_multi.sh --out FOLDER [--work FOLDER] [--budget 560] [--size 0.3]

For data parallelism (DDP, FSDP2), tensor and pipeline parallelism and, with four ranks or more, both of
these: what NCCL takes here goes into a table (`prismreplay comm-bench`); `prismreplay emulate`
collects, slices and merges on the same GPUs, one rank a slice, virtual ranks giving what the real
one does; then, in turn, the true job with a GPU for every rank, and 1, 2, 4 ... ranks of it, up to half, with all
others virtual (transport `local`). A further true run is recorded, one of each is profiled, and a
small model trains with all its communications recorded, for its losses. Beside it: rings over peer memory
against NCCL, every rank a process on one GPU (`vanilla.py`), and profiles of all ranks
(`record_kineto.py`).

Every part's result is kept at once, in --work and in --out (level-d.json, level-d.md): a call that ran
out of time is made again, and goes on. Parts that fail are told, and tried once more by the next
call. On a machine that has nothing of --work, --from takes the level-d.json of an earlier one: finished
parts count. With fewer than two GPUs nothing is run, unless --anyway has ranks share what is
there, to test this script: times then mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.emulate_cuda import EVERYTHING, emulate  # noqa: E402
from benchmarks.gpu.level_d import (  # noqa: E402
    WARMUP,
    compare_kernels,
    compare_pieces,
    report,
    transfers,
    typical,
)
from benchmarks.gpu.level_d_jobs import (  # noqa: E402
    MULTICAST_OFF,
    SIZES,
    bounded,
    gpus_here,
    layouts_of,
    machine,
    made_up,
    model_of,
    sandbox_sizes,
)

STEPS = 6
TRIES = 2
MOST_CUTS = 4
CUT_S = 20
"""What fails when so little is left of a call may have been cut short."""
KINETO_BYTES = 15 << 20
KINETO_JOBS = ("ddp", "fsdp-mesh", "tp", "pp", "groups")
RING_ROWS = 24


class OutOfTimeError(Exception):
    """The rest is for the next call."""


class Bench:
    """Measures part after part, until `deadline` (of `time.monotonic`)."""

    def __init__(self, options: argparse.Namespace, settings: dict[str, Any], gpus: int) -> None:
        self.out, self.work = options.out, options.work
        self.deadline = time.monotonic() + options.budget
        self.settings, self.gpus = settings, gpus
        self.ranks: int = settings["ranks"]
        self.shares = gpus < self.ranks
        kept = self.work / "state.json"
        self.state: dict[str, Any] = {"settings": settings, "machine": {}, "parts": {}}
        earlier = kept if kept.is_file() else options.earlier
        if earlier is not None:
            self.state = json.loads(earlier.read_text())
            if self.state["settings"] != settings:
                refuse(f"{earlier} is of other settings: {self.state['settings']}")
        self.parts: dict[str, Any] = self.state["parts"]

    def left_s(self) -> float:
        """Until the deadline."""
        return self.deadline - time.monotonic()

    def save(self) -> None:
        """State and report, in both folders."""
        for folder in (self.work, self.out):
            folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.state, indent=1)
        (self.work / "state.json").write_text(text)
        (self.out / "level-d.json").write_text(text)
        (self.out / "level-d.md").write_text(report(self.state))

    def settled(self, name: str) -> bool:
        """Whether there is nothing more to do about a part."""
        part = self.parts.get(name)
        return part is not None and (part["state"] == "done" or part["tries"] >= TRIES)

    def measure(self, name: str, least_s: float, work: Callable[[], Any]) -> None:
        """A part that is not settled; takes at least so long.

        Raises:
            OutOfTimeError: too little time is left, or was.
        """
        if self.settled(name):
            return
        if self.left_s() < least_s:
            raise OutOfTimeError(name)
        earlier = self.parts.get(name, {})
        tries, cuts = earlier.get("tries", 0) + 1, earlier.get("cuts", 0)
        begun = time.monotonic()
        try:
            found = {"state": "done", "tries": tries, "result": work()}
        except Exception:  # noqa: BLE001  the rest goes on
            error = traceback.format_exc()[-9000:]
            found = {"state": "failed", "tries": tries, "cuts": cuts, "error": error}
            print(f"=== {name} failed\n{error}", flush=True)
            if self.left_s() < CUT_S and cuts < MOST_CUTS:
                # Perhaps for want of time only.
                found |= {"state": "cut", "tries": tries - 1, "cuts": cuts + 1}
        found["wall_s"] = round(time.monotonic() - begun, 1)
        self.parts[name] = found
        print(f"{name}: {found['state']}, {found['wall_s']} s", flush=True)
        self.save()
        if found["state"] == "cut":
            raise OutOfTimeError(name)

    # --- commands ---------------------------------------------------------------------

    def ours(self, *words: object, limit_s: float = 150, package: str = "prismreplay", **more: str):
        """The report of one of our commands."""
        command = [sys.executable, "-m", f"{package}.cli", words[0], "--json", *words[1:]]
        return json.loads(bounded(command, min(limit_s, self.left_s()), more))

    def words(self, name: str) -> list[str]:
        """The program of a layout."""
        flags = [*model_of(self.settings["size"], self.ranks), *layouts_of(self.ranks)[name]]
        return self.program([*flags, "--steps", str(self.settings["steps"])])

    def program(self, flags: Sequence[str]) -> list[str]:
        """A script that is watched."""
        here = Path(__file__).parent
        return [str(here / "timed_rank.py"), str(REPO / "examples/train_gpt.py"), *flags]

    def true_variables(self) -> dict[str, str]:
        """For ranks of a true run."""
        limit = {"FIDELITY_LIMIT": str(max(1, int(min(150, self.left_s()))))}
        return {**limit, "FIDELITY_ALONE": "1"} if self.shares and self.gpus else limit

    def true_run(self, folder: Path, words: Sequence[str], **more: str) -> dict[str, Any]:
        """All ranks truly there: what the first has noted, and its losses."""
        from prismreplay.collect.logs import RankLogs
        from prismreplay.collect.programs import ProgramCall
        from prismreplay.errors import RankFailedError
        from prismreplay.local_ranks import run_ranks

        times, results = folder / "times-true", folder / "results-true"
        for old in (times, results):
            shutil.rmtree(old, ignore_errors=True)
        program = ProgramCall(words[0], (*words[1:], "--results", str(results)))
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **self.true_variables(), **more}
        logs = RankLogs(folder / "logs-true", self.ranks, ())
        logs.prepare()
        try:
            run_ranks(program, self.ranks, {**variables, "FIDELITY_TIMES": str(times)}, logs)
        except RankFailedError as error:
            raise RuntimeError(f"{error.report}\n{error}") from error
        return noted(times, results)

    def emulated_run(self, name: str, size: int, **more: str) -> dict[str, Any]:
        """Some ranks, all others virtual."""
        folder = self.work / name
        files, times = folder / "emulation", folder / f"times-{size}"
        shutil.rmtree(times, ignore_errors=True)
        told = self.ours(
            *("run", files / "calibrated.parquet", "--sandbox", f"0-{size - 1}"),
            *("--tensors", files / "bare.tensors", "--show-rank", "none"),
            *("-o", folder / f"run-{size}.parquet"),
            *("--", *self.words(name), "--results", folder / "results"),
            FIDELITY_TIMES=str(times),
            **more,
        )
        steps = [step["emulated_ns"] for step in told["steps"]]
        kept = ("predicted_step_ns", "interference", "ranks", "groups", "wall_s", "policies")
        return {
            **noted(times, folder / "results"),
            **{key: told[key] for key in kept},
            "seen_step_ns": typical(noted(times, folder / "results")["steps_ns"]),
            "steps": told["steps"],
            "step_ns": typical(steps),
        }

    # --- parts ------------------------------------------------------------------------

    @property
    def table(self) -> Path:
        """Of what communications take."""
        return self.work / "table.parquet"

    def make_table(self) -> Any:
        """What communications take here; of ranks that share a GPU, made up."""
        if self.shares:
            samples = self.work / "made-up.csv"
            samples.write_text("\n".join(made_up(self.ranks)))
            words = ("comm-table", samples, "-o", self.table)
            return self.ours(*words, package="prismcalib")
        sizes = ("--sizes", "1K-256M", "--factor", "8", "--rounds", "3")
        backend = ("--backend", "nccl", "--nproc", self.ranks)
        return self.ours("comm-bench", *backend, *sizes, "-o", self.table)

    def chain(self, name: str) -> dict[str, Any]:
        """collect, slice, merge, and a first run."""
        more = ["--comm-table", str(self.table), "--sandbox-size", "1"]
        limit_s = max(1.0, self.left_s() - 15)
        made = emulate(
            self.work / name,
            self.words(name),
            self.ranks,
            record_below=1 << 16 if self.gpus else EVERYTHING,
            limit_s=limit_s,
            more=more,
        )
        return {"wall": made["wall"], "findings": made["findings"]}

    def record(self, name: str) -> Any:
        """A true run, recorded and merged."""
        folder = self.work / name
        told = self.ours(
            *("record", "--nproc-per-node", self.ranks, "-o", folder / "true.parquet"),
            *("--", *self.words(name)),
            **self.true_variables(),
        )
        merged = self.ours(
            *("merge", folder / "true.parquet", "-o", folder / "true-merged.parquet"),
            package="prismcalib",
        )
        return {"record": told, "merge": merged}

    def kernels(self, name: str) -> dict[str, Any]:
        """Kernels of the first rank, profiled in a true and an emulated run."""
        if not self.gpus:
            return {}
        more = {"FIDELITY_KERNELS": str(WARMUP)}
        true = self.true_run(self.work / name, self.words(name), **more)["kernels"]
        emulated = self.emulated_run(name, 1, **more)["kernels"]
        return {"compared": compare_kernels(true, emulated)}

    def losses(self, name: str) -> dict[str, Any]:
        """Of a small model, all of whose communications are recorded."""
        folder = self.work / f"{name}-losses"
        flags = [*model_of("tiny", self.ranks), *layouts_of(self.ranks)[name], "--steps", "4"]
        words = self.program(flags)
        limit_s = max(1.0, self.left_s() - 15)
        more = ["--comm-table", str(self.table)]
        below = {"record_below": EVERYTHING, "limit_s": limit_s, "more": more}
        made = emulate(folder, words, self.ranks, **below)
        true = self.true_run(folder, words)
        return {"true": true["losses"], "emulated": made["losses"], "wall": made["wall"]}

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

    def sizes(self) -> list[int]:
        """Numbers of sandbox ranks."""
        return sandbox_sizes(self.ranks, self.gpus)

    def layout(self, name: str) -> None:
        """All about one layout."""
        runs: list[tuple[str, float, Callable[[], Any]]] = []
        for number in range(1, self.settings["repeats"] + 1):
            turn = [
                (
                    f"{name}/run {number} true",
                    35.0,
                    lambda: self.true_run(self.work / name, self.words(name)),
                )
            ]
            for size in self.sizes():
                title = f"{name}/run {number} emulated {size}"
                turn.append((title, 45.0, lambda size=size: self.emulated_run(name, size)))
            runs += turn if number % 2 else turn[::-1]
        rest = [
            (f"{name}/record", 45.0, lambda: self.record(name)),
            *runs,
            (f"{name}/compare", 5.0, lambda: self.compare(name)),
            (f"{name}/kernels", 80.0, lambda: self.kernels(name)),
            (f"{name}/losses", 90.0, lambda: self.losses(name)),
        ]
        if all(self.settled(title) for title, _, _ in rest):
            return
        chain = f"{name}/chain"
        if (
            self.settled(chain)
            and not (self.work / name / "emulation/calibrated.parquet").is_file()
        ):
            # Another machine: its files are gone.
            for title in (chain, f"{name}/record", f"{name}/compare"):
                self.parts.pop(title, None)
        self.measure(chain, 60.0, lambda: self.chain(name))
        for title, least_s, work in rest:
            self.measure(title, least_s, work)

    def peers(self) -> list[dict[str, Any]]:
        """Rings over peer memory, and NCCL."""
        launch = ("-m", "torch.distributed.run", "--nproc-per-node", self.gpus)
        script = Path(__file__).parent / "ring_peers.py"
        words = (sys.executable, *launch, script, "--out", self.work)
        bounded(words, min(120, self.left_s()), {})
        rows = json.loads((self.work / "ring_peers.json").read_text())
        return [row for row in rows if row.get("K", row.get("nccl")) == self.ranks][:RING_ROWS]

    def vanilla(self) -> list[dict[str, Any]]:
        """Every rank a process on one GPU; the pruned ring with as many ranks, on one GPU."""
        one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        script, found = Path(__file__).parent / "vanilla.py", self.work / "vanilla.json"
        budget = min(130.0, self.left_s() - 10)
        words = (sys.executable, script, "--out", self.work, "--ranks", self.ranks)
        try:
            more = {"CUDA_VISIBLE_DEVICES": one}
            bounded((*words, "--budget", budget), budget + 5, more)
        except RuntimeError:
            if not found.is_file():
                raise
        return json.loads(found.read_text())

    def kineto(self, job: str) -> dict[str, Any]:
        """Profiles of all ranks, as files, and what the converter makes of them."""
        folder = self.work / "kineto"
        words = (sys.executable, Path(__file__).parent / "record_kineto.py", "--out", folder)
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

    def everything(self) -> None:
        """All parts, in order.

        Raises:
            OutOfTimeError: not all were done.
        """
        self.state["machine"] = machine()
        if self.settled("table") and not self.table.is_file():
            self.parts.pop("table")
        self.measure("table", 40.0, self.make_table)
        for name in self.settings["layouts"]:
            self.layout(name)
        if not self.gpus:
            return
        if self.gpus > 1:
            self.measure("peers", 60.0, self.peers)
        self.measure("vanilla", 60.0, self.vanilla)
        for job in KINETO_JOBS:
            self.measure(f"kineto/{job}", 60.0, lambda job=job: self.kineto(job))


def noted(times: Path, results: Path) -> dict[str, Any]:
    """What the first rank has left: steps, memory, losses."""
    found = json.loads((times / "rank-0.json").read_text())
    said = json.loads((results / "rank-0000.json").read_text())
    losses = [float.fromhex(one) for one in said["losses"]]
    return {**found, "step_ns": typical(found["steps_ns"]), "losses": losses}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="results")
    parser.add_argument("--work", type=Path, help="what is under way; by default in --out")
    parser.add_argument("--from", dest="earlier", type=Path, help="level-d.json to go on from")
    parser.add_argument("--budget", type=float, default=560, help="seconds of this call")
    parser.add_argument("--size", choices=SIZES, default="0.3", help="billions of parameters")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--repeats", type=int, default=3, help="of true and emulated runs, in turn")
    parser.add_argument("--only", help="layouts, with commas between them")
    parser.add_argument("--ranks", type=int, help="of the jobs, by default one a GPU")
    parser.add_argument("--anyway", action="store_true", help="also if ranks must share a GPU")
    return parser.parse_args()


def refuse(why: str) -> NoReturn:
    """End the program: nothing was begun."""
    print(why, file=sys.stderr)
    sys.exit(2)


def settings_of(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """What decides results; ends the program if it cannot be had."""
    ranks = options.ranks or max(2, gpus)
    if gpus < max(2, ranks) and not options.anyway:
        refuse(f"needs {max(2, ranks)} GPUs, and {gpus} are here; --anyway has ranks share them")
    layouts = layouts_of(ranks)
    wanted = options.only.split(",") if options.only else list(layouts)
    if unknown := [name for name in wanted if name not in layouts]:
        refuse(f"no layout of {ranks} ranks is called {', '.join(unknown)}: {', '.join(layouts)}")
    if options.steps < WARMUP + 3:
        refuse(f"--steps {options.steps}: at least {WARMUP + 3}, of which {WARMUP} are not counted")
    meaningless = f"{ranks} ranks shared {gpus} GPUs" if gpus < ranks else ""
    return {
        "ranks": ranks,
        "size": options.size,
        "steps": options.steps,
        "repeats": options.repeats,
        "layouts": wanted,
        "meaningless": meaningless,
    }


def main() -> None:
    """Exit code 1: parts have failed; 2: nothing was begun; 3: more is to do."""
    options = parse()
    os.environ.update(MULTICAST_OFF)
    paths = filter(None, [str(REPO), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    gpus = gpus_here()
    settings = settings_of(options, gpus)
    options.work = (options.work or options.out / "work").resolve()
    options.out = options.out.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, settings, gpus)
    more = ""
    try:
        bench.everything()
    except OutOfTimeError as error:
        more = f"no time was left for {error}: call it again with the same --work"
    bench.save()
    if (options.work / "kineto").is_dir():
        bench.pack()
    print(report(bench.state))
    if more:
        print(more)
        sys.exit(3)
    sys.exit(any(part["state"] == "failed" for part in bench.parts.values()))


if __name__ == "__main__":
    main()
