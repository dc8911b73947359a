"""A job collected on one or two devices is the job: same graph, same numbers, bit for bit.

Every shape of job runs three times: truly, as one process a rank over gloo (`prismreplay
record`), and under `prismreplay collect` with two ranks and with one rank at a time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.graphs import communications, describe_difference

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm[replay]'"
)


@dataclass(frozen=True)
class Job:
    script: str
    flags: str = ""
    ranks: int = 8
    slow: bool = False


JOBS = {
    "dp8": Job("train_gpt.py"),
    "tp2-dp4": Job("train_gpt.py", "--tp 2"),
    "pp4-dp2": Job("train_gpt.py", "--pp 4"),
    "pp4-dp2-interleaved": Job("train_gpt.py", "--pp 4 --layers 8 --schedule interleaved"),
    "tp2-pp2-dp2": Job("train_gpt.py", "--tp 2 --pp 2"),
    "fsdp2-8": Job("train_gpt.py", "--fsdp 8"),
    "ep4-dp2": Job("train_moe.py", "--ep 4"),
    "pp2-zero-bubble": Job("train_gpt.py", "--pp 2 --schedule zero-bubble", ranks=4, slow=True),
    "pp2-zbv": Job("train_gpt.py", "--pp 2 --schedule zbv", ranks=2, slow=True),
    "hsdp-2-2-tp2": Job("train_gpt.py", "--fsdp 2 --tp 2", slow=True),
}
MEGATRON_JOBS = {
    "tp2-pp2-dp2": Job("megatron/train.py"),
    "distributed-optimizer": Job("megatron/train.py", "--distributed-optimizer", slow=True),
}


def _cases(jobs: dict[str, Job]) -> list[Any]:
    return [
        pytest.param(job, id=name, marks=[pytest.mark.slow] if job.slow else [])
        for name, job in jobs.items()
    ]


def _results(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def _assert_collects_truly(job: Job, repo: Path, folder: Path, run_command: Any) -> None:
    program = [repo / "examples" / job.script, *job.flags.split(), "--steps", "2"]
    truth, true_results = folder / "true.parquet", folder / "true-results"
    done = run_command(
        "prismreplay", "record", "--nproc-per-node", job.ranks, "-o", truth,
        "--", *program, "--results", true_results,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    expected = _results(true_results)
    assert len(expected) == job.ranks
    assert communications(truth) > job.ranks
    for devices in (2, 1):
        graph, results = folder / f"bare-{devices}.parquet", folder / f"results-{devices}"
        done = run_command(
            "prismreplay", "collect", "--world-size", job.ranks, "--devices", devices,
            "-o", graph, "--json", "--", *program, "--results", results,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        assert _results(results) == expected
        assert describe_difference(truth, graph) is None
        report = json.loads(done.stdout)
        assert report["context_switches"] <= report["naive_context_switches"]


@pytest.mark.parametrize("job", _cases(JOBS))
def test_a_collected_job_is_the_true_one(job, repo, tmp_path, run_command):
    _assert_collects_truly(job, repo, tmp_path, run_command)


@pytest.mark.skipif(
    util.find_spec("megatron") is None or util.find_spec("megatron.core") is None,
    reason="needs Megatron-core: pip install --no-deps megatron-core==0.16.1",
)
@pytest.mark.parametrize("job", _cases(MEGATRON_JOBS))
def test_a_program_that_nobody_here_wrote(job, repo, tmp_path, run_command):
    _assert_collects_truly(job, repo, tmp_path, run_command)
