"""Record what a running program does, at less than a microsecond per span.

    import time
    import prismtrace as pt

    with pt.SpanWriter("toy.spool") as writer:
        for step in range(10):
            start = time.perf_counter_ns()
            work()
            writer.span("work", start, time.perf_counter_ns(), step=step)
    pt.assemble("toy.spool", "toy.parquet")

Every rank writes a spool of its own (`prismtrace.spool`); `assemble` makes one trace of all of
them, also of those that a killed program left. The program's threads only append a tuple to a
list; a thread of the writer's own encodes and writes them. Nothing here needs torch or Polars.
"""

from __future__ import annotations

import atexit
import itertools
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from prismtrace.assembling import AssembleReport, assemble
from prismtrace.errors import PrismError, ValidationError
from prismtrace.output import output_error
from prismtrace.ranks import format_ranks
from prismtrace.spool import AMENDED, COMPUTE, NODE, SPOOL_VERSION, TIMED, frame_of

__all__ = ["AssembleReport", "SpanWriter", "assemble"]

CHUNK_ROWS = 1024
"""Records that are encoded and written together."""
MOST_CHUNKS = 64
"""Chunks that may wait for the disk; then the program waits, too."""
FLUSH_SECONDS = 0.5
"""A program that is killed loses no more than what it recorded in this time."""

_ONE_BACK = (1,)

_writers: set[SpanWriter] = set()
"""Those that are open; whatever the program forgets to close is closed when it ends."""


