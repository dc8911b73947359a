"""CPU traces of jobs that communicate over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prismtrace.errors import GroupError
from tests.prismtrace.kineto_events import document, edges, event, rows, run, write_files

MAIN, WORKER = 100, 300


def operator(name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return event("cpu_op", name, ts, dur, tid, **args)


def gloo(name: str, ts: float, dur: float, tid: int = WORKER, **args: Any) -> dict[str, Any]:
    shape = {"Input Dims": [[[8, 4]]], "Input type": ["float"]}
    return event("user_annotation", f"gloo:{name}", ts, dur, tid, **shape, **args)


def train_step(late: float = 0) -> list[dict[str, Any]]:
    """Compute, all_reduce in the worker thread while the main thread pauses, compute."""
    return [
        operator("aten::mm", 0, 50 + late),
        operator("aten::inner", 10, 5),
        operator("c10d::allreduce_", 60 + late, 5),
        gloo("all_reduce", 70 + late, 200 - late),
        operator("aten::add", 280, 10),
    ]


def test_threads_are_streams_and_pauses_are_waits(tmp_path: Path) -> None:
    files = write_files(
        tmp_path / "in",
        *(document(train_step(40 * r), rank=r, world_size=2) for r in range(2)),
    )
    trace, report = run(tmp_path, files, grain="kernel")
    own = trace.ranks([0])
    assert rows(own, "kind", "name") == [
        ("compute", "aten::mm"),
        ("all_reduce", "gloo:all_reduce"),
        ("compute", "aten::add"),
    ]
    assert edges(own) == {
        ("aten::mm", "gloo:all_reduce"),
        ("aten::mm", "aten::add"),
        ("gloo:all_reduce", "aten::add"),
    }
    assert list(trace.header.streams.values()) == ["cpu thread 0", "gloo worker 0"]
    assert rows(trace, "group", "seq", "bytes", "dtype")[1] == (0, 0, 128, "float32")
    assert report.matched == {"by-order": 1}
    assert report.edges == {"inferred-wait": 2}


def test_short_pauses_are_no_waits(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 50), operator("c10d::allreduce_", 50, 2),
              gloo("all_reduce", 52, 8), operator("aten::add", 65, 10)]  # fmt: skip
    trace, _ = run(tmp_path, write_files(tmp_path / "in", document(events)), grain="kernel")
    assert edges(trace) == {("aten::mm", "gloo:all_reduce"), ("aten::mm", "aten::add")}


def test_send_and_recv_name_the_partner_within_the_group(tmp_path: Path) -> None:
    def rank_events(rank: int) -> list[dict[str, Any]]:
        kind = "send" if rank == 0 else "recv"
        call = operator(
            f"c10d::{kind}", 60, 100, **{"Concrete Inputs": ["", "", str(1 - rank), "0"]}
        )
        return [operator("aten::mm", 0, 50), call, gloo(kind, 62, 90, tid=MAIN)]

    groups = {"0": [0, 1]}
    files = write_files(
        tmp_path / "in",
        *(document(rank_events(r), rank=r, world_size=2, groups=groups) for r in range(2)),
    )
    trace, report = run(tmp_path, files)
    assert rows(trace, "kind", "peer", "seq")[1::2] == [("send", 1, 0), ("recv", 0, 0)]
    assert report.matched == {"p2p": 1}


def test_several_groups_are_refused_with_their_names(tmp_path: Path) -> None:
    groups = {"0": [0, 1, 2, 3], "1": [0, 2]}
    files = write_files(
        tmp_path / "in", document(train_step(), rank=0, world_size=4, groups=groups)
    )
    with pytest.raises(GroupError, match=r"2 fit; candidates: '0' = ranks 0-3, '1' = ranks 0,2"):
        run(tmp_path, files)
    trace, report = run(tmp_path, files, unmatched="keep")
    assert report.repairs == {"kept-without-group": 1}
    assert rows(trace, "kind", "group", "seq")[1] == ("all_reduce", None, None)


def test_spans_without_a_call_and_unknown_spans(tmp_path: Path) -> None:
    events = [operator("aten::mm", 0, 50), gloo("all_reduce", 60, 10), gloo("teleport", 80, 10)]
    _, report = run(tmp_path, write_files(tmp_path / "in", document(events)))
    assert report.repairs["gloo-without-call"] == 2
    assert report.repairs["unknown-gloo-operation"] == 1


@pytest.mark.parametrize("numbered", [False, True])
def test_two_threads_may_start_works_out_of_order(tmp_path: Path, numbered: bool) -> None:
    """The calls tell the order of works: by record-function id, else by size."""

    def rank_events(first: float, second: float) -> list[dict[str, Any]]:
        found = [operator("aten::mm", 0, 50)]
        works = ((60, 4, first, WORKER, 5), (65, 8, second, WORKER + 1, 7))
        for ts, elements, start, tid, rf_id in works:
            call = {"Input Dims": [[[elements]], []], "Input type": ["TensorList", ""]}
            work = {"Input Dims": [[elements]], "Input type": ["float"]}
            ids = [{"Record function id": rf_id + k if numbered else 0} for k in range(2)]
            found.append(operator("c10d::allreduce_", ts, 3, **call, **ids[0]))
            found.append(
                event(
                    "user_annotation", "gloo:all_reduce", start, 300 - start, tid, **work, **ids[1]
                )
            )
        return [*found, operator("aten::add", 310, 10)]

    files = write_files(
        tmp_path / "in",
        document(rank_events(70, 72), rank=0, world_size=2),
        document(rank_events(72, 70), rank=1, world_size=2),
    )
    trace, _ = run(tmp_path, files)
    matched = trace.collect().drop_nulls("seq").sort("rank", "seq")
    assert matched.select("rank", "seq", "bytes").rows() == [
        (0, 0, 16),
        (0, 1, 32),
        (1, 0, 16),
        (1, 1, 32),
    ]
