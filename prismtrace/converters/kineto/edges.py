"""Who waits for whom within one rank: program order, stream waits, host synchronisation.

The host's calls are replayed in order. Each stream has a *frontier*: the operations that
whatever is issued to it next has to wait for. Issuing an operation makes it the frontier of
its stream; a wait adds the frontier of the stream that is waited for. Sources, best first:

* the stream: operations of one stream run in issue order;
* ``cuda_sync`` events (recorded on request): which stream waited for which event, and where
  the host waited for the device;
* what `record_param_comms` entries stand for: a communication first waits for the stream that
  its thread uses, and a ``wait`` entry lets that stream wait for the communication;
* other `cudaStreamWaitEvent` calls: futures (DDP's buckets) are waited for without an entry,
  and since CUDA 12.9 ``cuda_sync`` events no longer tell for which event. Such a call is taken
  to wait for the oldest communication that nobody has waited for and that had ended by then.

An edge always leads from an operation issued earlier to one issued later, so the graph of a
rank has no cycle, and never to an operation that had started before its source ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from prismtrace.converters.kineto.carried import is_wait
from prismtrace.converters.kineto.device import enclosing
from prismtrace.converters.kineto.issued import IssuedOps
from prismtrace.converters.profile import Profile

__all__ = ["link"]

# A kernel that starts this much before its presumed predecessor ends did not wait for it.
# Timestamps of different streams agree to about a microsecond.
_TOLERANCE_NS = 5_000
# Communications a later ``wait`` entry may belong to; some are never waited for.
_MOST_UNWAITED = 256

Frontier = dict[str, tuple[int, str]]
"""Stream -> (position of the operation to wait for, where the edge comes from)."""


def link(ops: IssuedOps, file: Profile, counts: Counter[str]) -> None:
    """Fill `ops.deps` for a GPU trace."""
    replay = _Replay(ops, counts)
    calls = _sync_calls(file)
    explicit = _stream_waits(replay, file, calls, counts)
    moments = list(explicit)
    moments += _host_waits(replay, file, calls, counts)
    moments += _record_waits(replay, file, [moment[0] for moment in explicit])
    moments += _other_waits(replay, file, calls)
    moments.sort(key=lambda moment: moment[:2])
    upcoming = 0
    # What happens at the time of a launch comes before it.
    for position, issued in enumerate(ops.issue_ns):
        while upcoming < len(moments) and moments[upcoming][0] <= issued:
            *_, action, arguments = moments[upcoming]
            action(*arguments)
            upcoming += 1
        replay.launch(position)
    for *_, action, arguments in moments[upcoming:]:
        action(*arguments)


_Moment = tuple[int, int, Callable[..., None], tuple[Any, ...]]
"""(time, order, what happens, its arguments)."""


class _Replay:
    """The state of streams and threads while the host's calls are replayed."""

    def __init__(self, ops: IssuedOps, counts: Counter[str]) -> None:
        self._ops = ops
        self._counts = counts
        self._frontier: dict[str, Frontier] = defaultdict(dict)
        self._records: dict[int, Frontier] = {}
        """Correlation of a recorded event or of a waiting call -> what it stands for."""
        self._host_waited: dict[int | None, Frontier] = defaultdict(dict)
        """Thread -> everything it has waited for."""
        self._host_waits: Counter[int | None] = Counter()
        self._passed_on: dict[tuple[int | None, str], int] = {}
        """(Thread, stream) -> how many of the thread's waits the stream has been told of."""
        self._stream_of: dict[int | None, str] = {}
        self._recent_stream: str | None = None
        self._last_of_thread: dict[int | None, int] = {}
        self._unwaited: deque[int] = deque(maxlen=_MOST_UNWAITED)
        self._guesses: dict[str | None, list[list[int] | None]] = defaultdict(list)
        """Stream (null: not known yet) -> candidates of each wait that names none; null stands
        for the communications that nobody has waited for, oldest first."""
        self._open_batch: tuple[int, Frontier] | None = None
        self._numbered = any(comm is not None and comm.local_seq is not None for comm in ops.comm)

    def launch(self, position: int) -> None:
        """Issue an operation: it waits for the frontier of its stream."""
        ops = self._ops
        stream, tid, batch = ops.stream[position], ops.launch_tid[position], ops.batch[position]
        comm = ops.comm[position]
        if comm is None and self._recent_stream is None:
            self._guesses[stream] += self._guesses.pop(None, [])
        if batch is not None and self._open_batch is not None and self._open_batch[0] == batch:
            needs = self._open_batch[1]
        else:
            if self._guesses:
                self._resolve(stream, position)
            needs = dict(self._frontier[stream])
            if comm is not None:
                own = self._stream_of.get(tid, self._recent_stream)
                if own is not None and own != stream:
                    self._resolve(own, position)
                    _unite(needs, self._frontier[own], "comm-input")
            if self._passed_on.get((tid, stream), 0) < self._host_waits[tid]:
                _unite(needs, self._host_waited[tid])
                self._passed_on[tid, stream] = self._host_waits[tid]
            self._open_batch = None if batch is None else (batch, needs)
        self._depend(position, needs)
        self._frontier[stream] = {stream: (position, "")}
        self._last_of_thread[tid] = position
        if comm is None:
            self._stream_of[tid] = self._recent_stream = stream
        else:
            self._unwaited.append(position)

    def _depend(self, position: int, needs: Frontier) -> None:
        ops = self._ops
        own, found = ops.stream[position], []
        for stream, (source, origin) in needs.items():
            if stream != own:
                if not self._before(source, ops.start_ns[position]):
                    self._counts["contradicting-edge"] += 1
                    continue
                self._counts[f"edge-{origin}"] += 1
            if ops.batch[source] is None:
                found.append(source)
            else:
                found += _batch_of(ops, source)
        ops.deps[position] = tuple(found)

    def _before(self, source: int, time_ns: int) -> bool:
        return self._ops.end_ns(source) <= time_ns + _TOLERANCE_NS

    def record(self, stream: str, correlation: int) -> None:
        """The host recorded an event on a stream."""
        self._records[correlation] = dict(self._frontier.get(stream, {}))

    def stream_wait(self, stream: str, correlation: int) -> None:
        """The host let a stream wait for a recorded event."""
        _unite(self._frontier[stream], self._records.get(correlation, {}), "stream-wait")

    def begin_host_wait(self, streams: Sequence[str] | None, key: int) -> None:
        """The host starts to wait for what some streams (null: all) have been given."""
        waited: Frontier = {}
        for stream in list(self._frontier) if streams is None else streams:
            _unite(waited, self._frontier.get(stream, {}))
        self._records[key] = waited

    def begin_thread_wait(self, tid: int, key: int) -> None:
        """The same for the stream that the thread uses."""
        stream = self._stream_of.get(tid, self._recent_stream)
        self.begin_host_wait([] if stream is None else [stream], key)

    def end_host_wait(self, tid: int | None, end_ns: int, key: int) -> None:
        """The host goes on: all that the thread issues from now on comes after."""
        over = {
            stream: entry
            for stream, entry in self._records.get(key, {}).items()
            if self._before(entry[0], end_ns)
        }
        _unite(self._host_waited[tid], over, "host-wait")
        self._host_waits[tid] += 1

    def record_wait(self, tid: int, seq: int | None) -> None:
        """A ``wait`` entry: the thread's stream waits for one of the communications.

        By number if it shows one. Else the one that the thread has just issued, or the latest
        that nobody waited for; which of them is decided when it is known when the stream goes
        on.
        """
        stream = self._stream_of.get(tid, self._recent_stream)
        last = self._last_of_thread.get(tid)
        candidates = list(reversed(self._unwaited))
        if last in candidates:
            candidates.remove(last)
            candidates.insert(0, last)
        if seq is not None and self._numbered:
            comms = ((p, self._ops.comm[p]) for p in candidates)
            candidates = [p for p, comm in comms if comm is not None and comm.local_seq == seq][:1]
            if not candidates:
                return  # a communication within one rank: it has a wait entry but no kernel
        if not candidates:
            self._counts["unresolved-record-wait"] += 1
        else:
            self._guesses[stream].append(candidates)

    def other_wait(self, tid: int, stream: str | None) -> None:
        """A stream waits for an event that nothing tells about."""
        waiting = stream or self._stream_of.get(tid, self._recent_stream)
        if self._unwaited:
            self._guesses[waiting].append(None)

    def _resolve(self, stream: str, position: int) -> None:
        """Decide what the waits of a stream stood for: an operation is about to follow them."""
        start = self._ops.start_ns[position]
        for known in self._guesses.pop(stream, []):
            candidates = list(self._unwaited) if known is None else known
            source = next(
                (
                    p
                    for p in candidates
                    if self._before(p, start) and (known or self._ops.stream[p] != stream)
                ),
                None,
            )
            if source is None:
                self._counts["unresolved-record-wait"] += known is not None
                continue
            own = self._ops.stream[source]
            left = (p for p in self._unwaited if self._ops.stream[p] != own or p > source)
            self._unwaited = deque(left, maxlen=_MOST_UNWAITED)
            if own != stream:
                origin = "inferred-wait" if known is None else "record-wait"
                _unite(self._frontier[stream], {own: (source, origin)})


