"""Step times of true runs beside emulated ones, on a machine with a core for every rank.

    python benchmarks/fidelity_cpu.py -o results            # all shapes; minutes, wants 16 cores
    python benchmarks/fidelity_cpu.py -o results --table    # the table of what is there

Every shape: collect, slice and merge; then three times a true run, every rank pinned to a core of
its own, and a run of two sandbox ranks on the same cores, while the cores of the other ranks do
the same kind of work. What is measured is the time between the ends of the optimizer's steps on
one and the same rank. What gloo's threads take of a rank's core is measured by comm-bench and taken in
slices and emulated runs, too; not with --idle-communication. A true run is also recorded, so that
phases can be compared. With --wide there are further true runs, in which every rank has a second core
that gloo's threads can use. Shapes that are in the results folder are not repeated, so an
interrupted benchmark goes on where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
TOOLS = REPO / "benchmarks" / "fidelity"
MODEL = "--layers 4 --hidden 256 --length 64"
RECORDED_STEPS, TIMED_STEPS, WARMUP = 6, 16, 3
REPEATS = 3


@dataclass(frozen=True)
class Shape:
    """A job. `layers` of the model are on each rank, `sandbox` runs for real."""

    flags: str
    ranks: int
    sandbox: tuple[int, ...] = (0, 1)
    layers: int = 4
    script: str = "train_gpt.py"
    inject: tuple[int, ...] = ()
    """Virtual ranks that are slowed down in further runs."""

    def words(self, steps: int) -> list[str]:
        """The program with its arguments."""
        script = str(REPO / "examples" / self.script)
        return [str(TOOLS / "timed.py"), script, *self.flags.split(), "--steps", str(steps)]


SHAPES = {
    "dp8": Shape(f"{MODEL} --batch-size 8", 8, inject=(5,)),
    "tp2-dp4": Shape(f"{MODEL} --batch-size 8 --tp 2", 8),
    "pp4-dp2": Shape(f"{MODEL} --batch-size 32 --pp 4 --microbatches 8", 8, (0, 2), 1),
    "fsdp8": Shape(f"{MODEL} --batch-size 8 --fsdp 8", 8),
    "tp2-pp2-dp4": Shape(f"{MODEL} --batch-size 16 --tp 2 --pp 2", 16, layers=2),
    "ep4-dp4": Shape(f"{MODEL} --batch-size 8 --ep 4", 16, script="train_moe.py"),
}
SLOWDOWNS = (1.2, 2.0)


class Bench:
    """Runs shapes, one after another."""

    def __init__(
        self,
        output: Path,
        cores: Sequence[int],
        transport: str,
        assistants: int = 0,
        *,
        contends: bool = True,
    ) -> None:
        self.output = output
        self.cores = list(cores)
        self.transport = transport
        self.assistants = assistants
        self.contends = contends
        self.work = output / "work"
        self.work.mkdir(parents=True, exist_ok=True)

    # --- what every shape needs -------------------------------------------------------

    def comm_table(self, most: int) -> Path | None:
        """Times of communications of up to `most` ranks on this machine; None: no such command."""
        table = self.work / f"comm-{most}.parquet"
        if not table.is_file():
            members = [count for count in (2, 4, 8, 16) if count <= most]
            options = [
                *("--nproc", str(members[-1]), "--group-sizes", ",".join(map(str, members))),
                *("--sizes", "1K-16M", "--factor", "8", "--rounds", "3", "-o", str(table)),
            ]
            try:
                self.command("comm-bench", "comm-bench", *options)
            except subprocess.CalledProcessError:
                return None
        return table if table.is_file() else None

    def calibrate(self, name: str, shape: Shape) -> dict[str, Any]:
        """collect, slice, merge; what each reported, and how long it took."""
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        program = ["--", *shape.words(RECORDED_STEPS)]
        bare, slices = folder / "bare.parquet", folder / "slices"
        calibrated = folder / "calibrated.parquet"
        found = {}
        found["collect"] = self.command(
            f"{name} collect",
            *("collect", "--world-size", str(shape.ranks), "--devices", str(len(self.cores))),
            *("--record-tensors", "all", "--show-rank", "none", "-o", str(bare), *program),
        )
        table = self.comm_table(min(shape.ranks, len(self.cores)))
        self.beside = ("--comm-table", str(table)) if table and self.contends else ()
        found["slice"] = self.command(
            f"{name} slice",
            *("slice", str(bare), "--sandbox-size", "2", "--devices", str(len(self.cores))),
            *("--repeat", "2", "--assistants", str(self.assistants), *self.beside),
            *("-o", str(slices), *program),
            more={"FIDELITY_CLAIMS": str(folder / "claims")},
        )
        found["merge"] = self.command(
            f"{name} merge",
            *("merge", str(slices), "--bare", str(bare), "-o", str(calibrated)),
            # The second step is unlike the others: DDP cuts its buckets anew before it.
            *("--ranks-per-host", str(shape.ranks), "--warmup", "2"),
            *(("--comm-table", str(table)) if table else ()),
            package="prismcalib",
        )
        found["predict"] = self.command(
            f"{name} predict", "predict", str(calibrated), package="prismcalib"
        )
        return found

    # --- runs -------------------------------------------------------------------------

    def true_run(self, name: str, shape: Shape, slow: str = "", each: int = 1) -> list[int]:
        """Step times of a sandbox rank in a true run with `each` cores a rank, in ns."""
        times = self.work / name / "times-true"
        pins = ",".join(
            f"{rank}:{'+'.join(map(str, self.cores[rank * each : (rank + 1) * each]))}"
            for rank in range(shape.ranks)
        )
        words = [str(TOOLS / "true_run.py"), "--ranks", str(shape.ranks), "--"]
        self.twice(
            f"{name} true",
            [*words, *shape.words(TIMED_STEPS)],
            times,
            pins,
            {"FIDELITY_SLOW": slow},
        )
        return step_times(times, shape)

    def emulated_run(self, name: str, shape: Shape, inject: str = "") -> dict[str, Any]:
        """An emulated run on the same cores: its report, and step times as the rank saw them."""
        folder = self.work / name
        times = folder / "times-emulated"
        pins = ",".join(f"{rank}:{self.cores[rank]}" for rank in shape.sandbox)
        mine = {self.cores[rank] for rank in shape.sandbox}
        others = [core for core in self.cores[: shape.ranks] if core not in mine]
        # The emulator needs a core; where there are more cores than ranks, it takes a spare one.
        spare = self.cores[shape.ranks :] or others[:1]
        words = [
            *("run", str(folder / "calibrated.parquet")),
            *("--sandbox", ",".join(map(str, shape.sandbox))),
            *("--tensors", str(folder / "bare.tensors"), "--transport", self.transport),
            *(("--assistants", str(self.assistants)) if self.assistants else ()),
            *(("--inject", inject) if inject else ()),
            *self.beside,
            *("-o", str(folder / "run.parquet"), "--", *shape.words(TIMED_STEPS)),
        ]
        with self.busy(shape, [core for core in others if core not in spare]):
            report = self.command(f"{name} run", *words, times=times, pins=pins, cores=spare)
        return {"report": report, "seen_ns": step_times(times, shape)}

    def phases(self, name: str, shape: Shape) -> dict[str, dict[str, float]]:
        """Time of a sandbox rank by kind and phase in a typical step, in ms, truly and emulated."""
        import polars as pl

        folder = self.work / name
        recorded = folder / "true.parquet"
        pins = ",".join(f"{rank}:{self.cores[rank]}" for rank in range(shape.ranks))
        words = ["record", "--nproc-per-node", str(shape.ranks), "-o", str(recorded), "--"]
        self.command(f"{name} record", *words, *shape.words(TIMED_STEPS), pins=pins)
        found: dict[str, dict[str, float]] = {}
        for title, trace in (("true", recorded), ("emulated", folder / "run.parquet")):
            times = (
                pl.scan_parquet(trace)
                .filter(rank=shape.sandbox[0])
                .filter(pl.col("step") >= WARMUP)
                .with_columns(pl.col("kind", "phase").cast(pl.String))
                .group_by("step", "kind", "phase")
                .agg(pl.col("dur_ns").sum() / 1e6)
                .group_by("kind", "phase")
                .agg(pl.col("dur_ns").median())
                .collect()
            )
            for kind, phase, ms in times.iter_rows():
                found.setdefault(f"{kind} {phase}", {})[title] = round(ms, 3)
        return found

    @contextlib.contextmanager
    def busy(self, shape: Shape, cores: Sequence[int]) -> Iterator[None]:
        """Cores that work as their ranks would."""
        if not cores:
            yield
            return
        words = [str(TOOLS / "busy.py"), "--cores", ",".join(map(str, cores)), "--"]
        sizes = ["--layers", str(shape.layers), "--hidden", "256", "--length", "64"]
        script = str(REPO / "examples" / "train_gpt.py")
        with subprocess.Popen(
            [sys.executable, *words, script, *sizes],
            env=self.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield
            finally:
                process.communicate(b"", timeout=30)

    # --- processes --------------------------------------------------------------------

    def command(
        self,
        title: str,
        *words: str,
        package: str = "prismreplay",
        times: Path | None = None,
        pins: str = "",
        cores: Sequence[int] = (),
        more: dict[str, str] | None = None,
    ) -> Any:
        """One of our commands; its report, with the time it took."""
        name, *rest = words
        call = ["-m", f"{package}.cli", name, "--json", *rest]
        begun = time.monotonic()
        printed = self.twice(title, call, times, pins, more or {}, cores)
        report = json.loads(printed)
        return {"wall_s": time.monotonic() - begun, "report": report}

    def twice(self, *words: Any) -> str:
        """`python`, and once more if that fails: a shape is more than one of its runs."""
        try:
            return self.python(*words)
        except subprocess.SubprocessError as error:
            print(f"  once more after: {error}"[:200], flush=True)
            return self.python(*words)

    def python(
        self,
        title: str,
        words: Sequence[str],
        times: Path | None,
        pins: str,
        more: dict[str, str],
        cores: Sequence[int] = (),
    ) -> str:
        """Run Python; what it prints. What it says on stderr goes to a log."""
        variables = self.environment(FIDELITY_CORES=pins, **more)
        if times is not None:
            for old in times.glob("rank-*.json"):
                old.unlink()
            variables["FIDELITY_TIMES"] = str(times)
        pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        begun = time.monotonic()
        log = self.work / "log.txt"
        with log.open("a") as errors:
            print(f"== {title}: {' '.join(words)}", file=errors, flush=True)
            done = subprocess.run(
                [*pinned, sys.executable, *words],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                check=False,
                timeout=150,
            )
        print(f"  {title}: {time.monotonic() - begun:.1f} s", flush=True)
        if done.returncode:
            tail = log.read_text(errors="replace").splitlines()[-15:]
            print("\n".join(tail), file=sys.stderr)
            done.check_returncode()
        return done.stdout

    def environment(self, **more: str) -> dict[str, str]:
        """For every process: one thread, our packages."""
        from prismreplay.local_ranks import with_paths

        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
        return with_paths(one_thread, REPO)

    # --- a shape ----------------------------------------------------------------------

    def measure(self, name: str, shape: Shape, injected: bool, wide: bool) -> dict[str, Any]:
        """Everything about a shape. What is there so far is in a file while it goes on."""
        begun = time.monotonic()
        found: dict[str, Any] = {"shape": name, "ranks": shape.ranks, "machine": machine()}
        found["words"] = shape.words(TIMED_STEPS)[1:]
        found["sandbox"] = shape.sandbox
        found["calibration"] = self.calibrate(name, shape)
        found["assistants"], found["contends"] = self.assistants, self.contends
        found["true_ns"], found["emulated"], found["true_wide_ns"] = [], [], []
        part = self.output / f"{name}.part"
        for _ in range(REPEATS):
            found["true_ns"].append(self.true_run(name, shape))
            found["emulated"].append(self.emulated_run(name, shape))
            if wide and 2 * shape.ranks <= len(self.cores):
                found["true_wide_ns"].append(self.true_run(name, shape, each=2))
            part.write_text(json.dumps(found))
        part.unlink()
        found["phases_ms"] = self.phases(name, shape)
        found["injected"] = []
        for rank in shape.inject if injected else ():
            for factor in SLOWDOWNS:
                text = f"rank={rank},kind=compute,scale={factor}"
                found["injected"].append(
                    {
                        "rank": rank,
                        "factor": factor,
                        "true_ns": self.true_run(name, shape, f"{rank}:{factor}"),
                        "emulated": self.emulated_run(name, shape, text),
                    }
                )
        found["wall_s"] = time.monotonic() - begun
        return found


def step_times(folder: Path, shape: Shape) -> list[int]:
    """Times between the ends of steps of the first sandbox rank, in ns."""
    ends = json.loads((folder / f"rank-{shape.sandbox[0]}.json").read_text())
    return [after - before for before, after in pairwise(ends)]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads_of_core_0": siblings.read_text().strip() if siblings.is_file() else "unknown",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def typical(times: Sequence[float]) -> float:
    """Median after the warm-up, in ms. The first interval begins with the end of step 0."""
    return statistics.median(times[WARMUP - 1 :]) / 1e6


def emulated_ms(run: dict[str, Any]) -> float:
    """The emulated step time, without what the emulator was late."""
    return run["report"]["report"]["step_ns"] / 1e6


def row(found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    true = [typical(times) for times in found["true_ns"]]
    emulated = [emulated_ms(run) for run in found["emulated"]]
    real, made = statistics.mean(true), statistics.mean(emulated)
    predicted = found["calibration"]["predict"]["report"]["step_ns"] / 1e6
    spread = found["calibration"]["predict"]["report"].get("spread")
    expected = spread["p50"]["step_ns"] / 1e6 if spread else predicted
    outcomes = found["calibration"]["slice"]["report"]["outcomes"]
    seen = max(statistics.median(one["step_ns"][1:]) for one in outcomes) / 1e6
    range_ = (max(true) - min(true)) / real / 2

    def apart(value: float) -> str:
        return f"{value / real - 1:+.1%}"

    return [
        found["shape"],
        f"{found['ranks']}",
        f"{real:.2f}",
        f"±{range_:.1%}",
        f"{seen:.2f} ({apart(seen)})",
        f"{predicted:.2f} ({apart(predicted)})",
        f"{expected:.2f} ({apart(expected)})",
        f"{made:.2f} ({apart(made)})",
        f"{found['wall_s']:.0f}",
    ]


def wide_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """What a second core for every rank does to true runs."""
    if found.get("true_wide_ns"):
        true, wide = (
            statistics.mean(typical(times) for times in found[name])
            for name in ("true_ns", "true_wide_ns")
        )
        yield [found["shape"], f"{true:.2f}", f"{wide:.2f} ({wide / true - 1:+.1%})"]


def phase_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """Where a sandbox rank's step goes; communication beside computation counts in both."""
    for what, times in sorted(found.get("phases_ms", {}).items()):
        cells = [f"{times[one]:.2f}" if one in times else "-" for one in ("true", "emulated")]
        yield [found["shape"], what, *cells]


