"""One NCCL rank per virtual rank on one GPU, against pruned communication and timed holds.

    python benchmarks/gpu/vanilla.py --out FOLDER [--ranks 2 4] [--budget SECONDS]

What it takes to have every rank there: N processes whose NCCL takes them for N hosts (sockets
between them; the GPU switches between their contexts), each with its context and its buffers. What
replaces it: one process in which the pruned ring or tree plays the virtual ranks, or in which a
timed hold stands for them (`local`). For each: latency of an all-reduce from call to completion, memory of
the GPU, and seconds until the end of the first all-reduce: from the start of the processes; of the pruned
ways, which share one process, its own start and what the way itself needs.

Memory is what the driver's monitoring says of the whole GPU, before and after: nobody else may use it.
`plain_run.py` beside this runs whole scripts the first way. Parts that fail are told, the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.plain_run import alone_on_its_host  # noqa: E402

MIB = 1 << 20
SIZES = (MIB, 16 * MIB)
REPEATS = {MIB: 12, 16 * MIB: 4}
"""Of NCCL among ranks that share a GPU, which takes milliseconds to hundreds of them."""
PRUNED_REPEATS = 50
HOLD_NS = 100_000
RANK_LIMIT_S = 50


# --- every rank a process --------------------------------------------------------------------


def be_a_rank(folder: Path) -> None:
    """One NCCL rank: rank 0 leaves what was measured."""
    signal.alarm(RANK_LIMIT_S)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone_on_its_host(rank)
    import torch
    import torch.distributed as dist

    def everybody(name: str) -> None:
        store.add(name, 1)
        while store.add(name, 0) < size:
            time.sleep(0.005)

    torch.ones(1, device="cuda")
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0
    )
    everybody("contexts")
    found = {"import_and_context_s": time.time() - float(os.environ["STARTED"])}
    used = _used()
    everybody("seen")
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    tensor = torch.ones(SIZES[0] // 4, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    found["first_all_reduce_s"] = time.time() - float(os.environ["STARTED"])
    everybody("communicators")
    found |= {"used_with_contexts": used, "used_with_nccl": _used()}
    everybody("seen again")
    for size_bytes in SIZES:
        data = torch.zeros(size_bytes // 4, device="cuda")
        times = []
        for number in range(REPEATS[size_bytes] + 2):
            dist.barrier()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            dist.all_reduce(data)
            torch.cuda.synchronize()
            if number >= 2:
                times.append((time.perf_counter() - begun) * 1e6)
        found[f"us of {size_bytes} B"] = statistics.median(times)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _stay_on_one_gpu() -> None:
    """All that this process starts uses the first GPU that it sees."""
    from prismreplay.collect.gpus import Nvml, find_gpus

    gpus = find_gpus(Nvml.load())
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[0].token


def _used() -> int | None:
    """Bytes of the GPU that anybody has; no context is made by asking."""
    from prismreplay.collect.gpus import Nvml, find_gpus

    nvml = Nvml.load()
    gpus = [] if nvml is None else find_gpus(nvml)
    memory = nvml.memory(gpus[0].token) if gpus else None
    return None if memory is None else memory[1]


def every_rank(ranks: int) -> dict[str, object]:
    """N ranks through NCCL on one GPU."""
    from prismreplay.collect.logs import RankLogs
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.errors import RankFailedError
    from prismreplay.local_ranks import run_ranks

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = _used()
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "STARTED": str(time.time())}
        logs = RankLogs(folder, ranks, ())
        logs.prepare()
        program = ProgramCall(__file__, ("--as-rank", str(folder)))
        try:
            run_ranks(program, ranks, variables, logs)
        except RankFailedError as error:
            raise RuntimeError(f"{error}\n{error.report}") from error
        found = json.loads((folder / "found.json").read_text())
    contexts, nccl = found.pop("used_with_contexts"), found.pop("used_with_nccl")
    if before is not None:
        found["MB of contexts"] = (contexts - before) / 1e6
        found["MB of buffers"] = (nccl - contexts) / 1e6
        found["MB a rank"] = (nccl - before) / ranks / 1e6
    return {"how": "every rank through NCCL", "ranks": ranks, **found}


# --- one process -----------------------------------------------------------------------------


def be_the_only_one(cases: list[tuple[str, int]]) -> None:
    """The pruned ways, in a process of their own: prints what was measured, one line a way."""
    signal.alarm(RANK_LIMIT_S)
    before = _used()
    import torch

    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    started_s = time.time() - float(os.environ["STARTED"])
    contexts = _used()
    for how, size in cases:
        row: dict[str, object] = {"how": how, "ranks": size, "import_and_context_s": started_s}
        if before is not None and contexts is not None:
            row["MB of contexts"] = (contexts - before) / 1e6
        try:
            row |= one_way(how, size, started_s)
        except Exception:  # noqa: BLE001  the rest goes on
            row["failed"] = traceback.format_exc()
        print("ROW", json.dumps(row), flush=True)


def one_way(how: str, size: int, started_s: float) -> dict[str, object]:
    """Latency and memory of one way."""
    import torch

    found: dict[str, object] = {}
    for number, size_bytes in enumerate(SIZES):
        torch.cuda.empty_cache()
        begun, before = time.perf_counter(), _used()
        call, check, extra = (held if how == "local" else pruned)(how, size, size_bytes)
        call()
        torch.cuda.synchronize()
        if number == 0:
            found["first_all_reduce_s"] = started_s + time.perf_counter() - begun
            found["MB of buffers"] = extra / 1e6
            after = _used()
            if before is not None and after is not None:
                found["MB of buffers, as the driver sees it"] = (after - before) / 1e6
        times = []
        for repeat in range(PRUNED_REPEATS + 5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if repeat >= 5:
                times.append((time.perf_counter() - begun) * 1e6)
        check()
        found[f"us of {size_bytes} B"] = statistics.median(times)
    if how == "local":
        found["us held of these"] = HOLD_NS / 1e3
    return found


def pruned(how: str, size: int, size_bytes: int):
    """A launch of ring or tree: sandbox rank 0 and the assistant that plays the others."""
    import torch

    from prismreplay.plugin.communicating import PrunedCommunication, link_memory
    from prismreplay.plugin.ring_schedule import ring_all_reduce
    from prismreplay.plugin.tables import Layout
    from prismreplay.plugin.tree_schedule import tree_all_reduce

    count = size_bytes // 4
    if how == "pruned ring":
        schedule = ring_all_reduce(size, [0], count, align=4)
    else:
        schedule = tree_all_reduce(size, [0], count, align=4, pieces=4)
    layout = Layout(channels=8)
    memory = link_memory(schedule, layout)
    communication = PrunedCommunication(
        schedule, torch.float32, memory, layout, limit_ns=5_000_000_000
    )
    buffers = {}
    for role in schedule.roles:
        length = schedule.data_counts[role]
        buffers[role] = (
            torch.ones(schedule.source_counts[role], device="cuda"),
            torch.empty(length, device="cuda"),
        )
    mine = sum(layout.bytes_of(schedule, role) for role in schedule.roles)
    return (lambda: communication.launch(buffers)), communication.check, mine


def held(how: str, size: int, size_bytes: int):  # noqa: ARG001
    """What the virtual ranks give, added to what is here; then held until `HOLD_NS` have passed."""
    import torch

    from prismreplay.plugin.compensating import compensate
    from prismreplay.plugin.holds import DeviceHolder

    holder = DeviceHolder()
    stamps = holder.times(1)
    own, others = (torch.ones(size_bytes // 4, device="cuda") for _ in range(2))

    def call() -> None:
        holder.stamp(stamps)
        compensate(others, [own], out=own)
        holder.hold_after(stamps, HOLD_NS)

    return call, (lambda: None), size_bytes


def only_one(cases: list[tuple[str, int]]) -> list[dict[str, object]]:
    """`be_the_only_one`, and what it printed, whole or not."""
    from prismreplay.local_ranks import with_paths

    words = [f"{how}:{size}" for how, size in cases]
    done = subprocess.run(
        [sys.executable, __file__, "--alone", *words],
        env=with_paths({**os.environ, "STARTED": str(time.time())}, REPO),
        capture_output=True,
        text=True,
        check=False,
        timeout=RANK_LIMIT_S + 5,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    rows = [json.loads(line.removeprefix("ROW ")) for line in lines]
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-4000:]
        rows.append({"how": "one process", "failed": f"exit code {done.returncode}: {said}"})
    return rows


# --- all -------------------------------------------------------------------------------------


def table(rows: list[dict[str, object]]) -> list[str]:
    """As text, one row a case."""
    heads = list(dict.fromkeys(key for row in rows for key in row if key != "failed"))
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.get(head, "failed" if "failed" in row else "") for head in heads]
        shown = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--budget", type=float, default=140, help="seconds")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        be_a_rank(options.as_rank)
        return
    if options.alone:
        pairs = (word.rpartition(":") for word in options.alone)
        be_the_only_one([(how, int(size)) for how, _, size in pairs])
        return
    options.out.mkdir(parents=True, exist_ok=True)
    _stay_on_one_gpu()
    until = time.monotonic() + options.budget
    cases = [("local", max(options.ranks))]
    for size in (*options.ranks, 128):
        cases += [("pruned ring", size), ("pruned tree", size)]
    # What takes seconds first, and NCCL with few ranks before NCCL with many.
    parts = [("one process", lambda: only_one(cases))]
    sizes = sorted(options.ranks)
    parts += [(f"NCCL, {size} ranks", partial(every_rank, size)) for size in sizes]
    rows: list[dict[str, object]] = []
    for name, measure in parts:
        # Each NCCL rank imports torch, connects to all others over sockets and shares the GPU.
        if time.monotonic() + 20 > until:
            print(f"no time left for {name}", flush=True)
            continue
        begun = time.monotonic()
        try:
            found = measure()
            rows += found if isinstance(found, list) else [found]
        except Exception:  # noqa: BLE001  the rest goes on
            rows.append({"how": name, "failed": traceback.format_exc()})
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
        (options.out / "vanilla.json").write_text(json.dumps(rows, indent=1))
    for row in rows:
        if "failed" in row:
            print(f"{row['how']}, {row.get('ranks', '')} ranks: {row['failed']}", flush=True)
    print("\n".join(table(rows)))
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
