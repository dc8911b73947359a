"""Why a graph cannot be propagated to its end: missing members, or a cycle.

Both answers depend on the graph alone, so every engine reports the same.
"""

from __future__ import annotations

import numpy as np

from prismcalib.errors import CycleError, MissingMemberError
from prismcalib.graph import Graph, Int32Array

__all__ = ["cycle_error", "find_cycle", "require_members"]

_SHOWN = 12


def require_members(graph: Graph) -> None:
    """Refuse a graph with a sync instance that can never complete.

    Raises:
        MissingMemberError: an instance lacks members; the first one is named.
    """
    short = np.flatnonzero(graph.members_present < graph.instance_size)
    if not len(short):
        return
    instance = int(short[0])
    rows = np.flatnonzero(graph.instance == instance)
    names = ", ".join(graph.label(row) for row in rows[:_SHOWN]) or "none"
    if len(rows) > _SHOWN:
        names += f", and {len(rows) - _SHOWN} more"
    others = f"; {len(short) - 1} more instances lack members" if len(short) > 1 else ""
    raise MissingMemberError(
        f"a sync instance has {len(rows)} of {graph.instance_size[instance]} members, "
        f"present: {names}{others}",
        where=f"instance={instance}",
        hint="the absent ranks were not recorded, or their recording ends earlier: "
        "add their slices or cut all ranks to the same steps; ranks that were cut out of a whole "
        "trace are asked about in that one",
        instance=instance,
        rows=tuple(int(row) for row in rows),
    )


def cycle_error(graph: Graph, finished: Int32Array) -> CycleError:
    """The error that names one cycle.

    Args:
        graph: has all members, but propagation got stuck.
        finished: rows of the expanded graph that propagation completed.
    """
    found = [graph.original(row) for row in find_cycle(graph.expanded, finished)]
    # A row and its arrival are neighbours in the circle.
    cycle = tuple(
        row for row, before in zip(found, found[-1:] + found, strict=False) if row != before
    )
    cycle = cycle or (found[0],)

    def communicates(row: int) -> bool:
        return graph.instance[row] >= 0 or len(graph.waits(row)) > 0

    shown = list(cycle)
    if len(shown) > _SHOWN:
        # Where the circle changes ranks is what a reader has to look at.
        shown = [row for row in shown if communicates(row)] or shown
    text = " -> ".join(graph.label(row) for row in shown[:_SHOWN])
    if len(shown) > _SHOWN:
        text += " -> ..."
    synced = any(communicates(row) for row in cycle)
    # Labels, where there are any, tell the kind.
    sends = any(" send " in f" {graph.label(row)} " for row in cycle)
    return CycleError(
        f"{len(cycle)} operations wait for each other in a circle, each for the one before it "
        f"and the first for the last: {text}",
        where=f"row={cycle[0]}",
        hint=(
            "ranks issue these communications in different orders, or an exchange that was "
            "coalesced in reality (batch_isend_irecv) was recorded as separate operations"
            + (
                "; if sends do not wait for their receiver there, merge with --eager-below BYTES, "
                "more than these carry"
                if sends
                else ""
            )
            if synced
            else "an operation depends on itself: the deps of these rows are wrong"
        ),
        rows=cycle,
    )


def find_cycle(graph: Graph, finished: Int32Array) -> tuple[int, ...]:
    """Rows of one cycle; each waits for the row before it, the first for the last.

    Follows "waits for" from the lowest unfinished row until a row comes up again, which must
    happen: every unfinished row waits for another unfinished one.
    """
    open_rows = np.ones(graph.rows, np.bool_)
    open_rows[finished] = False
    pending = np.flatnonzero(open_rows)
    grouped = pending[np.argsort(graph.instance[pending], kind="stable")]
    group_of = graph.instance[grouped]

    def unfinished_dep(row: int) -> int | None:
        deps = graph.deps(row)
        deps = deps[open_rows[deps]]
        return int(deps[0]) if len(deps) else None

    def waits_for(row: int) -> int:
        dep = unfinished_dep(row)
        if dep is not None:
            return dep
        # All deps ended, so the row has arrived at its sync instance and another member has not.
        first, last = np.searchsorted(group_of, [graph.instance[row], graph.instance[row] + 1])
        return next(int(m) for m in grouped[first:last] if unfinished_dep(m) is not None)

    row = int(pending[0])
    walk: list[int] = []
    position: dict[int, int] = {}
    while row not in position:
        position[row] = len(walk)
        walk.append(row)
        row = waits_for(row)
    return tuple(reversed(walk[position[row] :]))
