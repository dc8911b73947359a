"""From the tables of an Nsight Systems export to one profile for each process.

The events come out as the PyTorch profiler would have written them, so that everything after
is shared: launches and kernels are joined by (process, correlation), NVTX ranges are
annotations, and NCCL's ranges take the part of `record_param_comms`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.converters.groups import NamedGroup
from prismtrace.converters.kineto.names import CommPatterns, collective_kind
from prismtrace.converters.kineto.records import SYNC_SCHEMA
from prismtrace.converters.nsys.database import Database
from prismtrace.converters.nsys.nccl import (
    Call,
    Payloads,
    Record,
    communicators,
    records_of_calls,
)
from prismtrace.converters.nsys.tables import GPU_TABLES, Process, Tables, read_tables
from prismtrace.converters.profile import CATEGORIES, Profile
from prismtrace.errors import InputFileError
from prismtrace.schema import Kind

__all__ = ["Export", "read_export"]

_CATEGORY = pl.Enum(CATEGORIES)
_COMM_SCHEMA: Mapping[str, Any] = {
    "row": pl.UInt32(),
    "collective": pl.String(),
    "nbytes": pl.Int64(),
    "share": pl.Boolean(),
    "pg_name": pl.String(),
    "group_size": pl.Int64(),
    "reduce_op": pl.String(),
    "peer": pl.Int64(),
    "root": pl.Int64(),
    "communicators": pl.Int64(),
    "input_dims": pl.String(),
    "input_type": pl.String(),
    "concrete_inputs": pl.List(pl.String()),
    "seq": pl.Int64(),
}
_RECORD = "record_param_comms"
# What torch.autograd.profiler.emit_nvtx adds to the names of operators and annotations.
_SUFFIX = re.compile(r",? ?(?:op_id|seq|sizes|input_op_ids) = .*", re.DOTALL)
_SIZES = re.compile(r"sizes = (\[.{0,4000}?\])(?:, input_op_ids|$)", re.DOTALL)
_OPERATOR = re.compile(r"\w+::[\w.]+")
_BACKWARD = "autograd::engine::evaluate_function"
_SYNC_KINDS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
_CUT_SHORT = "the file was cut short or damaged before them: copy it again, whole, or export again"
_OTHER_DEVICE = 10**6  # added to the numbers of streams


@dataclass(frozen=True)
class Export:
    """The rows of an export, and the processes that ran kernels, by device and process id.

    Profiles are made one at a time, for each is larger than its rows.
    """

    path: Path
    epoch_ns: int
    keep_args: tuple[str, ...]
    patterns: CommPatterns
    processes: tuple[Process, ...]
    tables: Tables
    payloads: Payloads

    def profile(self, pid: int) -> tuple[Profile, tuple[NamedGroup, ...]]:
        """What one process did, and the communicators that it was in."""
        return _profile(self, self.tables.of(pid))


def read_export(
    database: Database,
    path: Path,
    epoch_ns: int,
    keep_args: Sequence[str],
    patterns: CommPatterns,
    counts: Counter[str],
) -> Export:
    """Read an export.

    Args:
        database: an open export.
        path: its name.
        epoch_ns: added to every time.
        keep_args: columns of the table of kernels to keep as x_arg_<name>.
        patterns: which kernels communicate.
        counts: what was read, dropped and assumed in the file as a whole.

    Raises:
        InputFileError: no process ran a kernel, or times are impossible.
    """
    tables = read_tables(database, keep_args, counts)
    processes = tables.processes()
    if not processes:
        raise InputFileError(
            "no kernel is in the export",
            where=str(path),
            hint=_CUT_SHORT
            if counts["truncated"] or counts["damaged-gzip"]
            else "record GPU work: nsys profile --trace cuda,nvtx",
        )
    _check_times(tables, epoch_ns, path)
    payloads = Payloads(database, counts)
    return Export(path, epoch_ns, tuple(keep_args), patterns, processes, tables, payloads)


def _check_times(tables: Tables, epoch_ns: int, path: Path) -> None:
    for table in (*tables.gpu.values(), tables.runtime, tables.nvtx, tables.syncs):
        if not table.height:
            continue
        first, last = table["start"].min(), table["end"].max()
        # Half the range, so that no sum or difference overflows.
        if abs(int(first) + epoch_ns) > 2**62 or abs(int(last) + epoch_ns) > 2**62:  # type: ignore[arg-type]
            raise InputFileError(
                "times lie beyond the year 2100",
                where=str(path),
                hint="the file was changed or is damaged: export it again",
            )


def _profile(export: Export, tables: Tables) -> tuple[Profile, tuple[NamedGroup, ...]]:
    keep_args, patterns = export.keep_args, export.patterns
    counts: Counter[str] = Counter()
    gpu = _gpu_events(tables, keep_args, counts)
    ranges, calls = _ranges(tables.nvtx, export.payloads)
    records, groups = _records(tables, gpu, ranges, calls, patterns, counts)
    if records is not None:
        ranges = ranges.filter(pl.col("name") != _RECORD)
    parts = [gpu, _runtime_events(tables), ranges, _sync_events(tables)]
    frames = [part for part in (*parts, records) if part is not None]
    events = (
        pl.concat(frames, how="diagonal")
        .with_columns(pl.col("dur_ns") - pl.col("start_ns"), pl.col("start_ns") + export.epoch_ns)
        .with_columns(pl.col("dur_ns").clip(0))
        .with_row_index("row")
    )
    counts["clamped-negative-duration"] += sum(
        part.filter(pl.col("dur_ns") < pl.col("start_ns")).height for part in frames
    )
    counts["kept"] += events.height
    comms = events.filter(pl.col("name") == _RECORD)
    streams = _communicating_streams(gpu, patterns)
    silent = records is None or records["pg_name"].null_count() == records.height
    profile = Profile(
        path=export.path,
        events=events.select(
            "row", "cat", "name", "tid", "start_ns", "dur_ns", "correlation", "stream", "bytes",
            *[f"x_arg_{name}" for name in keep_args],
        ),
        comms=_comms(comms, streams if silent else 1),
        syncs=_syncs(events, counts),
        counts=dict(counts),
        has_gpu=True,
    )  # fmt: skip
    return profile, groups


def _gpu_events(tables: Tables, keep_args: Sequence[str], counts: Counter[str]) -> pl.DataFrame:
    """Kernels, copies, sets and graphs as events whose `dur_ns` still is the end."""
    parts = []
    for name, category in GPU_TABLES.items():
        part = tables.gpu[name]
        extra = [pl.col(arg).alias(f"x_arg_{arg}") for arg in keep_args if arg in part.columns]
        parts.append(
            part.select(
                pl.lit(category, dtype=_CATEGORY).alias("cat"),
                "name", "device", "context", "green", "start", "end", "correlation", "stream",
                "bytes", *extra,
            )
        )  # fmt: skip
    gpu = pl.concat(parts, how="diagonal")
    counts["opaque-graph"] += tables.gpu["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"].height
    absent = [name for name in keep_args if f"x_arg_{name}" not in gpu.columns]
    gpu = gpu.with_columns(pl.lit(None, dtype=pl.Int64).alias(f"x_arg_{name}") for name in absent)
    devices = tables.devices()
    if len(devices) > 1:
        # Streams of different devices may have the same number.
        counts["several-devices"] += len(devices)
        shift = pl.col("device").replace_strict(
            devices, [_OTHER_DEVICE * k for k in range(len(devices))], return_dtype=pl.Int64
        )
        gpu = gpu.with_columns(pl.col("stream").fill_null(0) + shift)
    return gpu.rename({"start": "start_ns", "end": "dur_ns"}).drop("device", "context", "green")


def _runtime_events(tables: Tables) -> pl.DataFrame:
    return tables.runtime.select(
        pl.lit("cuda_runtime", dtype=_CATEGORY).alias("cat"),
        "name", "tid", "correlation", start_ns="start", dur_ns="end",
    )  # fmt: skip


def _ranges(nvtx: pl.DataFrame, payloads: Payloads) -> tuple[pl.DataFrame, dict[int, list[Call]]]:
    """NVTX ranges as events, and NCCL's calls by thread."""
    is_call = pl.col("name").str.contains(r"^nccl[A-Z]")
    calls: dict[int, list[Call]] = {}
    columns = ("tid", "start", "end", "name", "json", "binary")
    for tid, start, end, name, text, binary in (
        nvtx.filter(is_call).sort("start", maintain_order=True).select(columns).iter_rows()
    ):
        call = Call(start, end, name, payloads.decode(text, binary))
        calls.setdefault(tid, []).append(call)
    plain = nvtx.filter(~is_call)
    written = plain.get_column("name").to_list()
    names = [_SUFFIX.sub("", name) for name in written]
    dims = [_sizes(name) if name.startswith(_RECORD) else None for name in written]
    categories = ["cpu_op" if _is_operator(name) else "user_annotation" for name in names]
    events = plain.select(
        pl.Series("cat", categories, dtype=_CATEGORY),
        pl.Series("name", names, dtype=pl.String),
        "tid",
        pl.Series("dims", dims, dtype=pl.String),
        start_ns="start",
        dur_ns="end",
    )
    return events, calls


