"""Many logical ranks on one GPU: do they compute the same, and what does sharing the GPU cost?

    python benchmarks/gpu/collect_cuda.py --out gpu-results

Parts, each with a time limit; one that fails is reported in full and the rest goes on:

same      a tiny job on the GPU (all ranks resident; then with a memory cap, so that they are
          moved) and on CPUs: losses of all ranks next to each other
moves     the driver's checkpoints out and in, GB/s by size, against plain copies to pinned memory,
          which is the most that a program could reach that moved its tensors itself
8, 32     that many ranks of a GPT with the layer sizes of a 1 B-parameter job: resident, then capped

`--budget` bounds it all in seconds; parts that no longer fit are skipped and say so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Self

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

TINY = ["--layers", "4", "--hidden", "256", "--heads", "8", "--length", "64"]
# Layers of the sizes of a 1.2 B-parameter GPT with 24 of them (50 M parameters each).
LARGE = ["--hidden", "2048", "--heads", "16", "--length", "256", "--microbatches", "2"]
TIMEOUT_S = 170


# --- one collection --------------------------------------------------------------------------


class PeakOfGpu:
    """The most memory in use on GPU 0, as the driver's monitoring says, sampled."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(2)

    def _watch(self) -> None:
        from prismreplay.collect.gpus import Nvml, find_gpus

        nvml = Nvml.load()
        gpus = find_gpus(nvml)
        while gpus and not self._stop.wait(0.1):
            found = nvml.memory(gpus[0].token)
            self.bytes = max(self.bytes, found[1] if found else 0)


def collect(name, ranks, options, program, folder, *, gpu=True, limit=TIMEOUT_S):
    """Run `prismreplay collect` on examples/train_gpt.py: its report, losses of all ranks, peak.

    Raises:
        RuntimeError: with all that it printed, and the ends of ranks' logs.
    """
    from prismreplay.local_ranks import with_paths

    results, output = folder / f"{name}-results", folder / f"{name}.parquet"
    command = [sys.executable, "-m", "prismreplay.cli", "collect", "--world-size", str(ranks)]
    command += ["--json", "-o", str(output), *options, "--", str(REPO / "examples/train_gpt.py")]
    command += [*program, "--results", str(results)]
    environment = with_paths(os.environ, REPO)
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    begun = time.monotonic()
    with PeakOfGpu() as peak:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                out, err = child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()
            err += f"\nstopped after {limit} s"
    if child.returncode != 0 or "stopped after" in err:
        logs = sorted(output.with_suffix(".logs").glob("rank-*.log"))
        ends = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in logs[:4])
        raise RuntimeError(
            f"exit code {child.returncode}: {' '.join(command)}\n{out[-3000:]}\n{err[-8000:]}\n{ends}"
        )
    losses = [
        [float.fromhex(loss) for loss in json.loads(file.read_text())["losses"]]
        for file in sorted(results.glob("rank-*.json"))
    ]
    hashes = [json.loads(file.read_text())["parameters"] for file in sorted(results.glob("*.json"))]
    return {
        "name": name,
        "ranks": ranks,
        "command": command,
        "report": json.loads(out),
        "losses": losses,
        "parameters": hashes,
        "peak_gpu_bytes": peak.bytes,
        "wall_s": time.monotonic() - begun,
    }