def _unite(target: Frontier, other: Mapping[str, tuple[int, str]], origin: str = "") -> None:
    """Wait for both; of one stream the later operation covers the earlier."""
    for stream, (position, old) in other.items():
        if stream not in target or target[stream][0] < position:
            target[stream] = position, old or origin


def _batch_of(ops: IssuedOps, position: int) -> list[int]:
    """All operations of a coalesced launch, given its last one."""
    batch = ops.batch[position]
    first = position
    while batch is not None and first and ops.batch[first - 1] == batch:
        first -= 1
    return list(range(first, position + 1))


# --- when the host did what -----------------------------------------------------------------


class _Call(NamedTuple):
    name: str
    tid: int
    start_ns: int
    end_ns: int


def _sync_calls(file: Profile) -> dict[int, _Call]:
    """Runtime calls that record events or wait, by correlation."""
    calls = file.events.filter(
        pl.col("cat").is_in(["cuda_runtime", "cuda_driver"])
        & pl.col("correlation").is_not_null()
        & pl.col("name").str.contains("Synchronize|EventRecord|WaitEvent|Query")
    )
    end = pl.col("start_ns") + pl.col("dur_ns")
    columns = calls.select("name", "tid", "start_ns", end_ns=end)
    return dict(
        zip(calls.get_column("correlation"), map(_Call._make, columns.iter_rows()), strict=True)
    )