def _is_operator(name: str) -> bool:
    """Whether a range is around an operator; the others are what people wrote."""
    return name.startswith(_BACKWARD) or name == _RECORD or bool(_OPERATOR.fullmatch(name))


def _sizes(name: str) -> str | None:
    found = _SIZES.search(name)
    return found[1] if found else None


def _records(
    tables: Tables,
    gpu: pl.DataFrame,
    ranges: pl.DataFrame,
    calls: Mapping[int, list[Call]],
    patterns: CommPatterns,
    counts: Counter[str],
) -> tuple[pl.DataFrame | None, tuple[NamedGroup, ...]]:
    """NCCL's calls as `record_param_comms` events, and its communicators."""
    if not calls:
        return None, ()
    names = gpu.get_column("name").unique().to_list()
    launched = gpu.filter(
        pl.col("name").is_in([name for name in names if patterns.kind(name) is not None])
    ).select("correlation")
    launches = launched.join(tables.runtime, on="correlation").select("tid", "start").sort("start")
    by_thread: dict[int, list[int]] = {}
    for tid, start in launches.iter_rows():
        by_thread.setdefault(tid, []).append(start)
    exchanges = ranges.filter(
        pl.col("name").is_in(
            [
                name
                for name in ranges.get_column("name").unique().to_list()
                if name.startswith("nccl:") and collective_kind(name) is Kind.ALL_TO_ALL
            ]
        )
    ).sort("start_ns")
    rows: list[tuple[int, Record]] = []
    for tid, own in sorted(calls.items()):
        around = exchanges.filter(pl.col("tid") == tid).select("start_ns", "dur_ns").rows()
        found = records_of_calls(own, around, by_thread.get(tid, []), counts)
        rows += [(tid, record) for record in found]
    groups = communicators([call for own in calls.values() for call in own])
    size_of = {group.name: group.size for group in groups}
    fields = [name for name in _COMM_SCHEMA if name not in {"row", "communicators", "group_size"}]
    table = pl.DataFrame(
        [
            {
                "cat": "cpu_op", "name": _RECORD, "tid": tid,
                "start_ns": record.start_ns, "dur_ns": record.end_ns,
                "group_size": size_of.get(record.values.get("pg_name", "")),
                **{name: record.values.get(name) for name in fields},
            }
            for tid, record in rows
        ],
        schema={
            "cat": _CATEGORY, "name": pl.String, "tid": pl.Int64,
            "start_ns": pl.Int64, "dur_ns": pl.Int64, "group_size": pl.Int64,
            **{name: _COMM_SCHEMA[name] for name in fields},
        },
    )  # fmt: skip
    return table, groups


