"""PyTorch execution traces: alone, and beside the profile of the same rank."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from prismtrace.converters.pytorch_et.reading import read_execution_trace
from prismtrace.errors import AlignmentError, GroupError, InputFileError, RankError
from prismtrace.schema import TraceKind
from tests.prismtrace.kineto_events import rows, run
from tests.prismtrace.kineto_jobs import Job


@pytest.fixture(scope="module")
def recorded(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded trace, once for each of the two ranks of its world."""
    folder = tmp_path_factory.mktemp("et")
    with tarfile.open(data_dir / "chakra" / "1.0.2-chakra.0.0.4.tgz") as archive:
        member = archive.extractfile("1.0.2-chakra.0.0.4.json")
        assert member is not None
        text = member.read()
    for rank in range(2):
        (folder / f"et_rank_{rank}.json").write_bytes(text)
    return folder


# --- alone ----------------------------------------------------------------------------------------


def test_a_recorded_trace_tells_its_groups_and_sizes(recorded):
    trace = read_execution_trace(recorded / "et_rank_0.json")
    data = [record.comm for record in trace.records if not record.comm.is_wait]
    assert (trace.world_size, len(trace.records), len(data)) == (2, 20, 10)
    assert {(c.collective, c.pg_name, c.group_size, c.dtype) for c in data} == {
        ("all_gather", "0", 2, "float")
    }
    assert {(c.in_nelems, c.out_nelems) for c in data} == {(1, 2)}
    assert [c.seq for c in data] == list(range(12, 22))


def test_alone_they_become_a_bare_trace(recorded, tmp_path):
    trace, report = run(tmp_path, recorded)
    assert trace.header.kind is TraceKind.BARE
    assert (report.ranks, report.nodes, report.matched) == ((0, 1), 40, {"by-order": 10})
    assert rows(trace, "kind", "name", "bytes", "deps")[:4] == [
        ("compute", "aten::empty +9 operators", None, []),
        ("all_gather", "all_gather", 8, [1]),
        ("compute", "aten::empty +9 operators", None, [1, 2]),
        ("all_gather", "all_gather", 8, [1, 2]),
    ]


def node(number, name, parent=1, values=(), **attrs):
    return {
        "id": number, "name": name, "ctrl_deps": parent,
        "inputs": {"values": list(values), "shapes": [[4]], "types": ["Tensor(float)"]},
        "outputs": {"values": [], "shapes": [], "types": []},
        "attrs": [{"name": key, "type": "x", "value": value} for key, value in attrs.items()],
    }  # fmt: skip


def document(*nodes):
    return json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": nodes})


