"""Chakra traces become traces: facts of recorded files, and what no recorded file shows."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path

import polars as pl
import pytest

from prismtrace.errors import GroupError, InputFileError, PrismError, RankError
from prismtrace.schema import TraceKind
from tests.prismtrace.chakra_traces import (
    ALL_GATHER,
    ALL_REDUCE,
    COLL,
    RECV,
    SEND,
    framed,
    metadata,
    node,
    write,
)
from tests.prismtrace.kineto_events import rows, run


@pytest.fixture(scope="module")
def chakra(data_dir: Path) -> Path:
    return data_dir / "chakra"


# --- recorded files ---------------------------------------------------------------------------


def test_a_trace_of_pytorch_keeps_its_nodes(chakra, tmp_path):
    trace, report = run(tmp_path, chakra / "chakra.0.et.gz")
    assert (report.ranks, report.nodes, report.events) == ((0,), 3664, 3665)
    nodes = trace.collect()
    kinds = dict(nodes.group_by("kind").len().rows())
    assert kinds == {"compute": 3657, "broadcast": 2, "all_reduce": 5}
    comm = nodes.filter(pl.col("kind") == "broadcast").row(0, named=True)
    assert (comm["bytes"], comm["dur_ns"]) == (212_480, 28_000)
    assert sorted(trace.header.streams.values()) == [
        "cpu thread 1", "cpu thread 2", "stream 14", "stream 7",
    ]  # fmt: skip
    # Calls of operators within others, as PyTorch has them, are no order of execution.
    assert report.repairs == {"assumed-world-group": 7, "laid-out-start": 3664}
    # Nothing starts before what it waits for has ended.
    ends = nodes["start_ns"] + nodes["dur_ns"]
    pairs = nodes.select("index", "deps").explode("deps", empty_as_null=False)
    before = ends.gather(pairs["index"] - pairs["deps"].cast(pl.Int32))
    assert (nodes["start_ns"].gather(pairs["index"]) >= before).all()


def test_sends_find_their_recvs(chakra, tmp_path):
    trace, report = run(tmp_path, chakra / "ring-allreduce-8")
    assert (report.world_size, report.nodes, report.matched) == (8, 280, {"p2p": 112})
    sizes = set(rows(trace, "kind", "bytes"))
    assert sizes == {("send", 131_072), ("recv", 131_072), ("compute", None)}
    peers = trace.nodes.filter(pl.col("kind") == "send").select("rank", "peer").unique().collect()
    assert set(peers.rows()) == {(rank, (rank + 1) % 8) for rank in range(8)}
    assert sorted(trace.header.streams.values()) == ["communication 0", "compute 0"]


# --- what no recorded file shows ----------------------------------------------------------------


def job(folder: Path, rank: int, *messages: bytes, **facts: object) -> Path:
    return write(folder / f"job.{rank}.et", metadata(**facts), *messages)


def test_groups_come_from_the_node_that_made_them(tmp_path):
    config = json.dumps(
        [
            {"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 2},
            {"pg_name": "5", "pg_desc": "tp", "ranks": [0, 1], "group_size": 2},
        ]
    )
    # The converter prints the list of inputs as Python would.
    made = node(1, 1, "## process_group:init ##", values=f"['{config}']")
    for rank in range(2):
        job(
            tmp_path, rank, made,
            node(2, COLL, dur=7, comm_type=ALL_REDUCE, comm_size=64, pg_name="5", data=[1]),
            node(3, COLL, dur=9, comm_type=ALL_GATHER, comm_size=("uint64_val", 8), pg_name="0"),
        )  # fmt: skip
    trace, report = run(tmp_path, tmp_path)
    assert {(group.name, group.desc) for group in trace.header.groups} == {
        ("0", "default_pg"),
        ("5", "tp"),
    }
    assert report.matched == {"by-order": 2}
    assert report.repairs == {"laid-out-start": 6}


def test_groups_may_be_given(tmp_path):
    for rank in range(3):
        job(tmp_path, rank, node(1, COLL, dur=5, comm_type=0, comm_size=8, pg_name="3"))
    (tmp_path / "groups").mkdir()
    listed = tmp_path / "groups" / "comm_group.json"
    listed.write_text('{"3": [0, 1, 2]}')
    with pytest.raises(GroupError, match="'3' of all_reduce is not listed"):
        run(tmp_path, sorted(tmp_path.glob("*.et")))
    trace, _ = run(tmp_path, sorted(tmp_path.glob("*.et")), groups=listed)
    assert rows(trace, "group", "seq") == [(0, 0)] * 3
    # Among the inputs it is told by its content.
    trace, _ = run(tmp_path, [*sorted(tmp_path.glob("*.et")), listed])
    assert rows(trace, "group", "seq") == [(0, 0)] * 3
    with pytest.raises(InputFileError, match="only process groups"):
        run(tmp_path, listed)
    twice = tmp_path / "more.json"
    twice.write_text(listed.read_text())
    with pytest.raises(InputFileError, match="two files of process groups"):
        run(tmp_path, [*sorted(tmp_path.glob("*.et")), listed, twice])


def test_collectives_of_some_dimensions_are_refused(tmp_path):
    dims = ("bool_list", [True, False])
    job(tmp_path, 0, node(1, COLL, comm_type=0, comm_size=8, involved_dim=dims))
    with pytest.raises(GroupError, match="involved_dim") as error:
        run(tmp_path, tmp_path)
    assert "node 1" in error.value.where


def test_messages_meet_by_their_tags(tmp_path):
    job(
        tmp_path, 0,
        node(0, SEND, dur=1, comm_dst=("int32_val", 1), comm_size=8, comm_tag=("uint32_val", 7)),
        node(1, SEND, dur=1, comm_dst=1, comm_size=8, comm_tag=3, data=[0]),
    )  # fmt: skip
    job(
        tmp_path, 1,
        node(0, RECV, dur=1, comm_src=0, comm_size=8, comm_tag=3),
        node(1, RECV, dur=1, comm_src=0, comm_size=8, comm_tag=7, data=[0]),
    )  # fmt: skip
    trace, report = run(tmp_path, tmp_path)
    assert report.matched == {"p2p": 2}
    # seq 0 is tag 3: the second send and the first recv.
    assert rows(trace, "rank", "index", "seq") == [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 1)]


def test_a_partner_outside_the_input_is_known_to_exist(tmp_path):
    job(tmp_path, 0, node(0, SEND, dur=1, comm_dst=3, comm_size=8))
    _, report = run(tmp_path, tmp_path)
    assert (report.world_size, report.missing_ranks) == (4, (1, 2, 3))


def test_nodes_without_streams_that_run_beside_each_other_get_streams(tmp_path):
    fork = [node(number, dur=5, data=[0]) for number in range(1, 4)]
    join = node(4, dur=1, data=[1, 2, 3])
    again = [node(number, dur=5, data=[4]) for number in range(5, 8)]
    job(tmp_path, 0, node(0, dur=2), *fork, join, *again)
    trace, report = run(tmp_path, tmp_path)
    assert sorted(trace.header.streams.values()) == ["compute 0", "compute 1", "compute 2"]
    assert rows(trace, "start_ns") == [(t * 1000,) for t in (0, 2, 2, 2, 7, 8, 8, 8)]
    assert report.repairs == {"laid-out-start": 8}


def test_thousands_of_nodes_beside_each_other_share_streams(tmp_path):
    job(tmp_path, 0, *(node(number, dur=1 + number % 7) for number in range(5000)))
    trace, report = run(tmp_path, tmp_path)
    assert len(trace.header.streams) == 4096
    assert report.repairs["assumed-stream-order"] == 5000 - 4096


def test_streams_are_ordered_and_implied_edges_left_out(tmp_path):
    job(
        tmp_path, 0,
        node(0, dur=5, tid=1, is_cpu_op=True),
        node(1, dur=50, tid=7, is_cpu_op=False, data=[0]),
        node(2, dur=5, tid=1, is_cpu_op=True, data=[0]),
        node(3, dur=50, tid=7, is_cpu_op=False, data=[2, 0]),
    )  # fmt: skip
    trace, _ = run(tmp_path, tmp_path)
    assert rows(trace, "deps", "start_ns") == [
        ([], 0), ([1], 5_000), ([2], 5_000), ([1, 2], 55_000),
    ]  # fmt: skip
    assert set(trace.header.streams.values()) == {"cpu thread 1", "stream 7"}


def test_recorded_starts_are_kept_and_order_the_nodes(tmp_path):
    job(tmp_path, 0, node(9, start=30, dur=5), node(4, start=10, dur=5), node(6, start=20, dur=5))
    trace, report = run(tmp_path, tmp_path)
    assert rows(trace, "start_ns") == [(10_000,), (20_000,), (30_000,)]
    assert report.repairs == {}


def test_dependencies_may_lead_forward_in_the_file(tmp_path):
    job(tmp_path, 0, node(5, title="b", dur=1, data=[7]), node(7, title="a", dur=1, data=[99]))
    trace, report = run(tmp_path, tmp_path)
    assert rows(trace, "name", "deps") == [("a", []), ("b", [1])]
    assert report.repairs["dropped-missing-dep"] == 1


def test_control_dependencies_count_unless_they_contradict(tmp_path):
    job(tmp_path, 0, node(1, dur=1), node(2, dur=1, ctrl=[1]))
    assert rows(run(tmp_path, tmp_path)[0], "deps") == [([],), ([1],)]
    job(tmp_path, 0, node(1, dur=1, ctrl=[2]), node(2, dur=1, data=[1]))
    trace, report = run(tmp_path, tmp_path)
    assert rows(trace, "deps") == [([],), ([1],)]
    assert report.repairs["ignored-control-deps"] == 1


def test_circles_are_named_and_cut_on_request(tmp_path):
    job(
        tmp_path, 0,
        node(1, title="a", dur=1, data=[3]), node(2, title="b", dur=1, data=[1]),
        node(3, title="c", dur=1, data=[2]), node(4, title="d", dur=1, data=[3]),
    )  # fmt: skip
    with pytest.raises(InputFileError, match=r"circle: 1 \(a\), 3 \(c\), 2 \(b\)"):
        run(tmp_path, tmp_path)
    trace, report = run(tmp_path, tmp_path, recover=True)
    assert rows(trace, "name", "deps") == [("a", []), ("b", [1]), ("c", [1]), ("d", [1])]
    assert report.repairs["dropped-circular-dep"] == 1


def test_a_graph_without_times_is_bare(tmp_path):
    job(tmp_path, 0, node(1, num_ops=100), node(2, COLL, comm_type=0, comm_size=8, data=[1]))
    trace, _ = run(tmp_path, tmp_path)
    assert trace.header.kind is TraceKind.BARE
    assert rows(trace, "start_ns", "dur_ns") == [(None, None)] * 2


def test_types_and_collectives_of_later_versions(tmp_path):
    job(
        tmp_path, 0,
        node(1, 9, dur=1), node(2, COLL, dur=1, comm_type=44), node(3, COLL, dur=1, comm_type=9),
        node(4, 2, dur=1, tensor_size=("uint64_val", 64)),
        node(5, COLL, "ncclDevKernel_AllGather_RING_LL(x)", dur=1, comm_size=4),
    )  # fmt: skip
    trace, report = run(tmp_path, tmp_path)
    assert rows(trace, "kind", "bytes") == [
        ("compute", None), ("other_comm", None), ("barrier", None), ("memcpy", 64),
        ("all_gather", 4),
    ]  # fmt: skip
    assert report.repairs["unknown-node-type"] == report.repairs["unknown-comm-type"] == 1


@pytest.mark.parametrize("packed", [False, True])
def test_the_json_form(tmp_path, packed):
    for rank in range(2):
        graph = [
            {"Id": 1, "Name": "gemm", "NodeType": 4, "runtime": 3, "is_cpu_op": False},
            {"Id": 2, "Name": "x", "NodeType": 7, "ctrlDeps": [1], "data_deps": [1], "runtime": 4,
             "is_cpu_op": False, "comm_type": 0, "comm_size": 128, "tensor_size": 0},
        ]  # fmt: skip
        text = json.dumps({"workload_graph": graph}).encode()
        name = f"job.{rank}.json" + (".gz" if packed else "")
        (tmp_path / name).write_bytes(gzip.compress(text) if packed else text)
    trace, report = run(tmp_path, tmp_path)
    assert report.matched == {"by-order": 1}
    assert rows(trace, "kind", "bytes", "dur_ns", "deps") == [
        ("compute", None, 3000, []), ("all_reduce", 128, 4000, [1]),
    ] * 2  # fmt: skip


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (framed(metadata(a=1), node(1), node(1)), InputFileError, "two nodes have the id 1"),
        (framed(metadata(a=1), node(1))[:-1], InputFileError, "damaged.*truncated 1"),
        (framed(metadata(a=1)), InputFileError, "holds no node"),
        (framed(node(1, dur=2**61)), InputFileError, "no run takes so long"),
        (framed(node(1), b"", node(2)), InputFileError, "empty-frame 1"),
        (framed(node(1, data=[1])), InputFileError, "circle: 1"),
        (framed(metadata(process_groups="{]"), node(1)), InputFileError, "process groups"),
        (b'{"workload_graph": [{"Name": 3}]}', InputFileError, "no Chakra trace as JSON"),
        (b'{"workload_graph": [{"Id": 18446744073709551616}]}', InputFileError, "64 bits"),
        (b'{"workload_graph": [{"Id": 1, "runtime": -3}]}', InputFileError, "negative time"),
        (b'{"workload_graph": []}', InputFileError, "holds no node"),
    ],
)
def test_bad_files_are_refused_with_place_and_hint(tmp_path, text, error, message):
    path = tmp_path / "job.0.et"
    path.write_bytes(text)
    with pytest.raises(error, match=message) as found:
        run(tmp_path, path)
    assert str(path) in (found.value.where or "")
    assert found.value.hint


def test_damaged_files_can_be_used_as_far_as_they_go(tmp_path):
    path = tmp_path / "job.0.et"
    path.write_bytes(framed(node(1, dur=1), node(2, dur=1))[:-2])
    trace, report = run(tmp_path, path, recover=True)
    assert (len(rows(trace, "id")), report.repairs["truncated"]) == (1, 1)


def test_a_file_without_a_rank_is_refused(tmp_path):
    path = write(tmp_path / "job.et", node(1, dur=1))
    with pytest.raises(RankError, match=r"NAME\.RANK\.et"):
        run(tmp_path, path)
    _, report = run(tmp_path, path, ranks={"job.et": 3})
    assert report.ranks == (3,)


def test_pytorch_traces_in_archives_are_told_from_others(chakra, tmp_path):
    with tarfile.open(chakra / "1.0.2-chakra.0.0.4.tgz") as archive:
        names = archive.getnames()
    assert "1.0.2-chakra.0.0.4.json" in names
    with pytest.raises(PrismError):
        run(tmp_path, write(tmp_path / "other.0.et", b"\x0f\x01"))
