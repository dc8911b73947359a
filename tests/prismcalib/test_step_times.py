import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

import prismtrace as pt
from prismcalib import (
    compare,
    describe_run,
    find_stragglers,
    merge,
    predict,
    synth,
    what_if,
)
from prismcalib.cli import app
from prismcalib.edits import Scale
from prismcalib.step_times import (
    StepTimes,
    counted_steps,
    step_durations,
    steps_text,
    typical_ns,
    warmup_of,
)


def test_a_step_lasts_from_the_end_of_those_before():
    assert step_durations(3, np.array([10, 25, 24, 40])).tolist() == [7, 15, 0, 15]
    assert step_durations(0, np.array([[10, 25], [5, 9]])).tolist() == [[10, 15], [5, 4]]
    assert StepTimes.between(3, [], 50).durations_ns == (47,)


@pytest.mark.parametrize(
    ("warmup", "counted", "typical"),
    [(0, [90, 10, 20, 40], 30), (1, [10, 20, 40], 20), (2, [20, 40], 30), (9, [40], 40)],
)
def test_the_step_time_is_the_median_after_the_warm_up(warmup, counted, typical):
    times = np.array([90, 10, 20, 40])
    assert counted_steps(times, warmup).tolist() == counted
    assert (
        typical_ns(times, warmup) == StepTimes(tuple(times.tolist())).steady_ns(warmup) == typical
    )


def test_which_steps_are_meant_is_said():
    assert steps_text(1, 0) == steps_text(1, 1) == "one step"
    assert steps_text(3, 0, "mean") == "mean of 3 steps"
    assert steps_text(3, 1) == "median of 2 steps, the first left out (warm-up)"
    assert steps_text(3, 2) == "one step, the first 2 left out (warm-up)"


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A job of three steps from slices, the first of them cold."""
    folder = tmp_path_factory.mktemp("steps")
    spec = synth.JobSpec(pp=2, tp=1, dp=2, microbatches=4, steps=4, jitter=0.1)
    slices = synth.cut_into_slices(spec, folder / "slices", 2)
    result = merge(slices)
    result.write(folder / "job.parquet")
    return result, folder / "job.parquet"


def test_all_commands_state_one_step_time(merged):
    result, path = merged
    report, trace = result.report, pt.open(path)
    assert warmup_of(trace.header) == report.warmup == 1
    times = report.steps_ns
    assert report.step_ns == sorted(times[1:])[1]
    prediction = predict(trace, draws=4)
    assert prediction.steps["duration_ns"].to_list() == list(times)
    assert prediction.spread.observed_steps == 3
    assert prediction.spread.simulated_steps == 3 * prediction.spread.draws
    answer = what_if(trace, [Scale("true", 1.0)])
    assert answer.baseline.steps_ns.tolist() == list(times)
    compared = compare(trace, trace)
    summary = describe_run(trace)
    for step_ns in (
        prediction.step_ns,
        answer.baseline.step_ns,
        answer.scenarios[0].step_ns,
        compared.step_a_ns,
        compared.step_b_ns,
        summary.step_ns,
    ):
        assert step_ns == report.step_ns
    assert prediction.as_dict()["max_step_ns"] == max(times[1:])
    found = find_stragglers(trace)
    assert found.base_ns.tolist() == list(times[1:])
    assert found.steps == (1, 2, 3)


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_commands_print_it_and_say_which_steps(merged):
    result, path = merged
    text = "3 steps, the first left out (warm-up)"
    times = []
    for command, pattern in {
        "predict": r"step time ([\d.]+ ms) \(median of ",
        "what-if": r"as it was +([\d.]+ ms)",
        "stragglers": r"as it was +([\d.]+ ms)",
    }.items():
        more = ["--scale", "true", "1"] if command == "what-if" else []
        printed = invoke(command, path, *more)
        assert text in printed, command
        times.append(re.search(pattern, printed)[1])
    assert times[0] == times[1] == f"{result.report.step_ns / 1e6:.3f} ms"
    mean = float(np.mean(result.report.steps_ns[1:]))
    assert times[2] == f"{mean / 1e6:.3f} ms"
    assert json.loads(invoke("predict", path, "--json"))["warmup_steps"] == 1


def test_a_single_step_is_no_mean_of_one(make_run, tmp_path):
    merge(make_run(steps=1).trace).write(tmp_path / "one.parquet")
    assert "mean of 1" not in invoke("stragglers", tmp_path / "one.parquet")
    assert "median of 1" not in invoke("what-if", tmp_path / "one.parquet", "--scale", "true", "2")
