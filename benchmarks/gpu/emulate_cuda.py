"""Jobs of several ranks emulated on one GPU, end to end: is it true, and what does it cost?

    python benchmarks/gpu/emulate_cuda.py --out gpu-results [--ranks 8] [--only ddp,pp] [--budget 150]

For each layout of a GPT (`examples/train_gpt.py`), `prismreplay emulate` collects all ranks, slices
every one of them, merges, and runs rank 0 in a world that keeps this time. Printed: predicted and
emulated step time, by how much ends of operations were missed, what the host spent on an
operation, peak memory, and wall time of the stages. With `--plain`, the same job is also run with all its
ranks truly there (NCCL, on the same GPU): losses and peak memory of rank 0 beside those of the
emulated one.

`--small` is a model of a few hundred thousand parameters whose communications are all recorded: its losses
are those of the job. Parts that fail are reported in full, and the rest goes on.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

# 8 layers of 12.6 M parameters, and 0.5 M of embeddings: 101 M.
LARGE = [
    *("--layers", "8", "--hidden", "1024", "--heads", "16", "--length", "256"),
    *("--batch-size", "8", "--microbatches", "4"),
]
SMALL = ["--layers", "4", "--hidden", "128", "--heads", "4", "--length", "64"]
LAYOUTS = {
    "ddp": [],
    "fsdp": ["--fsdp", "{ranks}"],
    "tp": ["--tp", "{ranks}"],
    "pp": ["--pp", "4"],
    "ddp-tp": ["--tp", "2"],
}
EVERYTHING = 1 << 40
STAGES = ("collect", "slice", "merge", "run")
LEAST_S = 50
"""What one layout takes at least."""


def emulate(
    folder: Path,
    words: Sequence[str],
    ranks: int,
    *,
    sandbox: int = 0,
    record_below: int | None = None,
    limit_s: float = 150,
    more: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `prismreplay emulate` on one GPU; reports of its stages, by name, and wall time of each.

    Args:
        folder: for its files.
        words: the script, with its arguments; it takes ``--results FOLDER``.
        ranks: of the job.
        sandbox: the rank that runs in the end.
        record_below: bytes of the largest communications that are recorded; None: as the command
            has it.
        limit_s: then it is ended.
        more: further options of the command.
        environment: in place of this process's.

    Raises:
        RuntimeError: it failed; with all that it printed, and the ends of ranks' logs.
    """
    from prismreplay.local_ranks import with_paths

    results = folder / "results"
    command = [
        *(sys.executable, "-m", "prismreplay.cli", "emulate", "--world-size", str(ranks)),
        *(
            "--devices",
            "1",
            "--sandbox",
            str(sandbox),
            "-o",
            str(folder / "emulation"),
            "--json",
            *more,
        ),
        *(() if record_below is None else ("--record-below", str(record_below))),
        *("--", *words, "--results", str(results)),
    ]
    # A process group of its own: stages have processes that must not outlive it.
    child = subprocess.Popen(
        command,
        env=with_paths(os.environ if environment is None else environment, REPO),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGINT)
        try:
            out, err = child.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, err = child.communicate()
        err += f"\nended after {limit_s:.0f} s"
    if child.returncode:
        logs = sorted(
            (folder / "emulation").rglob("rank-*.log"), key=lambda one: one.stat().st_mtime
        )
        ends = "\n".join(
            f"--- {one}\n{one.read_text(errors='replace')[-2500:]}" for one in logs[-3:]
        )
        done = "\n".join(_told(folder / "emulation" / f"{stage}.json") for stage in STAGES)
        raise RuntimeError(
            f"exit code {child.returncode}: {command}\n{out}\n{err[-9000:]}\n{ends}\n{done}"
        )
    found: dict[str, Any] = {"findings": json.loads(out), "wall": {}}
    for stage in STAGES:
        note = json.loads((folder / "emulation" / f"{stage}.json").read_text())
        found[stage], found["wall"][stage] = note["report"], note["wall_s"]
    said = results / f"rank-{sandbox:04d}.json"
    # The last stage has left its own there.
    found["losses"] = [float.fromhex(one) for one in json.loads(said.read_text())["losses"]]
    return found


def _told(note: Path) -> str:
    """What a stage that was done has said, in short."""
    if not note.is_file():
        return f"{note.stem}: not done"
    told = json.loads(note.read_text())
    report, wall = told["report"], told["wall_s"]
    steps = [outcome["step_ns"] for outcome in report.get("outcomes", ())]
    return f"{note.stem}: {wall:.1f} s {steps}"