def _sync_rows(file: Profile, *kinds: str) -> list[dict[str, Any]]:
    """``cuda_sync`` events of some kinds with their own correlation and stream."""
    chosen = file.syncs.filter(pl.col("kind").is_in(kinds))
    events = file.events.select("row", "correlation", "stream", "start_ns")
    return chosen.join(events, on="row", how="inner", maintain_order="left").to_dicts()


def _stream_waits(
    replay: _Replay, file: Profile, calls: Mapping[int, _Call], counts: Counter[str]
) -> list[_Moment]:
    """What ``Stream Wait Event`` tells, where the record it names came before the wait."""
    moments: list[_Moment] = []
    for row in _sync_rows(file, "Stream Wait Event"):
        record, wait = row["wait_on_record_correlation"], row["correlation"]
        recorded, waiting = calls.get(record), calls.get(wait)
        if recorded is None or wait is None or record >= wait:
            # Some versions point into the future.
            counts["unresolved-stream-wait"] += 1
            continue
        at = row["start_ns"] if waiting is None else waiting.start_ns
        source, target = f"stream {row['wait_on_stream']}", f"stream {row['stream']}"
        moments += [
            (recorded.start_ns, record, replay.record, (source, record)),
            (at, wait, replay.stream_wait, (target, record)),
        ]
    return moments


