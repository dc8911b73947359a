"""A run with an assistant: what is reported, and what becomes of it when the assistant dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prismreplay.local_ranks import with_paths

pytest.importorskip("torch")

HERE = Path(__file__).parent
PROGRAM = HERE / "programs" / "kills_an_assistant.py"
ENVIRONMENT = with_paths({**os.environ, "OMP_NUM_THREADS": "1"}, HERE.parents[2])


def prismreplay(*words):
    command = [sys.executable, "-m", "prismreplay.cli", *map(str, words)]
    return subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "bare.parquet"
    words = ("--world-size", 3, "--record-tensors", "all", "-o", path, "--", PROGRAM)
    done = prismreplay("collect", *words)
    assert done.returncode == 0, done.stderr
    return path


def run(graph, tmp_path, *words):
    options = ("--early", "--sandbox", 1, "--transport", "reduced", "-o", tmp_path / "run.parquet")
    return prismreplay("run", graph, *options, *words)


@pytest.mark.slow
def test_the_report_says_what_the_small_group_measured(graph, tmp_path):
    done = run(graph, tmp_path, "--json", "--", PROGRAM)
    assert done.returncode == 0, done.stderr
    # 1 + 1 + 1, and three times that.
    assert "sum 36.0" in done.stderr
    report = json.loads(done.stdout)
    (group,) = report["groups"]
    assert (group["transport"], group["size"], group["sandbox"]) == ("reduced", 3, [1])
    assert group["reduced_transfer_ns"] > 0
    assert group["assistant_late_ns"] >= 0
    assert report["transfer_sources"] == {"reduced": 2}


@pytest.mark.slow
def test_small_groups_give_the_exact_result_but_for_rounding(graph, tmp_path):
    done = run(graph, tmp_path, "--check", "--json", "--", PROGRAM)
    assert done.returncode == 0, done.stderr
    (group,) = json.loads(done.stdout)["groups"]
    assert group["compared"] == 2
    assert group["largest_difference"] <= 1


@pytest.mark.slow
def test_a_lost_assistant_ends_the_run_at_once(graph, tmp_path):
    started = time.monotonic()
    done = run(graph, tmp_path, "--", PROGRAM, "now")
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "assistant 0" in done.stderr or "rank 1 failed" in done.stderr
    assert not (tmp_path / "run.parquet").exists()
    assert time.monotonic() - started < 60


def test_assistants_belong_to_the_reduced_transport():
    done = prismreplay("run", "x.parquet", "--assistants", 2, "--", PROGRAM)
    assert done.returncode == 2
    assert "--assistants belongs to --transport reduced" in done.stderr
