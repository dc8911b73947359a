"""What users of Kineto traces reported to other tools, as the smallest input that shows it.

Each test names the thread it comes from.
"""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from prismtrace.converters import convert
from prismtrace.errors import AlignmentError, RankError, StepError
from tests.prismtrace.kineto_events import (
    ALL_REDUCE,
    SEND_RECV,
    call,
    document,
    edges,
    event,
    kernel,
    launched,
    metadata,
    record,
    rows,
    run,
    write_files,
)


def gemm(launch: float, ts: float, dur: float, correlation: int, name: str = "gemm", **more):
    return launched(name, launch, ts, dur, correlation, **more)


def all_reduce(launch: float, ts: float, dur: float, correlation: int, **args):
    return launched(ALL_REDUCE, launch, ts, dur, correlation, stream=20, **metadata(**args))


def test_hta_107_rank_given_by_hand(tmp_path: Path) -> None:
    (file,) = write_files(tmp_path / "in", document(gemm(0, 5, 10, 1), rank=None))
    file = file.rename(file.with_name("host_1.123.pt.trace.json"))
    with pytest.raises(RankError) as caught:
        convert(file, tmp_path / "run.parquet")
    assert "--rank host_1.123.pt.trace.json=N" in (caught.value.hint or "")
    trace, report = run(tmp_path, file, ranks={file.name: 2})
    assert report.ranks == (2,)
    assert rows(trace, "rank") == [(2,)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("x_rank-3.json", 3), ("rank12_trace.json", 12), ("worker4_step_9.1.pt.trace.json", 4),
     ("megatron_kineto_7.json", 7), ("RANK_5.json", 5)],
)  # fmt: skip
def test_hta_17_rank_from_file_name(tmp_path: Path, name: str, rank: int) -> None:
    (file,) = write_files(tmp_path / "in", document(gemm(0, 5, 10, 1), rank=None))
    _, report = run(tmp_path, file.rename(file.with_name(name)))
    assert report.ranks == (rank,)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_gather"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)", "reduce_scatter"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_Sum_bf16(...)", "all_reduce"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "other_comm"),
    ],
)
def test_hta_208_kernels_of_newer_nccl_communicate(tmp_path: Path, name: str, kind: str) -> None:
    files = write_files(
        tmp_path / "in",
        *(
            document(launched(name, 0, 5, 10, 1, stream=20), rank=rank, world_size=2)
            for rank in range(2)
        ),
    )
    trace, _ = run(tmp_path, files)
    assert rows(trace, "kind", "group", "seq") == [(kind, 0, 0)] * 2


def test_hta_317_durations_do_not_become_negative(tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", document(gemm(0, 100.7, 0.2, 1), gemm(1, 101.3, -0.5, 2)))
    trace, report = run(tmp_path, files, grain="kernel")
    assert rows(trace, "start_ns", "dur_ns") == [
        (10**18 + 100_700, 200),
        (10**18 + 101_300, 0),
    ]
    assert report.repairs == {"clamped-negative-duration": 1}


def test_hta_290_kernels_of_a_cuda_graph(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        document(
            call("cudaGraphLaunch", 0, 7),
            *(kernel(f"k{i}", 10 * i + 5, 8, correlation=7) for i in range(3)),
            kernel("side", 6, 3, stream=9, correlation=7),
        ),
    )
    trace, report = run(tmp_path, files, grain="kernel")
    assert [name for (name,) in rows(trace, "name")] == ["k0", "side", "k1", "k2"]
    assert edges(trace) == {("k0", "k1"), ("k1", "k2")}
    # All kernels of a graph share its launch: that is no repair.
    assert report.repairs == {}


def test_hta_241_overlapping_kernels_of_two_streams(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        document(
            gemm(0, 5, 100, 1), gemm(1, 10, 50, 2, stream=9), gemm(2, 105, 10, 3),
            event("cuda_runtime", "cudaMemcpyAsync", 3, 1, 100, correlation=4),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 120, 0, 7, stream=7,
                  correlation=4, bytes=4096),
        ),
    )  # fmt: skip
    trace, _ = run(tmp_path, files)
    spans = rows(trace, "stream", "kind", "start_ns", "dur_ns", "x_busy_ns", "x_kernels")
    base = 10**18
    assert spans == [
        (0, "compute", base + 5_000, 115_000, 110_000, 3),
        (1, "compute", base + 10_000, 50_000, 50_000, 1),
    ]
    trace, _ = run(tmp_path, files, grain="kernel")
    assert rows(trace, "kind", "dur_ns", "bytes")[-1] == ("memcpy", 0, 4096)


