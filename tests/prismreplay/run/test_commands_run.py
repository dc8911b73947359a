"""`prismreplay run`: what it computes, reports, and says when things go wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prismtrace as pt
from prismreplay.local_ranks import with_paths
from prismtrace.schema import TraceKind
from tests.end_to_end.sandboxes import calibrate

HERE = Path(__file__).parent
REPO = HERE.parents[2]
TOY = HERE / "programs" / "toy.py"
FEATURES = HERE.parent / "programs" / "features.py"
ENVIRONMENT = with_paths({**os.environ, "OMP_NUM_THREADS": "1"}, REPO)
PARTS = ("collectives", "messages", "groups", "restart")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", *map(str, words)]


def call(*words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*words), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def weights(text: str) -> list[str]:
    return re.findall(r"weights (\S+)", text)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A folder with the graph of three steps on four ranks, with made-up times, and tensors."""
    folder = tmp_path_factory.mktemp("toy")
    job = ("--world-size", 4, "--devices", 2, "--record-tensors", "all", "--show-rank", "all")
    done = call("prismreplay.cli", "collect", *job, "-o", folder / "bare.parquet", "--", TOY, 3)
    (folder / "weights").write_text(weights(done.stdout)[0])
    calibrate(folder / "bare.parquet", folder / "calibrated.parquet")
    return folder


def run(folder: Path, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    graph, tensors = folder / "calibrated.parquet", ("--tensors", folder / "bare.tensors")
    output = ("-o", folder / "run.parquet")
    return call("prismreplay.cli", "run", graph, *tensors, *output, *words, code=code)


def test_a_sandbox_rank_learns_what_it_would(toy):
    true = ("--compare", toy / "calibrated.parquet")
    # Odd: its objects are larger than recorded.
    done = run(toy, "--sandbox", "1", "--json", *true, "--", TOY, 3, "odd")
    assert weights(done.stderr) == [(toy / "weights").read_text()]
    report = json.loads(done.stdout)
    assert [one["step"] for one in report["steps"]] == [0, 1, 2]
    assert report["predicted_step_ns"] > 0
    assert all(one["measured_ns"] >= one["emulated_ns"] > 0 for one in report["steps"])
    assert report["missing_operations"] == report["repeated_operations"] == 0
    assert [group["transport"] for group in report["groups"]] == ["local"]
    assert {one["rank"] for one in report["memory"]} == {1}
    assert report["prefetched"]["hits"] > 0
    assert len(report["comparison"]["steps"]) == 3
    trace = pt.open(toy / "run.parquet")
    assert (trace.header.kind, trace.header.ranks) == (TraceKind.RECORDED, (1,))
    assert pt.validate(trace) == []
    call("prismtrace.cli", "export", toy / "run.parquet", "-o", toy / "run.json")
    events = json.loads((toy / "run.json").read_text())["traceEvents"]
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["pid"] for one in spans} == {1}
    assert {"step", "compute", "communication"} <= {one["cat"] for one in spans}
    assert all(one["dur"] >= 0 for one in spans)


@pytest.mark.slow
def test_two_ranks_checked(toy):
    done = run(toy, "--sandbox", "0,3", "--check", "--show-rank", "all", "--", TOY, 3)
    assert weights(done.stdout) == [(toy / "weights").read_text()] * 2
    assert "checked:           all that sandbox ranks sent is what was recorded" in done.stdout


@pytest.mark.slow
def test_all_ranks_are_real(toy):
    done = run(toy, "--sandbox", "0-3", "--json", "--", TOY, 3)
    assert weights(done.stderr) == [(toy / "weights").read_text()]
    assert [group["transport"] for group in json.loads(done.stdout)["groups"]] == ["real"]


@pytest.mark.slow
def test_longer_than_the_graph(toy):
    done = run(toy, "--sandbox", "2", "--json", "--", TOY, 6)
    report = json.loads(done.stdout)
    assert len(report["steps"]) == 6
    assert report["repeated_operations"] == 3
    assert [one["predicted_ns"] is None for one in report["steps"]] == [False] * 3 + [True] * 3


@pytest.mark.slow
def test_a_piece_that_counts_less(toy):
    spin = ("--spin", "name = 'computing'", "0.1")
    done = run(toy, "--sandbox", "2", *spin, "--json", "--", TOY, 3)
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["spun"] == 3


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("another", r"error: rank 0 makes barrier of 0 bytes .*toy.py:\d+ in <module>"),
        ("fails", r"RuntimeError: the program has a bug"),
        ("exits", r"error: rank 0 ended with exit code 3"),
    ],
)
def test_what_goes_wrong_is_told_first(toy, how, expected):
    started = time.monotonic()
    done = run(toy, "--", TOY, 3, how, code=1)
    assert re.search(expected, done.stderr), done.stderr
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_the_first_difference_from_the_recording(toy):
    done = run(toy, "--sandbox", "1", "--check", "--", TOY, 3, "other data", code=1)
    assert re.search(r"input 0 of all_reduce is not what was recorded .*rank=1 ", done.stderr)
    assert "toy.py:" in done.stderr


def test_nothing_says_what_virtual_ranks_send(toy):
    words = ("run", toy / "calibrated.parquet", "-o", toy / "x.parquet", "--", TOY, 3)
    done = call("prismreplay.cli", *words, code=1)
    assert "nothing says what virtual ranks contribute" in done.stderr
    assert "--tensors" in done.stderr


def test_spins_are_checked_before_anything_runs(toy):
    assert "'name ~" in run(toy, "--spin", "phase = 'x'", "0.1", "--", TOY, 3, code=1).stderr


def test_sandbox_ranks_of_the_job_only(toy):
    assert "there are 4 ranks" in run(toy, "--sandbox", "4", "--", TOY, 3, code=2).stderr


@pytest.mark.slow
def test_interrupted(toy):
    words = ("--tensors", toy / "bare.tensors", "-o", toy / "cut.parquet", "--", TOY, 3, "sleeps")
    process = subprocess.Popen(
        command("prismreplay.cli", "run", toy / "calibrated.parquet", *words),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "asleep" in line:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert (
        f"the 1 steps that all sandbox ranks finished are in {toy / 'cut.partial.parquet'}"
        in errors
    )
    assert not (toy / "cut.parquet").exists()
    assert not _processes(str(toy / "cut.parquet"))


def _processes(word: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in words:
                found.append(folder.name)
    return found


# --- every feature of torch.distributed -----------------------------------------------------


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    job = ("--world-size", 4, "--devices", 2, "--record-tensors", "all")
    program = (FEATURES, folder / "true", *PARTS)
    call("prismreplay.cli", "collect", *job, "-o", folder / "bare.parquet", "--", *program)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "0,2", "2-3", "0-3"])
def test_every_feature_among_virtual_ranks(features, tmp_path, ranks):
    words = ("--early", "--sandbox", ranks, "-o", tmp_path / "run.parquet", "--json")
    program = (FEATURES, tmp_path / "result", *PARTS)
    done = call("prismreplay.cli", "run", features / "bare.parquet", *words, "--", *program)
    sandbox = json.loads(done.stdout)["sandbox"]
    assert sandbox
    for rank in sandbox:
        found, true = (
            json.loads(Path(f"{prefix}.{rank}.json").read_text())["results"]
            for prefix in (tmp_path / "result", features / "true")
        )
        assert found == true
