from dataclasses import replace
from functools import partial

import polars as pl
import pytest

import prismtrace as pt
from prismcalib import describe_run, longest_waits
from prismcalib.errors import CoverageError, MergeInputError, MissingMemberError
from prismcalib.merging import merge
from prismcalib.path_printing import print_path
from prismcalib.paths import critical_path
from prismcalib.prediction import predict
from prismtrace.trace import Trace


def test_the_parts_add_up(make_run):
    result = merge(make_run().trace)
    path = critical_path(result.trace)
    parts = path.compute_ns + path.transfer_ns + path.unmatched_ns + path.gap_ns + path.lead_in_ns
    assert parts == path.length_ns == result.report.propagated_ns
    assert path.gap_ns == result.report.lags_on_critical_path.total_ns
    assert path.compute_ns > 0
    assert path.transfer_ns > 0
    assert path.hops > 0
    segments = path.segments
    assert segments["busy_ns"].sum() + segments["gap_ns"].sum() + path.lead_in_ns == parts
    ends = segments["start_ns"] + segments["busy_ns"] + segments["gap_ns"].shift(-1).fill_null(0)
    assert (ends[:-1] == segments["start_ns"][1:]).all()


def test_ranks_that_others_wait_for_may_not_be_absent(make_run, tmp_path, monkeypatch):
    whole = merge(make_run().trace).trace
    cut = tmp_path / "cut.parquet"
    pt.slice_out(whole, cut, ranks=[0, 1])
    for ask in (critical_path, predict, partial(predict, draws=0), describe_run, longest_waits):
        with pytest.raises((MissingMemberError, CoverageError)):
            ask(pt.open(cut))
    # Too large for a graph: the groups tell.
    monkeypatch.setattr("prismcalib.paths.is_large", lambda _: True)
    monkeypatch.setattr("prismcalib.prediction.is_large", lambda _: True)
    monkeypatch.setattr("prismcalib.report.data.RESAMPLED_ROWS", 0)
    for ask in (critical_path, describe_run, predict):
        with pytest.raises(CoverageError, match="its other ranks wait for them"):
            ask(pt.open(cut))
    assert critical_path(whole).length_ns > 0


def test_shares(make_run):
    path = critical_path(merge(make_run().trace).trace)
    for column in ("kind", "rank", "group", "phase", "step"):
        shares = path.shares(column)
        assert shares["segments"].sum() == path.segments.height
        assert shares["share"].is_sorted(descending=True)
        assert shares["share"].sum() == pytest.approx(1 - path.lead_in_ns / path.length_ns)
    assert set(path.shares("kind")["kind"]) <= {"compute", "all_reduce", "send", "recv"}
    assert set(path.shares("group")["group"]) <= {None, "world", "pair_0", "pair_1"}
    longest = path.longest(3)
    assert longest.height == 3
    assert longest["busy_ns"][0] >= longest["busy_ns"][1] - 20_000


def test_a_slow_rank_holds_the_path(make_run):
    run = make_run(slow_rank=2)
    path = critical_path(merge(run.trace).trace)
    assert path.shares("rank")["rank"][0] == 2
    assert path.shares("rank")["share"][0] > 0.8
    ranks = predict(merge(run.trace).trace).ranks.sort("wait_ns")
    assert ranks["rank"][0] == 2


def test_as_json(make_run):
    found = critical_path(merge(make_run().trace).trace).as_dict(limit=2)
    assert len(found["longest"]) == 2
    assert set(found["shares"]) == {"kind", "rank", "group", "phase", "step"}


def test_a_trace_that_was_not_merged_is_refused(make_run):
    with pytest.raises(MergeInputError, match="no common timeline") as caught:
        critical_path(make_run().trace)
    assert "prismcalib merge" in caught.value.hint


def test_large_traces_give_the_same_path(make_run, monkeypatch):
    trace = merge(make_run().trace).trace
    whole = critical_path(trace)
    monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
    streamed = critical_path(trace)
    assert streamed.as_dict() == whole.as_dict()
    assert streamed.segments.equals(whole.segments)


def test_large_traces_are_refused_like_others(make_run, monkeypatch):
    merged = merge(make_run().trace).trace
    monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
    lacking = Trace(header=merged.header, nodes=merged.nodes.filter(pl.col("rank") != 1))
    with pytest.raises(CoverageError, match="no rows of ranks 1"):
        critical_path(lacking)
    unmarked = Trace(header=merged.header, nodes=merged.nodes.with_columns(critical=False))
    with pytest.raises(MergeInputError, match="no row of the trace is marked"):
        critical_path(unmarked)


def test_a_long_start_is_told(make_run, capsys):
    trace = merge(make_run(steps=4).trace).trace
    path = critical_path(trace)
    share, later = path.start_share()
    assert 0.1 < share < 0.5
    assert later == (1, 3)
    print_path(path, None, trace.header, 3)
    assert "job's start" not in capsys.readouterr().out
    late = pl.when(pl.col("step") == 0).then(40 * pl.col("busy_ns")).otherwise(pl.col("busy_ns"))
    slow = path.segments.with_columns(busy_ns=late)
    length = path.length_ns + slow["busy_ns"].sum() - path.segments["busy_ns"].sum()
    print_path(replace(path, segments=slow, length_ns=length), None, trace.header, 3)
    assert "`--steps 1-3`" in capsys.readouterr().out
    once = critical_path(merge(make_run(steps=2).trace).trace)
    assert once.start_share() is None