def _host_waits(
    replay: _Replay, file: Profile, calls: Mapping[int, _Call], counts: Counter[str]
) -> list[_Moment]:
    """Where the host waited for the device: what it issues next depends on that.

    Calls without a ``cuda_sync`` event do not name their stream: `cudaStreamSynchronize` is
    taken to wait for the stream that its thread uses. Queries do not wait.
    """
    moments: list[_Moment] = []
    explained: set[int] = set()
    for row in _sync_rows(file, "Event Sync", "Stream Sync", "Context Sync"):
        correlation, kind = row["correlation"], row["kind"]
        call = calls.get(correlation)
        if call is None or "Query" in call.name:
            continue
        explained.add(correlation)
        key = row["wait_on_record_correlation"] if kind == "Event Sync" else correlation
        if kind == "Event Sync":
            recorded = calls.get(key)
            if recorded is None or key >= correlation:
                counts["unresolved-event-sync"] += 1
                continue
            source = f"stream {row['wait_on_stream']}"
            moments.append((recorded.start_ns, key, replay.record, (source, key)))
        else:
            streams = None if kind == "Context Sync" else [f"stream {row['stream']}"]
            moments.append((call.start_ns, key, replay.begin_host_wait, (streams, key)))
        moments.append(_end_of(replay, call, key))
    for key, call in calls.items():
        if key in explained:
            continue
        if call.name == "cudaDeviceSynchronize":
            moments.append((call.start_ns, key, replay.begin_host_wait, (None, key)))
        elif call.name == "cudaStreamSynchronize":
            arguments = call.tid, key
            moments.append((call.start_ns, key, replay.begin_thread_wait, arguments))
        else:
            continue
        moments.append(_end_of(replay, call, key))
    return moments


def _end_of(replay: _Replay, call: _Call, key: int) -> _Moment:
    return call.end_ns, key, replay.end_host_wait, (call.tid, call.end_ns, key)


def _record_waits(replay: _Replay, file: Profile, explicit: list[int]) -> list[_Moment]:
    """``wait`` entries, except those within which a ``cuda_sync`` event tells more."""
    events = file.events.filter(pl.col("name") == "record_param_comms").select(
        "row", "start_ns", "dur_ns", "tid"
    )
    records = events.join(file.comms, on="row", how="inner", maintain_order="left")
    explicit.sort()
    moments: list[_Moment] = []
    for row in records.iter_rows(named=True):
        if not is_wait(row):
            continue
        start, end = row["start_ns"], row["start_ns"] + row["dur_ns"]
        at = bisect_left(explicit, start)
        if at < len(explicit) and explicit[at] <= end:
            continue
        first = (row["concrete_inputs"] or [""])[0]
        seq = row["seq"] if row["seq"] is not None else int(first) if first.isdigit() else None
        moments.append((end, row["row"], replay.record_wait, (row["tid"], seq)))
    return moments


def _other_waits(replay: _Replay, file: Profile, calls: Mapping[int, _Call]) -> list[_Moment]:
    """`cudaStreamWaitEvent` calls that no record and no resolved ``cuda_sync`` event explains."""
    resolved: set[int] = set()
    stream_of: dict[int, str] = {}
    for row in _sync_rows(file, "Stream Wait Event"):
        if row["wait_on_record_correlation"] in calls:
            resolved.add(row["correlation"])
        elif row["stream"] is not None:
            stream_of[row["correlation"]] = f"stream {row['stream']}"
    waits = [
        (correlation, call.tid, call.start_ns)
        for correlation, call in calls.items()
        if call.name == "cudaStreamWaitEvent" and correlation not in resolved
    ]
    points = pl.DataFrame(
        waits, schema={"key": pl.Int64, "tid": pl.Int64, "at_ns": pl.Int64}, orient="row"
    )
    inside = file.events.filter(
        (pl.col("name") == "record_param_comms") | pl.col("name").str.starts_with("nccl:")
    )
    explained = enclosing(points, inside).filter(pl.col("row").is_not_null()).get_column("key")
    known = set(explained.to_list())
    return [
        (at, correlation, replay.other_wait, (tid, stream_of.get(correlation)))
        for correlation, tid, at in waits
        if correlation not in known
    ]