def device_of(found: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """What the run says of a rank on a GPU."""
    return next(one for one in found["run"]["ranks"] if one["rank"] == rank)


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    run, rank = found["run"], device_of(found)
    device = rank["device"]
    emulated, predicted = run["step_ns"] or 0, run["predicted_step_ns"] or 0
    cells = [
        name,
        f"{predicted / 1e6:.3f}",
        f"{emulated / 1e6:.3f}",
        f"{emulated / predicted - 1:+.2%}" if predicted else "",
        device["operations"],
        (
            f"{device['issuing_median_ns'] / 1e3:.1f} / "
            f"{device['issuing_ns'] / max(1, device['operations']) / 1e3:.1f}"
        ),
        f"{device['fetched']} ({device['fetching_ns'] / 1e6:.1f} ms)",
        device["holds"],
        f"{device['hold_median_ns'] / 1e3:.2f} / {device['hold_p99_ns'] / 1e3:.2f}",
        f"{device['late']} ({device['late_ns'] / 1e6:.2f} ms)",
        device["mirrored"],
        f"{rank['peak_allocated_bytes']:,}",
        " ".join(f"{stage} {seconds:.0f}" for stage, seconds in found["wall"].items()),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| job | predicted ms | emulated ms | difference | operations | host us/op, median / mean | asked the hub | holds "
    "| end missed us, median / 99 % | too late | mirrored | peak bytes | wall s |\n"
    + "|---" * 13
    + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--only", default="ddp,pp,fsdp,tp", help=", ".join(LAYOUTS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="a tiny model, all of it recorded")
    parser.add_argument("--plain", action="store_true", help="also with all ranks, by NCCL")
    parser.add_argument("--budget", type=float, default=150, help="seconds in all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget
    raw, lines, failed = {}, [HEAD], []
    for name in options.only.split(","):
        left = until - time.monotonic()
        if left < LEAST_S:
            lines.append(f"| {name} | no time was left |" + " |" * 10)
            continue
        try:
            layout = [word.format(ranks=options.ranks) for word in LAYOUTS[name]]
            raw[name] = part(options, layout, left)
            lines.append(row(name, raw[name]))
            print(lines[-1], flush=True)
            if "plain" in raw[name]:
                print(beside(raw[name]), flush=True)
        except Exception:  # noqa: BLE001  the rest goes on
            failed.append(name)
            print(f"=== {name} failed\n{traceback.format_exc()}", flush=True)
    name = "emulate_cuda_small.json" if options.small else "emulate_cuda.json"
    (options.out / name).write_text(json.dumps(raw, indent=1))
    print("\n".join(lines))
    for one in raw.values():
        if "plain" in one:
            print(beside(one))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def part(options: argparse.Namespace, layout: Sequence[str], left_s: float) -> dict[str, Any]:
    """One layout."""
    words = [str(REPO / "examples/train_gpt.py"), *(SMALL if options.small else LARGE), *layout]
    words += ["--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = emulate(
            folder,
            words,
            options.ranks,
            record_below=EVERYTHING if options.small else None,
            limit_s=left_s,
        )
        if options.plain:
            from benchmarks.gpu.plain_run import plain_run

            plain = plain_run(words, options.ranks, folder / "plain", limit_s=120)
            first = plain.ranks[0]
            found["plain"] = {
                "peak_bytes": first.peak_bytes,
                "losses": first.losses,
                "wall_s": plain.wall_s,
                "failed": plain.failed,
            }
    return found


def beside(found: dict[str, Any]) -> str:
    """Losses and memory of the emulated rank and of the plain run."""
    plain, here = found["plain"], device_of(found)["peak_allocated_bytes"]
    if plain["failed"]:
        return f"the plain run failed: {plain['failed'][-3000:]}"
    losses = zip(found["losses"], plain["losses"], strict=True)
    worst = max((abs(one - other) / abs(other) for one, other in losses), default=0.0)
    more = here - plain["peak_bytes"]
    return (
        f"rank 0, emulated and plain: losses differ by {worst:.2e} at most (of {plain['losses']}); "
        f"peak {here:,} and {plain['peak_bytes']:,} bytes ({more:+,})"
    )


if __name__ == "__main__":
    main()
