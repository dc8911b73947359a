"""Coarser traces: the same times in fewer rows, valid, and the error stated where there is one."""

from __future__ import annotations

import polars as pl
import pytest

from prismcalib import synth
from prismcalib.build import graph_from_trace
from prismcalib.coarsening import coarsen
from prismcalib.errors import CoarsenError
from prismcalib.merging import merge
from prismcalib.paths import critical_path
from prismcalib.prediction import predict
from prismcalib.propagation import propagate
from prismcalib.waiting import WaitRules
from prismcalib.whatif import what_if
from prismtrace import convert
from prismtrace.trace import open_trace
from prismtrace.validation import validate

SPECS = {
    "dense": synth.JobSpec(pp=2, tp=2, dp=2, microbatches=4, layers_per_stage=3, steps=2),
    "gaps": synth.JobSpec(pp=2, tp=4, dp=1, microbatches=3, launch_gap_ns=3000, jitter=0.2),
    "kernels": synth.JobSpec(
        pp=2, tp=2, dp=2, microbatches=2, kernels_per_block=4, sequence_parallel=True
    ),
    "experts": synth.JobSpec(pp=1, tp=2, dp=4, ep=2, microbatches=2, steps=2),
    "interleaved": synth.JobSpec(
        pp=2, tp=2, dp=1, microbatches=4, layers_per_stage=4, schedule="interleaved", chunks=2
    ),
    "coalesced": synth.JobSpec(pp=4, tp=2, dp=1, microbatches=6, coalesced_p2p=True),
    "tensor only": synth.JobSpec(pp=1, tp=4, dp=1, microbatches=1, layers_per_stage=8),
}


@pytest.fixture(scope="module", params=SPECS, ids=lambda name: name.replace(" ", "-"))
def run(request):
    return merge(synth.generate(SPECS[request.param])).trace


@pytest.fixture(scope="module")
def dense():
    return merge(synth.generate(SPECS["dense"])).trace


def originals(coarse, fine: pl.DataFrame) -> pl.DataFrame:
    """Rows of the result beside the original rows that they begin with."""
    return coarse.nodes.select(
        "rank", "x_first_index", "x_rows", "kind", "start_ns", "dur_ns", "step"
    ).join(
        fine.select("rank", "start_ns", "dur_ns", "kind", x_first_index="index"),
        on=["rank", "x_first_index"],
        how="left",
        suffix="_fine",
        maintain_order="left",
    )


@pytest.mark.parametrize("grain", ["exact", "microbatch"])
def test_times_stay(run, grain):
    coarse = coarsen(run, grain=grain)
    fine = run.nodes.collect()
    assert validate(coarse.trace) == []
    assert coarse.report.largest_error_ns == coarse.report.length_error_ns == 0
    assert coarse.nodes.height == coarse.report.rows_after < coarse.report.rows_before
    assert coarse.nodes["x_rows"].sum() == fine.height
    both = predict(coarse.trace, draws=0), predict(run, draws=0)
    assert both[0].steps.equals(both[1].steps)
    # Rows that were not merged are where they were; computation may move to before the operations
    # that it lay between.
    kept = originals(coarse, fine).filter(pl.col("x_rows") == 1)
    assert (kept["kind"] == kept["kind_fine"]).all()
    if grain == "microbatch":
        kept = kept.filter(pl.col("kind").cast(pl.String).is_in(["send", "recv"]))
    assert (kept["start_ns"] == kept["start_ns_fine"]).all()
    assert (kept["dur_ns"] == kept["dur_ns_fine"]).all()


def test_the_result_propagates_to_the_same_times(run):
    for grain in ("exact", "microbatch"):
        coarse = coarsen(run, grain=grain)
        graph, rows = graph_from_trace(coarse.trace)
        timing = propagate(graph)
        assert (rows["start_ns"] == pl.Series(timing.start_ns)).all()
        assert (rows["dur_ns"] == pl.Series(timing.end_ns - timing.start_ns)).all()


def test_exact_grain_merges_kernels():
    coarse = coarsen(merge(synth.generate(SPECS["kernels"])).trace)
    assert coarse.report.rows_after < 0.6 * coarse.report.rows_before
    assert coarse.report.instances_after == coarse.report.instances_before
    merged = coarse.nodes.filter(pl.col("x_rows") == 4)
    assert merged["kind"].unique().to_list() == ["compute"]
    assert merged["name"].cast(pl.String).str.contains(" ... ").any()


def test_microbatch_grain_leaves_a_computation_and_a_communication(dense):
    coarse = coarsen(dense, grain="microbatch")
    report = coarse.report
    assert report.rows_after < 0.4 * report.rows_before
    assert report.instances_after < 0.4 * report.instances_before
    unit = coarse.nodes.filter(
        (pl.col("rank") == 0) & (pl.col("step") == 0) & (pl.col("microbatch") == 1)
    )
    per_phase = unit.filter(pl.col("group").is_not_null(), pl.col("peer").is_null())
    assert per_phase.group_by("phase").len()["len"].to_list() == [1, 1]
    # Computation in all, and bytes, are those of the parts.
    fine = dense.nodes.collect()
    sums = [
        nodes.filter(pl.col("kind") == "compute")["dur_ns"].sum() for nodes in (fine, coarse.nodes)
    ]
    assert sums[0] == sums[1]
    assert coarse.nodes["bytes"].sum() == fine["bytes"].sum()
    assert report.uneven_ns > 0
    assert 0 < report.probed_error < 0.05


