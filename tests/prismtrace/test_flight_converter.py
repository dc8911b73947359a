"""Flight-recorder dumps converted to bare traces."""

from __future__ import annotations

import pickle

import polars as pl
import pytest

import prismtrace as pt
from prismtrace.errors import AlignmentError, GroupError, InputFileError, RankError
from tests.prismtrace.flight_dumps import recorders, write_dumps


def converted(paths, tmp_path, **options):
    report = pt.convert(paths, tmp_path / "out.parquet", **options)
    trace = pt.open(tmp_path / "out.parquet")
    assert [v for v in pt.validate(trace) if v.severity == "error"] == []
    return report, trace


def test_recorded_dumps(data_dir, tmp_path):
    report, trace = converted(sorted((data_dir / "flight-recorder").iterdir()), tmp_path)
    assert report.matched == {"by-seq": 40}
    assert trace.header.kind == "bare"
    assert {(g.name, g.ranks) for g in trace.header.groups} == {
        ("0", (0, 1, 2, 3)),
        ("1", (0, 2)),
        ("2", (1, 3)),
    }
    nodes = trace.nodes.collect()
    assert nodes["start_ns"].null_count() == nodes["dur_ns"].null_count() == 96
    assert nodes["x_enqueued_ns"].null_count() == 0
    first = nodes.row(0, named=True)
    assert (first["kind"], first["bytes"], first["dtype"]) == ("all_reduce", 65536, "float32")
    gathers = nodes.filter(pl.col("kind") == "all_gather")
    assert set(gathers["bytes"]) == {64}
    assert pt.validate(trace) == []


@pytest.mark.parametrize("as_json", [False, True])
def test_collectives_p2p_and_batches(tmp_path, as_json):
    ranks = recorders(4, tp0=(0, 1), tp1=(2, 3), pp=(1, 2))
    for step in range(3):
        for r in ranks:
            tp = "tp0" if r.rank < 2 else "tp1"
            r.run("_all_gather_base", group=tp, shape=(8, step + 1), dtype="BFloat16")
            r.run("_reduce_scatter_base", group=tp, shape=(16,))
            if r.rank in (1, 2):
                r.batch(("send", 3 - r.rank), ("recv", 3 - r.rank), group="pp")
            if r.rank == 1:
                r.send(2, group="pp", shape=(5,))
            if r.rank == 2:
                r.recv(1, group="pp", shape=(5,))
            r.run("all_reduce_barrier", shape=(1,))
    paths = write_dumps(tmp_path / "fr", ranks, as_json=as_json)
    report, trace = converted(paths, tmp_path)
    assert report.matched == {"by-seq": 15, "p2p": 9}
    assert report.repairs == {}
    nodes = trace.nodes.collect()
    assert nodes.filter(pl.col("kind") == "barrier").height == 12
    gathers = nodes.filter(pl.col("kind") == "all_gather", pl.col("rank") == 0)
    assert gathers["bytes"].to_list() == [32, 64, 96]
    batched = nodes.filter(pl.col("batch").is_not_null())
    assert sorted(batched["kind"].cast(pl.String)) == ["recv"] * 6 + ["send"] * 6
    assert batched["peer"].to_list() == [2] * 6 + [1] * 6
    # Members of a launch follow on the one before it, not on each other.
    second = batched.filter(pl.col("rank") == 1, pl.col("batch") == 1)
    assert [sorted(deps) for deps in second["deps"]] == [[5, 6], [6, 7]]


def test_windows_and_hangs_leave_heads_and_tails(tmp_path):
    ranks = recorders(2)
    for r in ranks:
        for k in range(20):
            r.run(shape=(k + 1,))
    ranks[0].run(shape=(99,), state="started")
    ranks[0].capacity = 12
    report, _ = converted(write_dumps(tmp_path / "fr", ranks), tmp_path)
    assert report.matched == {"by-seq": 11}
    assert report.repairs == {"unmatched-head": 9, "unmatched-tail": 1, "wrapped-buffer": 1}


