"""Dependencies within a rank, on traces of a few events (kernel grain, names as nodes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prismtrace.converters import ConvertReport
from tests.prismtrace.kineto_events import (
    ALL_REDUCE,
    call,
    document,
    edges,
    event,
    launched,
    metadata,
    record,
    run,
    write_files,
)

OTHER = ALL_REDUCE.replace("AllReduce", "AllGather")


def linked(folder: Path, *events: Any) -> tuple[set[tuple[str, str]], ConvertReport]:
    trace, report = run(folder, write_files(folder / "in", document(*events)), grain="kernel")
    short = {name: name.partition("_")[0] for pair in edges(trace) for name in pair}
    return {(short[a], short[b]) for a, b in edges(trace)}, report


def op(name: str, launch: float, ts: float, dur: float, stream: int = 7, tid: int = 100) -> Any:
    return launched(name, launch, ts, dur, round(launch * 10), stream, tid)


def comm(
    name: str, launch: float, ts: float, dur: float, stream: int = 20, tid: int = 100, **args: Any
) -> Any:
    kernel = launched(f"{name}_ncclDevKernel_AllReduce_Sum_f32_RING_LL", launch, ts, dur,
                      round(launch * 10), stream, tid, **metadata(ranks="[0]", **args))  # fmt: skip
    return [record("allreduce", launch - 1, 2, tid, **args), *kernel]


def wait(ts: float, tid: int = 100, **args: Any) -> Any:
    return record("wait", ts, 1, tid, dtype="Byte", Group_size=1, **args)


def test_a_stream_runs_in_launch_order(tmp_path: Path) -> None:
    found, _ = linked(tmp_path, op("b", 3, 20, 5), op("a", 1, 10, 5), op("c", 5, 12, 5, stream=9))
    assert found == {("a", "b")}


def test_a_communication_waits_for_the_stream_it_was_called_from(tmp_path: Path) -> None:
    found, report = linked(
        tmp_path,
        op("a", 1, 10, 5),
        op("side", 2, 10, 30, stream=9, tid=300),
        comm("C", 4, 16, 10),
        op("b", 8, 16, 5),
    )
    assert found == {("a", "C"), ("a", "b")}
    assert report.edges == {"comm-input": 1}


def test_wait_right_after_the_call(tmp_path: Path) -> None:
    found, report = linked(
        tmp_path,
        op("a", 1, 10, 5),
        comm("C", 4, 16, 10),
        wait(6),
        op("b", 8, 27, 5),
        op("c", 9, 33, 5),
    )
    assert found == {("a", "C"), ("a", "b"), ("C", "b"), ("b", "c")}
    assert report.edges == {"comm-input": 1, "record-wait": 1}


def test_a_communication_may_wait_for_a_communication(tmp_path: Path) -> None:
    # Nothing is computed between the wait for C and the call of D.
    found, _ = linked(
        tmp_path,
        op("a", 1, 10, 5),
        comm("C", 4, 16, 10),
        wait(6),
        comm("D", 8, 27, 10, stream=21),
        op("b", 12, 27, 5),
    )
    assert found == {("a", "C"), ("a", "D"), ("C", "D"), ("a", "b"), ("C", "b")}


def test_waits_in_order_of_the_calls(tmp_path: Path) -> None:
    found, _ = linked(
        tmp_path,
        op("a", 1, 10, 5),
        comm("C", 4, 16, 10, Seq=1),
        comm("D", 7, 27, 10, Seq=2),
        op("b", 10, 16, 5),
        wait(12, Seq=1),
        op("c", 14, 27, 5),
        wait(16, Seq=2),
        op("d", 18, 38, 5),
    )
    waits = {pair for pair in found if pair[0] in "CD" and pair[1] not in "CD"}
    assert waits == {("C", "c"), ("D", "d")}


def test_a_wait_for_something_within_one_rank(tmp_path: Path) -> None:
    # Number 2 has no kernel: its wait leads nowhere, and is no reason to guess.
    found, report = linked(
        tmp_path, op("a", 1, 10, 5), comm("C", 4, 16, 10, Seq=1), wait(6, Seq=2), op("b", 8, 30, 5)
    )
    assert ("C", "b") not in found
    assert report.repairs == {}


def test_a_wait_from_another_thread_holds_for_its_stream(tmp_path: Path) -> None:
    found, _ = linked(
        tmp_path,
        op("a", 1, 10, 5, tid=200),
        comm("C", 4, 16, 10, tid=200),
        wait(6, tid=200),
        op("b", 8, 27, 5, tid=100),
    )
    assert ("C", "b") in found


def test_a_wait_before_anything_is_computed(tmp_path: Path) -> None:
    found, report = linked(tmp_path, comm("C", 2, 10, 10), wait(4), op("a", 6, 21, 5))
    assert found == {("C", "a")}
    assert report.repairs == {}


def sync(kind: str, ts: float, correlation: int, stream: int = -1, **args: Any) -> Any:
    return event("cuda_sync", kind, ts, 1, stream, cuda_sync_kind=kind, stream=stream,
                 correlation=correlation, **args)  # fmt: skip


@pytest.mark.parametrize("how", ["device", "context", "stream", "event", "thread"])
def test_what_the_host_waited_for(how: str, tmp_path: Path) -> None:
    names = {"device": "cudaDeviceSynchronize", "context": "cudaDeviceSynchronize",
             "event": "cudaEventSynchronize"}  # fmt: skip
    events = [call(names.get(how, "cudaStreamSynchronize"), 6, 60, dur=30)]
    if how == "context":
        events += [sync("Context Sync", 6, 60)]
    elif how == "stream":
        events += [sync("Stream Sync", 6, 60, stream=7)]
    elif how == "event":
        events += [sync("Event Sync", 6, 60, wait_on_stream=7,
                        wait_on_cuda_event_record_corr_id=30)]  # fmt: skip
    found, report = linked(
        tmp_path,
        op("a", 1, 10, 5),
        call("cudaEventRecord", 3, 30),
        events,
        op("b", 40, 45, 5, stream=9),
        op("c", 41, 45, 5, stream=8),
        op("d", 42, 55, 5, stream=9),
        op("other", 43, 55, 5, stream=5, tid=300),
    )
    # Every stream that the thread goes on to use, and only the first operation of each.
    assert found == {("a", "b"), ("a", "c"), ("b", "d")}
    assert report.edges == {"host-wait": 2}
    assert report.repairs == {}


def test_queries_do_not_wait(tmp_path: Path) -> None:
    found, _ = linked(
        tmp_path,
        op("a", 1, 10, 5),
        call("cudaEventRecord", 3, 30),
        call("cudaEventQuery", 20, 200),
        sync("Event Sync", 20, 200, wait_on_stream=7, wait_on_cuda_event_record_corr_id=30),
        op("b", 40, 45, 5, stream=9),
    )
    assert found == set()


def test_a_stream_wait_covers_what_its_stream_waits_for(tmp_path: Path) -> None:
    # 9 waits for 7, which waits for 5 but has not been given anything since.
    def stream_wait(ts: float, correlation: int, stream: int, on: int, recorded: int) -> Any:
        return [
            call("cudaEventRecord", ts, recorded),
            call("cudaStreamWaitEvent", ts + 1, correlation),
            sync("Stream Wait Event", ts + 1, correlation, stream, wait_on_stream=on,
                 wait_on_cuda_event_record_corr_id=recorded),
        ]  # fmt: skip

    found, report = linked(
        tmp_path,
        op("five", 1, 10, 5, stream=5),
        op("seven", 2, 10, 5, stream=7),
        stream_wait(3, 32, stream=7, on=5, recorded=31),
        stream_wait(6, 62, stream=9, on=7, recorded=61),
        op("nine", 9, 20, 5, stream=9),
        op("next", 10, 20, 5, stream=7),
    )
    assert found == {("five", "nine"), ("seven", "nine"), ("five", "next"), ("seven", "next")}
    assert report.edges == {"stream-wait": 3}


def test_what_a_coalesced_launch_carries_is_waited_for_together(tmp_path: Path) -> None:
    common = {"In_msg_nelems": 8, "Out_msg_nelems": 8, "dtype": "Float", "Group_size": 1,
              "Process_Group_Ranks": "[0]"}  # fmt: skip
    trace, report = run(
        tmp_path,
        write_files(
            tmp_path / "in",
            document(
                op("a", 1, 10, 5),
                [record("_allgather_base", 3 + k, 0.5, **{**common, "Group_size": 2,
                        "Process_Group_Ranks": "[0, 1]"}) for k in range(3)],
                launched(OTHER, 8, 16, 10, 80, stream=20),
                wait(10),
                op("b", 12, 27, 5),
                world_size=2,
            ),
        ),
        grain="kernel",
    )  # fmt: skip
    nodes = trace.nodes.collect()
    assert nodes["batch"].to_list() == [None, 0, 0, 0, None]
    assert nodes["deps"].to_list() == [[], [1], [2], [3], [1, 2, 3, 4]]
    assert report.edges["record-wait"] == 1
