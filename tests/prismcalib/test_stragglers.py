"""Stragglers: the published answers for the public data set, and causes we put in ourselves."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prismcalib
from prismcalib import find_stragglers, merge, synth
from prismcalib.blocks import HeldTable
from prismcalib.causes import Cause
from prismcalib.cli import app
from prismcalib.errors import MergeInputError
from prismcalib.peers import kind_labels, peer_durations
from prismcalib.places import rank_places
from prismcalib.report.answers import stragglers_section
from prismcalib.report.data import describe_run
from prismcalib.stages import job_places
from prismcalib.wording import percent_text
from prismtrace.converters import convert
from prismtrace.converters.ops.convert import operations_trace
from prismtrace.schema import ProcessGroup, TraceHeader
from prismtrace.trace import Trace
from tests.prismtrace import operation_logs as logs

TICK = logs.TICK_NS


def _trace(folder, log):
    path = folder / "log.parquet"
    log.table.write_parquet(path)
    return operations_trace([path])[0]


# --- the public data set ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["ST", "SE"])
def public(request, data_dir, tmp_path_factory):
    """A converted job, its report and the published results."""
    folder = data_dir / "ops" / "straggler"
    path = tmp_path_factory.mktemp(request.param) / "t.parquet"
    convert(folder / f"trace-{request.param}.parquet", path)
    expected = json.loads((folder / f"result-{request.param}.json").read_text())
    return path, find_stragglers(path, by=("kind", "stage", "replica")), expected


def _per_step(report, expected):
    return np.array([expected[str(step)] for step in report.steps])


def test_step_times_are_the_published_ones(public):
    _, report, expected = public
    for ours, theirs in (
        (report.base_ns, "step_t_base"),
        (report.without_delays_ns, "step_t_nodelay"),
        (report.ideal_ns, "step_t_noblk"),
    ):
        np.testing.assert_allclose(ours / 1e9, _per_step(report, expected[theirs]), rtol=5e-7)
    mean = {"ST": 2.17270, "SE": 9.06656}[expected["job_meta"]["trial_name"]]
    assert report.without_delays_ns.mean() / 1e9 == pytest.approx(mean, abs=6e-6)


def test_slowdowns_are_the_published_ones(public):
    _, report, expected = public
    assert report.launch_slowdown == pytest.approx(expected["launch_slowdown"], rel=5e-7)
    assert report.slowdown == pytest.approx(expected["blocking_slowdown"], rel=5e-7)
    np.testing.assert_allclose(
        report.without_delays_ns / report.ideal_ns,
        _per_step(report, expected["blocking_step_slowdown"]),
        rtol=5e-7,
    )
    np.testing.assert_allclose(
        report.base_ns / report.without_delays_ns,
        _per_step(report, expected["launch_step_slowdown"]),
        rtol=5e-7,
    )


@pytest.mark.parametrize(
    ("by", "theirs"), [("kind", "optype"), ("stage", "stage"), ("replica", "dp_rank")]
)
def test_decompositions_are_the_published_ones(public, by, theirs):
    _, report, expected = public
    whole = expected[f"blocking_decompose_by_{theirs}"]
    steps = expected[f"blocking_decompose_by_{theirs}_per_step"]
    assert {part.name for part in report.parts[by]} == set(whole)
    for name, slowdown in whole.items():
        part = report.part(by, name)
        assert part.slowdown == pytest.approx(slowdown, rel=5e-7)
        np.testing.assert_allclose(
            part.slowdown_per_step,
            [steps[str(step)][name] for step in report.steps],
            rtol=5e-7,
        )


def test_every_published_field_is_looked_at(public):
    _, report, expected = public
    # The launch decompositions are null: the slowdown is below their threshold.
    assert report.launch_slowdown < 1.03
    null = {name for name, value in expected.items() if value is None}
    assert null == {name for name in expected if name.startswith("launch_decompose")}
    checked = {"step_t_base", "step_t_nodelay", "step_t_noblk", "launch_slowdown"}
    checked |= {"blocking_slowdown", "blocking_step_slowdown", "launch_step_slowdown", "job_meta"}
    checked |= {name for name in expected if name.startswith("blocking_decompose")}
    assert set(expected) == checked | null


def test_with_launch_delays_propagation_gives_the_base(public):
    path, report, expected = public
    if expected["job_meta"]["trial_name"] == "SE":
        pytest.skip("one job shows it; merging the larger takes its time")
    merged = merge(path)
    nodes = merged.nodes.with_columns(end=pl.col("start_ns") + pl.col("dur_ns"))
    spans = nodes.group_by("step").agg(first=pl.col("start_ns").min(), last=pl.col("end").max())
    spans = spans.sort("step")
    np.testing.assert_allclose(spans["last"] - spans["first"], report.base_ns, rtol=1e-4)
    again = find_stragglers(merged.trace, by=("stage",))
    np.testing.assert_allclose(again.without_delays_ns, report.without_delays_ns, rtol=1e-4)


def test_causes_of_the_public_jobs(public):
    _, report, expected = public
    kinds = {cause.kind: cause for cause in report.causes}
    if expected["job_meta"]["trial_name"] == "ST":
        assert report.causes[0].kind == "stage-imbalance"
        assert report.causes[0].where == "stage 3 (last of 4)"
        assert "sequence-lengths" not in kinds
    else:
        assert report.causes[0].kind == "sequence-lengths"
        assert report.causes[0].saves > 0.3
        assert kinds["stage-imbalance"].where == "stage 1 (last of 2)"


# --- made-up logs -----------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    microbatches=st.integers(1, 5),
    chunks=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_logs_give_back_the_time_they_were_made_with(
    tmp_path_factory, pp, dp, microbatches, chunks, seed
):
    chunks = chunks if pp > 1 else 1
    shape = {"pp": pp, "dp": dp, "microbatches": microbatches, "chunks": chunks, "seed": seed}
    folder = tmp_path_factory.mktemp("log")
    log = logs.simulate(**shape, steps=2)
    report = find_stragglers(_trace(folder, log), by=())
    assert report.without_delays_ns.tolist() == [base * TICK for base in log.base]
    assert report.base_ns.tolist() == report.without_delays_ns.tolist()
    delayed = logs.simulate(**shape, steps=2, delays=True)
    merged = merge(_trace(folder, delayed), clock="keep")
    late = find_stragglers(merged.trace, by=())
    assert late.base_ns.tolist() == [base * TICK for base in delayed.base]


def test_an_even_job_has_no_stragglers(tmp_path):
    even = dict.fromkeys([(replica, stage) for replica in range(2) for stage in range(2)], 10)
    report = find_stragglers(_trace(tmp_path, logs.simulate(work=even, microbatches=8)))
    assert report.causes == ()
    assert all(part.slowdown < 1.05 for parts in report.parts.values() for part in parts)


def test_a_slow_rank_of_a_log(tmp_path):
    work = {(replica, stage): 10 for replica in range(4) for stage in range(2)} | {(3, 0): 15}
    report = find_stragglers(
        _trace(tmp_path, logs.simulate(dp=4, work=work, microbatches=8, steps=3))
    )
    assert report.parts["rank"][0].name == "3"
    assert report.parts["replica"][0].name == "3"
    assert report.causes[0].kind == "slow-rank"
    assert report.causes[0].where == "rank 3 (stage 0)"
    assert report.causes[0].saves == pytest.approx(report.part("rank", 3).saves, abs=0.05)


def test_a_heavy_last_stage(tmp_path):
    work = {(replica, stage): 10 + 6 * (stage == 2) for replica in range(2) for stage in range(3)}
    report = find_stragglers(_trace(tmp_path, logs.simulate(pp=3, work=work, microbatches=8)))
    assert report.parts["stage"][0].name == "2"
    assert (report.causes[0].kind, report.causes[0].where) == (
        "stage-imbalance",
        "stage 2 (last of 3)",
    )


# --- any trace --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        {"pp": 2, "tp": 2, "dp": 2, "stragglers": {5: 1.3}},
        {"pp": 1, "tp": 1, "dp": 8, "steps": 3, "microbatches": 2, "stragglers": {5: 1.15}},
        {"pp": 1, "tp": 4, "dp": 2, "steps": 2, "microbatches": 2, "stragglers": {5: 1.2}},
    ],
)
def test_a_slow_rank_of_a_layer_level_job(shape):
    run = synth.generate(synth.JobSpec(**shape))
    report = find_stragglers(merge(run).trace)
    assert report.peers == "position"
    assert report.without_peers == 0
    assert report.parts["rank"][0].name == "5"
    assert report.causes[0].kind == "slow-rank"
    assert report.causes[0].where.startswith("rank 5")
    # Like its peers: about the step time of the same job without the slow rank.
    cured = find_stragglers(
        merge(synth.generate(synth.JobSpec(**{**shape, "stragglers": {}}))).trace, by=()
    )
    saved = 1 - cured.without_delays_ns.mean() / report.without_delays_ns.mean()
    assert report.part("rank", 5).saves == pytest.approx(saved, abs=0.03)


def test_stragglers_and_report_say_by_how_much_a_rank_computes_longer_in_the_same_words():
    # Jitter, so that averages of another sort would differ.
    run = merge(synth.generate(synth.JobSpec(pp=2, tp=2, dp=2, stragglers={5: 1.3}, jitter=0.2)))
    cause = find_stragglers(run.trace).causes[0]
    summary = prismcalib.describe_run(run.trace)
    excess = summary.ranks.filter(pl.col("rank") == 5)["excess"][0]
    headline = summary.conclusion.headline
    assert headline.startswith("Rank 5 computes ")
    longer = headline.split(" longer")[0].removeprefix("Rank 5 computes ")
    assert longer == percent_text(excess)
    assert cause.evidence.startswith(
        f"computes {longer} longer than the other 3 ranks of its stage"
    )


def test_stages_are_the_same_in_stragglers_and_report():
    # No group is named like a pipeline: only who sends to whom tells.
    run = synth.generate(synth.JobSpec(pp=2, tp=1, dp=2, steps=2, microbatches=4))
    groups = tuple(
        group.model_copy(update={"name": f"g{group.id}", "desc": ""}) for group in run.header.groups
    )
    header = run.header.model_copy(update={"groups": groups, "axes": {}})
    trace = merge(Trace(header, run.nodes)).trace
    assert rank_places(header).stages == 0
    stages = prismcalib.describe_run(trace).pipeline.stage_of
    assert job_places(header, HeldTable(trace.collect())).stage.tolist() == [
        stages[rank] for rank in range(4)
    ]
    assert {part.name for part in find_stragglers(trace).parts["stage"]} == {"0", "1"}


def test_a_stage_among_its_peers_and_an_even_split_are_told_apart(public):
    report = public[1]
    cause = next(cause for cause in report.causes if cause.kind == "stage-imbalance")
    worst = report.parts["stage"][0]
    assert cause.where.startswith(f"stage {worst.name} ")
    assert cause.saves < worst.saves
    assert "in the table of stages the extra work is gone" in cause.without


def test_launch_delays_are_told_from_slow_operations():
    quiet = synth.JobSpec(pp=1, tp=2, dp=2, jitter=0.001, step_jitter=0.0, comm_jitter=0.0)
    late = synth.generate(synth.JobSpec(**{**_fields(quiet), "launch_gap_ns": 40_000}))
    report = find_stragglers(merge(late).trace)
    assert report.launch_slowdown > 1.02
    assert report.slowdown < 1.02
    assert [cause.kind for cause in report.causes] == ["launch-delays"]
    assert report.causes[0].saves == pytest.approx(1 - 1 / report.launch_slowdown)


def _fields(spec):
    return {name: getattr(spec, name) for name in ("pp", "tp", "dp", "jitter", "step_jitter", "comm_jitter")}  # fmt: skip


def test_a_slow_network_between_the_hosts_of_one_group():
    run = synth.generate(synth.JobSpec(pp=1, tp=2, dp=4, steps=2, microbatches=2))
    merged = merge(run)
    slow = next(group for group in merged.header.groups if group.name == "tp_2")
    # Twice the transfer for one tensor-parallel group, everything else as it was.
    nodes = merged.nodes.with_columns(
        transfer_ns=pl.when(pl.col("group") == slow.id)
        .then(pl.col("transfer_ns") * 2)
        .otherwise("transfer_ns")
    )
    report = find_stragglers(Trace(header=merged.header, nodes=nodes.lazy()))
    assert report.parts["group"][0].name == "tp_2"
    named = [cause for cause in report.causes if cause.kind == "slow-network"]
    assert [cause.where.split(" (")[0] for cause in named] == ["group tp_2"]


def test_a_slow_host_is_told_from_a_slow_device(data_dir, tmp_path):
    convert(data_dir / "kineto" / "megatron-tp8", tmp_path / "run.parquet")
    report = find_stragglers(merge(tmp_path / "run.parquet").trace)
    assert report.steps == (3,)
    kinds = {cause.kind for cause in report.causes}
    assert "slow-host" in kinds
    told = next(cause.evidence for cause in report.causes if cause.kind == "slow-host")
    assert "themselves take" in told
    assert "-" not in told.split("themselves")[1]
    assert "slow-rank" not in kinds
    assert report.parts["rank"][0].name == "0"


def test_all_engines_agree(tmp_path):
    trace = _trace(tmp_path, logs.simulate(pp=2, dp=2, delays=True))
    reports = [find_stragglers(trace, engine=engine) for engine in ("python", "array", "networkx")]
    assert reports[0].as_dict() == reports[1].as_dict() == reports[2].as_dict()


def test_parts_beyond_the_limit_are_counted(tmp_path):
    trace = _trace(tmp_path, logs.simulate(pp=2, dp=3))
    report = find_stragglers(trace, by=("rank",), limit=2)
    assert len(report.parts["rank"]) == 2
    assert report.not_simulated == {"rank": 4}
    with pytest.raises(KeyError, match="no stage 0"):
        report.part("stage", 0)


def test_blocks_of_scenarios_give_the_same(tmp_path, monkeypatch):
    trace = _trace(tmp_path, logs.simulate(pp=2, dp=3))
    whole = find_stragglers(trace)
    monkeypatch.setattr("prismcalib.timelines._MOST_SCENARIOS", 3)
    assert find_stragglers(trace).as_dict() == whole.as_dict()


def test_a_trace_that_does_not_tell_transfers_is_refused():
    run = synth.generate(synth.JobSpec(pp=1, tp=2, dp=1))
    unknown = Trace(
        header=run.header,
        nodes=run.nodes.with_columns(transfer_ns=pl.lit(None, dtype=pl.Int64)),
    )
    with pytest.raises(MergeInputError, match="without waiting") as caught:
        find_stragglers(unknown)
    assert "prismcalib merge" in caught.value.hint
    with pytest.raises(MergeInputError, match="bare"):
        find_stragglers(synth.bare_graph(run))


def test_a_trace_of_one_rank_has_no_peers(tmp_path):
    report = find_stragglers(_trace(tmp_path, logs.simulate(pp=1, dp=1)))
    assert report.slowdown == 1
    assert report.nothing_compared
    assert "rank" not in report.parts


def test_stages_without_replicas_are_not_called_even(tmp_path, capsys):
    job = synth.JobSpec(pp=4, tp=1, dp=1, layers_per_stage=1, steps=2, stragglers={2: 1.5})
    calibrated = merge(synth.generate(job))
    report = find_stragglers(calibrated.trace)
    assert report.as_dict()["nothing_compared"]
    path = tmp_path / "run.parquet"
    calibrated.write(path)
    app(["stragglers", str(path)], standalone_mode=False)
    told = capsys.readouterr().out
    assert "nothing to compare with" in told
    assert "--peers type" in told
    assert "by rank" not in told
    section = stragglers_section(describe_run(path))
    assert "nothing to compare with" in section
    assert not find_stragglers(calibrated.trace, peers="type").nothing_compared


# --- peers and places -------------------------------------------------------------------------


def test_places_from_the_names_and_descriptions_of_groups():
    header = TraceHeader(
        kind="recorded",
        world_size=8,
        ranks=tuple(range(8)),
        groups=(
            ProcessGroup(id=0, name="default_pg", ranks=tuple(range(8))),
            ProcessGroup(id=1, name="11", desc="PIPELINE_MODEL_PARALLEL_GROUP", ranks=(0, 4)),
            ProcessGroup(id=2, name="pp_1", ranks=(1, 5)),
            ProcessGroup(id=3, name="31", desc="DATA_PARALLEL_GROUP", ranks=(0, 1, 2)),
            ProcessGroup(id=4, name="41", desc="EXPERT_DATA_PARALLEL_GROUP", ranks=(7, 1)),
            ProcessGroup(id=5, name="app_0", ranks=(6, 3)),
        ),
    )
    places = rank_places(header)
    assert places.stage.tolist() == [0, 0, -1, -1, 1, 1, -1, -1]
    assert places.replica.tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert (places.stages, places.replicas) == (2, 3)


def test_peers_by_type_take_the_mean_of_computations_and_the_median_of_transfers(tmp_path):
    trace = _trace(tmp_path, logs.simulate(pp=2, dp=2))
    rows = trace.collect().sort("rank", "index")
    duration = np.arange(rows.height, dtype=np.int64) * 7
    typical, alone = peer_durations(HeldTable(rows), trace.header, duration, "type")
    assert alone == 0
    found = rows.select("name", actual=duration, typical=typical)
    compute = found.filter(pl.col("name") == "forward-compute")
    assert compute["typical"].unique().to_list() == [round(compute["actual"].mean())]
    clip = found.filter(pl.col("name") == "optimizer-clip-main-grad")
    assert clip["typical"].unique().to_list() == [round(clip["actual"].median())]
    labels = kind_labels(rows, trace.header)
    assert {"forward-pp-comm", "backward-pp-comm"} <= set(labels)
    assert "forward-send" not in set(labels)


def test_rows_without_a_peer_keep_their_duration():
    run = synth.generate(synth.JobSpec(pp=2, tp=1, dp=1, microbatches=2))
    rows = run.collect().sort("rank", "index")
    duration = rows["dur_ns"].to_numpy()
    typical, alone = peer_durations(HeldTable(rows), run.header, duration, "position")
    assert alone == rows.height
    assert np.array_equal(typical, duration)


# --- the command ------------------------------------------------------------------------------


def test_command(run_command, tmp_path):
    work = {(replica, stage): 10 for replica in range(4) for stage in range(2)} | {(3, 0): 15}
    log = logs.simulate(dp=4, work=work, microbatches=8, rank_stride=2)
    log.table.write_parquet(tmp_path / "log.parquet")
    convert(tmp_path / "log.parquet", tmp_path / "t.parquet")
    done = run_command("prismcalib", "stragglers", "t.parquet", "--by", "rank", "--by", "kind")
    assert done.returncode == 0, done.stderr
    assert "slow-rank, rank 3 (6 in the log, stage 0)" in done.stdout
    assert "by stage" not in done.stdout
    assert "-0.00%" not in done.stdout
    # Each of the two savings says what it means.
    assert "saves: share of the step without launch delays" in done.stdout
    assert "less if its computation takes as long as the median of the other 3 ranks" in done.stdout
    assert (
        "(below 0: operations that were quicker than their peers' get longer, too)" in done.stdout
    )
    assert "a cause takes out just the difference that its line names" in done.stdout
    whole = re.search(r"^no launch delays +([\d,.]+ ms)", done.stdout, re.MULTILINE)[1]
    cause = r"slow-rank, rank 3 \(.*\): [\d.]+% \([\d,.]+ ms of (.*?)\) less if"
    assert re.search(cause, done.stdout)[1] == whole
    assert "in the log" in done.stdout
    told = run_command("prismcalib", "stragglers", "t.parquet", "--by", "stage", "--json")
    report = json.loads(told.stdout)
    assert list(report["parts"]) == ["stage"]
    assert report["source_ranks"] == list(range(0, 16, 2))
    assert {"kind", "where", "saves", "without", "evidence", "advice"} == set(report["causes"][0])
    wrong = run_command("prismcalib", "stragglers", "log.parquet")
    assert wrong.returncode == 1
    assert "PrismTrace header" in wrong.stderr


def test_exported():
    assert prismcalib.find_stragglers is find_stragglers
    assert Cause("k", "w", 0.1, "if", "e", "a").as_dict()["saves"] == 0.1


def test_operations_without_time_accuse_nobody(make_run):
    run = make_run(steps=3).trace
    still = run.collect().with_columns(start_ns=pl.lit(0, pl.Int64), dur_ns=pl.lit(0, pl.Int64))
    found = find_stragglers(merge(Trace(run.header, still.lazy())).trace)
    assert found.causes == ()
    # Where those of one group take none, the others are no infinite time slower.
    merged = merge(run).trace
    none = pl.when(pl.col("group") != 1).then(pl.col("transfer_ns")).otherwise(0)
    some = merged.nodes.with_columns(transfer_ns=none)
    json.dumps(find_stragglers(Trace(merged.header, some)).as_dict(), allow_nan=False)
