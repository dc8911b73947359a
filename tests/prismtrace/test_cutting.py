"""Pieces of traces: what they keep, what is cut, and that they are traces again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prismtrace as pt
from prismtrace.converters import convert
from prismtrace.errors import OutputError, RankError, StepError, TraceError
from prismtrace.schema import ClockDomain
from prismtrace.trace import Trace
from tests.prismtrace.kineto_jobs import Job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Eight ranks on two hosts with clocks of their own, three steps."""
    folder = tmp_path_factory.mktemp("run")
    job = Job(tp=2, dp=2, pp=2, torch="2.5", steps=3, ranks_per_host=4, host_offset_ns=10**9)
    convert(job.write(folder / "in"), folder / "run.parquet")
    return pt.open(folder / "run.parquet")


@pytest.fixture
def piece(tmp_path: Path) -> Path:
    return tmp_path / "piece.parquet"


def errors(path: Path) -> list[str]:
    return [v.rule for v in pt.validate(pt.open(path)) if v.severity == "error"]


def test_ranks(run: Trace, piece: Path) -> None:
    report = pt.slice_out(run, piece, ranks=[5, 0])
    cut = pt.open(piece)
    assert cut.collect().equals(run.ranks([0, 5]).collect())
    assert (cut.header.ranks, cut.header.world_size) == ((0, 5), 8)
    assert [domain.ranks for domain in cut.header.clock] == [(0,), (5,)]
    assert (report.ranks, report.steps) == ((0, 5), (3, 4, 5))
    assert (report.cut_dependencies, report.cut_partners) == (0, 0)
    assert errors(piece) == []


def test_steps_are_numbered_anew(run: Trace, piece: Path) -> None:
    report = pt.slice_out(run, piece, steps=[4])
    cut, whole = pt.open(piece).collect(), run.collect().filter(pl.col("step") == 4)
    anew = {"id", "index", "deps"}
    assert cut.drop(anew).equals(whole.drop(anew))
    assert cut["index"].to_list()[:3] == [0, 1, 2]
    lost = whole["deps"].list.len().sum() - cut["deps"].list.len().sum()
    assert report.cut_dependencies == lost > 0
    assert pt.open(piece).header.policies["cut-dependency"] == lost
    assert errors(piece) == []


def test_steps_with_a_gap_between_them(run: Trace, piece: Path) -> None:
    pt.slice_out(run, piece, steps=[3, 5])
    assert pt.open(piece).header.steps == (3, 5)
    assert pt.validate(pt.open(piece)) == []  # numbers of instances without gaps


def test_edges_of_kept_rows_stay(run: Trace, piece: Path) -> None:
    pt.slice_out(run, piece, steps=[4, 5])
    cut = pt.open(piece).collect()
    whole = run.collect().filter(pl.col("step") >= 4)
    was = dict(zip(cut["id"], whole["id"], strict=True))
    edges = pt.open(piece).edges().filter(pl.col("kind") == "directional")
    known = set(run.edges().filter(pl.col("kind") == "directional").select("src", "dst").rows())
    moved = {(was[src], was[dst]) for src, dst in edges.select("src", "dst").iter_rows()}
    kept = set(whole["id"])
    assert moved == {(src, dst) for src, dst in known if src in kept and dst in kept}