def test_what_if_on_either_grain_gives_about_the_same(dense):
    from prismcalib.edits import Scale

    edit = Scale('kind == "compute" and rank < 2', 1.3)
    fine = what_if(dense, [edit]).scenarios[0].step_ns
    exact = what_if(coarsen(dense).trace, [edit]).scenarios[0].step_ns
    units = what_if(coarsen(dense, grain="microbatch").trace, [edit]).scenarios[0].step_ns
    assert exact == pytest.approx(fine, abs=100)
    assert units == pytest.approx(fine, rel=0.02)


def test_gaps_become_idle_time_inside():
    run = merge(synth.generate(SPECS["gaps"])).trace
    coarse = coarsen(run, grain="microbatch")
    merged = coarse.nodes.filter((pl.col("x_rows") > 1) & (pl.col("kind") == "compute"))
    assert (merged["x_busy_ns"] < merged["dur_ns"]).all()
    fine = run.nodes.filter(pl.col("kind") == "compute").collect()
    assert coarse.nodes["x_busy_ns"].sum() == fine["dur_ns"].sum()


def test_the_path_takes_as_long(dense):
    for grain in ("exact", "microbatch"):
        path = critical_path(coarsen(dense, grain=grain).trace)
        assert path.length_ns == critical_path(dense).length_ns
        parts = (path.lead_in_ns, path.compute_ns, path.transfer_ns, path.unmatched_ns, path.gap_ns)
        assert sum(parts) == path.length_ns


def test_coarsening_twice_changes_nothing(dense):
    for grain in ("exact", "microbatch"):
        once = coarsen(dense, grain=grain)
        twice = coarsen(once.trace, grain=grain)
        assert twice.nodes.equals(once.nodes)
    exact_first = coarsen(coarsen(dense).trace, grain="microbatch")
    assert exact_first.report.rows_after == coarsen(dense, grain="microbatch").report.rows_after


def test_wait_rules_are_kept():
    spec = SPECS["dense"]
    rules = WaitRules(eager_below=1 << 40, rooted=True)
    run = merge(synth.generate(spec), rules=rules).trace
    for grain in ("exact", "microbatch"):
        coarse = coarsen(run, grain=grain)
        assert coarse.report.largest_error_ns == 0
        assert WaitRules.of(coarse.header) == rules
        assert predict(coarse.trace, draws=0).step_ns == predict(run, draws=0).step_ns


def test_recorded_traces_merge_to_the_same_length():
    recorded = synth.generate(SPECS["kernels"])
    coarse = coarsen(recorded)
    assert validate(coarse.trace) == []
    assert coarse.report.rows_after < coarse.report.rows_before
    assert merge(coarse.trace).report.propagated_ns == merge(recorded).report.propagated_ns


def test_bare_graphs_become_as_coarse_as_what_was_measured():
    recorded = synth.generate(SPECS["kernels"])
    bare, coarse = coarsen(synth.bare_graph(recorded)), coarsen(recorded)
    assert bare.nodes["start_ns"].null_count() == bare.nodes.height
    columns = ["id", "kind", "group", "seq", "deps", "x_rows"]
    assert bare.nodes.select(columns).equals(coarse.nodes.select(columns))


def test_written_and_read_again(dense, tmp_path):
    coarse = coarsen(dense, grain="microbatch")
    coarse.write(tmp_path / "coarse.parquet")
    again = open_trace(tmp_path / "coarse.parquet")
    assert again.header.extra["coarsen"] == coarse.report.as_dict()
    assert again.nodes.collect().select("id", "dur_ns").equals(coarse.nodes.select("id", "dur_ns"))


def test_what_cannot_be_made_coarser(tmp_path):
    recorded = synth.generate(SPECS["dense"])
    paths = synth.cut_into_slices(recorded, tmp_path, 4)
    with pytest.raises(CoarsenError, match="must keep its rows") as caught:
        coarsen(paths[0])
    assert str(paths[0]) in caught.value.where
    for trace in (recorded, synth.bare_graph(recorded)):
        with pytest.raises(CoarsenError, match="whom a rank waited for"):
            coarsen(trace, grain="microbatch")


@pytest.mark.needs_data
def test_a_real_tensor_parallel_step(data_dir, tmp_path):
    source = sorted((data_dir / "kineto" / "megatron-tp8").glob("*.json.gz"))
    convert(source, tmp_path / "run.parquet", grain="kernel")
    run = merge(tmp_path / "run.parquet").trace
    exact, units = coarsen(run), coarsen(run, grain="microbatch")
    for coarse in (exact, units):
        assert [v for v in validate(coarse.trace) if v.severity == "error"] == []
        assert coarse.report.largest_error_ns == 0
        assert predict(coarse.trace, draws=0).step_ns == predict(run, draws=0).step_ns
    assert exact.report.rows_after < 0.5 * exact.report.rows_before
    assert units.report.rows_after < exact.report.rows_after