def _comms(events: pl.DataFrame, streams: int) -> pl.DataFrame:
    """What records say, as far as anything was recorded of it."""
    columns = []
    for name, dtype in _COMM_SCHEMA.items():
        if name == "communicators":
            columns.append(pl.lit(streams, dtype=dtype).alias(name))
        elif name in events.columns:
            columns.append(pl.col(name).cast(dtype))
        elif name == "input_dims" and "dims" in events.columns:
            columns.append(pl.col("dims").alias(name))
        else:
            columns.append(pl.lit(None, dtype=dtype).alias(name))
    return events.select(columns)


def _communicating_streams(gpu: pl.DataFrame, patterns: CommPatterns) -> int:
    pairs = gpu.filter(pl.col("cat") == "kernel").select("name", "stream").unique()
    return len({stream for name, stream in pairs.iter_rows() if patterns.kind(name) is not None})


def _sync_events(tables: Tables) -> pl.DataFrame:
    return tables.syncs.select(
        pl.lit("cuda_sync", dtype=_CATEGORY).alias("cat"),
        pl.col("kind").replace_strict(_SYNC_KINDS, return_dtype=pl.String).alias("name"),
        "correlation", "stream", "wait_on_stream", "wait_on_record_correlation",
        start_ns="start", dur_ns="end",
    )  # fmt: skip


def _syncs(events: pl.DataFrame, counts: Counter[str]) -> pl.DataFrame:
    found = events.filter(pl.col("cat") == "cuda_sync").select(
        "row",
        kind="name",
        wait_on_stream="wait_on_stream",
        wait_on_record_correlation="wait_on_record_correlation",
    )
    unknown = pl.col("kind").str.contains("Event") & pl.col("wait_on_record_correlation").is_null()
    counts["unresolved-sync-record"] += found.filter(unknown).height
    return found.select(pl.col(name).cast(dtype) for name, dtype in SYNC_SCHEMA.items())
