"""Step times of true runs beside emulated ones, on a machine with a core for every rank.

    python benchmarks/fidelity_cpu.py -o results            # all shapes; minutes, wants 16 cores
    python benchmarks/fidelity_cpu.py -o results --table    # the table of what is there

First, which cores are threads of one physical core is looked up or measured. Every rank is pinned to
a physical core of its own; where there are twice as many, or cores have two threads, all threads but
the program's are on another one (`fidelity/cores.py` says why), so that communication and
computation do not get in each other's way, as on a GPU. Else, and with --one-core, they share the
rank's: then communications beside which it computes are measured so (`MEASURED`), and slices and
emulated runs take of the core what gloo's threads take.

Every shape: collect; then, in turn, true runs, slices with a merge, and runs of two sandbox ranks on the
same cores: T S E T S E T. Meanwhile the cores of the other ranks do the same kind of work, for as large a
part of the time as the ranks of the true run before did. What is measured is the time between the
ends of the optimizer's steps. A true run is also recorded, so that phases can be compared, and so
that merged graphs can be given its computation, then its transfers: what is left of the error is not
theirs. Runs with a slowed-down virtual rank come when all shapes are done, each beside runs without,
then further repeats while there is time (--more).

All runs have as many steps: one of a run that is longer than its recording repeats the last
step's data and virtual times, so that a single step would decide. Each graph is merged from slices
that were made once: the median of several executions has less noise than a step of the true run,
and the slowest rank of a step, which decides, would come too early.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cores import Cores

REPO = Path(__file__).resolve().parent.parent
TOOLS = REPO / "benchmarks" / "fidelity"
sys.path[:0] = [str(REPO), str(TOOLS)]
from tables import WARMUP, tables, typical  # noqa: E402  its folder is known only now

MODEL = "--layers 4 --hidden 256 --length 64"
STEPS, REPEATS, SLOW_REPEATS = 10, 2, 3
MOST_SECONDS, GRACE_SECONDS = 100.0, 25.0
"""That a command may take, and beyond the time that there is."""
MOST_APART = 16
"""Ranks that run at a time in slices."""


@dataclass(frozen=True)
class Shape:
    """A job. `sandbox` runs for real. A rank has as many parameters as `layers` layers."""

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
    "pp4-dp2": Shape(
        f"{MODEL} --batch-size 32 --pp 4 --microbatches 8", 8, (0, 2), 1, 32, inject=(5,)
    ),
    "tp2-dp4": Shape(f"{MODEL} --batch-size 8 --tp 2", 8, layers=2),
    "tp2-pp2-dp4": Shape(f"{MODEL} --batch-size 16 --tp 2 --pp 2", 16, layers=1, batch=16),
    "ep4-dp4": Shape(f"{MODEL} --batch-size 8 --ep 4", 16, script="train_moe.py"),
    "fsdp8": Shape(f"{MODEL} --batch-size 8 --fsdp 8", 8),
}
SLOWDOWNS = (1.0, 1.2, 2.0)
"""Of a slow rank; the first are runs without one, in the same minute, to compare with."""
SIZES = "1K,64K,512K,1M,4M"
MEASURED = {
    True: (("all_reduce,all_gather,reduce_scatter,all_to_all,send", "2,4,8,16", SIZES),),
    False: (
        ("all_gather,all_to_all,send", "2,4", SIZES),
        ("all_reduce", "2", SIZES),
        ("all_reduce", "4", SIZES, "--beside-computation"),
        ("all_reduce", "16", "1K"),
        ("all_reduce", "16", SIZES.removeprefix("1K,"), "--beside-computation"),
    ),
}
"""What is measured, where gloo's threads have cores of their own, and where they do not: then it matters
whether the program computes meanwhile. It does beside gradients; it waits for tokens of experts, for a
tensor group, and for the loss of all ranks."""


class FailedError(Exception):
    """A command failed, twice."""


class OutOfTimeError(Exception):
    """The rest is for the next call."""


@dataclass(frozen=True)
class Settings:
    """How to measure; see the options."""

    one_core: bool = False
    steps: int = STEPS
    repeats: int = REPEATS
    inject: bool = True
    most_more: int = 0
    most_ranks: int = 16


class Bench:
    """Measures shapes, one after another, until `deadline` (of `time.monotonic`)."""

    def __init__(
        self, output: Path, work: Path, found: Cores, settings: Settings, deadline: float
    ) -> None:
        self.output = output
        self.cores = found
        self.settings = settings
        self.deadline = deadline
        self.work = work
        self.work.mkdir(parents=True, exist_ok=True)
        self.spent: dict[str, list[float]] = {}
        """Of the ranks of the latest true run."""
        self.policy = ""
        """How threads of the shape at hand are scheduled; see `cores.part_threads`."""

    # --- cores ------------------------------------------------------------------------

    def cores_of(self, ranks: int) -> list[tuple[int, ...]]:
        """Of each rank of a true run: the program's, and perhaps one of gloo's threads."""
        return self.cores.of_ranks(ranks, one_each=self.settings.one_core)

    def is_apart(self, ranks: int) -> bool:
        """Whether gloo's threads have cores of their own."""
        return len(self.cores_of(ranks)[0]) > 1

    def placed(
        self, every: Sequence[tuple[int, ...]], ranks: Sequence[int] | None = None
    ) -> dict[str, str]:
        """Variables for ranks that have these cores: which those are, and how threads share them."""
        chosen = range(len(every)) if ranks is None else ranks
        pins = ",".join(f"{rank}:{'+'.join(map(str, every[rank]))}" for rank in chosen)
        return {"FIDELITY_CORES": pins, "FIDELITY_POLICY": self.policy}

    def of_slices(self, shape: Shape) -> tuple[list[int], dict[str, str]]:
        """Cores that slices share out among them, and where their ranks and threads go.

        A slice has one of the former for its emulator. Its ranks are on the cores that they have in a
        true run, if enough are left for that; else each takes one that the slice got.
        """
        used = {core for one in self.cores_of(shape.ranks) for core in one}
        free = [core for core in self.cores.firsts if core not in used]
        each = len(shape.sandbox) + 1
        if not self.cores.seconds and len(free) // each * len(shape.sandbox) >= shape.ranks:
            return sorted(free), self.placed(self.cores_of(shape.ranks))
        claims = self.placed(self.cores_of(shape.ranks), ())
        claims["FIDELITY_CLAIMS"] = str(self.work / "claims")
        paired = self.cores.paired(MOST_APART) if self.is_apart(shape.ranks) else []
        if len(paired) < each:
            return sorted(set(self.cores.firsts)), claims
        claims["FIDELITY_BESIDE"] = ",".join(f"{core}:{other}" for core, other in paired)
        return sorted({core for core, _ in paired}), claims

    def beside_slices(self, shape: Shape, cores: Sequence[int]) -> list[int]:
        """Cores that would be idle while slices have `cores`, as many as have ranks in a true run.

        A slice has a core for each of its ranks, then one for its emulator. Instead of the latter, the
        one that gloo's threads would have beside it is busy.
        """
        each = len(shape.sandbox) + 1
        rooms = min(len(cores) // each, -(-shape.ranks // len(shape.sandbox)))
        if not rooms:
            return []  # they share what there is
        beside = dict(self.cores.paired(MOST_APART)) if self.is_apart(shape.ranks) else {}
        emulators = [cores[room * each + each - 1] for room in range(rooms)]
        idle = [*cores[rooms * each :], *(beside[one] for one in emulators if one in beside)]
        return idle[: max(0, shape.ranks - rooms * len(shape.sandbox))]

    def of_emulator(self, shape: Shape) -> list[int]:
        """Cores that sandbox ranks and those that stand for other ranks leave; physical ones first."""
        every = self.cores_of(shape.ranks)
        programs = {one[0] for one in every}
        taken = programs | {core for rank in shape.sandbox for core in every[rank]}
        free = [core for core in (*self.cores.firsts, *self.cores.seconds) if core not in taken]
        threads = zip(self.cores.firsts, self.cores.seconds, strict=False)
        shared = {second for first, second in threads if first in programs}
        alone = [core for core in free if core not in shared]
        # It needs one; where there is none, a virtual rank's.
        return alone or free or [every[rank][0] for rank in self.virtual(shape)][:1]

    @staticmethod
    def virtual(shape: Shape) -> list[int]:
        """Ranks that are not run for real."""
        return [rank for rank in range(shape.ranks) if rank not in shape.sandbox]

    # --- what every shape needs -------------------------------------------------------

    def note_machine(self) -> None:
        """What the results are from."""
        (self.output / "machine").mkdir(exist_ok=True)
        told = json.dumps({**machine(), **self.cores.found})
        (self.output / "machine" / "machine.json").write_text(told)

    def choose_policy(self, found: dict[str, Any], name: str, shape: Shape) -> None:
        """How gloo's threads are scheduled in all runs: as the job is quickest; that run counts.

        Where they share the program's core it makes no difference.
        """
        runs = {}
        for policy in ("batch", "") if self.is_apart(shape.ranks) else ("",):
            self.policy = policy
            runs[policy] = self.true_run(name, shape), self.spent
        self.policy = min(runs, key=lambda policy: typical(runs[policy][0]))
        found["tried_ms"] = {policy: typical(times) for policy, (times, _) in runs.items()}
        found["policy"] = self.policy
        times, spent = runs[self.policy]
        found["true_ns"].append(times)
        found["true_spent"].append(spent)

    def comm_table(self, ranks: int) -> Path:
        """Times of communications as ranks of such a job see them: see `MEASURED`."""
        apart = self.is_apart(ranks)
        # As many as can have two cores each: with one they would measure something else.
        most = self.settings.most_ranks
        most = len(self.cores.paired(most)) if apart else most
        table = self.work / f"comm-{'apart' if apart else 'shared'}-{self.policy}.parquet"
        if not table.is_file():
            placed = self.placed(self.cores.of_ranks(most, one_each=not apart))
            logs = []
            for number, (kinds, groups, sizes, *more) in enumerate(MEASURED[apart]):
                members = [count for count in groups.split(",") if int(count) <= most]
                log = table.with_name(f"{table.stem}-{number}.csv")
                self.command(
                    f"comm-bench {kinds} of {groups}",
                    *("comm-bench", "--nproc", str(most), "--rounds", "3", "-o", str(log)),
                    *("--kinds", kinds, "--group-sizes", ",".join(members)),
                    *("--sizes", sizes, *more),
                    more=placed,
                )
                logs.append(str(log))
            words = ("comm-table", *logs, "-o", str(table))
            self.command("comm-table", *words, package="prismcalib")
        return table

    def collect(self, name: str, shape: Shape) -> dict[str, Any]:
        """The bare graph; what was reported, and how long it took."""
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        found: dict[str, Any] = self.command(
            f"{name} collect",
            *("collect", "--world-size", str(shape.ranks), "--devices", str(shape.ranks)),
            *("--record-tensors", "all", "--show-rank", "none"),
            *("-o", str(folder / "bare.parquet"), "--", *shape.words(self.settings.steps)),
        )
        return found

    def share(self, shape: Shape, found: dict[str, Any]) -> float:
        """Of the time, in which the core of a rank's program was busy in the latest true run."""
        apart = self.is_apart(shape.ranks)
        busy = [one[0] if apart else one[0] + one[1] for one in found["true_spent"][-1].values()]
        return min(1.0, statistics.mean(busy) / typical(found["true_ns"][-1]))

    def calibrate(self, name: str, shape: Shape, number: int, share: float) -> dict[str, Any]:
        """slice, merge; what each reported, and how long it took."""
        folder = self.work / name
        bare, slices = folder / "bare.parquet", folder / f"slices-{number}"
        calibrated = folder / f"calibrated-{number}.parquet"
        table = self.comm_table(shape.ranks)
        cores, places = self.of_slices(shape)
        found = {}
        with self.busy(shape, self.beside_slices(shape, cores), share):
            found["slice"] = self.command(
                f"{name} slice",
                *("slice", str(bare), "--sandbox-size", str(len(shape.sandbox))),
                *("--devices", str(len(cores))),
                *self.contending(shape),
                *("-o", str(slices), "--", *shape.words(self.settings.steps)),
                times=folder / "times-slices",
                more=places,
                cores=cores,
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

    def contending(self, shape: Shape) -> tuple[str, ...]:
        """Options that have gloo's part of a core taken, where its threads share the program's."""
        if self.is_apart(shape.ranks):
            return ()
        return "--comm-table", str(self.comm_table(shape.ranks))

    # --- runs -------------------------------------------------------------------------

    def true_run(self, name: str, shape: Shape, slow: str = "") -> list[int]:
        """Step times of a sandbox rank in a true run, in ns."""
        import warm

        times = self.work / name / "times-true"
        words = shape.words(self.settings.steps)
        variables = {**self.placed(self.cores_of(shape.ranks)), "FIDELITY_SLOW": slow}
        self.twice(
            f"{name} true {slow}", lambda: warm.run_job(words, shape.ranks), variables, times=times
        )
        self.spent = spent(times)
        return step_times(times, shape)

    def true_run_into(self, found: dict[str, Any], name: str, shape: Shape) -> None:
        """A true run, and what it took."""
        found["true_ns"].append(self.true_run(name, shape))
        found["true_spent"].append(self.spent)

    def emulated_run(
        self, name: str, shape: Shape, number: int, share: float, inject: str = ""
    ) -> dict[str, Any]:
        """An emulated run on the same cores: its report, and step times as the rank saw them.

        `number` is the campaign whose graph it runs with.
        """
        folder = self.work / name
        times = folder / "times-emulated"
        mine = self.of_emulator(shape)
        every = self.cores_of(shape.ranks)
        others = [every[rank][0] for rank in self.virtual(shape) if every[rank][0] not in mine]
        words = [
            *("run", str(folder / f"calibrated-{number}.parquet")),
            *("--sandbox", ",".join(map(str, shape.sandbox)), "--transport", "local"),
            *("--tensors", str(folder / "bare.tensors")),
            *(("--inject", inject) if inject else ()),
            *self.contending(shape),
            *("-o", str(folder / "run.parquet"), "--", *shape.words(self.settings.steps)),
        ]
        more = self.placed(every, shape.sandbox)
        with self.busy(shape, others, share):
            report = self.command(f"{name} run", *words, times=times, more=more, cores=mine)
        return {"report": report, "seen_ns": step_times(times, shape), "spent": spent(times)}

    def phases(self, name: str, shape: Shape) -> dict[str, dict[str, dict[str, float]]]:
        """Where a typical step goes: see `print_phases`."""
        folder = self.work / name
        words = ["record", "--nproc-per-node", str(shape.ranks), "-o", str(folder / "true.parquet")]
        more = self.placed(self.cores_of(shape.ranks))
        self.command(f"{name} record", *words, "--", *shape.words(self.settings.steps), more=more)
        words = ["merge", str(folder / "true.parquet"), "-o", str(folder / "true-merged.parquet")]
        self.command(f"{name} merge of the recorded run", *words, package="prismcalib")
        table = self.comm_table(shape.ranks)
        printed = self.twice(
            f"{name} phases", lambda: print_phases(folder, table, shape.sandbox[0]), {}
        )
        found: dict[str, dict[str, dict[str, float]]] = json.loads(printed)
        return found

    @contextlib.contextmanager
    def busy(self, shape: Shape, cores: Sequence[int], share: float) -> Iterator[None]:
        """Cores that work as their ranks would, for such a share of the time."""
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
            lambda: busy.keep_busy(cores, words, share),
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
            if time.monotonic() > self.deadline:
                raise
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
            code = fork.wait(min(MOST_SECONDS, self.deadline + GRACE_SECONDS - time.monotonic()))
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

    def measure(self, name: str, shape: Shape) -> None:
        """Everything about a shape that is not there yet, but for slowed-down ranks.

        Raises:
            OutOfTimeError: what there is so far is in a file.
        """
        part = self.output / f"{name}.part"
        found: dict[str, Any] = {"true_ns": [], "calibrations": [], "emulated": [], "injected": []}
        found["true_spent"] = []
        if part.is_file() and (self.work / name / "bare.parquet").is_file():
            found = json.loads(part.read_text())
        self.perform(found, part, self.pieces(name, shape, found, self.settings.repeats))
        (self.output / f"{name}.json").write_text(json.dumps(found))
        part.unlink()

    def measure_more(self, name: str, shape: Shape) -> None:
        """A shape that is there once more: slices, an emulated run, a true one.

        Raises:
            OutOfTimeError: what there is so far is in the shape's file.
        """
        path = self.output / f"{name}.json"
        if path.is_file() and (self.work / name / "bare.parquet").is_file():
            found = json.loads(path.read_text())
            again = len(found["calibrations"]) + 1
            self.perform(found, path, self.pieces(name, shape, found, again))

    def perform(
        self, found: dict[str, Any], path: Path, pieces: Iterator[Callable[[], object]]
    ) -> None:
        """Do one after another, and write what is found after each.

        Raises:
            OutOfTimeError: what there is so far is written.
        """
        for piece in pieces:
            begun = time.monotonic()
            if begun > self.deadline:
                raise OutOfTimeError
            piece()
            found["wall_s"] = found.get("wall_s", 0.0) + time.monotonic() - begun
            path.write_text(json.dumps(found))

    def pieces(
        self, name: str, shape: Shape, found: dict[str, Any], repeats: int
    ) -> Iterator[Callable[[], object]]:
        """What is left to be done, one after another; each notes what it finds."""
        if "collect" not in found:
            found |= {"shape": name, "ranks": shape.ranks, "machine": machine()}
            found |= {"words": shape.words(self.settings.steps)[1:], "sandbox": shape.sandbox}
            found |= {"cores": self.cores_of(shape.ranks)}
            yield lambda: found.update(collect=self.collect(name, shape))
        if "policy" not in found:
            yield lambda: self.choose_policy(found, name, shape)
        self.policy = found["policy"]
        for number in range(repeats):
            if len(found["true_ns"]) <= number:
                yield lambda: self.true_run_into(found, name, shape)
            if len(found["calibrations"]) <= number:
                yield lambda number=number: found["calibrations"].append(
                    self.calibrate(name, shape, number, self.share(shape, found))
                )
            if len(found["emulated"]) <= number:
                yield lambda number=number: found["emulated"].append(
                    self.emulated_run(name, shape, number, self.share(shape, found))
                )
        if len(found["true_ns"]) <= repeats:
            yield lambda: self.true_run_into(found, name, shape)
        if "phases_ms" not in found:
            yield lambda: found.update(self.phases(name, shape))

    def slow_down(self, name: str, shape: Shape, number: int) -> None:
        """A true run and an emulated one for every slowdown, once more, if not there yet.

        Raises:
            OutOfTimeError: what there is so far is in the shape's file.
        """
        path = self.output / f"{name}.json"
        campaign = number % self.settings.repeats
        if not (self.work / name / f"calibrated-{campaign}.parquet").is_file():
            return
        found = json.loads(path.read_text())
        share, self.policy = self.share(shape, found), found["policy"]
        for rank, factor in [(rank, factor) for rank in shape.inject for factor in SLOWDOWNS]:
            there = [one for one in found["injected"] if one["factor"] == factor]
            if len([one for one in there if one["rank"] == rank]) > number:
                continue
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            inject = f"rank={rank},kind=compute,scale={factor}" if factor != 1 else ""
            found["injected"].append(
                {
                    "rank": rank,
                    "factor": factor,
                    "true_ns": self.true_run(name, shape, f"{rank}:{factor}" if inject else ""),
                    "emulated": self.emulated_run(name, shape, campaign, share, inject),
                }
            )
            path.write_text(json.dumps(found))


def trimmed(report: dict[str, Any]) -> dict[str, Any]:
    """A report without what nobody looks up here: results travel."""
    left_out = {"operations", "memory", "log_dir", "rows", "commands"}
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


def print_phases(folder: Path, comm_table: Path, rank: int) -> None:
    """Print where a typical step goes, as JSON; in a process that may use polars.

    `phases_ms`: time of a rank by kind and phase, truly and emulated. `transfers_ms`: of the
    communications of all ranks by kind and size, from the last member's beginning to the last
    one's end, truly and as merged. `explained_ms`: a step of the recorded true run, and for each merged
    graph its own step, then with the true computation, then with the true transfers, too. `table`: kind, ranks, bytes, and of each the time and processor
    time in us by `comm-bench`.
    """
    import polars as pl

    table = pl.read_parquet(comm_table).select(
        "kind", "ranks", "bytes", (pl.col("time_ns", "cpu_ns") / 1e3).round().cast(pl.Int64)
    )

    every = sorted(folder.glob("calibrated-*.parquet"))
    transfers: dict[str, dict[str, float]] = {}
    for title, trace in (("true", folder / "true.parquet"), ("merged", every[-1])):
        end = pl.col("start_ns") + pl.col("dur_ns")
        times = (
            pl.scan_parquet(trace)
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
    printed = {"phases_ms": found, "transfers_ms": transfers, "table": table.rows()}
    printed["explained_ms"] = explained(folder / "true-merged.parquet", every)
    print(json.dumps(printed))


def explained(true: Path, merged: Sequence[Path]) -> dict[str, Any]:
    """What of the prediction's error is due to computation and what to transfers."""
    from prismcalib import SwapDurations, predict, what_if

    def step(steps_ns: Iterable[int]) -> float:
        return float(statistics.median([*steps_ns][WARMUP:])) / 1e6

    scenarios = {
        "its computation": [SwapDurations(str(true), "kind = 'compute'")],
        "its computation and transfers": [SwapDurations(str(true))],
    }
    rows = []
    for graph in merged:
        found = what_if(str(graph), scenarios, steps="all")
        one = {scenario.name: step(scenario.steps_ns) for scenario in found.scenarios}
        rows.append({"merged": step(found.baseline.steps_ns), **one})
    recorded = predict(str(true), draws=0, steps="all").steps["duration_ns"]
    return {"recorded": step(recorded), "graphs": rows}


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


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("fidelity-results"))
    parser.add_argument("--work", type=Path, help="recordings and logs; default: in the former")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--steps", type=int, default=STEPS, help="of every run")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of slices and emulated runs")
    parser.add_argument(
        "--one-core", action="store_true", help="gloo's threads share the core of the program"
    )
    parser.add_argument("--budget", type=float, default=540, help="begin nothing after so long")
    parser.add_argument("--no-inject", action="store_true", help="leave slowed-down ranks out")
    parser.add_argument(
        "--more", type=int, default=0, help="further repeats, as far as time is left after all else"
    )
    parser.add_argument("--table", action="store_true", help="print the table, run nothing")
    parser.add_argument("--anyway", action="store_true", help="also with fewer cores than ranks")
    return parser.parse_args()


def measure_all(bench: Bench, names: Sequence[str], output: Path) -> None:
    """Shapes, then slowed-down ranks; what fails is told, and the rest goes on."""
    bench.note_machine()
    todo: list[tuple[str, Callable[[], None]]] = [
        (name, lambda name=name: bench.measure(name, SHAPES[name]))
        for name in names
        if not (output / f"{name}.json").is_file()
    ]
    if bench.settings.inject:
        todo += [
            (
                f"{name}, a slow rank",
                lambda name=name, number=number: bench.slow_down(name, SHAPES[name], number),
            )
            for number in range(SLOW_REPEATS)
            for name in names
            if SHAPES[name].inject
        ]
    todo += [
        (f"{name} once more", lambda name=name: bench.measure_more(name, SHAPES[name]))
        for _ in range(bench.settings.most_more)
        for name in names
    ]
    for title, work in todo:
        print(f"{title}:", flush=True)
        try:
            work()
        except OutOfTimeError:
            print("no time is left: call again with the same results folder")
            break
        except (FailedError, OSError, ValueError, KeyError) as error:
            print(f"  failed: {error!r}", file=sys.stderr)
    else:
        # Recordings are large, and nothing needs them any more.
        for name in names:
            shutil.rmtree(bench.work / name, ignore_errors=True)


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
    settings = Settings(
        one_core=options.one_core,
        steps=options.steps,
        repeats=options.repeats,
        inject=not options.no_inject,
        most_more=options.more,
        most_ranks=needed,
    )
    import warm
    from cores import look_at

    warm.prepare()
    print(f"imported everything: {time.monotonic() - begun:.1f} s", flush=True)
    found = look_at(cores)
    print(f"looked at the cores: {time.monotonic() - begun:.1f} s: {found}", flush=True)
    work = options.work or options.output / "work"
    bench = Bench(options.output, work, found, settings, begun + options.budget)
    measure_all(bench, options.shapes, options.output)
    print(tables(options.output))


if __name__ == "__main__":
    main()
