"""What a slowdown looks like: a slow GPU, an uneven split, uneven sequences, a slow link, delays.

Every rule compares computations (or transfers) that would be equal in an even job, and says
what the step would save without the difference, by propagating the timeline without it:

    cause              what is taken out
    slow-rank          its computation takes as long as the median of the others of its stage
    slow-host          the same
    stage-imbalance    all stages compute equally long; the work stays, it is only spread evenly
    sequence-lengths   each microbatch takes as long as the rank's median one
    slow-network       transfers take as long as those of the peers
    launch-delays      every operation starts as soon as it can

Beside peers by type, a stage in the table of stages saves more than an even split: there its
extra work is gone, and what is uneven within the stage (sequences) as well.

Computation is looked at per rank, step, microbatch, chunk and phase, so that one grain serves
kernel-level and operation-level traces.

    cause              pattern
    slow-rank          one rank computes slower than its peers, in nearly every step
    slow-host          the same, but its kernels do not: its device idles between them
    stage-imbalance    all ranks of a stage compute longer than those of other stages
    sequence-lengths   durations vary from microbatch to microbatch, forward and backward alike
    slow-network       one group transfers slower than its peers, in nearly every step
    launch-delays      operations start later than they could
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.computing import computing_times, longer_than_others, others_median
from prismcalib.graph import Int64Array
from prismcalib.peers import Peers, operation_sorts
from prismcalib.places import Places, group_family
from prismcalib.wording import RankNames, parts_of_spans, percent_text
from prismtrace.schema import LOCAL_KINDS, Kind, TraceHeader

__all__ = ["Cause", "find_causes"]

Simulate = Callable[[Sequence[Int64Array]], NDArray[np.float64]]

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
_LEAST_SAVING = 0.005
_MOST_OF_A_SORT = 8


@dataclass(frozen=True)
class Cause:
    """One cause of a slowdown.

    Attributes:
        kind: see the module.
        where: rank, stage or group, as text.
        saves: share of the step time that goes without it; of the step without launch delays,
            of launch delays themselves: of the step as it was.
        without: what that means, in words: the step takes so much less *if* ...
        evidence: the numbers behind it.
        advice: what people do about it.
    """

    kind: str
    where: str
    saves: float
    without: str
    evidence: str
    advice: str

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class _Suspect:
    """A cause before it is known what it costs; `durations` is int64[n] without it."""

    kind: str
    where: str
    without: str
    evidence: str
    advice: str
    durations: Int64Array


def find_causes(
    rows: pl.DataFrame,
    header: TraceHeader,
    places: Places,
    simulate: Simulate,
    actual: Int64Array,
    base: Int64Array,
    peers: Peers,
) -> tuple[Cause, ...]:
    """Name the causes that cost half a percent of the step time or more, largest first.

    Args:
        rows: of the trace, in graph order.
        header: of the trace.
        places: stages and replicas of its ranks.
        simulate: mean step time without launch delays for each of some sets of durations.
        actual: int64[n], durations without waiting.
        base: int64[S], step times as they were.
        peers: what the tables of parts compare with; causes say how they differ from it.
    """
    suspects = [
        *_slow_ranks_and_stages(rows, header, places, actual, peers),
        *_slow_groups(rows, header, actual),
    ]
    times = simulate([actual, *(suspect.durations for suspect in suspects)])
    now = float(times[0]) or 1.0
    causes = [
        Cause(
            suspect.kind,
            suspect.where,
            1 - float(time) / now,
            suspect.without,
            suspect.evidence,
            suspect.advice,
        )
        for suspect, time in zip(suspects, times[1:], strict=True)
    ]
    causes.append(_launch_delays(now, float(base.mean())))
    found = [cause for cause in causes if cause.saves >= _LEAST_SAVING]
    return tuple(sorted(found, key=lambda cause: -cause.saves))


def _launch_delays(without: float, base: float) -> Cause:
    return Cause(
        "launch-delays",
        "host",
        1 - without / base if base else 0.0,
        "if every operation starts as soon as it can (share of the step as it was)",
        f"operations start later than they could; without that the step takes "
        f"{without / 1e6:,.3f} ms instead of {base / 1e6:,.3f} ms",
        "look for garbage collection, data loading and synchronising calls on the host",
    )


# --- computation ------------------------------------------------------------------------------


def _slow_ranks_and_stages(
    rows: pl.DataFrame, header: TraceHeader, places: Places, actual: Int64Array, peers: Peers
) -> Iterator[_Suspect]:
    kind = rows["kind"].cast(pl.String)
    is_work = (kind == Kind.COMPUTE.value) & rows["phase"].cast(pl.String).is_in(
        ["forward", "backward"]
    ).fill_null(value=False)
    if not is_work.any():
        is_work = kind == Kind.COMPUTE.value
    number = np.flatnonzero(is_work.to_numpy())
    if not len(number):
        return
    rank = rows["rank"].to_numpy()[number]
    work = rows.select("rank", "step", "phase", "microbatch", "chunk")[number].with_columns(
        row=pl.Series(number),
        stage=pl.Series(places.stage[rank]),
        duration=pl.Series(actual[number]),
    )
    unit = ["rank", "step", "phase", "microbatch", "chunk"]
    units = (
        work.group_by(unit, maintain_order=True)
        .agg(pl.col("duration").sum(), pl.col("stage").first())
        .filter(pl.col("duration") > 0)
        .with_columns(typical=pl.col("duration").median().over("stage", "phase", "chunk"))
        .filter(pl.col("typical") > 0)
        .with_columns(relative=pl.col("duration") / pl.col("typical"))
    )
    yield from _rank_suspects(_slow_ranks(rows, places, units), rows, header, actual)
    yield from _stage_suspects(units, places, work, actual, peers)
    yield from _sequence_suspects(units, work, actual)


def _slow_ranks(rows: pl.DataFrame, places: Places, units: pl.DataFrame) -> pl.DataFrame:
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
    times = computing_times(rows)
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
    slow: pl.DataFrame, rows: pl.DataFrame, header: TraceHeader, actual: Int64Array
) -> Iterator[_Suspect]:
    parts, names = parts_of_spans(header), RankNames.of(header)
    local = rows["kind"].cast(pl.String).is_in([kind.value for kind in LOCAL_KINDS])
    columns = ("rank", "stage", "longer", "device_longer", "often", "peers")
    for rank, stage, longer, device, often, peers in (
        slow.head(_MOST_OF_A_SORT).select(columns).rows()
    ):
        chosen = (local & (rows["rank"] == rank)).to_numpy()
        durations = actual.copy()
        durations[chosen] = np.rint(actual[chosen] / (1 + longer))
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
        yield _Suspect(
            "slow-host" if host else "slow-rank",
            "rank " + names.text(rank, *([f"stage {stage}"] if stage >= 0 else [])),
            f"if its computation takes as long as the median of {than}",
            evidence,
            "see what keeps its host from launching: other processes, pinning, CPU frequency"
            if host
            else "compare its share of the data first, then its device's clocks, temperature and memory errors",
            durations,
        )


def _stage_suspects(
    units: pl.DataFrame, places: Places, work: pl.DataFrame, actual: Int64Array, peers: Peers
) -> Iterator[_Suspect]:
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
    stage = work["stage"].to_numpy()
    known = stage >= 0
    scale = np.ones(places.stages)
    scale[stages["stage"].to_numpy()] = even / times
    rows = work["row"].to_numpy()[known]
    durations = actual.copy()
    durations[rows] = np.rint(actual[rows] * scale[stage[known]])
    number = int(stages["stage"][worst])
    position = {0: "first", places.stages - 1: "last"}.get(number, "middle")
    why = {
        "first": "it also holds the embedding",
        "last": "it also computes the output layer and the loss",
        "middle": "it has more or heavier layers",
    }[position]
    yield _Suspect(
        "stage-imbalance",
        f"stage {number} ({position} of {places.stages})",
        f"if the same work is spread evenly over the stages ({_STAGE_TABLE[peers]})",
        f"computes {times[worst] / 1e6:,.3f} ms a step, the other stages "
        f"{others / 1e6:,.3f} ms: {times[worst] / others:.3f} times as long; probably {why}",
        "give this stage fewer layers, or spread its extra work",
        durations,
    )


def _sequence_suspects(
    units: pl.DataFrame, work: pl.DataFrame, actual: Int64Array
) -> Iterator[_Suspect]:
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
    factor = relative.select(*where, "phase", ratio=pl.col("level") / pl.col("duration"))
    changed = work.join(
        factor, on=[*where, "phase"], how="left", nulls_equal=True, maintain_order="left"
    )
    ratio = changed["ratio"].fill_null(1.0).to_numpy()
    rows = work["row"].to_numpy()
    durations = actual.copy()
    durations[rows] = np.rint(actual[rows] * ratio)
    yield _Suspect(
        "sequence-lengths",
        "all ranks",
        "if every microbatch takes as long as its rank's median one",
        f"microbatches of one rank differ by {spread:.0%} (one standard deviation), forward and "
        f"backward of the same microbatch alike (correlation {alike:.3f})",
        "batch sequences so that microbatches cost the same (attention grows with the square)",
        durations,
    )


# --- communication ----------------------------------------------------------------------------


def _slow_groups(rows: pl.DataFrame, header: TraceHeader, actual: Int64Array) -> Iterator[_Suspect]:
    family = {group.id: group_family(group) for group in header.groups}
    names = {group.id: group.name for group in header.groups}
    table = pl.DataFrame(
        {
            "group": rows["group"],
            "step": rows["step"],
            "bytes": rows["bytes"],
            "sort": operation_sorts(rows, header),
            "duration": actual,
        }
    ).with_row_index("row")
    known = table.filter(pl.col("group").is_not_null() & rows["seq"].is_not_null())
    if not known.height:
        return
    like = ["family", "sort", "bytes"]
    known = known.with_columns(
        family=pl.col("group").replace_strict(family, default=None, return_dtype=pl.String)
    )
    steps = known.group_by(*like, "group", "step").agg(pl.col("duration").median())
    steps = steps.with_columns(
        relative=pl.col("duration") / pl.col("duration").median().over(*like, "step")
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
        hit = known.filter((pl.col("group") == group) & pl.col("sort").is_in(sorts))
        durations = actual.copy()
        chosen = hit["row"].to_numpy()
        durations[chosen] = np.rint(actual[chosen] / factor)
        yield _Suspect(
            "slow-network",
            f"group {names.get(group, group)} ({', '.join(sorted(set(sorts)))})",
            "if its transfers take as long as those of its peers",
            f"transfers take up to {factor:.2f} times as long as in its {peers} peers, in "
            f"{often:.0%} of the steps",
            "check the links, switches and placement of this group's hosts",
            durations,
        )
