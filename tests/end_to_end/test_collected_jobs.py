"""A job collected on one or two devices is the job: same graph, same numbers, bit for bit.

Every shape of job runs truly, as one process a rank over gloo, plainly and under `prismreplay
record`; and under `prismreplay collect` with two ranks and with one rank at a time.
"""

from __future__ import annotations

import json
from importlib import util

import pytest

from tests.end_to_end.graphs import communications, describe_difference
from tests.end_to_end.sandboxes import JOBS, Job, program, results

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)

MEGATRON_JOBS = {
    "tp2-pp2-dp2": Job("megatron/train.py"),
    "distributed-optimizer": Job("megatron/train.py", "--distributed-optimizer", slow=True),
}


def _names(jobs):
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=slow if job.slow else []) for name, job in jobs.items()]


def _run(run_command, *words):
    done = run_command("prismreplay", *words)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _assert_switches_are_few(report):
    report = json.loads(report)
    assert report["context_switches"] <= report["naive_context_switches"]


@pytest.mark.parametrize("name", _names(JOBS))
def test_a_collected_job_is_the_true_one(name, truths, tmp_path, run_command):
    folder, job = truths(name), JOBS[name]
    expected, truth = results(folder / "true"), folder / "recorded.parquet"
    assert len(expected) == job.ranks
    assert results(folder / "recorded") == results(folder / "collected") == expected
    assert communications(truth) > job.ranks
    assert describe_difference(truth, folder / "bare.parquet") is None
    _assert_switches_are_few((folder / "bare.json").read_text())
    told = _run(
        run_command, "collect", "--world-size", job.ranks, "--devices", 1, "--json",
        "-o", tmp_path / "bare.parquet", "--", *program(job), "--results", tmp_path / "collected",
    )  # fmt: skip
    assert results(tmp_path / "collected") == expected
    assert describe_difference(truth, tmp_path / "bare.parquet") is None
    _assert_switches_are_few(told)


@pytest.mark.skipif(
    util.find_spec("megatron") is None or util.find_spec("megatron.core") is None,
    reason="needs Megatron-core: pip install --no-deps megatron-core==0.16.1",
)
@pytest.mark.parametrize("name", _names(MEGATRON_JOBS))
def test_a_program_that_nobody_here_wrote(name, repo, tmp_path, run_command):
    job, truth = MEGATRON_JOBS[name], tmp_path / "true.parquet"
    words = [repo / "examples" / job.script, *job.flags.split(), "--steps", "2", "--results"]
    record = ["record", "--nproc-per-node", job.ranks, "-o", truth]
    _run(run_command, *record, "--", *words, tmp_path / "true")
    expected = results(tmp_path / "true")
    assert len(expected) == job.ranks
    assert communications(truth) > job.ranks
    for devices in (2, 1):
        graph, found = tmp_path / f"bare-{devices}.parquet", tmp_path / f"results-{devices}"
        collect = ["collect", "--world-size", job.ranks, "--devices", devices, "-o", graph]
        told = _run(run_command, *collect, "--json", "--", *words, found)
        assert results(found) == expected
        assert describe_difference(truth, graph) is None
        _assert_switches_are_few(told)
