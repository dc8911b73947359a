"""Run a script with all its ranks truly there, on fewer GPUs than ranks, through NCCL.

    python benchmarks/gpu/plain_run.py --ranks 8 [--memory-cap GIB] [--out FILE] -- train.py ...

Each rank is a process that takes itself for a host of its own (NCCL_HOSTID; LOCAL_RANK is 0): NCCL
then lets several of them use one GPU, over sockets. Losses and memory are those of a true run;
times mean nothing. Nothing of prismreplay is in the ranks' way.

From Python: `plain_run` (see there); the GPU's numbers of each rank are `PlainRank`s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

_NUMBERS = "gpu-{}.json"
_RESULTS = "results"


@dataclass(frozen=True)
class PlainRank:
    """What one rank had at its end.

    `peak_bytes` is torch.cuda.max_memory_allocated(), `reserved_bytes` max_memory_reserved(),
    `requested_bytes` the most that was asked for before it was rounded up; `allocations` how many
    there were. `losses` are of the script's `--results`, empty without. `failed` is how it ended
    if not well.
    """

    rank: int
    peak_bytes: int
    reserved_bytes: int
    requested_bytes: int
    allocations: int
    losses: tuple[float, ...] = ()
    parameters: str = ""
    failed: str | None = None


@dataclass(frozen=True)
class PlainRun:
    """A run; `failed` is the report of one that failed, with the end of the log."""

    ranks: tuple[PlainRank, ...]
    wall_s: float
    failed: str | None = None


def plain_run(
    words: Sequence[str],
    ranks: int,
    folder: Path,
    *,
    results: bool = True,
    limit_s: int = 150,
    memory_cap_gib: float | None = None,
    mock_router: Path | None = None,
    environment: dict[str, str] | None = None,
) -> PlainRun:
    """Run a script to its end.

    Args:
        words: the script and its arguments.
        ranks: of the job; rank r uses GPU r modulo their number.
        folder: for logs (`rank-0000.log` ...) and what ranks leave; made if it is not there.
        results: the script takes ``--results FOLDER`` as examples/train_*.py do; its losses and
            the hash of its parameters are read.
        limit_s: a rank that lives longer is killed.
        memory_cap_gib: what torch may allocate in each rank; more is out of memory.
        mock_router: shares of tokens that experts get, as for `prismreplay collect`.
        environment: in place of this process's.

    A run that fails is no exception: see `PlainRun.failed`, and `PlainRank.failed`.
    """
    from prismreplay.collect.logs import RankLogs
    from prismreplay.collect.programs import ProgramCall
    from prismreplay.errors import RankFailedError
    from prismreplay.local_ranks import run_ranks, with_paths

    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(_NUMBERS.format("*")):
        old.unlink()
    mine = ["--as-rank", "--folder", str(folder), "--limit", str(limit_s)]
    if memory_cap_gib is not None:
        mine += ["--memory-cap", str(memory_cap_gib)]
    if mock_router is not None:
        mine += ["--mock-router", str(mock_router)]
    script = [*words, *(["--results", str(folder / _RESULTS)] if results else [])]
    variables = {"OMP_NUM_THREADS": "1", **(os.environ if environment is None else environment)}
    logs = RankLogs(folder, ranks, ())
    logs.prepare()
    program = ProgramCall(__file__, (*mine, "--", *script))
    begun, failed = time.monotonic(), None
    try:
        run_ranks(program, ranks, with_paths(variables, REPO), logs)
    except RankFailedError as error:
        failed = f"{error}\n{error.report}"
    wall_s = time.monotonic() - begun
    return PlainRun(tuple(_read(folder, rank) for rank in range(ranks)), wall_s, failed)


def _read(folder: Path, rank: int) -> PlainRank:
    numbers = folder / _NUMBERS.format(rank)
    if not numbers.exists():
        return PlainRank(rank, 0, 0, 0, 0, failed="killed before it could tell")
    told = json.loads(numbers.read_text())
    found = sorted((folder / _RESULTS).glob("rank-*.json")) if not told["failed"] else []
    mine = [one for one in found if int(one.stem.partition("-")[2]) == rank]
    if mine:
        said = json.loads(mine[0].read_text())
        told["losses"] = tuple(float.fromhex(loss) for loss in said["losses"])
        told["parameters"] = said["parameters"]
    return PlainRank(rank, **told)


# --- in a rank -------------------------------------------------------------------------------


def alone_on_its_host(rank: int) -> None:
    """Have NCCL and the script take this process for a host; before torch is imported."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    tokens = shown.split(",") if shown else _all_gpus()
    if tokens:
        os.environ["CUDA_VISIBLE_DEVICES"] = tokens[rank % len(tokens)]
    os.environ.update(
        NCCL_HOSTID=f"host-{rank}",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"],
    )
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")


def _all_gpus() -> list[str]:
    from prismreplay.collect.gpus import Nvml

    nvml = Nvml.load()
    return [] if nvml is None else [str(number) for number in range(nvml.count())]


def run_as_rank(options: argparse.Namespace) -> None:
    """Run the script in this process, and leave the GPU's numbers."""
    from prismreplay.collect.programs import program_of

    rank, cap_gib = int(os.environ["RANK"]), options.memory_cap
    signal.alarm(options.limit)
    alone_on_its_host(rank)
    import torch

    if cap_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / total))
    if options.mock_router is not None:
        from prismreplay import mock_router

        mock_router.install(mock_router.read_routing(options.mock_router))
    failed: str | None = "ended early"
    try:
        program_of(options.words).run()
        failed = None
    except SystemExit as end:
        failed = None if not end.code else f"exit code {end.code}"
        raise
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        numbers = {"failed": failed, **_numbers(torch)}
        (options.folder / _NUMBERS.format(rank)).write_text(json.dumps(numbers))


def _numbers(torch) -> dict[str, int]:
    if not torch.cuda.is_initialized():
        return dict.fromkeys(("peak_bytes", "reserved_bytes", "requested_bytes", "allocations"), 0)
    stats = torch.cuda.memory_stats()
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "requested_bytes": stats.get("requested_bytes.all.peak", 0),
        "allocations": stats.get("allocation.all.allocated", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=150, help="seconds that a rank may live")
    parser.add_argument("--memory-cap", type=float, help="GiB that torch may allocate in a rank")
    parser.add_argument("--mock-router", type=Path, help="shares of tokens that experts get")
    parser.add_argument("--no-results", action="store_true", help="the script has no --results")
    parser.add_argument("--out", type=Path, help="JSON of what ranks had")
    parser.add_argument("--folder", type=Path, help="keep logs here")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="+", help="after --: the script and its arguments")
    options = parser.parse_args()
    if options.as_rank:
        run_as_rank(options)
        return
    with tempfile.TemporaryDirectory() as name:
        run = plain_run(
            options.words,
            options.ranks,
            options.folder or Path(name),
            results=not options.no_results,
            limit_s=options.limit,
            memory_cap_gib=options.memory_cap,
            mock_router=options.mock_router,
        )
    print("| rank | peak bytes | reserved bytes | allocations | losses |\n" + "|---" * 5 + "|")
    for one in run.ranks:
        said = one.failed or " ".join(f"{loss:.4f}" for loss in one.losses)
        cells = (one.rank, one.peak_bytes, one.reserved_bytes, one.allocations, said)
        print("| " + " | ".join(map(str, cells)) + " |")
    print(f"{run.wall_s:.1f} s")
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(run), indent=1))
    if run.failed:
        sys.exit(run.failed)


if __name__ == "__main__":
    main()