def test_hta_229_arguments_can_be_kept(tmp_path: Path) -> None:
    files = write_files(tmp_path / "in", document(gemm(0, 5, 10, 1, foo="bar", grid=[8, 1, 1])))
    trace, _ = run(tmp_path, files, grain="kernel", keep_args=["foo", "grid", "absent"])
    assert trace.nodes.select("x_arg_foo", "x_arg_absent").collect().rows() == [("bar", None)]
    assert "8" in str(rows(trace, "x_arg_grid"))
    assert rows(trace, "name") == [("gemm",)]


def test_kineto_1380_kernel_that_starts_before_its_launch(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in", document(gemm(10, 5, 3, 1, "early"), gemm(20, 25, 3, 2, "later"))
    )
    trace, _ = run(tmp_path, files, grain="kernel")
    assert edges(trace) == {("early", "later")}


def test_kineto_1060_no_profiler_step(tmp_path: Path) -> None:
    notes = [event("user_annotation", f"train_batch_{n}", 100 * n, 90, 100) for n in range(2)]
    files = write_files(
        tmp_path / "in", document(notes, gemm(10, 15, 10, 1), gemm(110, 115, 10, 2))
    )
    _, report = run(tmp_path, files)
    assert report.steps == (0,)
    trace, report = run(tmp_path, files, step_from=r"train_batch_(\d+)")
    assert rows(trace, "step") == [(0,), (1,)]
    with pytest.raises(StepError) as caught:
        convert(files, tmp_path / "run.parquet", step_from="profilerstep")
    assert "train_batch_0" in (caught.value.hint or "")


def test_kineto_105_inf_in_numbers(tmp_path: Path) -> None:
    text = json.dumps(
        document(
            call("cudaMemcpyAsync", 0, 1),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 5, 0, 7, stream=7,
                  correlation=1, bytes=64, bandwidth="INF"),
        )
    ).replace('"INF"', "inf")  # fmt: skip
    trace, report = run(tmp_path, write_files(tmp_path / "in", text), grain="kernel")
    assert rows(trace, "kind", "bytes") == [("memcpy", 64)]
    assert report.repairs


def test_kineto_336_invalid_text(tmp_path: Path) -> None:
    text = json.dumps(
        document(
            gemm(0, 5, 10, 1, "NAME1"), gemm(1, 20, 10, 2, "NAME2"), gemm(2, 40, 10, 3, "fine")
        )
    ).encode()
    text = text.replace(b"NAME1", b"C:\\new\\x").replace(b"NAME2", b"a\nb\xff")
    trace, report = run(tmp_path, write_files(tmp_path / "in", text), grain="kernel")
    assert trace.nodes.collect().height == 3
    assert rows(trace, "name")[-1] == ("fine",)
    assert report.repairs


def test_kineto_1294_all_reduces_without_seq(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        *(
            document(
                all_reduce(0, 5 + 9 * rank, 20 - 9 * rank, 1),
                all_reduce(2, 30, 20, 2),
                rank=rank,
                world_size=2,
            )
            for rank in range(2)
        ),
    )
    trace, report = run(tmp_path, files)
    assert rows(trace, "rank", "seq", "bytes") == [(r, s, 2048) for r in (0, 1) for s in (0, 1)]
    assert report.matched == {"by-order": 2}


def test_kineto_843_external_id_equals_correlation(tmp_path: Path) -> None:
    # The operator is found by time, whatever the ids say.
    files = write_files(
        tmp_path / "in",
        document(
            record("allreduce", 0, 10, In_msg_nelems=16, Out_msg_nelems=16, dtype="Float",
                   Group_size=1, External_id=99),
            launched(ALL_REDUCE, 2, 12, 5, 7, stream=20, **{"External id": 7}),
        ),
    )  # fmt: skip
    trace, _ = run(tmp_path, files)
    assert rows(trace, "kind", "bytes", "dtype") == [("all_reduce", 64, "float32")]


