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

from prismcalib.blocks import Tables
from prismcalib.graph import Int64Array
from prismtrace.group_names import group_family
from prismtrace.schema import LOCAL_KINDS, P2P_KINDS, TraceHeader

_LOCAL = pl.col("kind").cast(pl.String).is_in([member.value for member in LOCAL_KINDS])

__all__ = ["Peers", "is_operation_level", "kind_labels", "operation_sorts", "peer_durations"]

Peers = Literal["type", "position"]
"""Operations to compare with: of the same type, or at the same place in the program."""


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
    nodes: Tables, header: TraceHeader, duration_ns: Int64Array, peers: Peers
) -> tuple[Int64Array, int]:
    """int64[n], durations like those of the peers; and how many rows have none on other ranks.

    Rows without peers keep their duration.
    """
    if peers == "type":
        typical, lonely = _of_type(nodes, header, duration_ns)
    else:
        typical, lonely = _of_position(nodes, duration_ns)
        if lonely.any():
            whole, alone = _between_communications(nodes, duration_ns)
            np.copyto(typical, whole, where=lonely)
            lonely &= alone
    np.copyto(typical, duration_ns, where=lonely)
    return typical, int(lonely.sum())


def _of_type(
    nodes: Tables, header: TraceHeader, duration_ns: Int64Array
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """int64[n] and bool[n]: durations of peers of one sort, and which rows have none."""
    names: dict[str | None, int] = {}
    columns: list[str | pl.Expr] = ["name", "phase", "kind", "group", "rank"]
    parts = []
    for rows in nodes.tables(columns):
        sort = operation_sorts(rows, header)
        codes = {name: names.setdefault(name, len(names)) for name in sort.unique().to_list()}
        parts.append(
            rows.select(
                rows_sort=sort.replace_strict(codes, return_dtype=pl.Int32),
                rank="rank",
                local=_LOCAL,
            )
        )
    table = pl.concat(parts).with_columns(duration=pl.Series(duration_ns))
    average = pl.col("duration").median()
    average = pl.when(pl.col("local").first()).then(pl.col("duration").mean()).otherwise(average)
    classes = (
        table.group_by("rows_sort")
        .agg(typical=average, lonely=pl.col("rank").min() == pl.col("rank").max())
        .sort("rows_sort")
    )
    code = table["rows_sort"].to_numpy()
    typical = np.rint(classes["typical"].to_numpy()).astype(np.int64)
    return typical[code], classes["lonely"].to_numpy()[code]


# --- position -----------------------------------------------------------------------------------

# Durations whose medians are taken at once.
_CELLS = 2**22
_TURN = ["rank", "step"]


def _of_position(nodes: Tables, duration_ns: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
    """int64[n] and bool[n]: medians over ranks and steps of one sequence, which rows have none."""
    turns, place = _turns(nodes)
    typical = np.empty(len(duration_ns), np.int64)
    lonely = np.zeros(len(duration_ns), np.bool_)
    for alike in turns.partition_by("sequence", "rows"):
        begin, length = alike["begin"].to_numpy(), int(alike["rows"][0])
        alone = alike["rank"].min() == alike["rank"].max()
        width = max(1, _CELLS // len(begin))
        for first in range(0, length, width):
            cells = np.arange(first, min(first + width, length))[:, None] + begin
            cells = cells if place is None else place[cells]
            middle = np.rint(np.median(duration_ns[cells], axis=1)).astype(np.int64)
            typical[cells] = middle[:, None]
            lonely[cells] = alone
    return typical, lonely


def _turns(nodes: Tables) -> tuple[pl.DataFrame, Int64Array | None]:
    """Ranks and steps: rank, sequence (equal if they do the same), begin, rows.

    A turn has the rows `begin` to `begin + rows - 1`, or those that the second result lists
    there, if steps of a rank do not lie apart.
    """
    looks = pl.struct("kind", "stream", "phase", "microbatch", "chunk").hash(seed=7)
    columns = ["rank", "step", "kind", "stream", "phase", "microbatch", "chunk"]
    found, orders, first, mixed_up = [], [], 0, False
    for rows in nodes.tables(columns):
        table = rows.select(*_TURN, looks=looks).with_row_index("row")
        known = table.with_columns(place=pl.int_range(pl.len(), dtype=pl.UInt64).over(_TURN))
        turns = known.group_by(_TURN, maintain_order=True).agg(
            sequence=pl.struct("looks", "place").hash(seed=11).sum(),
            rows=pl.len().cast(pl.Int64),
            last=pl.col("row").max().cast(pl.Int64),
            begin=pl.col("row").min().cast(pl.Int64),
        )
        apart = (turns["last"] - turns["begin"] + 1 == turns["rows"]).all()
        if apart:
            order = np.arange(rows.height)
        else:
            mixed_up = True
            number = turns.select(*_TURN, turn=pl.int_range(pl.len()))
            turn = table.join(number, on=_TURN, how="left", nulls_equal=True, maintain_order="left")
            order = np.argsort(turn["turn"].to_numpy(), kind="stable")
            turns = turns.with_columns(begin=pl.col("rows").cum_sum() - pl.col("rows"))
        orders.append(order + first)
        found.append(turns.select("rank", "sequence", "rows", begin=pl.col("begin") + first))
        first += rows.height
    return pl.concat(found), np.concatenate(orders) if mixed_up else None


def _between_communications(
    nodes: Tables, duration_ns: Int64Array
) -> tuple[Int64Array, NDArray[np.bool_]]:
    """int64[n] and bool[n]: durations scaled to those of peers, and which rows have none.

    Ranks and steps with the same communications are peers. Between the k-th communication and
    the next they share the median of their computation, and the k-th takes its median.
    """
    # Not the stream: which of gloo's threads takes a work is chance.
    looks = pl.struct("kind", "microbatch", "chunk", "k").hash(seed=17)
    sequence = pl.when("local").then(pl.lit(0, pl.UInt64)).otherwise(looks).sum().over(_TURN)
    parts, sums, first = [], [], 0
    for rows in nodes.tables([*_TURN, "kind", "microbatch", "chunk"]):
        duration = pl.Series(duration_ns[first : first + rows.height])
        numbered = rows.with_columns(local=_LOCAL, duration=duration).with_columns(
            k=(~pl.col("local")).cast(pl.UInt64).cum_sum().over(_TURN)
        )
        part = numbered.with_columns(sequence=sequence).select(
            *_TURN, "duration", part=pl.struct("sequence", "k", "local").hash(seed=19)
        )
        parts.append(part.drop("duration"))
        sums.append(part.group_by(*_TURN, "part").agg(total=pl.col("duration").sum()))
        first += rows.height
    totals = pl.concat(sums)
    typical = totals.group_by("part").agg(
        typical=pl.col("total").median(), alone=pl.col("rank").min() == pl.col("rank").max()
    )
    scaled, alone, first = np.empty(len(duration_ns), np.int64), [], 0
    for part, own in zip(parts, sums, strict=True):
        found = part.join(
            own.join(typical, on="part"),
            on=[*_TURN, "part"],
            how="left",
            maintain_order="left",
            nulls_equal=True,
        )
        here = slice(first, first + part.height)
        scale = (found["typical"] / found["total"].clip(lower_bound=1)).to_numpy()
        scaled[here] = np.rint(duration_ns[here] * scale)
        alone.append(found["alone"].to_numpy())
        first += part.height
    return scaled, np.concatenate(alone)
