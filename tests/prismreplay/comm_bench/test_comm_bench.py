"""Measured tables are what `prismcalib` reads. Two real processes over gloo."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import prismreplay
from prismcalib.comm_table import CommTable, Operation, read_comm_logs
from prismreplay.cli import app
from prismreplay.comm_bench.benchmark import bench_communications
from prismreplay.comm_bench.spec import BenchSpec
from prismreplay.errors import RankFailedError
from prismreplay.local_ranks import with_paths
from prismtrace.errors import OutputError

pytest.importorskip("torch")

FEW = ["--sizes", "1K,8K", "--rounds", "2"]


def test_a_table_of_two_ranks(tmp_path):
    path = tmp_path / "table.parquet"
    kinds = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,reduce,gather,scatter,send,barrier"
    answer = CliRunner().invoke(
        app, ["comm-bench", "--kinds", kinds, *FEW, "-o", str(path), "--json"]
    )
    assert answer.exit_code == 0, answer.output
    report = json.loads(answer.stdout)
    assert (report["ranks"], report["hosts"], report["skipped"]) == (2, 1, {})

    table = CommTable.open(path)
    assert table.sources == ("comm-bench over gloo, 2 ranks on 1 host",)
    assert set(table.times["kind"]) == set(kinds.split(","))
    assert table.times["samples"].to_list() == [2] * 19
    for kind in kinds.split(","):
        found = table.estimate(Operation(kind, "float32", 2, 1, 0 if kind == "barrier" else 4096))
        assert found is not None
        assert found.time_ns > 0
        assert not found.extrapolated
    # Nothing of the ranks is left.
    assert [each.name for each in tmp_path.iterdir()] == ["table.parquet"]


def test_a_table_beside_computation(tmp_path):
    path = tmp_path / "table.parquet"
    words = [
        "comm-bench",
        "--kinds",
        "all_reduce,reduce_scatter,send,barrier",
        *FEW,
        "--beside-computation",
    ]
    answer = CliRunner().invoke(app, [*words, "-o", str(path), "--json"])
    assert answer.exit_code == 0, answer.output
    table = CommTable.open(path)
    assert table.sources == ("comm-bench over gloo, 2 ranks on 1 host, beside computation",)
    assert table.times["samples"].to_list() == [2] * 7


@pytest.mark.slow
def test_samples_of_a_launchers_ranks(tmp_path):
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "prismreplay.cli"]
    words += ["comm-bench", "--kinds", "all_reduce", *FEW, "-o", "samples.csv"]
    answer = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=with_paths(os.environ, Path(prismreplay.__file__).parents[1]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    # Rank 0 alone says something.
    assert answer.stdout.count("next: prismcalib comm-table") == 1
    table = read_comm_logs([tmp_path / "samples.csv"])
    assert table.times["bytes"].to_list() == [1024, 8192]
    assert table.times["samples"].to_list() == [2, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kinds", "recv"], "'recv' is none of"),
        (["--sizes", "x"], "no size such as"),
        (["--group-sizes", "1"], "no numbers of members"),
        (["--dtype", "float"], "'float' is none of"),
        (["--backend", "mpi"], "'mpi' is none of"),
        (["--backend", "nccl", "--beside-computation"], "only gloo shares"),
    ],
)
def test_what_cannot_be_asked_for(words, said, tmp_path):
    answer = CliRunner().invoke(app, ["comm-bench", *words, "-o", str(tmp_path / "t.parquet")])
    assert answer.exit_code == 2
    assert said in " ".join(answer.output.split())


def test_groups_larger_than_the_world(tmp_path):
    words = ["--nproc", "2", "--group-sizes", "3", *FEW, "-o", str(tmp_path / "t.parquet")]
    answer = CliRunner().invoke(app, ["comm-bench", *words])
    assert "a group of 3 cannot be made of 2 ranks" in str(answer.exception)


def test_a_full_disk_is_what_is_told(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise RankFailedError("rank 0 ended with exit code 1")

    monkeypatch.setattr("prismreplay.comm_bench.benchmark.run_ranks", fail)
    monkeypatch.setattr("prismreplay.comm_bench.benchmark.refusal", lambda _: errno.ENOSPC)
    with pytest.raises(OutputError, match="No space left") as caught:
        bench_communications(BenchSpec(sizes=(1024,)), tmp_path / "table.parquet", ranks=2)
    assert caught.value.hint
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("prismreplay.comm_bench.benchmark.refusal", lambda _: None)
    with pytest.raises(RankFailedError):
        bench_communications(BenchSpec(sizes=(1024,)), tmp_path / "table.parquet", ranks=2)


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    def stop(_program, _ranks, _environment, logs):
        logs.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("prismreplay.comm_bench.benchmark.run_ranks", stop)
    with pytest.raises(KeyboardInterrupt):
        bench_communications(BenchSpec(sizes=(1024,)), tmp_path / "table.parquet", ranks=2)
    assert list(tmp_path.iterdir()) == []
