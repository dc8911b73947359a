"""Step times of true runs beside emulated ones, on a machine with a core for every rank.

    python benchmarks/fidelity_cpu.py -o results            # all shapes; minutes, wants 16 cores
    python benchmarks/fidelity_cpu.py -o results --table    # the table of what is there

Every shape: collect, slice and merge; then, in turn, true runs with every rank pinned to a core of
its own, and runs of two sandbox ranks on the same cores, while the cores of the other ranks do
the same kind of work. What is measured is the time between the ends of the optimizer's steps. What
gloo's threads take of a rank's core is measured by comm-bench, pinned like the ranks, and taken in
slices and emulated runs, too; not with --idle-communication. A true run is also recorded, so that
phases can be compared. With --wide there are further true runs, in which every rank has a second core
that gloo's threads can use.

All runs have as many steps: one of a run that is longer than its recording repeats the last
step's data and virtual times, so that a single step would decide. Slices are made once: the median
of several executions has less noise than a step of the true run, and the slowest rank of a step,
which decides, would come too early.

Commands and true runs are forks of one process that has imported everything (`fidelity/warm.py`).
Results are written piece by piece; called again with the same folder, the benchmark goes on where
it stopped. Of a folder that is carried to another machine only finished shapes count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
TOOLS = REPO / "benchmarks" / "fidelity"
sys.path[:0] = [str(REPO), str(TOOLS)]
MODEL = "--layers 4 --hidden 256 --length 64"
STEPS, WARMUP, REPEATS = 10, 3, 3
MOST_SECONDS = 150.0
"""That a command may take."""


@dataclass(frozen=True)
class Shape:
    """A job. `layers` of the model are on each rank, `sandbox` runs for real."""

    flags: str
    ranks: int
    sandbox: tuple[int, ...] = (0, 1)
    layers: int = 4
    batch: int = 8
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
    "pp4-dp2": Shape(
        f"{MODEL} --batch-size 32 --pp 4 --microbatches 8", 8, (0, 2), 1, 32, inject=(5,)
    ),
    "fsdp8": Shape(f"{MODEL} --batch-size 8 --fsdp 8", 8),
    "tp2-pp2-dp4": Shape(f"{MODEL} --batch-size 16 --tp 2 --pp 2", 16, layers=2, batch=16),
    "ep4-dp4": Shape(f"{MODEL} --batch-size 8 --ep 4", 16, script="train_moe.py"),
}
SLOWDOWNS = (1.2, 2.0)


class FailedError(Exception):
    """A command failed, twice."""


class OutOfTimeError(Exception):
    """The rest is for the next call."""


@dataclass(frozen=True)
class Settings:
    """How to measure; see the options."""

    transport: str = "auto"
    assistants: int = 0
    contends: bool = True
    steps: int = STEPS
    repeats: int = REPEATS
    inject: bool = True
    wide: frozenset[str] = frozenset()
    most_ranks: int = 16


class Bench:
    """Measures shapes, one after another, until `deadline` (of `time.monotonic`)."""

    def __init__(
        self, output: Path, work: Path, cores: Sequence[int], settings: Settings, deadline: float
    ) -> None:
        self.output = output
        self.cores = list(cores)
        self.settings = settings
        self.deadline = deadline
        self.work = work
        self.work.mkdir(parents=True, exist_ok=True)
        self.beside: tuple[str, ...] = ()
        self.spent: dict[str, list[float]] = {}
        """Of the ranks of the latest true run."""

    # --- what every shape needs -------------------------------------------------------

    def comm_table(self) -> Path:
        """Times of communications of so many ranks as jobs have, on this machine."""
        members = [count for count in (2, 4, 8, 16) if count <= self.settings.most_ranks]
        table = self.work / f"comm-{members[-1]}.parquet"
        if not table.is_file():
            self.command(
                "comm-bench",
                *("comm-bench", "--nproc", str(members[-1])),
                *("--group-sizes", ",".join(map(str, members))),
                *("--sizes", "1K-16M", "--factor", "8", "--rounds", "3", "-o", str(table)),
                more={"FIDELITY_CORES": self.pins(range(members[-1]))},
            )
        return table

    def calibrate(self, name: str, shape: Shape) -> dict[str, Any]:
        """collect, slice, merge; what each reported, and how long it took."""
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        program = ["--", *shape.words(self.settings.steps)]
        bare, slices = folder / "bare.parquet", folder / "slices"
        calibrated = folder / "calibrated.parquet"
        table = self.comm_table()
        found = {}
        found["collect"] = self.command(
            f"{name} collect",
            *("collect", "--world-size", str(shape.ranks), "--devices", str(len(self.cores))),
            *("--record-tensors", "all", "--show-rank", "none", "-o", str(bare), *program),
        )
        self.beside = ("--comm-table", str(table)) if self.settings.contends else ()
        found["slice"] = self.command(
            f"{name} slice",
            *("slice", str(bare), "--sandbox-size", "2", "--devices", str(len(self.cores))),
            *("--assistants", str(self.settings.assistants), *self.beside),
            *("-o", str(slices), *program),
            times=folder / "times-slices",
            more={"FIDELITY_CLAIMS": str(folder / "claims")},
        )
        found["spent"] = spent(folder / "times-slices")
        found["merge"] = self.command(
            f"{name} merge",
            *("merge", str(slices), "--bare", str(bare), "-o", str(calibrated)),
            # The second step is unlike the others: DDP cuts its buckets anew before it.
            *("--ranks-per-host", str(shape.ranks), "--warmup", "2"),
            *("--comm-table", str(table)),
            package="prismcalib",
        )
        found["predict"] = self.command(
            f"{name} predict", "predict", str(calibrated), package="prismcalib"
        )
        return found

    # --- runs -------------------------------------------------------------------------

    def pins(self, ranks: Sequence[int], each: int = 1) -> str:
        """Ranks with their cores."""
        return ",".join(
            f"{rank}:{'+'.join(map(str, self.cores[rank * each : (rank + 1) * each]))}"
            for rank in ranks
        )

    def true_run(self, name: str, shape: Shape, slow: str = "", each: int = 1) -> list[int]:
        """Step times of a sandbox rank in a true run with `each` cores a rank, in ns."""
        import warm

        times = self.work / name / "times-true"
        words = shape.words(self.settings.steps)
        variables = {"FIDELITY_CORES": self.pins(range(shape.ranks), each), "FIDELITY_SLOW": slow}
        self.twice(
            f"{name} true {slow}", lambda: warm.run_job(words, shape.ranks), variables, times=times
        )
        self.spent = spent(times)
        return step_times(times, shape)

    def true_run_into(self, found: dict[str, Any], name: str, shape: Shape) -> None:
        """A true run, and what it took."""
        found["true_ns"].append(self.true_run(name, shape))
        found["true_spent"].append(self.spent)

    def emulated_run(self, name: str, shape: Shape, inject: str = "") -> dict[str, Any]:
        """An emulated run on the same cores: its report, and step times as the rank saw them."""
        folder = self.work / name
        times = folder / "times-emulated"
        mine = {self.cores[rank] for rank in shape.sandbox}
        others = [core for core in self.cores[: shape.ranks] if core not in mine]
        # The emulator needs a core; where there are more cores than ranks, it takes a spare one.
        spare = self.cores[shape.ranks :] or others[:1]
        words = [
            *("run", str(folder / "calibrated.parquet")),
            *("--sandbox", ",".join(map(str, shape.sandbox))),
            *("--tensors", str(folder / "bare.tensors"), "--transport", self.settings.transport),
            *(("--assistants", str(self.settings.assistants)) if self.settings.assistants else ()),
            *(("--inject", inject) if inject else ()),
            *self.beside,
            *("-o", str(folder / "run.parquet"), "--", *shape.words(self.settings.steps)),
        ]
        more = {"FIDELITY_CORES": self.pins(shape.sandbox)}
        with self.busy(shape, [core for core in others if core not in spare]):
            report = self.command(f"{name} run", *words, times=times, more=more, cores=spare)
        return {"report": report, "seen_ns": step_times(times, shape), "spent": spent(times)}

    def phases(self, name: str, shape: Shape) -> dict[str, dict[str, dict[str, float]]]:
        """Where a typical step goes: see `print_phases`."""
        folder = self.work / name
        words = ["record", "--nproc-per-node", str(shape.ranks), "-o", str(folder / "true.parquet")]
        more = {"FIDELITY_CORES": self.pins(range(shape.ranks))}
        self.command(f"{name} record", *words, "--", *shape.words(self.settings.steps), more=more)
        printed = self.twice(f"{name} phases", lambda: print_phases(folder, shape.sandbox[0]), {})
        found: dict[str, dict[str, dict[str, float]]] = json.loads(printed)
        return found

    @contextlib.contextmanager
    def busy(self, shape: Shape, cores: Sequence[int]) -> Iterator[None]:
        """Cores that work as their ranks would."""
        import busy
        import warm

        if not cores:
            yield
            return
        begun = self.work / "busy"
        begun.write_bytes(b"")
        sizes = ["--layers", str(shape.layers), "--hidden", "256", "--length", "64"]
        words = ["train_gpt.py", *sizes, "--batch-size", str(shape.batch)]
        words[0] = str(REPO / "examples" / words[0])
        fork = warm.start(
            "busy",
            lambda: busy.keep_busy(cores, words),
            output=begun,
            errors=self.work / "log.txt",
        )
        try:
            # Told once they have drawn their models.
            limit = time.monotonic() + 20.0
            while begun.stat().st_size < len(cores) and time.monotonic() < limit:
                time.sleep(0.02)
            yield
        finally:
            fork.kill()

    # --- processes --------------------------------------------------------------------

    def command(
        self,
        title: str,
        *words: str,
        package: str = "prismreplay",
        times: Path | None = None,
        more: dict[str, str] | None = None,
        cores: Sequence[int] = (),
    ) -> Any:
        """One of our commands; its report, with the time it took."""
        import warm

        name, *rest = words
        begun = time.monotonic()
        printed = self.twice(
            title, warm.command(package, [name, "--json", *rest]), more or {}, times, cores
        )
        return {"wall_s": time.monotonic() - begun, "report": trimmed(json.loads(printed))}

    def twice(self, *arguments: Any, **more: Any) -> str:
        """`once`, and again if that fails: a shape is more than one of its runs."""
        try:
            return self.once(*arguments, **more)
        except FailedError as error:
            print(f"  once more after: {error}"[:200], flush=True)
            return self.once(*arguments, **more)

    def once(
        self,
        title: str,
        run: Callable[[], object],
        variables: dict[str, str],
        times: Path | None = None,
        cores: Sequence[int] = (),
    ) -> str:
        """Do it in a fork; what it prints. What it says on stderr goes to a log."""
        import warm

        if times is not None:
            for old in times.glob("*.json"):
                old.unlink()
            variables = {**variables, "FIDELITY_TIMES": str(times)}
        printed, log = self.work / "printed.txt", self.work / "log.txt"
        with log.open("a") as errors:
            print(f"== {title}", file=errors)
        fork = warm.start(
            title, run, output=printed, errors=log, environment=variables, cores=cores
        )
        try:
            code = fork.wait(MOST_SECONDS)
        except BaseException:
            fork.kill()
            raise
        if code is None:
            fork.kill()
        seconds = time.monotonic() - fork.started
        print(f"  {title}: {seconds:.1f} s", flush=True)
        if code != 0:
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), file=sys.stderr)
            raise FailedError(f"{title}: " + ("too long" if code is None else f"exit code {code}"))
        return printed.read_text()

    # --- a shape ----------------------------------------------------------------------

    def measure(self, name: str, shape: Shape) -> dict[str, Any]:
        """Everything about a shape that is not there yet.

        Raises:
            OutOfTimeError: what there is so far is in a file.
        """
        part = self.output / f"{name}.part"
        found: dict[str, Any] = {"true_ns": [], "emulated": [], "true_wide_ns": [], "injected": []}
        found["true_spent"] = []
        if part.is_file() and (self.work / name / "calibrated.parquet").is_file():
            found = json.loads(part.read_text())
            table = self.comm_table()
            self.beside = ("--comm-table", str(table)) if self.settings.contends else ()
        for piece in self.pieces(name, shape, found):
            begun = time.monotonic()
            if begun > self.deadline:
                raise OutOfTimeError
            piece()
            found["wall_s"] = found.get("wall_s", 0.0) + time.monotonic() - begun
            part.write_text(json.dumps(found))
        part.unlink()
        shutil.rmtree(self.work / name)
        return found

    def pieces(
        self, name: str, shape: Shape, found: dict[str, Any]
    ) -> Iterator[Callable[[], object]]:
        """What is left to be done, one after another; each notes what it finds."""

        def note(key: str, value: Any) -> None:
            found[key] = value

        if "calibration" not in found:
            found |= {"shape": name, "ranks": shape.ranks, "machine": machine()}
            found |= {"words": shape.words(self.settings.steps)[1:], "sandbox": shape.sandbox}
            found |= {"assistants": self.settings.assistants, "contends": self.settings.contends}
            yield lambda: note("calibration", self.calibrate(name, shape))
        for number in range(self.settings.repeats):
            if len(found["true_ns"]) <= number:
                yield lambda: self.true_run_into(found, name, shape)
            if len(found["emulated"]) <= number:
                yield lambda: found["emulated"].append(self.emulated_run(name, shape))
            wide = name in self.settings.wide and 2 * shape.ranks <= len(self.cores)
            if wide and len(found["true_wide_ns"]) <= number:
                yield lambda: found["true_wide_ns"].append(self.true_run(name, shape, each=2))
        if "phases_ms" not in found:
            yield lambda: found.update(self.phases(name, shape))
        wanted = [(rank, factor) for rank in shape.inject for factor in SLOWDOWNS]
        for rank, factor in wanted[len(found["injected"]) :] if self.settings.inject else ():
            yield lambda rank=rank, factor=factor: found["injected"].append(
                self.injected(name, shape, rank, factor)
            )

    def injected(self, name: str, shape: Shape, rank: int, factor: float) -> dict[str, Any]:
        """A true run and an emulated one with a slow rank."""
        return {
            "rank": rank,
            "factor": factor,
            "true_ns": self.true_run(name, shape, f"{rank}:{factor}"),
            "emulated": self.emulated_run(name, shape, f"rank={rank},kind=compute,scale={factor}"),
        }


def trimmed(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what nobody looks up here: results travel."""
    left_out = ("operations", "memory", "log_dir", "rows", "commands")
    return {key: value for key, value in report.items() if key not in left_out}


