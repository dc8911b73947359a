"""Merging slices: what is taken from them, what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import prismtrace as pt
from prismcalib import synth
from prismcalib.build import graph_from_trace
from prismcalib.errors import (
    ClockError,
    CoverageError,
    CycleError,
    MergeInputError,
    MissingMemberError,
    StructureError,
)
from prismcalib.merging import merge
from prismcalib.paths import critical_path
from prismcalib.propagation import propagate
from prismcalib.slices import SliceOptions
from prismcalib.wording import doubts
from prismtrace.errors import FormatVersionError, InputFileError, ValidationError
from prismtrace.headers import CORE_WAIT
from prismtrace.schema import INDEX_BITS, ProcessGroup, SliceInfo, TraceHeader
from prismtrace.trace import METADATA_KEY, node_schema, open_trace, read_header, write_nodes

SPEC = synth.JobSpec(pp=2, tp=1, dp=2, microbatches=2, steps=2, launch_gap_ns=1000)


@pytest.fixture(scope="module")
def run():
    return synth.generate(SPEC)


@pytest.fixture(scope="module")
def _campaign(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("campaign")
    write_nodes(synth.bare_graph(run).header, synth.bare_graph(run).nodes, folder / "bare.parquet")
    synth.cut_into_slices(run, folder / "slices", 1)
    return folder


@pytest.fixture
def campaign(_campaign, tmp_path):
    """A folder of four slices of one rank each, free to be damaged, and the bare graph."""
    shutil.copytree(_campaign, tmp_path / "job")
    return tmp_path / "job"


def slices(campaign: Path) -> list[Path]:
    return sorted((campaign / "slices").glob("*.parquet"))


def change(path: Path, *columns: pl.Expr, rows: pl.Expr | None = None, **header: object) -> None:
    """Rewrite a file with other columns, some of its rows, or other header fields."""
    table = pl.read_parquet(path)
    table = table if rows is None else table.filter(rows)
    changed = read_header(path).model_copy(update=header)
    write_nodes(changed, table.with_columns(*columns).lazy(), path)


def at(rank: int, index: int) -> pl.Expr:
    return (pl.col("rank") == rank) & (pl.col("index") == index)


def replaced(name: str, where: pl.Expr, value: object) -> pl.Expr:
    column = pl.when(where).then(pl.lit(value)).otherwise(pl.col(name))
    return column.cast(node_schema()[name]).alias(name)


def test_waiting_for_cores_is_told_of_what_was_merged(campaign):
    assert doubts(merge(slices(campaign)).trace.header) == ()
    for path, waited in zip(slices(campaign), (0.2, 0.694, 0.0, 0.5), strict=True):
        change(path, extra={**read_header(path).extra, CORE_WAIT: waited})
    (told,) = doubts(merge(slices(campaign)).trace.header)
    assert told.startswith("ranks of slices waited for a core, which others had, for up to 69 % of")


# What a merge gives ---------------------------------------------------------------------


def test_before_and_after_alignment(tmp_path):
    # Four stages, one rank at a time: no slice sees the pipeline's bubbles or the straggler.
    spec = synth.JobSpec(pp=4, tp=1, dp=2, microbatches=4, steps=3, stragglers={3: 1.5})
    run = synth.generate(spec)
    report = merge(synth.cut_into_slices(run, tmp_path, 1)).report
    ends = synth.step_ends_ns(spec)
    assert report.propagated_ns == ends[-1]
    assert list(report.steps_ns) == np.diff(ends, prepend=0).tolist()
    assert report.step_ns == round(sum(report.steps_ns[1:]) / 2)  # the median of two
    assert report.before_ns < 0.9 * report.step_ns
    assert report.ranks == 8
    assert report.slices == report.executions == 8


def test_result_is_a_valid_trace_with_everything_filled(campaign, run):
    result = merge(slices(campaign))
    path = campaign / "merged.parquet"
    result.write(path)
    trace = open_trace(path)
    assert [v for v in pt.validate(trace) if v.severity == "error"] == []
    nodes = trace.collect()
    truth = run.collect()
    assert nodes["start_ns"].equals(truth["start_ns"])
    member = nodes["group"].is_not_null()
    assert nodes.filter(member)["wait_ns"].null_count() == 0
    whole = nodes["transfer_ns"] + nodes["wait_ns"]
    assert whole.filter(member).equals(nodes["dur_ns"].filter(member), check_names=False)
    assert nodes["critical"].any()
    assert nodes.filter("critical")["slack_ns"].max() == 0
    assert nodes["x_observed_start_ns"].null_count() == 0
    assert trace.header.ranks == (0, 1, 2, 3)
    assert trace.header.slice is None
    assert trace.header.extra["merge"]["propagated_ns"] == result.report.propagated_ns


def test_bytes_do_not_depend_on_order_or_jobs(campaign):
    paths = slices(campaign)
    written = []
    for order, jobs in ((paths, 1), (paths[::-1], 1), (paths[1:] + paths[:1], 2)):
        target = campaign / "merged.parquet"
        merge(order, slices=SliceOptions(jobs=jobs)).write(target)
        written.append(target.read_bytes())
    assert len(set(written)) == 1


def test_verify_compares_all_engines(campaign):
    assert merge(slices(campaign), verify=True).report.ranks == 4


def test_trace_of_the_result_reads_only_what_is_asked(campaign):
    result = merge(slices(campaign))
    nodes = result.nodes
    picked = result.trace.nodes.filter(pl.col("rank") == 2).select("dur_ns", "wait_ns").collect()
    assert picked.equals(nodes.filter(pl.col("rank") == 2).select("dur_ns", "wait_ns"))
    assert result.trace.nodes.head(7).collect().equals(nodes.head(7))


def test_columns_only_reads_like_the_whole(campaign):
    result = merge(slices(campaign))
    result.write(campaign / "whole.parquet")
    result.write(campaign / "columns.parquet", columns_only=True)
    whole, columns = (
        open_trace(campaign / "whole.parquet"),
        open_trace(campaign / "columns.parquet"),
    )
    assert columns.header == whole.header
    assert columns.collect().equals(whole.collect())
    assert (campaign / "columns.parquet").stat().st_size < (
        campaign / "whole.parquet"
    ).stat().st_size


def test_columns_only_with_interleaved_slices(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path / "slices", [[0, 2], [1, 3]])
    result = merge(paths)
    result.write(tmp_path / "columns.parquet", columns_only=True)
    assert open_trace(tmp_path / "columns.parquet").collect().equals(result.nodes)


def test_columns_only_notices_changed_inputs(campaign):
    merge(slices(campaign)).write(campaign / "columns.parquet", columns_only=True)
    change(slices(campaign)[1], rows=pl.col("index") > 0)
    with pytest.raises(ValidationError, match=r"slice-0001\.parquet has changed"):
        open_trace(campaign / "columns.parquet")


def test_columns_only_of_a_recorded_run(run, tmp_path):
    paths = synth.write_job(SPEC, tmp_path / "run", 1)
    result = merge(paths)
    result.write(tmp_path / "columns.parquet", columns_only=True)
    columns = open_trace(tmp_path / "columns.parquet").collect()
    assert columns.equals(result.nodes.select(columns.columns))
    with pytest.raises(MergeInputError, match="only beside files"):
        merge(run).write(tmp_path / "columns.parquet", columns_only=True)


# Samples --------------------------------------------------------------------------------


def test_repeats_are_reduced_and_their_spread_kept(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path, 2, repeats=3, noise=0.02)
    values = [pl.read_parquet(path).filter("real", at(0, 0))["dur_ns"].item() for path in paths[:3]]
    expected = {
        "median": sorted(values)[1],
        "mean": sum(values) // 3,
        "min": min(values),
        "last": values[-1],
    }
    for reduce, value in expected.items():
        nodes = merge(paths, slices=SliceOptions(reduce=reduce)).nodes
        first = nodes.filter(at(0, 0))
        assert first["dur_ns"].item() == value
        assert first["x_spread_ns"].item() == max(values) - min(values)


def test_transfers_from_different_sources_are_not_averaged(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path, 4, repeats=2, transfers="given")
    row = pl.read_parquet(paths[0]).filter(pl.col("kind") == "all_gather").row(0, named=True)
    here = at(row["rank"], row["index"])
    change(
        paths[1],
        replaced("transfer_ns", here, 1),
        replaced("transfer_source", here, "model"),
    )
    merged = merge(paths).nodes.filter(here)
    assert merged["transfer_ns"].item() == row["transfer_ns"]
    assert merged["transfer_source"].item() == "measured"


def test_pooled_steps_get_one_value(tmp_path):
    spec = synth.JobSpec(pp=1, tp=1, dp=2, microbatches=1, steps=5, launch_gap_ns=0)
    paths = synth.cut_into_slices(synth.generate(spec), tmp_path, 1)
    nodes = merge(paths, slices=SliceOptions(pool_steps=True, warmup=2)).nodes
    local = nodes.filter((pl.col("rank") == 0) & pl.col("group").is_null())
    per_step = local.with_columns(place=pl.int_range(pl.len()).over("step"))
    assert (per_step.group_by("place").agg(pl.col("dur_ns").n_unique())["dur_ns"] == 1).all()
    observed = per_step.filter(pl.col("place") == 0)["x_observed_dur_ns"].to_list()
    assert per_step["dur_ns"][0] == sorted(observed[2:])[1]
    assert per_step["x_spread_ns"][0] == max(observed[2:]) - min(observed[2:])


def test_steps_of_other_operations_are_not_pooled(tmp_path):
    spec = synth.JobSpec(pp=1, tp=1, dp=2, microbatches=1, steps=6, launch_gap_ns=0)
    paths = synth.cut_into_slices(synth.generate(spec), tmp_path, 1)
    own = pl.read_parquet(paths[0]).filter((pl.col("rank") == 0) & (pl.col("step") == 1))
    change(paths[0], replaced("kind", at(0, own["index"][0]), "memcpy"))
    nodes = merge(paths, slices=SliceOptions(pool_steps=True, warmup=1)).nodes
    first = nodes.filter((pl.col("rank") == 0) & pl.col("group").is_null()).with_columns(
        place=pl.int_range(pl.len()).over("step")
    )
    first = first.filter(pl.col("place") == 0).sort("step")
    assert first["dur_ns"].n_unique() == 2, "one value of five steps, and that of the other"
    assert first["dur_ns"][1] == first["x_observed_dur_ns"][1]
    assert first["dur_ns"][0] == first["dur_ns"][2]


def test_steps_of_a_slice_are_samples_of_the_one_step_of_the_bare_graph(tmp_path):
    spec = synth.JobSpec(
        pp=2, tp=1, dp=2, microbatches=2, steps=4, jitter=0, step_jitter=0, comm_jitter=0,
        end_spread_ns=0, launch_gap_ns=0,
    )  # fmt: skip
    one = synth.generate(replace(spec, steps=1))
    bare = synth.bare_graph(one)
    paths = synth.cut_into_slices(spec, tmp_path, 1)
    result = merge(paths, slices=SliceOptions(bare=bare))
    for name in ("id", "start_ns", "dur_ns", "deps"):
        assert result.nodes[name].equals(one.collect()[name]), name
    assert result.nodes["x_spread_ns"].max() == 0
    change(paths[1], replaced("kind", at(1, 3), "memcpy"))
    merge(paths, slices=SliceOptions(bare=bare))  # the first step is warm-up
    with pytest.raises(StructureError, match="rank 1 index 3 memcpy"):
        merge(paths, slices=SliceOptions(bare=bare, warmup=0))


def test_transfers_are_dropped_when_a_virtual_rank_comes_last(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path, 1, repeats=2)
    late = pl.read_parquet(paths[0]).filter(~pl.col("real")).row(0, named=True)
    # The assistant arrives a microsecond before the end.
    end = late["start_ns"] + late["dur_ns"]
    here = at(late["rank"], late["index"])
    change(paths[0], replaced("start_ns", here, end - 1000), replaced("dur_ns", here, 1000))
    result = merge(paths)
    assert result.report.late_virtual == 1
    assert result.report.unknown_transfers == 0
    assert result.nodes["start_ns"].equals(run.collect()["start_ns"])
    only = merge([path for path in paths if path != paths[1]])
    assert only.report.late_virtual == only.report.unknown_transfers == 1
    assert (only.nodes["transfer_source"] == "none").sum() == 1


def test_rows_without_edge_to_the_step_before_are_chained(campaign, run):
    for path in slices(campaign):
        first = pl.col("step") != pl.col("step").shift().over("rank")
        free = (first & pl.col("real") & (pl.col("index") > 0)).fill_null(value=False)
        empty = pl.lit([], pl.List(pl.UInt32))
        change(path, pl.when(free).then(empty).otherwise("deps").alias("deps"))
    result = merge(slices(campaign))
    assert result.report.chained == 4
    assert result.nodes["start_ns"].equals(run.collect()["start_ns"])
    result.write(campaign / "columns.parquet", columns_only=True)
    assert open_trace(campaign / "columns.parquet").collect().equals(result.nodes)


def test_lags_that_slices_know_are_kept(campaign, run):
    truth = merge(run).nodes
    for path in slices(campaign):
        lags = truth.select("id", known="lag_ns")
        table = pl.read_parquet(path).join(lags, on="id", how="left", maintain_order="left")
        table = table.with_columns(
            lag_ns=pl.when("real").then("known").cast(pl.List(pl.Int64))
        ).drop("known")
        write_nodes(read_header(path), table.lazy(), path)
    assert merge(slices(campaign)).nodes["start_ns"].equals(run.collect()["start_ns"])


# Which ranks ----------------------------------------------------------------------------


def test_missing_ranks_are_named(campaign):
    with pytest.raises(CoverageError, match=r"3 of 4 ranks measured: ranks 2 are real in no slice"):
        merge([path for path in slices(campaign) if "0002" not in path.name])


def test_missing_ranks_take_no_time_with_bare(campaign):
    paths = slices(campaign)[:3]
    options = SliceOptions(bare=campaign / "bare.parquet", missing="bare")
    result = merge(paths, slices=options)
    assert result.report.untimed == "3"
    rank = result.nodes.filter(pl.col("rank") == 3)
    assert rank["x_observed_start_ns"].null_count() == rank.height
    assert (rank.filter(pl.col("group").is_null())["dur_ns"] == 0).all()
    full = merge(slices(campaign)).report.propagated_ns
    assert result.report.propagated_ns <= full
    with pytest.raises(CoverageError, match="no bare graph"):
        merge(paths, slices=SliceOptions(missing="bare"))


def test_missing_ranks_take_the_times_of_their_like(campaign, run):
    paths = slices(campaign)[:3]
    options = SliceOptions(bare=campaign / "bare.parquet", missing="representative")
    result = merge(paths, slices=options)
    assert result.report.twins == "3"
    truth = run.collect()
    expected = truth.filter((pl.col("rank") == 2) & pl.col("group").is_null())["dur_ns"]
    mine = result.nodes.filter((pl.col("rank") == 3) & pl.col("group").is_null())["dur_ns"]
    assert mine.equals(expected)
    # Nothing measured does what the ranks of the other stage do.
    with pytest.raises(CoverageError, match=r"ranks 2-3 .* no measured rank does the same"):
        merge(slices(campaign)[:2], slices=options)


@pytest.fixture
def folded(tmp_path):
    """Identical replicas, of which only the first was measured; the whole job beside it."""
    spec = synth.JobSpec(
        pp=2, tp=2, dp=2, microbatches=2, jitter=0, step_jitter=0, comm_jitter=0, end_spread_ns=0
    )
    run = synth.generate(spec)
    twin = {rank: rank - 2 for rank in (2, 3, 6, 7)}
    paths = synth.cut_into_slices(run, tmp_path / "slices", [[0, 1], [4, 5]], virtual="none")
    for path in paths:
        change(path, symmetry=twin)
    return run, paths


def test_replicas_are_folded(folded):
    run, paths = folded
    result = merge(paths)
    assert result.report.folded == "2-3, 6-7"
    truth = run.collect()
    assert result.report.propagated_ns == (truth["start_ns"] + truth["dur_ns"]).max()
    kept = truth.filter(pl.col("rank").is_in([0, 1, 4, 5]))
    assert result.nodes["start_ns"].equals(kept["start_ns"])
    assert result.header.symmetry == {2: 0, 3: 1, 6: 4, 7: 5}
    # Whoever reads the result waits for the ranks that are there only.
    assert critical_path(result.trace).length_ns == result.report.propagated_ns
    graph, _ = graph_from_trace(result.trace)
    assert propagate(graph).makespan_ns == result.report.propagated_ns


def test_replicas_are_unfolded(folded):
    run, paths = folded
    result = merge(paths, slices=SliceOptions(unfold=True))
    truth = run.collect()
    assert result.report.twins == "2-3, 6-7"
    for name in ("id", "rank", "group", "peer", "seq", "start_ns", "dur_ns"):
        assert result.nodes[name].equals(truth[name]), name
    assert [v for v in pt.validate(result.trace) if v.severity == "error"] == []
    with pytest.raises(MergeInputError, match="no file of their own"):
        result.write(paths[0].parent / "columns.parquet", columns_only=True)


def test_base_keeps_the_other_ranks(campaign, tmp_path):
    base = tmp_path / "base.parquet"
    merge(slices(campaign)).write(base)
    again = slices(campaign)[1]
    slower = pl.col("dur_ns") * 2
    table = pl.read_parquet(again)
    # Twice as slow in everything, so all times double.
    begin = read_header(again).slice.origin_ns
    table = table.with_columns(start_ns=begin + (pl.col("start_ns") - begin) * 2, dur_ns=slower)
    write_nodes(read_header(again), table.lazy(), again)
    expected = merge(slices(campaign))
    result = merge([again], slices=SliceOptions(base=base))
    assert result.report.kept == "0, 2-3"
    assert result.nodes["start_ns"].equals(expected.nodes["start_ns"])
    assert result.nodes["x_observed_dur_ns"].equals(expected.nodes["x_observed_dur_ns"])
    result.write(tmp_path / "columns.parquet", columns_only=True)
    assert open_trace(tmp_path / "columns.parquet").collect().equals(result.nodes)


def test_results_of_slices_are_not_merged_like_a_run(campaign):
    merge(slices(campaign)).write(campaign / "merged.parquet")
    with pytest.raises(MergeInputError, match="was made from slices"):
        merge(campaign / "merged.parquet")


# Bad input ------------------------------------------------------------------------------


def test_overlapping_ranks(campaign):
    info = SliceInfo(index=9, real_ranks=(1,))
    extra = campaign / "slices" / "again.parquet"
    shutil.copy(slices(campaign)[1], extra)
    change(extra, slice=info)
    with pytest.raises(MergeInputError, match=r"ranks 1 are real in two slices: slice-0001"):
        merge(slices(campaign))


def test_same_index_but_other_ranks(campaign):
    paths = slices(campaign)
    info = read_header(paths[1]).slice.model_copy(update={"index": 0})
    change(paths[1], slice=info)
    with pytest.raises(MergeInputError, match="two slices have the index 0 but other real ranks"):
        merge(paths)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("world_size", 5, "worlds of 4 and 5 ranks"),
        ("axes", {"pp": 4}, "axes pp=2 tp=1 dp=2 ep=1 and pp=4"),
        ("groups", (), "other process groups"),
    ],
)
def test_slices_of_different_jobs(campaign, field, value, text):
    paths = slices(campaign)
    change(paths[2], **{field: value})
    with pytest.raises(MergeInputError, match=text) as caught:
        merge(paths)
    assert "slice-0002" in caught.value.where


def test_another_format_version(campaign):
    path = slices(campaign)[3]
    header = json.loads(pl.read_parquet_metadata(path)[METADATA_KEY])
    header["format_version"] = "2.0.0"
    pl.read_parquet(path).write_parquet(path, metadata={METADATA_KEY: json.dumps(header)})
    with pytest.raises(FormatVersionError, match=r"2\.0\.0") as caught:
        merge(slices(campaign))
    assert "slice-0003" in caught.value.where


def test_a_file_cut_in_the_middle(campaign):
    path = slices(campaign)[2]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputFileError, match="truncated") as caught:
        merge(slices(campaign))
    assert "slice-0002" in caught.value.where


def test_a_slice_that_ends_early(campaign):
    path = slices(campaign)[2]
    last = pl.read_parquet(path).filter(pl.col("rank") == 2)["index"].max()
    change(path, rows=(pl.col("rank") != 2) | (pl.col("index") < last - 3))
    with pytest.raises(MissingMemberError, match="an operation is seen on") as caught:
        merge(slices(campaign))
    assert "missing ranks=2" in caught.value.where
    options = SliceOptions(bare=campaign / "bare.parquet")
    with pytest.raises(StructureError, match="no such node") as caught:
        merge(slices(campaign), slices=options)
    assert f"rank=2 index={last - 3}" in caught.value.where


def test_a_slice_without_rows_of_its_rank(campaign):
    change(slices(campaign)[1], rows=pl.col("rank") != 1)
    with pytest.raises(MergeInputError, match="no rows of ranks 1"):
        merge(slices(campaign))


def test_rows_missing_in_between(campaign):
    change(slices(campaign)[1], rows=~at(1, 4))
    with pytest.raises(MergeInputError, match=r"rank 1 do not count up .* index 5 where 4 is due"):
        merge(slices(campaign))


def test_structure_is_compared_with_the_bare_graph(campaign):
    path = slices(campaign)[1]
    assert merge(slices(campaign), slices=SliceOptions(bare=campaign / "bare.parquet"))
    assert merge([*slices(campaign), campaign / "bare.parquet"]).report.checked_against == (
        "the bare graph"
    )
    change(path, replaced("kind", at(1, 3), "memcpy"))
    with pytest.raises(StructureError) as caught:
        merge(slices(campaign), slices=SliceOptions(bare=campaign / "bare.parquet"))
    assert "the bare graph: rank 1 index 3 compute" in caught.value.message
    assert "slice-0001.parquet: rank 1 index 3 memcpy" in caught.value.message


def test_edges_are_compared_with_the_bare_graph(campaign):
    far = pl.when(at(1, 5)).then(pl.lit([5], pl.List(pl.UInt32))).otherwise("deps").alias("deps")
    change(slices(campaign)[1], far)
    with pytest.raises(StructureError, match=r"index 5 .*deps=\[0\]"):
        merge(slices(campaign), slices=SliceOptions(bare=campaign / "bare.parquet"))


def test_slices_that_disagree_about_an_operation(campaign):
    mine = (pl.col("rank") == 1) & (pl.col("kind") == "all_gather")
    change(slices(campaign)[1], pl.when(mine).then(1).otherwise("bytes").alias("bytes"))
    with pytest.raises(StructureError, match=r"two ranks disagree .*rank 0 .* \| .*rank 1 "):
        merge(slices(campaign))


def test_repeats_that_differ(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path, 2, repeats=2)
    change(paths[1], replaced("kind", at(0, 2), "memcpy"))
    with pytest.raises(StructureError, match="slice-0000-repeat-1"):
        merge(paths)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("dur_ns", 10**15, "lasts longer than a day"),
        ("start_ns", 0, "more than a day apart"),
        ("dur_ns", None, "has no start or duration"),
    ],
)
def test_absurd_times(campaign, column, value, text):
    path = slices(campaign)[1]
    table = pl.read_parquet(path).with_columns(replaced(column, at(1, 4), value))
    write_nodes(read_header(path), table.lazy(), path)
    with pytest.raises(MergeInputError, match=text) as caught:
        merge(slices(campaign))
    assert "slice-0001" in caught.value.where


def test_negative_durations(campaign):
    path = slices(campaign)[1]
    change(path, replaced("dur_ns", at(1, 4), -5))
    with pytest.raises(MergeInputError, match="negative duration"):
        merge(slices(campaign))


def test_a_row_that_claims_to_be_virtual(campaign):
    change(slices(campaign)[1], replaced("real", at(1, 4), value=False))
    with pytest.raises(MergeInputError, match="marked as virtual"):
        merge(slices(campaign))


def test_a_recorded_run_among_slices(campaign, run):
    write_nodes(run.header, run.nodes, campaign / "slices" / "run.parquet")
    with pytest.raises(MergeInputError, match="a recorded trace among slices"):
        merge([*slices(campaign)[1:], slices(campaign)[0]])


def test_orders_that_contradict_each_other_are_a_cycle(tmp_path):
    # Each rank alone is fine; together they wait for each other.
    groups = tuple(ProcessGroup(id=i, name=f"g{i}", ranks=(0, 1)) for i in range(2))
    for rank in range(2):
        order = (0, 1) if rank == 0 else (1, 0)
        rows = [
            {
                "id": rank << INDEX_BITS | index,
                "rank": rank,
                "index": index,
                "kind": "all_reduce",
                "stream": 0,
                "group": group,
                "seq": 0,
                "real": True,
                "deps": [1] if index else [],
                "start_ns": 10 * index,
                "dur_ns": 10,
            }
            for index, group in enumerate(order)
        ]
        header = TraceHeader(
            kind="slice",
            world_size=2,
            ranks=(rank,),
            groups=groups,
            slice=SliceInfo(index=rank, real_ranks=(rank,)),
        )
        table = pl.DataFrame(rows, schema=node_schema())
        write_nodes(header, table.lazy(), tmp_path / f"slice-{rank}.parquet")
    with pytest.raises(CycleError, match="wait for each other in a circle"):
        merge(tmp_path)


# Clocks within a slice ------------------------------------------------------------------


def test_clocks_of_one_slice_are_aligned(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path, 4, ranks_per_clock=2, virtual="none")
    result = merge(paths)
    assert result.report.executions_seen[0].clocks == 2
    truth = run.collect()
    error = abs(result.report.propagated_ns - (truth["start_ns"] + truth["dur_ns"]).max())
    # Ends of one operation lie up to 5 us apart; clocks cannot be known better.
    assert error < 20 * 5_000
    with pytest.raises(ClockError, match=r"apart \(median of 2 in group world\)") as caught:
        merge(paths, clock="keep")
    assert "slice-0000" in caught.value.where


@pytest.mark.parametrize("ranks", [1, 2])
def test_arrivals_on_clocks_of_absent_ranks_count_for_nothing(run, tmp_path, ranks):
    # Virtual ranks of other hosts: nothing relates their clocks to those of the real ranks.
    paths = synth.cut_into_slices(run, tmp_path, 1, ranks_per_clock=ranks)
    result = merge(paths)
    assert result.nodes["start_ns"].equals(run.collect()["start_ns"])
    assert result.nodes["dur_ns"].equals(run.collect()["dur_ns"])
    assert result.report.transfer_clamps == result.report.late_virtual == 0


def test_clocks_eleven_seconds_apart_are_refused(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path, 4)
    # One clock, says the header, but half of the ranks are 11 s behind.
    late = (pl.col("start_ns") + pl.when(pl.col("rank") > 1).then(11 * 10**9).otherwise(0)).alias(
        "start_ns"
    )
    change(paths[0], late)
    with pytest.raises(ClockError, match=r"lie 11000\.\d+ ms apart") as caught:
        merge(paths)
    assert "slice-0000" in caught.value.where
    with pytest.raises(ClockError, match=r"ended .* before another started"):
        merge(paths, max_residual_ns=10**12)


# Damaged between two reads ---------------------------------------------------------------


def _damage(path):
    content = bytearray(path.read_bytes())
    for at in range(8, len(content) * 6 // 10):
        content[at] ^= 0x5A
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "use",
    [
        lambda result, path: result.write(path),
        lambda result, path: result.write(path, columns_only=True),
        lambda result, _: result.nodes,
    ],
)
def test_a_slice_damaged_after_merging_is_told_in_our_words(run, tmp_path, use):
    paths = synth.cut_into_slices(run, tmp_path / "slices", 1)
    result = merge(paths)
    _damage(paths[0])
    with pytest.raises(InputFileError, match="damaged") as told:
        use(result, tmp_path / "out.parquet")
    assert paths[0].name in told.value.where


def test_a_base_damaged_after_it_was_opened_is_told_in_our_words(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path / "slices", 1)
    merge(paths).write(tmp_path / "base.parquet")
    base = open_trace(tmp_path / "base.parquet")
    _damage(tmp_path / "base.parquet")
    with pytest.raises(InputFileError, match="damaged") as told:
        merge(paths[:1], slices=SliceOptions(base=base))
    assert "base.parquet" in told.value.where


def test_slices_in_memory_are_refused_with_a_way_out(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path / "slices", 1)
    with pytest.raises(MergeInputError, match="in memory") as refused:
        merge([open_trace(path) for path in paths])
    assert "prismtrace.write" in refused.value.hint


def test_a_result_names_the_sources_of_its_base(run, tmp_path):
    paths = synth.cut_into_slices(run, tmp_path / "slices", 1)
    for number, path in enumerate(paths):
        change(path, sources=(f"rank{number}.json",))
    merge(paths).write(tmp_path / "base.parquet")
    again = merge(paths[:1], slices=SliceOptions(base=tmp_path / "base.parquet"))
    assert again.header.sources == tuple(f"rank{number}.json" for number in range(len(paths)))
