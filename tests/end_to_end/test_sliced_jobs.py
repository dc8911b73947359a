"""A job sliced two ranks at a time is the job: same graph, same numbers, a time for everything."""

from __future__ import annotations

import json
from importlib import util

import pytest

from tests.end_to_end.graphs import communications, describe_difference

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)

# Flags of a job of 4 ranks -> which ranks are real together.
JOBS = {
    "dp4": ("", ["0-1", "2-3"]),
    "tp2-dp2": ("--tp 2", ["0-1", "2-3"]),
    "pp2-dp2": ("--pp 2", ["0, 2", "1, 3"]),
}


def results(folder):
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("flags", "slices"), JOBS.values(), ids=JOBS)
def test_a_sliced_job_merges_into_a_calibrated_trace(flags, slices, repo, tmp_path, run_command):
    program = [
        repo / "examples" / "train_gpt.py", *flags.split(), "--steps", 2, "--layers", 2,
    ]  # fmt: skip
    graph = tmp_path / "bare.parquet"
    done = run_command(
        "prismreplay", "collect", "--world-size", 4, "--record-tensors", "all", "-o", graph,
        "--", *program, "--results", tmp_path / "collected",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    done = run_command(
        "prismreplay", "slice", graph, "--sandbox-size", 2, "-o", tmp_path / "slices", "--json",
        "--", *program, "--results", tmp_path / "sliced",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["ran"] == len(slices)
    # Among virtual ranks each rank computes what it computes in the whole job, bit for bit.
    assert results(tmp_path / "sliced") == results(tmp_path / "collected")

    aligned = tmp_path / "aligned.parquet"
    done = run_command(
        "prismcalib", "merge", *sorted((tmp_path / "slices").glob("slice-*.parquet")),
        "--bare", graph, "-o", aligned, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    merged = json.loads(done.stdout)
    assert [one["ranks"] for one in merged["executions_seen"]] == slices
    assert merged["checked_against"] == "the bare graph"
    assert (merged["unmatched"], merged["late_virtual"], merged["resized"]) == (0, 0, 0)
    assert merged["step_ns"] > 0
    # Whole groups were measured; the others' transfers are said to be unknown.
    assert set(merged["sources"]) == ({"none", "measured"} if flags else {"none"})
    assert sum(merged["sources"].values()) == communications(graph)
    assert describe_difference(graph, aligned) is None
