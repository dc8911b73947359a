"""Traces that are read block by block give the answers that a table of all rows gives."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from prismcalib import merge, synth
from prismcalib.block_graph import graph_from_blocks
from prismcalib.blocks import Layout
from prismcalib.build import graph_from_trace
from prismcalib.checking import check_graph
from prismcalib.coarsening import coarsen
from prismcalib.comparing import compare
from prismcalib.edits import Drop, Scale, ScaleGaps, SetDuration, SwapDurations
from prismcalib.errors import (
    CoverageError,
    MergeInputError,
    MissingMemberError,
    PredicateError,
    ScenarioError,
    TooLargeError,
)
from prismcalib.extent import extent_of
from prismcalib.gathering import SliceOptions
from prismcalib.health import device_health
from prismcalib.memory import available_bytes, require_memory
from prismcalib.paths import critical_path
from prismcalib.prediction import predict
from prismcalib.propagation import critical_rows, propagate
from prismcalib.stragglers import find_stragglers
from prismcalib.waiting import WaitRules
from prismcalib.whatif import what_if
from prismtrace.trace import Trace, open_trace

JOBS = {
    "pipeline": synth.JobSpec(
        pp=4, tp=2, dp=2, microbatches=8, steps=3, stragglers={5: 1.3}, launch_gap_ns=3000
    ),
    "experts": synth.JobSpec(pp=1, tp=2, dp=4, ep=4, steps=2, sequence_parallel=True),
    "coalesced": synth.JobSpec(pp=3, tp=1, dp=1, microbatches=6, coalesced_p2p=True, memory=False),
}
RULES = WaitRules(eager_below=2**40, rooted=True, sparse_all_to_all=True)


@pytest.fixture(scope="module", params=[*JOBS, "experts, rules", "slices", "slices beside"])
def calibrated(request, tmp_path_factory):
    if request.param in JOBS:
        return merge(synth.generate(JOBS[request.param])).trace
    if request.param == "experts, rules":
        return merge(synth.generate(JOBS["experts"]), rules=RULES).trace
    folder = tmp_path_factory.mktemp("slices")
    files = synth.cut_into_slices(JOBS["pipeline"], folder, 2)
    result = merge(files, slices=SliceOptions(ranks_per_host=4))
    result.write(folder / "merged.parquet", columns_only=request.param == "slices beside")
    return open_trace(folder / "merged.parquet")


@pytest.fixture
def by_blocks(monkeypatch):
    """Makes every trace a large one, of which each rank is a block."""

    def switch() -> None:
        monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
        monkeypatch.setattr("prismcalib.blocks.BLOCK_ROWS", 1)

    return switch


def test_blocks_are_the_table(calibrated):
    layout, table = Layout.of(calibrated), calibrated.collect()
    assert layout.total == table.height
    names = table.columns
    for rows in (1, 500, 10**9):
        blocks = list(layout.blocks(names, block_rows=rows))
        assert pl.concat(block.nodes for block in blocks).equals(table)
        assert all(table[block.part].equals(block.nodes) for block in blocks)
    some = np.random.default_rng(1).integers(0, table.height, 40)
    assert layout.rows_at(some).equals(table[some])


def test_blocks_of_whole_lines_of_ranks(calibrated):
    layout = Layout.of(calibrated)
    cuts = layout.cuts(1, step=3)
    assert cuts[0] == 0
    assert cuts[-1] == len(layout.ranks)
    assert all(cut % 3 == 0 for cut in cuts[:-1])
    assert max(np.diff(layout.cuts(10**9, ranks_at_once=2))) <= 2


def test_unsorted_rows_are_put_in_order(calibrated):
    mixed = calibrated.collect().sample(fraction=1, shuffle=True, seed=3)
    layout = Layout.of(Trace(header=calibrated.header, nodes=mixed.lazy()))
    assert layout.read(0, len(layout.ranks)).equals(calibrated.collect())


def test_graph_of_blocks_is_the_graph(calibrated, by_blocks):
    whole, _ = graph_from_trace(calibrated)
    other, _ = graph_from_trace(calibrated, rules=WaitRules(rooted=True))
    by_blocks()
    layout = Layout.of(calibrated)
    for graph, rules in ((whole, None), (other, WaitRules(rooted=True))):
        found = graph_from_blocks(layout, rules)
        for name in ("duration_ns", "dep_offsets", "dep_rows", "dep_lag_ns", "release_ns"):
            left, right = getattr(graph, name), getattr(found, name)
            assert (left is None) == (right is None), name
            assert left is None or np.array_equal(left, right), name
        timing, again = propagate(graph), propagate(found)
        assert np.array_equal(timing.end_ns, again.end_ns)
        assert np.array_equal(timing.start_ns, again.start_ns)
        assert critical_rows(graph, timing) == critical_rows(found, again)
        assert graph.label(5) == found.label(5)


def test_path_and_extent(calibrated, by_blocks):
    whole, extent = critical_path(calibrated), extent_of(calibrated)
    by_blocks()
    streamed = critical_path(calibrated)
    assert streamed.as_dict() == whole.as_dict()
    assert streamed.segments.equals(whole.segments)
    assert vars(extent_of(calibrated)).keys() == vars(extent).keys()
    assert extent_of(calibrated).window_ns == extent.window_ns


def test_prediction(calibrated, by_blocks):
    whole = predict(calibrated, draws=0)
    by_blocks()
    assert predict(calibrated, draws=0).as_dict() == whole.as_dict()
    assert "too many to resample" in predict(calibrated).why_no_spread


def test_broken_traces_are_refused(calibrated, by_blocks):
    by_blocks()
    nodes = calibrated.collect()
    untimed = nodes.with_columns(start_ns=pl.when(pl.col("index") != 3).then(pl.col("start_ns")))
    with pytest.raises(MergeInputError, match="no start or duration") as caught:
        graph_from_blocks(Layout.of(Trace(header=calibrated.header, nodes=untimed.lazy())))
    assert "index=3" in caught.value.where
    lacking = nodes.filter(pl.col("rank") != 1)
    with pytest.raises(CoverageError, match="no rows of ranks 1"):
        graph_from_blocks(Layout.of(Trace(header=calibrated.header, nodes=lacking.lazy())))
    with pytest.raises(MergeInputError, match="has no rows"):
        Layout.of(Trace(header=calibrated.header, nodes=nodes.clear().lazy()))


def test_what_does_not_fit_is_refused(calibrated, by_blocks, monkeypatch):
    by_blocks()
    monkeypatch.setattr("prismcalib.memory.available_bytes", lambda: 1000)
    with pytest.raises(TooLargeError, match=r"GiB are available") as caught:
        graph_from_trace(calibrated)
    assert "coarsen" in caught.value.hint
    with pytest.raises(TooLargeError, match="a graph of"):
        graph_from_blocks(Layout.of(calibrated))


def test_memory_is_known_or_not_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("prismcalib.memory._MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr("prismcalib.memory._GROUP", tmp_path)
    assert available_bytes() is None
    require_memory(2**60, "anything")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:       7 kB\n")
    assert available_bytes() == 7 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    assert available_bytes() == 2500
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == 7 * 1024


EDITS = {
    "faster": [Scale("kind == 'compute' and rank in (1, 2)", 0.5)],
    "no gaps": [ScaleGaps("rank >= 1", 0)],
    "without": [Drop("kind != 'compute' and group_size > 1"), SetDuration("step <= 1", 5)],
    "longer than usual": [Scale(pl.col("dur_ns") > pl.col("dur_ns").mean(), 0.5)],
}


@pytest.mark.parametrize("rules", [None, WaitRules(rooted=True, eager_below=10**9)])
def test_what_if(calibrated, by_blocks, rules):
    whole = what_if(calibrated, EDITS, rules=rules)
    by_blocks()
    assert what_if(calibrated, EDITS, rules=rules).as_dict() == whole.as_dict()


def test_what_if_scenarios_one_by_one(calibrated, by_blocks, monkeypatch):
    whole = what_if(calibrated, EDITS)
    by_blocks()
    monkeypatch.setattr("prismcalib.whatif._MOST_CELLS", 1)
    assert what_if(calibrated, EDITS).as_dict() == whole.as_dict()


def test_durations_of_another_trace(by_blocks, tmp_path):
    runs = [
        merge(synth.generate(synth.JobSpec(steps=2, launch_gap_ns=300, stragglers=slow)))
        for slow in ({}, {1: 1.5})
    ]
    runs[1].write(tmp_path / "slow.parquet")
    edits = [SwapDurations(tmp_path / "slow.parquet", "rank < 3")]
    whole = what_if(runs[0].trace, edits)
    by_blocks()
    assert what_if(runs[0].trace, edits).as_dict() == whole.as_dict()
    other = merge(synth.generate(synth.JobSpec(microbatches=3)))
    other.write(tmp_path / "other.parquet")
    with pytest.raises(ScenarioError, match="the runs differ"):
        what_if(runs[0].trace, [SwapDurations(tmp_path / "other.parquet")])


def test_what_predicates_say_of_blocks(calibrated):
    for where in ("rnk = 3", "kind = 'all_redduce'", "group_name LIKE 'x%' and rank > 2", "rank"):
        with pytest.raises(PredicateError) as whole:
            what_if(calibrated, [Scale(where, 2)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
            with pytest.raises(PredicateError) as streamed:
                what_if(calibrated, [Scale(where, 2)])
        assert (streamed.value.message, streamed.value.hint) == (
            whole.value.message,
            whole.value.hint,
        )


@pytest.fixture(scope="module")
def runs():
    """The same job twice, the second time with a slow rank, and once with more steps."""
    return [
        merge(
            synth.generate(
                synth.JobSpec(steps=steps, launch_gap_ns=900, stragglers=slow, seed=steps)
            )
        ).trace
        for steps, slow in ((3, {}), (4, {2: 1.4}))
    ]


@pytest.mark.parametrize("by", [["kind"], ["kind", "phase", "group", "name"], ["rank", "name"]])
def test_comparison(runs, by_blocks, by):
    whole = compare(*runs, by=by)
    by_blocks()
    assert compare(*runs, by=by).as_dict() == whole.as_dict()


def test_health(runs, by_blocks, make_run):
    recorded = [make_run(steps=3).trace, make_run(steps=3, slow_rank=2).trace]
    without_steps = [
        Trace(header=run.header, nodes=run.nodes.with_columns(step=pl.lit(None, pl.Int32)))
        for run in recorded
    ]
    cases = (runs, recorded, without_steps)
    whole = [device_health(*case).as_dict() for case in cases]
    assert any(found["findings"] for found in whole)
    by_blocks()
    assert [device_health(*case).as_dict() for case in cases] == whole


COARSE = {
    "pipeline": synth.JobSpec(
        pp=3, tp=4, dp=2, microbatches=5, steps=2, kernels_per_block=3, launch_gap_ns=900
    ),
    "gapless": synth.JobSpec(pp=2, tp=2, dp=4, microbatches=4, kernels_per_block=4),
    "experts": synth.JobSpec(
        pp=2, tp=2, dp=4, ep=2, sequence_parallel=True, kernels_per_block=2, launch_gap_ns=50
    ),
    "coalesced": synth.JobSpec(pp=3, tp=2, dp=1, microbatches=6, coalesced_p2p=True),
}


@pytest.mark.parametrize("grain", ["exact", "microbatch"])
@pytest.mark.parametrize("job", [*COARSE, "rules"])
@pytest.mark.parametrize("block_rows", [1, 3000])
def test_coarse_trace(job, grain, block_rows, monkeypatch, tmp_path):
    rules = RULES if job == "rules" else WaitRules()
    trace = merge(synth.generate(COARSE.get(job, COARSE["experts"])), rules=rules).trace
    whole = coarsen(trace, grain=grain)
    monkeypatch.setattr("prismcalib.blocks.LARGE_ROWS", 0)
    monkeypatch.setattr("prismcalib.blocks.BLOCK_ROWS", block_rows)
    streamed = coarsen(trace, grain=grain)
    assert streamed.report == whole.report
    assert streamed.nodes.equals(whole.nodes)
    streamed.write(tmp_path / "coarse.parquet")
    assert open_trace(tmp_path / "coarse.parquet").collect().equals(whole.nodes)
    rank = pl.col("rank") == 1
    assert (
        streamed.table.filter(rank)
        .select("id")
        .collect()
        .equals(whole.nodes.filter(rank).select("id"))
    )
    assert streamed.table.head(5).collect().equals(whole.nodes.head(5))


STRAGGLERS = {
    "slow rank": synth.JobSpec(
        pp=2, tp=2, dp=4, microbatches=6, steps=3, stragglers={5: 1.3}, launch_gap_ns=3000
    ),
    "uneven stages": synth.JobSpec(pp=2, microbatches=8, stragglers=dict.fromkeys(range(4), 1.4)),
    "one of each": synth.JobSpec(pp=3, tp=1, dp=1, steps=2),
    "noisy network": synth.JobSpec(pp=1, tp=2, dp=4, steps=3, comm_jitter=1.0, jitter=0.3),
}


@pytest.mark.parametrize("job", STRAGGLERS)
@pytest.mark.parametrize("peers", ["position", "type"])
def test_stragglers(job, peers, by_blocks):
    trace = merge(synth.generate(STRAGGLERS[job])).trace
    whole = find_stragglers(trace, peers=peers).as_dict()
    by_blocks()
    assert find_stragglers(trace, peers=peers).as_dict() == whole


def test_stragglers_of_rows_whose_steps_lie_mixed(by_blocks):
    trace = merge(synth.generate(STRAGGLERS["slow rank"])).trace
    mixed = trace.collect().with_columns(step=(pl.col("index") % 3).cast(pl.Int32))
    trace = Trace(header=trace.header, nodes=mixed.lazy())
    whole = find_stragglers(trace).as_dict()
    by_blocks()
    assert find_stragglers(trace).as_dict() == whole


def test_fewer_parts_of_large_traces(monkeypatch):
    trace = merge(synth.generate(STRAGGLERS["slow rank"])).trace
    assert "rank" not in find_stragglers(trace).not_simulated
    monkeypatch.setattr("prismcalib.stragglers._MOST_ROWS", 1)
    fewer = find_stragglers(trace)
    assert fewer.not_simulated["rank"] == 8
    assert fewer.parts["rank"][0].name == "5"


def test_check(calibrated, by_blocks):
    whole = check_graph(calibrated)
    table = calibrated.collect()
    short = Trace(
        header=calibrated.header,
        nodes=table.filter(
            (pl.col("rank") != 1) | (pl.col("index") < pl.col("index").max() // 2)
        ).lazy(),
    )
    fewer = Trace(header=calibrated.header, nodes=table.filter(pl.col("rank") != 1).lazy())
    by_blocks()
    assert check_graph(calibrated) == whole
    with pytest.raises(MissingMemberError, match="missing ranks=1"):
        check_graph(short)
    with pytest.raises(CoverageError, match="rank 1 missing"):
        check_graph(fewer)


def test_recorded_runs_and_bare_graphs_that_do_not_fit_are_refused(by_blocks, monkeypatch):
    recorded = synth.generate(COARSE["coalesced"])
    by_blocks()
    monkeypatch.setattr("prismcalib.memory.available_bytes", lambda: 1000)
    for command in (merge, coarsen):
        with pytest.raises(TooLargeError, match="a table of"):
            command(recorded)


def test_fewer_effects_of_large_runs(runs, monkeypatch):
    monkeypatch.setattr("prismcalib.comparing._MOST_ROWS", 1)
    monkeypatch.setattr("prismcalib.comparing._FEWEST", 2)
    assert compare(*runs, by=["name"]).classes["effect_ns"].count() == 2
