"""One NCCL rank per virtual rank on one GPU, against pruned communication and timed holds.

    python benchmarks/gpu/vanilla.py --out FOLDER [--ranks 2 4 8] [--budget SECONDS]

What it takes to have every rank there: N processes whose NCCL takes them for N hosts (sockets
between them; the GPU switches between their contexts), each with its context and its buffers. What
replaces it: one process in which the pruned ring or tree plays the virtual ranks, or in which a
timed hold stands for them (`local`). For each: latency of an all-reduce, memory of the GPU for each
rank, and seconds from the start of the process to the end of its first all-reduce.

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
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from benchmarks.gpu.plain_run import alone_on_its_host  # noqa: E402

MIB = 1 << 20
SIZES = (MIB, 16 * MIB)
REPEATS = {MIB: 30, 16 * MIB: 6}
RANK_LIMIT_S = 60


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


def _used() -> int:
    """Bytes of the GPU that anybody has."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def every_rank(ranks: int) -> dict[str, object]:
    """N ranks through NCCL on one GPU."""
    from prismreplay.collect.logs import RankLogs
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.errors import RankFailedError
    from prismreplay.local_ranks import run_ranks

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = _used_from_outside()
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
        found["context MB a rank"] = (contexts - before) / ranks / 1e6
    found["NCCL MB a rank"] = (nccl - contexts) / ranks / 1e6
    return {"how": "every rank through NCCL", "ranks": ranks, **found}


def _used_from_outside() -> int | None:
    """As `_used`, without a context of this process."""
    from prismreplay.collect.gpus import Nvml, find_gpus

    nvml = Nvml.load()
    gpus = [] if nvml is None else find_gpus(nvml)
    memory = nvml.memory(gpus[0].token) if gpus else None
    return None if memory is None else memory[1]


# --- one process -----------------------------------------------------------------------------


def be_the_only_one(how: str, size: int) -> None:
    """The pruned way, in a process of its own: prints what was measured."""
    signal.alarm(RANK_LIMIT_S)
    before = _used_from_outside()
    import torch

    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    found: dict[str, object] = {"import_and_context_s": time.time() - float(os.environ["STARTED"])}
    used = _used()
    if before is not None:
        found["context MB a rank"] = (used - before) / 1e6
    for number, size_bytes in enumerate(SIZES):
        call, check, extra = (held if how == "local" else pruned)(how, size, size_bytes)
        call()
        torch.cuda.synchronize()
        if number == 0:
            found["first_all_reduce_s"] = time.time() - float(os.environ["STARTED"])
        times = []
        for repeat in range(REPEATS[size_bytes] + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if repeat >= 2:
                times.append((time.perf_counter() - begun) * 1e6)
        check()
        found[f"us of {size_bytes} B"] = statistics.median(times)
        if number == 0:
            found["plugin MB in all"] = extra / 1e6
    print(json.dumps({"how": how, "ranks": size, **found}))


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
    """What the virtual ranks give, added to what is here; then held until 100 us have passed."""
    import torch

    from prismreplay.plugin.compensating import compensate
    from prismreplay.plugin.holds import DeviceHolder

    holder = DeviceHolder()
    stamps = holder.times(1)
    own, others = (torch.ones(size_bytes // 4, device="cuda") for _ in range(2))

    def call() -> None:
        holder.stamp(stamps)
        compensate(others, [own], out=own)
        holder.hold_after(stamps, 100_000)

    return call, (lambda: None), size_bytes


def only_one(how: str, size: int) -> dict[str, object]:
    """`be_the_only_one`, and what it printed."""
    from prismreplay.local_ranks import with_paths

    done = subprocess.run(
        [sys.executable, __file__, "--alone", how, "--ranks", str(size)],
        env=with_paths({**os.environ, "STARTED": str(time.time())}, REPO),
        capture_output=True,
        text=True,
        check=False,
        timeout=RANK_LIMIT_S + 5,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


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
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--budget", type=float, default=140, help="seconds")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        be_a_rank(options.as_rank)
        return
    if options.alone:
        be_the_only_one(options.alone, options.ranks[0])
        return
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.budget
    cases = [("local", max(options.ranks))]
    for size in options.ranks:
        cases += [("nccl", size), ("pruned ring", size), ("pruned tree", size)]
    cases += [("pruned ring", 128), ("pruned tree", 128)]
    rows: list[dict[str, object]] = []
    for how, size in cases:
        if time.monotonic() + 30 > until:
            print(f"no time left for {how}, {size} ranks", flush=True)
            continue
        try:
            rows.append(every_rank(size) if how == "nccl" else only_one(how, size))
        except Exception:  # noqa: BLE001  the rest goes on
            rows.append({"how": how, "ranks": size, "failed": traceback.format_exc()})
            print(f"{how}, {size} ranks: {rows[-1]['failed']}", flush=True)
        else:
            print(json.dumps(rows[-1]), flush=True)
        (options.out / "vanilla.json").write_text(json.dumps(rows, indent=1))
    print("\n".join(table(rows)))
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()
