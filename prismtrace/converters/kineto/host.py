"""CPU traces: a job without GPU events whose communication runs over gloo.

Threads play the part of streams. A thread's outermost operators are its computation; each
``gloo:…`` annotation is a communication, issued by the `c10d::…` call before it. Where a
thread pauses and a communication ends within the pause, the thread is taken to have waited
for it: gloo leaves no record of waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import polars as pl

from prismtrace.converters.kineto.carried import CommOp, describe_gloo, shape_elements
from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.kineto.names import collective_kind
from prismtrace.converters.kineto.reader import KinetoFile
from prismtrace.schema import Kind

__all__ = ["host_operations"]

# Shorter pauses between operators are the interpreter at work.
_PAUSE_NS = 20_000


@dataclass(frozen=True)
class _Computation:
    row: int
    thread: int
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class _Communication:
    row: int
    name: str
    comm: CommOp
    thread: int
    start_ns: int
    end_ns: int
    issue_ns: int
    issuer: int


def host_operations(file: KinetoFile, counts: Counter[str]) -> IssuedOps:
    """Operations of a CPU trace in issue order, with dependencies."""
    communications = _communications(file, counts)
    computations = _outermost(file)
    time_by_thread: Counter[int] = Counter()
    for work in computations:
        time_by_thread[work.thread] += work.end_ns - work.start_ns
    # The busiest thread comes first: it runs the training loop on every rank.
    threads = sorted(time_by_thread, key=lambda tid: (-time_by_thread[tid], tid))
    labels = {tid: f"cpu thread {number}" for number, tid in enumerate(threads)}
    workers = sorted({comm.thread for comm in communications})
    entries: list[tuple[int, int, _Computation | _Communication]] = [
        *((work.start_ns, 1, work) for work in computations),
        *((comm.issue_ns, 0, comm) for comm in communications),
    ]
    ops = IssuedOps()
    for issue_ns, _, entry in sorted(entries, key=lambda item: item[:2]):
        if isinstance(entry, _Communication):
            ops.append(
                name=entry.name,
                kind=entry.comm.kind,
                stream=_worker_label(entry, workers, labels),
                start_ns=entry.start_ns,
                dur_ns=entry.end_ns - entry.start_ns,
                row=entry.row,
                issue_ns=issue_ns,
                launch_ns=issue_ns,
                launch_tid=entry.issuer,
                nbytes=entry.comm.nbytes,
                comm=entry.comm,
            )
        else:
            ops.append(
                name=entry.name,
                kind=Kind.COMPUTE,
                stream=labels[entry.thread],
                start_ns=entry.start_ns,
                dur_ns=entry.end_ns - entry.start_ns,
                row=entry.row,
                issue_ns=issue_ns,
                launch_ns=issue_ns,
                launch_tid=entry.thread,
            )
    _link(ops, counts)
    return ops


def _worker_label(comm: _Communication, workers: list[int], labels: dict[int, str]) -> str:
    if comm.thread in labels:
        # gloo's p2p spans sit on the calling thread but run beside it.
        return f"gloo {comm.comm.kind.value}"
    return f"gloo worker {workers.index(comm.thread)}"


def _outermost(file: KinetoFile) -> list[_Computation]:
    """Operators that no other operator encloses.

    `c10d::…` calls are left out: they hand over work, and block when they wait.
    """
    rows = (
        file.events.filter(pl.col("cat") == "cpu_op")
        .select("row", "tid", pl.col("name"), "start_ns", "dur_ns")
        .sort("tid", "start_ns", pl.col("dur_ns").neg(), maintain_order=True)
    )
    found: list[_Computation] = []
    thread: int | None = None
    reached = 0
    for row, tid, name, start, duration in rows.iter_rows():
        if tid != thread:
            thread, reached = tid, -(2**63)
        if start < reached:
            continue
        reached = start + duration
        if not name.startswith("c10d::"):
            found.append(_Computation(row, tid, name, start, reached))
    return found


def _communications(file: KinetoFile, counts: Counter[str]) -> list[_Communication]:
    name = pl.col("name")
    described = {row["row"]: row for row in file.comms.iter_rows(named=True)}
    spans = (
        file.events.filter(name.str.starts_with("gloo:"))
        .select("row", "tid", name, "start_ns", "dur_ns", "rf_id")
        .sort("start_ns", "row")
    )
    calls = _Calls(file, described)
    found: list[_Communication] = []
    for row, tid, text, start, duration, rf_id in spans.iter_rows():
        call = calls.of(text, start, rf_id, described.get(row, {}))
        if call is None:
            counts["gloo-without-call"] += 1
        comm = describe_gloo(
            text, described.get(row, {}), None if call is None else described.get(call.row)
        )
        if comm is None:
            counts["unknown-gloo-operation"] += 1
            continue
        issue_ns, issuer = (start, tid) if call is None else (call.start_ns, call.tid)
        found.append(
            _Communication(row, text, comm, tid, start, start + duration, issue_ns, issuer)
        )
    return found


@dataclass(frozen=True)
class _Call:
    row: int
    start_ns: int
    tid: int
    rf_id: int
    elements: int | None


class _Calls:
    """The `c10d::…` call that issued a gloo operation.

    A work's record-function id is drawn right after that of its call: it belongs to the latest
    call of its kind with a lower id. Where ids are not recorded it belongs to the first call of
    its kind and size that is left; gloo's threads start works nearly in order.
    """

    def __init__(self, file: KinetoFile, described: Mapping[int, Mapping[str, Any]]) -> None:
        name = pl.col("name")
        calls = (
            file.events.filter(name.str.starts_with("c10d::"))
            .select("row", name, "start_ns", "tid", "rf_id")
            .sort("start_ns", "row")
        )
        self._waiting: dict[Kind, list[_Call]] = {}
        """Calls without a span yet, by start."""
        self._numbered: dict[Kind, list[_Call]] = {}
        """Calls with a record-function id, by id."""
        for row, text, start, tid, rf_id in calls.iter_rows():
            kind = collective_kind(text)
            if kind is not None:
                call = _Call(row, start, tid, rf_id or 0, shape_elements(described.get(row, {})))
                self._waiting.setdefault(kind, []).append(call)
                if call.rf_id:
                    self._numbered.setdefault(kind, []).append(call)
        for numbered in self._numbered.values():
            numbered.sort(key=lambda call: call.rf_id)

    def of(
        self, name: str, start_ns: int, rf_id: int | None, span: Mapping[str, Any]
    ) -> _Call | None:
        """The call behind a span, or null when it was made before the recording."""
        kind = collective_kind(name) or Kind.OTHER_COMM
        waiting = self._waiting.get(kind, [])
        if rf_id:
            numbered = self._numbered.get(kind, [])
            at = bisect_left(numbered, rf_id, key=lambda call: call.rf_id)
            found = numbered[at - 1] if at else None
        else:
            free = list(takewhile(lambda call: call.start_ns <= start_ns, waiting))
            elements = shape_elements(span)
            found = next((call for call in free if call.elements == elements), None)
            found = found or next(iter(free), None)
        if found is None or found not in waiting:
            return None
        waiting.remove(found)
        return found


def _link(ops: IssuedOps, counts: Counter[str]) -> None:
    """Program order of each thread, issue of communications, waits inferred from pauses."""
    last: dict[str, int] = {}
    last_of_thread: dict[int | None, int] = {}
    for position, comm in enumerate(ops.comm):
        stream = ops.stream[position]
        if stream in last:
            ops.deps[position] = {last[stream]}
        last[stream] = position
        tid = ops.launch_tid[position]
        if comm is None:
            last_of_thread[tid] = position
        elif tid in last_of_thread:
            ops.deps[position] = {*ops.deps[position], last_of_thread[tid]}
    _infer_waits(ops, counts)


def _infer_waits(ops: IssuedOps, counts: Counter[str]) -> None:
    ends = sorted((ops.end_ns(p), p) for p, comm in enumerate(ops.comm) if comm is not None)
    issuers = {ops.launch_tid[p] for p, comm in enumerate(ops.comm) if comm is not None}
    reached: dict[int | None, int] = {}
    for position, comm in enumerate(ops.comm):
        tid = ops.launch_tid[position]
        if comm is not None or tid not in issuers:
            continue
        start = ops.start_ns[position]
        paused_since = reached.get(tid)
        reached[tid] = max(ops.end_ns(position), paused_since or 0)
        if paused_since is None or start - paused_since < _PAUSE_NS:
            continue
        low = bisect_left(ends, (paused_since, -1))
        high = bisect_right(ends, (start, 2**62))
        for _, source in ends[low:high]:
            if source < position:
                ops.deps[position] = {*ops.deps[position], source}
                counts["edge-inferred-wait"] += 1