def row(found) -> str:
    """A line of the table of collections."""
    report = found["report"]
    gpu = report["gpu"] or {}

    def gb(key):
        return f"{gpu.get(key, 0) / 1e9:.1f}"

    cells = [
        found["name"],
        found["ranks"],
        f"{found['wall_s']:.1f}",
        f"{report['start_s']:.1f}",
        report["context_switches"],
        gb("budget_bytes"),
        gb("most_bytes"),
        f"{found['peak_gpu_bytes'] / 1e9:.1f}",
        gb("rank_bytes"),
        f"{gpu.get('moved_out', 0)} / {gpu.get('moved_in', 0)}",
        f"{gb('bytes_out')} in {gpu.get('seconds_out', 0):.1f}",
        f"{gb('bytes_in')} in {gpu.get('seconds_in', 0):.1f}",
        f"{gpu.get('trimmed', 0)}: {gb('trimmed_bytes')}",
        f"{report['peak_memory_bytes'] / 1e9:.1f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


TABLE = (
    "| job | ranks | wall s | start s | switches | cap GB | taken GB | seen GB | a rank GB "
    "| moves out / in | GB out in s | GB in in s | trimmed GB | host GB |\n" + "|---" * 14 + "|"
)


def difference(one, other) -> float:
    """The largest relative difference of losses, all ranks and steps."""
    return max(
        abs(a - b) / max(abs(b), 1e-12)
        for mine, theirs in zip(one["losses"], other["losses"], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def compare(one, other) -> str:
    """A line on whether two runs of a job computed the same."""
    same = sum(a == b for a, b in zip(one["parameters"], other["parameters"], strict=True))
    return (
        f"{one['name']} vs {other['name']}: losses differ by {difference(one, other):.1e} at most; "
        f"parameters of {same} of {len(one['parameters'])} ranks are equal bit by bit; "
        f"losses of rank 0: {one['losses'][0]} vs {other['losses'][0]}"
    )


# --- parts -----------------------------------------------------------------------------------


def part_same(folder, results, full):  # noqa: ARG001
    program = [*TINY, "--tp", "2", "--pp", "2", "--steps", "2"]
    print(TABLE)
    found = {}
    for name, options, gpu in (
        ("tiny cpu", ["--devices", "8"], False),
        ("tiny gpu", ["--devices", "1", "--per-device", "4"], True),
        ("tiny capped", ["--devices", "1", "--gpu-memory", "2"], True),
    ):
        found[name] = collect(name.replace(" ", "-"), 8, options, program, folder, gpu=gpu)
        results[name] = found[name]
        print(row(found[name]), flush=True)
    print(compare(found["tiny-gpu".replace("-", " ")], found["tiny cpu"]))
    print(compare(found["tiny capped"], found["tiny gpu"]))
    for name in ("tiny cpu", "tiny gpu", "tiny capped"):
        print(f"{name}: nodes {found[name]['report']['nodes']}")


CHILD = """
import sys, time, torch
gib = float(sys.argv[1])
x = torch.arange(int(gib * 2**30) // 4, device="cuda", dtype=torch.float32)
wanted = x[::1000003].double().sum().item()
torch.cuda.synchronize()
print("up", torch.cuda.memory_reserved(), flush=True)
for line in sys.stdin:
    if line.startswith("copy"):
        host = torch.empty(x.numel() // 4 if gib > 8 else x.numel(), pin_memory=True)
        part = x[: host.numel()]
        for _ in range(2):
            torch.cuda.synchronize(); t = time.perf_counter()
            host.copy_(part, non_blocking=True); torch.cuda.synchronize(); out = time.perf_counter() - t
            t = time.perf_counter()
            part.copy_(host, non_blocking=True); torch.cuda.synchronize(); back = time.perf_counter() - t
        print(host.numel() * 4 / out / 1e9, host.numel() * 4 / back / 1e9, flush=True)
    else:
        t = time.perf_counter()
        right = x[::1000003].double().sum().item() == wanted
        print(right, time.perf_counter() - t, flush=True)
"""


def part_moves(folder, results, full):  # noqa: ARG001
    """Checkpoint and restore of a process with so many GiB, two rounds each."""
    from prismreplay.collect.gpus import Nvml, find_gpus
    from prismreplay.collect.swapping import load_checkpoints

    nvml = Nvml.load()
    gpus = find_gpus(nvml)
    if not gpus:
        raise RuntimeError("no NVIDIA GPU is visible")
    token = gpus[0].token
    checkpoints = load_checkpoints()
    print(
        "| GiB | round | out s | GB/s | in s | GB/s | freed GB | host GB | right | copy out, in GB/s |"
    )
    print("|---" * 10 + "|")
    rows = results["moves"] = []
    for gib in (0.5, 4, 16) if full else (0.5, 4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            up = child.stdout.readline().split()
            if not up:
                raise RuntimeError(f"the process with {gib} GiB did not come up")
            child.stdin.write("copy\n")
            child.stdin.flush()
            copies = [float(word) for word in child.stdout.readline().split()]
            rows += [
                _one_move(child, gib, round_, checkpoints, nvml, token, copies) for round_ in (1, 2)
            ]
        finally:
            child.kill()
            child.wait()


def _one_move(child, gib, round_, checkpoints, nvml, token, copies):
    before = nvml.memory(token)[1]
    begun = time.perf_counter()
    checkpoints.move_out(child.pid)
    out = time.perf_counter() - begun
    freed = before - nvml.memory(token)[1]
    status = Path(f"/proc/{child.pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) / 1e6
    begun = time.perf_counter()
    checkpoints.move_in(child.pid)
    back = time.perf_counter() - begun
    child.stdin.write("check\n")
    child.stdin.flush()
    right, first = child.stdout.readline().split()
    size = gib * 2**30 / 1e9
    print(
        f"| {gib} | {round_} | {out:.2f} | {size / out:.2f} | {back:.2f} | {size / back:.2f} "
        f"| {freed / 1e9:.2f} | {resident:.1f} | {right} | {copies[0]:.1f}, {copies[1]:.1f} |",
        flush=True,
    )
    return {
        "gib": gib,
        "round": round_,
        "out_s": out,
        "in_s": back,
        "freed_bytes": freed,
        "right": right == "True",
        "first_use_s": float(first),
        "resident_gb": resident,
        "copy_gb_s": copies,
    }


def part_8(folder, results, full):
    layers = "24" if full else "8"
    program = [*LARGE, "--layers", layers, "--tp", "2", "--pp", "2", "--steps", "2"]
    _resident_and_capped(8, program, 4.3, folder, results)


def part_32(folder, results, full):
    layers = "24" if full else "8"
    program = [*LARGE, "--layers", layers, "--tp", "4", "--pp", "2", "--steps", "1"]
    _resident_and_capped(32, program, 24.5, folder, results)


def _resident_and_capped(ranks, program, fitting, folder, results):
    """With all the GPU's memory; then with room for `fitting` ranks."""
    print(TABLE)
    free = ["--devices", "1", "--per-device", "4"]
    roomy = collect(f"{ranks}-resident", ranks, free, program, folder)
    results[f"{ranks} resident"] = roomy
    print(row(roomy), flush=True)
    cap = fitting * roomy["report"]["gpu"]["rank_bytes"] / 2**30
    tight = ["--devices", "1", "--per-device", "2", "--gpu-memory", f"{cap:.2f}"]
    capped = collect(f"{ranks}-capped", ranks, tight, program, folder)
    results[f"{ranks} capped"] = capped
    print(row(capped), flush=True)
    print(compare(capped, roomy))


PARTS = {
    # name: (what it does, seconds that it is given at least)
    "same": (part_same, 60),
    "moves": (part_moves, 30),
    "8": (part_8, 60),
    "32": (part_32, 90),
}


def run_part(name, target, full, limit) -> str | None:
    """Run a part in a process of its own, which a driver that hangs may keep; what went wrong."""
    command = [sys.executable, __file__, "--inner", name, "--out", str(target)]
    child = subprocess.Popen([*command, *(["--full"] if full else [])], start_new_session=True)
    try:
        code = child.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return f"stopped after {limit:.0f} s"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return None if code == 0 else f"exit code {code}"


def inner(name, target, full) -> None:
    """One part; results so far are written however it ends."""
    results: dict[str, object] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name][0](Path(folder), results, full)
    except Exception:  # noqa: BLE001  the rest goes on
        results["failed"] = traceback.format_exc()
        print(results["failed"], flush=True)
        raise SystemExit(1) from None
    finally:
        target.write_text(json.dumps(results, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder, or a .json")
    parser.add_argument("--full", action="store_true", help="24 layers, and 16 GiB moves")
    parser.add_argument("--budget", type=float, default=600, help="seconds for all parts")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--inner", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    target = options.out
    if options.inner:
        inner(options.inner, target, options.full)
        return
    if target.suffix != ".json":
        target.mkdir(parents=True, exist_ok=True)
        target = target / "collect_cuda.json"
    begun, failed = time.monotonic(), []
    results: dict[str, object] = {"argv": sys.argv[1:]}
    for name in options.parts:
        least = PARTS[name][1]
        left = options.budget - (time.monotonic() - begun)
        print(f"=== {name} ({left:.0f} s left)", flush=True)
        if left < least:
            print(f"skipped: {left:.0f} s are left, it takes {least}")
            continue
        started = time.monotonic()
        piece = target.with_name(f"{target.stem}-{name}.json")
        wrong = run_part(name, piece, options.full, left)
        if wrong is not None:
            failed.append(f"{name} ({wrong})")
        if piece.exists():
            results[name] = json.loads(piece.read_text())
            piece.unlink()
        print(f"part {name} took {time.monotonic() - started:.1f} s", flush=True)
        target.write_text(json.dumps(results, indent=1, default=str))
    print(f"raw results: {target}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
