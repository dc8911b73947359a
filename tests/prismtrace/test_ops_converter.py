"""Operation-level logs become traces: values, links, matches; and what is refused."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import prismtrace as pt
from prismtrace.converters import convert
from prismtrace.converters.ops import cutting
from prismtrace.converters.ops.convert import operations_trace
from prismtrace.converters.ops.ordering import sorted_rows
from prismtrace.errors import (
    AlignmentError,
    InputFileError,
    OutputError,
    RankError,
    SourceFormatError,
    ValidationError,
)
from tests.prismtrace import operation_logs as logs

TICK = logs.TICK_NS


@pytest.fixture
def converted(tmp_path):
    """Write a log, convert it, open the trace."""

    number = iter(range(100))

    def make(table, *, mapping=None, name="log.parquet", **options):
        path = tmp_path / name
        (table.write_csv if name.endswith("csv") else table.write_parquet)(path)
        file = None
        if mapping is not None:
            file = tmp_path / "columns.toml"
            file.write_text(mapping, encoding="utf-8")
        report = convert(path, tmp_path / f"out{next(number)}.parquet", mapping=file, **options)
        trace = pt.open(report.output)
        assert [v for v in pt.validate(trace) if v.severity == "error"] == []
        return trace, report

    return make


def _rank(trace, rank, step=3):
    return trace.collect().filter((pl.col("rank") == rank) & (pl.col("step") == step))


def _dep_names(rows):
    """Name and microbatch of what each row depends on, by the same of the row."""
    label = [(name, mb) for name, mb in zip(rows["name"], rows["microbatch"], strict=True)]
    return {
        label[row]: {label[row - distance] for distance in deps}
        for row, deps in enumerate(rows["deps"].to_list())
    }


def test_rows_and_header(converted):
    log = logs.simulate(pp=2, dp=2, microbatches=3, steps=2, rank_stride=2)
    trace, report = converted(log.table)
    nodes, header = trace.collect(), trace.header
    assert report.nodes == nodes.height == log.table.height
    assert header.axes == {"pp": 2, "dp": 2}
    assert header.steps == (3, 13)
    assert header.extra["source_ranks"] == "0-6/2"
    assert report.repairs == {"ranks-renumbered": 4}
    assert {group.name: group.ranks for group in header.groups} == {
        "pp_0": (0, 2),
        "pp_1": (1, 3),
        "dp_0": (0, 1),
        "dp_1": (2, 3),
        "embedding_0": (0, 2),
        "embedding_1": (1, 3),
        "world": (0, 1, 2, 3),
    }
    assert report.matched == {"collective": 2 * 7, "p2p": 2 * 2 * 6}
    first = nodes.filter((pl.col("rank") == 2) & (pl.col("name") == "forward-recv")).row(
        0, named=True
    )
    assert (first["kind"], first["phase"], first["peer"], first["seq"]) == (
        "recv",
        "forward",
        0,
        0,
    )
    assert first["transfer_source"] == "measured"
    assert 0 < first["transfer_ns"] <= first["dur_ns"]
    lone = nodes.filter(pl.col("name") == "layernorm-grads-all-reduce")
    assert lone["kind"].unique().to_list() == ["all_reduce"]
    assert lone.null_count().select("group", "seq", "transfer_ns").row(0) == (8, 8, 8)


def test_steps_that_are_samples_follow_each_other_without_links(converted):
    log = logs.simulate(steps=3)
    trace, _ = converted(log.table)
    nodes = trace.collect().with_columns(end=pl.col("start_ns") + pl.col("dur_ns"))
    ends = nodes.group_by("step").agg(pl.col("end").max(), pl.col("start_ns").min()).sort("step")
    assert (ends["end"] - ends["start_ns"]).to_list() == [base * TICK for base in log.base]
    assert ends["start_ns"].to_list() == [0, *ends["end"].to_list()[:-1]]
    row = pl.int_range(pl.len()).over("rank", "step")
    reach = nodes.with_columns(row=row).filter(pl.col("deps").list.max() > pl.col("row"))
    assert reach.is_empty()


def test_pipeline_parameters_and_update_links(converted):
    trace, report = converted(logs.simulate(pp=2, dp=2, microbatches=2, steps=1).table)
    first, last = _dep_names(_rank(trace, 0)), _dep_names(_rank(trace, 2))
    assert first["forward-compute", 0] == {("params-all-gather", None)}
    assert last["forward-compute", 0] == {("forward-recv", 0), ("params-all-gather", None)}
    assert first["forward-compute", 1] == {("forward-compute", 0)}
    assert first["forward-send", 1] == {("forward-send", 0), ("forward-compute", 1)}
    assert first["backward-compute", 0] >= {("backward-recv", 0)}
    assert ("backward-send", 1) not in first
    assert last["grads-reduce-scatter", None] == {
        ("embedding-grads-all-reduce", None),
        ("backward-compute", 1),
    }
    assert ("optimizer-clip-main-grad", None) in first["optimizer", None]
    assert set(report.edges) == {"chain", "issue", "parameters", "pipeline", "update"}


def test_a_receive_of_its_own_waits_for_the_computation_before_it(converted, monkeypatch):
    rows = [
        # operation, start and duration in ms, microbatch
        (0, "forward-compute", 0, 10, 0),
        (0, "forward-send", 10, 1, 0),
        (0, "backward-recv", 10.0, 21, 0),
        (0, "backward-compute", 31, 9, 0),
        (1, "forward-recv", 0, 11, 0),
        (1, "forward-compute", 11, 9, 0),
        (1, "backward-compute", 20, 10, 0),
        (1, "backward-send", 30, 1, 0),
    ]
    table = pl.DataFrame(
        [
            {
                "dp_rank": 0,
                "stage": s,
                "step": 0,
                "optype": n,
                "start_ts": a / 1e3,
                "duration": d / 1e3,
                "mb_id": m,
            }
            for s, n, a, d, m in rows
        ]
    )
    alone, _ = converted(table)
    assert _dep_names(_rank(alone, 0, 0))["backward-recv", 0] == {("forward-compute", 0)}
    assert alone.collect()["batch"].null_count() == 8
    # Launched together with the send: same start, same end.
    fused = table.with_columns(
        duration=pl.when((pl.col("stage") == 0) & (pl.col("optype") == "forward-send"))
        .then(0.021)
        .otherwise("duration")
    )
    together, _ = converted(fused)
    assert _dep_names(_rank(together, 0, 0))["backward-recv", 0] == set()
    nodes = together.collect()
    assert nodes.filter(pl.col("batch").is_not_null())["name"].to_list() == [
        "backward-recv",
        "forward-send",
    ]
    assert nodes["batch"].drop_nulls().n_unique() == 1
    # Every launch has a number of its own, also if each step is a part of its own.
    monkeypatch.setattr(cutting, "PART_ROWS", 1)
    steps, _ = converted(pl.concat([fused, fused.with_columns(step=pl.lit(1, pl.Int64))]))
    assert steps.collect()["batch"].drop_nulls().to_list() == [0, 0, 1, 1]


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)])
def test_every_shape_is_matched_completely(converted, pp, chunks):
    log = logs.simulate(pp=pp, dp=2, microbatches=3, chunks=chunks, steps=2, delays=True)
    trace, report = converted(log.table)
    hops = 2 * (pp * chunks - 1) * 3 * 2 * 2
    assert report.matched.get("p2p", 0) == hops
    nodes = trace.collect()
    sends = nodes.filter(pl.col("kind") == "send")
    recvs = nodes.filter(pl.col("kind") == "recv")
    pairs = sends.join(
        recvs, left_on=["group", "seq", "rank", "peer"], right_on=["group", "seq", "peer", "rank"]
    )
    assert pairs.height == hops
    # The message of a microbatch arrives as that microbatch.
    assert (pairs["microbatch"] == pairs["microbatch_right"]).all()


def test_order_of_the_rows_does_not_matter(converted):
    table = logs.simulate(pp=3, microbatches=4, delays=True).table
    straight, _ = converted(table)
    shuffled, _ = converted(table.sample(fraction=1.0, shuffle=True, seed=5))
    assert_frame_equal(straight.collect(), shuffled.collect(), categorical_as_str=True)
    assert straight.header == shuffled.header


@pytest.mark.parametrize("origin", ["step", "run"])
def test_parts_of_a_log_give_the_same_file_as_the_whole(converted, monkeypatch, origin):
    table = logs.simulate(pp=3, microbatches=4, steps=3, delays=True).table
    if origin == "run":
        table = table.with_columns(start_ts=pl.col("start_ts") + 100.0 * pl.col("step"))
    mapping = f'[time]\norigin = "{origin}"'
    whole, report = converted(table, mapping=mapping)
    monkeypatch.setattr(cutting, "PART_ROWS", 20)
    cut, again = converted(table, mapping=mapping)
    assert cut.paths[0].read_bytes() == whole.paths[0].read_bytes()
    assert (again.edges, again.matched) == (report.edges, report.matched)


def test_what_is_read_of_a_trace_in_memory(tmp_path):
    logs.simulate(pp=2, microbatches=3).table.write_parquet(tmp_path / "log.parquet")
    trace = operations_trace([tmp_path / "log.parquet"])[0]
    rows = trace.collect()
    assert_frame_equal(trace.ranks([1]).collect(), rows.filter(pl.col("rank") == 1))
    assert_frame_equal(trace.nodes.select("kind", "deps").collect(), rows.select("kind", "deps"))
    assert_frame_equal(trace.nodes.head(5).collect(), rows.head(5))


@pytest.mark.parametrize("scale", [1, 2**60])
def test_sorting_small_and_large_times(scale):
    segment = np.array([0, 0, 0, 1, 1, 1, 1])
    within = np.array([2, 1, 1, 3, 0, 3, 3]) * scale
    place = np.array([0, 1, 0, 1, 5, 0, 0], np.uint8)
    assert sorted_rows(segment, within, place).tolist() == [2, 1, 0, 4, 5, 6, 3]


def test_csv_and_other_units_and_names_give_the_same_trace(converted):
    table = logs.simulate(pp=2, microbatches=3).table
    wanted, _ = converted(table)
    from_csv, _ = converted(table, name="log.csv")
    assert_frame_equal(wanted.collect(), from_csv.collect(), categorical_as_str=True)
    own = table.select(
        "dp_rank",
        "rank",
        pp="stage",
        iteration="step",
        what=pl.col("optype").replace("forward-compute", "fwd").cast(pl.String),
        begin=(pl.col("start_ts") * 1e6).round().cast(pl.Int64),
        until=((pl.col("start_ts") + pl.col("duration")) * 1e6).round().cast(pl.Int64),
        mb=pl.when(pl.col("mb_id") >= 0).then("mb_id"),
        chunk=pl.when(pl.col("mc") >= 0).then("mc"),
    )
    mapping = """
    [columns]
    operation = "what"
    start = "begin"
    end = "until"
    step = "iteration"
    stage = "pp"
    microbatch = "mb"
    chunk = "chunk"
    [time]
    unit = "us"
    [operations.fwd]
    kind = "compute"
    phase = "forward"
    """
    mapped, _ = converted(own, mapping=mapping, name="own.parquet")
    plain = wanted.collect().with_columns(pl.col("name").cast(pl.String))
    renamed = pl.col("name").cast(pl.String).replace("fwd", "forward-compute")
    assert_frame_equal(plain, mapped.collect().with_columns(renamed))


def test_a_log_with_one_clock_goes_on_from_step_to_step(converted):
    table = logs.simulate(steps=2).table
    late = table.with_columns(
        start_ts=pl.col("start_ts") + pl.when(pl.col("step") > 3).then(100.0).otherwise(7.0)
    )
    trace, _ = converted(late, mapping='[time]\norigin = "run"\n')
    nodes = trace.collect()
    assert nodes["start_ns"].min() == 7_000_000_000
    assert trace.header.extra["sampled_steps"] is False
    second = nodes.filter((pl.col("step") == 13) & (pl.col("stream") == 0))
    first = second.group_by("rank", maintain_order=True).first()
    assert (first["deps"].list.len() >= 1).all()


def test_without_rank_numbers_they_are_counted(converted):
    table = logs.simulate(pp=2, dp=2)
    wanted, _ = converted(table.table)
    counted, _ = converted(table.table.drop("rank"))
    assert_frame_equal(wanted.collect(), counted.collect(), categorical_as_str=True)
    no_replica, _ = converted(table.table.drop("dp_rank"), mapping="")
    found, _ = converted(table.table)
    assert_frame_equal(found.collect(), no_replica.collect(), categorical_as_str=True)


def test_tensor_parallel_ranks_share_their_collectives(converted):
    table = logs.simulate(pp=2, dp=2).table
    lanes = pl.concat(
        [
            table.with_columns(tp_rank=pl.lit(lane), rank=pl.col("rank") * 2 + lane)
            for lane in range(2)
        ]
    )
    trace, report = converted(lanes)
    assert trace.header.axes == {"pp": 2, "dp": 2, "tp": 2}
    assert trace.header.world_size == 8
    groups = {group.id: group for group in trace.header.groups}
    norm = trace.collect().filter(pl.col("name") == "layernorm-grads-all-reduce")
    assert {groups[g].ranks for g in norm["group"]} == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert report.repairs == {}


def test_several_files_are_one_job(tmp_path):
    table = logs.simulate(pp=2, dp=2).table
    for rank in range(4):
        table.filter(pl.col("rank") == rank).write_parquet(tmp_path / f"{rank}.parquet")
    table.write_parquet(tmp_path / "whole.parquet")
    convert([tmp_path / f"{rank}.parquet" for rank in range(4)], tmp_path / "a.out")
    convert(tmp_path / "whole.parquet", tmp_path / "b.out")
    parts, whole = pt.open(tmp_path / "a.out"), pt.open(tmp_path / "b.out")
    assert_frame_equal(parts.collect(), whole.collect(), categorical_as_str=True)
    for step in (3, 13):
        table.filter(pl.col("step") == step).write_parquet(tmp_path / f"step{step}.parquet")
    convert([tmp_path / "step3.parquet", tmp_path / "step13.parquet"], tmp_path / "c.out")
    assert_frame_equal(pt.open(tmp_path / "c.out").collect(), whole.collect())


@pytest.mark.parametrize("rest", [slice(None), slice(-1, None)], ids=["whole", "last row"])
def test_files_that_hold_a_rank_in_a_step_twice(tmp_path, rest):
    table = logs.simulate(pp=2, dp=2, steps=2).table.sort("rank", "step")
    paths = [tmp_path / "a.csv", tmp_path / "b.csv"]
    table.write_csv(paths[0])
    table.reverse()[rest].write_csv(paths[1])
    with pytest.raises(RankError, match="rank 0 is in two files in step 3") as caught:
        convert(paths, tmp_path / "out.parquet")
    assert all(str(path) in str(caught.value) for path in paths)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda t: t.drop("start_ts"), SourceFormatError, "no column 'start_ts'"),
        (lambda t: t.drop("duration"), SourceFormatError, "no column 'duration'"),
        (
            lambda t: t.with_columns(optype=pl.col("optype").replace("optimizer", "adam")),
            SourceFormatError,
            "what the operation 'adam' is",
        ),
        (lambda t: t.clear(), InputFileError, "no rows"),
        (
            lambda t: t.with_columns(duration=pl.when(pl.int_range(pl.len()) == 5).then(-1.0).otherwise("duration")),
            ValidationError,
            "row 5 ends before it starts",
        ),
        (
            lambda t: t.with_columns(start_ts=pl.when(pl.int_range(pl.len()) > 5).then("start_ts")),
            ValidationError,
            "row 0 has no start, and 5 more",
        ),
        (lambda t: t.with_columns(duration=1e6), ValidationError, "lasts longer than a day"),
        (lambda t: t.with_columns(start_ts=float("nan")), ValidationError, "has no start"),
        (lambda t: t.with_columns(stage=pl.lit(-1)), ValidationError, "negative stage"),
        (lambda t: t.with_columns(rank=pl.lit(2**40)), ValidationError, "absurd rank"),
        (lambda t: t.filter(pl.col("rank") != 2), RankError, "1 of 4 ranks are missing"),
        (lambda t: t.with_columns(rank=pl.lit(0)), RankError, "rank 0 is at two places"),
        (
            lambda t: t.with_columns(stage=pl.lit(0), dp_rank=pl.col("rank") // 2),
            RankError,
            "ranks 0-1 are all at stage 0",
        ),
        (
            lambda t: t.filter(~((pl.col("optype") == "forward-recv") & (pl.col("mb_id") == 1))),
            AlignmentError,
            "2 forward receives do not fit 3 computations",
        ),
        (
            lambda t: t.filter(
                ~((pl.col("optype") == "grads-reduce-scatter") & (pl.col("rank") == 1))
            ),
            AlignmentError,
            "fewer operations",
        ),
        (
            lambda t: t.with_columns(
                optype=pl.when(
                    (pl.col("optype") == "optimizer-clip-main-grad") & (pl.col("rank") == 1)
                )
                .then(pl.lit("params-all-gather"))
                .otherwise("optype")
            ),
            AlignmentError,
            "",
        ),
        (
            lambda t: t.with_columns(
                start_ts=pl.when(pl.col("optype") == "forward-recv")
                .then(pl.col("start_ts") + 1000)
                .otherwise("start_ts")
            ),
            AlignmentError,
            "started before the one that feeds it",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_named(converted, tmp_path, change, kind, says):
    table = change(logs.simulate(pp=2, dp=2, microbatches=3, steps=1).table)
    with pytest.raises(kind) as caught:
        converted(table)
    assert says in caught.value.message
    assert not list(tmp_path.glob("out*"))


def test_one_end_of_a_link_missing(converted):
    table = logs.simulate(pp=3, dp=1, microbatches=2, steps=1).table
    lost = (
        (pl.col("stage") == 1)
        & pl.col("optype").is_in(["forward-recv", "forward-compute"])
        & (pl.col("mb_id") == 1)
    )
    sends = (pl.col("stage") == 1) & (pl.col("optype") == "forward-send") & (pl.col("mb_id") == 1)
    with pytest.raises(AlignmentError, match="1 forward receives, but 2 forward sends") as caught:
        converted(table.filter(~lost & ~sends))
    assert caught.value.where == "rank=1 step=3, neighbour rank=0"


def test_an_operation_of_the_ends_in_the_middle(converted):
    table = logs.simulate(pp=3, dp=1, steps=1).table
    stray = table.filter((pl.col("stage") == 1) & (pl.col("optype") == "optimizer"))
    table = pl.concat([table, stray.with_columns(optype=pl.lit("embedding-grads-all-reduce"))])
    with pytest.raises(AlignmentError, match="between the first and the last stage"):
        converted(table)


def test_messages_without_stages(converted):
    table = logs.simulate(pp=2, dp=1, steps=1).table.drop("stage", "rank")
    one_rank = table.with_columns(
        start_ts=pl.int_range(pl.len()) * 1.0, duration=0.1, dp_rank=pl.lit(0)
    )
    with pytest.raises(AlignmentError):
        converted(one_rank, mapping="")


def test_overlaps_are_counted_and_strict_refuses_them(converted):
    table = logs.simulate(steps=1).table
    longer = table.with_columns(
        duration=pl.when((pl.col("optype") == "forward-compute") & (pl.col("mb_id") == 0))
        .then(pl.col("duration") + 0.0003)
        .otherwise("duration")
    )
    _, report = converted(longer)
    assert report.repairs["operations-overlap"] > 0
    with pytest.raises(ValidationError, match="operations-overlap"):
        converted(longer, strict=True)


def test_output_must_not_be_an_input(tmp_path):
    path = tmp_path / "log.parquet"
    logs.simulate().table.write_parquet(path)
    with pytest.raises(OutputError, match="one of the inputs"):
        convert(path, path)


def test_a_file_that_is_no_table(tmp_path):
    path = tmp_path / "log.parquet"
    path.write_bytes(b"PAR1 and then nothing")
    mapping = tmp_path / "columns.toml"
    mapping.write_text("", encoding="utf-8")
    with pytest.raises(InputFileError, match="cannot be read"):
        convert(path, tmp_path / "out.parquet", mapping=mapping)


def test_command(run_command, tmp_path):
    logs.simulate(pp=2, dp=2).table.rename({"optype": "event"}).write_parquet(tmp_path / "log.pq")
    (tmp_path / "columns.toml").write_text('[columns]\noperation = "event"\n', encoding="utf-8")
    done = run_command(
        "prismtrace", "convert", "log.pq", "-o", "t.parquet", "--columns", "columns.toml"
    )
    assert done.returncode == 0, done.stderr
    assert "0-3 of 4" in done.stdout
    (tmp_path / "columns.toml").write_text('[columns]\noperation = "optype"\n', encoding="utf-8")
    bad = run_command(
        "prismtrace", "convert", "log.pq", "-o", "u.parquet", "--columns", "columns.toml"
    )
    assert bad.returncode == 1
    assert "no column 'optype'" in bad.stderr
    assert not (tmp_path / "u.parquet").exists()


@pytest.mark.parametrize(
    ("job", "ranks", "rows", "steps", "collectives", "pairs"),
    [("ST", 8, 6_784, 32, 352, 1_536), ("SE", 64, 107_328, 43, 1_591, 22_016)],
)
def test_public_data_set(data_dir, tmp_path, job, ranks, rows, steps, collectives, pairs):
    folder = data_dir / "ops" / "straggler"
    report = convert(folder / f"trace-{job}.parquet", tmp_path / "t.parquet")
    assert (len(report.ranks), report.nodes, len(report.steps)) == (ranks, rows, steps)
    assert report.matched == {"collective": collectives, "p2p": pairs}
    trace = pt.open(tmp_path / "t.parquet")
    assert [v for v in pt.validate(trace) if v.severity == "error"] == []
    spans = trace.nodes.group_by("step").agg(
        first=pl.col("start_ns").min(), last=(pl.col("start_ns") + pl.col("dur_ns")).max()
    )
    measured = spans.sort("step").collect()
    expected = pl.read_json(folder / f"result-{job}.json")["step_t_base"].struct.unnest()
    wanted = np.array([expected[str(step)][0] for step in measured["step"]])
    assert np.abs((measured["last"] - measured["first"]) / 1e9 - wanted).max() < 2e-6
