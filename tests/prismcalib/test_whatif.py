import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from typer import BadParameter

import prismcalib
from prismcalib.build import graph_from_trace
from prismcalib.cli import app
from prismcalib.edits import Drop, Scale, ScaleGaps, SetDuration, SwapDurations, read_scenarios
from prismcalib.errors import MergeInputError, PredicateError, ScenarioError
from prismcalib.merging import merge
from prismcalib.prediction import predict
from prismcalib.propagation import propagate
from prismcalib.waiting import WaitRules
from prismcalib.whatif import what_if
from prismtrace.errors import InputFileError

ENGINES = ["networkx", "python", "array"]


@pytest.fixture
def merged(make_run):
    return merge(make_run(slow_rank=2).trace)


def only(answer):
    (scenario,) = answer.scenarios
    return scenario


def test_the_baseline_is_the_trace(merged):
    answer = what_if(merged.trace, [Scale("true", 1)])
    for run in (answer.baseline, only(answer)):
        assert run.delta_ns == 0
        assert run.length_ns == merged.report.propagated_ns
        assert run.step_ns == predict(merged.trace).step_ns
        expected = prismcalib.critical_path(merged.trace)
        assert run.critical_path.segments.equals(expected.segments)
        assert run.critical_path.as_dict() == replace(expected, looked_at=None).as_dict()
    assert only(answer).edited == merged.nodes.height


@pytest.mark.parametrize("engine", ENGINES)
def test_durations_change_as_said(merged, engine):
    edits = [Scale("kind = 'compute' and rank = 2", 0.05), SetDuration('kind == "send"', 7)]
    run = only(what_if(merged.trace, edits, engine=engine))
    graph, rows = graph_from_trace(merged.trace)
    duration = graph.duration_ns.copy()
    slow = rows.select((pl.col("kind") == "compute") & (pl.col("rank") == 2)).to_series()
    sends = (rows["kind"] == "send").to_numpy()
    duration[slow.to_numpy()] = np.rint(duration[slow.to_numpy()] * 0.05)
    duration[sends] = 7
    timing = propagate(replace(graph, duration_ns=duration))
    assert run.length_ns == timing.makespan_ns
    assert run.edited == slow.sum() + sends.sum()
    path = run.critical_path
    assert (
        path.compute_ns + path.transfer_ns + path.gap_ns + path.lead_in_ns + path.unmatched_ns
        == path.length_ns
    )
    assert path.shares("rank")["share"][0] < 0.8
    ends = pl.DataFrame({"step": rows["step"], "end": timing.end_ns}).group_by("step").max()
    ends = ends.sort("step")["end"].to_list()
    first = int(timing.start_ns.min())
    assert run.steps_ns.tolist() == np.diff([first, *ends]).tolist()


def test_edits_apply_in_order(merged):
    twice = only(what_if(merged.trace, [SetDuration("true", 100), Scale("true", 2)]))
    once = only(what_if(merged.trace, [Scale("true", 2), SetDuration("true", 100)]))
    assert twice.length_ns > once.length_ns


def test_many_scenarios_give_what_each_gives_alone(merged):
    named = {
        "fast": [Scale("kind = 'compute'", 0.5)],
        "no gaps": [ScaleGaps("true", 0)],
        "no sends": [Drop("kind in ('send', 'recv')")],
        "slow": [Scale("rank = 1", 3), ScaleGaps("rank = 1", 2)],
        "half": [Drop("kind = 'all_reduce' and rank = 2")],
    }
    answer = what_if(merged.trace, named)
    assert [scenario.name for scenario in answer.scenarios] == list(named)
    for scenario in answer.scenarios:
        for engine in ENGINES:
            alone = only(what_if(merged.trace, named[scenario.name], engine=engine))
            assert alone.steps_ns.tolist() == scenario.steps_ns.tolist()
            assert alone.critical_path.segments.equals(scenario.critical_path.segments)
            assert alone.edited == scenario.edited


