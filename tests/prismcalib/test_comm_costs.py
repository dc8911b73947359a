"""Transfers that no slice measured: best source first, never over a measured one, never unsaid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from prismcalib import synth
from prismcalib.comm_costs import group_spread
from prismcalib.comm_logs import Reading
from prismcalib.comm_samples import SCHEMA
from prismcalib.comm_table import CommTable
from prismcalib.errors import CommLogError, MergeInputError
from prismcalib.merge_printing import print_slices
from prismcalib.merging import merge
from prismcalib.prediction import predict
from prismcalib.slices import SliceOptions
from prismcalib.step_times import typical_ns
from prismtrace.headers import CORE_WAIT
from prismtrace.schema import P2P_KINDS
from prismtrace.trace import node_schema, open_trace, read_header, write_nodes

# Transfers without any spread, so that a table can know them exactly.
SPEC = synth.JobSpec(
    pp=2, tp=2, dp=2, microbatches=2, steps=2, comm_jitter=0.0, end_spread_ns=0, jitter=0.1
)
PER_HOST = 4


@pytest.fixture(scope="module")
def run():
    return synth.generate(SPEC)


@pytest.fixture(scope="module")
def truth(run):
    return int(merge(run).report.propagated_ns)


@pytest.fixture(scope="module")
def partial(run, tmp_path_factory):
    """Slices of two ranks (a tensor group) whose other groups ran reduced, in half the time."""
    folder = tmp_path_factory.mktemp("partial")
    paths = synth.cut_into_slices(run, folder, 2, virtual="none", transfers="given")
    for path in paths:
        distort(path, source="reduced")
    return paths


def distort(path: Path, *, source: str) -> None:
    table = pl.read_parquet(path)
    alone = (pl.col("transfer_source") == "ring").fill_null(value=False)
    changed = table.with_columns(
        pl.when(alone)
        .then(pl.col("transfer_ns") // 2)
        .otherwise(pl.col("transfer_ns"))
        .alias("transfer_ns"),
        pl.when(alone)
        .then(pl.lit(source))
        .otherwise(pl.col("transfer_source").cast(pl.String))
        .cast(node_schema()["transfer_source"])
        .alias("transfer_source"),
    )
    write_nodes(read_header(path), changed.lazy(), path)


@pytest.fixture(scope="module")
def true_table(run):
    """What the job's own communications take, as a table."""
    rows = merge(run).nodes.filter(pl.col("transfer_ns").is_not_null())
    return table_of(run, rows)


