from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.kineto.spans import build_nodes
from prismtrace.schema import DType, Kind, Phase

COMM = CommOp(Kind.ALL_REDUCE, dtype=DType.BFLOAT16, nbytes=64)


def issued(*entries: dict[str, Any]) -> IssuedOps:
    """Operations given by stream, start and duration; one after the other on each stream."""
    ops = IssuedOps()
    last: dict[str, int] = {}
    for position, given in enumerate(entries):
        entry = {"name": "k", "stream": "s7", "start": 0, "dur": 1, "deps": (), **given}
        comm = entry.get("comm")
        ops.append(
            name=entry["name"],
            kind=comm.kind if comm else entry.get("kind", Kind.COMPUTE),
            stream=entry["stream"],
            start_ns=entry["start"],
            dur_ns=entry["dur"],
            row=position,
            issue_ns=position,
            nbytes=comm.nbytes if comm else entry.get("nbytes"),
            comm=comm,
            batch=entry.get("batch"),
        )
        ops.step[position] = entry.get("step")
        ops.phase[position] = entry.get("phase")
        ops.deps[position] = {
            *entry["deps"],
            *([last[entry["stream"]]] if entry["stream"] in last else []),
        }
        last[entry["stream"]] = position
    return ops


def spans(*entries: dict[str, Any]) -> pl.DataFrame:
    return build_nodes(issued(*entries), grain="communication")[0]


def test_computation_between_communications_is_one_span() -> None:
    nodes = spans(
        {"start": 0, "dur": 10, "name": "short"},
        {"start": 15, "dur": 20, "name": "void at::long<int>(float)"},
        {"stream": "s20", "start": 36, "dur": 9, "comm": COMM, "deps": [1]},
        {"start": 46, "dur": 4, "deps": [2]},
    )
    assert nodes.select("kind", "name", "start_ns", "dur_ns", "x_kernels", "x_busy_ns").rows() == [
        ("compute", "at::long +1 kernel", 0, 35, 2, 30),
        ("all_reduce", "k", 36, 9, 1, 9),
        ("compute", "k", 46, 4, 1, 4),
    ]
    assert nodes["deps"].to_list() == [[], [1], [1, 2]]


def test_a_communication_on_the_same_stream_ends_a_span() -> None:
    nodes = spans({"start": 0}, {"start": 2, "comm": COMM}, {"start": 4}, {"start": 6})
    assert nodes["kind"].to_list() == ["compute", "all_reduce", "compute"]
    assert nodes["deps"].to_list() == [[], [1], [1]]


@pytest.mark.parametrize("column", ["step", "phase"])
def test_steps_and_phases_end_a_span(column: str) -> None:
    values = (3, 4) if column == "step" else (Phase.FORWARD, Phase.BACKWARD)
    nodes = spans(*({column: value, "start": k} for k, value in enumerate(values)))
    assert nodes[column].to_list() == [
        value if column == "step" else str(value) for value in values
    ]


def test_edges_between_computing_streams_cut_spans() -> None:
    # a0 a1 | a2 on one stream, b0 | b1 on another; b1 waits for a1.
    nodes = spans(
        {"start": 0}, {"start": 2}, {"stream": "s9", "start": 0}, {"stream": "s9", "start": 4, "deps": [1]},
        {"start": 6},
    )  # fmt: skip
    assert nodes.select("stream", "x_kernels").rows() == [
        ("s7", 2),
        ("s9", 1),
        ("s9", 1),
        ("s7", 1),
    ]
    assert nodes["deps"].to_list() == [[], [], [1, 2], [3]]


def test_overlap_on_a_stream_is_not_counted_twice() -> None:
    nodes = spans({"start": 0, "dur": 10}, {"start": 5, "dur": 10}, {"start": 8, "dur": 2})
    assert nodes.select("dur_ns", "x_busy_ns").row(0) == (15, 15)


def test_copies_alone_stay_copies() -> None:
    copy = {"kind": Kind.MEMCPY, "nbytes": 100}
    nodes = spans(
        {"start": 0, **copy}, {"start": 2, **copy}, {"stream": "s9"}, {"stream": "s9", **copy}
    )
    assert nodes.select("kind", "bytes", "name").rows() == [
        ("memcpy", 200, "k +1 copy"),
        ("compute", None, "k +1 kernel"),
    ]


def test_a_span_is_named_by_what_takes_most_of_its_time() -> None:
    entries = [{"start": 10 * k, "dur": 1, "name": "add"} for k in range(8)]
    ops = issued(*entries, {"start": 90, "dur": 9, "name": "mm"})
    nodes, _ = build_nodes(ops, grain="communication", unit="operator")
    assert nodes["name"].to_list() == ["mm +8 operators"]
    assert build_nodes(ops, grain="kernel")[0]["name"].to_list() == [*["add"] * 8, "mm"]


def test_the_batch_of_a_coalesced_launch() -> None:
    nodes, found = build_nodes(
        issued({"start": 0}, {"start": 2, "comm": COMM, "batch": 0}, {"start": 2, "comm": COMM, "batch": 0}),
        grain="communication",
    )  # fmt: skip
    assert nodes["batch"].to_list() == [None, 0, 0]
    assert [index for index, _ in found] == [1, 2]


def test_kernel_grain_keeps_everything_and_attaches_arguments() -> None:
    ops = issued({"start": 0}, {"start": 2}, {"start": 4, "comm": COMM})
    extra = pl.DataFrame(
        {"row": [0, 1, 2], "x_arg_a": ["p", None, "q"]}, schema_overrides={"row": pl.UInt32}
    )
    nodes, found = build_nodes(ops, grain="kernel", extra=extra)
    assert nodes["x_arg_a"].to_list() == ["p", None, "q"]
    assert nodes["index"].to_list() == [0, 1, 2]
    assert found == [(2, COMM)]
    assert "x_busy_ns" not in nodes.columns
