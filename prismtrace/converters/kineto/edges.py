"""Who waits for whom within one rank: program order, stream waits, host synchronisation.

An edge always leads from an operation issued earlier to one issued later, so the graph of a
rank has no cycle. Sources of edges, in order of trust:

* the stream: operations of one stream run in issue order;
* ``cuda_sync`` events (recorded on request): which stream waits for which event, and where
  the host waited for the device;
* what `record_param_comms` entries stand for: a collective first waits for the stream that
  called it, and a ``wait`` entry lets the calling stream wait for the collective.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict

import polars as pl

from prismtrace.converters.kineto.carried import is_wait
from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.kineto.reader import KinetoFile

__all__ = ["link"]

# A kernel that starts this much before its presumed predecessor ends did not wait for it.
# Timestamps of different streams agree to about a microsecond.
_TOLERANCE_NS = 5_000


def link(ops: IssuedOps, file: KinetoFile, counts: Counter[str]) -> None:
    """Fill `ops.deps` for a GPU trace."""
    launches = _Launches(ops)
    _program_order(ops)
    _collective_inputs(ops)
    resolved_waits = _stream_waits(ops, launches, file, counts)
    _host_waits(ops, launches, file, counts)
    _record_waits(ops, launches, file, resolved_waits, counts)


class _Launches:
    """Operations by stream and by launching thread, searchable by launch order."""

    def __init__(self, ops: IssuedOps) -> None:
        self.by_stream: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """stream -> (correlation, position), ascending."""
        self.by_thread: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """thread -> (launch time, position), ascending."""
        self.computations: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """The same without communications."""
        self.communications: list[tuple[int, int]] = []
        """(launch time, position) of communications, ascending."""
        for position, comm in enumerate(ops.comm):
            correlation, launch = ops.correlation[position], ops.launch_ns[position]
            if launch is None:
                continue
            tid = ops.launch_tid[position] or 0
            if correlation is not None:
                self.by_stream[ops.stream[position]].append((correlation, position))
            self.by_thread[tid].append((launch, position))
            if comm is None:
                self.computations[tid].append((launch, position))
            else:
                self.communications.append((launch, position))
        for entries in (
            *self.by_stream.values(),
            *self.by_thread.values(),
            *self.computations.values(),
            self.communications,
        ):
            entries.sort()

    def last_before(self, stream: str, correlation: int) -> int | None:
        """Last operation launched on the stream before the call with this correlation."""
        entries = self.by_stream.get(stream, [])
        at = bisect_left(entries, (correlation, -1))
        return entries[at - 1][1] if at else None

    def first_after(self, stream: str, correlation: int) -> int | None:
        """First operation launched on the stream after the call with this correlation."""
        entries = self.by_stream.get(stream, [])
        at = bisect_right(entries, (correlation, 2**62))
        return entries[at][1] if at < len(entries) else None


def _program_order(ops: IssuedOps) -> None:
    """Each operation follows the previous one of its stream; a batch is one step of it."""
    last: dict[str, list[int]] = {}
    before: dict[str, list[int]] = {}
    for position, stream in enumerate(ops.stream):
        batch = ops.batch[position]
        previous = last.get(stream, [])
        if batch is not None and previous and ops.batch[previous[0]] == batch:
            ops.deps[position].update(before.get(stream, []))
            previous.append(position)
            continue
        ops.deps[position].update(previous)
        before[stream] = previous
        last[stream] = [position]


def _collective_inputs(ops: IssuedOps) -> None:
    """A communication on its own stream waits for the stream of the thread that issued it."""
    current: dict[int | None, int] = {}
    latest: int | None = None
    for position, comm in enumerate(ops.comm):
        tid = ops.launch_tid[position]
        if comm is None:
            current[tid] = position
            latest = position
            continue
        source = current.get(tid, latest)
        if source is not None and ops.stream[source] != ops.stream[position]:
            ops.deps[position].add(source)


def _add(ops: IssuedOps, source: int | None, target: int | None) -> bool:
    """Add an edge if it follows the launch order and crosses streams."""
    if source is None or target is None or source >= target:
        return False
    for member in _batch_of(ops, source):
        if member < target:
            ops.deps[target].add(member)
    return True


def _batch_of(ops: IssuedOps, position: int) -> list[int]:
    batch = ops.batch[position]
    if batch is None:
        return [position]
    first = position
    while first and ops.batch[first - 1] == batch:
        first -= 1
    last = position
    while last + 1 < len(ops) and ops.batch[last + 1] == batch:
        last += 1
    return list(range(first, last + 1))


def _sync_rows(file: KinetoFile) -> pl.DataFrame:
    """cuda_sync events with their own correlation and stream."""
    return file.syncs.join(
        file.events.select("row", "correlation", "stream", "start_ns", "dur_ns", "tid"),
        on="row",
        how="left",
        maintain_order="left",
    )


def _stream_waits(
    ops: IssuedOps, launches: _Launches, file: KinetoFile, counts: Counter[str]
) -> list[int]:
    """Edges of ``Stream Wait Event``; returns the correlations of the resolved ones."""
    resolved: list[int] = []
    for row in _sync_rows(file).iter_rows(named=True):
        if row["kind"] != "Stream Wait Event":
            continue
        record, wait = row["wait_on_record_correlation"], row["correlation"]
        if record is None or wait is None or record >= wait:
            counts["unresolved-stream-wait"] += 1
            continue
        resolved.append(wait)
        source = launches.last_before(f"stream {row['wait_on_stream']}", record)
        target = launches.first_after(f"stream {row['stream']}", wait)
        if _add(ops, source, target):
            counts["edge-stream-wait"] += 1
    return sorted(resolved)


def _host_waits(
    ops: IssuedOps, launches: _Launches, file: KinetoFile, counts: Counter[str]
) -> None:
    """Where the host waited for the device: what it launches next depends on what it waited for.

    `cudaDeviceSynchronize` is seen without ``cuda_sync`` events too; `cudaStreamSynchronize`
    does not name its stream there and is left alone.
    """
    calls = {
        correlation: (tid, end)
        for correlation, tid, end in file.events.filter(
            pl.col("cat").cast(pl.String).is_in(["cuda_runtime", "cuda_driver"])
            & pl.col("name").cast(pl.String).str.contains("Synchronize|EventQuery")
        )
        .select("correlation", "tid", pl.col("start_ns") + pl.col("dur_ns"))
        .iter_rows()
    }
    syncs = [
        (row["kind"], row["correlation"], row["wait_on_stream"], row["stream"], row)
        for row in _sync_rows(file).iter_rows(named=True)
        if row["kind"] in ("Event Sync", "Stream Sync", "Context Sync")
    ]
    seen = {correlation for _, correlation, *_ in syncs}
    for kind, correlation, wait_on, stream, row in syncs:
        if correlation not in calls:
            continue
        if kind == "Event Sync":
            record = row["wait_on_record_correlation"]
            if record is None or record >= correlation:
                counts["unresolved-event-sync"] += 1
                continue
            sources = [launches.last_before(f"stream {wait_on}", record)]
        elif kind == "Stream Sync":
            sources = [launches.last_before(f"stream {stream}", correlation)]
        else:
            sources = [launches.last_before(name, correlation) for name in launches.by_stream]
        _host_edges(ops, launches, sources, *calls[correlation], counts)
    device = file.events.filter(pl.col("name").cast(pl.String) == "cudaDeviceSynchronize")
    for correlation in device.get_column("correlation").drop_nulls().to_list():
        if correlation in seen or correlation not in calls:
            continue
        sources = [launches.last_before(name, correlation) for name in launches.by_stream]
        _host_edges(ops, launches, sources, *calls[correlation], counts)


def _host_edges(
    ops: IssuedOps,
    launches: _Launches,
    sources: list[int | None],
    tid: int,
    end_ns: int,
    counts: Counter[str],
) -> None:
    entries = launches.by_thread.get(tid, [])
    at = bisect_left(entries, (end_ns, -1))
    if at == len(entries):
        return
    target = entries[at][1]
    for source in sources:
        if _add(ops, source, target):
            counts["edge-host-wait"] += 1


def _record_waits(
    ops: IssuedOps,
    launches: _Launches,
    file: KinetoFile,
    resolved: list[int],
    counts: Counter[str],
) -> None:
    """Edges of ``wait`` entries: collective → next operation of the waiting thread.

    Skipped where a resolved ``cuda_sync`` event already tells what was waited for.
    """
    waits = _wait_records(file)
    if not waits:
        return
    resolved_times = _call_times(file, resolved)
    for start_ns, end_ns, tid, seq in waits:
        at = bisect_left(resolved_times, start_ns)
        if at < len(resolved_times) and resolved_times[at] <= end_ns:
            continue
        computations = launches.computations.get(tid, [])
        at = bisect_left(computations, (end_ns, -1))
        target = computations[at][1] if at < len(computations) else None
        issued = launches.communications[: bisect_left(launches.communications, (start_ns, -1))]
        source = None if target is None else _waited_for(ops, issued, seq, target)
        if _add(ops, source, target):
            counts["edge-record-wait"] += 1
        else:
            counts["unresolved-record-wait"] += 1


def _wait_records(file: KinetoFile) -> list[tuple[int, int, int, int | None]]:
    """(start, end, thread, sequence number or null) of every ``wait`` entry, by time."""
    records = file.events.filter(pl.col("name").cast(pl.String) == "record_param_comms").select(
        "row", "start_ns", "dur_ns", "tid"
    )
    joined = records.join(file.comms, on="row", how="inner", maintain_order="left")
    found: list[tuple[int, int, int, int | None]] = []
    for row in joined.iter_rows(named=True):
        if is_wait(row):
            first = (row.get("concrete_inputs") or [""])[0]
            seq = row["seq"] if row["seq"] is not None else int(first) if first.isdigit() else None
            found.append((row["start_ns"], row["start_ns"] + row["dur_ns"], row["tid"], seq))
    return sorted(found, key=lambda wait: wait[0])


def _call_times(file: KinetoFile, correlations: list[int]) -> list[int]:
    calls = file.events.filter(
        pl.col("cat").cast(pl.String).is_in(["cuda_runtime", "cuda_driver"])
        & pl.col("correlation").is_in(correlations)
    )
    return sorted(calls.get_column("start_ns").to_list())


def _waited_for(
    ops: IssuedOps, issued: list[tuple[int, int]], seq: int | None, target: int
) -> int | None:
    """The collective a wait entry belongs to: by number, else the latest that had ended."""
    if seq is not None:
        for _, position in reversed(issued):
            comm = ops.comm[position]
            if comm is not None and comm.local_seq == seq:
                return position
    begin = ops.start_ns[target] + _TOLERANCE_NS
    for _, position in reversed(issued[-64:]):
        if ops.end_ns(position) <= begin and ops.stream[position] != ops.stream[target]:
            return position
    return None
