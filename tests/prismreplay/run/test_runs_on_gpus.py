"""Jobs emulated on a GPU: losses, memory and times of a rank, beside those of the true job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from benchmarks.gpu.emulate_cuda import EVERYTHING, device_of, emulate
from benchmarks.gpu.plain_run import plain_run

pytestmark = pytest.mark.gpu

GPT = ("--layers", "4", "--hidden", "128", "--heads", "4", "--length", "64", "--steps", "4")
MIRRORED = "mirrored"
JOBS = {
    "ddp-tp": (4, "train_gpt.py", *GPT, "--tp", "2"),
    "fsdp": (4, "train_gpt.py", *GPT, "--fsdp", "4"),
    "pp": (4, "train_gpt.py", *GPT, "--pp", "2"),
    "moe": (4, "train_moe.py", "--hidden", "128", "--steps", "4"),
}


@pytest.fixture(scope="module")
def runs(request, repo, tmp_path_factory):
    """All jobs that are asked for, side by side: times are not looked at."""
    here = [one for one in request.session.items if one.path == request.path]
    wanted = {one.callspec.params["job"] for one in here if hasattr(one, "callspec")}
    with ThreadPoolExecutor(len(JOBS) + 1) as threads:
        begun = {
            name: threads.submit(_run, JOBS[name], repo, tmp_path_factory.mktemp(name))
            for name in JOBS
            if name in wanted
        }
        if any(MIRRORED in one.fixturenames for one in here):
            words = [str(repo / "examples/train_gpt.py"), *GPT, "--tp", "2"]
            mirror, folder = ("--tensors", "builtin:mirror"), tmp_path_factory.mktemp(MIRRORED)
            begun[MIRRORED] = threads.submit(emulate, folder, words, 4, limit_s=140, more=mirror)
        yield begun


def _run(job, repo, folder):
    ranks, script, *arguments = job
    words = [str(repo / "examples" / script), *arguments]
    found = emulate(folder, words, ranks, record_below=EVERYTHING, limit_s=140)
    plain = plain_run(words, ranks, folder / "plain", limit_s=100)
    assert plain.failed is None, plain.failed
    return found, plain


@pytest.fixture(params=JOBS)
def job(request, runs):
    """A job with all its communications recorded, emulated, and run with all ranks truly there."""
    return runs[request.param].result()


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
    assert len(mirrored["losses"]) == 4
