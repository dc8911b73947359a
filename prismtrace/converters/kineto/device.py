"""GPU operations of one rank in issue order, with what communications say about themselves.

A GPU operation is joined to the runtime call that launched it by `correlation`; the call's
time and thread give the issue order and the CPU-side records that enclose the launch
(`record_param_comms`, ``nccl:…`` annotations) give the collective, its size and its group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import polars as pl

from prismtrace.converters.kineto.carried import CommOp, describe_record
from prismtrace.converters.kineto.names import CommPatterns
from prismtrace.converters.profile import Profile

__all__ = ["GPU_CATEGORIES", "communications", "gpu_operations"]

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver")


def gpu_operations(file: Profile, counts: Counter[str]) -> pl.DataFrame:
    """GPU operations in issue order.

    Columns: op (position), row (of `file.events`), name, cat, stream (original id), start_ns,
    dur_ns, correlation, bytes, launch_ns and launch_tid (null without a launch record).
    """
    events = file.events
    gpu = events.filter(pl.col("cat").is_in(GPU_CATEGORIES)).with_columns(
        pl.col("stream").fill_null(pl.col("tid")).fill_null(0)
    )
    launches = (
        events.filter(
            pl.col("cat").is_in(_RUNTIME_CATEGORIES)
            & pl.col("correlation").is_not_null()
            & (pl.col("correlation") != 0)
        )
        .select("correlation", launch_ns="start_ns", launch_tid="tid")
        .unique("correlation", keep="first", maintain_order=True)
    )
    ops = gpu.join(launches, on="correlation", how="left", maintain_order="left")
    counts["orphan-launch"] += ops.get_column("launch_ns").null_count()
    shared = ops.filter(pl.col("launch_ns").is_not_null()).get_column("correlation")
    counts["shared-correlation"] += len(shared) - shared.n_unique()
    return _issue_order(ops)


def _issue_order(ops: pl.DataFrame) -> pl.DataFrame:
    """Sort by launch; operations without a launch keep their place on their stream."""
    ordered = ops.sort("stream", "start_ns", "row", maintain_order=True)
    if ops.get_column("launch_ns").null_count() == ops.height:
        issue = pl.col("start_ns")
    else:
        # Launched before the window opened: before everything that was launched in it.
        before = pl.col("launch_ns").min() - 1
        issue = pl.col("launch_ns").forward_fill().over("stream").fill_null(before)
    return (
        ordered.with_columns(issue_ns=issue)
        .sort("issue_ns", "start_ns", "stream", "row", maintain_order=True)
        .with_row_index("op")
        .select(
            "op",
            "row",
            "name",
            "cat",
            "stream",
            "start_ns",
            "dur_ns",
            "correlation",
            "bytes",
            "launch_ns",
            "launch_tid",
            "issue_ns",
            *[name for name in ops.columns if name.startswith("x_arg_")],
        )
    )


def enclosing(points: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """For each point the latest span of its thread that encloses it.

    Args:
        points: columns key, tid, at_ns.
        spans: columns row, tid, start_ns, dur_ns.

    Returns:
        Columns key, row (null when no span encloses the point), in the order of `points`.
    """
    candidates = spans.select(
        "row", "tid", "start_ns", end_ns=pl.col("start_ns") + pl.col("dur_ns")
    )
    joined = (
        points.filter(pl.col("tid").is_not_null() & pl.col("at_ns").is_not_null())
        .sort("at_ns")
        .join_asof(
            candidates.filter(pl.col("tid").is_not_null()).sort("start_ns"),
            left_on="at_ns",
            right_on="start_ns",
            by="tid",
            strategy="backward",
            check_sortedness=False,
        )
        .filter(pl.col("end_ns") >= pl.col("at_ns"))
        .select("key", "row")
    )
    return points.select("key").join(joined, on="key", how="left", maintain_order="left")


def communications(
    file: Profile, ops: pl.DataFrame, patterns: CommPatterns, counts: Counter[str]
) -> dict[int, list[CommOp]]:
    """What each communication kernel carries: op position -> one or more operations.

    More than one means a coalesced launch (`batch_isend_irecv`).
    """
    names = ops.get_column("name").to_list()
    comm = [position for position, name in enumerate(names) if patterns.kind(name) is not None]
    described = {row["row"]: row for row in file.comms.iter_rows(named=True)}
    comm += [
        position
        for position, row in enumerate(ops.get_column("row").to_list())
        if row in described and _carries_collective(described[row])
    ]
    comm = sorted(set(comm))
    if not comm:
        return {}
    events = file.events
    records = events.filter(pl.col("name") == "record_param_comms")
    notes = events.filter(
        (pl.col("cat") == "user_annotation") & pl.col("name").str.starts_with("nccl:")
    )
    points = ops.select(key="op", tid="launch_tid", at_ns="launch_ns")[comm]
    record_of = dict(enclosing(points, records).iter_rows())
    note_of = dict(enclosing(points, notes).iter_rows())
    note_names = dict(notes.select("row", "name").iter_rows())
    waiting = _PendingRecords(records, described, counts)
    found: dict[int, list[CommOp]] = {}
    rows = ops.select("row", "launch_tid", "launch_ns").rows()
    any_launch = ops.get_column("launch_ns").null_count() < ops.height
    for position in comm:
        row, tid, launch_ns = rows[position]
        note_row = note_of.get(position)
        note = note_names.get(note_row) if note_row is not None else None
        own = described.get(row)
        record_row = record_of.get(position)
        sources = [described.get(record_row)] if record_row is not None else []
        if record_row is None and launch_ns is not None:
            sources = list(waiting.since_last_launch(tid, launch_ns))
        found[position] = describe_record(
            kernel=names[position],
            patterns=patterns,
            own=own,
            records=[source for source in sources if source is not None],
            note=note,
            note_row=described.get(note_row) if note_row is not None else None,
            early=launch_ns is None and any_launch,
            counts=counts,
        )
        if launch_ns is not None:
            waiting.launched(tid, launch_ns)
    return found


def _carries_collective(row: dict[str, object]) -> bool:
    return row.get("collective") not in (None, "wait", "init")


class _PendingRecords:
    """Records whose kernel is launched later, as a coalesced launch does.

    `startCoalescing … endCoalescing` writes one record per operation and launches one kernel
    after the last, outside of any record.
    """

    def __init__(
        self,
        records: pl.DataFrame,
        described: dict[int, dict[str, object]],
        counts: Counter[str],
    ) -> None:
        self._by_tid: dict[int, list[tuple[int, dict[str, object]]]] = {}
        self._done: dict[int, int] = {}
        """Thread -> how many of its records belong to launches up to the last one."""
        self._counts = counts
        for row, tid, start_ns in records.select("row", "tid", "start_ns").sort("start_ns").rows():
            record = described.get(row)
            # Within one rank nothing is launched.
            if record and _carries_collective(record) and record.get("group_size") != 1:
                self._by_tid.setdefault(tid, []).append((start_ns, record))

    def since_last_launch(self, tid: int, launch_ns: int) -> list[dict[str, object]]:
        """Data records of the thread between its previous communication launch and this one."""
        entries = self._by_tid.get(tid, [])
        first = self._done.get(tid, 0)
        last = bisect_right(entries, launch_ns, key=lambda entry: entry[0])
        found = [record for _, record in entries[first:last]]
        if len(found) > 1:
            self._counts["coalesced-launch"] += 1
        return found

    def launched(self, tid: int, launch_ns: int) -> None:
        """A communication was launched: earlier records are used up."""
        entries = self._by_tid.get(tid, [])
        self._done[tid] = bisect_right(entries, launch_ns, key=lambda entry: entry[0])
