"""Which rank, stage, replica, group or kind of operation makes a job slow, and by how much.

Three timelines of the same graph:

    base             as it was
    without delays   every operation starts as soon as what it depends on has ended
    ideal            besides, every operation takes as long as its peers (see `peers`)

A part of the job (say, stage 3) is judged twice.  Its *slowdown*: the ideal timeline with only
the part's own durations put back, divided by the ideal one.  What it *saves*: how much shorter
the timeline without delays gets when only the part takes as long as its peers.

What the step would take without a likely *cause* is another question: there only the difference
that the cause names is taken out, and everything else stays uneven (see `causes`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import polars as pl

from prismcalib.block_graph import graph_from_blocks
from prismcalib.blocks import HeldTable, Layout, Tables, is_large
from prismcalib.build import graph_from_trace
from prismcalib.causes import Cause, find_causes
from prismcalib.chosen_steps import ChosenSteps, chosen_steps, told
from prismcalib.errors import MergeInputError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.peers import Peers, is_operation_level, kind_labels, peer_durations
from prismcalib.places import Places
from prismcalib.propagation import Engine
from prismcalib.stages import job_places
from prismcalib.timelines import Timeline, labelled
from prismcalib.wording import RankNames, merge_first
from prismtrace.group_names import group_labels
from prismtrace.schema import TraceHeader, TraceKind
from prismtrace.trace import Trace, open_trace

__all__ = ["BY", "Part", "StragglerReport", "find_stragglers"]

By = Literal["kind", "stage", "replica", "rank", "group"]
"""Sorts of parts of a job."""
BY: tuple[By, ...] = ("kind", "stage", "replica", "rank", "group")

# Rows times parts of a sort that take minutes; of large traces fewer parts are simulated.
_MOST_ROWS = 64 * 10**7
_FEWEST_PARTS = 8
# Of a large graph, beside it: typical durations, labels, and two scenarios of durations and ends.
_RUN_BYTES = 60


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the job and what it costs.

    Attributes:
        name: the rank, stage, replica, group or kind.
        slowdown: mean step time with only this part's durations put back, over the ideal.
        saves: share of the step time (without delays) that goes when the part is like its peers.
        slowdown_per_step: float64[S].
        busy_ns: total duration of the part's operations, waiting excluded.
    """

    name: str
    slowdown: float
    saves: float
    slowdown_per_step: np.ndarray[Any, np.dtype[np.float64]]
    busy_ns: int


@dataclass(frozen=True, eq=False)
class StragglerReport:
    """What slows a job down.

    Attributes:
        steps: numbers of the steps after the warm-up; (None,) if the trace marks none.
        warmup: how many first steps were left out (see `merge --warmup`).
        base_ns, without_delays_ns, ideal_ns: int64[S], step times of the three timelines.
        peers: how peers were found.
        without_peers: rows that have no peer on another rank and keep their duration.
        parts: by kind, stage, replica, rank and group, those with the largest slowdown first.
        not_simulated: parts left out for their number, all with small differences.
        causes: what the pattern looks like, largest saving first.
        source_ranks: numbers of the ranks in the source, if they were numbered anew.
        looked_at: which steps of the trace it is about; None: all that was given.
        rows: how many rows were to be compared.
    """

    steps: tuple[int | None, ...]
    base_ns: Int64Array
    without_delays_ns: Int64Array
    ideal_ns: Int64Array
    peers: Peers
    without_peers: int
    parts: dict[By, tuple[Part, ...]]
    causes: tuple[Cause, ...] = ()
    not_simulated: dict[By, int] = field(default_factory=dict)
    source_ranks: tuple[int, ...] | None = None
    warmup: int = 0
    looked_at: ChosenSteps | None = None
    rows: int = 0

    @property
    def nothing_compared(self) -> bool:
        """Whether no row has a peer: then slowdowns of 1 say nothing."""
        return 0 < self.rows <= self.without_peers

    @property
    def launch_slowdown(self) -> float:
        """Mean base over mean without delays: what late launches cost."""
        return _ratio(self.base_ns, self.without_delays_ns)

    @property
    def slowdown(self) -> float:
        """Mean without delays over mean ideal: what uneven durations cost."""
        return _ratio(self.without_delays_ns, self.ideal_ns)

    def part(self, by: By, name: object) -> Part:
        """The part of that name.

        Raises:
            KeyError: there is none.
        """
        for part in self.parts.get(by, ()):
            if part.name == str(name):
                return part
        raise KeyError(f"no {by} {name}")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        base, without, ideal = (
            values.tolist() for values in (self.base_ns, self.without_delays_ns, self.ideal_ns)
        )
        rows = zip(self.steps, base, without, ideal, strict=True)
        return {
            **told(self.looked_at),
            "peers": self.peers,
            "rows_without_peers": self.without_peers,
            "nothing_compared": self.nothing_compared,
            "warmup_steps": self.warmup,
            "launch_slowdown": self.launch_slowdown,
            "slowdown": self.slowdown,
            "steps": [
                {"step": step, "base_ns": b, "without_delays_ns": w, "ideal_ns": i}
                for step, b, w, i in rows
            ],
            "parts": {
                by: [
                    {
                        "name": part.name,
                        "slowdown": part.slowdown,
                        "saves": part.saves,
                        "busy_ns": part.busy_ns,
                        "slowdown_per_step": part.slowdown_per_step.tolist(),
                    }
                    for part in parts
                ]
                for by, parts in self.parts.items()
            },
            "not_simulated": self.not_simulated,
            "causes": [cause.as_dict() for cause in self.causes],
            "source_ranks": None if self.source_ranks is None else list(self.source_ranks),
        }