def comm(number, name="allreduce", **attrs):
    said = {"collective_name": name, "dtype": "Float", "in_msg_nelems": 4, "out_msg_nelems": 4,
            "pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "tid": 1}  # fmt: skip
    return node(number, "record_param_comms", values=[[], [7, False], ["0", "x"], 0, name],
                **(said | attrs))  # fmt: skip


def test_without_waits_every_communication_is_waited_for(tmp_path):
    nodes = [
        node(2, "aten::mm", tid=1), node(3, "aten::mul", 2, tid=1), comm(4),
        node(5, "aten::mm", tid=2), node(6, "aten::add", tid=1),
    ]  # fmt: skip
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(document(*nodes))
    trace, report = run(tmp_path, tmp_path)
    assert rows(trace, "name", "deps")[:4] == [
        ("aten::mm", []), ("allreduce", [1]), ("aten::mm", []), ("aten::add", [2, 3]),
    ]  # fmt: skip
    assert (report.groups, report.world_size) == (1, 2)


def test_the_first_schema_is_flat(tmp_path):
    flat = {
        "id": 3, "name": "record_param_comms", "rf_id": 9, "parent": 1, "seq_id": -1, "tid": 1,
        "inputs": [[[1, 2, 0, 4, 2, "cuda:0"]], 5, 77, 0, "allreduce", [], [], 2],
        "input_shapes": [[[2, 2]], [], [], [], [], [], [], []],
        "input_types": ["GenericList[Tensor(c10::BFloat16)]"],
        "outputs": [], "output_shapes": [], "output_types": [],
    }  # fmt: skip
    (tmp_path / "rank0.json").write_text(json.dumps({"schema": "1.0.1", "nodes": [flat]}))
    (record,) = read_execution_trace(tmp_path / "rank0.json").records
    said = record.comm
    assert (record.rf_id, said.in_nelems, said.dtype, said.seq) == (9, 4, "c10::BFloat16", 5)
    assert (said.collective, said.group_size, said.pg_name) == ("allreduce", 2, None)


# --- beside profiles --------------------------------------------------------------------------


def told_apart(folder: Path, torch: str) -> tuple[list[Path], list[Path]]:
    """Profiles that do not name groups, and execution traces that do."""
    job = Job(tp=2, dp=2, torch="2.4", layers=2, steps=1)
    profiles, traces = [], []
    for rank, text in job.documents().items():
        nodes = []
        number = 100
        groups = text["distributedInfo"].get("pg_config", [])
        text["distributedInfo"].pop("pg_config", None)
        listed = json.dumps([{**group, "group_size": len(group["ranks"])} for group in groups])
        nodes.append(node(2, "## process_group:init ##", values=[listed]))
        for event in text["traceEvents"]:
            args = event.get("args", {})
            known = {key: args.pop(key) for key in list(args) if key.startswith("Process Group")}
            known |= {key: args.pop(key) for key in ("Group size", "In msg nelems") if key in args}
            if event["name"] != "record_param_comms":
                continue
            number += 1
            nodes.append(
                comm(
                    number,
                    args.get("Collective name", "wait"),
                    pg_name=known.get("Process Group Name", ""),
                    pg_desc=known.get("Process Group Description", ""),
                    pg_size=known.get("Group size", 1),
                    in_msg_nelems=known.get("In msg nelems", 0),
                    dtype=args.get("dtype"),
                    rf_id=number,
                    tid=event["tid"],
                )
            )
            if torch >= "2.4":
                args["Record function id"] = number
        profiles.append(folder / f"rank{rank}.json")
        profiles[-1].write_text(json.dumps(text))
        traces.append(folder / f"et_rank{rank}.json")
        traces[-1].write_text(document(*nodes))
    return profiles, traces


@pytest.mark.parametrize("torch", ["2.2", "2.4"])
def test_groups_and_sizes_come_from_the_execution_trace(tmp_path, torch):
    profiles, traces = told_apart(tmp_path, torch)
    with pytest.raises(GroupError):
        run(tmp_path, profiles)
    trace, report = run(tmp_path, [*profiles, *traces])
    whole = Job(tp=2, dp=2, torch="2.4", layers=2, steps=1)
    (tmp_path / "whole").mkdir()
    whole.write(tmp_path / "whole")
    expected, _ = run(tmp_path / "whole", tmp_path / "whole")
    assert rows(trace, "kind", "bytes", "start_ns") == rows(expected, "kind", "bytes", "start_ns")
    names = [{group.id: group.ranks for group in t.header.groups} for t in (trace, expected)]
    assert [names[0].get(group) for (group,) in rows(trace, "group")] == [
        names[1].get(group) for (group,) in rows(expected, "group")
    ]
    assert report.missing_ranks == ()


def test_a_trace_of_another_run_is_refused(tmp_path):
    profiles, traces = told_apart(tmp_path, "2.2")
    text = json.loads(traces[1].read_text())
    text["nodes"].pop()
    traces[1].write_text(json.dumps(text))
    with pytest.raises(AlignmentError, match="of another run") as error:
        run(tmp_path, [*profiles, *traces])
    assert str(traces[1]) in error.value.where


def test_every_execution_trace_lies_beside_a_profile(tmp_path):
    profiles, traces = told_apart(tmp_path, "2.4")
    with pytest.raises(RankError, match="rank 3 lies beside no profiler trace"):
        run(tmp_path, [*profiles[:3], *traces], unmatched="keep")
    twice = tmp_path / "again_rank0.json"
    twice.write_text(traces[0].read_text())
    with pytest.raises(RankError, match="rank 0 has two execution traces"):
        run(tmp_path, [*profiles, *traces, twice])


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"schema": "1", "nodes": [', InputFileError, "cut off"),
        ('{"schema": "1", "nodes": [{"name": 3}]}', InputFileError, "no PyTorch execution trace"),
        ('{"schema": "1", "nodes": []}', InputFileError, "records no communication"),
    ],
)
def test_bad_files_are_refused_with_place_and_hint(tmp_path, text, error, message):
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(error, match=message) as found:
        run(tmp_path, path)
    assert str(path) in found.value.where
    assert found.value.hint


def test_a_file_without_a_rank_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(document(comm(3)))
    with pytest.raises(RankError, match="which rank"):
        run(tmp_path, path)
