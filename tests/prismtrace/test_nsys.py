"""Nsight Systems exports: a recorded one, and small ones for what it does not show."""

from __future__ import annotations

import gzip
import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from prismtrace.converters import ConvertReport, convert
from prismtrace.errors import (
    AlignmentError,
    GroupError,
    InputFileError,
    RankError,
    SourceFormatError,
    TraceError,
    ValidationError,
)
from prismtrace.trace import Trace
from tests.prismtrace.kineto_events import ALL_REDUCE, document, launched, run, write_files
from tests.prismtrace.nsys_exports import (
    EPOCH_NS,
    INIT,
    PEER,
    ROOT,
    SEND_RECV,
    SIZED,
    Export,
    collective,
    payload,
    small_export,
)

Converted = tuple[Trace, ConvertReport]


def job(folder: Path, *exports: Export, **options: Any) -> Converted:
    """One file a rank, converted and valid."""
    paths = [export.write(folder / f"rank{r}.sqlite") for r, export in enumerate(exports)]
    return run(folder, paths, **options)


def rows(trace: Trace, *columns: str, rank: int | None = None) -> list[tuple[Any, ...]]:
    nodes = trace.nodes if rank is None else trace.nodes.filter(pl.col("rank") == rank)
    return nodes.select(columns).collect().rows()


def kinds(trace: Trace, rank: int = 0) -> list[str]:
    return trace.nodes.filter(pl.col("rank") == rank).collect()["kind"].cast(pl.String).to_list()


# --- two processes of a job on H100s, recorded ------------------------------------------------


