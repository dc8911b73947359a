"""Profiler traces of a few events, written by hand. Times in µs since the base of the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.converters import ConvertReport, convert
from prismtrace.trace import Trace, open_trace
from prismtrace.validation import validate

JsonEvent = dict[str, Any]

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def event(cat: str, name: str, ts: float, dur: float, tid: int | str, **args: Any) -> JsonEvent:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def kernel(name: str, ts: float, dur: float, stream: int = 7, **args: Any) -> JsonEvent:
    return event("kernel", name, ts, dur, stream, **{"stream": stream, "device": 0, **args})


def call(
    name: str, ts: float, correlation: int, tid: int = 100, dur: float = 2, **args: Any
) -> JsonEvent:
    return event("cuda_runtime", name, ts, dur, tid, correlation=correlation, **args)


def launched(
    name: str,
    launch: float,
    ts: float,
    dur: float,
    correlation: int,
    stream: int = 7,
    tid: int = 100,
    **args: Any,
) -> list[JsonEvent]:
    """A kernel and the call that launched it."""
    return [
        call("cudaLaunchKernel", launch, correlation, tid),
        kernel(name, ts, dur, stream, correlation=correlation, **args),
    ]


def record(kind: str, ts: float, dur: float, tid: int = 100, **args: Any) -> JsonEvent:
    """A `record_param_comms` entry; keyword names as in the metadata, spaces as underscores."""
    spelled = {name.replace("_", " "): value for name, value in args.items()}
    return event(
        "cpu_op", "record_param_comms", ts, dur, tid, **{"Collective name": kind, **spelled}
    )


def metadata(
    kind: str = "allreduce",
    group: str = "0",
    ranks: str = "[0, 1]",
    nelems: int = 1024,
    **args: Any,
) -> dict[str, Any]:
    """Arguments of a communication kernel as torch 2.5 and later write them."""
    return {
        "Collective name": kind,
        "In msg nelems": nelems,
        "Out msg nelems": nelems,
        "Group size": ranks.count(",") + 1,
        "dtype": "BFloat16",
        "Process Group Name": group,
        "Process Group Description": "undefined",
        "Process Group Ranks": ranks,
        **args,
    }


def document(
    *events: JsonEvent | list[JsonEvent],
    rank: int | None = 0,
    world_size: int = 1,
    groups: dict[str, list[int]] | None = None,
    **more: Any,
) -> dict[str, Any]:
    flat = [e for item in events for e in (item if isinstance(item, list) else [item])]
    info: dict[str, Any] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    if groups is not None:
        info["pg_config"] = [
            {"pg_name": name, "pg_desc": "undefined", "pg_size": len(ranks), "ranks": ranks}
            for name, ranks in groups.items()
        ]
    about = {} if rank is None else {"distributedInfo": info}
    return {"schemaVersion": 1, **about, "baseTimeNanoseconds": 10**18, **more, "traceEvents": flat}


def write_files(folder: Path, *documents: dict[str, Any] | str | bytes) -> list[Path]:
    """Write documents (or raw text) as ``0.json``, ``1.json``, …"""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, content in enumerate(documents):
        path = folder / f"{number}.json"
        text = json.dumps(content) if isinstance(content, dict) else content
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        paths.append(path)
    return paths


def run(
    folder: Path, inputs: list[Path] | Path, *, valid: bool = True, **options: Any
) -> tuple[Trace, ConvertReport]:
    """Convert, require that the result is valid, and open it."""
    output = folder / "run.parquet"
    report = convert(inputs, output, **options)
    trace = open_trace(output)
    if valid:
        errors = [v for v in validate(trace) if v.severity == "error"]
        assert not errors, "\n".join(map(str, errors))
    return trace, report


def rows(trace: Trace, *columns: str) -> list[tuple[Any, ...]]:
    return trace.nodes.select(*columns).collect().rows()


def edges(trace: Trace) -> set[tuple[str, str]]:
    """Directional edges of a one-rank trace as pairs of node names."""
    nodes = trace.nodes.select("rank", "index", pl.col("name").cast(pl.String), "deps").collect()
    name = {(rank, index): text for rank, index, text, _ in nodes.iter_rows()}
    return {
        (name[rank, index - distance], text)
        for rank, index, text, deps in nodes.iter_rows()
        for distance in deps
    }
