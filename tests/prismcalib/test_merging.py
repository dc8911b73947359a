import polars as pl
import pytest

from prismcalib.errors import ClockError, CoverageError, CycleError, MergeInputError
from prismcalib.merging import merge
from prismcalib.slices import SliceOptions
from prismtrace.ranks import format_ranks
from prismtrace.schema import ClockDomain
from prismtrace.trace import Trace, open_trace, write_nodes
from prismtrace.validation import validate


def changed(run, header=None, **columns):
    recorded = run.trace
    return Trace(header=header or recorded.header, nodes=recorded.nodes.with_columns(**columns))


def where(rank, index):
    return (pl.col("rank") == rank) & (pl.col("index") == index)


def delay(rank, index, ns):
    return pl.when(where(rank, index)).then(pl.col("start_ns") + ns).otherwise("start_ns")


def test_the_recorded_timeline_is_reproduced_exactly(make_run):
    run = make_run()
    result = merge(run.trace)
    report = result.report
    assert result.nodes["start_ns"].equals(run.table["start_ns"])
    assert result.nodes["dur_ns"].equals(run.table["dur_ns"])
    assert report.difference_ns == report.most_delayed_ns == 0
    assert report.recorded_ns == report.propagated_ns
    assert report.overlap_clamps.count == report.transfer_clamps.count == 0
    assert (report.ranks, report.rows) == (4, len(run.rows))
    # Three steps of two pairs, one send-recv pair and the world.
    assert report.instances == 3 * 4


def test_wait_and_transfer_are_split_at_the_last_arrival(make_run):
    run = make_run()
    nodes = merge(run.trace).nodes
    keys = ["group", "seq", pl.col("kind").is_in(["send", "recv"])]
    last = pl.col("start_ns").max().over(keys)
    split = nodes.filter(pl.col("seq").is_not_null()).with_columns(
        expected_wait=last - pl.col("start_ns")
    )
    assert split["wait_ns"].equals(split["expected_wait"], check_names=False)
    assert (split["wait_ns"] + split["transfer_ns"] == split["dur_ns"]).all()
    assert (split["transfer_source"] == "measured").all()
    local = nodes.filter(pl.col("seq").is_null())
    for column in ("wait_ns", "transfer_ns", "transfer_source"):
        assert local[column].null_count() == local.height
    assert nodes["wait_ns"].sum() == merge(run.trace).report.wait_ns > 0


def test_a_whole_run_needs_no_other_source_of_transfers(make_run):
    for given in ({"comm_table": "absent.parquet"}, {"ranks_per_host": 8}):
        with pytest.raises(MergeInputError, match="needs no other source"):
            merge(make_run().trace, slices=SliceOptions(**given))


def test_clock_errors_are_found_and_removed(make_run):
    errors = [0, 3_000_000, -11_000_000_000, 700_000]
    run = make_run(clock_error_ns=errors)
    result = merge(run.trace)
    assert result.nodes["start_ns"].equals(run.table["start_ns"])
    assert [clock.offset_ns for clock in result.header.clock] == [-error for error in errors]
    assert result.report.clock.end_spread_before.max_ns > 10**10
    assert result.report.clock.end_spread_after.max_ns == 0
    observed = run.trace.collect()["start_ns"]
    assert result.nodes["x_observed_start_ns"].equals(observed, check_names=False)


def test_clock_errors_are_found_within_the_noise(make_run):
    errors = [0, 0, 40_000_000, 40_000_000]
    noise = 30_000
    run = make_run(steps=40, clock_error_ns=errors, domains=[[0, 1], [2, 3]], noise_ns=noise)
    result = merge(run.trace)
    offsets = [clock.offset_ns for clock in result.header.clock]
    assert offsets[0] == 0
    assert abs(offsets[1] + 40_000_000) < noise / 2
    assert result.report.clock.end_spread_after.max_ns < 2 * noise
    assert [d.ranks for d in result.report.clock.domains] == ["0-1", "2-3"]
    # Ends that vary make transfers vary, not the total.
    assert result.report.difference_ns < noise


def test_ranks_without_a_clock_domain_get_their_own(make_run):
    run = make_run(clock_error_ns=[0, 5_000_000, 0, 0])
    header = run.header.model_copy(update={"clock": (ClockDomain(id=4, ranks=(0, 2)),)})
    result = merge(changed(run, header=header))
    assert [clock.id for clock in result.header.clock] == [4, 5, 6]
    assert [clock.offset_ns for clock in result.header.clock] == [0, -5_000_000, 0]


