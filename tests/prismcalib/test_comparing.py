from dataclasses import replace

import polars as pl
import pytest
from typer.testing import CliRunner

from prismcalib import synth
from prismcalib.cli import app
from prismcalib.comparing import compare
from prismcalib.errors import ComparisonError, MergeInputError
from prismcalib.merging import merge
from prismcalib.operations import group_families, operations
from prismcalib.prediction import predict
from prismcalib.wording import doubts
from prismtrace.headers import SHARED_CORES
from prismtrace.trace import Trace, write
from tests.prismtrace.conftest import build_trace

SHAPE = {"pp": 2, "tp": 1, "dp": 2, "layers_per_stage": 1, "steps": 4, "seed": 1}
EXACT = {"jitter": 0, "step_jitter": 0, "comm_jitter": 0, "moe_imbalance": 0, "end_spread_ns": 0}


def run(**changes):
    return merge(synth.generate(synth.JobSpec(**{**SHAPE, **changes}))).trace


def test_a_run_equals_itself():
    trace = run()
    found = compare(trace, trace)
    assert found.change_ns == found.own_effect_ns == found.gap_effect_ns == 0
    assert found.classes["change_ns"].abs().sum() == 0
    assert (found.classes["ratio"].drop_nulls() == 1).all()
    assert found.classes["effect_ns"].drop_nulls().abs().sum() == 0
    assert found.step_a_ns == predict(trace, draws=0).step_ns


def test_the_class_that_changed_comes_first_with_its_effect():
    slow = {"mean_ns": {"optimizer": 5_000_000}}
    found = compare(run(**EXACT), run(**EXACT, **slow))
    first = found.classes.row(0, named=True)
    assert (first["kind"], first["phase"], first["name"]) == ("compute", "optimizer", "adam")
    assert first["ratio"] == pytest.approx(2)
    assert first["change_ns"] == pytest.approx(2_500_000, rel=0.01)
    # Nothing hides it: the optimizer is on the critical path of every rank.
    assert first["effect_ns"] == pytest.approx(found.change_ns, rel=0.01)
    assert found.own_effect_ns == pytest.approx(found.change_ns, rel=0.01)
    assert first["clear"]
    assert found.classes["effect_ns"][1:].drop_nulls().abs().max() == 0


def test_a_slow_rank_shows_by_rank_not_by_class():
    found = compare(run(dp=4), run(dp=4, stragglers={3: 1.5}))
    assert found.ranks["rank"][0] == 3
    assert found.ranks["effect_ns"][0] > 0.8 * found.change_ns
    assert found.own_effect_ns < 0.5 * found.change_ns
    by_rank = compare(run(dp=4), run(dp=4, stragglers={3: 1.5}), by=["rank"])
    assert by_rank.classes["rank"][0] == 3


def test_what_a_slow_rank_does_not_do_longer_is_not_slowed():
    # The slow device moves from rank 1 to rank 0: alone, rank 0 would be waited for as long.
    a, b = (run(pp=1, dp=2, **EXACT, stragglers={rank: 1.5}) for rank in (1, 0))
    effects = dict(compare(a, b).ranks.select("rank", "effect_ns").iter_rows())
    assert effects[1] < 0
    assert abs(effects[0]) < 0.001 * -effects[1]


def test_larger_payloads_are_told():
    trace = run()
    sent = pl.col("kind") == "send"
    larger = Trace(
        trace.header,
        trace.nodes.with_columns(bytes=pl.col("bytes") * pl.when(sent).then(2).otherwise(1)),
    )
    found = compare(trace, larger)
    assert set(found.sizes["kind"]) == {"send"}
    assert (found.sizes["bytes_b"] == 2 * found.sizes["bytes_a"]).all()
    before = found.sizes["bytes_a"][0]
    assert found.notes[0].startswith("send ")
    assert found.notes[0].endswith(f" bytes in B, {before:,.0f} in A (means)")
    assert compare(trace, trace).notes == ()


def test_gaps():
    found = compare(run(launch_gap_ns=5_000), run(launch_gap_ns=20_000))
    assert found.gap_effect_ns > 0.5 * found.change_ns > 0
    assert abs(found.own_effect_ns) < 0.2 * found.change_ns


def test_runs_of_other_length_and_size():
    found = compare(run(steps=3), run(steps=6, dp=4, seed=5))
    assert found.ranks is None
    assert found.classes["ratio"].drop_nulls().is_between(0.8, 1.25).all()
    assert compare(run(steps=1), run(steps=2)).classes["clear"].null_count()


def test_classes_of_one_run_only():
    found = compare(run(), run(ep=2), by=["kind"])
    new = found.classes.filter(pl.col("kind") == "all_to_all").row(0, named=True)
    assert new["count_a"] == 0 == new["time_a_ns"]
    assert new["change_ns"] == new["time_b_ns"] > 0
    assert new["ratio"] is None is new["effect_ns"]


def test_few_effects_are_the_largest_changes():
    a, b = run(), run(seed=9, mean_ns={"optimizer": 4_000_000})
    full, short = compare(a, b), compare(a, b, effects=2)
    assert short.classes["effect_ns"].drop_nulls().len() == 2
    assert short.classes.row(0) == full.classes.row(0)


def test_what_is_refused(make_run):
    trace = run(steps=1)
    with pytest.raises(ComparisonError, match="cannot compare by colour"):
        compare(trace, trace, by=["colour"])
    with pytest.raises(ComparisonError, match="by nothing"):
        compare(trace, trace, by=[])
    with pytest.raises(ComparisonError, match="no class"):
        compare(trace, merge(make_run().trace).trace, by=["name", "phase"])
    with pytest.raises(MergeInputError):
        compare(trace, synth.generate(synth.JobSpec()))