def _ratio(above: Int64Array, below: Int64Array) -> float:
    return float(above.mean() / below.mean()) if below.any() else 1.0


def find_stragglers(
    source: Trace | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    by: Iterable[By] = BY,
    peers: Peers | Literal["auto"] = "auto",
    limit: int = 128,
    engine: Engine = "auto",
    steps: str = "auto",
) -> StragglerReport:
    """Find what slows a job down.

    Args:
        source: a calibrated trace, or a converted operation-level log.
        by: what to judge; stages only where sends or process groups tell them, replicas where
            the groups do.
        peers: `auto` compares by `type` in operation-level traces, else by `position`.
        limit: parts to simulate of each sort, those that differ most from their peers; fewer
            in traces of more than 5 million rows, eight from 80 million on.
        engine: see `prismcalib.propagate`.
        steps: which to look at, see `prismcalib.chosen_steps.chosen_steps`.

    Raises:
        MergeInputError: the trace does not tell transfer from waiting.
        StepError: steps that are not in it.
    """
    whole = source if isinstance(source, Trace) else open_trace(source)
    with chosen_steps(whole, steps) as (trace, looked_at):
        found = _stragglers(trace, tuple(by), peers, limit, engine)
    return replace(found, looked_at=looked_at)


def _stragglers(
    trace: Trace, by: tuple[By, ...], peers: Peers | Literal["auto"], limit: int, engine: Engine
) -> StragglerReport:
    graph, nodes = _opened(trace)
    _require_transfers(trace, graph, nodes)
    header = trace.header
    chosen: Peers = (
        peers if peers != "auto" else ("type" if is_operation_level(header) else "position")
    )
    timeline = Timeline.of(graph, nodes, header, engine)
    delays = () if isinstance(nodes, Layout) else timeline.delays(graph, nodes)
    del graph  # with its lags and releases, which the timeline has not
    actual = timeline.graph.duration_ns
    ideal, without_peers = peer_durations(nodes, header, actual, chosen)
    places = job_places(header, nodes)
    two = timeline.step_ns(np.stack([actual, ideal], axis=1))
    parts: dict[By, tuple[Part, ...]] = {}
    left_out: dict[By, int] = {}
    most = max(_FEWEST_PARTS, min(limit, _MOST_ROWS // max(nodes.total, 1)))
    for sort in by:
        names, label = _labels(sort, nodes, header, places)
        if len(names) < 2 and sort != "kind":
            continue
        worst = _worst(label, actual - ideal, len(names), min(limit, most))
        parts[sort] = _judge(timeline, actual, ideal, two, label, names, worst)
        if len(worst) < len(names):
            left_out[sort] = len(names) - len(worst)
    base = timeline.observed_ns(nodes, header)
    return StragglerReport(
        steps=timeline.steps[timeline.warmup :],
        warmup=timeline.warmup,
        base_ns=base,
        without_delays_ns=two[0],
        ideal_ns=two[1],
        peers=chosen,
        without_peers=without_peers,
        parts=parts,
        causes=find_causes(
            nodes, header, places, timeline.mean_step_ns, actual, base, chosen, delays
        ),
        not_simulated=left_out,
        source_ranks=RankNames.of(header).source,
        rows=len(actual),
    )


def _opened(trace: Trace) -> tuple[Graph, Tables]:
    if is_large(trace):
        layout = Layout.of(trace)
        return graph_from_blocks(layout, also=_RUN_BYTES), layout
    graph, rows = graph_from_trace(trace)
    return graph, HeldTable(rows)


def _require_transfers(trace: Trace, graph: Graph, nodes: Tables) -> None:
    """Durations without waiting must be known, or every part would look like the late one."""
    kind = trace.header.kind
    unknown, first = False, 0
    for table in nodes.tables(["transfer_ns"]):
        waits = graph.instance[first : first + table.height] >= 0
        unknown |= bool((table["transfer_ns"].is_null().to_numpy() & waits).any())
        first += table.height
    if kind == TraceKind.CALIBRATED and not unknown:
        return
    if kind == TraceKind.RECORDED and not unknown and len(trace.header.clock) == 1:
        return
    raise MergeInputError(
        f"a {kind} trace does not tell how long operations took without waiting",
        where=", ".join(str(path) for path in trace.paths) or None,
        hint=merge_first(kind),
    )


# --- parts ------------------------------------------------------------------------------------


def _labels(
    by: By, nodes: Tables, header: TraceHeader, places: Places
) -> tuple[list[str], Int32Array]:
    """Names of the parts, and int32[n] the part of each row (-1: none)."""
    if by == "group":
        number = {group.id: position for position, group in enumerate(header.groups)}
        label = pl.col("group").replace_strict(number, default=-1, return_dtype=pl.Int32)
        column = label.fill_null(-1).alias("label")
        return list(group_labels(header.groups).values()), labelled(nodes, column)
    if by == "kind":
        return _kind_labels(nodes, header)
    rank = labelled(nodes, pl.col("rank").alias("label"))
    if by == "rank":
        return [str(number) for number in range(header.world_size)], rank
    count, place = (
        (places.stages, places.stage) if by == "stage" else (places.replicas, places.replica)
    )
    return [str(number) for number in range(count)], place.astype(np.int32)[rank]


def _kind_labels(nodes: Tables, header: TraceHeader) -> tuple[list[str], Int32Array]:
    found: dict[str, int] = {}
    parts = []
    for table in nodes.tables(["name", "kind", "phase", "group"]):
        text = kind_labels(table, header)
        for name in text.drop_nulls().unique().to_list():
            found.setdefault(name, len(found))
        part = text.replace_strict(found, default=None, return_dtype=pl.Int32)
        parts.append(part.fill_null(-1).to_numpy())
    names = sorted(found)
    place = {name: position for position, name in enumerate(names)}
    # The last entry serves -1.
    sorted_place = np.array([*(place[name] for name in found), -1], np.int32)
    return names, sorted_place[np.concatenate(parts)]


def _worst(label: Int32Array, excess: Int64Array, count: int, limit: int) -> Int64Array:
    """The parts that exist, those that take most longer than their peers first; at most `limit`."""
    total = np.bincount(label + 1, weights=excess, minlength=count + 1)[1:]
    present = np.bincount(label + 1, minlength=count + 1)[1:] > 0
    order = np.argsort(-total, kind="stable")
    worst: Int64Array = order[present[order]][:limit].astype(np.int64)
    return worst


def _judge(
    timeline: Timeline,
    actual: Int64Array,
    ideal: Int64Array,
    two: Int64Array,
    label: Int32Array,
    names: Sequence[str],
    chosen: Int64Array,
) -> tuple[Part, ...]:
    """Simulate parts, two scenarios each; those with the largest slowdown first."""
    busy = np.bincount(label + 1, weights=actual, minlength=len(names) + 1)[1:]
    mean_actual = float(two[0].mean()) or 1.0
    mean_ideal = float(two[1].mean()) or 1.0
    ideal_steps = np.maximum(two[1], 1)
    found: list[Part] = []
    block = timeline.width // 2
    for first in range(0, len(chosen), block):
        some = chosen[first : first + block]
        position = np.full(len(names) + 1, -1, np.int32)  # the last entry serves label -1
        position[some] = np.arange(len(some), dtype=np.int32)
        column = position[label]
        rows = np.flatnonzero(column >= 0)
        durations = np.empty((len(actual), 2 * len(some)), np.int64)
        durations[:, : len(some)] = ideal[:, None]
        durations[:, len(some) :] = actual[:, None]
        durations[rows, column[rows]] = actual[rows]
        durations[rows, column[rows] + len(some)] = ideal[rows]
        times = timeline.step_ns(durations)
        for at, part in enumerate(some):
            found.append(
                Part(
                    name=names[part],
                    slowdown=float(times[at].mean()) / mean_ideal,
                    saves=1 - float(times[at + len(some)].mean()) / mean_actual,
                    slowdown_per_step=times[at] / ideal_steps,
                    busy_ns=int(busy[part]),
                )
            )
    return tuple(sorted(found, key=lambda part: -part.slowdown))