def test_pytorch_131462_send_recv_without_metadata(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        *(
            document(
                launched(SEND_RECV, 0, 5 + 7 * rank, 20 - 7 * rank, 1, stream=20),
                rank=rank,
                world_size=2,
            )
            for rank in range(2)
        ),
    )
    trace, report = run(tmp_path, files)
    # Nothing says whether it was an all_to_all, a send or a recv.
    assert rows(trace, "kind", "group", "seq", "bytes") == [("other_comm", 0, 0, None)] * 2
    assert report.repairs == {"assumed-world-group": 2, "no-metadata": 2}


def batched(rank: int) -> list[dict]:
    """`batch_isend_irecv` of two ranks: records of registration, then one kernel."""
    peer = 1 - rank
    common = {"In_msg_nelems": 8, "Out_msg_nelems": 8, "dtype": "Float", "Group_size": 2,
              "Process_Group_Name": "0", "Process_Group_Ranks": "[0, 1]"}  # fmt: skip
    return [
        record("send", 0, 2, **common, Src_Rank=rank, Dst_Rank=peer),
        record("recv", 3, 2, **common, Src_Rank=peer, Dst_Rank=rank),
        event("user_annotation", "nccl:coalesced", 6, 8, 100),
        *launched(SEND_RECV, 8, 20 + rank, 10, 5, stream=20),
    ]


def test_pytorch_194693_batched_p2p_is_one_kernel(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in", *(document(batched(rank), rank=rank, world_size=2) for rank in range(2))
    )
    trace, report = run(tmp_path, files)
    assert rows(trace, "rank", "kind", "peer", "seq", "bytes", "batch", "start_ns") == [
        (0, "send", 1, 0, 32, 0, 10**18 + 20_000),
        (0, "recv", 1, 0, 32, 0, 10**18 + 20_000),
        (1, "send", 0, 0, 32, 0, 10**18 + 21_000),
        (1, "recv", 0, 0, 32, 0, 10**18 + 21_000),
    ]
    # Unordered among each other, or two ranks that both send first would be a cycle.
    assert {tuple(deps) for (deps,) in rows(trace, "deps")} == {()}
    assert report.matched == {"p2p": 2}


def test_pytorch_128292_files_with_different_base_times(tmp_path: Path) -> None:
    quarter = 7_889_238 * 10**9
    early = document(gemm(5e6, 5e6 + 5, 10, 1), rank=0, world_size=2)
    late = document(gemm(0, 8, 10, 1), rank=1, world_size=2)
    early["baseTimeNanoseconds"] = 10**18
    late["baseTimeNanoseconds"] = 10**18 + quarter
    trace, _ = run(tmp_path, write_files(tmp_path / "in", early, late))
    assert rows(trace, "start_ns") == [(10**18 + 5_000_005_000,), (10**18 + quarter + 8_000,)]


def test_pytorch_71303_a_late_rank_is_visible(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        *(
            document(
                gemm(0, 5, 10 + late, 1), all_reduce(2, 16 + late, 10_020 - late, 2),
                rank=rank, world_size=2,
            )
            for rank, late in ((0, 0), (1, 10_000))
        ),
    )  # fmt: skip
    trace, _ = run(tmp_path, files)
    comms = trace.nodes.filter(pl.col("kind") == "all_reduce").collect()
    assert comms["start_ns"].diff()[1] == 10_000_000
    assert (comms["start_ns"] + comms["dur_ns"]).n_unique() == 1