class SpanWriter:
    """Writes the spans of one rank into a spool.

    Spans of one stream follow each other and must not overlap; each depends on the one before
    it. Times are of `time.perf_counter_ns()`, which all processes of a host share.

    Several threads may record at once. A process that is forked off (a data loader's worker)
    inherits a writer that writes nothing: what it records is dropped.

    Args:
        path: the spool; a file that is there is replaced. Missing folders are made.
        rank: global rank of this program.
        world_size: ranks of the job; if no spool of a job says, the highest rank decides.
        facts: what else to note: `host` or `clock` of the times, if not this host and its
            `perf_counter`; `residual_ns`, by how much they may be off; `cores`, those that it may
            compute on (`0-3,8`).
        background: write on a thread; without, whoever fills a chunk writes it.

    Raises:
        OutputError: the file cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int | None = None,
        facts: Mapping[str, Any] | None = None,
        background: bool = True,
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self._rows: list[Any] = []
        self._indices = itertools.count()
        self._last: dict[int, int] = {}
        self._streams: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        self._lock = threading.Lock()
        self._error: PrismError | None = None
        self._closed = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise output_error(self.path, error.errno or 0) from error
        self._rows.append(
            {
                "spool": SPOOL_VERSION,
                "rank": rank,
                "world_size": world_size,
                "host": socket.gethostname(),
                "clock": "perf_counter",
                "pid": os.getpid(),
                **(facts or {}),
            }
        )
        self.background = background
        self._chunks: queue.Queue[list[Any] | None] | None = None
        self._write_frame(self._take())
        self._thread: threading.Thread | None = None
        if background:
            self._chunks = queue.Queue(MOST_CHUNKS)
            self._thread = threading.Thread(
                target=self._write_chunks, args=(self._chunks,), name="prismtrace", daemon=True
            )
            self._thread.start()
        _writers.add(self)

    # Recording --------------------------------------------------------------------------

    def span(
        self,
        name: str | None,
        start_ns: int | None,
        end_ns: int | None,
        *,
        stream: str = "program",
        step: int | None = None,
        microbatch: int | None = None,
        chunk: int | None = None,
        phase: str | None = None,
        after: Sequence[int] = (),
    ) -> int:
        """Record a computation that has ended; returns its index.

        Columns are those of `prismtrace.Node`; `stream` is a label. `after` are indices of
        earlier spans that it had to wait for, beside the last one of its stream. Both times are
        None in a graph without times. `step` must not decrease from one span of the rank to the
        next: leave it out of what runs ahead, such as a loader's thread. Values are checked when
        the spool is assembled.
        """
        index = next(self._indices)
        duration = None if start_ns is None or end_ns is None else end_ns - start_ns
        number, deps = self._place(index, stream, after)
        rows = self._rows
        rows.append(
            (COMPUTE, index, name, number, step, microbatch, chunk, phase, start_ns, duration, deps)
        )
        if len(rows) >= CHUNK_ROWS:
            self._hand_over()
        return index

    def communication(
        self,
        kind: str,
        group: str,
        seq: int,
        start_ns: int | None,
        end_ns: int | None,
        *,
        stream: str,
        name: str | None = None,
        peer: int | None = None,
        bytes: int | None = None,
        dtype: str | None = None,
        reduce_op: str | None = None,
        batch: int | None = None,
        step: int | None = None,
        microbatch: int | None = None,
        chunk: int | None = None,
        phase: str | None = None,
        after: Sequence[int] = (),
    ) -> int:
        """Record this rank's part in a communication that has ended; returns its index.

        As `span`; `group` is the name given to `group()`. The members of a group record its
        n-th operation with the same `seq`; p2p count for each sender and receiver.
        """
        index = next(self._indices)
        duration = None if start_ns is None or end_ns is None else end_ns - start_ns
        number, deps = self._place(index, stream, after)
        self.add(
            (
                NODE, index, kind, name, number, batch, step, microbatch, chunk, phase,
                self._groups[group], seq, peer, bytes, dtype, reduce_op, start_ns, duration, deps,
            )
        )  # fmt: skip
        return index

    def _place(self, index: int, stream: str, after: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Number of a stream, and distances back to the last span on it and to others."""
        number = self._streams.get(stream)
        if number is None:
            number = self.stream(stream)
        last = self._last
        previous = last.get(number)
        last[number] = index
        if previous is None:
            deps: tuple[int, ...] = ()
        else:
            deps = _ONE_BACK if previous == index - 1 else (index - previous,)
        if after:
            further = dict.fromkeys(index - earlier for earlier in after if earlier != previous)
            deps += tuple(further)
        return number, deps

    def add(self, record: tuple[Any, ...]) -> None:
        """For recorders that number nodes and edges themselves: record a spool's array."""
        self._rows.append(record)
        if len(self._rows) >= CHUNK_ROWS:
            self._hand_over()

    def timed(self, index: int, start_ns: int, end_ns: int) -> None:
        """Say when a node that is recorded already took place."""
        self.add((TIMED, index, start_ns, end_ns - start_ns))

    def amend(self, index: int, **values: int | str | None) -> None:
        """Set columns of a node that is recorded already."""
        self.add((AMENDED, index, values))

    def group(self, name: str, ranks: Iterable[int], *, desc: str = "") -> int:
        """Declare a process group of which this rank is a member; returns its number.

        Global `ranks` in group-rank order.
        """
        with self._lock:
            number = self._groups.setdefault(name, len(self._groups))
        text = format_ranks(list(ranks))
        self.add_fact({"group": number, "name": name, "desc": desc, "ranks": text})
        return number

    def describe_group(self, number: int, desc: str) -> None:
        """Say later what a group is for."""
        self.add_fact({"group": number, "desc": desc})

    def stream(self, label: str, *, group: int | None = None) -> int:
        """Declare a stream; returns its number.

        With a group, the trace calls it after the group, followed by `label`.
        """
        with self._lock:
            key = label if group is None else f"{group}/{label}"
            number = self._streams.get(key)
            if number is None:
                number = len(self._streams)
                self._rows.append({"stream": number, "label": label, "of_group": group})
                self._streams[key] = number
        return number

    def add_fact(self, fact: dict[str, Any]) -> None:
        """For recorders of their own kind: record a spool's fact."""
        self.add(fact)  # type: ignore[arg-type]

    # Writing ----------------------------------------------------------------------------

    def flush(self) -> None:
        """Return when all that was recorded so far is in the file.

        Raises:
            OutputError: it cannot be written.
            ValidationError: a value that was recorded is neither number nor text.
        """
        self._hand_over()
        if self._chunks is not None:
            self._chunks.join()
        self._check()

    def close(self) -> None:
        """Write the rest and end the spool; further spans are dropped.

        Raises:
            OutputError: it cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        _writers.discard(self)
        self._rows.append({"ended": True})
        self._pass_on(self._take())
        if self._chunks is not None and self._thread is not None:
            self._chunks.put(None)
            self._thread.join()
        self._file.close()
        self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self) -> list[Any]:
        """What was recorded since. Appending goes on meanwhile, at the other end of the list."""
        with self._lock:
            chunk = self._rows[:]
            del self._rows[: len(chunk)]
        return chunk

    def _hand_over(self) -> None:
        chunk = self._take()
        if self._closed or not chunk:
            return
        self._pass_on(chunk)
        self._check()

    def _pass_on(self, chunk: list[Any]) -> None:
        if self._chunks is None:
            self._write_frame(chunk)
        else:
            self._chunks.put(chunk)

    def _write_chunks(self, chunks: queue.Queue[list[Any] | None]) -> None:
        """The writer's thread."""
        while True:
            try:
                chunk = chunks.get(timeout=FLUSH_SECONDS)
            except queue.Empty:
                self._write_frame(self._take())
                continue
            if chunk is None:
                chunks.task_done()
                return
            self._write_frame(chunk)
            chunks.task_done()

    def _write_frame(self, chunk: list[Any]) -> None:
        if not chunk or self._error is not None:
            return
        try:
            frame = memoryview(frame_of(chunk))
            while frame:
                frame = frame[self._file.write(frame) :]
        except OSError as error:
            # Told to the program by whatever it does next: this may be the writer's thread.
            self._error = output_error(self.path, error.errno or 0)
        except (TypeError, OverflowError) as error:
            self._error = ValidationError(
                f"a recorded value is neither number nor text: {error}",
                where=str(self.path),
                hint="convert NumPy numbers with int() before they are recorded",
            )

    def _abandon(self) -> None:
        """Become a writer that writes nothing: this process is a fork of the one that does."""
        self._lock = threading.Lock()
        self._rows.clear()
        self._chunks = None
        self._closed = True


def _close_all() -> None:
    for writer in list(_writers):
        try:
            writer.close()
        except PrismError as error:
            print(f"warning: a recording is not whole: {error}", file=sys.stderr)


def _abandon_all() -> None:
    for writer in list(_writers):
        writer._abandon()  # noqa: SLF001
    _writers.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