def step_times(folder: Path, shape: Shape) -> list[int]:
    """Times between the ends of steps of the first sandbox rank, in ns."""
    ends = json.loads((folder / f"rank-{shape.sandbox[0]}.json").read_text())
    return [after - before for before, after in pairwise(ends)]


def spent(folder: Path) -> dict[str, list[float]]:
    """What a typical step took of every rank that left a note, as in `timed.SPENT`."""
    found = {}
    for path in sorted(folder.glob("spent-*.json")):
        steps = json.loads(path.read_text())[WARMUP - 1 :]
        rank = path.stem.removeprefix("spent-")
        found[rank] = [round(statistics.median(each), 2) for each in zip(*steps, strict=True)]
    return found


def print_phases(folder: Path, rank: int) -> None:
    """Print where a typical step goes, as JSON; in a process that may use polars.

    `phases_ms`: time of a rank by kind and phase, truly and emulated. `transfers_ms`: of the
    communications of all ranks by kind and size, from the last member's beginning to the last
    one's end, truly and as merged. `table`: kind, ranks, bytes, and of each the time and processor
    time in us by `comm-bench`.
    """
    import polars as pl

    measured = pl.read_parquet(max(folder.parent.glob("comm-*.parquet"), key=os.path.getmtime))
    table = measured.select(
        "kind", "ranks", "bytes", (pl.col("time_ns", "cpu_ns") / 1e3).round().cast(pl.Int64)
    )

    transfers: dict[str, dict[str, float]] = {}
    for title, trace in (("true", "true.parquet"), ("merged", "calibrated.parquet")):
        end = pl.col("start_ns") + pl.col("dur_ns")
        times = (
            pl.scan_parquet(folder / trace)
            .filter(pl.col("group").is_not_null(), pl.col("step") >= WARMUP)
            .with_columns(pl.col("kind").cast(pl.String))
            .filter(~pl.col("kind").is_in(("send", "recv")))
            .group_by("kind", "bytes", "group", "seq")
            .agg(((end.max() - pl.col("start_ns").max()) / 1e6).alias("ms"))
            .group_by("kind", "bytes")
            .agg(pl.col("ms").median(), pl.len().alias("count"))
            .collect()
        )
        for kind, nbytes, ms, count in times.iter_rows():
            transfers.setdefault(f"{kind} {nbytes}", {"count": count})[title] = round(ms, 3)
    found: dict[str, dict[str, float]] = {}
    for title, trace in (("true", "true.parquet"), ("emulated", "run.parquet")):
        times = (
            pl.scan_parquet(folder / trace)
            .filter(pl.col("rank") == rank, pl.col("step") >= WARMUP)
            .with_columns(pl.col("kind", "phase").cast(pl.String))
            .group_by("step", "kind", "phase")
            .agg(pl.col("dur_ns").sum() / 1e6)
            .group_by("kind", "phase")
            .agg(pl.col("dur_ns").median())
            .collect()
        )
        for kind, phase, ms in times.iter_rows():
            found.setdefault(f"{kind} {phase}", {})[title] = round(ms, 3)
    print(json.dumps({"phases_ms": found, "transfers_ms": transfers, "table": table.rows()}))


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