@pytest.fixture(scope="module", params=["communication", "kernel"])
def recorded(
    data_dir: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Converted:
    path = data_dir / "nsys/mfu_2gpu_before.sqlite"
    return run(tmp_path_factory.mktemp("nsys"), path, grain=request.param)


def test_recorded_exchanges_meet(recorded: Converted) -> None:
    trace, report = recorded
    assert report.matched == {"by-order": 33}
    assert report.ranks == (0, 1)
    assert report.world_size == 2
    found = trace.nodes.filter(pl.col("seq").is_not_null()).collect()
    # The first launch lies before the window; the name of its kernel says SendRecv only.
    expected = {"all_to_all": 64, "other_comm": 2}
    assert dict(found["kind"].cast(pl.String).value_counts().iter_rows()) == expected
    ends = (
        found.with_columns(end=pl.col("start_ns") + pl.col("dur_ns"))
        .pivot("rank", index="seq", values="end")
        .select((pl.col("1") - pl.col("0")).alias("apart"))["apart"]
    )
    assert (ends.min(), ends.max()) == (-26_587, 8_807)


def test_recorded_kernels_are_joined_within_their_process(recorded: Converted) -> None:
    trace, report = recorded
    # 3 932 numbers for 4 010 kernels: joined by number alone, some would be launched twice.
    assert report.repairs["orphan-launch"] == 31
    assert report.processes == {
        0: "144 on device 0, mfu_2gpu_before.sqlite",
        1: "145 on device 1, mfu_2gpu_before.sqlite",
    }
    if "x_kernels" in trace.nodes.collect_schema():
        assert trace.nodes.select(pl.col("x_kernels").sum()).collect().item() == 5_299
    else:
        assert report.nodes == 5_299
    header = trace.header
    assert [(clock.host, clock.source) for clock in header.clock] == [("modal", "nsys")]
    assert header.extra["processes"]["1"].startswith("145")
    first = trace.nodes.select(pl.col("start_ns").min()).collect().item()
    assert first == 1_779_782_330_176_752_435 + 60_111_513_113


def test_recorded_counts(recorded: Converted) -> None:
    _, report = recorded
    assert report.repairs == {
        "assumed-rank-order": 2,
        "assumed-world-group": 66,
        "no-metadata": 2,
        "orphan-launch": 31,
        "unresolved-stream-wait": 200,
        "unresolved-sync-record": 200,
    }


# --- steps, phases, microbatches --------------------------------------------------------------


def test_ranges_tell_steps_phases_and_microbatches(tmp_path: Path) -> None:
    export = Export()
    export.describe(RANK="0", WORLD_SIZE="1")
    for step in (4, 5):
        t = step * 10_000
        export.range(f"iteration {step}", t, t + 9_000, kind=60)
        for microbatch in (0, 1):
            m = t + 100 + 3_000 * microbatch
            export.range(f"microbatch {microbatch}", m, m + 2_500)
            export.range("forward, op_id = 7", m + 10, m + 500)
            export.kernel("f", m + 100, launch=m + 50)
            export.range("backward", m + 600, m + 2_000)
            # torch runs the backward pass in a thread of its own.
            export.kernel("b", m + 700, launch=m + 650, tid=99)
        export.range("Optimizer.step#AdamW.step, op_id = 9", t + 7_000, t + 8_000)
        export.kernel("adam", t + 7_100, launch=t + 7_050)
    export.range("never ended", 0, None)
    trace, report = job(tmp_path, export)
    got = trace.nodes.select("step", "microbatch", "phase").collect()
    parts = [(0, "forward"), (0, "backward"), (1, "forward"), (1, "backward"), (None, "optimizer")]
    assert got.rows() == [(step, *part) for step in (4, 5) for part in parts]
    assert report.steps == (4, 5)
    assert report.repairs == {}
    assert trace.header.extra["convert"]["dropped-unfinished-range"] == 1


def test_steps_by_a_pattern_and_texts_by_number(tmp_path: Path) -> None:
    export = small_export(world=1)
    number = export.text("epoch(3), op_id = 3")
    export.add("NVTX_EVENTS", start=0, end=10**6, eventType=59, textId=number,
               globalTid=export.rows["NVTX_EVENTS"][0]["globalTid"])  # fmt: skip
    trace, _ = job(tmp_path, export, step_from=r"epoch\((\d+)\)")
    assert trace.header.steps == (3,)
    with pytest.raises(TraceError, match="no annotation matches"):
        job(tmp_path, export, step_from="no such name")


# --- communication ----------------------------------------------------------------------------


def test_payloads_name_communicators(tmp_path: Path) -> None:
    """Two communicators in the other order of ranks; sizes are what nccl-tests would count."""

    def one(rank: int, *, as_json: bool) -> Export:
        export = Export()
        export.describe(RANK=str(rank))
        export.schemas()
        for key, place in ((5, rank), (6, 1 - rank)):
            more = payload(INIT, key, 2, place)
            export.range("ncclCommInitRankConfig", key, key + 1, binaryData=more)
        t = 1_000
        ids = {"NCCL communicator ID": "5", "Message size [bytes]": "1,024"}
        more = {"jsonText": str(ids).replace("'", '"')} if as_json else {}
        more = more or {"binaryData": payload(SIZED, 5, 1024)}
        collective(export, "ncclAllGather", t, kernel="ncclDevKernel_AllGather_RING_LL", **more)
        more = {"binaryData": payload(SIZED, 6, 512, 4)}
        collective(export, "ncclReduceScatter", t + 500, stream=21,
                   kernel="ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", **more)  # fmt: skip
        more = {"binaryData": payload(ROOT, 6, 64, 0)}
        collective(export, "ncclBroadcast", t + 1_000, stream=21,
                   kernel="ncclDevKernel_Broadcast_RING_LL", **more)  # fmt: skip
        return export

    trace, report = job(tmp_path, one(0, as_json=False), one(1, as_json=True))
    assert [(g.name, g.ranks) for g in trace.header.groups] == [
        ("communicator 5", (0, 1)),
        ("communicator 6", (1, 0)),
    ]
    got = rows(trace, "kind", "group", "seq", "bytes", "dtype", "reduce_op", "peer", rank=1)
    assert got == [
        ("all_gather", 0, 0, 2048, None, None, None),
        ("reduce_scatter", 1, 0, 1024, "bfloat16", "avg", None),
        ("broadcast", 1, 1, 64, None, None, 1),
    ]
    assert report.repairs == {}


def test_messages_find_their_partners(tmp_path: Path) -> None:
    def one(rank: int) -> Export:
        export = Export()
        export.describe(RANK=str(rank))
        export.schemas()
        export.range("ncclCommInitRank", 0, 9, binaryData=payload(INIT, 9, 2, rank))
        name = "ncclSend" if rank == 0 else "ncclRecv"
        more = {"binaryData": payload(PEER, 9, 256, 1 - rank)}
        collective(export, name, 1_000, kernel=SEND_RECV, **more)
        # Both at once, as batch_isend_irecv does: one kernel for the group.
        export.range("ncclGroupStart", 2_000, 2_010)
        for k, call in enumerate(("ncclSend", "ncclRecv")):
            export.range(call, 2_020 + 10 * k, 2_025 + 10 * k, **more)
        export.range("ncclGroupEnd", 2_050, 2_100)
        export.kernel(SEND_RECV, 2_200, launch=2_080, stream=20)
        return export

    trace, report = job(tmp_path, one(0), one(1))
    got = rows(trace, "kind", "peer", "seq", "bytes", "batch", rank=0)
    assert got == [("send", 1, 0, 256, None), ("send", 1, 1, 256, 0), ("recv", 1, 0, 256, 0)]
    assert report.matched == {"p2p": 3}
    assert report.repairs == {}


def group_of(export: Export, names: list[str], at: int, payloads: list[bytes | None]) -> None:
    """Calls within a group; the thread is free again 100 ns later."""
    export.range("ncclGroupStart", at, at + 5)
    for k, (name, data) in enumerate(zip(names, payloads, strict=True)):
        export.range(name, at + 6 + k, at + 7 + k, binaryData=data)
    export.range("ncclGroupEnd", at + 30, at + 90)


def test_an_all_to_all_is_a_group_of_messages_between_all(tmp_path: Path) -> None:
    pairs = ["ncclSend", "ncclRecv"] * 2

    def one(rank: int) -> Export:
        export = Export()
        export.describe(RANK=str(rank))
        export.schemas()
        export.range("ncclCommInitRank", 0, 9, binaryData=payload(INIT, 9, 2, rank))
        group_of(export, pairs, 1_000, [payload(PEER, 9, 8, k // 2) for k in range(4)])
        export.kernel(SEND_RECV, 1_100, launch=1_050)
        export.range("nccl:all_to_all, op_id = 3", 1_990, 2_200)
        group_of(export, pairs[:2], 2_000, [payload(PEER, 9, 8, 1 - rank)] * 2)
        export.kernel(SEND_RECV, 2_300, launch=2_050)
        export.range("ncclCommCount", 2_990, 2_995)
        group_of(export, pairs, 3_000, [None] * 4)
        export.kernel(SEND_RECV, 3_300, launch=3_050)
        return export

    # The last group has no payload: how it is made tells what it is, but not among whom.
    trace, report = job(tmp_path, one(0), one(1))
    assert rows(trace, "kind", "group", "bytes", rank=0) == [
        ("all_to_all", 0, 16),
        ("all_to_all", 0, 8),
        ("all_to_all", 0, None),
    ]
    assert report.repairs == {"assumed-all-to-all": 2}


def test_a_group_of_collectives_may_launch_one_kernel_each(tmp_path: Path) -> None:
    def one(rank: int) -> Export:
        export = Export()
        export.describe(RANK=str(rank))
        export.schemas()
        for key in (5, 6):
            export.range("ncclCommInitRank", key, key, binaryData=payload(INIT, key, 2, rank))
        sizes = [payload(SIZED, key, 100 * key, 0) for key in (5, 5, 6)]
        group_of(export, ["ncclAllReduce"] * 3, 1_000, sizes)
        for k in range(2):
            export.kernel(ALL_REDUCE, 1_200 + 200 * k, launch=1_050 + 9 * k, stream=20 + k)
        return export

    trace, _ = job(tmp_path, one(0), one(1))
    got = rows(trace, "kind", "group", "bytes", "batch", rank=0)
    assert got == [
        ("all_reduce", 0, 500, 0),
        ("all_reduce", 0, 500, 0),
        ("all_reduce", 1, 600, None),
    ]


def test_calls_that_launch_nothing_are_not_taken_for_later_ones(tmp_path: Path) -> None:
    """Captured into a graph, which launches them later, or among one rank."""
    exports = [silent(0), silent(1)]
    for export in exports:
        for at in (100, 200):
            export.range("ncclAllGather", at, at + 30)
        graph = export.call("cudaGraphLaunch", 5_000)
        name = export.text("ncclDevKernel_AllGather_RING_LL")
        export.gpu("KERNEL", 5_100, 50, correlation=graph, stream=20, demangledName=name)
    trace, report = job(tmp_path, *exports)
    assert kinds(trace) == ["all_reduce", "all_gather"]
    assert report.repairs == {"assumed-world-group": 4, "no-metadata": 2}
    assert trace.header.extra["convert"]["dropped-call-without-kernel"] == 4


def silent(rank: int, streams: tuple[int, ...] = (20,)) -> Export:
    """Collectives without payloads."""
    export = Export()
    export.describe(RANK=str(rank))
    for k, stream in enumerate(streams):
        collective(export, "ncclAllReduce", 1_000 + 500 * k, stream=stream)
    return export


def test_without_payloads_the_group_is_assumed_or_given(tmp_path: Path) -> None:
    _, report = job(tmp_path, silent(0), silent(1))
    assert report.repairs == {"assumed-world-group": 2}
    named = tmp_path / "groups.json"
    named.write_text('{"dp": [0, 1]}')
    trace, report = job(tmp_path, silent(0), silent(1), groups=named)
    assert report.repairs == {}
    assert [g.name for g in trace.header.groups] == ["dp"]


def test_several_communicators_that_nothing_names_are_refused(tmp_path: Path) -> None:
    exports = [silent(rank, (20, 24)) for rank in range(2)]
    with pytest.raises(GroupError, match="communicates on 2 streams") as caught:
        job(tmp_path, *exports)
    assert "--groups" in str(caught.value.hint)
    trace, _ = job(tmp_path, *exports, unmatched="keep")
    assert kinds(trace) == ["all_reduce", "all_reduce"]


def test_communicators_without_their_beginning(tmp_path: Path) -> None:
    """Created before the recording: their members are those who use them."""

    def one(rank: int) -> Export:
        export = Export()
        export.describe(RANK=str(rank))
        export.schemas()
        key = 7 + rank // 2
        collective(export, "ncclAllReduce", 1_000, binaryData=payload(SIZED, key, 4, 0))
        return export

    trace, report = job(tmp_path, *map(one, range(4)))
    assert [g.ranks for g in trace.header.groups] == [(0, 1), (2, 3)]
    assert report.repairs == {"group-of-communicator-users": 2}
    # With a rank missing nobody knows who else belonged.
    paths = [tmp_path / f"rank{rank}.sqlite" for rank in (1, 2, 3)]
    with pytest.raises(GroupError, match="not listed in any file"):
        run(tmp_path, paths)


def test_torch_ranges_stand_in_for_those_of_nccl(tmp_path: Path) -> None:
    def one(rank: int) -> Export:
        export = Export()
        export.describe(RANK=str(rank))
        export.range("record_param_comms, op_id = 4, sizes = [[3, 4], []]", 1_000, 1_090)
        export.range("nccl:all_reduce, op_id = 5", 1_005, 1_080)
        export.kernel(ALL_REDUCE, 1_200, launch=1_050)
        return export

    trace, _ = job(tmp_path, one(0), one(1))
    assert rows(trace, "kind", "bytes", "dtype", rank=0) == [("all_reduce", 24, "bfloat16")]


def test_mismatched_ranks_are_refused(tmp_path: Path) -> None:
    one, other = silent(0, (20, 20)), silent(1)
    other.rows["CUPTI_ACTIVITY_KIND_KERNEL"].clear()
    collective(other, "ncclAllGather", 3_000, kernel="ncclDevKernel_AllGather_RING_LL")
    with pytest.raises(AlignmentError):
        job(tmp_path, one, other)


def test_ranks_of_several_formats(tmp_path: Path) -> None:
    """A rank of the PyTorch profiler beside one of Nsight Systems."""
    export = Export()
    export.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=10**18)
    export.kernel(ALL_REDUCE, 1_200_000, 90_000, stream=20)
    path = export.write(tmp_path / "rank1.sqlite")
    profile = document(launched(ALL_REDUCE, 1_150, 1_190, 100, 5, stream=20), rank=0, world_size=2)
    trace, report = run(tmp_path, [path, *write_files(tmp_path, profile)])
    assert report.matched == {"by-order": 1}
    assert [clock.source for clock in trace.header.clock] == ["kineto", "nsys"]


# --- dependencies -----------------------------------------------------------------------------


def waiting(with_events: bool) -> Export:
    """Stream 20 waits for an event of stream 7; then the host waits for stream 20."""
    export = small_export(world=1)
    export.rows["NVTX_EVENTS"].clear()
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"].clear()
    export.kernel("producer", 1_000, 500, launch=900)
    recorded = export.call("cudaEventRecord", 950)
    export.kernel("unrelated", 1_600, 500, launch=960)
    waits = export.call("cudaStreamWaitEvent", 970)
    export.kernel("consumer", 1_550, 300, launch=980, stream=20)
    synchronizes = export.call("cudaStreamSynchronize", 990, ns=1_000)
    export.kernel("later", 2_300, 100, launch=2_200, stream=24)
    if with_events:
        export.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", streamId=7, correlationId=recorded,
                   globalPid=export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["globalPid"],
                   eventId=3, eventSyncId=11)  # fmt: skip
    event = {"eventId": 3, "eventSyncId": 11}
    export.gpu("SYNCHRONIZATION", 970, 5, correlation=waits, stream=20, syncType=2, **event)
    export.gpu("SYNCHRONIZATION", 990, 999, correlation=synchronizes, stream=20, syncType=3)
    return export


def test_waits_become_dependencies(tmp_path: Path) -> None:
    trace, report = job(tmp_path, waiting(with_events=True), grain="kernel")
    assert rows(trace, "name", "deps") == [
        ("producer", []),
        ("unrelated", [1]),
        ("consumer", [2]),
        ("later", [1]),
    ]
    assert report.edges == {"host-wait": 1, "stream-wait": 1}
    assert report.repairs == {}


def test_waits_for_unknown_events_are_counted(tmp_path: Path) -> None:
    trace, report = job(tmp_path, waiting(with_events=False), grain="kernel")
    assert rows(trace, "name", "deps")[2] == ("consumer", [])
    assert report.repairs == {"unresolved-stream-wait": 1, "unresolved-sync-record": 1}


def test_an_event_that_is_recorded_again(tmp_path: Path) -> None:
    """Old exports number events only: the latest record before the wait is meant."""
    export = waiting(with_events=True)
    first = export.rows["CUPTI_ACTIVITY_KIND_CUDA_EVENT"][0]
    again = {**first, "streamId": 24, "correlationId": first["correlationId"] + 100}
    export.rows["CUPTI_ACTIVITY_KIND_CUDA_EVENT"].append(again)
    columns = [
        f"CUPTI_ACTIVITY_KIND_{table}.eventSyncId" for table in ("CUDA_EVENT", "SYNCHRONIZATION")
    ]
    path = export.write(tmp_path / "rank0.sqlite", without=columns)
    _, report = run(tmp_path, path, grain="kernel")
    assert report.edges["stream-wait"] == 1


# --- what the device did ----------------------------------------------------------------------


def test_graphs_by_kernel_and_as_a_whole(tmp_path: Path) -> None:
    export = small_export(world=1)
    graph = export.call("cudaGraphLaunch", 40_000)
    for k in range(3):
        export.gpu("KERNEL", 41_000 + 100 * k, 50, correlation=graph, demangledName=export.text("g"),
                   graphNodeId=k)  # fmt: skip
    whole = export.call("cudaGraphLaunch", 42_000)
    export.gpu("GRAPH_TRACE", 43_000, 700, correlation=whole, graphId=5)
    trace, report = job(tmp_path, export, grain="kernel")
    assert [row[0] for row in rows(trace, "name")][-4:] == ["g", "g", "g", "CUDA graph 5"]
    assert report.repairs == {"opaque-graph": 1}
    assert trace.header.extra["convert"]["shared-correlation"] == 2


def test_copies_and_kept_columns(tmp_path: Path) -> None:
    export = small_export(world=1)
    at = 40_000
    for kind in (1, 8, 99):
        copy = export.call("cudaMemcpyAsync", at + kind)
        export.gpu("MEMCPY", at + 200 + kind, 9, correlation=copy, bytes=64, copyKind=kind)
    clear = export.call("cudaMemsetAsync", at + 150)
    export.gpu("MEMSET", at + 400, 9, correlation=clear, bytes=8)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["gridX"] = 12
    trace, _ = job(tmp_path, export, grain="kernel", keep_args=["gridX", "notThere", "streamId"])
    got = rows(trace, "kind", "name", "bytes")[-4:]
    assert got == [
        ("memcpy", "Memcpy HtoD", 64),
        ("compute", "Memcpy DtoD", 64),
        ("compute", "Memcpy unknown", 64),
        ("compute", "Memset (Device)", 8),
    ]
    kept = trace.nodes.select("x_arg_gridX", "x_arg_notThere", "x_arg_streamId").collect()
    assert kept.row(0) == (12, None, 7)


def test_streams_of_several_devices_do_not_mix(tmp_path: Path) -> None:
    export = small_export(world=1)
    export.kernel("elsewhere", 50_000, 10, device=1, stream=7)
    trace, report = job(tmp_path, export)
    assert list(trace.header.streams.values()) == ["stream 7", "stream 20", "stream 1000007"]
    assert report.repairs == {"several-devices": 2}


# --- which process is which rank --------------------------------------------------------------


def two_processes(**environment: str) -> Export:
    """Numbers of calls repeat across processes; the first device's process has the higher id."""
    export = Export()
    export.describe(**environment)
    for pid, device in ((31, 1), (44, 0)):
        export.correlation = 100
        export.kernel(f"on {device}", 1_000, pid=pid, device=device)
    export.call("cudaMemcpyAsync", 3_000, pid=50)
    return export


def ranks_of(report: ConvertReport) -> dict[int, str]:
    return {rank: text.split()[0] for rank, text in report.processes.items()}


def test_processes_are_ranks_by_device(tmp_path: Path) -> None:
    path = two_processes(RANK="5").write(tmp_path / "job.sqlite")
    trace, report = run(tmp_path, path)
    assert ranks_of(report) == {0: "44", 1: "31"}
    assert report.repairs == {"assumed-rank-order": 2}
    assert rows(trace, "name") == [("on 0",), ("on 1",)]
    _, report = run(tmp_path, path, ranks={"job.sqlite": 8})
    assert ranks_of(report) == {8: "44", 9: "31"}


def test_processes_on_the_second_host(tmp_path: Path) -> None:
    export = two_processes()
    for k, text in enumerate(("--nnodes=2", "--nproc-per-node", "2", "--node_rank=1", "x.py")):
        export.add("META_DATA_CAPTURE", name=f"PROCESS_0:ARGUMENT_{k}", value=text)
    _, report = run(tmp_path, export.write(tmp_path / "a.sqlite"))
    assert ranks_of(report) == {2: "44", 3: "31"}
    assert report.world_size == 4
    _, report = run(tmp_path, two_processes(SLURM_NODEID="3").write(tmp_path / "a.sqlite"))
    assert ranks_of(report) == {6: "44", 7: "31"}


def test_ranks_given_by_process(tmp_path: Path) -> None:
    path = two_processes().write(tmp_path / "a.sqlite")
    _, report = run(tmp_path, path, rank_of_pid={"31": 0, "a.sqlite:44": 1})
    assert ranks_of(report) == {0: "31", 1: "44"}
    assert report.repairs == {}
    end = f"{tmp_path.name}/a.sqlite"
    _, report = run(tmp_path, path, rank_of_pid={f"{end}:31": 0, f"{end}:44": 1})
    assert ranks_of(report) == {0: "31", 1: "44"}
    _, report = run(tmp_path, path, rank_of_pid={"31": 0})
    assert ranks_of(report) == {0: "31"}
    assert report.repairs == {"dropped-process": 1}
    for given, message in (
        ({"31": 0, "44": 0}, "same rank"),
        ({"a.sqlite:32": 0}, "no process with number 32"),
        ({"31": 0, "33": 1}, "no file has a process 33"),
        ({"31": 2**40}, "at most"),
        ({"31": 0, "b.sqlite:44": 1}, "no file has a process b.sqlite:44"),
        ({"31": 0, "999": 0}, "no file has a process 999"),
    ):
        with pytest.raises(RankError, match=message):
            run(tmp_path, path, rank_of_pid=given)
    with pytest.raises(RankError, match="no file has a process 999") as caught:
        run(tmp_path, path, rank_of_pid={"999": 0})
    assert caught.value.hint == "processes that did: 44, 31 in a.sqlite"


def test_the_rank_of_a_single_process(tmp_path: Path) -> None:
    export = Export()
    export.kernel("k", 1_000)
    path = export.write(tmp_path / "somewhere.sqlite")
    with pytest.raises(RankError) as caught:
        run(tmp_path, path)
    assert caught.value.hint == "say it: --rank somewhere.sqlite=N"
    _, report = run(tmp_path, path, ranks={"somewhere.sqlite": 3})
    assert report.ranks == (3,)
    assert report.repairs == {"unknown-epoch": 1}
    _, report = run(tmp_path, export.write(tmp_path / "rank_2.sqlite"))
    assert report.ranks == (2,)
    export.add("TARGET_INFO_SYSTEM_ENV", name="DeviceEnvironment", value="A=1;SLURM_PROCID=6;B=")
    _, report = run(tmp_path, export.write(tmp_path / "rank_2.sqlite"))
    assert report.ranks == (6,)


def test_a_folder_and_workers(tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    for rank in range(2):
        small_export(rank).write(folder / f"host{rank}.sqlite")
    _, one = run(tmp_path, folder)
    first = (tmp_path / "run.parquet").read_bytes()
    trace, both = run(tmp_path, folder, jobs=2)
    assert (one.matched, both.matched) == ({"by-order": 2}, {"by-order": 2})
    assert (tmp_path / "run.parquet").read_bytes() == first
    # Each session has a clock of its own.
    assert [clock.ranks for clock in trace.header.clock] == [(0,), (1,)]
    assert trace.nodes.select(pl.col("start_ns").min()).collect().item() == EPOCH_NS + 10_200


# --- files in all conditions ------------------------------------------------------------------


@pytest.mark.parametrize(
    "without",
    [
        ["TARGET_INFO_SYSTEM_ENV", "META_DATA_CAPTURE", "PROCESSES", "NVTX_PAYLOAD_SCHEMA_ENTRIES"],
        ["CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET", "NVTX_EVENTS"],
        ["CUPTI_ACTIVITY_KIND_RUNTIME"],
        ["StringIds"],
        ["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"],
        ["CUPTI_ACTIVITY_KIND_KERNEL.globalPid"],
        ["CUPTI_ACTIVITY_KIND_KERNEL.correlationId", "CUPTI_ACTIVITY_KIND_RUNTIME.correlationId"],
        ["CUPTI_ACTIVITY_KIND_KERNEL.demangledName", "CUPTI_ACTIVITY_KIND_RUNTIME.nameId"],
        ["CUPTI_ACTIVITY_KIND_KERNEL.deviceId", "CUPTI_ACTIVITY_KIND_KERNEL.greenContextId"],
        ["NVTX_EVENTS.binaryData", "NVTX_EVENTS.jsonTextId", "NVTX_EVENTS.textId"],
        ["NVTX_EVENTS.text", "NVTX_EVENTS.jsonText"],
    ],
    ids=lambda without: without[0].removeprefix("CUPTI_ACTIVITY_KIND_"),
)
def test_what_an_export_may_lack(tmp_path: Path, without: list[str]) -> None:
    path = small_export(world=1).write(tmp_path / "rank0.sqlite", without=without)
    trace, report = run(tmp_path, path)
    assert report.ranks == (0,)
    assert trace.nodes.select("x_kernels").sum().collect().item() == 6


def test_an_export_without_kernels(tmp_path: Path) -> None:
    path = small_export().write(tmp_path / "a.sqlite", without=["CUPTI_ACTIVITY_KIND_KERNEL"])
    with pytest.raises(InputFileError, match="no kernel") as caught:
        run(tmp_path, path)
    assert "nsys profile" in str(caught.value.hint)
    path.write_bytes(gzip.compress(path.read_bytes())[:-4])
    with pytest.raises(InputFileError, match="no kernel") as caught:
        run(tmp_path, path, recover=True)
    assert "cut short" in str(caught.value.hint)


def test_values_of_other_types(tmp_path: Path) -> None:
    export = small_export(world=1)
    for table, name, value in (
        ("KERNEL", "correlationId", "x"), ("KERNEL", "streamId", 1.5), ("RUNTIME", "nameId", b"z"),
        ("KERNEL", "demangledName", None),
    ):  # fmt: skip
        export.rows[f"CUPTI_ACTIVITY_KIND_{table}"][-1][name] = value
    export.kernel("lost", 1)
    export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["start"] = "soon"
    path = export.write(tmp_path / "rank0.sqlite")
    with pytest.raises(InputFileError, match="dropped-no-time 1"):
        run(tmp_path, path)
    trace, report = run(tmp_path, path, recover=True)
    assert report.repairs["dropped-no-time"] == 1
    assert "lost" not in trace.nodes.collect()["name"].to_list()
    with pytest.raises(ValidationError):
        run(tmp_path, path, recover=True, strict=True)


def test_impossible_times(tmp_path: Path) -> None:
    export = small_export(world=1)
    export.kernel("k", 2**63 - 100, 10)
    with pytest.raises(InputFileError, match="2100"):
        job(tmp_path, export)
    export = small_export(world=1)
    export.kernel("backwards", 50_000, -10)
    _, report = job(tmp_path, export)
    assert report.repairs == {"clamped-negative-duration": 1}


def test_gzipped_and_damaged(tmp_path: Path) -> None:
    whole = small_export(world=1).write(tmp_path / "rank0.sqlite").read_bytes()
    path = tmp_path / "rank0.sqlite.gz"
    path.write_bytes(gzip.compress(whole))
    _, report = run(tmp_path, path)
    assert report.nodes == 6
    assert [entry.name for entry in tmp_path.iterdir() if "unpacked" in entry.name] == []
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(InputFileError, match="damaged or cut short") as caught:
        run(tmp_path, path)
    assert "nsys export" in str(caught.value.hint)
    path.write_bytes(gzip.compress(whole)[:-200])
    with pytest.raises(InputFileError):
        run(tmp_path, path)


def test_other_files_of_the_tool(tmp_path: Path) -> None:
    report = tmp_path / "job.nsys-rep"
    report.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(SourceFormatError, match="Nsight Systems report") as caught:
        convert(report, tmp_path / "out.parquet")
    assert str(caught.value.hint).startswith("nsys export --type sqlite --include-blobs true")
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE runs (id INTEGER)")
    connection.close()
    with pytest.raises(SourceFormatError, match="no Nsight Systems export"):
        convert(other, tmp_path / "out.parquet")


def test_the_command(tmp_path: Path, run_command: Any) -> None:
    two_processes().write(tmp_path / "a.sqlite")
    words = ("prismtrace", "convert", "a.sqlite", "-o", "run.parquet", "--rank-of-pid")
    done = run_command(*words, "31=0", "--rank-of-pid", "44=1")
    assert done.returncode == 0, done.stderr
    assert "   0  31 on device 1, a.sqlite" in done.stdout.splitlines()
    wrong = run_command(*words, "31")
    assert wrong.returncode == 2
    assert "'31' is not [FILE:]PID=N" in wrong.stderr


def test_a_rank_for_a_file_of_several_processes_says_what_it_means(
    data_dir: Path, tmp_path: Path
) -> None:
    path = data_dir / "nsys/mfu_2gpu_before.sqlite"
    with pytest.raises(RankError, match="rank 9 is outside the world of 2 ranks") as caught:
        convert(path, tmp_path / "out.parquet", ranks={path.name: 8})
    assert "holds 2 processes, taken for ranks 8-9: --rank FILE=N is the rank of its first" in str(
        caught.value.hint
    )
    assert "--rank-of-pid" in str(caught.value.hint)