def test_a_window_counts_from_the_first_start_of_each_clock(run: Trace, piece: Path) -> None:
    pt.slice_out(run, piece, window_ns=(0, 1_000_000))
    cut = pt.open(piece).collect()
    assert cut["rank"].n_unique() == 8
    first = run.collect().with_columns(host=pl.col("rank") // 4)
    for host, start in first.group_by("host").agg(pl.col("start_ns").min()).iter_rows():
        mine = cut.filter(pl.col("rank") // 4 == host)
        assert (mine["start_ns"] < start + 1_000_000).all()


def test_clocks_with_known_offsets_are_one(make_trace: Any, piece: Path) -> None:
    clock = (
        ClockDomain(id=0, ranks=(0,), offset_ns=0),
        ClockDomain(id=1, ranks=(1,), offset_ns=1_000),
    )
    rows = [{"rank": rank, "start_ns": s, "dur_ns": 10} for rank in (0, 1) for s in (0, 1_000)]
    trace = make_trace(*rows, kind="recorded", clock=clock)
    pt.slice_out(trace, piece, window_ns=(900, 1_100))
    cut = pt.open(piece).collect()
    assert cut.select("rank", "start_ns").rows() == [(0, 1_000), (1, 0)]


def test_communications_that_lose_a_member_wait_for_nobody(make_trace: Any, piece: Path) -> None:
    comm = {"kind": "all_reduce", "group": 0, "seq": 0}
    trace = make_trace(
        {**comm, "rank": 0, "start_ns": 0, "dur_ns": 100},
        {**comm, "rank": 1, "start_ns": 90, "dur_ns": 10},
        {"rank": 1, "start_ns": 0, "dur_ns": 5},
        kind="recorded",
    )
    report = pt.slice_out(trace, piece, window_ns=(0, 50))
    assert report.cut_partners == 1
    cut = pt.open(piece)
    assert cut.collect().select("rank", "kind", "seq").rows() == [
        (0, "all_reduce", None),
        (1, "compute", None),
    ]
    assert cut.header.policies == {"cut-partner": 1}
    assert errors(piece) == []


def test_lags_and_edges_from_other_ranks_go_with_their_edges(make_trace: Any, piece: Path) -> None:
    far = [0 << 32 | 0, 0 << 32 | 1]
    trace = make_trace(
        {"step": 0},
        {"step": 1},
        {"rank": 1, "step": 0},
        {"rank": 1, "step": 1, "deps": [1], "lag_ns": [5]},
        {"rank": 1, "step": 1, "deps": [1, 2], "xdeps": far, "lag_ns": [1, 2, 3, 4]},
        {"rank": 1, "step": 1, "deps": [1]},
        kind="bare",
        steps=(0, 1),
    )
    report = pt.slice_out(trace, piece, steps=[1])
    cut = pt.open(piece).collect().select("id", "deps", "xdeps", "lag_ns").rows()
    assert cut == [
        (0, [], None, None),
        (1 << 32, [], None, []),
        (1 << 32 | 1, [1], [0], [1, 4]),
        (1 << 32 | 2, [1], None, None),
    ]
    assert report.cut_dependencies == 3
    assert errors(piece) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    begin=st.integers(0, 6_000_000),
    length=st.integers(1, 4_000_000),
    ranks=st.sets(st.integers(0, 7), min_size=1),
    steps=st.none() | st.sets(st.integers(3, 5), min_size=1),
)
def test_every_piece_is_a_valid_trace(
    run: Trace, piece: Path, begin: int, length: int, ranks: set[int], steps: set[int] | None
) -> None:
    words = {"ranks": sorted(ranks), "steps": None if steps is None else sorted(steps)}
    try:
        report = pt.slice_out(run, piece, window_ns=(begin, begin + length), **words)
    except TraceError as error:
        assert "no node" in error.message  # noqa: PT017
        return
    assert errors(piece) == []
    assert pt.open(piece).collect().height == report.nodes <= report.nodes_before


# --- refusals -----------------------------------------------------------------------------------


def test_what_is_not_there(run: Trace, piece: Path) -> None:
    with pytest.raises(RankError, match="rank 9 is not in the trace") as caught:
        pt.slice_out(run, piece, ranks=[1, 9])
    assert caught.value.hint == "it has ranks 0-7"
    with pytest.raises(StepError, match="steps 8-9 are not in the trace") as step:
        pt.slice_out(run, piece, steps=[8, 9])
    assert step.value.hint == "it has steps 3-5"
    with pytest.raises(TraceError, match="no node of the trace lies in"):
        pt.slice_out(run, piece, window_ns=(10**12, 10**13))
    assert not piece.exists()


def test_what_cannot_be_cut(make_trace: Any, piece: Path) -> None:
    with pytest.raises(TraceError, match="the trace has no times"):
        pt.slice_out(make_trace({}, kind="bare"), piece, window_ns=(0, 1))
    with pytest.raises(TraceError, match="only ranks can be cut out of a slice"):
        pt.slice_out(make_trace({"step": 0}, kind="slice", steps=(0,)), piece, steps=[0])
    with pytest.raises(StepError) as caught:
        pt.slice_out(make_trace({}, kind="bare"), piece, steps=[0])
    assert caught.value.hint == "it has no steps marked"


def test_rows_of_slices_keep_their_numbers(make_trace: Any, piece: Path) -> None:
    trace = make_trace({}, {"rank": 1, "index": 4, "real": False}, {"rank": 1, "index": 7})
    pt.slice_out(trace, piece, ranks=[1])
    assert pt.open(piece).collect()["index"].to_list() == [4, 7]


def test_the_input_is_not_overwritten(run: Trace) -> None:
    with pytest.raises(OutputError, match="one of the inputs"):
        pt.slice_out(run, run.paths[0], ranks=[0])