# --- tables --------------------------------------------------------------------------------


def typical(times: Sequence[float]) -> float:
    """Median after the warm-up, in ms. The first interval begins with the end of step 0."""
    return statistics.median(times[WARMUP - 1 :]) / 1e6


def emulated_ms(run: dict[str, Any]) -> float:
    """The emulated step time, of the same steps, without what the emulator was late."""
    steps = run["report"]["report"]["steps"]
    return statistics.median(one["emulated_ns"] for one in steps[WARMUP:]) / 1e6


def late_share(run: dict[str, Any]) -> float:
    """What the emulator was late, as a share of a typical step."""
    steps = run["report"]["report"]["steps"][WARMUP:]
    return statistics.median(one["late_ns"] / one["emulated_ns"] for one in steps)


@dataclass(frozen=True)
class Errors:
    """A shape's step times in ms."""

    real: float
    apart: float
    seen: float
    predicted: float
    resampled: float
    emulated: float

    @classmethod
    def of(cls, found: dict[str, Any]) -> Errors:
        """Those of a shape's results."""
        true = [typical(times) for times in found["true_ns"]]
        real = statistics.mean(true)
        predict = found["calibration"]["predict"]["report"]
        spread = predict.get("spread")
        outcomes = found["calibration"]["slice"]["report"]["outcomes"]
        return cls(
            real=real,
            apart=(max(true) - min(true)) / real / 2,
            seen=max(statistics.median(one["step_ns"][WARMUP:]) for one in outcomes) / 1e6,
            predicted=predict["step_ns"] / 1e6,
            resampled=(spread["p50"]["step_ns"] if spread else predict["step_ns"]) / 1e6,
            emulated=statistics.mean(emulated_ms(run) for run in found["emulated"]),
        )

    def error(self, value: float) -> float:
        """Of a step time, as a share of the true one."""
        return value / self.real - 1


