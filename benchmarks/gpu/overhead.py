"""What being emulated costs a rank's step: one rank of a job among virtual ones, beside the rank alone.

    python benchmarks/gpu/overhead.py --out gpu-results

The job is data parallel (DDP, buckets of 1 MB: a communication for nearly every weight), 0.3 billion
parameters, one of two ranks on a GPU; the other is virtual, always there, gives what this one gives,
and transfers take no time. The same program as a job of one rank has the same computation, and NCCL
has nothing to move. So what the step of the first takes beyond that of the second is the emulator's:
the host's time for each operation, and the addition that stands for the other rank. In turn, three
times each; of each run the median step after the warm-up, by the GPU's events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.level_d import apart  # noqa: E402
from benchmarks.gpu.level_d_bench import noted  # noqa: E402
from benchmarks.gpu.level_d_forks import Runner, prepare  # noqa: E402
from benchmarks.gpu.level_d_jobs import model_of  # noqa: E402

RANKS, STEPS, ROUNDS = 2, 8, 3
LIMIT_S, LEAST_S = 90.0, 40.0


def words(size: str) -> list[str]:
    """The program: a script that is watched."""
    script = [str(REPO / "benchmarks/gpu/timed_rank.py"), str(REPO / "examples/train_gpt.py")]
    return [*script, *model_of(size, RANKS), "--steps", str(STEPS)]


def measure(folder: Path, size: str, until: float) -> dict[str, list[Any]]:
    """Steps of the rank alone and emulated, ns, run by run; and what the emulator says of it."""
    runner = Runner("overhead", folder)
    graph, program = folder / "bare.parquet", words(size)
    collect = ("collect", "--world-size", RANKS, "--devices", 1, "--per-device", RANKS)
    runner.command(
        "prismreplay", (*collect, "--show-rank", "none", "-o", graph, "--", *program), LIMIT_S, {}
    )
    emulate = ("run", "--json", graph, "--early", "--sandbox", 0, "--tensors", "builtin:mirror")
    found: dict[str, list[Any]] = {"alone": [], "emulated": [], "told": []}
    for number in range(ROUNDS):
        if number and until - time.monotonic() < LEAST_S:
            break
        times = folder / f"times-{number}"
        runner.job(program, 1, LIMIT_S, {"FIDELITY_TIMES": str(times / "alone")})
        found["alone"].append(noted(times / "alone"))
        told = runner.command(
            "prismreplay",
            (*emulate, "--show-rank", "none", "-o", folder / "run.parquet", "--", *program),
            LIMIT_S,
            {"FIDELITY_TIMES": str(times / "emulated")},
        )
        found["emulated"].append(noted(times / "emulated"))
        found["told"].append(json.loads(told)["ranks"][0])
    return found


def show(found: dict[str, list[Any]]) -> None:
    """The table."""
    middle = {}
    print("| | step ms, median of runs | apart | by the host, ms | peak, B |")
    print("|---" * 5 + "|")
    for way in ("alone", "emulated"):
        steps = [run["step_ns"] for run in found[way]]
        middle[way] = statistics.median(steps)
        spread = apart(steps)
        host = statistics.median(statistics.median(run["host_steps_ns"][2:]) for run in found[way])
        peaks = sorted({run.get("peak_bytes") for run in found[way]}, key=str)
        print(
            f"| {way} | {middle[way] / 1e6:.3f} | {'' if spread is None else f'±{spread:.2%}'} "
            f"| {host / 1e6:.3f} | {', '.join(map(str, peaks))} |"
        )
    more = middle["emulated"] - middle["alone"]
    told = found["told"][-1]["device"] or {}
    print(
        f"emulated {more / middle['alone']:+.2%}; {told.get('operations')} operations in {STEPS} steps, "
        f"of the host {told.get('issuing_median_ns', 0) / 1e3:.1f} us each (median)"
    )


def main() -> None:
    """Measure, print, and keep the raw numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--size", default="0.3", help="billions of parameters, or tiny")
    parser.add_argument("--budget", type=float, default=150, help="seconds")
    options = parser.parse_args()
    until = time.monotonic() + options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.size, until)
    (options.out / "overhead.json").write_text(json.dumps(found, indent=1))
    show(found)


if __name__ == "__main__":
    main()
