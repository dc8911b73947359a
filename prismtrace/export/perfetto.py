"""Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process per rank, one thread per stream. Spans are complete events ("X") with ts and dur
in microseconds and three decimals, relative to the trace's first start, which stands in
`baseTimeNanoseconds`. Within a thread the format knows nesting only, so spans that overlap
without one holding the other (members of a batch, clock granularity) move to further threads
beside the stream's.

What a viewer shows beside the spans:

* the thread "steps", first of each process, has a slice for every training step of the rank;
* the wait of an aligned communication is a slice "wait" inside its span;
* each member of a sync instance that had to wait is reached by an arrow (a flow) from the
  member that came last: it shows whom the others waited for. Both ends lie at the moment of
  the last arrival, the first moment at which all members are inside the operation. Where the
  clocks of a recorded trace disagree so much that a member has ended by then, its end of the
  arrow lies within its last nanosecond;
* nodes on the critical path carry a colour name, and `critical` among the arguments.

The Trace Event Format is described in https://docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; Perfetto's reading of it in
https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from prismtrace.blocks import INSTANCE_KEY, instance_blocks, rank_blocks
from prismtrace.errors import TraceError
from prismtrace.group_names import group_labels
from prismtrace.output import atomic_output
from prismtrace.schema import TraceHeader
from prismtrace.trace import PathLike, Trace

__all__ = ["export_perfetto"]

LANE_TIDS = 1 << 16
"""Thread ids of a stream's further lanes start here; the first lane has the stream's number."""

STEPS_TID = 1 << 30
"""Thread id of the slices that show training steps; above those of all lanes that occur."""

_ARGS = (
    "kind",
    "phase",
    "step",
    "microbatch",
    "chunk",
    "index",
    "seq",
    "peer",
    "bytes",
    "dtype",
    "reduce_op",
    "wait_ns",
    "transfer_ns",
    "transfer_source",
    "slack_ns",
    "critical",
    "mem_bytes",
)
_COLUMNS = ["rank", "stream", "name", "start_ns", "dur_ns", "group", "real", *_ARGS]


def export_perfetto(
    trace: Trace, path: PathLike, *, advance: Callable[[int], None] | None = None
) -> None:
    """Write a trace as Chrome trace JSON, gzipped when `path` ends in ``.gz``.

    Rows without times are left out. Memory stays flat in the number of rows. `advance` is
    called with the number of rows that have been written since the last call.

    Raises:
        TraceError: no row of the trace has a time.
        OutputError: the file cannot be written; what was there before stays.
    """
    timed = trace.nodes.filter(pl.col("start_ns").is_not_null() & pl.col("dur_ns").is_not_null())
    base_ns = timed.select(pl.col("start_ns").min()).collect(engine="streaming").item()
    if base_ns is None:
        raise TraceError(
            "no node of the trace has a time: there is nothing to draw",
            where=", ".join(str(source) for source in trace.paths) or None,
            hint="bare graphs have no times; export --to node-link shows their structure",
        )
    with atomic_output(path) as temporary, _text_file(temporary, Path(path)) as file:
        writer = _Writer(file, trace.header, base_ns)
        file.write(f'{{"displayTimeUnit":"ns","baseTimeNanoseconds":{base_ns},"traceEvents":[\n')
        for rows in rank_blocks(timed, _COLUMNS):
            for part in rows.sort("rank", "stream", "start_ns", "index").partition_by(
                "rank", maintain_order=True
            ):
                writer.write_rank(part)
                if advance is not None:
                    advance(part.height)
        writer.write_flows(timed)
        file.write("\n]}\n")


@contextmanager
def _text_file(temporary: Path, target: Path) -> Iterator[io.TextIOBase]:
    if target.suffix != ".gz":
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        return
    # No file name and no time in the gzip header: equal traces give equal files.
    with (
        temporary.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=2, fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="utf-8") as text,
    ):
        yield text


@dataclass
class _Writer:
    file: io.TextIOBase
    header: TraceHeader
    base_ns: int
    lanes: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    """Thread of spans outside the first lane, by (rank, stream, start, duration)."""
    quoted: dict[str, str] = field(default_factory=dict)
    empty: bool = True
    flows: int = 0

    def __post_init__(self) -> None:
        self.group_names = group_labels(self.header.groups)

    def write(self, events: list[str]) -> None:
        """Append events to the array."""
        if events:
            self.file.write(("" if self.empty else ",\n") + ",\n".join(events))
            self.empty = False

    def write_rank(self, rows: pl.DataFrame) -> None:
        """Events of one rank, rows in (stream, start) order."""
        rank = rows["rank"][0]
        self.write(
            [
                _meta(rank, None, "process_name", name=f"rank {rank}"),
                _meta(rank, None, "process_sort_index", sort_index=rank),
            ]
        )
        self.write_steps(rank, rows)
        for part in rows.partition_by("stream", maintain_order=True):
            self.write_stream(rank, part["stream"][0], part)

    def write_steps(self, rank: int, rows: pl.DataFrame) -> None:
        """A slice for each training step of one rank: from its first start to its last end.

        What a step still runs while the next one has begun is cut off; the slices of a thread
        must not overlap.
        """
        end = (pl.col("start_ns") + pl.col("dur_ns")).max()
        steps = (
            rows.drop_nulls("step")
            .group_by("step")
            .agg(start_ns=pl.col("start_ns").min(), end_ns=end)
            .sort("start_ns", "step")
            .with_columns(end_ns=pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1)))
        )
        if not steps.height:
            return
        self.write(
            [
                _meta(rank, STEPS_TID, "thread_name", name="steps"),
                _meta(rank, STEPS_TID, "thread_sort_index", sort_index=-1),
                *(
                    f'{{"ph":"X","cat":"step","name":"step {step}","pid":{rank},'
                    f'"tid":{STEPS_TID},"ts":{self.time(start)},"dur":{_us(end - start)}}}'
                    for step, start, end in steps.iter_rows()
                ),
            ]
        )

    def write_stream(self, rank: int, stream: int, rows: pl.DataFrame) -> None:
        """Events of one stream, rows in order of start."""
        source = self.header.streams.get(stream, str(stream))
        title = f"stream {source}" if source.isdecimal() else source
        lanes = assign_lanes(rows["start_ns"].to_list(), rows["dur_ns"].to_list())
        # Streams lie in order, each followed by its further lanes.
        for lane in range(max(lanes, default=0) + 1):
            tid = lane_tid(stream, lane)
            name = title if lane == 0 else f"{title} (overlapping {lane + 1})"
            self.write(
                [
                    _meta(rank, tid, "thread_name", name=name),
                    _meta(rank, tid, "thread_sort_index", sort_index=stream * 64 + min(lane, 63)),
                ]
            )
        events: list[str] = []
        for row, lane in zip(rows.iter_rows(named=True), lanes, strict=True):
            tid = lane_tid(stream, lane)
            if lane > 0 and row["seq"] is not None:
                self.lanes[rank, stream, row["start_ns"], row["dur_ns"]] = tid
            events += self.span(row, tid)
            if len(events) > 4096:
                self.write(events)
                events = []
        self.write(events)

    def span(self, row: dict[str, Any], tid: int) -> list[str]:
        """The events of one row: its span and, inside, its wait."""
        place = f'"pid":{row["rank"]},"tid":{tid}'
        start = self.time(row["start_ns"])
        local = row["group"] is None
        args = [
            f'"{name}":{self.quote(value) if isinstance(value, str) else _plain(value)}'
            for name in _ARGS
            if (value := row[name]) is not None
        ]
        if not local:
            group = self.group_names.get(row["group"], str(row["group"]))
            args.append(f'"group":{self.quote(group)}')
        if not row["real"]:
            args.append('"real":false')
        colour = ',"cname":"terrible"' if row["critical"] else ""
        name = row["name"] or (row["kind"] if local else f"{row['kind']} {group}")
        category = "compute" if local else "communication"
        span = (
            f'{{"ph":"X","cat":"{category}","name":{self.quote(name)},{place},"ts":{start},'
            f'"dur":{_us(row["dur_ns"])}{colour},"args":{{{",".join(args)}}}}}'
        )
        wait = row["wait_ns"]
        if not wait:
            return [span]
        inside = _us(min(wait, row["dur_ns"]))
        return [
            span,
            f'{{"ph":"X","cat":"wait","name":"wait",{place},"ts":{start},"dur":{inside}}}',
        ]

    def write_flows(self, timed: pl.LazyFrame) -> None:
        """Arrows from the last arriver of each sync instance to the members that waited."""
        columns = ["id", "rank", "stream", "start_ns", "dur_ns", "kind", "peer"]
        for members in instance_blocks(timed, columns):
            # A span of no length encloses no moment, so no arrow can end in it.
            drawn = members.filter(pl.col("dur_ns") > 0).sort(
                *INSTANCE_KEY, "start_ns", "id", descending=[False] * 4 + [True, False]
            )
            events: list[str] = []
            last: dict[str, Any] = {}
            for row in drawn.iter_rows(named=True):
                key = tuple(row[name] for name in INSTANCE_KEY)
                if last.get("key") != key:
                    last = {**row, "key": key}
                elif row["start_ns"] < last["start_ns"]:
                    events += self.arrow(last, row)
                if len(events) > 4096:
                    self.write(events)
                    events = []
            self.write(events)

    def arrow(self, last: dict[str, Any], waiting: dict[str, Any]) -> list[str]:
        """Start and end of one flow; the start comes first, also in the file."""
        self.flows += 1
        arrival, end = last["start_ns"], waiting["start_ns"] + waiting["dur_ns"]
        if arrival < end:
            name, source, target, moments = "last arrival", last, waiting, (arrival, arrival)
        else:
            # The viewer drops a flow that ends before it starts.
            name, source, target, moments = "not aligned", waiting, last, (end - 1, arrival)
        head = f'"cat":"sync","name":"{name}","id":{self.flows}'
        return [
            f'{{"ph":"s",{head},{self.place(source)},"ts":{self.time(moments[0])}}}',
            f'{{"ph":"f","bp":"e",{head},{self.place(target)},"ts":{self.time(moments[1])}}}',
        ]

    def place(self, row: dict[str, Any]) -> str:
        """Process and thread that a row's span lies on."""
        key = (row["rank"], row["stream"], row["start_ns"], row["dur_ns"])
        return f'"pid":{row["rank"]},"tid":{self.lanes.get(key, row["stream"])}'

    def time(self, start_ns: int) -> str:
        """Microseconds since the base."""
        return _us(start_ns - self.base_ns)

    def quote(self, text: str) -> str:
        """JSON text; kernel names repeat, so the work is done once."""
        found = self.quoted.get(text)
        if found is None:
            if len(self.quoted) > 65536:
                self.quoted.clear()
            found = self.quoted[text] = json.dumps(text)
        return found


def lane_tid(stream: int, lane: int) -> int:
    """Thread id of a stream's lane; unique within a process."""
    return stream if lane == 0 else LANE_TIDS * lane + stream


def assign_lanes(starts: list[int], durations: list[int]) -> list[int]:
    """Lane of each span, in order of start, so that no two spans of a lane overlap.

    The lowest free lane is taken: spans that follow each other all get lane 0.
    """
    free_from: list[int] = [starts[0]] if starts else []
    lanes: list[int] = []
    for start, duration in zip(starts, durations, strict=True):
        lane = next((i for i, free in enumerate(free_from) if free <= start), len(free_from))
        if lane == len(free_from):
            free_from.append(start)
        free_from[lane] = start + duration
        lanes.append(lane)
    return lanes


def _meta(rank: int, tid: int | None, kind: str, /, **args: Any) -> str:
    event: dict[str, Any] = {"ph": "M", "name": kind, "pid": rank}
    if tid is not None:
        event["tid"] = tid
    return json.dumps({**event, "args": args}, separators=(",", ":"))


def _us(time_ns: int) -> str:
    """Nanoseconds as microseconds with three decimals, exactly."""
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _plain(value: int | bool) -> str:
    return str(value).lower()