def row(found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    one = Errors.of(found)
    late = [late_share(run) for run in found["emulated"]]
    values = (one.seen, one.predicted, one.resampled, one.emulated)
    return [
        found["shape"],
        f"{found['ranks']}",
        f"{one.real:.2f}",
        f"±{one.apart:.1%}",
        *(f"{value:.2f} ({one.error(value):+.1%})" for value in values),
        f"{min(late):.1%} to {max(late):.1%}",
        f"{found['wall_s']:.0f}",
    ]


def means(all_found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Average and worst errors over all shapes."""
    errors = [Errors.of(found) for found in all_found]
    for what in ("seen", "predicted", "resampled", "emulated"):
        sizes = [abs(one.error(getattr(one, what))) for one in errors]
        if sizes:
            yield f"{what}: {statistics.mean(sizes):.1%} on average, {max(sizes):.1%} at worst"


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


def transfer_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """How long communications are under way once all members are there."""
    for what, times in sorted(found.get("transfers_ms", {}).items()):
        cells = [f"{times[one]:.2f}" if one in times else "-" for one in ("true", "merged")]
        yield [found["shape"], what, f"{times['count']:.0f}", *cells]


def spent_rows(found: dict[str, Any]) -> Iterator[list[str]]:
    """What a typical step takes of a rank: least and most of the ranks of all runs."""
    sources = {
        "true": found.get("true_spent", []),
        "slices": [found["calibration"].get("spent", {})],
        "emulated": [one.get("spent", {}) for one in found["emulated"]],
    }
    for title, runs in sources.items():
        ranks = [values for one in runs for values in one.values()]
        if ranks:
            cells = (
                f"{min(values):.1f} to {max(values):.1f}" for values in zip(*ranks, strict=True)
            )
            yield [found["shape"], title, *cells]


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
        "resampled ms", "emulated ms", "emulator late", "all took s",
    )  # fmt: skip
    lines = markdown(heads, [row(found) for found in all_found])
    lines += ["", *means(all_found)]
    wide = [cells for found in all_found for cells in wide_rows(found)]
    if wide:
        lines += ["", *markdown(("job", "true step ms", "with two cores a rank"), wide)]
    phases = [cells for found in all_found for cells in phase_rows(found)]
    if phases:
        lines += ["", *markdown(("job", "kind and phase", "true ms", "emulated ms"), phases)]
    transfers = [cells for found in all_found for cells in transfer_rows(found)]
    if transfers:
        heads = ("job", "transfer, bytes", "operations", "true ms", "merged ms")
        lines += ["", *markdown(heads, transfers)]
    taken = [cells for found in all_found for cells in spent_rows(found)]
    if taken:
        heads = (
            "job", "a step of a rank", "program ms", "other threads ms", "kept waiting ms",
            "page faults", "switches",
        )  # fmt: skip
        lines += ["", *markdown(heads, taken)]
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


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("fidelity-results"))
    parser.add_argument("--work", type=Path, help="recordings and logs; default: in the former")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--transport", default="auto", help="of `prismreplay run`")
    parser.add_argument("--assistants", type=int, default=0, help="of slices and runs")
    parser.add_argument("--steps", type=int, default=STEPS, help="of every run")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of true and emulated runs")
    parser.add_argument(
        "--idle-communication", action="store_true", help="takes nothing of the ranks' cores"
    )
    parser.add_argument("--wide", nargs="*", choices=SHAPES, default=[], help="also two cores each")
    parser.add_argument("--budget", type=float, default=540, help="begin nothing after so long")
    parser.add_argument("--no-inject", action="store_true", help="leave slowed-down ranks out")
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--anyway", action="store_true", help="also with fewer cores than ranks")
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, and print the table."""
    begun = time.monotonic()
    options = parse_arguments()
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
    settings = Settings(
        transport="reduced" if options.assistants else options.transport,
        assistants=options.assistants,
        contends=not options.idle_communication,
        steps=options.steps,
        repeats=options.repeats,
        inject=not options.no_inject,
        wide=frozenset(options.wide),
        most_ranks=needed,
    )
    missing = [name for name in options.shapes if not (options.output / f"{name}.json").is_file()]
    if missing:
        import warm

        warm.prepare()
        print(f"imported everything: {time.monotonic() - begun:.1f} s", flush=True)
    work = options.work or options.output / "work"
    bench = Bench(options.output, work, cores, settings, begun + options.budget)
    for name in missing:
        print(f"{name}:", flush=True)
        try:
            found = bench.measure(name, SHAPES[name])
        except OutOfTimeError:
            print("no time is left: call again with the same results folder")
            break
        except (FailedError, OSError, ValueError) as error:
            print(f"  failed: {error}", file=sys.stderr)
            continue
        (options.output / f"{name}.json").write_text(json.dumps(found))
    print(tables(options.output))


if __name__ == "__main__":
    main()