def test_gaps_become_lags_of_the_binding_dependency(make_run):
    run = make_run(ranks=2, steps=2)
    # The last row of rank 1 depends on the two before it, the nearer one ends later.
    last = run.table.filter(pl.col("rank") == 1)["index"].max()
    trace = changed(
        run,
        deps=pl.when(where(1, last)).then(pl.lit([2, 1], pl.List(pl.UInt32))).otherwise("deps"),
        start_ns=delay(1, last, 5_000),
        dur_ns=pl.when(where(1, last)).then(pl.col("dur_ns") - 5_000).otherwise("dur_ns"),
    )
    result = merge(trace)
    row = result.nodes.filter(where(1, last))
    assert row["lag_ns"].item().to_list() == [0, 5_000]
    assert result.report.difference_ns == 0
    assert result.report.lags.count == merge(run.trace).report.lags.count + 1
    lag_total = result.nodes["lag_ns"].list.sum().sum()
    assert lag_total == result.report.lags.total_ns
    assert 0 <= result.report.lags_on_critical_path.total_ns <= lag_total


def test_overlaps_are_clamped_and_counted(make_run):
    run = make_run(ranks=2, steps=1)
    # Row 1 of both ranks is an all-reduce; pretend that the rows before ran into it.
    longer = pl.when(pl.col("index") == 0).then(pl.col("dur_ns") + 7_000).otherwise("dur_ns")
    result = merge(changed(run, dur_ns=longer))
    report = result.report
    assert report.overlap_clamps.count == 2
    assert report.overlap_clamps.total_ns == 14_000
    assert report.difference_ns == report.most_delayed_ns == 7_000
    assert result.header.policies == {
        "convert.something": 3,
        "merge.overlap-clamped": 2,
        "merge.transfer-clamped": 0,
        "merge.unmatched-kept": 0,
    }


def test_a_member_that_ends_too_early_is_clamped_and_counted(make_run):
    run = make_run(ranks=4, steps=8)
    # A buffered send: it ends at once, long before the receiver begins.
    pairs = run.table.filter(pl.col("kind").is_in(["send", "recv"])).sort("seq", "start_ns")
    sender, receiver = next(
        pair.to_dicts() for _, pair in pairs.group_by("seq", maintain_order=True)
        if pair["kind"][0] == "send"
    )  # fmt: skip
    early = pl.when(pl.col("id") == sender["id"]).then(1_000).otherwise("dur_ns")
    result = merge(changed(run, dur_ns=early))
    report = result.report
    assert report.transfer_clamps.count == 1
    late = receiver["start_ns"] - sender["start_ns"] - 1_000
    assert report.transfer_clamps.total_ns == late > 0
    row = result.nodes.filter(pl.col("id") == sender["id"]).row(0, named=True)
    assert (row["transfer_ns"], row["wait_ns"]) == (0, late + 1_000)
    assert report.clock.inconsistent == 0


def test_unmatched_communications_keep_their_duration(make_run):
    run = make_run()
    trace = changed(run, seq=pl.when(pl.col("group") == 0).then(pl.col("seq")))
    result = merge(trace)
    alone = result.nodes.filter(pl.col("group").is_not_null() & pl.col("seq").is_null())
    assert result.report.unmatched == alone.height > 0
    assert alone["transfer_ns"].null_count() == alone.height
    assert result.report.difference_ns == 0


def test_the_result_is_a_valid_calibrated_trace(make_run, tmp_path):
    run = make_run()
    trace = changed(run, x_mine=pl.col("index") * 10)
    result = merge(trace)
    result.write(tmp_path / "aligned.parquet")
    written = open_trace(tmp_path / "aligned.parquet")
    assert written.header == result.header
    assert written.header.kind == "calibrated"
    assert written.header.extra["merge"]["recorded_ns"] == result.report.recorded_ns
    assert [violation for violation in validate(written) if violation.severity == "error"] == []
    rows = written.collect()
    assert rows["x_mine"].to_list() == (rows["index"] * 10).to_list()
    assert (rows.filter("critical")["slack_ns"] == 0).all()
    assert rows["slack_ns"].min() == 0


def test_merging_again_changes_nothing(make_run, tmp_path):
    run = make_run(clock_error_ns=[0, 9_000_000, -4_000_000, 0], noise_ns=10_000)
    merge(run.trace).write(tmp_path / "once.parquet")
    merge(tmp_path / "once.parquet").write(tmp_path / "twice.parquet")
    assert (tmp_path / "once.parquet").read_bytes() == (tmp_path / "twice.parquet").read_bytes()


def test_the_order_of_files_changes_nothing(make_run, tmp_path):
    run = make_run()
    table, paths = run.trace.collect(), []
    for rank in (2, 0, 3, 1):
        paths.append(tmp_path / f"rank{rank}.parquet")
        write_nodes(run.header, table.filter(pl.col("rank") == rank).lazy(), paths[-1])
    outputs = []
    for order in (paths, paths[::-1], sorted(paths)):
        merge(order).write(tmp_path / "out.parquet")
        outputs.append((tmp_path / "out.parquet").read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]


