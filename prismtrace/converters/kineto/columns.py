"""From decoded events to the three tables: all events, communications, synchronizations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from prismtrace.converters.kineto.events import Event, EventArgs, kept_field
from prismtrace.converters.kineto.records import (
    NOTHING,
    SYNC_SCHEMA,
    comm_frame,
    comm_values,
    sync_values,
)
from prismtrace.converters.kineto.values import free_series, int64_series, nanoseconds
from prismtrace.converters.profile import CATEGORIES

__all__ = ["EventColumns"]

_GPU_CATEGORIES = 4  # the first ones: their stream and device are those of the GPU
_SYNC = CATEGORIES.index("cuda_sync")
_ANNOTATION = CATEGORIES.index("user_annotation")

# What other accelerators and old exporters call the same things.
_ALIASES: Mapping[str, str] = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "concurrent_kernel": "kernel",
    "mtia_ccp_events": "kernel",
    **{f"{maker}_{kind}": f"cuda_{kind}"
       for maker in ("hip", "xpu", "mtia", "privateuse1") for kind in ("runtime", "driver", "sync")},
    **{f"{maker}_kernel": "kernel" for maker in ("hip", "xpu", "mtia", "privateuse1")},
    **{f"{maker}_{kind}": f"gpu_{kind}"
       for maker in ("hip", "xpu", "mtia", "privateuse1") for kind in ("memcpy", "memset")},
}  # fmt: skip

# Events that are dropped, by phase, then by lower-case category.
_DROPPED_PHASES: Mapping[str, str] = {
    "M": "dropped-metadata",
    "i": "dropped-instant",
    "I": "dropped-instant",
    "s": "dropped-flow",
    "t": "dropped-flow",
    "f": "dropped-flow",
}
_DROPPED_CATEGORIES: Mapping[str, str] = {
    "python_function": "dropped-python-function",
    "gpu_user_annotation": "dropped-gpu-user-annotation",
    "overhead": "dropped-overhead",
    "trace": "dropped-trace-span",
}

_EVENT_SCHEMA: Mapping[str, Any] = {
    "cat": pl.Enum(CATEGORIES),
    "name": pl.String(),
    "pid": pl.Int64(),
    "tid": pl.Int64(),
    "start_ns": pl.Int64(),
    "dur_ns": pl.Int64(),
    "correlation": pl.Int64(),
    "stream": pl.Int64(),
    "device": pl.Int64(),
    "external_id": pl.Int64(),
    "rf_id": pl.Int64(),
    "bytes": pl.Int64(),
}
_NO_ARGS = EventArgs()
_KEEP = ""
_COMM_ROWS = 4096
_FRAME_ROWS = 128 * 1024
_COMM_BY_NAME, _COMM_IF_ANNOTATION = 1, 2


class EventColumns:
    """Collects kept events batch by batch; `counts` receives totals, drops and clamps."""

    def __init__(self, keep_args: Sequence[str], counts: Counter[str]) -> None:
        self._keep_args = tuple(keep_args)
        self._counts = counts
        counts["events"] += 0  # present even when there are none
        self._fates: dict[tuple[str | None, str | None], tuple[int, str]] = {}
        self._names = _NamePool()
        self._parts: dict[str, list[pl.Series]] = {column: [] for column in _EVENT_SCHEMA}
        self._part_rows = 0
        self._frames: list[pl.DataFrame] = []
        self._kept: list[list[Any]] = [[] for _ in keep_args]
        self._comms: list[pl.DataFrame] = []
        self._comm_rows: list[tuple[Any, ...]] = []
        self._syncs: list[tuple[Any, ...]] = []
        self._rows = 0
        self._fractions = 0
        self._small_fractions = False

    def append(self, events: Sequence[Event]) -> None:
        """Add the events worth keeping (see CATEGORIES)."""
        self._counts["events"] += len(events)
        kept, cats = self._select(events)
        if not kept:
            return
        args = [e.args or _NO_ARGS for e in kept]
        names = np.fromiter(
            map(self._names.__getitem__, [e.name or "" for e in kept]), np.uint32, len(kept)
        )
        external = self._ints(
            [a.external_id_2021 if a.external_id is None else a.external_id for a in args]
        )
        columns = {
            "cat": pl.Series(cats),
            "name": pl.Series(names),
            "pid": self._ints([e.pid for e in kept]),
            "tid": self._ints([e.tid for e in kept]),
            "start_ns": pl.Series(self._times_ns([e.ts for e in kept])),
            "dur_ns": pl.Series(self._durations_ns([e.dur for e in kept])),
            "correlation": self._ints([a.correlation for a in args]),
            "stream": self._ints([a.stream for a in args]),
            "device": self._ints([a.device for a in args]),
            "external_id": external,
            "rf_id": self._ints([a.rf_id for a in args]),
            "bytes": self._ints([a.bytes for a in args]),
        }
        for column, series in columns.items():
            self._parts[column].append(series)
        for i, name in enumerate(self._keep_args):
            field = kept_field(i, name)
            self._kept[i].extend([getattr(a, field, None) for a in args])
        self._note_comms(args, names, cats)
        self._note_syncs(kept, args, cats)
        self._rows += len(kept)
        self._part_rows += len(kept)
        if self._part_rows >= _FRAME_ROWS:
            self._join_parts()

    def _join_parts(self) -> None:
        """Join what was collected into one table in its final form.

        Done every so often, because joining all parts at the end would need all rows twice.
        """
        columns = []
        for column, dtype in _EVENT_SCHEMA.items():
            parts = self._parts[column]
            series = pl.concat(parts, rechunk=True) if parts else pl.Series([], dtype=pl.UInt32)
            parts.clear()
            if column == "cat":
                series = pl.Series(CATEGORIES, dtype=dtype).gather(series)
            elif column == "name":
                series = pl.Series(list(self._names), dtype=dtype).gather(series)
            columns.append(series.cast(dtype).alias(column))
        is_gpu = pl.col("cat").is_in(CATEGORIES[:_GPU_CATEGORIES])
        stream = pl.coalesce("stream", "tid")
        self._part_rows = 0
        self._frames.append(
            pl.DataFrame(columns).with_columns(
                stream=pl.when(is_gpu & ~stream.is_in(NOTHING)).then(stream),
                device=pl.when(is_gpu).then(pl.coalesce("device", "pid")),
            )
        )

    def events(self, base_ns: int) -> pl.DataFrame | None:
        """The table of all kept events, `base_ns` added to their start; called once.

        None if a start or an end does not fit into int64.
        """
        self._counts["kept"] = self._rows
        if self._fractions > 1000 and not self._small_fractions:
            self._counts["ragged-fractions"] = self._fractions
        self._join_parts()
        frame = pl.concat(self._frames, rechunk=False)
        self._frames.clear()
        if not _fits(frame, base_ns):
            return None
        extra = [
            free_series(f"x_arg_{name}", values)
            for name, values in zip(self._keep_args, self._kept, strict=True)
        ]
        return frame.select(
            pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"), pl.all(), *extra
        ).with_columns(pl.col("start_ns") + base_ns)

    def comms(self) -> pl.DataFrame:
        """One row per event that describes a communication; `row` joins it to its event."""
        return pl.concat([*self._comms, comm_frame(self._comm_rows)])

    def syncs(self) -> pl.DataFrame:
        """One row per synchronization event; `row` joins it to its event."""
        return pl.DataFrame(self._syncs, schema=dict(SYNC_SCHEMA), orient="row")

    def _select(self, events: Sequence[Event]) -> tuple[list[Event], npt.NDArray[np.uint8]]:
        keys = [(e.ph, e.cat) for e in events]
        for key, n in Counter(keys).items():
            fate = self._fates.get(key)
            if fate is None:
                fate = self._fates[key] = _fate(*key)
            if fate[1] != _KEEP:
                self._counts[fate[1]] += n
        fates = [self._fates[key][0] for key in keys]
        keep = [fate >= 0 for fate in fates]
        kept = list(compress(events, keep))
        cats = np.fromiter(compress(fates, keep), np.uint8, len(kept))
        if None in [e.ts for e in kept]:
            timed = np.array([e.ts is not None for e in kept])
            self._counts["dropped-no-time"] += int((~timed).sum())
            return list(compress(kept, timed)), cats[timed]
        return kept, cats

    def _ints(self, values: list[Any]) -> pl.Series:
        return int64_series(values, self._counts)

    def _times_ns(self, times_us: list[Any]) -> npt.NDArray[np.int64]:
        ns = nanoseconds(times_us, self._counts)
        fractions = ns % 1000
        self._fractions += int(np.count_nonzero(fractions))
        self._small_fractions = self._small_fractions or bool(
            ((fractions > 0) & (fractions < 100)).any()
        )
        return ns

    def _durations_ns(self, durations_us: list[Any]) -> npt.NDArray[np.int64]:
        if missing := durations_us.count(None):
            self._counts["missing-duration"] += missing
            durations_us = [d or 0 for d in durations_us]
        ns = nanoseconds(durations_us, self._counts)
        negative = ns < 0
        if negative.any():
            self._counts["clamped-negative-duration"] += int(negative.sum())
            ns[negative] = 0
        return ns

    def _note_comms(
        self,
        args: Sequence[EventArgs],
        names: npt.NDArray[np.uint32],
        cats: npt.NDArray[np.uint8],
    ) -> None:
        flags = self._names.is_comm
        for i, (name, arg) in enumerate(zip(names.tolist(), args, strict=True)):
            flag = flags[name]
            if flag == _COMM_IF_ANNOTATION and cats[i] != _ANNOTATION:
                flag = 0
            if flag or arg.collective is not None:
                self._comm_rows.append((self._rows + i, *comm_values(arg, self._counts)))
        if len(self._comm_rows) >= _COMM_ROWS:
            self._comms.append(comm_frame(self._comm_rows))
            self._comm_rows.clear()

    def _note_syncs(
        self, kept: Sequence[Event], args: Sequence[EventArgs], cats: npt.NDArray[np.uint8]
    ) -> None:
        for i in np.flatnonzero(cats == _SYNC).tolist():
            values = sync_values(args[i], kept[i].name or "", self._counts)
            self._syncs.append((self._rows + i, *values))


def _fits(frame: pl.DataFrame, base_ns: int) -> bool:
    """Whether all starts and ends stay in int64 when `base_ns` is added."""
    if frame.is_empty():
        return True
    start, duration = frame["start_ns"], frame["dur_ns"]
    # Python's integers do not overflow.
    first, last = (int(value) + base_ns for value in (start.min(), start.max()))  # type: ignore[arg-type]
    return first >= -(2**63) and last + int(duration.max()) < 2**63  # type: ignore[arg-type]


class _NamePool(dict[str, int]):
    """Numbers names in order of appearance; `is_comm[n]` says whether name n marks one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_comm: list[int] = []

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        if name == "record_param_comms" or name.startswith("c10d::"):
            self.is_comm.append(_COMM_BY_NAME)
        else:
            self.is_comm.append(_COMM_IF_ANNOTATION if name.startswith("gloo:") else 0)
        return number


def _fate(phase: str | None, category: str | None) -> tuple[int, str]:
    """Index in CATEGORIES and _KEEP, or -1 and the name under which the event is dropped."""
    if phase != "X":
        if (category or "").lower() == "critical_path":
            return -1, "dropped-critical-path-flow"
        return -1, _DROPPED_PHASES.get(phase or "", "dropped-other-phase")
    name = (category or "").lower()
    name = _ALIASES.get(name, name)
    if name in CATEGORIES:
        return CATEGORIES.index(name), _KEEP
    return -1, _DROPPED_CATEGORIES.get(name, "dropped-other-category")
