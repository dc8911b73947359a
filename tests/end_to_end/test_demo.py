"""`make demo` as CI can run it: a job is emulated and run truly, and both are the same."""

from __future__ import annotations

import gzip
import json
import subprocess
from importlib import util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        util.find_spec("torch") is None,
        reason="needs torch: pip install 'prismllm-toolkit[replay]'",
    ),
]


def run_script(name, repo, out, environment):
    done = subprocess.run(
        ["bash", str(repo / "examples" / name), str(out)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_demo_emulates_a_job_and_compares_it_with_the_true_one(repo, tmp_path, command_env):
    printed = run_script("demo.sh", repo, tmp_path / "out", command_env)
    assert printed.count("losses and parameters the same, bit for bit") == 2
    assert "nodes of 8 ranks, the same" in printed
    notes = {path.stem for path in (tmp_path / "out/emulation").glob("*.json")}
    assert notes == {"collect", "comm-bench", "slice", "merge", "run"}


def test_traces_are_analysed_from_training_to_prediction(repo, tmp_path, command_env):
    run_script("analyse_traces.sh", repo, tmp_path / "out", command_env)
    exported = json.loads(gzip.decompress((tmp_path / "out/aligned.json.gz").read_bytes()))
    processes = {event["pid"] for event in exported["traceEvents"] if event["ph"] == "X"}
    assert len(processes) == 4
