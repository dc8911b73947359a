import json
import re
from dataclasses import replace

import numpy as np
import polars as pl
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
    # The third follows none in the trace: it begins at 30, and the fourth where it ends.
    assert step_durations(3, np.array([10, 25, 40, 45]), cut={2: 30}).tolist() == [7, 15, 10, 5]
    assert step_durations(0, np.array([[10, 25], [5, 9]]), cut={0: 2, 1: 7}).tolist() == [
        [8, 18],
        [3, 2],
    ]


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


@pytest.mark.parametrize("steps", ["auto", "all", "1-3"])
def test_all_commands_state_one_step_time(merged, steps):
    result, path = merged
    report, trace = result.report, pt.open(path)
    assert warmup_of(trace.header) == report.warmup == 1
    times = report.steps_ns if steps == "all" else report.steps_ns[1:]
    assert report.step_ns == sorted(times[-3:])[1]
    prediction = predict(trace, draws=4, steps=steps)
    assert prediction.steps["duration_ns"].to_list() == list(times)
    assert prediction.spread.observed_steps == 3
    # The first of a window is drawn, but follows no step, and does not count.
    drawn = 3 if steps == "all" else 2
    assert prediction.spread.simulated_steps == drawn * prediction.spread.draws
    answer = what_if(trace, [Scale("true", 1.0)], steps=steps)
    assert answer.baseline.steps_ns.tolist() == list(times)
    compared = compare(trace, trace, steps=steps)
    summary = describe_run(trace, steps=steps)
    for step_ns in (
        prediction.step_ns,
        answer.baseline.step_ns,
        answer.scenarios[0].step_ns,
        compared.step_a_ns,
        compared.step_b_ns,
        summary.step_ns,
    ):
        assert step_ns == report.step_ns
    assert prediction.as_dict()["max_step_ns"] == max(times[-3:])
    found = find_stragglers(trace, steps=steps)
    assert found.base_ns.tolist() == list(times[-3:])
    assert found.steps == (1, 2, 3)


def invoke(*words):
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_commands_print_it_and_say_which_steps(merged):
    result, path = merged
    text = "3 steps, the first left out (warm-up)"
    times = []
    for command in ("predict", "stragglers", "critical-path", "waits", "compare"):
        printed = invoke(command, path, *([path] if command == "compare" else []))
        assert "looking at steps 1-3; left out: the job's start and step 0 (" in printed
        assert "(warm-up)" not in printed
    for command, pattern in {
        "predict": r"step time ([\d.]+ ms) \(median of ",
        "what-if": r"as it was +([\d.]+ ms)",
        "stragglers": r"as it was +([\d.]+ ms)",
    }.items():
        more = ["--steps", "all", *(["--scale", "true", "1"] * (command == "what-if"))]
        printed = invoke(command, path, *more)
        assert text in printed, command
        times.append(re.search(pattern, printed)[1])
    assert times[0] == times[1] == f"{result.report.step_ns / 1e6:.3f} ms"
    mean = float(np.mean(result.report.steps_ns[1:]))
    assert times[2] == f"{mean / 1e6:.3f} ms"
    assert json.loads(invoke("predict", path, "--json", "--steps", "all"))["warmup_steps"] == 1


def test_a_single_step_is_no_mean_of_one(make_run, tmp_path):
    merge(make_run(steps=1).trace).write(tmp_path / "one.parquet")
    assert "mean of 1" not in invoke("stragglers", tmp_path / "one.parquet")
    assert "median of 1" not in invoke("what-if", tmp_path / "one.parquet", "--scale", "true", "2")


def sampled_log(path):
    """Four steps of two ranks that begin 2 ms after they were laid out, as an operation log."""
    lines = ["step,dp_rank,stage,optype,start_ts,duration,mb_id"]
    for step in range(4):
        for rank in range(2):
            lasting = 0.010 + 0.002 * step + 0.005 * rank
            done = 0.016 + 0.002 * step
            lines += [
                f"{step},{rank},0,forward-compute,0.002,{lasting},0",
                f"{step},{rank},0,grads-reduce-scatter,{0.002 + lasting},{done - lasting},-1",
                f"{step},{rank},0,optimizer,{done + 0.002},0.001,-1",
            ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(params=["laid out", "recorded"])
def long_run(request, tmp_path, make_run):
    """Four steps, merged."""
    if request.param == "recorded":
        made = make_run(steps=4).trace
        steps = tuple(made.collect()["step"].drop_nulls().unique().sort())
        source = replace(made, header=made.header.model_copy(update={"steps": steps}))
    else:
        pt.convert([sampled_log(tmp_path / "log.csv")], tmp_path / "run.parquet")
        source = tmp_path / "run.parquet"
    merge(source).write(tmp_path / "job.parquet")
    return pt.open(tmp_path / "job.parquet")


def times_of(path):
    """Steps as `predict` has them; the other commands have to say the same."""
    trace = pt.open(path)
    times = predict(trace, draws=0).steps["duration_ns"].to_list()
    assert what_if(trace, [Scale("true", 1.0)]).baseline.steps_ns.tolist() == times
    assert find_stragglers(trace).base_ns.tolist() == times
    assert describe_run(merge(trace).trace).steps["duration_ns"].to_list() == times
    assert compare(trace, trace).step_a_ns == typical_ns(times, 0)
    return times


def test_what_was_cut_out_is_in_no_step(long_run, tmp_path):
    nodes = long_run.collect()
    first, second, third, fourth = long_run.header.steps
    end = pl.col("start_ns") + pl.col("dur_ns")
    alone = {
        step: nodes.filter(step=step).select(end.max() - pl.col("start_ns").min()).item()
        for step in long_run.header.steps
    }
    following = dict(
        zip(long_run.header.steps, predict(long_run, draws=0).steps["duration_ns"], strict=True)
    )
    piece, other = tmp_path / "piece.parquet", tmp_path / "other.parquet"
    for steps, times in {
        (fourth,): [alone[fourth]],
        (second, third): [alone[second], following[third]],
        (first, fourth): [following[first], alone[fourth]],
        (first, second, fourth): [following[first], following[second], alone[fourth]],
    }.items():
        pt.slice_out(long_run, piece, steps=steps)
        assert times_of(piece) == times, steps
    # The mark of a step stays when other steps are cut away, and goes when its predecessor is back.
    pt.slice_out(pt.open(piece), other, steps=[second, fourth])
    assert times_of(other) == [alone[second], alone[fourth]]
    pt.slice_out(long_run, piece, steps=[third])
    pt.slice_out(long_run, other, steps=[first])
    report = pt.concat([other, piece], tmp_path / "gap.parquet")
    assert report.linked == 0
    assert times_of(tmp_path / "gap.parquet") == [following[first], alone[third]]
    pt.slice_out(long_run, other, steps=[fourth])
    pt.concat([piece, other], tmp_path / "next.parquet")
    merge(tmp_path / "next.parquet").write(tmp_path / "again.parquet")
    assert times_of(tmp_path / "again.parquet") == [alone[third], following[fourth]]