def test_pytorch_125173_sequence_numbers_that_differ_between_ranks(tmp_path: Path) -> None:
    numbers = {0: (1, 2, 4), 1: (1, 2, 3)}
    files = write_files(
        tmp_path / "in",
        *(
            document(
                *(
                    all_reduce(50 * k, 50 * k + 5 + rank, 20 - rank, k, Seq=seq)
                    for k, seq in enumerate(numbers[rank], start=1)
                ),
                rank=rank,
                world_size=2,
            )
            for rank in numbers
        ),
    )
    trace, report = run(tmp_path, files)
    assert rows(trace, "rank", "seq") == [(r, s) for r in (0, 1) for s in (0, 1, 2)]
    assert report.matched == {"by-order": 3}
    assert report.repairs == {"contradicting-seq": 1}


def test_chakra_128_kernels_without_correlation(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        document(
            call("hipLaunchKernel", 0, 1), kernel("a", 5, 10), kernel("b", 20, 10),
            kernel("c", 12, 4, stream=9),
        ),
    )  # fmt: skip
    trace, report = run(tmp_path, files, grain="kernel")
    assert [name for (name,) in rows(trace, "name")] == ["a", "c", "b"]
    assert edges(trace) == {("a", "b")}
    assert report.repairs == {"orphan-launch": 3}


def wait_event(ts: float, correlation: int, stream: int, on: int, record_correlation: int):
    return [
        call("cudaStreamWaitEvent", ts, correlation),
        event("cuda_sync", "Stream Wait Event", ts, 1, stream,
              cuda_sync_kind="Stream Wait Event", stream=stream, correlation=correlation,
              wait_on_stream=on, wait_on_cuda_event_record_corr_id=record_correlation),
    ]  # fmt: skip


def test_chakra_134_streams_that_wait_for_each_other(tmp_path: Path) -> None:
    # Each stream waits for an event that the other records later: impossible, yet written.
    files = write_files(
        tmp_path / "in",
        document(
            wait_event(0, 10, 7, on=9, record_correlation=21),
            gemm(2, 20, 10, 11, "a"),
            call("cudaEventRecord", 4, 12),
            wait_event(6, 20, 9, on=7, record_correlation=12),
            gemm(8, 31, 10, 13, "b", stream=9),
            call("cudaEventRecord", 10, 21),
        ),
    )
    trace, report = run(tmp_path, files, grain="kernel")
    assert edges(trace) == {("a", "b")}
    assert report.repairs == {"unresolved-stream-wait": 1}


def test_kineto_1339_wait_that_the_times_contradict(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        document(
            gemm(0, 10, 1000, 1, "long"),
            call("cudaEventRecord", 3, 2),
            wait_event(5, 3, 9, on=7, record_correlation=2),
            gemm(7, 20, 10, 4, "early", stream=9),
        ),
    )
    trace, report = run(tmp_path, files, grain="kernel")
    assert edges(trace) == set()
    assert report.repairs == {"contradicting-edge": 1}


@pytest.mark.parametrize("noted", [True, False])
def test_chakra_37_send_and_recv(tmp_path: Path, noted: bool) -> None:
    def rank_events(rank: int) -> list:
        kind, arrow = ("send", "->") if rank == 0 else ("recv", "<-")
        named = {"Rank": 1 - rank} if not noted else {}
        title = event("user_annotation", f"nccl:{kind} {rank}{arrow}{1 - rank}", 1, 8, 100)
        return [
            record(kind, 0, 10, In_msg_nelems=8, Out_msg_nelems=8, dtype="Half", Group_size=2,
                   Process_Group_Name="0", Process_Group_Ranks="[0, 1]", **named),
            *([title] if noted else []),
            *launched(SEND_RECV, 4, 20, 10, 5, stream=20, **metadata(kind, nelems=8)),
        ]  # fmt: skip

    files = write_files(
        tmp_path / "in", *(document(rank_events(r), rank=r, world_size=2) for r in range(2))
    )
    trace, report = run(tmp_path, files)
    assert rows(trace, "rank", "kind", "peer", "seq", "bytes") == [
        (0, "send", 1, 0, 16),
        (1, "recv", 0, 0, 16),
    ]
    assert report.matched == {"p2p": 1}


