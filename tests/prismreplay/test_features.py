"""Every feature of torch.distributed under us and under plain gloo: the same bits.

`programs/features.py` is an ordinary program. It runs here as plain processes over gloo, then
recorded, then collected with two ranks at a time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from prismreplay.local_ranks import with_paths

pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent / "programs"
REPO = PROGRAMS.parents[2]
RANKS = 4
ENVIRONMENT = with_paths({**os.environ, "OMP_NUM_THREADS": "1"}, REPO)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _plain(prefix: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, PROGRAMS / "features.py", prefix],
            env={**ENVIRONMENT, **address, "RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, errors[0][-2000:]


def _run(*words: object) -> None:
    command = [sys.executable, "-m", "prismreplay.cli", *map(str, words)]
    answer = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-4000:]


def _results(prefix: Path) -> list[dict[str, str]]:
    return [
        json.loads(Path(f"{prefix}.{rank}.json").read_text(encoding="utf-8"))["results"]
        for rank in range(RANKS)
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("plain") / "result"
    _plain(prefix)
    return _results(prefix)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    program = (PROGRAMS / "features.py", folder / "result")
    _run("record", "--nproc-per-node", RANKS, "-o", folder / "t.parquet", "--", *program)
    return folder


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected")
    program = (PROGRAMS / "features.py", folder / "result")
    size = ("--world-size", RANKS, "--devices", 2)
    _run("collect", *size, "-o", folder / "t.parquet", "--", *program)
    return folder


@pytest.mark.slow
def test_recorded_run_computes_what_the_plain_run_does(plain, recorded):
    assert _results(recorded / "result") == plain


@pytest.mark.slow
def test_collected_run_computes_what_the_plain_run_does(plain, collected):
    assert _results(collected / "result") == plain


@pytest.mark.slow
def test_both_graphs_are_one(recorded, collected):
    import polars as pl

    times = ["start_ns", "dur_ns", "transfer_ns", "transfer_source", "mem_bytes", "mem_peak_bytes"]
    one, other = (
        pl.read_parquet(folder / "t.parquet").drop(times) for folder in (recorded, collected)
    )
    # From whom a receive from anyone came is chance, and with it the number of the message.
    chance = pl.col("kind").cast(pl.String) == "recv"
    assert one.height == other.height
    assert one.drop("seq", "peer").equals(other.drop("seq", "peer"), null_equal=True)
    assert one.filter(~chance).equals(other.filter(~chance), null_equal=True)


@pytest.mark.slow
def test_what_gloo_cannot_do(tmp_path):
    program = PROGRAMS / "beyond_gloo.py"
    size = ("--world-size", RANKS, "--devices", 2)
    _run("collect", *size, "-o", tmp_path / "t.parquet", "--", program)
