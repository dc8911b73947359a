"""What a slicing campaign leaves: for every group of ranks a run with only these being real.

In a slice the real ranks run as in the job, but the others are played by *virtual* ranks that
compute nothing: they take part in the communications of the real ranks and are always there
first.  So a real rank waits for other real ranks of its slice only, its waits differ from
those in the job, and durations, gaps and transfers do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from prismcalib.errors import MergeInputError
from prismcalib.graph import Int64Array
from prismcalib.propagation import Timing, propagate
from prismcalib.synth.sources import Part, Partners, Source, source_of
from prismcalib.synth.spec import JobSpec
from prismcalib.synth.times import generator
from prismtrace.schema import ClockDomain, SliceInfo, TraceHeader, TraceKind, TransferSource
from prismtrace.trace import Trace, node_schema, write_nodes

__all__ = ["bare_graph", "cut_into_slices"]

_MEASURED = (
    "start_ns",
    "dur_ns",
    "transfer_ns",
    "transfer_source",
    "lag_ns",
    "mem_bytes",
    "mem_peak_bytes",
    "wait_ns",
    "slack_ns",
    "critical",
)
_OBSERVED = ("x_observed_start_ns", "x_observed_dur_ns")

# What a generator is for.
_NOISE, _CLOCKS = 0, 1

# Clocks read something between 1970 and now.
_FIRST_ORIGIN_NS, _LAST_ORIGIN_NS = 10**15, 17 * 10**17


def bare_graph(trace: Trace) -> Trace:
    """The structure of a `trace`: its nodes and dependencies without any times or memory."""
    nothing = [pl.lit(None, node_schema()[name]).alias(name) for name in _MEASURED]
    nodes = trace.nodes.drop(_OBSERVED, strict=False).with_columns(
        *nothing, real=pl.lit(value=False)
    )
    header = trace.header.model_copy(
        update={"kind": TraceKind.BARE, "clock": (), "slice": None, "policies": {}, "extra": {}}
    )
    return Trace(header=header, nodes=nodes)


def cut_into_slices(
    job: Trace | JobSpec,
    folder: str | os.PathLike[str],
    real_ranks_per_slice: int | Sequence[Sequence[int]],
    *,
    seed: int = 0,
    noise: float = 0.0,
    drift_ppm: float = 0.0,
    virtual: Literal["early", "none"] = "early",
    repeats: int = 1,
    transfers: Literal["observed", "given"] = "observed",
    ranks_per_clock: int | None = None,
) -> list[Path]:
    """Run every slice of a job and write one file for each; returns their paths in order.

    Without noise and drift the slices tell everything about the job: durations of
    computations, `start - latest end of dependencies` of all rows of real ranks, and transfers
    (end minus the last start among the members) are those of the job.  Gaps of a recorded
    trace in which rows start before a dependency has ended count as 0.

    A slice holds all rows of its real ranks, in the order and with the ids of the job, and for
    each of their communications the rows of the virtual ranks that take part; these have no
    `deps`, and their `index` has gaps.

    Args:
        job: a recorded or calibrated trace, or the spec of a job of any size, of which only
            one slice at a time is in memory.
        folder: is made if need be; files are `slice-0000.parquet` and so on, with several
            repeats `slice-0000-repeat-0.parquet`.
        real_ranks_per_slice: neighbours that are real together, or a list of rank lists.
        seed: of noise and clocks.
        noise: relative standard deviation of every duration, transfer and gap, drawn anew for
            every row and repeat; no deviation is larger than three times that.
        drift_ppm: clocks run up to this much too fast or slow.
        virtual: `none` leaves out the rows of virtual ranks.
        repeats: executions of each slice.
        transfers: `given` fills `transfer_ns` of real ranks instead of leaving it to be found.
        ranks_per_clock: as many neighbouring ranks share a clock; None: one clock for a slice.

    Raises:
        MergeInputError: the trace has no true times.
        CalibError: rank numbers are not those of the job.
        OutputError: a file cannot be written.
    """
    source = source_of(job)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    groups = _rank_lists(real_ranks_per_slice, source.header)
    digits = max(4, len(str(len(groups) - 1)))
    paths = []
    for number, ranks in enumerate(groups):
        part, partners = source.take(ranks, partners=virtual == "early")
        for repeat in range(repeats):
            timing = _execute(part, noise, generator(seed, number, repeat, _NOISE))
            rows = _real_rows(part, timing, given=transfers == "given")
            if partners is not None:
                rows = _joined(rows, _virtual_rows(partners, part, timing))
            header = _header(source, number, ranks, rows, ranks_per_clock)
            header, rows = _misread(
                header, rows, drift_ppm, generator(seed, number, repeat, _CLOCKS)
            )
            suffix = f"-repeat-{repeat}" if repeats > 1 else ""
            path = target / f"slice-{number:0{digits}}{suffix}.parquet"
            write_nodes(header, rows.lazy(), path)
            paths.append(path)
    return paths


def _rank_lists(chosen: int | Sequence[Sequence[int]], header: TraceHeader) -> list[Int64Array]:
    present = np.array(sorted(header.ranks))
    if isinstance(chosen, int):
        if chosen < 1:
            raise MergeInputError("a slice needs at least one real rank")
        return [present[at : at + chosen] for at in range(0, len(present), chosen)]
    groups = [np.unique(np.asarray(ranks, np.int64)) for ranks in chosen]
    for ranks in groups:
        unknown = ranks[~np.isin(ranks, present)]
        if not len(ranks) or len(unknown):
            raise MergeInputError(
                f"the job has no rank {unknown[0]}" if len(ranks) else "a slice has no real rank",
                where=f"real_ranks={ranks.tolist()}",
            )
    return groups


def _execute(part: Part, noise: float, random: np.random.Generator) -> Timing:
    """Run the real ranks of a slice; virtual ones never hold them up."""
    graph = part.graph
    duration, gap = graph.duration_ns, part.gap_ns
    if noise:
        duration = _blur(duration, noise, random)
        gap = None if gap is None else _blur(gap, noise, random)
    lags = None if gap is None else np.repeat(gap, np.diff(graph.dep_offsets))
    return propagate(replace(graph, duration_ns=duration, dep_lag_ns=lags))


def _blur(times: Int64Array, noise: float, random: np.random.Generator) -> Int64Array:
    factor = 1 + noise * np.clip(random.standard_normal(len(times)), -3, 3)
    return np.rint(times * np.maximum(factor, 0)).astype(np.int64)


def _real_rows(part: Part, timing: Timing, *, given: bool) -> pl.DataFrame:
    instance = part.graph.instance
    member = instance >= 0
    whole = member & np.append(part.complete, values=False)[instance]
    source = (
        pl.when(pl.Series(whole))
        .then(pl.lit(TransferSource.MEASURED.value))
        .when(pl.Series(member))
        .then(pl.lit(TransferSource.RING.value))
        .cast(node_schema()["transfer_source"])
    )
    rows = part.rows.with_columns(
        start_ns=pl.Series(timing.start_ns),
        dur_ns=pl.Series(timing.end_ns - timing.start_ns),
        transfer_source=source,
        real=pl.lit(value=True),
    )
    if given:
        transfer = pl.when(pl.Series(member)).then(pl.Series(timing.duration_ns))
        return rows.with_columns(transfer_ns=transfer)
    return rows.with_columns(transfer_ns=pl.lit(None, pl.Int64))


def _virtual_rows(partners: Partners, part: Part, timing: Timing) -> pl.DataFrame:
    """Virtual ranks go from one communication to the next on each of their streams."""
    instance = part.graph.instance
    member = instance >= 0
    ready = np.zeros(part.graph.instances, np.int64)
    ready[instance[member]] = timing.ready_ns[member]
    # They leave with the first real member, so that they are back before any of them.
    end = np.full(part.graph.instances, np.iinfo(np.int64).max)
    np.minimum.at(end, instance[member], timing.end_ns[member])
    stream = ["rank", "stream"]
    rows = partners.rows.with_columns(
        ready=pl.Series(ready[partners.instance]), end=pl.Series(end[partners.instance])
    ).with_columns(free=pl.col("end").cum_max().shift(1, fill_value=0).over(stream))
    # The operations of a batch wait for what was before all of them.
    first = pl.col("free").first().over([*stream, "batch"])
    free = pl.when(pl.col("batch").is_null()).then("free").otherwise(first)
    none = {name: pl.lit(None, node_schema()[name]) for name in ("transfer_ns", "transfer_source")}
    memory = {
        name: pl.lit(None, pl.Int64)
        for name in ("mem_bytes", "mem_peak_bytes")
        if name in rows.columns
    }
    return (
        rows.with_columns(start_ns=pl.min_horizontal(free, "ready"))
        .with_columns(
            dur_ns=pl.col("end") - pl.col("start_ns"), real=pl.lit(value=False), **none, **memory
        )
        .drop("ready", "end", "free")
    )


def _joined(real: pl.DataFrame, virtual: pl.DataFrame) -> pl.DataFrame:
    return real.merge_sorted(virtual.select(real.columns), key="id")


def _header(
    source: Source,
    number: int,
    real: Int64Array,
    rows: pl.DataFrame,
    ranks_per_clock: int | None,
) -> TraceHeader:
    ranks = rows["rank"].unique().sort().to_numpy()
    clock = ranks // (ranks_per_clock or source.header.world_size)
    domains = tuple(
        ClockDomain(id=place, ranks=tuple(ranks[clock == name].tolist()), source="synthetic")
        for place, name in enumerate(np.unique(clock).tolist())
    )
    return source.header.model_copy(
        update={
            "kind": TraceKind.SLICE,
            "ranks": tuple(ranks.tolist()),
            "clock": domains,
            "slice": SliceInfo(index=number, real_ranks=tuple(real.tolist())),
            "policies": {},
            "extra": {},
            "created_by": "prismcalib.synth",
        }
    )


def _misread(
    header: TraceHeader, rows: pl.DataFrame, drift_ppm: float, random: np.random.Generator
) -> tuple[TraceHeader, pl.DataFrame]:
    """Read off the times from clocks with own origins and own pace."""
    start = rows["start_ns"].to_numpy()
    end = start + rows["dur_ns"].to_numpy()
    place = np.empty(header.world_size, np.int64)
    for domain in header.clock:
        place[list(domain.ranks)] = domain.id
    clock = place[rows["rank"].to_numpy()]
    origin = random.integers(_FIRST_ORIGIN_NS, _LAST_ORIGIN_NS, len(header.clock))
    pace = random.uniform(-drift_ppm, drift_ppm, len(header.clock)) * 1e-6

    def read(time: Int64Array) -> Int64Array:
        drift: Int64Array = np.rint(time * pace[clock]).astype(np.int64)
        shown: Int64Array = time + origin[clock] + drift
        return shown

    if header.slice is not None:
        # The only thing that a slice knows of when it began.
        begin = int(origin[place[min(header.slice.real_ranks)]])
        begun = header.slice.model_copy(update={"origin_ns": begin})
        header = header.model_copy(update={"slice": begun})
    return header, rows.with_columns(
        start_ns=pl.Series(read(start)), dur_ns=pl.Series(read(end) - read(start))
    )
