"""Who waits for whom inside a communication: the table of wait rules.

By default every member of a collective, and both sides of a send-recv pair, wait for all the
others (for p2p: *rendezvous*).  Libraries are free to let some members go earlier; the rules
below say which.  A communication under a rule is no sync instance any more: its members wait
for the members that the rule names, through `Graph.wait_rows`.

    rule        kinds               who waits          for whom
    eager       send, recv          the receiver       the sender
    from_root   broadcast, scatter  all but the root   the root
    to_root     reduce, gather      the root           all others
    pairs       all_to_all          every member       those that send it something
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from prismcalib.errors import CalibError
from prismcalib.graph import Graph, Int32Array, Int64Array
from prismcalib.grouped import group_max
from prismtrace.schema import TraceHeader

__all__ = ["SEND_BYTES", "WaitRules", "apply_wait_rules", "ready_times", "waiting_rows"]

SEND_BYTES = "x_send_bytes"
"""List(Int64) column: what an all_to_all sends to each member, in the order of its group."""

_HEADER_KEY = "wait_rules"


@dataclass(frozen=True, kw_only=True)
class WaitRules:
    """Which exceptions from "everybody waits for everybody" hold.

    Attributes:
        eager_below: sends of fewer bytes than this do not wait for the receiver; 0: all do.
            Pairs of unknown size wait.
        rooted: broadcast and scatter wait for the root only; of reduce and gather only the
            root waits.
        sparse_all_to_all: members of an all_to_all wait only for those that send them
            something: a member of 0 bytes sends nothing, and `x_send_bytes` tells pairs.
    """

    eager_below: int = 0
    rooted: bool = False
    sparse_all_to_all: bool = False

    def __post_init__(self) -> None:
        if self.eager_below < 0:
            raise CalibError(f"a message cannot be smaller than {self.eager_below} bytes")

    def __bool__(self) -> bool:
        return self != WaitRules()

    def joined_with(self, other: WaitRules) -> WaitRules:
        """All exceptions of both."""
        return WaitRules(
            eager_below=max(self.eager_below, other.eager_below),
            rooted=self.rooted or other.rooted,
            sparse_all_to_all=self.sparse_all_to_all or other.sparse_all_to_all,
        )

    @classmethod
    def of(cls, header: TraceHeader) -> WaitRules:
        """The rules that a calibrated trace was computed with."""
        stored: dict[str, Any] = header.extra.get(_HEADER_KEY, {})
        return cls(**stored)

    def note_in(self, header: TraceHeader) -> TraceHeader:
        """The header with these rules in it."""
        extra = {name: value for name, value in header.extra.items() if name != _HEADER_KEY}
        if self:
            extra[_HEADER_KEY] = json.loads(json.dumps(asdict(self)))
        return header.model_copy(update={"extra": extra})


@dataclass(frozen=True)
class _Rule:
    """One line of the table; members have the columns of `_members`."""

    kinds: tuple[str, ...]
    holds: Callable[[WaitRules], pl.Expr | None]
    """Of an instance, all members of which fulfil the expression; None: the rule is off."""
    waiter: pl.Expr
    awaited: pl.Expr
    pair: pl.Expr
    """Of a waiter and an awaited member (the latter's columns end in _awaited)."""


def _below(rules: WaitRules) -> pl.Expr | None:
    return pl.col("bytes") < rules.eager_below if rules.eager_below else None


def _root_known(rules: WaitRules) -> pl.Expr | None:
    return pl.col("peer").is_not_null() if rules.rooted else None


def _sparse(rules: WaitRules) -> pl.Expr | None:
    return pl.lit(value=True) if rules.sparse_all_to_all else None


_ROOT = pl.col("rank") == pl.col("peer")
_ALL = pl.lit(value=True)
_SENT = pl.col("sends_awaited").list.get(pl.col("place"), null_on_oob=True)
_SOMETHING = (_SENT.fill_null(pl.col("bytes_awaited")) != 0).fill_null(value=True)

_TABLE = (
    _Rule(("send", "recv"), _below, pl.col("kind") == "recv", pl.col("kind") == "send", _ALL),
    _Rule(("broadcast", "scatter"), _root_known, ~_ROOT, _ROOT, _ALL),
    _Rule(("reduce", "gather"), _root_known, _ROOT, ~_ROOT, _ALL),
    _Rule(("all_to_all",), _sparse, _ALL, _ALL, _SOMETHING),
)


def apply_wait_rules(
    graph: Graph, rows: pl.DataFrame, header: TraceHeader, rules: WaitRules
) -> Graph:
    """The graph with sync instances turned into waits wherever a rule says so.

    Args:
        graph: of these rows; has no waits yet.
        rows: the node table in the graph's order.
        header: its groups order the members of an all_to_all.
        rules: without any, the graph is returned as it is.
    """
    if not rules:
        return graph
    members = _members(graph, rows, header)
    loosened = [members.head(0).select("row")]
    pairs = [pl.DataFrame(schema={"row": pl.UInt32, "awaited": pl.UInt32})]
    for rule in _TABLE:
        holds = rule.holds(rules)
        if holds is None:
            continue
        parts = members.filter(pl.col("kind").is_in(rule.kinds)).filter(
            holds.fill_null(value=False).all().over("instance")
        )
        loosened.append(parts.select("row"))
        found = (
            parts.filter(rule.waiter)
            .join(parts.filter(rule.awaited), on="instance", suffix="_awaited")
            .filter((pl.col("row") != pl.col("row_awaited")) & rule.pair)
        )
        pairs.append(found.select("row", awaited="row_awaited"))
    free = pl.concat(loosened)["row"].to_numpy()
    return _loosen(graph, free, pl.concat(pairs).sort("row", "awaited"))


def ready_times(graph: Graph, start_ns: Int64Array) -> Int64Array:
    """int64[n]: when the last of those whom a row waits for has started, itself included."""
    ready = start_ns.copy()
    member = graph.instance >= 0
    if member.any():
        instance = graph.instance[member]
        ready[member] = group_max(instance, start_ns[member])[instance]
    if graph.wait_rows is not None and graph.wait_offsets is not None:
        owner = np.repeat(np.arange(graph.rows), np.diff(graph.wait_offsets))
        np.maximum.at(ready, owner, start_ns[graph.wait_rows])
    return ready


def waiting_rows(graph: Graph) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """bool[n]: rows of matched communications, whether they wait for all, some or nobody."""
    matched = graph.instance >= 0
    matched[graph.arriving] = True
    return matched


def _members(graph: Graph, rows: pl.DataFrame, header: TraceHeader) -> pl.DataFrame:
    """Members of complete instances that a rule may touch.

    Columns row, instance, kind, rank, peer, bytes, sends (null or a list), place in the group.
    """
    complete = np.append(graph.members_present == graph.instance_size, [False])
    kinds = [kind for rule in _TABLE for kind in rule.kinds]
    sends = pl.col(SEND_BYTES) if SEND_BYTES in rows.columns else pl.lit(None, pl.List(pl.Int64))
    places = _places(header)
    return (
        rows.with_row_index("row")
        .select(
            "row",
            pl.col("kind").cast(pl.String),
            "rank",
            "peer",
            "bytes",
            "group",
            sends=sends,
            instance=pl.Series(graph.instance),
        )
        .filter(pl.Series(complete[graph.instance]) & pl.col("kind").is_in(kinds))
        .join(places, on=["group", "rank"], how="left", maintain_order="left")
    )


def _places(header: TraceHeader) -> pl.DataFrame:
    """Columns group, rank, place: position of every rank in its groups."""
    return pl.DataFrame(
        {
            "group": [group.id for group in header.groups for _ in group.ranks],
            "rank": [rank for group in header.groups for rank in group.ranks],
            "place": [place for group in header.groups for place in range(len(group.ranks))],
        },
        schema={"group": pl.Int32, "rank": pl.Int32, "place": pl.Int64},
    )


def _loosen(graph: Graph, free: Int32Array, pairs: pl.DataFrame) -> Graph:
    """Take rows out of their instances and let them wait by pairs (row, awaited), sorted."""
    instance = graph.instance.copy()
    gone = np.zeros(graph.instances, np.bool_)
    gone[instance[free]] = True
    instance[free] = -1
    number = np.append(np.cumsum(~gone) - 1, [-1]).astype(np.int32)  # index -1: no instance
    counts = np.bincount(pairs["row"].to_numpy(), minlength=graph.rows)
    return replace(
        graph,
        instance=number[instance],
        instance_size=graph.instance_size[~gone],
        wait_offsets=np.append([0], np.cumsum(counts)),
        wait_rows=pairs["awaited"].cast(pl.Int32).to_numpy(),
    )
