import polars as pl
import pytest

from prismcalib.errors import MergeInputError
from prismcalib.merging import merge
from prismcalib.prediction import predict
from prismtrace.trace import Trace


def test_step_times_follow_the_ends_of_steps(make_run):
    run = make_run(steps=3)
    prediction = predict(merge(run.trace).trace)
    end = pl.col("start_ns") + pl.col("dur_ns")
    ends = run.table.group_by("step").agg(end=end.max()).sort("step")["end"].to_list()
    first = run.table["start_ns"].min()
    expected = [b - a for a, b in zip([first, *ends], ends, strict=False)]
    assert prediction.steps["step"].to_list() == [0, 1, 2]
    assert prediction.steps["duration_ns"].to_list() == expected
    assert prediction.step_ns == sorted(expected)[1]
    assert sum(expected) == prediction.window_ns


def test_without_steps_the_window_counts(make_run):
    run = make_run()
    trace = Trace(header=run.header, nodes=run.trace.nodes.with_columns(step=None))
    prediction = predict(merge(trace).trace)
    assert prediction.steps.rows() == [(None, prediction.window_ns)]
    assert prediction.step_ns == prediction.window_ns


def test_what_ranks_do_adds_up(make_run):
    result = merge(make_run().trace)
    prediction = predict(result.trace)
    ranks = prediction.ranks
    assert ranks["rank"].to_list() == [0, 1, 2, 3]
    assert ranks.columns[1:] == [
        "compute_ns",
        "inner_idle_ns",
        "transfer_ns",
        "wait_ns",
        "gap_ns",
    ]
    assert (ranks.drop("rank").sum_horizontal() == prediction.window_ns).all()
    # Nothing overlaps in this run, so waiting is the wait of its communications.
    assert ranks["wait_ns"].sum() == result.report.wait_ns


def test_overlapping_streams_are_counted_once(make_run):
    run = make_run(ranks=1, steps=1)
    rows = run.trace.collect()
    twin = rows.with_columns(
        index=pl.col("index") + rows.height,
        id=pl.col("id") + rows.height,
        stream=pl.lit(3, pl.Int16),
        seq=None,
    )
    double = Trace(header=run.header, nodes=pl.concat([rows, twin]).lazy())
    alone, both = (predict(merge(trace).trace).ranks for trace in (run.trace, double))
    assert alone.equals(both)


def test_the_basis_covers_the_path(make_run):
    basis = predict(merge(make_run().trace).trace).basis
    assert sum(basis.values()) == pytest.approx(1)
    assert {"computation, measured", "transfer, measured"} <= set(basis)
    run = make_run()
    # Some matches are left: without any a merge would refuse.
    lost = pl.when(pl.col("step") != pl.col("step").max()).then("seq")
    trace = Trace(header=run.header, nodes=run.trace.nodes.with_columns(seq=lost))
    basis = predict(merge(trace, clock="keep").trace).basis
    assert "communication without partners, as recorded" in basis


def test_as_json(make_run):
    found = predict(merge(make_run().trace).trace).as_dict()
    assert found["min_step_ns"] <= found["step_ns"] <= found["max_step_ns"]
    assert len(found["ranks"]) == 4


def test_a_trace_that_was_not_merged_is_refused(make_run):
    with pytest.raises(MergeInputError, match="no common timeline"):
        predict(make_run().trace)
