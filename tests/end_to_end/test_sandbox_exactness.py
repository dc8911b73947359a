"""A sandbox rank among virtual ones computes what it computes in the true job, bit for bit.

Every shape of job runs once truly, as one process a rank over gloo, and is collected once. Then
other ranks of it are the sandbox, one choice after another: their losses and the hashes of their
parameters after several steps must be those of the true run.
"""

from __future__ import annotations

from importlib import util

import pytest

from prismreplay.slicing.workers import Nursery
from tests.end_to_end import sandboxes
from tests.end_to_end.sandboxes import JOBS, Case, program, results

pytestmark = pytest.mark.skipif(
    util.find_spec("torch") is None, reason="needs torch: pip install 'prismllm-toolkit[replay]'"
)

FIRST, MIDDLE, LAST = (0,), (3,), (7,)
# Job -> choices of sandbox ranks: alone, one of each stage, a whole group, across groups.
CHOICES = {
    "dp8": [FIRST, MIDDLE, LAST, (0, 5)],
    "tp2-dp4": [FIRST, LAST, (2, 3), (1, 6)],
    "pp4-dp2": [FIRST, MIDDLE, LAST, (0, 2, 4, 6)],
    "pp4-dp2-interleaved": [FIRST, MIDDLE, LAST, (1, 3, 5, 7)],
    "tp2-pp2-dp2": [FIRST, MIDDLE, LAST, (4, 5), (0, 4)],
    "fsdp2-8": [FIRST, MIDDLE, LAST, (0, 1)],
    "ep4-dp2": [FIRST, MIDDLE, LAST, (4, 5, 6, 7)],
    "pp2-zero-bubble": [FIRST, MIDDLE, (0, 2)],
    "pp2-zbv": [FIRST, (1,)],
    "hsdp-2-2-tp2": [FIRST, LAST, (0, 1)],
}
SLOW = {name for name, job in JOBS.items() if job.slow}
# With assistants, who play the other ranks in real groups.
REDUCED = {
    "dp8": [(0, 5)],
    "tp2-dp4": [(1, 6)],
    "pp4-dp2": [MIDDLE],
    "tp2-pp2-dp2": [(4, 5)],
    "fsdp2-8": [(0, 1)],
    "ep4-dp2": [LAST],
    "hsdp-2-2-tp2": [FIRST],
}
CASES = [
    pytest.param(
        name,
        ranks,
        transport,
        id=f"{name}-{'.'.join(map(str, ranks))}-{transport}",
        marks=[pytest.mark.slow] if name in SLOW else [],
    )
    for transport, jobs in (("local", CHOICES), ("reduced", REDUCED))
    for name, choices in jobs.items()
    for ranks in choices
]


@pytest.fixture(scope="session")
def nursery():
    """A process with torch loaded, in which each run is forked."""
    with Nursery(sandboxes.prepare, sandboxes.perform) as made:
        yield made


def test_every_shape_of_job_is_here():
    assert CHOICES.keys() == JOBS.keys()


@pytest.mark.parametrize(("name", "ranks", "transport"), CASES)
def test_a_sandbox_computes_what_it_would_in_the_true_job(
    name, ranks, transport, truths, nursery, tmp_path
):
    folder = truths(name)
    case = Case(
        graph=folder / "calibrated.parquet",
        tensors=folder / "bare.tensors",
        words=tuple(program(JOBS[name])),
        sandbox=ranks,
        output=tmp_path / "run.parquet",
        transport=transport,
    )
    found = nursery.start(case).result()
    expected = results(folder / "true")
    assert found == {rank: expected[rank] for rank in ranks}
    assert len(found[ranks[0]]["losses"]) >= 5
