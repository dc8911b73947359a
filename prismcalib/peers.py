"""How long an operation would take if it were like its peers.

Two notions of peer:

* `type`: all operations of one sort, whatever the rank, stage and step.  A computation would
  take the mean of its sort, a communication the median (which a few late ones do not move).
  So an uneven split of the model over stages counts as a slowdown.  This is the method of
  "Understanding Stragglers in Large Model Training Using What-if Analysis" (2025), and needs
  operations that are large and alike: forward and backward of a microbatch.
* `position`: operations at the same place in ranks that do the same in a step, over ranks and
  steps; all take the median.  Works at any grain, layers and kernels included; what differs
  between stages is not compared.  Where ranks cut their computation differently (CPU traces,
  whose spans end at pauses) what lies between two communications is compared as a whole.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray

from prismcalib.graph import Int64Array
from prismcalib.places import group_family
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, TraceHeader

__all__ = ["Peers", "is_operation_level", "kind_labels", "operation_sorts", "peer_durations"]

Peers = Literal["type", "position"]


def is_operation_level(header: TraceHeader) -> bool:
    """Whether the names of the nodes say what sort of operation they are."""
    return bool(header.extra.get("operation_level"))


def operation_sorts(rows: pl.DataFrame, header: TraceHeader) -> pl.Series:
    """The sort of every row, as text: its name in operation-level traces, else phase and kind."""
    if is_operation_level(header):
        return rows["name"].cast(pl.String).alias("sort")
    family = {group.id: group_family(group) for group in header.groups}
    phase = pl.col("phase").cast(pl.String)
    kind = pl.col("kind").cast(pl.String)
    group = pl.col("group").replace_strict(family, default=None, return_dtype=pl.String)
    local = kind.is_in([member.value for member in LOCAL_KINDS])
    return rows.select(
        sort=pl.when(local)
        .then(pl.concat_str(phase, kind, separator=" ", ignore_nulls=True))
        .otherwise(pl.concat_str(kind, group, separator=" ", ignore_nulls=True))
    ).to_series()


def kind_labels(rows: pl.DataFrame, header: TraceHeader) -> pl.Series:
    """Like `operation_sorts`, with send and recv of a phase taken together."""
    p2p = rows["kind"].cast(pl.String).is_in([member.value for member in P2P_KINDS])
    phase = rows["phase"].cast(pl.String).fill_null("all")
    sorts = operation_sorts(rows, header)
    return pl.select(pl.when(p2p).then(phase + "-pp-comm").otherwise(sorts)).to_series()


def peer_durations(
    rows: pl.DataFrame, header: TraceHeader, duration_ns: Int64Array, peers: Peers
) -> tuple[Int64Array, int]:
    """int64[n], durations like those of the peers; and how many rows have none on other ranks.

    Rows without peers keep their duration.
    """
    kind = rows["kind"].cast(pl.String)
    table = pl.DataFrame(
        {
            "class": operation_sorts(rows, header) if peers == "type" else _positions(rows),
            "rank": rows["rank"],
            "duration": duration_ns,
            "local": kind.is_in([member.value for member in LOCAL_KINDS]),
        }
    )
    average = pl.col("duration").median()
    if peers == "type":
        average = (
            pl.when(pl.col("local").first()).then(pl.col("duration").mean()).otherwise(average)
        )
    classes = table.group_by("class").agg(
        typical=average, lonely=pl.col("rank").min() == pl.col("rank").max()
    )
    found = table.join(classes, on="class", how="left", maintain_order="left", nulls_equal=True)
    typical = np.rint(found["typical"].to_numpy()).astype(np.int64)
    lonely = found["lonely"].to_numpy()
    if peers == "position" and lonely.any():
        whole, alone = _between_communications(rows, table["local"], duration_ns)
        typical, lonely = np.where(lonely, whole, typical), lonely & alone
    return np.where(lonely, duration_ns, typical), int(lonely.sum())


def _between_communications(
    rows: pl.DataFrame, local: pl.Series, duration_ns: Int64Array
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """int64[n] and bool[n]: durations scaled to those of peers, and which rows have none.

    Ranks and steps with the same communications are peers. Between the k-th communication and
    the next they share the median of their computation, and the k-th takes its median.
    """
    turn = ["rank", "step"]
    numbered = rows.select(
        *turn, "kind", "microbatch", "chunk", local=local, duration=pl.Series(duration_ns)
    ).with_columns(k=(~pl.col("local")).cast(pl.UInt64).cum_sum().over(turn))
    # Not the stream: which of gloo's threads takes a work is chance.
    looks = pl.struct("kind", "microbatch", "chunk", "k").hash(seed=17)
    sequence = pl.when("local").then(pl.lit(0, pl.UInt64)).otherwise(looks).sum().over(turn)
    parts = numbered.with_columns(sequence=sequence).select(
        *turn, "duration", part=pl.struct("sequence", "k", "local").hash(seed=19)
    )
    totals = parts.group_by(*turn, "part").agg(total=pl.col("duration").sum())
    typical = totals.group_by("part").agg(
        typical=pl.col("total").median(), alone=pl.col("rank").min() == pl.col("rank").max()
    )
    found = parts.join(
        totals.join(typical, on="part"),
        on=[*turn, "part"],
        how="left",
        maintain_order="left",
        nulls_equal=True,
    )
    scale = found["typical"] / found["total"].clip(lower_bound=1)
    scaled = np.rint((found["duration"] * scale).to_numpy()).astype(np.int64)
    return scaled, found["alone"].to_numpy()


def _positions(rows: pl.DataFrame) -> pl.Series:
    """UInt64: equal for rows at the same place of ranks and steps with the same sequence."""
    turn = ["rank", "step"]
    looks = pl.struct("kind", "stream", "phase", "microbatch", "chunk").hash(seed=7)
    place = pl.int_range(pl.len(), dtype=pl.UInt64).over(turn)
    mixed = pl.struct(looks.alias("looks"), place.alias("place")).hash(seed=11)
    return rows.select(
        pl.struct(sequence=mixed.sum().over(turn), place=place).hash(seed=13)
    ).to_series()
