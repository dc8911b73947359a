"""Steps and phases of operations, from the ranges on the CPU around their launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prismtrace.validation import validate
from tests.prismtrace.kineto_events import document, event, kernel, launched, rows, run, write_files

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


def note(name: str, ts: float, dur: float, tid: int = 100) -> dict[str, Any]:
    return event("user_annotation", name, ts, dur, tid)


def op(launch: float, tid: int = 100) -> list[dict[str, Any]]:
    return launched("k", launch, launch + 1000, 0.5, round(launch), tid=tid)


def annotated(folder: Path, *events: Any, **options: Any) -> list[tuple[Any, ...]]:
    files = write_files(folder / "in", document(*events))
    trace, report = run(folder, files, grain="kernel", **options)
    assert not validate(trace)
    annotated.report = report
    return rows(trace, "step", "phase")


def test_steps_hold_for_all_threads(tmp_path: Path) -> None:
    found = annotated(
        tmp_path,
        note("ProfilerStep#7", 0, 50), note("ProfilerStep#8", 60, 50),
        op(10), op(20, tid=200), op(55), op(70, tid=200), op(200),
    )  # fmt: skip
    assert [step for step, _ in found] == [7, 7, None, 8, None]


def test_steps_of_2021_are_operators(tmp_path: Path) -> None:
    found = annotated(tmp_path, event("Operator", "ProfilerStep#3", 0, 50, 100), op(10))
    assert found == [(3, None)]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["it 4", "it 5"], [4, 5]),
        (["it a", "it b"], [0, 1]),
        (["it 5", "it 4"], [0, 1]),
        (["it 99999999999", "it 99999999999"], [0, 1]),
    ],
)
def test_own_annotations(names: list[str], steps: list[int], tmp_path: Path) -> None:
    notes = [note(name, 100 * k, 50) for k, name in enumerate(names)]
    found = annotated(tmp_path, notes, op(10), op(110), step_from=r"^it (\w+)")
    assert [step for step, _ in found] == steps


def test_names_that_tell_their_numbers(tmp_path: Path) -> None:
    """Without the profiler's own steps; microbatches hold for all threads, too."""
    files = write_files(
        tmp_path / "in",
        document(
            note("train_step 4", 0, 90), note("microbatch 0", 5, 30), note("mb_1", 40, 30),
            note("step 5", 100, 50), note("backward", 40, 30),
            op(10), op(50, tid=200), op(75), op(110),
        ),
    )  # fmt: skip
    trace, report = run(tmp_path, files, grain="kernel")
    assert rows(trace, "step", "microbatch", "phase") == [
        (4, 0, None),
        (4, 1, "backward"),  # of a thread that marks nothing itself
        (4, None, None),
        (5, None, None),
    ]
    assert report.steps == (4, 5)


def test_whole_file_as_one_step(tmp_path: Path) -> None:
    found = annotated(tmp_path, note("ProfilerStep#7", 0, 50), op(10), op(70), step_from="whole")
    assert [step for step, _ in found] == [0, 0]


def test_what_was_launched_before_never_makes_steps_descend(tmp_path: Path) -> None:
    # It runs during step 2, but before everything that was launched in step 1.
    found = annotated(
        tmp_path,
        note("ProfilerStep#1", 0, 50), note("ProfilerStep#2", 60, 2000),
        kernel("early", 900, 5, correlation=9999), op(10), op(70),
    )  # fmt: skip
    assert [step for step, _ in found] == [1, 1, 2]


def test_phases(tmp_path: Path) -> None:
    found = annotated(
        tmp_path,
        note("DistributedDataParallel.forward", 0, 50),
        note("Optimizer.step#AdamW.step", 100, 50),
        event("cpu_op", BACKWARD, 60, 20, 200),
        note("loss.backward", 160, 20),
        op(10), op(65, tid=200), op(66), op(110), op(170), op(190),
    )  # fmt: skip
    assert [phase for _, phase in found] == [
        "forward", "backward", None, "optimizer", "backward", None,
    ]  # fmt: skip


def test_the_innermost_range_decides_however_many_came_before(tmp_path: Path) -> None:
    # Activation checkpointing runs the forward again within backward.
    inner = [note(f"layer{k} forward", 10 + 4 * k, 2) for k in range(50)]
    found = annotated(
        tmp_path, note("backward", 0, 500), inner, op(5), op(11), op(13), op(207), op(300)
    )
    assert [phase for _, phase in found] == [
        "backward", "forward", "backward", "forward", "backward",
    ]  # fmt: skip