def injected_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """By how much a slow virtual rank shifts the step, truly and emulated."""
    true = statistics.mean(typical(times) for times in found["true_ns"])
    made = statistics.mean(emulated_ms(run) for run in found["emulated"])
    for one in found["injected"]:
        after, emulated = typical(one["true_ns"]), emulated_ms(one["emulated"])
        yield [
            found["shape"],
            f"rank {one['rank']} x {one['factor']}",
            f"{after / true - 1:+.1%}",
            f"{emulated / made - 1:+.1%}",
        ]


def tables(output: Path) -> str:
    """What is in the results folder, as Markdown."""
    all_found = [json.loads(path.read_text()) for path in sorted(output.glob("*.json"))]
    heads = (
        "job", "ranks", "true step ms", "true runs apart", "slices alone ms", "predicted ms",
        "resampled ms", "emulated ms", "all took s",
    )  # fmt: skip
    lines = markdown(heads, [row(found) for found in all_found])
    wide = [cells for found in all_found for cells in wide_rows(found)]
    if wide:
        lines += ["", *markdown(("job", "true step ms", "with two cores a rank"), wide)]
    phases = [cells for found in all_found for cells in phase_rows(found)]
    if phases:
        lines += ["", *markdown(("job", "kind and phase", "true ms", "emulated ms"), phases)]
    shifts = [cells for found in all_found for cells in injected_rows(found)]
    if shifts:
        lines += ["", *markdown(("job", "slowed down", "true step", "emulated step"), shifts)]
    return "\n".join(lines)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [
        f"| {' | '.join(heads)} |",
        "|" + "---|" * len(heads),
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("fidelity-results"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--transport", default="auto", help="of `prismreplay run`")
    parser.add_argument("--assistants", type=int, default=0, help="of slices and runs")
    parser.add_argument(
        "--idle-communication", action="store_true", help="takes nothing of the ranks' cores"
    )
    parser.add_argument("--wide", nargs="*", choices=SHAPES, default=[], help="also two cores each")
    parser.add_argument("--budget", type=float, default=520, help="begin no shape that ends later")
    parser.add_argument("--no-inject", action="store_true", help="leave slowed-down ranks out")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--anyway", action="store_true", help="also with fewer cores than ranks")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.table:
        print(tables(options.output))
        return
    cores = sorted(os.sched_getaffinity(0))
    needed = max(SHAPES[name].ranks for name in options.shapes)
    if len(cores) < needed:
        print(f"{len(cores)} cores for {needed} ranks: step times would say nothing")
        if not options.anyway:
            return
        cores = [cores[rank % len(cores)] for rank in range(needed)]
    transport = "reduced" if options.assistants else options.transport
    contends = not options.idle_communication
    bench = Bench(options.output, cores, transport, options.assistants, contends=contends)
    begun, longest = time.monotonic(), 0.0
    for name in options.shapes:
        result = options.output / f"{name}.json"
        if result.is_file():
            continue
        if time.monotonic() - begun + longest > options.budget:
            print(f"no time left for {name}: call again with the same results folder")
            break
        print(f"{name}:", flush=True)
        try:
            found = bench.measure(name, SHAPES[name], not options.no_inject, name in options.wide)
        except (subprocess.SubprocessError, OSError, json.JSONDecodeError) as error:
            print(f"  failed: {error}", file=sys.stderr)
            continue
        result.write_text(json.dumps(found, indent=1))
        longest = max(longest, found["wall_s"])
    print(tables(options.output))


if __name__ == "__main__":
    main()
