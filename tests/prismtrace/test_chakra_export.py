"""`export --to chakra`: what is written can be converted back to the same job."""

from __future__ import annotations

import json
from collections import Counter

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from prismtrace import cli
from prismtrace.converters.chakra.frames import read_frames
from prismtrace.converters.chakra.messages import message_class
from prismtrace.errors import OutputError, ValidationError
from prismtrace.exporting import export
from prismtrace.schema import ClockDomain, ProcessGroup
from prismtrace.trace import Trace, write
from tests.prismtrace.conftest import build_trace
from tests.prismtrace.kineto_events import run
from tests.prismtrace.kineto_jobs import Job

KEPT = (
    "rank", "index", "kind", "name", "batch", "step", "microbatch", "chunk", "phase", "seq",
    "peer", "bytes", "dtype", "reduce_op",
)  # fmt: skip


def groups_of(trace: Trace) -> list[tuple[str, str, tuple[int, ...]] | None]:
    known = {group.id: (group.name, group.desc, group.ranks) for group in trace.header.groups}
    return [known.get(group) for group in trace.collect()["group"]]


def streams_of(trace: Trace) -> list[str]:
    return [trace.header.streams[stream] for stream in trace.collect()["stream"]]


def deps_of(trace: Trace) -> list[list[int]]:
    return [sorted(deps) for deps in trace.collect()["deps"]]


def back(folder, trace):
    """A trace after it was exported and converted again, and what the export counted."""
    lost = export(trace, folder / "job", to="chakra")
    (folder / "back").mkdir()
    found, report = run(folder / "back", folder / "job")
    return found, report, lost


def messages(path):
    """The nodes of a file, as the protobuf library reads them."""
    text, at = path.read_bytes(), 0
    found = []
    while at < len(text):
        length = shift = 0
        while True:
            byte = text[at]
            at += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        found.append(text[at : at + length])
        at += length
    return [message_class("Node").FromString(message) for message in found[1:]]


@pytest.mark.parametrize("torch", ["2.2", "2.4", "2.13"])
def test_a_job_comes_back(tmp_path, torch):
    (tmp_path / "in").mkdir()
    Job(tp=2, dp=2, pp=2, torch=torch, layers=2, steps=2).write(tmp_path / "in")
    trace, _ = run(tmp_path, tmp_path / "in", unmatched="keep")
    found, report, lost = back(tmp_path, trace)
    was, now = trace.collect(), found.collect()
    kind = pl.col("kind").cast(pl.String)
    alone = ~kind.is_in(["compute", "memcpy"]) & (pl.col("seq").is_null() | (kind == "other_comm"))
    assert lost.get("exported-as-local", 0) == was.filter(alone).height
    for name in KEPT:
        assert now[name].cast(pl.String).equals(was[name].cast(pl.String), null_equal=True), name
    assert groups_of(found) == groups_of(trace)
    assert deps_of(found) == deps_of(trace)
    assert streams_of(found) == streams_of(trace)
    assert found.header.world_size == trace.header.world_size
    for name in ("start_ns", "dur_ns"):
        assert (now[name] - was[name]).abs().max() < 1000
    changed = (now["start_ns"] != was["start_ns"]) | (now["dur_ns"] != was["dur_ns"])
    assert lost.get("rounded-times", 0) == changed.sum()
    assert report.repairs == {}


def test_rounding_keeps_the_order_of_a_stream(tmp_path):
    rows = [
        {"start_ns": at, "dur_ns": 700, "deps": [1] if at else []} for at in range(0, 7000, 700)
    ]
    found, _, lost = back(tmp_path, build_trace(*rows))
    now = found.collect()
    ends = now["start_ns"] + now["dur_ns"]
    assert (now["start_ns"][1:] == ends[:-1]).all()
    assert lost == {"rounded-times": 10}


def test_files_for_astra_sim(tmp_path):
    groups = (
        ProcessGroup(id=0, name="world", ranks=(0, 1, 2)),
        ProcessGroup(id=4, name="tp", ranks=(0, 2)),
    )
    times = {"start_ns": 5000, "dur_ns": 2000}
    trace = build_trace(
        {"name": "gemm", **times},
        {
            "kind": "all_reduce",
            "group": 4,
            "seq": 0,
            "bytes": 64,
            "deps": [1],
            "stream": 1,
            **times,
        },
        {"kind": "send", "group": 0, "seq": 0, "peer": 1, "bytes": 8, "deps": [1, 2], **times},
        {"rank": 1, "kind": "recv", "group": 0, "seq": 0, "peer": 0, "bytes": 8, **times},
        {"rank": 2, "kind": "all_reduce", "group": 4, "seq": 0, "bytes": 64, **times},
        {"rank": 2, "kind": "memcpy", "bytes": 32, **times},
        groups=groups,
    )
    assert export(trace, tmp_path / "job", to="chakra") == {}
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "comm_group.json", "job.0.et", "job.1.et", "job.2.et",
    ]  # fmt: skip
    listed = json.loads((tmp_path / "job" / "comm_group.json").read_text())
    assert listed == {"1": [0, 1, 2], "5": [0, 2]}
    first = messages(tmp_path / "job" / "job.0.et")
    assert [(node.type, node.duration_micros, list(node.data_deps)) for node in first] == [
        (4, 2, []), (7, 2, [0]), (5, 2, [1, 0]),
    ]  # fmt: skip
    # Readers look into these fields and no others.
    said = [{item.name: item for item in node.attr} for node in first]
    assert not any(attributes["is_cpu_op"].bool_val for attributes in said)
    assert said[1]["comm_type"].WhichOneof("value") == "int64_val"
    assert said[1]["comm_size"].int64_val == 64
    assert said[1]["pg_name"].string_val == "5"
    assert (said[2]["comm_src"].int32_val, said[2]["comm_dst"].int32_val) == (0, 1)
    assert said[2]["comm_tag"].WhichOneof("value") == "int32_val"
    (tmp_path / "again").mkdir()
    found, _, _ = back(tmp_path / "again", trace)
    assert found.collect()["kind"].to_list() == trace.collect()["kind"].to_list()


