"""What an emulation says at its end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import prismcalib
import prismtrace
from prismcalib import synth
from prismreplay.commands_emulate import _print
from prismreplay.emulation.emulating import Emulation
from prismreplay.emulation.findings import find, losses_in
from prismreplay.run.injecting import edits_of
from tests.prismtrace.conftest import build_trace

RUN = {
    "step_ns": 900,
    "steps": [{"measured_ns": 1500}, {"measured_ns": 950}],
    "ranks": [{"rank": 3, "peak_resident_bytes": 5}],
    "interference": 0.5,
    "disturbed": True,
    "repeated_operations": 0,
    "comparison": None,
}
REPORTS = {
    "slice": {"timing_true": False, "rounds": []},
    "merge": {"unknown_transfers": 2, "sources": {"none": 2, "measured": 98}},
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
    assert (found.emulated_step_ns, found.measured_step_ns, found.steps) == (900, 950, 2)
    assert found.peak_memory == {3: 5}
    assert found.losses == {3: (2.5,)}


@pytest.mark.parametrize("silent", [True, False])
def test_a_sandbox_that_prints_no_loss_is_told(found, silent, tmp_path, capsys):
    shown = replace(found, losses={}) if silent else found
    _print(Emulation(tmp_path, (), shown))
    printed = capsys.readouterr().out
    assert ("none in what rank 3 printed" in printed) == silent
    assert ("--sandbox must name a rank that prints them" in printed) == silent
    assert ("losses, rank 3:        2.5" in printed) != silent


def test_how_far_the_prediction_may_be_off_is_told(found, tmp_path, capsys):
    assert found.range_ns is None  # all transfers are measured
    between = replace(found, range_ns=(1_000_000, 9_000_000))
    for one, text in (
        (between, "1.000 ms and 9.000 ms: not all transfers were measured"),
        (replace(between, uninjected_step_ns=5), "9.000 ms without --inject: not all transfers"),
    ):
        _print(Emulation(tmp_path, (), one))
        assert text in capsys.readouterr().out
    _print(Emulation(tmp_path, (), found))
    assert "it lies between" not in capsys.readouterr().out


def test_what_the_programs_clock_counts_is_told(found, tmp_path, capsys):
    _print(Emulation(tmp_path, (), found))
    assert "; 950 ns by the program's own clock, which counts the emulator, too)" in (
        capsys.readouterr().out
    )


def test_doubts_are_told(found):
    assert len(found.warnings) == 2
    assert "shared cores" in found.warnings[0]
    assert "by up to 50%" in found.warnings[1]


@pytest.mark.parametrize("busy", ["slice", "run"])
def test_a_machine_that_others_use_is_told(tmp_path, busy):
    report = {"outcomes": [{"core_wait": 0.6}, {}]} if busy == "slice" else {"core_wait": 0.6}
    reports = REPORTS | {busy: REPORTS[busy] | report}
    rows = [{"rank": 0, "start_ns": 0, "dur_ns": 5}]
    prismtrace.write(build_trace(*rows, kind="calibrated"), tmp_path / "calibrated.parquet")
    told = find(tmp_path / "calibrated.parquet", reports, tmp_path, ()).warnings
    assert "waited for a core, which others had, for up to 60%" in told[1]


def _doubts(folder, *kinds):
    """Warnings about a job whose transfers nobody knows."""
    rows = [
        {"rank": rank, "kind": kind, "group": 0, "seq": seq, "start_ns": 0, "dur_ns": 0}
        | {"wait_ns": 0, "transfer_source": "none"}
        for rank in (0, 1)
        for seq, kind in enumerate(kinds)
    ]
    prismtrace.write(build_trace(*rows, kind="calibrated"), folder / "calibrated.parquet")
    return find(folder / "calibrated.parquet", REPORTS, folder, ()).warnings[1:-1]


def test_kinds_of_transfers_that_nobody_knows(tmp_path):
    (told,) = _doubts(tmp_path, "all_reduce")
    assert told.startswith("2 of 100 transfers are not known")
    assert "count as nothing (2 all_reduce): no slice" in told
    assert "--comm-table" in told


def test_no_table_is_asked_for_because_of_barriers(tmp_path):
    (told,) = _doubts(tmp_path, "barrier")
    assert told.startswith("2 of 100 transfers are barriers")
    assert "--comm-table" not in told
    assert len(_doubts(tmp_path, "barrier", "all_reduce")) == 2


def test_a_prediction_holds_what_was_injected(found, tmp_path):
    job = synth.JobSpec(pp=2, tp=2, dp=1, microbatches=2, layers_per_stage=1, steps=3)
    calibrated = tmp_path / "calibrated.parquet"
    prismcalib.merge(synth.generate(job)).write(calibrated)
    slow = find(calibrated, REPORTS, tmp_path, (3,), edits_of(["rank=1,scale=4"], (3,)))
    assert found.uninjected_step_ns is None
    assert slow.uninjected_step_ns == found.predicted_step_ns
    assert slow.predicted_step_ns > 2 * found.predicted_step_ns
    assert slow.ranks_on_path[1] > found.ranks_on_path.get(1, 0)


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