def test_all_engines_and_verify(make_run):
    run = make_run()
    reference = merge(run.trace, verify=True)
    for engine in ("networkx", "python", "array"):
        assert merge(run.trace, engine=engine).nodes.equals(reference.nodes)


def test_keep_trusts_the_clocks(make_run):
    run = make_run(clock_error_ns=[0, 30_000, 0, 0])
    result = merge(run.trace, clock="keep")
    assert [clock.offset_ns for clock in result.header.clock] == [0, 0, 0, 0]
    assert result.report.clock.end_spread_after.max_ns == 30_000
    # Offsets that the header states are used.
    stated = tuple(
        ClockDomain(id=rank, ranks=(rank,), offset_ns=-30_000 if rank == 1 else None)
        for rank in range(4)
    )
    result = merge(
        changed(run, header=run.header.model_copy(update={"clock": stated})), clock="keep"
    )
    assert result.report.clock.end_spread_after.max_ns == 0
    with pytest.raises(ClockError, match=r"more than the 0\.010 ms allowed") as caught:
        merge(run.trace, clock="keep", max_residual_ns=10_000)
    assert "--clock align" in caught.value.hint


def test_ends_that_disagree_are_refused(make_run):
    run = make_run(noise_ns=40_000_000)
    with pytest.raises(ClockError, match="ms apart"):
        merge(run.trace)
    assert merge(run.trace, max_residual_ns=10**9).report.clock.end_spread_after.max_ns > 10**7


def test_wrongly_matched_collectives_are_refused(make_run):
    run = make_run(steps=6)
    world = (pl.col("kind") == "all_reduce") & (pl.col("group") == 0) & (pl.col("rank") == 3)
    swapped = pl.when(world).then(5 - pl.col("seq")).otherwise("seq")
    trace = changed(run, seq=swapped)
    with pytest.raises((ClockError, CycleError)):
        merge(trace)
    with pytest.raises(ClockError, match="before another started, which cannot be") as caught:
        merge(trace, max_residual_ns=10**12)
    assert "all_reduce group=world" in caught.value.where


def test_clocks_that_nothing_connects_are_named(make_run):
    run = make_run(ranks=4)
    alone = (pl.col("group") == 0) | (pl.col("rank") > 1)
    trace = changed(run, seq=pl.when(~alone).then(pl.col("seq")))
    with pytest.raises(ClockError) as caught:
        merge(trace)
    assert caught.value.where == "ranks 2; ranks 3"
    assert "--clock keep" in caught.value.hint
    merge(trace, clock="keep")


@pytest.mark.parametrize("kind", ["bare", "slice"])
def test_traces_that_are_no_recorded_run_are_refused(make_run, kind):
    run = make_run()
    header = run.header.model_copy(update={"kind": kind})
    with pytest.raises(MergeInputError, match=f"a {kind} trace in memory cannot be merged"):
        merge(changed(run, header=header))


def test_a_calibrated_trace_without_observed_times_is_refused(make_run):
    run = make_run()
    header = run.header.model_copy(update={"kind": "calibrated"})
    with pytest.raises(MergeInputError, match="observed times"):
        merge(changed(run, header=header))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"dur_ns": pl.when(~where(1, 2)).then(pl.col("dur_ns"))}, "no start or duration"),
        ({"dur_ns": pl.when(where(1, 2)).then(-5).otherwise("dur_ns")}, "negative duration"),
        ({"dur_ns": pl.when(where(1, 2)).then(10**14).otherwise("dur_ns")}, "longer than a day"),
        ({"start_ns": delay(1, 2, 10**14)}, "more than a day apart, and"),
    ],
)
def test_impossible_times_are_refused(make_run, columns, text):
    with pytest.raises(MergeInputError, match=text) as caught:
        merge(changed(make_run(), **columns))
    assert caught.value.where.startswith("rank=1")


def test_absent_ranks_are_refused(make_run):
    run = make_run()
    trace = Trace(header=run.header, nodes=run.trace.nodes.filter(pl.col("rank") != 1))
    with pytest.raises(CoverageError, match="3 of 4 ranks present: rank 1 missing"):
        merge(trace)


def test_a_single_rank_merges(make_run):
    run = make_run(ranks=1)
    result = merge(run.trace)
    assert result.report.clock.end_spread_after is None
    assert result.report.clock.operations == 0
    assert result.report.difference_ns == 0
    assert format_ranks(result.header.clock[0].ranks) == "0"
