"""Which recorded contributions of virtual ranks a run will need, in the order of its graph.

A run for more steps than the graph has needs those of its last step again and again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import polars as pl

from prismreplay.tensors.by_recording import RecordingSupplier
from prismreplay.tensors.prefetching import Wanted
from prismtrace.schema import Kind
from prismtrace.trace import Trace

__all__ = ["Needs", "needed"]

_ROOT_GIVES = (Kind.BROADCAST, Kind.SCATTER)
_NOBODY_GIVES = (Kind.BARRIER, Kind.SEND)


class Needs(NamedTuple):
    """Contributions, operation by operation: all of the graph's, and those of its last step."""

    once: list[list[Wanted]]
    again: list[list[Wanted]]


def needed(graph: Trace, sandbox: Sequence[int], recording: RecordingSupplier) -> Needs:
    """What operations of sandbox ranks need; each operation is there once.

    Args:
        graph: of the job.
        sandbox: ranks that execute.
        recording: holds them; its groups are named as the program names them.
    """
    keys = _keys(recording.recorded.groups)
    groups = {
        group.id: (keys[tuple(group.ranks), group.name], tuple(group.ranks))
        for group in graph.header.groups
        if (tuple(group.ranks), group.name) in keys
    }
    rows = (
        graph.nodes.filter(
            pl.col("rank").is_in(list(sandbox))
            & pl.col("group").is_in(list(groups))
            & pl.col("seq").is_not_null()
        )
        .select(
            *("rank", "index", "start_ns", "step"),
            pl.col("kind").cast(pl.String),
            *("group", "seq", "peer"),
        )
        .sort(pl.col("start_ns").fill_null(0), "index", "rank")
        .collect()
    )
    virtual = frozenset(range(graph.header.world_size)) - set(sandbox)
    found = list(_in_order(rows, groups, virtual))
    last = rows["step"].max()
    return Needs(
        [wanted for _, wanted in found],
        [wanted for step, wanted in found if step is not None and step == last],
    )


def _in_order(
    rows: pl.DataFrame,
    groups: dict[int, tuple[str, tuple[int, ...]]],
    virtual: Collection[int],
) -> Iterator[tuple[int | None, list[Wanted]]]:
    """Operations with virtual members, with their steps."""
    seen: set[tuple[int, int]] = set()
    for rank, _, _, step, kind, group, seq, peer in rows.iter_rows():
        key, ranks = groups[group]
        if kind in _NOBODY_GIVES:
            continue
        if kind == Kind.RECV:
            if peer in virtual:
                yield step, [Wanted(peer, key, seq, rank)]
        elif (group, seq) not in seen:
            seen.add((group, seq))
            givers = (peer,) if kind in _ROOT_GIVES else ranks
            yield step, [Wanted(one, key, seq) for one in givers if one in virtual]


def _keys(groups: dict[str, tuple[int, ...]]) -> dict[tuple[tuple[int, ...], str], str]:
    """What the program calls groups, by their ranks and what a trace calls them."""
    found = {}
    for key, ranks in groups.items():
        generation, _, name = key.partition("/")
        found[ranks, name if generation == "0" else f"{name} ({generation})"] = key
    return found
