"""Small Nsight Systems exports, made up."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPOCH_NS = 1_700_000_000_000_000_000
SEND_RECV = "ncclDevKernel_SendRecv"
HOST_BITS = 0x0001_0000 << 40

GPU = "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, greenContextId INTEGER, "
GPU += "streamId INTEGER, correlationId INTEGER, globalPid INTEGER"
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT",
    "TARGET_INFO_SYSTEM_ENV": "name TEXT, value TEXT",
    "META_DATA_CAPTURE": "name TEXT, value TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": GPU
    + ", demangledName INTEGER, shortName INTEGER, gridX INTEGER, registersPerThread INTEGER, "
    "graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": GPU + ", bytes INTEGER, copyKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": GPU + ", bytes INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": GPU + ", graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": GPU
    + ", syncType INTEGER, eventId INTEGER, eventSyncId INTEGER",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "streamId INTEGER, correlationId INTEGER, "
    "globalPid INTEGER, eventId INTEGER, eventSyncId INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, "
    "textId INTEGER, domainId INTEGER, jsonTextId INTEGER, jsonText TEXT, binaryData BLOB",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "domainId INTEGER, schemaId INTEGER, idx INTEGER, "
    "type INTEGER, name TEXT, offset INTEGER",
}
INIT, SIZED, PEER, ROOT = 16777218, 16777223, 16777225, 16777222
_ID, _SIZE = (18, "NCCL communicator ID"), (22, "Message size [bytes]")
SCHEMAS = {
    INIT: (_ID, (5, "No. of ranks"), (5, "Rank"), (5, "CUDA device")),
    SIZED: (_ID, _SIZE, (16777232, "Reduction operation")),
    PEER: (_ID, _SIZE, (5, "Peer rank")),
    ROOT: (_ID, _SIZE, (5, "Root")),
}


def payload(schema: int, *values: int) -> bytes:
    """Bytes as the export has them: a header, then the fields of the schema."""
    form = {18: "Q", 22: "Q"}
    body = struct.pack(
        "<" + "".join(form.get(kind, "i") for kind, _ in SCHEMAS[schema]),
        *values,
        *[0] * (len(SCHEMAS[schema]) - len(values)),
    )
    return struct.pack("<IIIIQQ", 1, 0, schema, 0, len(body), 32 + len(body)) + body


def global_pid(pid: int) -> int:
    return HOST_BITS + (pid << 24)


@dataclass
class Export:
    """Rows by table; written by `write`. Times are ns since the session began."""

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    strings: dict[str, int] = field(default_factory=dict)
    correlation: int = 100

    def add(self, table: str, **values: Any) -> None:
        self.rows.setdefault(table, []).append(values)

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def call(
        self, name: str, at: int, *, pid: int = 1, tid: int | None = None, ns: int = 10
    ) -> int:
        """A call of the runtime; returns its correlation."""
        self.correlation += 1
        self.add(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=at, end=at + ns, globalTid=global_pid(pid) + (tid or pid),
            correlationId=self.correlation, nameId=self.text(f"{name}_v7000"),
        )  # fmt: skip
        return self.correlation

    def gpu(
        self, table: str, start: int, ns: int, *, correlation: int | None, pid: int = 1,
        stream: int = 7, device: int = 0, **more: Any,
    ) -> None:  # fmt: skip
        self.add(
            f"CUPTI_ACTIVITY_KIND_{table}",
            start=start, end=start + ns, deviceId=device, contextId=1, streamId=stream,
            correlationId=correlation, globalPid=global_pid(pid), **more,
        )  # fmt: skip

    def kernel(
        self, name: str, start: int, ns: int = 50, *, launch: int | None = None, pid: int = 1,
        tid: int | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """A kernel and its launch, by default 20 ns before."""
        at = start - 20 if launch is None else launch
        correlation = self.call("cudaLaunchKernel", at, pid=pid, tid=tid)
        names = {"demangledName": self.text(name), "shortName": self.text(name)}
        self.gpu("KERNEL", start, ns, correlation=correlation, pid=pid, **names, **more)

    def range(
        self, text: str, start: int, end: int | None, *, pid: int = 1, tid: int | None = None,
        kind: int = 59, **more: Any,
    ) -> None:  # fmt: skip
        """An NVTX range of push and pop."""
        thread = global_pid(pid) + (tid or pid)
        self.add("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=thread, text=text,
                 domainId=0, **more)  # fmt: skip

    def describe(self, host: str = "host0", **environment: str) -> None:
        """Session start, host, and what the program's environment was."""
        self.add("TARGET_INFO_SESSION_START_TIME", utcEpochNs=EPOCH_NS)
        self.add("TARGET_INFO_SYSTEM_ENV", name="Hostname", value=host)
        for name, value in environment.items():
            self.add("META_DATA_CAPTURE", name="PROCESS_0:ENVIRONMENT_VARIABLE",
                     value=f'{name}="{value}"')  # fmt: skip

    def schemas(self) -> None:
        """What the payloads of NCCL's calls look like."""
        for schema, entries in SCHEMAS.items():
            offset = 0
            for index, (kind, name) in enumerate(entries):
                self.add("NVTX_PAYLOAD_SCHEMA_ENTRIES", domainId=1, schemaId=schema, idx=index,
                         type=kind, name=name, offset=offset or None)  # fmt: skip
                offset += 8 if kind in (18, 22) else 4

    def write(
        self,
        path: Path,
        *,
        without: Iterable[str] = (),
        tables: Mapping[str, str] = TABLES,
        page_bytes: int = 4096,
    ) -> Path:
        """Write the file; `without` names tables, or columns as ``TABLE.column``, to leave out."""
        left_out = set(without)
        rows = {**self.rows, "StringIds": [{"id": i, "value": s} for s, i in self.strings.items()]}
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA page_size = {page_bytes}")
            connection.execute("PRAGMA journal_mode = OFF")
            for table, columns in tables.items():
                if table in left_out:
                    continue
                kept = [
                    column.strip()
                    for column in columns.split(",")
                    if f"{table}.{column.split()[0]}" not in left_out
                ]
                connection.execute(f"CREATE TABLE {table} ({', '.join(kept)})")
                names = [column.split()[0] for column in kept]
                insert(connection, table, names, rows.get(table, ()))
            connection.commit()
        return path


