"""`make demo` as CI can run it: the job is trained for real, every step of the story works."""

from __future__ import annotations

import gzip
import json
import subprocess
from importlib import util

import pytest

needs_torch = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm[replay]'"
)


@needs_torch
@pytest.mark.slow
def test_demo_runs_from_training_to_prediction(repo, tmp_path, command_env):
    done = subprocess.run(
        ["bash", str(repo / "examples/demo.sh"), str(tmp_path / "out")],
        env=command_env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    exported = json.loads(gzip.decompress((tmp_path / "out/aligned.json.gz").read_bytes()))
    processes = {event["pid"] for event in exported["traceEvents"] if event["ph"] == "X"}
    assert len(processes) == 4