def test_chakra_71_several_process_groups(tmp_path: Path) -> None:
    groups = {"1": [0, 1], "2": [0, 2]}

    def rank_document(rank: int) -> dict:
        own = {name: ranks for name, ranks in groups.items() if rank in ranks}
        events = [
            all_reduce(10 * k, 20 * k + 5, 10, k, group=name, ranks=str(ranks))
            for k, (name, ranks) in enumerate(groups.items(), start=1)
            if rank in ranks
        ]
        return document(*events, rank=rank, world_size=3, groups=own)

    trace, _ = run(tmp_path, write_files(tmp_path / "in", *map(rank_document, range(3))))
    table = {g.id: (g.name, g.ranks) for g in trace.header.groups}
    assert table == {0: ("1", (0, 1)), 1: ("2", (0, 2))}
    assert rows(trace, "rank", "group", "seq") == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (2, 1, 0)]


def test_chakra_167_overlays_of_other_tools_are_skipped(tmp_path: Path) -> None:
    flow = {"ph": "s", "cat": "critical_path", "name": "e", "id": 1, "pid": 1, "tid": 7, "ts": 5}
    with_flows = document(gemm(0, 5, 10, 1), [flow, {**flow, "ph": "f"}], gemm(2, 20, 10, 2))
    trace, report = run(tmp_path, write_files(tmp_path / "in", with_flows), grain="kernel")
    assert report.repairs == {}
    plain = document(gemm(0, 5, 10, 1), gemm(2, 20, 10, 2))
    other, _ = run(tmp_path, write_files(tmp_path / "in", plain), grain="kernel")
    assert trace.nodes.collect().equals(other.nodes.collect())


def test_tracelens_577_equal_ids_in_two_files(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        *(
            document(gemm(0, 5, 10, 5, f"of rank {rank}"), rank=rank, world_size=2)
            for rank in range(2)
        ),
    )
    trace, _ = run(tmp_path, files)
    assert rows(trace, "rank", "name") == [(0, "of rank 0"), (1, "of rank 1")]
    assert trace.nodes.select("id").collect()["id"].to_list() == [0, 1 << 32]


def test_tracelens_459_hosts_with_different_clocks(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        *(
            document(
                *(
                    all_reduce(100 * k, 100 * k + 5 + 10 * rank, 50 - 10 * rank, k,
                               ranks="[0, 1, 2, 3]")
                    for k in range(1, 4)
                ),
                rank=rank,
                world_size=4,
                host_name=f"host{rank // 2}",
                baseTimeNanoseconds=10**18 + 3_000_000 * (rank // 2),
            )
            for rank in range(4)
        ),
    )  # fmt: skip
    trace, report = run(tmp_path, files)
    assert report.matched == {"by-order": 3}
    assert [(d.host, d.ranks, d.offset_ns) for d in trace.header.clock] == [
        ("host0", (0, 1), None),
        ("host1", (2, 3), None),
    ]


def test_tracelens_547_communication_kernels_that_are_not_nccl(tmp_path: Path) -> None:
    name = "void deep_ep::internode::dispatch<false, 8, 128>(int4*, float*)"
    files = write_files(
        tmp_path / "in",
        *(
            document(launched(name, 0, 5 + rank, 10 - rank, 1, stream=30), rank=rank, world_size=2)
            for rank in range(2)
        ),
    )
    trace, _ = run(tmp_path, files)
    assert rows(trace, "kind") == [("compute",)] * 2
    trace, _ = run(tmp_path, files, comm_kernels=["internode::dispatch=all_to_all"])
    assert (
        rows(trace, "kind", "seq", "name")
        == [("all_to_all", 0, "deep_ep::internode::dispatch")] * 2
    )


def test_pytorch_177148_an_operation_lost_on_one_rank(tmp_path: Path) -> None:
    # Ten equal operations, the fifth of which rank 1's profiler lost: every later one would be
    # paired with its successor.
    files = write_files(
        tmp_path / "in",
        *(
            document(
                *(
                    all_reduce(1000 * k, 1000 * k + 5, 50, k)
                    for k in range(1, 11)
                    if (rank, k) != (1, 5)
                ),
                rank=rank,
                world_size=2,
                host_name="host",
            )
            for rank in range(2)
        ),
    )
    with pytest.raises(AlignmentError) as caught:
        convert(files, tmp_path / "run.parquet")
    assert "dropped" in (caught.value.hint or "")
