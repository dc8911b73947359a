"""True jobs on all GPUs of a host beside emulated ones: step times, memory, losses, kernels.

    benchmarks/gpu/fidelity_multi.sh --out FOLDER [--work FOLDER] [--budget 560] [--size 0.3]

For data parallelism (DDP, FSDP2), tensor and pipeline parallelism and, with four ranks or more, both of
these, in this order, so that a call that ends early has something of all:

1. without times, beside each other: graphs are collected, and a small model trains emulated, with all its
   communications recorded; then the small models train truly, for their losses;
2. what NCCL takes here goes into a table (`comm-bench`); all ranks are sliced, one at a time on each
   GPU, and merged: virtual ranks give what the real one does;
3. round by round, for each layout: the true job with a GPU for every rank, and 1, 2, 4 ... ranks of
   it, up to half, with all others virtual (transport `local`);
4. a further true run is recorded and compared piece by piece; a true and an emulated run are profiled;
5. rings over peer memory against NCCL; profiles of all ranks (`record_kineto.py`); every rank a
   process on one GPU (`vanilla.py`).

Commands and true runs are forks of a process that has torch loaded (`level_d_forks.py`); what fails so
is tried again with fresh interpreters. What it takes is estimated before. Every part's result is kept at once,
in --work and in --out (level-d.json, level-d.md); parts for which no time is left are named, and a
call with the same --work does them. On a machine that has nothing of --work, --from takes the level-d.json
of an earlier one: finished parts count. With fewer than two GPUs nothing is run, unless --anyway has
ranks share what is there, to test this script: times then mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.level_d_bench import Bench  # noqa: E402
from benchmarks.gpu.level_d_forks import prepare  # noqa: E402
from benchmarks.gpu.level_d_jobs import (  # noqa: E402
    MULTICAST_OFF,
    SIZES,
    SPREAD_OUT,
    gpus_here,
    layouts_of,
    machine,
)
from benchmarks.gpu.level_d_parts import Part, Stage, cores, refuse  # noqa: E402
from benchmarks.gpu.level_d_traces import WARMUP  # noqa: E402

STEPS = 6
KINETO_JOBS = ("ddp", "fsdp-mesh", "tp", "pp", "groups")
PROFILED = ("ddp", "tp")
"""Layouts whose kernels are looked at before all else is done."""


def plan(bench: Bench, kineto: Sequence[str]) -> list[Stage]:
    """Everything, in order."""
    names = bench.settings["layouts"]
    places = list(enumerate(names))
    spread = max(2, cores() // 4) if bench.settings["size"] in SPREAD_OUT else 1
    stages = [
        Stage(
            "without times",
            (
                *(Part("machine", machine) for _ in range(not bench.state["machine"])),
                *(
                    Part(f"{name}/collect", lambda n=name, p=place: bench.collect(n, p))
                    for place, name in places
                ),
                *(
                    Part(
                        f"{name}/losses emulated",
                        lambda n=name, p=place + 1: bench.emulated_losses(n, p),
                    )
                    for place, name in places
                ),
            ),
            spread,
        ),
        Stage(
            "true losses",
            tuple(Part(f"{n}/losses true", lambda n=n: bench.true_losses(n)) for n in names),
            max(1, spread // 2),
        ),
        Stage("table", (Part("table", bench.make_table),)),
        Stage(
            "slices",
            tuple(
                Part(f"{name}/slices", lambda n=name: bench.slices(n), ("table", f"{name}/collect"))
                for name in names
            ),
        ),
        *(
            Stage(f"runs, round {number}", tuple(runs(bench, names, number)))
            for number in range(1, bench.settings["repeats"] + 1)
        ),
        Stage("recorded and compared", tuple(explanations(bench, names))),
        Stage("kernels", tuple(kernels(bench, [one for one in names if one in PROFILED]))),
    ]
    if bench.gpus:
        peers = (Part("peers", bench.peers),) if bench.gpus > 1 else ()
        profiles = (Part(f"kineto/{job}", lambda job=job: bench.kineto(job)) for job in kineto)
        stages.append(Stage("peers and profiles", (*peers, *profiles)))
        stages.append(Stage("vanilla", (Part("vanilla", bench.vanilla),)))
    rest = [one for one in names if one not in PROFILED]
    return [*stages, Stage("kernels of the others", tuple(kernels(bench, rest)))]


def runs(bench: Bench, names: Sequence[str], number: int) -> list[Part]:
    """A true run of each layout, and emulated ones beside it, in turn."""
    found = []
    for name in names:
        turn = [Part(f"{name}/run {number} true", lambda n=name: bench.timed_run(n))]
        turn += [
            Part(
                f"{name}/run {number} emulated {size}",
                lambda n=name, size=size: bench.emulated_run(n, size),
                (f"{name}/slices",),
            )
            for size in bench.sizes()
        ]
        found += turn if number % 2 else turn[::-1]
    return found


def explanations(bench: Bench, names: Sequence[str]) -> list[Part]:
    """A recorded run of each layout, compared with the last emulated ones."""
    found = []
    for name in names:
        needs = (f"{name}/record", f"{name}/run 1 emulated 1")
        found += [
            Part(f"{name}/record", lambda n=name: bench.record(n)),
            Part(f"{name}/compare", lambda n=name: bench.compare(n), needs),
        ]
    return found


def kernels(bench: Bench, names: Sequence[str]) -> list[Part]:
    """Of a true and of an emulated run."""
    return [
        Part(f"{name}/kernels", lambda n=name: bench.kernels(n), (f"{name}/slices",))
        for name in names
    ]


def forget_lost(bench: Bench, stages: Sequence[Stage]) -> None:
    """Parts whose files are gone, as this is another machine, and that others need: once more."""
    needed = {
        name
        for stage in stages
        for part in stage.parts
        if not bench.settled(part.name)
        for name in part.needs
    }
    files = {"table": bench.table}
    for name in bench.settings["layouts"]:
        folder = bench.work / name
        files[f"{name}/collect"] = folder / "emulation/bare.parquet"
        files[f"{name}/slices"] = folder / "emulation/calibrated.parquet"
        files[f"{name}/record"] = folder / "true-merged.parquet"
    # What a part needs that is made again is needed, too: stages are in order.
    for stage in reversed(stages):
        for part in stage.parts:
            if part.name in needed and part.name in files and not files[part.name].is_file():
                bench.parts.pop(part.name, None)
                needed |= set(part.needs)


def everything(bench: Bench, kineto: Sequence[str]) -> None:
    """All parts for which there is time."""
    stages = plan(bench, kineto)
    forget_lost(bench, stages)
    print(bench.estimate(stages), flush=True)
    for stage in stages:
        bench.measure(stage)
        facts = bench.parts.pop("machine", None)
        if facts is not None and facts["state"] == "done":
            bench.state["machine"] = facts["result"]
            bench.cold |= facts["cold"]  # CUDA does not start in forks


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
    parser.add_argument(
        "--kineto", default="fsdp-mesh", help=f"jobs to profile, of {','.join(KINETO_JOBS)}"
    )
    parser.add_argument("--cold", action="store_true", help="fresh interpreters from the beginning")
    return parser.parse_args()


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
    begun = time.monotonic()
    options = parse()
    os.environ.update(MULTICAST_OFF)
    paths = filter(None, [str(REPO), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    gpus = gpus_here()
    settings = settings_of(options, gpus)
    kineto = [job for job in options.kineto.split(",") if job]
    if unknown := [job for job in kineto if job not in KINETO_JOBS]:
        refuse(f"--kineto {', '.join(unknown)}: there is {', '.join(KINETO_JOBS)}")
    options.work = (options.work or options.out / "work").resolve()
    options.out = options.out.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, settings, gpus)
    if not options.cold:
        prepare()
    print(f"{gpus} GPUs; loading took {time.monotonic() - begun:.1f} s", flush=True)
    everything(bench, kineto)
    bench.save()
    if (options.work / "kineto").is_dir():
        bench.pack()
    print((bench.out / "level-d.md").read_text())
    if bench.missing:
        print(f"{len(bench.missing)} parts are left: call it again with the same --work")
        sys.exit(3)
    sys.exit(any(part["state"] == "failed" for part in bench.parts.values()))


if __name__ == "__main__":
    main()