def insert(
    connection: sqlite3.Connection, table: str, names: Sequence[str], rows: Iterable[Any]
) -> None:
    marks = ", ".join("?" * len(names))
    connection.executemany(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})",  # noqa: S608
        [[row.get(name) for name in names] for row in rows],
    )


def collective(
    export: Export, name: str, at: int, *, pid: int = 1, stream: int = 20, ns: int = 100,
    kernel: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    start: int | None = None, **more: Any,
) -> None:  # fmt: skip
    """A call of NCCL's at `at` that launches one kernel."""
    export.range(name, at, at + 30, pid=pid, **more)
    began = at + 40 if start is None else start
    export.kernel(kernel, began, ns, launch=at + 10, pid=pid, stream=stream)


def small_export(rank: int = 0, world: int = 2) -> Export:
    """A rank of a job: two steps of a gemm, an all_reduce with a payload, and a gemm."""
    export = Export()
    export.describe(RANK=str(rank), WORLD_SIZE=str(world))
    export.schemas()
    export.range("ncclCommInitRank", 0, 500, binaryData=payload(INIT, 77, world, rank))
    for step in range(2):
        t = 10_000 * (step + 1)
        export.range(f"step {step}", t, t + 5_000)
        export.range("forward", t + 50, t + 1_000)
        export.kernel("gemm", t + 200, 400, launch=t + 100)
        collective(
            export, "ncclAllReduce", t + 1_500, start=t + 1_600,
            binaryData=payload(SIZED, 77, 4096, 0),
        )  # fmt: skip
        export.kernel("gemm2", t + 2_000, 300, launch=t + 1_900)
    return export


def two_streams(export: Export) -> Export:
    """Add what else can be in an export: copies, a graph, a wait for an event, a message."""
    copy = export.call("cudaMemcpyAsync", 30_000)
    export.gpu("MEMCPY", 30_100, 9, correlation=copy, bytes=64, copyKind=1)
    clear = export.call("cudaMemsetAsync", 30_200)
    export.gpu("MEMSET", 30_300, 9, correlation=clear, bytes=8)
    graph = export.call("cudaGraphLaunch", 30_400)
    export.gpu("GRAPH_TRACE", 30_500, 90, correlation=graph, graphId=5)
    event = {"eventId": 3, "eventSyncId": 11}
    recorded = export.call("cudaEventRecord", 31_000)
    pid = export.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["globalPid"]
    export.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", streamId=7, correlationId=recorded,
               globalPid=pid, **event)  # fmt: skip
    waits = export.call("cudaStreamWaitEvent", 31_100)
    export.gpu("SYNCHRONIZATION", 31_100, 5, correlation=waits, stream=20, syncType=2, **event)
    export.range("ncclGroupStart", 32_000, 32_005)
    for k, name in enumerate(("ncclSend", "ncclRecv")):
        data = payload(PEER, 77, 256, 1)
        export.range(name, 32_010 + 10 * k, 32_015 + 10 * k, binaryData=data)
    export.range("ncclGroupEnd", 32_040, 32_090)
    export.kernel(SEND_RECV, 32_200, launch=32_060, stream=20)
    return export