def table_of(run, rows: pl.DataFrame, factor: float = 1.0, per_host=PER_HOST) -> CommTable:
    ranks, hosts = group_spread(run.header, per_host)
    place = {group.id: at for at, group in enumerate(run.header.groups)}
    found = rows.select("kind", "dtype", "group", "rank", "peer", "bytes", "transfer_ns").unique()
    samples = []
    for kind, dtype, group, rank, peer, size, time in found.iter_rows():
        pair = kind in P2P_KINDS
        k = 2 if pair else int(ranks[place[group]])
        h = 1 + (rank // per_host != peer // per_host) if pair else int(hosts[place[group]])
        name = "send" if pair else kind
        samples.append((name, dtype, k, h, size, False, round(time * factor), None))
    frame = pl.DataFrame(samples, schema=SCHEMA, orient="row").unique()
    return CommTable.of([Reading(Path("own.log"), frame, {})])


def counts(result) -> dict[str, int]:
    column = result.nodes["transfer_source"].drop_nulls().cast(pl.String)
    return dict(column.value_counts().sort("transfer_source").iter_rows())


def test_without_a_table_reduced_times_stay(partial, truth):
    result = merge(partial)
    assert result.report.propagated_ns < truth
    assert set(counts(result)) == {"measured", "reduced"}
    assert result.report.comm_costs is None


def test_the_table_gives_the_whole_groups_time(partial, truth, true_table):
    options = SliceOptions(ranks_per_host=PER_HOST, comm_table=true_table)
    result = merge(partial, slices=options)
    assert result.report.propagated_ns == truth
    assert set(counts(result)) == {"measured", "table"}
    costs = result.report.comm_costs
    assert costs.from_table == counts(result)["table"]
    assert (costs.from_model, costs.extrapolated, costs.other_dtype, costs.left) == (0, 0, 0, {})
    assert costs.table == ("own.log",)
    assert result.report.sources == counts(result)


def test_what_was_measured_is_never_replaced(run, partial, tmp_path):
    rows = merge(run).nodes.filter(pl.col("transfer_ns").is_not_null())
    wrong = table_of(run, rows, factor=3)
    options = SliceOptions(ranks_per_host=PER_HOST, comm_table=wrong)
    result = merge(partial, slices=options)
    plain = merge(partial).nodes
    measured = (pl.col("transfer_source") == "measured").fill_null(value=False)
    kept = result.nodes.filter(measured).select("id", "transfer_ns")
    assert kept.equals(plain.filter(measured).select("id", "transfer_ns"))
    whole = synth.cut_into_slices(run, tmp_path, 8)
    assert counts(merge(whole, slices=options)).keys() == {"measured"}


def test_where_nothing_tells_what_communications_take_it_is_said(run, tmp_path, capsys):
    paths = synth.cut_into_slices(run, tmp_path, 1, virtual="none", transfers="given")
    for path in paths:
        distort(path, source="none")
    merged = merge(paths, slices=SliceOptions(ranks_per_host=PER_HOST))
    assert merged.report.sources.keys() == {"none"}
    print_slices(merged.report, merged.header)
    shown = capsys.readouterr().out
    assert "nothing says what communications take" in shown
    assert "waited for a core" not in shown
    known = replace(merged.report, sources={"none": 3, "measured": 1})
    print_slices(known, merged.header.model_copy(update={"extra": {CORE_WAIT: 0.5}}))
    shown = capsys.readouterr().out
    assert "nothing says" not in shown
    assert "warning: ranks of slices waited for a core, which others had, for up to 50 %" in shown


def test_a_ring_outranks_the_model_but_not_the_table(run, tmp_path, true_table, truth):
    paths = synth.cut_into_slices(run, tmp_path, 2, virtual="none", transfers="given")
    modelled = merge(paths, slices=SliceOptions(ranks_per_host=PER_HOST))
    assert set(counts(modelled)) == {"measured", "ring"}
    assert modelled.report.comm_costs.left == {"ring": counts(modelled)["ring"]}
    tabled = merge(paths, slices=SliceOptions(ranks_per_host=PER_HOST, comm_table=true_table))
    assert set(counts(tabled)) == {"measured", "table"}
    assert tabled.report.propagated_ns == truth


def test_the_model_steps_in_where_the_table_ends(run, partial):
    """The table lacks the world's all_reduce; other kinds between hosts say what it takes."""
    rows = merge(run).nodes.filter(pl.col("transfer_ns").is_not_null())
    own = table_of(run, rows, per_host=2).times
    world = pl.col("kind") == "all_reduce"
    lacking = CommTable(own.filter(~world | (pl.col("hosts") == 1)), ("own.log",))
    options = SliceOptions(ranks_per_host=2, comm_table=lacking)
    result = merge(partial, slices=options)
    found = counts(result)
    assert set(found) == {"measured", "model", "table"}
    costs = result.report.comm_costs
    assert costs.from_model == found["model"]
    assert any(fit.link == "between hosts" and fit.kind is None for fit in costs.fits)
    (doubt,) = (d for d in costs.doubts if d.source == "model")
    assert (doubt.kind, doubt.ranks, doubt.hosts) == ("all_reduce", 8, 4)
    assert doubt.low < 1 < doubt.high
    modelled = result.nodes.filter(pl.col("transfer_source") == "model")
    assert modelled["kind"].unique().to_list() == ["all_reduce"]
    assert (modelled["transfer_ns"] > 0).all()


def test_without_anything_measured_nothing_is_made_up(partial):
    """Tensor groups within a host were measured; between hosts nothing was."""
    result = merge(partial, slices=SliceOptions(ranks_per_host=1))
    left = result.report.comm_costs.left
    assert left.get("reduced", 0) > 0
    assert counts(result)["reduced"] == left["reduced"]


def test_transfers_that_nobody_knows(run, tmp_path, true_table, truth):
    paths = synth.cut_into_slices(run, tmp_path, 2, virtual="none", transfers="given")
    for path in paths:
        distort(path, source="none")
    assert merge(paths).report.unknown_transfers > 0
    result = merge(paths, slices=SliceOptions(ranks_per_host=PER_HOST, comm_table=true_table))
    assert result.report.unknown_transfers == 0
    assert result.report.propagated_ns == truth


def test_the_same_bytes_for_any_order(partial, true_table, tmp_path):
    options = SliceOptions(ranks_per_host=PER_HOST, comm_table=true_table, jobs=1)
    merge(partial, slices=options).write(tmp_path / "a.parquet")
    options = SliceOptions(ranks_per_host=PER_HOST, comm_table=true_table, jobs=3)
    merge(partial[::-1], slices=options).write(tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_twins_get_estimates_of_their_own(run, partial, true_table, tmp_path):
    write_nodes(
        synth.bare_graph(run).header, synth.bare_graph(run).nodes, tmp_path / "bare.parquet"
    )
    options = SliceOptions(
        ranks_per_host=PER_HOST,
        comm_table=true_table,
        bare=tmp_path / "bare.parquet",
        missing="representative",
    )
    result = merge(partial[:-1], slices=options)
    assert set(counts(result)) == {"measured", "table"}


def test_a_table_needs_hosts_and_slices(run, partial, true_table, tmp_path):
    with pytest.raises(MergeInputError, match="share a host"):
        merge(partial, slices=SliceOptions(comm_table=true_table))
    with pytest.raises(MergeInputError, match="0 ranks"):
        merge(partial, slices=SliceOptions(ranks_per_host=0))
    with pytest.raises(MergeInputError, match="whole run was measured"):
        merge(run, slices=SliceOptions(ranks_per_host=4))
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(CommLogError):
        merge(
            partial,
            slices=SliceOptions(ranks_per_host=4, comm_table=tmp_path / "other.parquet"),
        )


def test_spread_of_groups(run):
    ranks, hosts = group_spread(run.header, PER_HOST)
    by_name = {
        group.name: (int(ranks[at]), int(hosts[at])) for at, group in enumerate(run.header.groups)
    }
    world = next(name for name, (size, _) in by_name.items() if size == 8)
    assert by_name[world] == (8, 2)
    assert all(hosts <= ranks for ranks, hosts in by_name.values())


# Predictions ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def doubted(partial, true_table, tmp_path_factory):
    """A result in which the estimates are stated to be 10 % off at most."""
    times = true_table.times.with_columns(
        least_ns=(pl.col("time_ns") * 0.9).cast(pl.Int64),
        most_ns=(pl.col("time_ns") * 1.1).cast(pl.Int64),
    )
    path = tmp_path_factory.mktemp("doubted") / "calibrated.parquet"
    options = SliceOptions(ranks_per_host=PER_HOST, comm_table=CommTable(times, ("own.log",)))
    merge(partial, slices=options).write(path)
    return path


def test_predictions_state_the_interval_that_follows(doubted):
    found = predict(doubted, draws=0)
    assert found.estimates.low_ns < found.step_ns < found.estimates.high_ns
    share = sum(part for name, part in found.basis.items() if name == "transfer, table")
    width = (found.estimates.high_ns - found.estimates.low_ns) / found.step_ns
    # Ten percent of the time that rests on the table, more where the path then changes.
    assert width == pytest.approx(0.2 * share, rel=0.5)
    assert found.estimates.unknown == {}
    assert found.as_dict()["estimates"]["low_ns"] == found.estimates.low_ns


def test_what_a_base_doubts_stays_doubted(doubted, partial, tmp_path):
    again = merge(partial[:1], slices=SliceOptions(base=doubted))
    again.write(tmp_path / "again.parquet")
    before, after = (predict(path, draws=0) for path in (doubted, tmp_path / "again.parquet"))
    # What the new slice saw of groups that it ran in part is `reduced`: nobody knows its error.
    assert after.estimates.unknown.keys() <= {"reduced"}
    assert after.estimates.low_ns < after.step_ns < after.estimates.high_ns
    costs = again.report.comm_costs
    assert costs.ranks_per_host == PER_HOST
    assert costs.kept == counts(again)["table"] > 0
    assert costs.from_table == costs.from_model == 0
    assert {doubt.source for doubt in costs.doubts} == {"table"}
    assert before.estimates.unknown == {}


def test_a_base_and_new_slices_agree_about_hosts(doubted, partial, true_table):
    other = SliceOptions(base=doubted, ranks_per_host=2 * PER_HOST, comm_table=true_table)
    with pytest.raises(MergeInputError, match=f"{PER_HOST} ranks per host") as refused:
        merge(partial[:1], slices=other)
    assert refused.value.hint == f"give --ranks-per-host {PER_HOST}, or merge all slices anew"
    same = SliceOptions(base=doubted, ranks_per_host=PER_HOST, comm_table=true_table)
    costs = merge(partial[:1], slices=same).report.comm_costs
    # The new table is certain of its times, the kept ones are still 10 % off at most.
    assert min(doubt.low for doubt in costs.doubts) == pytest.approx(0.9, abs=0.01)
    assert costs.kept > 0
    assert costs.from_table > 0


def test_predictions_from_measured_times_alone_have_no_such_interval(run, tmp_path):
    merge(run).write(tmp_path / "whole.parquet")
    assert predict(tmp_path / "whole.parquet", draws=0).estimates is None


def test_errors_that_nobody_states_are_named(partial, tmp_path):
    merge(partial).write(tmp_path / "reduced.parquet")
    found = predict(tmp_path / "reduced.parquet", draws=0)
    assert found.estimates.unknown.keys() == {"reduced"}
    assert 0 < found.estimates.unknown["reduced"] < 1
    assert found.estimates.low_ns == found.estimates.high_ns == found.step_ns


def test_intervals_cover_the_truth_in_noise(run, tmp_path):
    """Table times are off by up to 10 % at random, and the table says so by its repeats."""
    rows = merge(run).nodes.filter(pl.col("transfer_ns").is_not_null())
    random = np.random.default_rng(3)
    true = table_of(run, rows).times
    factor = pl.Series(random.uniform(0.9, 1.1, true.height))
    times = true.with_columns(
        time_ns=(pl.col("time_ns") * factor).cast(pl.Int64),
        least_ns=(pl.col("time_ns") * factor / 1.12).cast(pl.Int64),
        most_ns=(pl.col("time_ns") * factor * 1.12).cast(pl.Int64),
    )
    paths = synth.cut_into_slices(run, tmp_path / "slices", 2, virtual="none", transfers="given")
    for path in paths:
        distort(path, source="reduced")
    options = SliceOptions(ranks_per_host=PER_HOST, comm_table=CommTable(times))
    result = merge(paths, slices=options)
    result.write(tmp_path / "out.parquet")
    found = predict(tmp_path / "out.parquet", draws=0)
    true_steps = predict(_written(merge(run), tmp_path / "true.parquet"), draws=0).steps
    # The first step of slices is a warm-up.
    true_ns = typical_ns(true_steps["duration_ns"].to_list(), result.report.warmup)
    assert found.estimates.low_ns <= true_ns <= found.estimates.high_ns


def _written(result, path):
    result.write(path)
    return open_trace(path)
