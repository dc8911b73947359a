"""Made-up jobs are valid, their times follow the model, and slices tell all about them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import prismcalib
from prismcalib import synth
from prismcalib.build import structure_graph
from prismcalib.errors import CalibError, MergeInputError
from prismcalib.merging import merge
from prismcalib.propagation import propagate
from prismcalib.synth.assembly import Job
from prismcalib.synth.schedule import stage_order
from prismcalib.synth.times import own_times
from prismtrace import validate
from prismtrace.schema import Phase
from prismtrace.trace import Trace, open_trace, write_nodes

SPECS = {
    "dense": synth.JobSpec(),
    "one rank": synth.JobSpec(pp=1, tp=1, dp=1, steps=2),
    "gaps": synth.JobSpec(pp=3, tp=1, dp=2, steps=3, launch_gap_ns=20_000),
    "experts": synth.JobSpec(pp=2, tp=2, dp=4, ep=2, steps=2, moe_imbalance=0.5),
    "all experts": synth.JobSpec(pp=1, tp=1, dp=4, ep=4, buckets=1, memory=False),
    "interleaved": synth.JobSpec(
        pp=4, tp=1, dp=2, schedule="interleaved", chunks=2, microbatches=8, layers_per_stage=4
    ),
    # Messages forward and backward go from one stage to the same other stage.
    "interleaved pair": synth.JobSpec(
        pp=2, tp=2, dp=1, schedule="interleaved", chunks=2, steps=2, launch_gap_ns=3_000
    ),
    "coalesced": synth.JobSpec(
        pp=4, tp=2, dp=1, microbatches=6, steps=2, coalesced_p2p=True, sequence_parallel=True
    ),
    "few microbatches": synth.JobSpec(pp=4, tp=1, dp=1, microbatches=2, coalesced_p2p=True),
    "kernels": synth.JobSpec(kernels_per_block=3, stragglers={3: 2.0}),
}

STRUCTURE = ["id", "rank", "index", "kind", "name", "stream", "batch", "step", "microbatch"]
STRUCTURE += ["chunk", "phase", "group", "seq", "peer", "bytes", "dtype", "reduce_op"]


@pytest.fixture(params=SPECS.values(), ids=SPECS.keys())
def spec(request):
    return request.param


def ends(rows):
    return (rows["start_ns"] + rows["dur_ns"]).to_numpy()


# --- jobs -----------------------------------------------------------------------------


def test_a_job_is_a_valid_recorded_trace(spec):
    run = synth.generate(spec)
    assert validate(run) == []
    assert run.header.kind == "recorded"
    assert run.header.world_size == spec.pp * spec.tp * spec.dp
    assert run.header.axes == {"pp": spec.pp, "tp": spec.tp, "dp": spec.dp, "ep": spec.ep}
    assert run.collect()["start_ns"].min() == 0


def test_times_are_those_of_the_whole_graph(spec):
    # `generate` goes step by step; here all steps are propagated at once, by the definition.
    job = Job(spec)
    ranks = np.arange(spec.world_size)
    graph = job.graph(ranks, spec.steps).graph
    own, gaps = [], []
    for program, members in job.blocks(ranks):
        times = [own_times(job.layout, program, members, step) for step in range(spec.steps)]
        own.append(np.stack([t.duration_ns for t in times], axis=1).ravel())
        if spec.launch_gap_ns:
            gaps.append(np.stack([t.gap_ns for t in times], axis=1).ravel())
    lags = np.repeat(np.concatenate(gaps), np.diff(graph.dep_offsets)) if gaps else None
    graph = dataclasses.replace(graph, duration_ns=np.concatenate(own), dep_lag_ns=lags)
    timing = propagate(graph, "networkx")
    rows = synth.generate(spec).collect()
    np.testing.assert_array_equal(rows["start_ns"], timing.start_ns)
    np.testing.assert_array_equal(ends(rows), timing.end_ns)
    assert synth.step_ends_ns(spec)[-1] == timing.end_ns.max()


def test_the_graph_of_the_rows_is_the_graph_of_the_job(spec):
    run = synth.generate(spec)
    rows = run.collect()
    from_rows = structure_graph(rows, run.header)
    graph = Job(spec).graph(np.arange(spec.world_size), spec.steps).graph
    np.testing.assert_array_equal(from_rows.dep_offsets, graph.dep_offsets)
    np.testing.assert_array_equal(from_rows.dep_rows, graph.dep_rows)
    # The numbers of instances differ, their members do not.
    member = graph.instance >= 0
    np.testing.assert_array_equal(from_rows.instance >= 0, member)
    pairs = set(zip(from_rows.instance[member], graph.instance[member], strict=True))
    assert len(pairs) == from_rows.instances == graph.instances
    np.testing.assert_array_equal(
        from_rows.instance_size[from_rows.instance[member]],
        graph.instance_size[graph.instance[member]],
    )


def test_merging_a_job_changes_nothing(spec):
    run = synth.generate(spec)
    result = prismcalib.merge(run)
    assert result.report.difference_ns == 0
    assert result.report.overlap_clamps.count == result.report.transfer_clamps.count == 0
    np.testing.assert_array_equal(result.nodes["start_ns"], run.collect()["start_ns"])


def test_written_jobs_are_generated_jobs(spec, tmp_path):
    paths = synth.write_job(spec, tmp_path / "job", ranks_per_file=2)
    assert len(paths) == spec.pp * -(-spec.tp * spec.dp // 2)
    written, run = open_trace(tmp_path / "job"), synth.generate(spec)
    assert written.paths == tuple(paths)
    assert written.header == run.header
    assert_frame_equal(written.collect(), run.collect(), categorical_as_str=True)


def test_a_bare_job_has_the_same_structure(spec, tmp_path):
    bare = synth.bare_graph(synth.generate(spec))
    assert validate(bare) == []
    rows = bare.collect()
    assert rows["start_ns"].null_count() == rows["dur_ns"].null_count() == rows.height
    assert not rows["real"].any()
    synth.write_job(spec, tmp_path, 3, kind="bare")
    written = open_trace(tmp_path)
    assert written.header == bare.header
    assert_frame_equal(written.collect(), rows, categorical_as_str=True)


def test_the_seed_decides(tmp_path):
    spec = SPECS["experts"]
    first, again = (synth.write_job(spec, tmp_path / name)[0] for name in "ab")
    assert first.read_bytes() == again.read_bytes()
    other = synth.generate(dataclasses.replace(spec, seed=1)).collect()
    assert not other["dur_ns"].equals(synth.generate(spec).collect()["dur_ns"])


def test_groups_follow_the_axes():
    groups = {g.name: g.ranks for g in synth.generate(SPECS["experts"]).header.groups}
    assert groups["world"] == tuple(range(16))
    assert groups["tp_0"] == (0, 1)
    assert groups["pp_0"] == (0, 8)
    assert groups["dp_0"] == (0, 2, 4, 6)
    assert groups["ep_0"] == (0, 2)
    assert groups["edp_0"] == (0, 4)
    kinds = Counter(name.split("_")[0] for name in groups)
    assert kinds == {"world": 1, "tp": 8, "pp": 8, "dp": 4, "ep": 8, "edp": 8}


def test_the_header_of_a_large_job_is_small():
    job = Job(synth.JobSpec(pp=16, tp=8, dp=64, ep=8))
    assert len(job.header("recorded").model_dump_json()) < 1_000_000


# --- schedules ------------------------------------------------------------------------

ONLY_LAYERS = dict.fromkeys(synth.MEAN_NS, 0) | {
    "attention forward": 1_000,
    "attention backward": 2_000,
}


def ideal(**axes):
    """A job of nothing but layers that take 1 us forward and 2 us backward."""
    calm = {"jitter": 0, "step_jitter": 0, "comm_jitter": 0, "end_spread_ns": 0}
    return synth.JobSpec(**axes, **calm, mean_ns=ONLY_LAYERS)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 8), (4, 4), (4, 2), (5, 9)])
@pytest.mark.parametrize("coalesced", [False, True])
def test_1f1b_has_the_known_bubble(stages, microbatches, coalesced):
    spec = ideal(pp=stages, microbatches=microbatches, coalesced_p2p=coalesced)
    layers = spec.layers_per_stage
    assert synth.step_ends_ns(spec) == (microbatches + stages - 1) * 3_000 * layers


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_interleaving_shrinks_the_bubble(microbatches):
    spec = ideal(
        pp=4, microbatches=microbatches, schedule="interleaved", chunks=2, layers_per_stage=4
    )
    work, bubble = microbatches * 3_000 * 4, 3 * 3_000 * 4 // 2
    assert synth.step_ends_ns(spec) == work + bubble


def test_every_pass_is_made_once_and_backward_comes_after_forward():
    for spec in SPECS.values():
        for stage in range(spec.pp):
            order = stage_order(spec, stage)
            assert len(order) == len(set(order)) == 2 * spec.microbatches * spec.chunks
            place = {task: number for number, task in enumerate(order)}
            for task, number in place.items():
                if task.phase is Phase.BACKWARD:
                    assert place[task._replace(phase=Phase.FORWARD)] < number


def test_early_stages_hold_more_activations():
    rows = synth.generate(synth.JobSpec(pp=4, tp=1, dp=1, microbatches=8)).collect()
    first = rows.group_by("rank").agg(pl.col("mem_bytes").first()).sort("rank")["mem_bytes"]
    most = rows.group_by("rank").agg(pl.col("mem_bytes").max()).sort("rank")["mem_bytes"]
    held = (most - first).to_list()
    assert [level * 4 for level in held] == [held[0] * n for n in (4, 3, 2, 1)]


def test_coalesced_messages_form_batches():
    rows = synth.generate(SPECS["coalesced"]).collect()
    batches = rows.filter(pl.col("batch").is_not_null()).group_by("rank", "batch")
    found = batches.agg(pl.col("kind").cast(pl.String).sort(), pl.col("step").n_unique())
    assert found.height > 0
    assert {tuple(kinds) for kinds in found["kind"]} == {("recv", "send")}
    assert set(found["step"]) == {1}


# --- unevenness -----------------------------------------------------------------------


def test_a_straggler_computes_slower_and_holds_up_the_job():
    even = synth.JobSpec(jitter=0, step_jitter=0, comm_jitter=0, end_spread_ns=0)
    uneven = dataclasses.replace(even, stragglers={3: 2.0})
    compute = pl.col("kind") == "compute"
    before, after = (synth.generate(s).collect().filter(compute) for s in (even, uneven))
    ratio = (after["dur_ns"] / before["dur_ns"]).to_numpy()
    slow = after["rank"].to_numpy() == 3
    assert set(ratio[slow]) == {2.0}
    assert set(ratio[~slow]) == {1.0}
    assert synth.step_ends_ns(uneven)[0] > 1.3 * synth.step_ends_ns(even)[0]


def test_jitter_is_correlated_within_a_step_of_a_rank():
    spec = synth.JobSpec(steps=8, jitter=0.01, step_jitter=0.2)
    rows = synth.generate(spec).collect().filter(pl.col("name") == "layer0.attn fwd")
    factor = pl.col("dur_ns") / spec.mean("attention forward")
    by_step = rows.group_by("rank", "step").agg(factor.mean().alias("mean"), factor.std())
    assert 0.1 < by_step["mean"].std() < 0.3
    assert by_step["dur_ns"].max() < 0.03


def test_experts_get_uneven_loads():
    rows = synth.generate(SPECS["experts"]).collect().filter(pl.col("kind") == "all_to_all")
    sizes = rows.group_by("rank", "step").agg(pl.col("bytes").n_unique())
    assert sizes["bytes"].min() > 1
    even = dataclasses.replace(SPECS["experts"], moe_imbalance=0)
    rows = synth.generate(even).collect().filter(pl.col("kind") == "all_to_all")
    assert rows["bytes"].n_unique() == 1


# --- slices ---------------------------------------------------------------------------


def truth(run):
    """Own durations and gaps of all rows, from the true times: frame id, own, gap."""
    rows = run.collect().with_columns(real=pl.lit(value=True))
    return explained(rows)


def explained(rows):
    """Own durations and gaps of the real rows of a trace that is true for them."""
    p2p = pl.col("kind").cast(pl.String).is_in(["send", "recv"])
    sends = pl.col("kind") == "send"
    source = pl.when(p2p).then(pl.when(sends).then("rank").otherwise("peer"))
    target = pl.when(p2p).then(pl.when(sends).then("peer").otherwise("rank"))
    rows = rows.with_columns(end=pl.col("start_ns") + pl.col("dur_ns"), source=source)
    key = ["group", "seq", "source", "target"]
    member = pl.col("group").is_not_null() & pl.col("seq").is_not_null()
    ready = pl.when(member).then(pl.col("start_ns").max().over(key)).otherwise("start_ns")
    rows = rows.with_columns(target=target).with_columns(own=pl.col("end") - ready)
    real = rows.filter("real")
    deps = real.select("id", "deps").explode("deps", empty_as_null=False, keep_nulls=False)
    before = (
        deps.select("id", dep=pl.col("id") - pl.col("deps").cast(pl.Int64))
        .join(real.select(dep="id", end="end"), on="dep", how="left")
        .group_by("id")
        .agg(pl.col("end").max().alias("last"))
    )
    gap = (pl.col("start_ns") - pl.col("last")).fill_null(0)
    return real.join(before, on="id", how="left").select("id", "own", gap=gap).sort("id")


@pytest.mark.parametrize("size", [1, 3])
def test_slices_without_noise_tell_all_durations_transfers_and_gaps(spec, size, tmp_path):
    paths = synth.cut_into_slices(spec, tmp_path, size)
    found = pl.concat([explained(open_trace(path).collect()) for path in paths]).sort("id")
    assert_frame_equal(found, truth(synth.generate(spec)))


@pytest.mark.parametrize("size", [1, 3])
def test_a_job_and_its_trace_give_the_same_slices(spec, size, tmp_path):
    made_up = synth.cut_into_slices(spec, tmp_path / "a", size, noise=0.1)
    cut = synth.cut_into_slices(synth.generate(spec), tmp_path / "b", size, noise=0.1)
    assert [path.name for path in made_up] == [path.name for path in cut]
    for left, right in zip(made_up, cut, strict=True):
        one, other = open_trace(left), open_trace(right)
        assert one.header == other.header
        assert_frame_equal(one.collect(), other.collect(), categorical_as_str=True)


def test_slices_of_a_merged_trace_tell_its_durations(tmp_path):
    merged = prismcalib.merge(synth.generate(SPECS["gaps"])).trace
    paths = synth.cut_into_slices(merged, tmp_path, 2)
    rows = pl.concat([open_trace(path).collect() for path in paths[:1]])
    assert not {"x_observed_start_ns", "x_observed_dur_ns"} & set(rows.columns)
    found = pl.concat([explained(open_trace(path).collect()) for path in paths]).sort("id")
    assert_frame_equal(found, truth(synth.generate(SPECS["gaps"])))


def test_a_slice_holds_its_real_ranks_and_their_partners(spec, tmp_path):
    bare = synth.bare_graph(synth.generate(spec)).collect()
    for number, path in enumerate(synth.cut_into_slices(spec, tmp_path, 2)):
        part = open_trace(path)
        assert part.header.kind == "slice"
        assert part.header.slice.index == number
        assert part.header.groups == Job(spec).layout.groups
        # Virtual ranks keep the indices of the job, so theirs have gaps; all else is valid.
        broken = {found.rule for found in validate(part) if found.severity == "error"}
        assert broken <= {"index-gap"}
        rows = part.collect()
        real = rows.filter("real")
        assert set(real["rank"]) == set(part.header.slice.real_ranks)
        whole = bare.filter(pl.col("rank").is_in(list(part.header.slice.real_ranks)))
        assert_frame_equal(
            real.select(*STRUCTURE, "deps"),
            whole.select(*STRUCTURE, "deps"),
            categorical_as_str=True,
        )
        virtual = rows.filter(~pl.col("real"))
        assert_frame_equal(
            virtual.select(STRUCTURE),
            bare.filter(pl.col("id").is_in(virtual["id"].implode())).select(STRUCTURE),
            categorical_as_str=True,
        )


def test_virtual_ranks_are_never_last(spec, tmp_path):
    key = ["group", "seq", "src", "dst"]
    sends = pl.col("kind") == "send"
    p2p = pl.col("kind").cast(pl.String).is_in(["send", "recv"])
    for path in synth.cut_into_slices(spec, tmp_path, 3, noise=0.2):
        members = (
            open_trace(path)
            .collect()
            .filter(pl.col("group").is_not_null())
            .with_columns(
                src=pl.when(p2p).then(pl.when(sends).then("rank").otherwise("peer")),
                dst=pl.when(p2p).then(pl.when(sends).then("peer").otherwise("rank")),
            )
            .group_by(key)
            .agg(
                last=pl.col("start_ns").max(),
                last_real=pl.col("start_ns").filter("real").max(),
            )
        )
        assert members["last"].equals(members["last_real"])


def test_waits_in_slices_are_not_those_of_the_job(tmp_path):
    spec = synth.JobSpec(pp=4, tp=2, dp=2, stragglers={0: 1.5})
    paths = synth.cut_into_slices(spec, tmp_path, 2, virtual="none")
    comm = pl.col("group").is_not_null()
    in_slices = sum(open_trace(p).collect().filter(comm)["dur_ns"].sum() for p in paths)
    assert in_slices < 0.5 * synth.generate(spec).collect().filter(comm)["dur_ns"].sum()


def test_noise_repeats_and_given_transfers(tmp_path):
    spec = SPECS["experts"]
    exact = truth(synth.generate(spec))
    paths = synth.cut_into_slices(spec, tmp_path, 8, noise=0.05, repeats=3, transfers="given")
    assert [path.name for path in paths[:2]] == [
        "slice-0000-repeat-0.parquet",
        "slice-0000-repeat-1.parquet",
    ]
    assert {open_trace(path).header.slice.index for path in paths} == {0, 1}
    seen = []
    for path in paths[:3]:
        rows = open_trace(path).collect()
        found = explained(rows).join(exact, on="id", suffix="_true")
        ratio = (found["own"] / found["own_true"]).to_numpy()
        assert 0.03 < ratio.std() < 0.06
        assert abs(ratio - 1).max() < 0.1501
        given = rows.filter("real").filter(pl.col("group").is_not_null())["transfer_ns"]
        joined = found.join(rows.select("id", "group", "transfer_ns"), on="id")
        assert given.null_count() == 0
        member = joined.filter(pl.col("group").is_not_null())
        assert member["transfer_ns"].equals(member["own"], check_names=False)
        seen.append(found["own"])
    assert not seen[0].equals(seen[1])


def test_sources_of_transfers_tell_whether_all_members_were_real(tmp_path):
    paths = synth.cut_into_slices(synth.JobSpec(pp=2, tp=2, dp=2), tmp_path, 4)
    rows = (
        open_trace(paths[0])
        .collect()
        .filter("real")
        .join(open_trace(paths[0]).groups.df.select(group="id", axis="name"), on="group")
    )
    axis = pl.col("axis").str.split("_").list.first()
    found = rows.select(axis, pl.col("transfer_source").cast(pl.String)).unique()
    assert dict(found.iter_rows()) == {
        "tp": "measured",
        "dp": "measured",
        "pp": "ring",
        "world": "ring",
    }


def test_every_slice_has_its_own_clock(tmp_path):
    spec = synth.JobSpec(steps=2)
    plain = [open_trace(p) for p in synth.cut_into_slices(spec, tmp_path / "a", 4)]
    first = [trace.header.slice.origin_ns for trace in plain]
    assert len(set(first)) == 2
    for trace, origin in zip(plain, first, strict=True):
        assert len(trace.header.clock) == 1
        assert trace.collect().filter("real")["start_ns"].min() == origin
    drifting = synth.cut_into_slices(spec, tmp_path / "b", 4, drift_ppm=1000)
    for before, path in zip(plain, drifting, strict=True):
        one, other = before.collect(), open_trace(path).collect()
        span = [int(ends(rows).max() - rows["start_ns"].min()) for rows in (one, other)]
        assert 1e-6 < abs(span[1] / span[0] - 1) <= 1.001e-3


def test_ranks_begin_a_step_as_soon_as_they_have_ended_the_one_before(tmp_path):
    # As in operation-level logs: no edge leads from one step to the next.
    spec = synth.JobSpec(pp=2, tp=1, dp=2, steps=3, stragglers={0: 2.0})
    trace = synth.generate(spec)
    nodes = trace.collect()
    first = (pl.col("index") - pl.col("index").min()).over("rank", "step")
    inside = pl.col("deps").list.eval(pl.element()).list.max() <= first
    cut = nodes.with_columns(
        deps=pl.when(inside).then("deps").otherwise(pl.lit([], pl.List(pl.UInt32)))
    )
    assert cut.filter(pl.col("deps").list.len() == 0).height >= 4 * spec.steps
    path = tmp_path / "run.parquet"
    write_nodes(trace.header, cut.lazy(), path)
    whole = merge(open_trace(path))
    paths = synth.cut_into_slices(open_trace(path), tmp_path / "slices", 1)
    result = merge(paths)
    assert result.report.propagated_ns == whole.report.propagated_ns
    # The ranks that are quick need not wait for rank 0 in a slice of their own.
    assert result.report.before_ns == result.report.executions_seen[0].step_ns
    assert result.report.executions_seen[-1].step_ns < 0.9 * result.report.before_ns


def test_ranks_of_one_slice_may_have_several_clocks(tmp_path):
    path = synth.cut_into_slices(
        synth.JobSpec(), tmp_path, [range(8)], ranks_per_clock=2, drift_ppm=1
    )[0]
    header = open_trace(path).header
    assert [domain.ranks for domain in header.clock] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    starts = open_trace(path).collect().group_by("rank").agg(pl.col("start_ns").min())
    assert starts["start_ns"].n_unique() == 4


def test_slices_may_overlap(tmp_path):
    paths = synth.cut_into_slices(synth.JobSpec(), tmp_path, [[0, 5], [5, 1, 2]])
    assert [open_trace(path).header.slice.real_ranks for path in paths] == [(0, 5), (1, 2, 5)]


def test_equal_seeds_give_equal_files(tmp_path):
    spec = SPECS["gaps"]
    first, again, other = (
        synth.cut_into_slices(spec, tmp_path / name, 2, seed=seed, noise=0.1, drift_ppm=5)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    assert first[0].read_bytes() != other[0].read_bytes()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_job_is_valid_and_can_be_cut(data, tmp_path_factory):
    draw = data.draw
    pp, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    interleaved = pp > 1 and chunks > 1
    spec = synth.JobSpec(
        pp=pp,
        tp=draw(st.integers(1, 3)),
        dp=2 * draw(st.integers(1, 2)),
        ep=draw(st.sampled_from([1, 2])),
        microbatches=draw(st.integers(1, 3)) * (pp if interleaved else 1),
        layers_per_stage=(chunks if interleaved else 1) * draw(st.integers(1, 2)),
        schedule="interleaved" if interleaved else "1f1b",
        chunks=chunks if interleaved else 1,
        steps=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**32)),
        sequence_parallel=draw(st.booleans()),
        coalesced_p2p=not interleaved and draw(st.booleans()),
        launch_gap_ns=draw(st.sampled_from([0, 1_000_000])),
        jitter=draw(st.sampled_from([0.0, 1.0])),
    )
    assume(spec.world_size > 1)
    run = synth.generate(spec)
    assert validate(run) == []
    size = draw(st.integers(1, spec.world_size))
    paths = synth.cut_into_slices(spec, tmp_path_factory.mktemp("slices"), size)
    found = pl.concat([explained(open_trace(path).collect()) for path in paths]).sort("id")
    assert_frame_equal(found, truth(run))


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "attribute"),
    [
        ({"pp": 0}, "pp"),
        ({"dp": 4, "ep": 3}, "ep"),
        ({"chunks": 3}, "chunks"),
        ({"chunks": 2}, "chunks"),
        ({"schedule": "interleaved"}, "chunks"),
        ({"schedule": "gpipe"}, "schedule"),
        ({"schedule": "interleaved", "chunks": 2, "pp": 1}, "schedule"),
        ({"schedule": "interleaved", "chunks": 2, "microbatches": 3}, "microbatches"),
        ({"schedule": "interleaved", "chunks": 2, "coalesced_p2p": True}, "coalesced_p2p"),
        ({"jitter": -0.1}, "jitter"),
        ({"launch_gap_ns": -1}, "launch_gap_ns"),
        ({"buckets": 3}, "buckets"),
        ({"mean_ns": {"attention": 1}}, "mean_ns"),
        ({"mean_ns": {"optimizer": -1}}, "mean_ns"),
        ({"stragglers": {8: 1.5}}, "stragglers"),
        ({"stragglers": {0: 0}}, "stragglers"),
    ],
)
def test_impossible_jobs_are_refused(wrong, attribute):
    with pytest.raises(CalibError) as error:
        synth.JobSpec(**wrong)
    assert error.value.where == f"JobSpec.{attribute}"


def test_what_cannot_be_cut_is_refused(tmp_path):
    run = synth.generate(synth.JobSpec())
    clocks = tuple(
        run.header.clock[0].model_copy(update={"id": i, "ranks": (i,)}) for i in range(8)
    )
    unaligned = run.header.model_copy(update={"clock": clocks})
    untimed = run.nodes.with_columns(pl.lit(None, pl.Int64).alias("start_ns"))
    for trace, words in [
        (synth.bare_graph(run), "bare trace cannot be cut"),
        (Trace(unaligned, run.nodes), "8 clocks that are not aligned"),
        (Trace(run.header, untimed), "no times"),
    ]:
        with pytest.raises(MergeInputError, match=words):
            synth.cut_into_slices(trace, tmp_path, 2)
    for ranks, words in [(0, "at least one"), ([[0, 9]], "no rank 9"), ([[]], "no real rank")]:
        with pytest.raises(MergeInputError, match=words):
            synth.cut_into_slices(run, tmp_path, ranks)
    assert list(tmp_path.iterdir()) == []
