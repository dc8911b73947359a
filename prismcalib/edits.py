"""Edits of a run: what should be different, said without touching the trace.

    Scale('kind == "all_reduce"', 0.5)            transfers of all all-reduces halved
    SetDuration("name LIKE 'embed%'", 0)          these rows take no time
    Drop("kind = 'memcpy'")                       as if the rows were not there
    ScaleGaps("rank = 3", 0)                      no idle time before rows of rank 3
    SwapDurations("other.parquet", "rank = 3")    as fast as in another run

Durations are own times: computation, or transfer without waiting, which follows from the rest.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.blocks import Layout, is_large
from prismcalib.build import graph_from_trace, require_rows_of_ranks
from prismcalib.chosen_steps import ChosenSteps
from prismcalib.durations import parse_ns
from prismcalib.errors import ScenarioError
from prismcalib.graph import MAX_TOTAL_NS, Graph, Int64Array
from prismcalib.paths import calibrated_trace
from prismcalib.predicates import Predicate, RowPicker
from prismtrace.errors import InputFileError
from prismtrace.trace import Trace

__all__ = [
    "Draft",
    "Drop",
    "Edit",
    "Scale",
    "ScaleGaps",
    "SetDuration",
    "SwapDurations",
    "read_scenarios",
    "scenario_edits",
]


@dataclass(eq=False)
class Draft:
    """One scenario in the making.

    Attributes:
        picker: the rows.
        graph: structure and lags; replaced when an edit changes them.
        duration_ns: int64[n], writable.
        edited: bool[n], rows that some edit applied to.
        apart: whether steps are laid side by side (`prismcalib.steps`), so that releases are
            idle time from the begin of their step.
        same_order: whether an order of completion of the unedited graph is still one.
        looked_at: which steps of their trace the rows are.
    """

    picker: RowPicker
    graph: Graph
    duration_ns: Int64Array
    edited: NDArray[np.bool_]
    looked_at: ChosenSteps
    apart: bool = False
    same_order: bool = True

    @classmethod
    def of(
        cls,
        picker: RowPicker,
        graph: Graph,
        looked_at: ChosenSteps | None = None,
        *,
        apart: bool = False,
    ) -> Draft:
        """Nothing edited yet; `looked_at` None: all steps of the trace."""
        looked_at = looked_at or ChosenSteps(picker.header.steps)
        edited = np.zeros(graph.rows, np.bool_)
        return cls(picker, graph, graph.duration_ns.copy(), edited, looked_at, apart)

    def pick(self, where: Predicate) -> NDArray[np.bool_]:
        """Rows of a predicate, marked as edited."""
        picked = self.picker.pick(where)
        self.edited |= picked
        return picked


@dataclass(frozen=True)
class Scale:
    """Multiply durations by a factor >= 0.

    Attributes:
        where: the rows.
        by: the factor.
    """

    where: Predicate
    by: float

    def apply(self, draft: Draft) -> None:
        """Change the draft."""
        picked = draft.pick(self.where)
        draft.duration_ns[picked] = _times(draft.duration_ns[picked], self.by)


@dataclass(frozen=True)
class SetDuration:
    """Give every row the same duration.

    Attributes:
        where: the rows.
        ns: the duration, >= 0.
    """

    where: Predicate
    ns: int

    def apply(self, draft: Draft) -> None:
        """Change the draft."""
        if self.ns < 0:
            raise ScenarioError(f"a duration cannot be {self.ns} ns", where=str(self.where))
        draft.duration_ns[draft.pick(self.where)] = self.ns


@dataclass(frozen=True)
class ScaleGaps:
    """Multiply the idle time between spans, before rows (launch gaps), by a factor >= 0.

    Rows that depend on nothing keep the time they were recorded at, except in traces of
    separate steps, where the idle time from the begin of the step is scaled.

    Attributes:
        where: the rows.
        by: the factor.
    """

    where: Predicate
    by: float

    def apply(self, draft: Draft) -> None:
        """Change the draft."""
        picked = draft.pick(self.where)
        _scale_lags(draft, picked, self.by)


@dataclass(frozen=True)
class Drop:
    """Take rows out: no duration, no gap before them, and nobody waits for them.

    What depended on a dropped row depends on what the row depended on.  Of a communication,
    drop all members, unless the others are meant to go on without the dropped ones.

    Attributes:
        where: the rows.
    """

    where: Predicate

    def apply(self, draft: Draft) -> None:
        """Change the draft."""
        picked = draft.pick(self.where)
        draft.duration_ns[picked] = 0
        _scale_lags(draft, picked, 0)
        draft.graph = _leave_instances(draft.graph, picked)
        draft.same_order = False


@dataclass(frozen=True)
class SwapDurations:
    """Take the durations of the same operations in another calibrated trace.

    The same operation: same rank, same step, same place within the rank's step.  Steps are the
    same by their number, or, if none of the numbers looked at is in the other trace, counted from
    the first.  Rows that the other trace does not have keep their durations.

    Attributes:
        other: the other trace.
        where: of these rows; None: of all.
    """

    other: str | os.PathLike[str]
    where: Predicate | None = None

    def apply(self, draft: Draft) -> None:
        """Change the draft."""
        other_ns = _counterparts(draft, self.other)
        picked = other_ns >= 0
        if self.where is not None:
            picked &= draft.picker.pick(self.where)
        if not picked.any():
            raise ScenarioError(
                "the other trace holds none of the rows meant",
                where=os.fspath(self.other),
                hint="swap durations between runs of the same job",
            )
        draft.edited |= picked
        draft.duration_ns[picked] = other_ns[picked]


Edit = Scale | SetDuration | ScaleGaps | Drop | SwapDurations
"""One change of a run; a scenario is a list of them."""


def read_scenarios(path: str | os.PathLike[str]) -> dict[str, list[Edit]]:
    """Scenarios of a TOML or JSON file, by name; `path` is where it is.

        [[scenario]]
        name = "faster all-reduce"
        edits = [
            { scale = 0.5, where = "kind = 'all_reduce'" },
            { drop = true, where = "kind = 'memcpy'" },
        ]

    An edit has one of the keys `scale`, `scale_gaps` (factor), `set` (duration, as "1.5ms"),
    `drop` (true), `swap_durations_from` (path, from the file's folder), and `where`.

    Raises:
        InputFileError: no such file.
        ScenarioError: not TOML or JSON, or not as above.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError as error:
        raise InputFileError("no such file", where=str(file), hint="check the path") from error
    except (OSError, ValueError) as error:
        raise ScenarioError(f"cannot be read: {error}", where=str(file)) from error
    entries = found.get("scenario") if isinstance(found, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ScenarioError("holds no [[scenario]]", where=str(file))
    scenarios: dict[str, list[Edit]] = {}
    for number, entry in enumerate(entries, 1):
        place = f"{file}, scenario {number}"
        name = entry.get("name") if isinstance(entry, Mapping) else None
        edits = entry.get("edits") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(edits, list) or not edits:
            raise ScenarioError("needs a name and a list of edits", where=place)
        if name in scenarios:
            raise ScenarioError(f"there are two scenarios named {name!r}", where=place)
        if set(entry) - {"name", "edits"}:
            raise ScenarioError(f"unknown key {min(set(entry) - {'name', 'edits'})}", where=place)
        scenarios[name] = [
            _edit(edit, f"{place} ({name}), edit {i}", file.parent)
            for i, edit in enumerate(edits, 1)
        ]
    return scenarios


_ACTIONS = ("scale", "scale_gaps", "set", "drop", "swap_durations_from")


def _edit(entry: Any, place: str, folder: Path) -> Edit:
    """An edit of a scenario file."""
    keys = set(entry) if isinstance(entry, Mapping) else set()
    actions = keys & set(_ACTIONS)
    if len(actions) != 1 or keys - actions - {"where"}:
        raise ScenarioError(
            f"needs one of {', '.join(_ACTIONS)}, and where; it has {sorted(keys) or entry!r}",
            where=place,
        )
    (action,) = actions
    value, where = entry[action], entry.get("where")
    if where is None and action == "swap_durations_from":
        where = ""
    if not isinstance(where, str):
        raise ScenarioError("needs a predicate as text under `where`", where=place)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if action in ("scale", "scale_gaps") and number:
        return Scale(where, value) if action == "scale" else ScaleGaps(where, value)
    if action == "set" and isinstance(value, str):
        try:
            return SetDuration(where, parse_ns(value))
        except ValueError as error:
            raise ScenarioError(str(error), where=place) from error
    if action == "drop" and value is True:
        return Drop(where)
    if action == "swap_durations_from" and isinstance(value, str):
        return SwapDurations(folder / value, where or None)
    raise ScenarioError(f"{action} = {value!r} is not understood", where=place)


def _times(values: Int64Array, factor: float) -> Int64Array:
    if not (math.isfinite(factor) and factor >= 0):
        raise ScenarioError(f"a factor is a number from 0 on, not {factor}")
    if values.size and float(values.max()) * factor >= MAX_TOTAL_NS:
        raise ScenarioError(f"a factor of {factor} makes durations overflow")
    scaled: Int64Array = np.rint(values * factor).astype(np.int64)
    return scaled


def _scale_lags(draft: Draft, picked: NDArray[np.bool_], factor: float) -> None:
    graph = draft.graph
    lags, release = graph.dep_lag_ns, graph.release_ns
    if lags is not None:
        owned = np.repeat(picked, np.diff(graph.dep_offsets))
        lags = lags.copy()
        lags[owned] = _times(lags[owned], factor)
    if draft.apart and release is not None:
        release = release.copy()
        release[picked] = _times(release[picked], factor)
    draft.graph = replace(graph, dep_lag_ns=lags, release_ns=release)


def _leave_instances(graph: Graph, picked: NDArray[np.bool_]) -> Graph:
    """The graph in which the picked rows wait for nobody and nobody for them."""
    instance = graph.instance.copy()
    left = np.bincount(instance[picked & (instance >= 0)], minlength=graph.instances)
    instance[picked] = -1
    size = graph.instance_size - left
    kept = size > 0
    number = np.append(np.cumsum(kept) - 1, [-1])  # index -1: no instance
    offsets, rows = graph.wait_offsets, graph.wait_rows
    if offsets is not None and rows is not None:
        owner = np.repeat(np.arange(graph.rows), np.diff(offsets))
        stays = ~(picked[owner] | picked[rows])
        counts = np.bincount(owner[stays], minlength=graph.rows)
        offsets, rows = np.append([0], np.cumsum(counts)), rows[stays]
    return replace(
        graph,
        instance=number[instance].astype(np.int32),
        instance_size=size[kept].astype(np.int32),
        wait_offsets=offsets,
        wait_rows=rows,
    )


def _counterparts(draft: Draft, other: str | os.PathLike[str]) -> Int64Array:
    """int64[n]: durations of the same operations in another trace; -1: it does not have them."""
    trace = calibrated_trace(other)
    find = _tables(trace, _same_steps(draft.looked_at, trace.header.steps))
    other_ns, differing = [np.empty(0, np.int64)], []
    for rows in draft.picker.places():
        found = _places(rows).join(
            find(rows["rank"]).rename({"kind": "other_kind"}),
            on=["rank", "step", "place"],
            how="left",
            maintain_order="left",
            nulls_equal=True,
        )
        differing.append(found.filter(pl.col("kind") != pl.col("other_kind")))
        other_ns.append(found["other_ns"].fill_null(-1).to_numpy())
    differs = pl.concat(differing)
    if differs.height:
        first = differs.row(0, named=True)
        step = "outside of steps" if first["step"] is None else f"step={first['step']}"
        raise ScenarioError(
            f"the runs differ: here {first['kind']}, there {first['other_kind']} "
            f"({differs.height} such rows)",
            where=f"{os.fspath(other)}, rank={first['rank']} {step} operation {first['place']}",
            hint="swap durations between runs of the same job and code",
        )
    return np.concatenate(other_ns)


def _same_steps(looked_at: ChosenSteps, other: Sequence[int]) -> dict[int, int]:
    """Steps of another trace by number, and what each is called here; empty: the same."""
    if set(looked_at.steps) & set(other):
        return {}
    return dict(zip(other[len(looked_at.before) :], looked_at.steps, strict=False))


def _tables(trace: Trace, steps: Mapping[int, int]) -> Callable[[pl.Series], pl.DataFrame]:
    """What looks up some ranks in a trace: columns of `_places`, and own durations other_ns."""

    def renumbered(rows: pl.DataFrame) -> pl.DataFrame:
        known = pl.col("step").is_null() | pl.col("step").is_in(list(steps))
        return rows.filter(known).with_columns(pl.col("step").replace(steps)) if steps else rows

    if not is_large(trace):
        graph, rows = graph_from_trace(trace)
        whole = renumbered(_places(rows).with_columns(other_ns=pl.Series(graph.duration_ns)))
        return lambda _: whole
    layout = Layout.of(trace)
    require_rows_of_ranks(set(layout.ranks.tolist()), trace)
    member = pl.col("seq").is_not_null() & pl.col("group").is_not_null()
    own = pl.when(member).then(pl.col("transfer_ns")).fill_null(pl.col("dur_ns")).alias("other_ns")

    def some(ranks: pl.Series) -> pl.DataFrame:
        low, high = map(int, np.searchsorted(layout.ranks, [ranks[0], ranks[-1] + 1]))
        found = layout.read(low, max(high, low + 1), ["rank", "kind", "step", own])
        rows = found if low < high else found.clear()
        return renumbered(_places(rows).with_columns(rows["other_ns"].cast(pl.Int64)))

    return some


def _places(rows: pl.DataFrame) -> pl.DataFrame:
    """Where each row stands in its rank's program."""
    return rows.select(
        "rank",
        "step",
        pl.col("kind").cast(pl.String),
        place=pl.int_range(pl.len(), dtype=pl.Int32).over("rank", "step"),
    )


def scenario_edits(
    edits: Sequence[Edit] | Mapping[str, Sequence[Edit]], default: str
) -> dict[str, list[Edit]]:
    """Named lists of edits; a bare list is one scenario."""
    if isinstance(edits, Mapping):
        return {name: list(listed) for name, listed in edits.items()}
    return {default: list(edits)}