def test_gaps(merged):
    run = only(what_if(merged.trace, [ScaleGaps("true", 0)]))
    assert run.critical_path.gap_ns == 0
    assert run.delta_ns <= 0


def test_dropped_rows_neither_take_time_nor_keep_others_waiting(make_run):
    trace = merge(make_run(slow_rank=2).trace).trace
    # Without communication every rank runs alone, and the slow one is the longest.
    run = only(what_if(trace, [Drop("kind <> 'compute'")]))
    rows = trace.collect().filter(pl.col("kind") == "compute")
    gaps = rows["lag_ns"].list.sum().fill_null(0)
    alone = rows.with_columns(time=pl.col("dur_ns") + gaps).group_by("rank").agg("time")
    starts = rows.group_by("rank").agg(pl.col("start_ns").min())
    ends = alone.join(starts, on="rank").select(end=pl.col("start_ns") + pl.col("time").list.sum())
    assert run.length_ns == ends["end"].max() - rows["start_ns"].min()
    assert run.critical_path.transfer_ns == 0
    # Of a collective only one member goes: the others still wait for each other.
    graph, _ = graph_from_trace(trace)
    partly = only(what_if(trace, [Drop("kind = 'all_reduce' and group = 0 and rank = 2")]))
    assert 0 < partly.length_ns < propagate(graph).makespan_ns


def test_durations_of_another_run(make_run, tmp_path):
    slow, normal = (merge(make_run(slow_rank=rank).trace) for rank in (2, None))
    other = tmp_path / "normal.parquet"
    normal.write(other)
    run = only(what_if(slow.trace, [SwapDurations(other), ScaleGaps("true", 0)]))
    expected = only(what_if(normal.trace, [ScaleGaps("true", 0)]))
    assert run.length_ns == expected.length_ns
    assert run.edited == slow.nodes.height
    part = only(what_if(slow.trace, [SwapDurations(other, "rank = 2")]))
    assert part.edited == slow.nodes.filter(pl.col("rank") == 2).height
    # Fewer steps there: the rest stays.
    merge(make_run(steps=1).trace).write(other)
    fewer = only(what_if(slow.trace, [SwapDurations(other)]))
    assert 0 < fewer.edited < slow.nodes.height
    # Another program.
    changed = make_run()
    changed.rows[0]["kind"] = "memcpy"
    merge(changed.trace).write(other)
    with pytest.raises(ScenarioError, match="here compute, there memcpy") as caught:
        what_if(slow.trace, [SwapDurations(other)])
    assert "rank=0 step=0 operation 0" in caught.value.where


def test_other_wait_rules(make_run):
    # Without the all-reduce behind it, a receiver that is late holds up its sender.
    trace = merge(make_run(slow_rank=2).trace).trace
    apart = [Drop("kind = 'all_reduce' and group = 0"), Scale("rank = 2 and kind = 'compute'", 3)]
    rules = WaitRules(eager_below=1 << 30)
    answer = what_if(trace, {"eager": []}, rules=rules)
    assert only(answer).edited == 0
    strict, eager = only(what_if(trace, apart)), only(what_if(trace, apart, rules=rules))
    assert eager.length_ns <= strict.length_ns
    again = merge(trace, rules=rules).trace
    assert only(what_if(again, apart)).length_ns == eager.length_ns


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Scale("true", -1), "factor"),
        (Scale("true", float("nan")), "factor"),
        (Scale("true", 1e30), "overflow"),
        (ScaleGaps("true", float("inf")), "factor"),
        (SetDuration("true", -5), "-5 ns"),
    ],
)
def test_impossible_values_are_refused(merged, edit, message):
    with pytest.raises(ScenarioError, match=message) as caught:
        what_if(merged.trace, {"mine": [edit]})
    assert "'mine'" in caught.value.where


def test_the_scenario_of_a_bad_predicate_is_named(merged):
    with pytest.raises(PredicateError) as caught:
        what_if(merged.trace, {"good": [Scale("true", 1)], "bad": [Scale("kin = 1", 1)]})
    assert caught.value.where == "kin = 1, in scenario 'bad'"


