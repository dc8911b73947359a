"""The tables of an export that conversion uses, with names instead of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from prismtrace.converters.kineto.records import NOTHING
from prismtrace.converters.nsys.database import Database

__all__ = ["GPU_TABLES", "Process", "Tables", "read_tables"]

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_EVENT = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
GPU_TABLES: Mapping[str, str] = {
    _KERNEL: "kernel",
    _MEMCPY: "gpu_memcpy",
    _MEMSET: "gpu_memset",
    # A graph that was recorded as a whole: its kernels are not in the file.
    _GRAPH: "kernel",
}
"""Table -> category of its events."""
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD",
           9: "HtoH", 10: "PtoP"}  # fmt: skip
_PROCESS_BITS = ~0xFFFFFF
# Calls that launch work or synchronise; all others are left in the file.
_CALLS = ("Launch", "Memcpy", "Memset", "MemPrefetch", "Synchronize", "EventRecord", "WaitEvent")


class Process(NamedTuple):
    """A process, by its globalPid, and the device that it used most, as it counts them."""

    device: int
    pid: int


@dataclass(frozen=True)
class Tables:
    """Rows of all processes, or of one; `pid` is the globalPid.

    gpu: by table: pid, start, end, name, device, context, green, stream, correlation, bytes, and
        columns asked for. runtime: pid, tid, start, end, name, correlation. nvtx: pid, tid, start,
        end, name, json, binary. syncs: pid, start, end, kind, stream, correlation,
        wait_on_stream, wait_on_record_correlation.
    """

    gpu: Mapping[str, pl.DataFrame]
    runtime: pl.DataFrame
    nvtx: pl.DataFrame
    syncs: pl.DataFrame

    def processes(self) -> tuple[Process, ...]:
        """Those that ran kernels or graphs, by device and number."""
        both = pl.concat([self.gpu[_KERNEL].select("pid"), self.gpu[_GRAPH].select("pid")])
        pids = both.get_column("pid").unique().to_list()
        return tuple(sorted(Process(self.of(pid).devices()[0], pid) for pid in pids))

    def devices(self) -> list[int]:
        """Devices that worked, the busiest first."""
        work = pl.concat([table.select("device", "start", "end") for table in self.gpu.values()])
        busy = work.group_by("device").agg(busy=(pl.col("end") - pl.col("start")).sum())
        return busy.sort("busy", "device", descending=[True, False]).get_column("device").to_list()

    def of(self, pid: int) -> Tables:
        """The rows of one process."""
        own = pl.col("pid") == pid
        return Tables(
            {name: table.filter(own) for name, table in self.gpu.items()},
            self.runtime.filter(own),
            self.nvtx.filter(own),
            self.syncs.filter(own),
        )


def read_tables(database: Database, keep_args: Sequence[str], counts: Counter[str]) -> Tables:
    """Read what conversion needs; rows are counted as `events`."""
    only = _only_process(database)
    runtime = _runtime(database, counts)
    return Tables(
        gpu={
            _KERNEL: _kernels(database, keep_args, only, counts),
            _MEMCPY: _copies(database, only, counts),
            _MEMSET: _gpu(database, _MEMSET, ("bytes",), only, counts).with_columns(
                name=pl.lit("Memset (Device)")
            ),
            _GRAPH: _graphs(database, only, counts),
        },
        runtime=runtime,
        nvtx=_nvtx(database, counts),
        syncs=_syncs(database, runtime, only, counts),
    )


def _only_process(database: Database) -> int | None:
    """The process that calls are of if there is just one; old exports do not say it of kernels."""
    if "globaltid" not in database.columns(_RUNTIME):
        return None
    query = f"SELECT DISTINCT globalTid & {_PROCESS_BITS} FROM {_RUNTIME}"  # noqa: S608
    found = [pid for (pid,) in database.rows(query) if isinstance(pid, int)]
    return found[0] if len(found) == 1 else None


_GPU_COLUMNS = {
    "start": "start",
    "end": "end",
    "deviceId": "device",
    "contextId": "context",
    "greenContextId": "green",
    "streamId": "stream",
    "correlationId": "correlation",
    "globalPid": "pid",
}


def _gpu(
    database: Database,
    table: str,
    more: Sequence[str],
    only: int | None,
    counts: Counter[str],
) -> pl.DataFrame:
    frame = database.integers(table, [*_GPU_COLUMNS, *more]).rename(_GPU_COLUMNS)
    counts["events"] += frame.height
    if "bytes" not in more:
        frame = frame.with_columns(bytes=pl.lit(None, dtype=pl.Int64))
    # 0 is what an orphan's correlation looks like.
    correlation = pl.when(pl.col("correlation") != 0).then(pl.col("correlation"))
    frame = frame.with_columns(
        pl.col("device").fill_null(0),
        pid=pl.col("pid").fill_null(pl.lit(only, dtype=pl.Int64)),
        correlation=correlation,
    )
    lost = frame.get_column("pid").null_count()
    counts["dropped-no-process"] += lost
    return frame.filter(pl.col("pid").is_not_null()) if lost else frame


def _kernels(
    database: Database, keep_args: Sequence[str], only: int | None, counts: Counter[str]
) -> pl.DataFrame:
    ids = ("demangledName", "shortName", "mangledName")
    args = [name for name in keep_args if name.lower() in database.columns(_KERNEL)]
    wanted = [name for name in args if name not in {*_GPU_COLUMNS, *ids}]
    frame = _gpu(database, _KERNEL, [*ids, *wanted], only, counts)
    # The names are in one table; a kernel's is there under up to three numbers.
    names = frame.select(name_id=pl.coalesce(ids)).get_column("name_id")
    texts = database.strings(names.drop_nulls().unique().sort().to_list())
    counts["kernel-without-name"] += names.null_count()
    known = pl.Series("name", names).replace_strict(texts, default=None, return_dtype=pl.String)
    renamed = {name: _GPU_COLUMNS[name] for name in args if name in _GPU_COLUMNS}
    return frame.with_columns(
        name=known.fill_null("unknown kernel"),
        **{name: pl.col(column) for name, column in renamed.items()},
    ).drop([name for name in ids if name not in args])


def _copies(database: Database, only: int | None, counts: Counter[str]) -> pl.DataFrame:
    frame = _gpu(database, _MEMCPY, ("bytes", "copyKind"), only, counts)
    kind = pl.col("copyKind").replace_strict(_COPIES, default="unknown", return_dtype=pl.String)
    return frame.with_columns(name=pl.format("Memcpy {}", kind)).drop("copyKind")


def _graphs(database: Database, only: int | None, counts: Counter[str]) -> pl.DataFrame:
    frame = _gpu(database, _GRAPH, ("graphId",), only, counts)
    number = pl.col("graphId").fill_null(0)
    return frame.with_columns(name=pl.format("CUDA graph {}", number)).drop("graphId")


def _runtime(database: Database, counts: Counter[str]) -> pl.DataFrame:
    columns = database.columns(_RUNTIME)
    where = ""
    names: dict[int, str] = {}
    if "nameid" in columns:
        query = f"SELECT DISTINCT nameId FROM {_RUNTIME}"  # noqa: S608
        used = [i for (i,) in database.rows(query) if isinstance(i, int)]
        texts = database.strings(sorted(used))
        names = {
            i: text.split("_v", 1)[0]
            for i, text in texts.items()
            if any(part in text for part in _CALLS)
        }
        if texts:
            where = f"nameId IN ({', '.join(map(str, sorted(names)))})"
    frame = database.integers(
        _RUNTIME, ("start", "end", "globalTid", "correlationId", "nameId"), where=where
    )
    counts["events"] += frame.height
    tid = pl.col("globalTid")
    return frame.select(
        "start",
        "end",
        pid=_process_of("globalTid"),
        tid=tid,
        correlation="correlationId",
        name=pl.col("nameId").replace_strict(names, default="", return_dtype=pl.String),
    )


def _process_of(column: str) -> pl.Expr:
    return pl.col(column) - pl.col(column).mod(2**24)


def _nvtx(database: Database, counts: Counter[str]) -> pl.DataFrame:
    """Ranges that have ended, but for PyTorch's own operators, which tell nothing here."""
    schema = {
        "pid": pl.Int64, "tid": pl.Int64, "start": pl.Int64, "end": pl.Int64,
        "name": pl.String, "json": pl.String, "binary": pl.Binary,
    }  # fmt: skip
    columns = database.columns("NVTX_EVENTS")
    if {"end", "eventtype"} <= set(columns):
        query = "SELECT count(*) FROM NVTX_EVENTS WHERE end IS NULL AND eventType IN (59, 60)"
        counts["dropped-unfinished-range"] += sum(int(n) for (n,) in database.rows(query))
    if not {"start", "end", "globaltid"} <= set(columns):
        return pl.DataFrame(schema=schema)
    joins = ""
    text = "e.text" if "text" in columns else "NULL"
    json = "e.jsonText" if "jsontext" in columns else "NULL"
    if {"id", "value"} <= set(database.columns("StringIds")):
        if "textid" in columns:
            joins += " LEFT JOIN StringIds s ON s.id = e.textId"
            text = f"ifnull({text}, s.value)"
        if "jsontextid" in columns:
            joins += " LEFT JOIN StringIds j ON j.id = e.jsonTextId"
            json = f"ifnull({json}, j.value)"
    binary = "e.binaryData" if "binarydata" in columns else "NULL"
    payload = f"CASE WHEN substr({text}, 1, 4) = 'nccl' THEN"
    query = (
        f"SELECT e.start, e.end, e.globalTid, substr({text}, 1, 4096), "  # noqa: S608
        f"{payload} substr({json}, 1, 65536) END, "
        f"{payload} substr({binary}, 1, 4096) END FROM NVTX_EVENTS e{joins} WHERE typeof(e.start) = 'integer' "
        "AND typeof(e.end) = 'integer' AND typeof(e.globalTid) = 'integer' "
        f"AND typeof({text}) = 'text' AND substr({text}, 1, 6) <> 'aten::'"
    )
    frames = [
        pl.DataFrame(
            {
                "start": pl.Series([row[0] for row in rows], dtype=pl.Int64),
                "end": pl.Series([row[1] for row in rows], dtype=pl.Int64),
                "tid": pl.Series([row[2] for row in rows], dtype=pl.Int64),
                "name": [row[3] for row in rows],
                "json": pl.Series([_of(str, row[4]) for row in rows], dtype=pl.String),
                "binary": pl.Series([_of(bytes, row[5]) for row in rows], dtype=pl.Binary),
            }
        )
        for rows in database.blocks(query, texts=True)
    ]
    found = pl.concat(frames) if frames else pl.DataFrame(schema=schema).drop("pid")
    counts["events"] += found.height
    return found.with_columns(pid=_process_of("tid")).select(*schema)


