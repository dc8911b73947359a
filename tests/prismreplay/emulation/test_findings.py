"""What an emulation says at its end."""

from __future__ import annotations

import math

import pytest

import prismcalib
import prismtrace
from prismcalib import synth
from prismreplay.emulation.findings import find, losses_in
from tests.prismtrace.conftest import build_trace

RUN = {
    "step_ns": 900,
    "steps": [{}, {}],
    "ranks": [{"rank": 3, "peak_resident_bytes": 5}],
    "interference": 0.5,
    "disturbed": True,
    "repeated_operations": 0,
    "comparison": None,
}
REPORTS = {
    "slice": {"timing_true": False, "rounds": []},
    "merge": {"unknown_transfers": 40, "sources": {"none": 40, "measured": 60}},
    "run": RUN,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulation")
    job = synth.JobSpec(pp=2, tp=2, dp=1, microbatches=2, layers_per_stage=1, steps=3)
    prismcalib.merge(synth.generate(job)).write(folder / "calibrated.parquet")
    (folder / "rank-03.log").write_text("step 0 loss 2.5\n")
    return find(folder / "calibrated.parquet", REPORTS, folder, (3,))


def test_parts_of_the_path_are_those_of_the_steps_that_count(found):
    assert sum(found.basis.values()) == pytest.approx(1)
    assert sum(part.share for part in found.path) == pytest.approx(1)
    assert sum(found.ranks_on_path.values()) == pytest.approx(1)
    assert sum(part.time_ns for part in found.path) == pytest.approx(
        3 * found.predicted_step_ns, rel=0.5
    )
    assert 0 < found.measured_share <= 1


def test_what_the_run_told_is_passed_on(found):
    assert (found.emulated_step_ns, found.steps) == (900, 2)
    assert found.peak_memory == {3: 5}
    assert found.losses == {3: (2.5,)}


def test_doubts_are_told(found):
    assert len(found.warnings) == 3
    assert "shared cores" in found.warnings[0]
    assert "40 of 100 transfers" in found.warnings[1]
    assert "by up to 50%" in found.warnings[2]


def test_kinds_of_transfers_that_nobody_knows(tmp_path):
    barrier = {"kind": "barrier", "group": 0, "seq": 0, "start_ns": 0, "dur_ns": 0, "wait_ns": 0}
    rows = [barrier | {"rank": rank, "transfer_source": "none"} for rank in (0, 1)]
    prismtrace.write(build_trace(*rows, kind="calibrated"), tmp_path / "calibrated.parquet")
    found = find(tmp_path / "calibrated.parquet", REPORTS, tmp_path, ())
    assert "count as nothing (2 barrier): no slice" in found.warnings[1]


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("step 0  loss 5.6102\nstep 1  loss 4.25\n", (5.6102, 4.25)),
        ("{'train_loss': 2.5, 'lr': 0.1}", (2.5,)),
        ("iter 3 | lm loss: 1.096E+01 | loss scale: 1.0", (10.96,)),
        ("Loss=-0.5", (-0.5,)),
        ("a lossless step took 3 s", ()),
        ("the loss is printed elsewhere", ()),
        ("", ()),
    ],
)
def test_losses_are_found_in_what_a_program_prints(text, losses):
    assert losses_in(text) == losses


def test_a_loss_that_is_no_number_is_found():
    assert math.isnan(*losses_in("step 7 loss nan"))