def test_unmerged_traces_and_no_scenarios_are_refused(merged, make_run):
    with pytest.raises(MergeInputError):
        what_if(make_run().trace, [Scale("true", 1)])
    with pytest.raises(ScenarioError):
        what_if(merged.trace, {})


SCENARIOS = """
[[scenario]]
name = "faster"
edits = [
    { scale = 0.5, where = "kind = 'all_reduce'" },
    { set = "1.5us", where = "kind = 'send'" },
]
[[scenario]]
name = "other"
edits = [
    { drop = true, where = "kind = 'memcpy'" },
    { scale_gaps = 0, where = "true" },
    { swap_durations_from = "o.parquet" },
]
"""


def test_scenario_files(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(SCENARIOS)
    scenarios = read_scenarios(file)
    assert scenarios == {
        "faster": [Scale("kind = 'all_reduce'", 0.5), SetDuration("kind = 'send'", 1500)],
        "other": [
            Drop("kind = 'memcpy'"),
            ScaleGaps("true", 0),
            SwapDurations(tmp_path / "o.parquet"),
        ],
    }
    as_json = tmp_path / "s.json"
    entry = {"name": "faster", "edits": [{"scale": 0.5, "where": "kind = 'all_reduce'"}]}
    as_json.write_text(json.dumps({"scenario": [entry]}))
    assert read_scenarios(as_json) == {"faster": scenarios["faster"][:1]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[scenario]", "cannot be read"),
        ("a = 1", "no \\[\\[scenario\\]\\]"),
        ("[[scenario]]\nname = 'a'", "list of edits"),
        ("[[scenario]]\nname = 'a'\nedits = [{scale = 1}]", "predicate"),
        ("[[scenario]]\nname = 'a'\nedits = [{where = 'true'}]", "needs one of"),
        ("[[scenario]]\nname = 'a'\nedits = [3]", "needs one of"),
        ("[[scenario]]\nname = 'a'\nedits = [{scale = 'x', where = 'true'}]", "not understood"),
        ("[[scenario]]\nname = 'a'\nedits = [{drop = false, where = 'true'}]", "not understood"),
        ("[[scenario]]\nname = 'a'\nedits = [{set = '3', where = 'true'}]", "not a duration"),
        (SCENARIOS.replace("other", "faster"), "two scenarios"),
        (SCENARIOS.replace("name = ", "colour = 1\nname = "), "unknown key colour"),
    ],
)
def test_broken_scenario_files(tmp_path, text, message):
    file = tmp_path / "s.toml"
    file.write_text(text)
    with pytest.raises(ScenarioError, match=message) as caught:
        read_scenarios(file)
    assert str(file) in caught.value.where
    with pytest.raises(InputFileError):
        read_scenarios(tmp_path / "none.toml")


def test_a_scenario_is_told_in_a_line(merged):
    answer = what_if(merged.trace, {str(k): [Scale("true", k)] for k in range(1, 6)})
    for text in map(repr, (answer, *answer.scenarios)):
        assert len(text) < 300
        assert "\n" not in text
    assert repr(answer.scenarios[1]).startswith("<Scenario '2': step ")
    assert repr(answer).endswith(", ... 2 more>")


def test_factors_are_written_as_tables_show_them(merged, tmp_path, capsys):
    path = tmp_path / "a.parquet"
    merged.write(path)
    steps = []
    for factor in ("2", "2x", "x 2"):
        app(["what-if", str(path), "--scale", "true", factor, "--json"], standalone_mode=False)
        steps.append(json.loads(capsys.readouterr().out)["scenarios"][0]["step_ns"])
    assert len(set(steps)) == 1
    with pytest.raises(BadParameter, match=r"'twice' is no factor \(expected e\.g\. 0\.5 or 2\)"):
        app(["what-if", str(path), "--scale", "true", "twice"], standalone_mode=False)