def test_what_the_format_cannot_say_is_counted(tmp_path):
    times = {"start_ns": -1500, "dur_ns": 3000}
    trace = build_trace(
        {**times},
        {"deps": [1], "lag_ns": [7], **times},
        {"kind": "all_reduce", "bytes": 4, "name": "early", **times},
        {"rank": 1, "xdeps": [0], **times},
        {"rank": 1, "kind": "other_comm", "group": 0, "seq": 0, **times},
        {"kind": "other_comm", "group": 0, "seq": 0, **times},
    ).collect().sort("rank", "index")  # fmt: skip
    header = build_trace({"rank": 1}).header
    whole = Trace(header.model_copy(update={"ranks": (0, 1)}), trace.lazy())
    found, report, lost = back(tmp_path, whole)
    assert lost == {
        "dropped-lags": 1, "dropped-xdeps": 1, "exported-as-local": 3,
    }  # fmt: skip
    now = found.collect()
    assert now["kind"].to_list() == trace["kind"].to_list()
    assert now["start_ns"].to_list() == [-1500] * 6
    assert now["seq"].null_count() == 6
    # What export told is no finding; it is said beside.
    assert report.repairs == {}
    assert found.header.extra["convert"]["exported-as-local"] == 3


def test_a_bare_graph_stays_bare(tmp_path):
    trace = build_trace({}, {"kind": "barrier", "group": 0, "seq": 0, "deps": [1]}, kind="bare")
    found, _, lost = back(tmp_path, trace)
    assert (found.header.kind, lost) == ("bare", {})


def test_roots_and_hosts_come_back(tmp_path):
    times = {"start_ns": 0, "dur_ns": 1000, "group": 0, "seq": 0, "peer": 1}
    trace = build_trace(
        {"kind": "broadcast", **times},
        {"kind": "broadcast", "rank": 1, **times},
        clock=(ClockDomain(id=0, ranks=(0, 1), host="a"),),
    )
    found, _, _ = back(tmp_path, trace)
    assert found.collect()["peer"].to_list() == [1, 1]
    assert [(clock.host, clock.ranks) for clock in found.header.clock] == [("a", (0, 1))]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=30))
def test_rounded_times_are_near_and_in_order(times):
    start = [begin for begin, _ in times]
    rounded = [((begin + 500) // 1000, (begin + length + 500) // 1000) for begin, length in times]
    assert all(
        abs(first * 1000 - begin) <= 500 for (first, _), begin in zip(rounded, start, strict=True)
    )
    assert all(last >= first for first, last in rounded)


def test_only_a_new_folder_is_written(tmp_path):
    trace = build_trace({"start_ns": 0, "dur_ns": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a folder"):
        export(trace, tmp_path / "file", to="chakra")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old.3.et").write_text("")
    with pytest.raises(OutputError, match="not empty"):
        export(trace, tmp_path / "full", to="chakra")
    with pytest.raises(OutputError, match="cannot write"):
        export(trace, tmp_path / "file" / "job", to="chakra")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/parent/job"):
        export(trace, tmp_path / name, to="chakra")
        assert (tmp_path / name / "comm_group.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "new"]


def test_what_was_written_is_one_message_a_row(tmp_path):
    write(build_trace({"start_ns": 0, "dur_ns": 1, "name": "x" * 300}), tmp_path / "run.parquet")
    export(Trace.open(tmp_path / "run.parquet"), tmp_path / "job", to="chakra")
    text = (tmp_path / "job" / "job.0.et").read_bytes()
    found = read_frames([text], where="", counts=Counter())
    assert (found.nodes.name, found.metadata["rank"]) == (["x" * 300], 0)


def test_the_command_says_what_was_lost(tmp_path):
    write(build_trace({"start_ns": 0, "dur_ns": 1}), tmp_path / "run.parquet")
    words = ["export", tmp_path / "run.parquet", "--to", "chakra", "-o", tmp_path / "job"]
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    assert done.exit_code == 0
    assert "rounded-times" in done.stdout
    assert "(2 files, " in done.stdout


def test_a_group_that_the_header_does_not_list_is_named(tmp_path):
    rows = [{"rank": rank, "kind": "all_reduce", "group": 7, "seq": 0} for rank in (0, 1)]
    with pytest.raises(ValidationError, match="a group of id 7, which the header does not list"):
        export(build_trace(*rows, kind="bare"), tmp_path / "job", to="chakra")
    assert not list(tmp_path.iterdir())