def test_operations_and_families(make_run):
    result = merge(make_run().trace)
    table = operations(result.trace)
    assert table.height == result.nodes.height
    assert set(group_families(result.header).values()) == {"world", "pair"}
    assert (table["own_ns"] + table["wait_ns"] == result.nodes["dur_ns"]).all()
    assert table["place"].max() + 1 == table.filter(rank=0, step_number=0).height
    recorded = operations(make_run().trace)
    assert recorded.filter(~pl.col("local"))["own_ns"].null_count() == (~table["local"]).sum()


def test_operations_of_one_run_only_are_noted():
    few, many = run(), run(layers_per_stage=2)
    found = compare(few, many)
    assert found.only_in_a == 0
    assert found.only_in_b > 1
    note = found.notes[0]
    assert note.startswith(f"{found.only_in_b:.4g} operations per step and rank exist only in B")
    assert found.as_dict()["notes"] == list(found.notes)
    assert compare(few, few).notes == ()
    by_rank = compare(few, many, by=["rank"])
    assert by_rank.only_in_b == pytest.approx(4 * found.only_in_b)
    assert "per step of all ranks" in by_rank.notes[0]


def test_computation_that_is_cut_otherwise_counts_by_its_whole_time():
    """Spans of CPUs end at pauses: as much computation may be few spans or many."""
    one = {"kind": "compute", "phase": "forward", "step": 1}
    few = build_trace(
        *({**one, "rank": rank, "start_ns": 0, "dur_ns": 120} for rank in range(2)),
        kind="calibrated",
        steps=(1,),
    )
    many = build_trace(
        *(
            {**one, "rank": rank, "start_ns": start, "dur_ns": 20}
            for rank in range(2)
            for start in (0, 20, 40)
        ),
        kind="calibrated",
        steps=(1,),
    )
    found = compare(few, many, by=["kind", "phase"])
    (row,) = found.classes.to_dicts()
    assert (row["count_a"], row["count_b"]) == (1, 3)
    assert row["ratio"] == pytest.approx(0.5)
    assert found.ranks["ratio"].to_list() == pytest.approx([0.5, 0.5])
    assert row["effect_ns"] == found.own_effect_ns == found.change_ns == -60
    assert found.rest_ns == found.as_dict()["rest_ns"] == 0


def test_what_effects_do_not_explain_is_said():
    trace = run()
    same = compare(trace, trace)
    assert same.rest_ns == 0
    slower = replace(same, step_b_ns=2 * same.step_a_ns)
    assert slower.rest_ns == slower.as_dict()["rest_ns"] == same.step_a_ns
    (note,) = slower.notes
    assert note.startswith("+100.0% of the step comes neither from longer or shorter operations")


def test_names_that_only_one_run_has_are_noted():
    trace = run()
    other = pl.when(pl.col("index") % 2 == 0).then(pl.lit("other")).otherwise(pl.col("name"))
    nodes = trace.nodes.with_columns(name=other.cast(pl.String).cast(pl.Categorical))
    renamed = Trace(header=trace.header, nodes=nodes)
    assert any("compare without names" in note for note in compare(trace, renamed).notes)
    assert compare(trace, renamed, by=["kind", "phase", "group"]).notes == ()


def test_times_that_merging_made_longer_are_told():
    trace = run()
    merged = trace.header.extra["merge"]
    assert doubts(trace.header) == ()
    longer = {
        **merged,
        "propagated_ns": round(1.11 * merged["recorded_ns"]),
        "overlap_clamps": {"count": 7, "total_ns": 100},
        "overlaps_by_kind": {"send": 90, "recv": 10},
    }
    header = trace.header.model_copy(
        update={"extra": {**trace.header.extra, "merge": longer}, "streams": {0: "gloo send"}}
    )
    (text,) = doubts(header)
    assert text.startswith("times are 11 % longer than observed: 7 rows, send above all,")
    assert "gloo runs operations side by side" in text
    doubtful = compare(trace, Trace(header=header, nodes=trace.nodes))
    assert doubtful.notes[0] == f"B: {text}"


def test_of_ranks_that_shared_cores_no_change_is_clear(capsys, tmp_path):
    trace = run()
    plain = compare(trace, run(stragglers={1: 1.5}))
    assert plain.ranks["clear"].any()
    extra = {**trace.header.extra, SHARED_CORES: {"ranks": 8, "cores": 2}}
    header = trace.header.model_copy(update={"extra": extra})
    shared = Trace(header=header, nodes=trace.nodes)
    told = "8 ranks shared 2 cores when this was recorded"
    found = compare(shared, run(stragglers={1: 1.5}))
    assert found.doubts[0].startswith(f"A: {told}")
    assert found.classes["clear"].null_count() == found.classes.height
    assert found.ranks["clear"].null_count() == found.ranks.height
    assert compare(shared, shared).doubts[0].startswith("A and B: ")
    # Every command that tells times says it once.
    write(shared, tmp_path / "shared.parquet")
    for command in ("critical-path", "predict", "stragglers", "waits"):
        app([command, str(tmp_path / "shared.parquet")], standalone_mode=False)
        assert capsys.readouterr().out.count(told) == 1


def test_a_property_that_is_named_twice_counts_once(tmp_path):
    trace = merge(synth.generate(synth.JobSpec(pp=1, tp=2, dp=1, steps=2))).trace
    write(trace, tmp_path / "run.parquet")
    once, twice = compare(trace, trace, by=["kind"]), compare(trace, trace, by=["kind", "kind"])
    assert twice.as_dict() == once.as_dict()
    path = str(tmp_path / "run.parquet")
    words = ["compare", path, path, "--by", "rank", "--by", "rank"]
    named = CliRunner().invoke(app, words, catch_exceptions=False)
    assert named.output == CliRunner().invoke(app, words[:-2]).output