def test_a_hang_that_is_refused_leads_to_the_command_for_it(tmp_path):
    ranks = recorders(2)
    ranks[0].run(state="started")
    ranks[1].groups = {**ranks[1].groups, "me": (1,)}
    ranks[1].run(group="me")
    with pytest.raises(AlignmentError, match="recorded no communication") as refused:
        converted(write_dumps(tmp_path / "fr", ranks), tmp_path)
    assert "--unmatched keep" in (refused.value.hint or "")
    assert "prismtrace hang" in (refused.value.hint or "")


def test_a_folder_of_dumps(tmp_path):
    ranks = recorders(2)
    for r in ranks:
        r.run()
    write_dumps(tmp_path / "fr", ranks)
    (tmp_path / "fr" / "readme").write_text("not a dump")
    report, _ = converted(tmp_path / "fr", tmp_path)
    assert report.ranks == (0, 1)


def test_groups_that_nothing_lists_need_all_ranks(tmp_path):
    ranks = recorders(3, a=(0, 2))
    paths = []
    for r in ranks:
        r.run()
        if r.rank != 1:
            r.run(group="a")
        dump = r.dump()
        dump["pg_config"] = {"0": dump["pg_config"]["0"]}
        paths.append(tmp_path / f"rank_{r.rank}")
        paths[-1].write_bytes(pickle.dumps(dump))
    report, trace = converted(paths, tmp_path)
    assert report.repairs == {"group-of-communicator-users": 1}
    assert {g.name: g.ranks for g in trace.header.groups} == {"0": (0, 1, 2), "a": (0, 2)}
    with pytest.raises(GroupError, match="not listed"):
        pt.convert(paths[:2], tmp_path / "out.parquet")
    groups = tmp_path / "groups.json"
    groups.write_text('{"a": "0,2"}')
    report, _ = converted(paths[:2], tmp_path, groups=groups)
    assert report.missing_ranks == (2,)


class _Evil:
    def __reduce__(self):
        return (open, ("/nonexistent/prism", "w"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pickle.dumps({"entries": [], "pg_config": _Evil()}), "asks to run code"),
        (pickle.dumps({"entries": 5}), "no list of entries"),
        (pickle.dumps({"entries": [1, 2]}), "none of its entries"),
        (pickle.dumps({"entries": [{"profiling_name": "nccl:x"}]})[:-20], "breaks off"),
        (b'{"version": "2", "pg_config": {}, "entries": [', "neither a pickle nor JSON"),
        (pickle.dumps({"entries": []}), "holds no operation"),
        (pickle.dumps({"entries": [{"profiling_name": "a", (1, 2): 3}]}), "neither a text nor"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path, content, told):
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    with pytest.raises(InputFileError, match=told) as caught:
        pt.convert([path], tmp_path / "out.parquet")
    assert caught.value.hint
    assert str(path) in str(caught.value.where)


def test_a_file_that_does_not_tell_its_rank(tmp_path):
    (recorder,) = recorders(1)
    recorder.run()
    (path,) = write_dumps(tmp_path, [recorder])
    nameless = path.rename(tmp_path / "dump")
    with pytest.raises(RankError, match="does not say which rank"):
        pt.convert([nameless], tmp_path / "out.parquet")
    report, _ = converted([nameless], tmp_path, ranks={"dump": 0})
    assert report.ranks == (0,)


def test_values_of_other_types_are_not_believed(tmp_path):
    """Nothing of an entry but its name is needed."""
    odd = {
        "profiling_name": "nccl:some_new_thing",
        "record_id": "x",
        "pg_id": -1,
        "process_group": 7,
        "collective_seq_id": 2**70,
        "time_created_ns": -5,
        "duration_ms": "long",
        "input_sizes": [[-1, "a"]],
        "input_dtypes": [3],
        "state": ["?"],
        "frames": [{"name": 1}, 5],
        "timeout_ms": 2**80,
    }
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps({"entries": [odd, "?"], "pg_config": {1: 2, "a": {"ranks": 3}}}))
    report, trace = converted([path], tmp_path)
    assert report.repairs == {
        "assumed-world-group": 1,
        "dropped-entry": 1,
        "unknown-collective": 1,
    }
    assert trace.nodes.collect()["kind"].to_list() == ["other_comm"]
