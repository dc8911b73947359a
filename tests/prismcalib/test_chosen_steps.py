"""Which steps analyses look at: without the job's start by default, or those asked for."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest
from typer.testing import CliRunner

import prismtrace as pt
from prismcalib import (
    compare,
    critical_path,
    find_stragglers,
    longest_waits,
    merge,
    predict,
    synth,
)
from prismcalib.build import graph_from_trace
from prismcalib.chosen_steps import ChosenSteps, chosen_steps, parse_steps
from prismcalib.cli import app
from prismcalib.edits import Scale, ScaleGaps, SwapDurations
from prismcalib.errors import MergeInputError, MissingMemberError, PredicateError
from prismcalib.propagation import propagate
from prismcalib.report import describe_run, write_report
from prismcalib.whatif import what_if
from prismtrace.errors import OutputError, StepError
from tests.full_disks import room_for

GB = 10**9


@pytest.fixture
def recorded(make_run):
    """A program from its beginning: a start, steps 0 to 3, an end; memory peaks in step 0."""
    made = make_run(steps=6, slow_rank=1).trace
    step = pl.when(pl.col("step").is_between(1, 4)).then(pl.col("step") - 1)
    level = (
        pl.when(pl.col("step") == 1).then(9 * GB).otherwise(4 * GB)
        + pl.col("rank").cast(pl.Int64) * GB
    )
    nodes = made.collect().with_columns(mem_bytes=level, mem_peak_bytes=level, step=step)
    header = {"steps": (0, 1, 2, 3), "created_by": "prismreplay record 1.0"}
    return replace(made, header=made.header.model_copy(update=header), nodes=nodes.lazy())


@pytest.fixture
def started(recorded):
    return merge(recorded).trace


def with_header(trace, **changes):
    return replace(trace, header=trace.header.model_copy(update=changes))


def looked_at(trace, steps="auto"):
    with chosen_steps(trace, steps) as (chosen, found):
        return chosen, found


def test_the_start_is_left_out_and_a_line_says_so(started):
    whole = started.collect()
    end = pl.col("start_ns") + pl.col("dur_ns")
    chosen, found = looked_at(started)
    assert chosen.header.steps == found.steps == (1, 2, 3)
    assert chosen.collect()["step"].unique().to_list() == [1, 2, 3]
    first = whole.filter(step=0).select(end.max()).item()
    assert found.before_ns == first - whole["start_ns"].min()
    last = whole.filter(step=3).select(end.max()).item()
    assert found.after_ns == whole.select(end.max()).item() - last > 0
    assert found.sentence.startswith("looking at steps 1-3; left out: the job's start and step 0 (")
    assert found.sentence.endswith("; `--steps all` looks at everything")
    assert "\n" not in found.sentence
    assert json.loads(json.dumps(found.as_dict()))["left_out_before"] == [0]


def test_what_is_not_known_to_hold_it_is_taken_whole(started, tmp_path):
    single = with_header(started, steps=(0,))
    for trace in (
        with_header(started, created_by="prismtrace convert 1.0"),
        with_header(started, steps=(4, 5, 6, 7)),
        with_header(started, steps=()),
        single,
    ):
        assert looked_at(trace)[0] is trace
        assert looked_at(trace)[1].sentence == ""
    pt.slice_out(started, tmp_path / "piece.parquet", steps=[1, 2])
    piece = pt.open(tmp_path / "piece.parquet")
    assert looked_at(piece)[0] is piece
    assert looked_at(started, "all") == (started, ChosenSteps((0, 1, 2, 3)))


def test_steps_are_asked_for(started):
    found = looked_at(started, "1-2")[1]
    assert found.sentence.startswith("looking at steps 1-2; left out: step 0 (")
    assert ", step 3 (" in found.sentence
    assert "--steps all" not in found.sentence
    assert looked_at(started, "3")[1].sentence.startswith(
        "looking at step 3; left out: steps 0-2 ("
    )
    everything = looked_at(started, "0-3")[1]
    assert everything.sentence.startswith("looking at steps 0-3; left out: what comes before (")
    for wrong in ("3-9", "7"):
        with pytest.raises(StepError, match="not in the trace"):
            looked_at(started, wrong)
    for wrong in ("", "few", "3-1", "1,3", "-1"):
        with pytest.raises(ValueError, match="auto, all"):
            parse_steps(wrong)
        with pytest.raises(StepError, match="auto, all"):
            looked_at(started, wrong)


@pytest.mark.parametrize("steps", ["auto", "1-2", "2"])
def test_the_path_is_a_longest_path_of_the_steps(started, steps):
    chosen, found = looked_at(started, steps)
    graph, rows = graph_from_trace(chosen)
    timing = propagate(graph)
    assert timing.start_ns.tolist() == rows["start_ns"].to_list()
    path = critical_path(started, steps=steps)
    assert path.length_ns == timing.makespan_ns
    parts = path.lead_in_ns + path.compute_ns + path.transfer_ns + path.unmatched_ns + path.gap_ns
    assert parts == path.length_ns
    assert set(path.segments["step"]) == set(found.steps)
    assert path.looked_at == found
    # Rows are called what they are called in the whole trace.
    whole = started.collect().select("id", "rank", "index", kind=pl.col("kind").cast(pl.String))
    named = path.segments.select("id", "rank", "index", "kind")
    assert named.join(whole, on=whole.columns, how="semi").height == named.height


def answers(trace, steps, tmp_path):
    edits = {"faster": [Scale("rank = 1", 0.5)], "no gaps": [ScaleGaps("index < 20", 0)]}
    found = {
        "path": critical_path(trace, steps=steps).as_dict(99),
        "prediction": predict(trace, draws=0, steps=steps).as_dict(),
        "waits": [one.as_dict() for one in longest_waits(trace, steps=steps)],
        "what-if": what_if(trace, edits, steps=steps).as_dict(),
        "comparison": compare(trace, trace, steps=steps).as_dict(),
    }
    summary = write_report(trace, tmp_path / "page.html", steps=steps)
    return found, summary


@pytest.mark.parametrize(
    ("steps", "tail"), [("auto", True), ("auto", False), ("1-2", True), ("all", True)]
)
def test_large_traces_say_the_same(started, steps, tail, tmp_path, monkeypatch):
    if not tail:
        ends = pl.col("step").is_not_null() | (pl.col("index") < 10)
        nodes = started.collect().filter(ends).lazy()
        started = merge(replace(started, nodes=nodes)).trace
    merge(started).write(tmp_path / "run.parquet")
    trace = pt.open(tmp_path / "run.parquet")
    whole, summary = answers(trace, steps, tmp_path)
    monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
    streamed, again = answers(trace, steps, tmp_path)
    assert streamed == whole
    assert again.path.as_dict() == summary.path.as_dict()
    assert again.ranks.equals(summary.ranks)


def test_a_report_shows_the_steps_and_where_memory_peaks(started, tmp_path):
    summary = write_report(started, tmp_path / "page.html")
    path = critical_path(started)
    assert summary.path.segments.equals(path.segments)
    assert summary.step_ns == predict(started, draws=0).step_ns
    assert summary.steps["step"].to_list() == [1, 2, 3]
    assert summary.peaks_left_out.row(0) == (3, 12 * GB, 7 * GB)
    page = (tmp_path / "page.html").read_text()
    assert "looking at steps 1-3; left out: the job&#x27;s start and step 0" in page
    note = next(note for note in summary.conclusion.notes if note.startswith("Memory peaks"))
    assert "4 ranks, most of all rank 3: 11.2 GiB, 6.5 GiB in the steps shown" in note
    assert page.count("Memory peaks in what is left out") == 2
    assert summary.as_dict()["memory_peaks_left_out"][0]["peak_bytes"] == 12 * GB
    assert summary.as_dict()["steps_looked_at"]["steps"] == [1, 2, 3]
    assert summary.memory.levels.min() == 4 * GB
    everything = describe_run(started, steps="all")
    assert everything.peaks_left_out is None
    assert not any("Memory peaks" in note for note in everything.conclusion.notes)


def test_marks_and_slack_are_those_of_the_steps(started):
    with chosen_steps(started, "1-2", marks=True) as (chosen, _):
        rows = chosen.collect()
    path = critical_path(started, steps="1-2")
    assert rows["critical"].sum() == path.segments.height
    assert rows.filter("critical")["slack_ns"].to_list() == [0] * path.segments.height
    assert rows["slack_ns"].min() == 0
    lacking = replace(started, nodes=started.nodes.filter(pl.col("rank") != 3))
    lacking = with_header(lacking, ranks=(0, 1, 2))
    with (
        pytest.raises(MissingMemberError),
        chosen_steps(lacking, "1-2", marks=True),
    ):
        pass


def test_stragglers_of_the_steps(started):
    found = find_stragglers(started)
    assert found.steps == (1, 2, 3)
    assert found.base_ns.tolist() == predict(started, draws=0).steps["duration_ns"].to_list()
    assert found.as_dict()["steps_looked_at"]["left_out_by_default"]
    assert find_stragglers(started, steps="all").steps == (0, 1, 2, 3)


def test_what_if_knows_rows_by_their_numbers_and_says_what_is_left_out(started, tmp_path):
    chosen = started.collect().filter(step=2, rank=1, kind="compute").row(0, named=True)
    (scenario,) = what_if(started, [Scale(f"rank = 1 and index = {chosen['index']}", 2)]).scenarios
    assert scenario.edited == 1
    with pytest.raises(PredicateError) as caught:
        what_if(started, [Scale("step = 0", 2)])
    assert "left out: the job's start and step 0" in caught.value.hint
    merge(started).write(tmp_path / "same.parquet")
    answer = what_if(started, [SwapDurations(tmp_path / "same.parquet")])
    assert answer.scenarios[0].delta_ns == 0


def test_a_step_is_no_longer_without_delays_than_with_them():
    """Some ranks are in the first step looked at before the others are done with the one before."""
    job = synth.JobSpec(pp=4, tp=1, dp=2, microbatches=3, steps=3, launch_gap_ns=0)
    trace = merge(synth.generate(job), warmup=1).trace
    found = find_stragglers(trace)
    assert found.steps == (1, 2)
    assert found.base_ns.tolist() == predict(trace, draws=0).steps["duration_ns"].to_list()
    assert found.without_delays_ns.tolist() == found.base_ns.tolist()
    for steps in ("all", "1", "2"):
        alone = find_stragglers(trace, steps=steps)
        # Of a single step the ranks' own starts are all that tells when they began: as late ones.
        assert 1 <= alone.launch_slowdown < 1.01, steps


def test_what_if_takes_durations_of_the_same_steps(recorded, tmp_path):
    other = tmp_path / "other.parquet"
    # Looked at here are steps 2 and 3; by itself the other trace would be looked at from step 1 on.
    here, there = merge(recorded, warmup=2).trace, merge(recorded, warmup=1).trace
    half = pl.when(pl.col("kind") == "compute").then(pl.col("dur_ns") // 2).otherwise("dur_ns")
    there = replace(there, nodes=there.nodes.with_columns(dur_ns=half))
    pt.write(there, other)
    (expected,) = what_if(here, [SwapDurations(other)]).scenarios
    rows = here.collect().filter(pl.col("step") >= 2).height
    assert expected.edited == rows
    assert expected.delta_ns < 0
    # The same durations from a part of the trace, and from one that counts its steps otherwise.
    pt.slice_out(there, tmp_path / "part.parquet", steps=(2, 3))
    renumbered = there.nodes.with_columns(pl.col("step") + 10)
    later = with_header(there, steps=(10, 11, 12, 13))
    pt.write(replace(later, nodes=renumbered), other)
    for path in (tmp_path / "part.parquet", other):
        (found,) = what_if(here, [SwapDurations(path)]).scenarios
        assert found.steps_ns.tolist() == expected.steps_ns.tolist()
        assert found.edited == rows
    pt.slice_out(there, tmp_path / "first.parquet", steps=(0, 2))
    (some,) = what_if(here, [SwapDurations(tmp_path / "first.parquet")]).scenarios
    assert some.edited == here.collect().filter(step=2).height


def test_merge_says_how_many_first_steps_are_not_typical(recorded):
    two = merge(recorded, warmup=2).trace
    assert looked_at(two)[1].steps == (2, 3)
    assert looked_at(merge(two).trace)[1].steps == (2, 3)
    assert predict(two, draws=0, steps="all").warmup == 2
    converted = with_header(recorded, created_by="prismtrace convert 1.0")
    assert looked_at(merge(converted, warmup=1).trace)[1].steps == (1, 2, 3)
    nothing = looked_at(merge(recorded, warmup=0).trace)[1]
    assert nothing.steps == (0, 1, 2, 3)
    assert "left out: the job's start (" in nothing.sentence
    with pytest.raises(MergeInputError, match="a warm-up of 4 steps leaves nothing of a run that"):
        merge(recorded, warmup=4)
    with pytest.raises(MergeInputError, match="whose steps are not marked"):
        merge(with_header(recorded, steps=()), warmup=1)


def test_a_step_lasts_from_the_end_of_the_one_left_out(started):
    everything = predict(started, draws=0, steps="all").steps
    for steps, first in (("auto", 1), ("2-3", 2), ("3", 3)):
        found = predict(started, draws=0, steps=steps)
        assert found.steps.equals(everything.filter(pl.col("step") >= first))
        answer = what_if(started, [Scale("true", 1.0)], steps=steps)
        assert answer.baseline.steps_ns.tolist() == found.steps["duration_ns"].to_list()


def test_the_commands(started, tmp_path):
    path = tmp_path / "run.parquet"
    merge(started).write(path)

    def call(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    what = ("--scale", "rank = 1", "0.5")
    for command, more in {
        "critical-path": (),
        "predict": (),
        "stragglers": (),
        "waits": (),
        "what-if": what,
        "report": ("-o", tmp_path / "page.html"),
    }.items():
        done = call(command, path, *more)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("looking at steps 1-3; left out: the job's start"), command
        assert "left out" not in call(command, path, *more, "--steps", "all").stdout
        answer = json.loads(call(command, path, *more, "--json", "--steps", "2-3").stdout)
        assert answer["steps_looked_at"]["left_out_before"] == [0, 1]
    done = call("compare", path, path)
    assert done.stdout.splitlines()[0].startswith("A: looking at steps 1-3; ")
    assert call("predict", path, "--steps", "1,3").exit_code == 2
    assert "counts from the end of the step before" in call("predict", path, "--steps", "3").stdout


def test_steps_may_have_any_number_that_a_trace_can_hold(started):
    far = 2**31 - 5
    nodes = started.nodes.with_columns(step=pl.col("step") + far)
    moved = with_header(replace(started, nodes=nodes), steps=tuple(far + n for n in range(4)))
    assert looked_at(moved, f"{far + 1}-{far + 2}")[1].steps == (far + 1, far + 2)


def test_operations_in_no_step_are_told_where_they_lie_among_the_steps(started):
    assert looked_at(started)[1].between == 0
    gone = pl.when(pl.col("step") != 2).then(pl.col("step"))
    nodes = started.collect().with_columns(step=gone).lazy()
    holed = with_header(replace(started, nodes=nodes), steps=(0, 1, 3))
    found = looked_at(holed)[1]
    lost = started.collect().filter(step=2).height
    assert found.between == lost
    assert f", {lost} operations in no step; `--steps all`" in found.sentence
    assert found.as_dict()["left_out_among_them"] == lost
    # A rank that has ended its steps while others have not is behind them, not among them.
    ahead = pl.when(~((pl.col("step") == 3) & (pl.col("rank") == 0))).then(pl.col("step"))
    early = replace(started, nodes=started.collect().with_columns(step=ahead).lazy())
    assert looked_at(early)[1].between == 0


def test_a_disk_without_room_for_the_steps_is_told(started, tmp_path, monkeypatch):
    monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with room_for(2_000), pytest.raises(OutputError, match="take a temporary file") as caught:
        looked_at(started, "1-2")
    assert "TMPDIR=FOLDER" in caught.value.hint
    assert caught.value.where.startswith(str(tmp_path))
    assert not list(tmp_path.iterdir())