def _of(kind: type, value: object) -> object:
    return value if isinstance(value, kind) else None


def _syncs(
    database: Database, runtime: pl.DataFrame, only: int | None, counts: Counter[str]
) -> pl.DataFrame:
    """Synchronizations that a kept call stands for (not queries), with what they waited for."""
    names = ("start", "end", "streamId", "correlationId", "globalPid", "syncType", "eventId",
             "eventSyncId")  # fmt: skip
    frame = database.integers(_SYNC, names).rename(
        {"streamId": "stream", "correlationId": "correlation", "globalPid": "pid",
         "syncType": "kind"}
    )  # fmt: skip
    frame = frame.with_columns(
        pid=pl.col("pid").fill_null(pl.lit(only, dtype=pl.Int64)),
        stream=pl.when(~pl.col("stream").is_in(list(NOTHING))).then(pl.col("stream")),
    ).filter(pl.col("kind").is_in([1, 2, 3, 4]))
    frame = frame.join(runtime.select("pid", "correlation"), on=["pid", "correlation"], how="semi")
    counts["events"] += frame.height
    events = database.integers(
        _EVENT, ("streamId", "correlationId", "globalPid", "eventId", "eventSyncId"), ()
    ).rename({"globalPid": "pid", "correlationId": "record", "streamId": "record_stream"})
    counts["events"] += events.height
    events = events.with_columns(pid=pl.col("pid").fill_null(pl.lit(only, dtype=pl.Int64)))
    return _resolved(frame, events)


def _resolved(syncs: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Add the record that each synchronization waits for: of the same event, the latest before."""
    by = ["pid", "eventId"]
    if syncs.get_column("eventSyncId").null_count() < syncs.height:
        by.append("eventSyncId")
    found = (
        syncs.with_row_index("at")
        .filter(pl.col("correlation").is_not_null())
        .sort("correlation")
        .join_asof(
            events.drop_nulls([*by, "record"]).sort("record").with_columns(was="record"),
            left_on="correlation",
            right_on="was",
            by=by,
            strategy="backward",
            allow_exact_matches=False,
            check_sortedness=False,
        )
        .select("at", wait_on_stream="record_stream", wait_on_record_correlation="record")
    )
    return (
        syncs.with_row_index("at")
        .join(found, on="at", how="left", maintain_order="left")
        .drop("at", "eventId", "eventSyncId")
    )
