"""What a slowdown looks like: a slow GPU, an uneven split, uneven sequences, a slow link.

Every rule compares computations (or transfers) that would be equal in an even job.

Computation is looked at per rank, step, microbatch, chunk and phase, so that one grain serves
kernel-level and operation-level traces.

    cause              pattern
    slow-rank          one rank computes slower than its peers, in nearly every step
    slow-host          the same, but its kernels do not: its device idles between them
    stage-imbalance    all ranks of a stage compute longer than those of other stages
    sequence-lengths   durations vary from microbatch to microbatch, forward and backward alike
    slow-network       one group transfers slower than its peers, in nearly every step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.blocks import Tables
from prismcalib.computing import computing_times, longer_than_others, others_median
from prismcalib.graph import Int32Array, Int64Array
from prismcalib.peers import Peers, operation_sorts
from prismcalib.places import Places
from prismcalib.wording import RankNames, parts_of_spans, percent_text
from prismtrace.group_names import group_family, group_labels
from prismtrace.schema import LOCAL_KINDS, Kind, TraceHeader

__all__ = ["Durations", "Suspect", "slow_groups", "slow_ranks_and_stages"]

Durations = Callable[[], Int64Array]
"""Makes a set of durations; made only when it is its turn, since each takes 8 bytes a row."""

_SLOW = 1.05
"""A rank or stage that takes 5 % longer than its peers stands out of usual spreads of 1 to 2 %."""
_OFTEN = 0.8
"""Share of the comparisons in which it must be slower, or a few outliers would do."""
_ALIKE_SPEED = 0.005
_SLOW_LINK = 1.3
_VARIED = 0.03
_ALIKE = 0.9
"""Correlation of forward and backward durations that only the amount of work explains; the
threshold of the paper that `prismcalib.peers` names."""
_STAGE_TABLE: dict[Peers, str] = {
    "type": "in the table of stages the extra work is gone, and what is uneven within the stage",
    "position": "the table of stages compares ranks of one stage only",
}
_MOST_OF_A_SORT = 8


@dataclass(frozen=True, eq=False)
class Suspect:
    """A cause before it is known what it costs; `durations` makes int64[n] without it."""

    kind: str
    where: str
    without: str
    evidence: str
    advice: str
    durations: Durations


# --- computation ------------------------------------------------------------------------------


_UNIT = ["rank", "step", "phase", "microbatch", "chunk"]


@dataclass(frozen=True, eq=False)
class _Work:
    """The m rows of computation that are compared, by unit: rank, step, microbatch and so on.

    Attributes:
        row, unit: int32[m], number of the row, and of the unit it is in.
        units: `_UNIT`, stage, duration of each.
    """

    row: Int32Array
    unit: Int32Array
    units: pl.DataFrame

    @classmethod
    def of(cls, nodes: Tables, places: Places, actual: Int64Array) -> _Work:
        is_work = pl.col("kind").cast(pl.String) == Kind.COMPUTE.value
        passes = pl.col("phase").cast(pl.String).is_in(["forward", "backward"])
        named = is_work & passes.fill_null(value=False)
        if any(table.select(named.any()).item() for table in nodes.tables(["kind", "phase"])):
            is_work = named
        rows, numbers, units = [], [], []
        first = known = 0
        for table in nodes.tables([*_UNIT, is_work.alias("work")]):
            row = np.flatnonzero(table["work"].to_numpy())
            work = table[row].select(_UNIT).with_columns(duration=actual[row + first])
            found = work.group_by(_UNIT, maintain_order=True).agg(pl.col("duration").sum())
            number = found.select(*_UNIT, unit=pl.int_range(pl.len(), dtype=pl.Int32))
            unit = work.join(number, on=_UNIT, how="left", nulls_equal=True, maintain_order="left")
            rows.append((row + first).astype(np.int32))
            numbers.append(unit["unit"].to_numpy() + np.int32(known))
            units.append(found)
            first, known = first + table.height, known + found.height
        whole = pl.concat(units)
        stage = pl.Series(places.stage[whole["rank"].to_numpy()])
        return cls(np.concatenate(rows), np.concatenate(numbers), whole.with_columns(stage=stage))

    def scaled(self, actual: Int64Array, factor: NDArray[np.float64]) -> Int64Array:
        """int64[n], durations with those of every unit multiplied."""
        durations = actual.copy()
        durations[self.row] = np.rint(actual[self.row] * factor[self.unit])
        return durations


def slow_ranks_and_stages(
    nodes: Tables, header: TraceHeader, places: Places, actual: Int64Array, peers: Peers
) -> Iterator[Suspect]:
    """Of computation; for arguments see `prismcalib.causes.find_causes`."""
    work = _Work.of(nodes, places, actual)
    if not len(work.row):
        return
    units = (
        work.units.with_row_index("unit")
        .filter(pl.col("duration") > 0)
        .with_columns(typical=pl.col("duration").median().over("stage", "phase", "chunk"))
        .filter(pl.col("typical") > 0)
        .with_columns(relative=pl.col("duration") / pl.col("typical"))
    )
    yield from _rank_suspects(_slow_ranks(nodes, places, units), nodes, header, actual)
    yield from _stage_suspects(units, places, work, actual, peers)
    yield from _sequence_suspects(units, work, actual)


def _slow_ranks(nodes: Tables, places: Places, units: pl.DataFrame) -> pl.DataFrame:
    """Ranks that compute longer than the others of their stage, step by step, slowest first.

    Columns rank, stage, longer and device_longer (than the median of the others, with and
    without idle time between kernels; see `computing`), often (share of steps), peers.
    """
    # Of one step: long sequences of a step are no property of the rank that got them.
    steps = units.group_by("stage", "rank", "step").agg(factor=pl.col("relative").mean())
    steps = steps.with_columns(pl.col("factor") / pl.col("factor").median().over("stage", "step"))
    persistent = (
        steps.group_by("stage", "rank")
        .agg(pl.col("factor").median(), often=(pl.col("factor") > 1 + (_SLOW - 1) / 2).mean())
        .with_columns(peers=pl.len().over("stage") - 1)
        .filter((pl.col("factor") > _SLOW) & (pl.col("often") >= _OFTEN) & (pl.col("peers") > 0))
    )
    columns = ["rank", "kind", "start_ns", "dur_ns"]
    columns += [name for name in ("x_busy_ns",) if name in nodes.columns]
    times = pl.concat(computing_times(table) for table in nodes.tables(columns))
    stage = pl.Series(places.stage[times["rank"].to_numpy()])
    times = times.with_columns(
        local_peers=others_median(times["local_ns"], stage),
        compute_peers=others_median(times["compute_ns"], stage),
    ).with_columns(
        longer=longer_than_others("local_ns", "local_peers"),
        device_longer=longer_than_others("compute_ns", "compute_peers"),
    )
    return (
        persistent.join(times, on="rank")
        .filter(pl.col("longer") > _SLOW - 1)
        .sort("longer", "rank", descending=[True, False])
    )


def _rank_suspects(
    slow: pl.DataFrame, nodes: Tables, header: TraceHeader, actual: Int64Array
) -> Iterator[Suspect]:
    parts, names = parts_of_spans(header), RankNames.of(header)
    slow = slow.head(_MOST_OF_A_SORT)
    computing = _computing_rows(nodes, slow["rank"].to_list())
    columns = ("rank", "stage", "longer", "device_longer", "often", "peers")
    for rank, stage, longer, device, often, peers in slow.select(columns).rows():
        # More than half of what it is late is not the kernels' own time.
        host = device < longer / 2
        others = f"the other {peers} ranks" if peers > 1 else "the other rank"
        than = others + (" of its stage" if stage >= 0 else "")
        evidence = (
            f"computes {percent_text(device)} longer than {than}, in {often:.0%} of the steps"
        )
        if host:
            own = f"{percent_text(device)} longer" if device >= _ALIKE_SPEED else "no longer"
            evidence = (
                f"its spans take {percent_text(longer)} longer than those of {than}, idle between "
                f"{parts} included, in {often:.0%} of the steps; its {parts} themselves take {own}"
            )
        yield Suspect(
            "slow-host" if host else "slow-rank",
            "rank " + names.text(rank, *([f"stage {stage}"] if stage >= 0 else [])),
            f"if its computation takes as long as the median of {than}",
            evidence,
            "see what keeps its host from launching: other processes, pinning, CPU frequency"
            if host
            else "compare its share of the data first, then its device's clocks, temperature and memory errors",
            partial(_divided, actual, computing[rank], 1 + longer),
        )


def _computing_rows(nodes: Tables, ranks: Sequence[int]) -> dict[int, Int64Array]:
    """Numbers of all computations and copies of some ranks."""
    found: dict[int, list[Int64Array]] = {rank: [np.empty(0, np.int64)] for rank in ranks}
    local = pl.col("kind").cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    first = 0
    for table in nodes.tables(["rank", local.alias("local")]) if ranks else ():
        computing = np.where(table["local"].to_numpy(), table["rank"].to_numpy(), -1)
        for rank, rows in found.items():
            rows.append(np.flatnonzero(computing == rank) + first)
        first += table.height
    return {rank: np.concatenate(rows) for rank, rows in found.items()}


def _divided(actual: Int64Array, rows: Int32Array | Int64Array, by: float) -> Int64Array:
    """The durations, with those of some rows divided."""
    durations = actual.copy()
    durations[rows] = np.rint(actual[rows] / by)
    return durations


def _stage_suspects(
    units: pl.DataFrame, places: Places, work: _Work, actual: Int64Array, peers: Peers
) -> Iterator[Suspect]:
    if places.stages < 2:
        return
    per_step = units.group_by("stage", "rank", "step").agg(pl.col("duration").sum())
    stages = (
        per_step.filter(pl.col("stage") >= 0)
        .group_by("stage")
        .agg(pl.col("duration").median())
        .sort("stage")
    )
    if stages.height < 2:
        return
    times = stages["duration"].to_numpy()
    even = float(times.mean())
    worst = int(times.argmax())
    others = float(np.delete(times, worst).mean())
    if times[worst] < _SLOW * others:
        return
    # All stages take the mean: an even split of the same work.
    scale = np.ones(places.stages + 1)  # the last one serves -1
    scale[stages["stage"].to_numpy()] = even / times
    number = int(stages["stage"][worst])
    position = {0: "first", places.stages - 1: "last"}.get(number, "middle")
    why = {
        "first": "it also holds the embedding",
        "last": "it also computes the output layer and the loss",
        "middle": "it has more or heavier layers",
    }[position]
    yield Suspect(
        "stage-imbalance",
        f"stage {number} ({position} of {places.stages})",
        f"if the same work is spread evenly over the stages ({_STAGE_TABLE[peers]})",
        f"computes {times[worst] / 1e6:,.3f} ms a step, the other stages "
        f"{others / 1e6:,.3f} ms: {times[worst] / others:.3f} times as long; probably {why}",
        "give this stage fewer layers, or spread its extra work",
        lambda: work.scaled(actual, scale[work.units["stage"].to_numpy()]),
    )


def _sequence_suspects(units: pl.DataFrame, work: _Work, actual: Int64Array) -> Iterator[Suspect]:
    """Forward and backward of one microbatch both long: more work, not a slower device."""
    where = ["rank", "step", "microbatch", "chunk"]
    level = pl.col("duration").median().over("rank", "phase", "chunk")
    relative = units.with_columns(level=level, log=(pl.col("duration") / level).log())
    phase = pl.col("phase").cast(pl.String)
    both = relative.filter(phase == "forward").join(
        relative.filter(phase == "backward"), on=where, nulls_equal=True, suffix="_backward"
    )
    both = both.filter(pl.col("microbatch").is_not_null())
    if both.height < 16:
        return
    spread = float(both["log"].std() or 0.0)  # type: ignore[arg-type]
    alike = both.select(pl.corr("log", "log_backward")).item()
    if spread < _VARIED or alike is None or alike < _ALIKE:
        return
    ratio = np.ones(work.units.height)
    ratio[relative["unit"].to_numpy()] = (relative["level"] / relative["duration"]).to_numpy()
    yield Suspect(
        "sequence-lengths",
        "all ranks",
        "if every microbatch takes as long as its rank's median one",
        f"microbatches of one rank differ by {spread:.0%} (one standard deviation), forward and "
        f"backward of the same microbatch alike (correlation {alike:.3f})",
        "batch sequences so that microbatches cost the same (attention grows with the square)",
        lambda: work.scaled(actual, ratio),
    )


# --- communication ----------------------------------------------------------------------------


def slow_groups(nodes: Tables, header: TraceHeader, actual: Int64Array) -> Iterator[Suspect]:
    """Of communication; for arguments see `prismcalib.causes.find_causes`."""
    names = group_labels(header.groups)
    row, code, classes = _transfer_classes(nodes, header)
    if not len(row):
        return
    like = ["family", "sort", "bytes"]
    medians = (
        pl.DataFrame({"code": code, "duration": actual[row]})
        .group_by("code")
        .agg(pl.col("duration").median())
    )
    steps = classes.join(medians, on="code", maintain_order="left")
    steps = steps.with_columns(
        relative=pl.col("duration")
        / pl.col("duration").median().clip(lower_bound=1).over(*like, "step")
    )
    slow = (
        steps.group_by(*like, "group")
        .agg(
            factor=pl.col("relative").median(),
            often=(pl.col("relative") > 1 + (_SLOW_LINK - 1) / 2).mean(),
        )
        .with_columns(peers=pl.len().over(like) - 1)
        .filter(
            (pl.col("factor") > _SLOW_LINK) & (pl.col("often") >= _OFTEN) & (pl.col("peers") > 0)
        )
    )
    worst = slow.group_by("group").agg(pl.col("factor", "often", "peers").max(), pl.col("sort"))
    for group, factor, often, peers, sorts in (
        worst.sort("factor", descending=True).head(_MOST_OF_A_SORT).rows()
    ):
        hit = classes.filter((pl.col("group") == group) & pl.col("sort").is_in(sorts))
        chosen = row[np.isin(code, hit["code"].to_numpy())]
        yield Suspect(
            "slow-network",
            f"group {names.get(group, group)} ({', '.join(sorted(set(sorts)))})",
            "if its transfers take as long as those of its peers",
            f"transfers take up to {factor:.2f} times as long as in its {peers} peers, in "
            f"{often:.0%} of the steps",
            "check the links, switches and placement of this group's hosts",
            partial(_divided, actual, chosen, factor),
        )


def _transfer_classes(
    nodes: Tables, header: TraceHeader
) -> tuple[Int32Array, Int32Array, pl.DataFrame]:
    """Matched communications: their rows and classes int32[m]; what every class is.

    Columns of the latter: code, group, step, bytes, sort, family.
    """
    family = {group.id: group_family(group) for group in header.groups}
    keys = ["group", "step", "bytes", "sort"]
    matched = pl.col("group").is_not_null() & pl.col("seq").is_not_null()
    columns: list[str | pl.Expr] = ["name", "kind", "phase", *keys[:3], matched.alias("matched")]
    rows, codes = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    known: dict[tuple[Any, ...], int] = {}
    first = 0
    for table in nodes.tables(columns):
        row = np.flatnonzero(table["matched"].to_numpy())
        some = table[row]
        some = some.select(*keys[:3], sort=operation_sorts(some, header))
        own = some.unique(maintain_order=True)
        numbers = [known.setdefault(key, len(known)) for key in own.rows()]
        own = own.with_columns(code=pl.Series(numbers, dtype=pl.Int32))
        code = some.join(own, on=keys, how="left", nulls_equal=True, maintain_order="left")
        rows.append((row + first).astype(np.int32))
        codes.append(code["code"].to_numpy())
        first += table.height
    schema = {"group": pl.Int32, "step": pl.Int32, "bytes": pl.Int64, "sort": pl.String}
    classes = pl.DataFrame(list(known), schema=schema, orient="row").with_columns(
        code=pl.int_range(pl.len(), dtype=pl.Int32),
        family=pl.col("group").replace_strict(family, default=None, return_dtype=pl.String),
    )
    return np.concatenate(rows), np.concatenate(codes), classes
