"""Jobs emulated on a GPU: losses, memory and times of a rank, beside those of the true job.

What needs torch to start is started at once, for all jobs: emulations on the first GPU, true jobs on the last.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu.emulate_cuda import EVERYTHING, device_of, emulate
from benchmarks.gpu.plain_run import plain_run
from prismreplay.collect.gpus import Nvml, find_gpus

pytestmark = pytest.mark.gpu

STEPS = 3
GPT = (
    *("--layers", "2", "--hidden", "128", "--heads", "4", "--length", "64"),
    *("--steps", str(STEPS)),
)
MIRRORED = "mirrored"
JOBS = {
    "ddp-tp": (4, "train_gpt.py", *GPT, "--tp", "2"),
    "fsdp": (2, "train_gpt.py", *GPT, "--fsdp", "2"),
    "pp": (4, "train_gpt.py", *GPT, "--pp", "2"),
    "moe": (2, "train_moe.py", "--hidden", "128", "--steps", str(STEPS)),
}
WITH_PAUSES = Path(__file__).with_name("programs") / "with_pauses.py"
LIMIT_S = 280  # CPUs of one kind of machine differ by two, and other tests may run beside


@pytest.fixture(scope="module")
def runs(request, repo, tmp_path_factory):
    """All jobs that are asked for, side by side: times are not looked at."""
    here = [one for one in request.session.items if one.path == request.path]
    wanted = {one.callspec.params["job"] for one in here if hasattr(one, "callspec")}
    gpus = [gpu.token for gpu in find_gpus(Nvml.load())]
    first, last = ({**os.environ, "CUDA_VISIBLE_DEVICES": gpus[at]} for at in (0, -1))
    with ThreadPoolExecutor(2 * len(JOBS) + 1) as threads:
        begun = {}
        for name, (ranks, script, *arguments) in JOBS.items():
            if name not in wanted:
                continue
            words = [str(WITH_PAUSES), str(repo / "examples" / script), *arguments]
            folder = tmp_path_factory.mktemp(name)
            begun[name] = (
                threads.submit(
                    emulate, folder, words, ranks,
                    record_below=EVERYTHING, limit_s=LIMIT_S, environment=first,
                ),
                threads.submit(
                    plain_run, words, ranks, folder / "plain", limit_s=LIMIT_S, environment=last
                ),
            )  # fmt: skip
        if any(MIRRORED in one.fixturenames for one in here):
            words = [str(repo / "examples/train_gpt.py"), *GPT, "--tp", "2"]
            begun[MIRRORED] = threads.submit(
                emulate, tmp_path_factory.mktemp(MIRRORED), words, 2,
                limit_s=LIMIT_S, more=("--tensors", "builtin:mirror"), environment=first,
            )  # fmt: skip
        yield begun


@pytest.fixture(params=JOBS)
def job(request, runs):
    """A job with all its communications recorded, emulated, and run with all ranks truly there."""
    found, plain = (one.result() for one in runs[request.param])
    assert plain.failed is None, plain.failed
    return found, plain


def test_losses_are_the_job_s(job):
    found, plain = job
    assert device_of(found)["device"]["mirrored"] == 0
    assert found["losses"] == pytest.approx(plain.ranks[0].losses, rel=2e-3)


def test_the_rank_allocates_what_it_allocates_in_the_true_job(job):
    found, plain = job
    told, true = device_of(found)["device"], plain.ranks[0]
    here = told["peak_allocated_bytes"], told["peak_reserved_bytes"], told["allocations"]
    print(here, [(one.peak_bytes, one.reserved_bytes, one.allocations) for one in plain.ranks])
    assert here[0] == true.peak_bytes


def test_all_of_the_graph_was_made_and_held(job, record_property):
    found, _ = job
    run, device = found["run"], device_of(found)["device"]
    assert run["missing_operations"] == run["repeated_operations"] == 0
    assert {group["transport"] for group in run["groups"]} <= {"local", "real"}
    assert device["holds"] > 0
    for name in ("step_ns", "predicted_step_ns"):
        record_property(name, run[name])
        assert run[name] > 0
    print(
        f"step {run['step_ns'] / 1e6:.3f} ms, predicted {run['predicted_step_ns'] / 1e6:.3f} ms; "
        f"ends missed by {device['hold_median_ns']} / {device['hold_p99_ns']} ns; "
        f"host {device['issuing_median_ns'] / 1e3:.1f} us an operation"
    )


@pytest.fixture
def mirrored(runs):
    """A job of which nothing is recorded that carries numbers of the training."""
    return runs[MIRRORED].result()


def test_virtual_ranks_may_mirror_the_rank(mirrored):
    device = device_of(mirrored)["device"]
    assert device["fetched"] == 0
    assert device["outside_bytes"] == 0
    assert len(mirrored["losses"]) == STEPS
