"""The compiled pass behind `prismreplay.boundary`: which boundary operations reach which, how late.

Every row of a virtual rank gets a *label*: pairs (source, weight) such that the row's time is
the latest of ready(source) + weight.  Source 0 is the origin of time; the others are boundary
operations, and *junctions*, which stand for a label that grew too long to be copied.  One walk
over the rows in an order of completion computes all labels: a row that depends on one other
shares its label, where several meet the labels are united.

A pair is left out when another one is never earlier.  What is known for that is `least[b, a]`:
a lower bound of ready(b) - ready(a), from the labels of b, and 0 where only sandbox ranks lie
between, whose durations are not known before they run.

A junction that depends on few boundary operations in the end, through whatever other junctions,
has a *flat* label as well. Where many such junctions meet (the replicas of a job, which all began
the step after the same operations) their flat labels take their places: the union is no longer
than one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prismcalib.compiling import compiled

__all__ = ["BAND", "trace_labels"]

BAND = 1024
"""A source is compared with this many before it; with older ones nothing is left out."""

LONGEST_FLAT = 16
"""Pairs of a flat label."""

_NONE = -(2**62)

# What a source is.
_ORIGIN, _BOUNDARY, _JUNCTION, _EVENT = 0, 1, 2, 3


@compiled
def trace_labels(
    order: Any,
    offsets: Any,
    deps: Any,
    lags: Any,
    release: Any,
    duration: Any,
    instance: Any,
    sandbox: Any,
    crossing: Any,
    longest: int,
    longest_shared: int,
) -> Any:
    """Labels of all rows, as the edges of the sources that they end in.

    Args:
        order: int32[n], rows in an order of completion, members of an instance together.
        offsets, deps: int64[n + 1], int32[e]: dependencies of the rows.
        lags: int64[e], or empty for zeros.
        release: int64[n] >= 0, or empty for zeros.
        duration: int64[n]; those of sandbox rows are not used.
        instance: int32[n], or -1.
        sandbox: bool[n].
        crossing: bool[n], sandbox rows that a virtual row depends on, or that depend on one.
        longest: pairs that a label may have; a longer one becomes a junction.
        longest_shared: the same for the label of several virtual rows that sync, whose junction
            serves them all.

    Returns:
        kind int8[S], owner int32[S] (instance of a boundary, row of an event, else -1), and the
        edges by target: edge_offsets int64[S + 1], edge_source int32[E], edge_weight int64[E].
    """
    n = len(order)
    has_lags, has_release = len(lags) > 0, len(release) > 0
    # Labels: row -> pool[first : first + count], all weights plus `add`.
    first = np.zeros(n, np.int64)
    count = np.zeros(n, np.int32)
    add = np.zeros(n, np.int64)
    pool_source = np.empty(1024, np.int32)
    pool_weight = np.empty(1024, np.int64)
    pool_source[0], pool_weight[0] = 0, 0
    pool = 1  # pool[0] is the label of rows that depend on nothing: the origin
    # Sources.
    room = 256
    sources = 1
    kind = np.zeros(room, np.int8)
    owner = np.full(room, -1, np.int32)
    least = np.full((room, BAND), _NONE, np.int64)
    edge_offsets = np.zeros(room + 1, np.int64)
    edge_source = np.empty(1024, np.int32)
    edge_weight = np.empty(1024, np.int64)
    edges = 0
    # Flat labels of junctions: source -> flat_source[flat_first :][: flat_count].
    flat_first = np.zeros(room, np.int64)
    flat_count = np.zeros(room, np.int32)
    flat_source = np.empty(1024, np.int32)
    flat_weight = np.empty(1024, np.int64)
    flats = 0
    # A union in the making: sources met, and the largest weight of each.
    met = np.empty(1024, np.int32)
    weight_of = np.full(room, _NONE, np.int64)
    # Another one, flat.
    flat_met = np.empty(1024, np.int32)
    weight_flat = np.full(room, _NONE, np.int64)
    # A third one: what a sandbox row or a boundary operation comes after, weights 0.
    past = np.empty(1024, np.int32)
    is_past = np.zeros(room, np.bool_)

    at = 0
    while at < n:
        number = instance[order[at]]
        last = at + 1
        if number >= 0:
            while last < n and instance[order[last]] == number:
                last += 1
        real, virtual = 0, 0
        for k in range(at, last):
            if sandbox[order[k]]:
                real += 1
            else:
                virtual += 1
        boundary = real > 0 and virtual > 0
        # --- unite the labels of everything that the row, or the instance, starts after
        n_met = n_past = 0
        if last == at + 1:
            # The frequent cases: nothing to unite.
            row = order[at]
            low, high = offsets[row], offsets[row + 1]
            mine = sandbox[row]
            bare = not crossing[row] and not (has_release and release[row])
            if bare and high == low + 1 and sandbox[deps[low]] == mine:
                dep = deps[low]
                first[row], count[row] = first[dep], count[dep]
                if not mine:
                    add[row] = add[dep] + (lags[low] if has_lags else 0) + duration[row]
                at = last
                continue
            if bare and high == low:
                first[row], count[row] = 0, 0 if mine else 1
                add[row] = 0 if mine else duration[row]
                at = last
                continue
        for k in range(at, last):
            row = order[k]
            mine = sandbox[row]
            if not mine:
                free = release[row] if has_release else 0
                if free or offsets[row] == offsets[row + 1]:
                    if weight_of[0] == _NONE:
                        if n_met == len(met):
                            met = _grown32(met)
                        met[n_met] = 0
                        n_met += 1
                    weight_of[0] = max(weight_of[0], free)
            for edge in range(offsets[row], offsets[row + 1]):
                dep = deps[edge]
                lag = lags[edge] if has_lags else 0
                if mine and sandbox[dep]:
                    for j in range(first[dep], first[dep] + count[dep]):
                        source = pool_source[j]
                        if not is_past[source]:
                            is_past[source] = True
                            if n_past == len(past):
                                past = _grown32(past)
                            past[n_past] = source
                            n_past += 1
                    continue
                for j in range(first[dep], first[dep] + count[dep]):
                    source = pool_source[j]
                    weight = pool_weight[j] + add[dep] + lag
                    if weight_of[source] == _NONE:
                        if n_met == len(met):
                            met = _grown32(met)
                        met[n_met] = source
                        n_met += 1
                    weight_of[source] = max(weight_of[source], weight)
        n_met = _without_superfluous(met, n_met, weight_of, least)
        n_past = _without_old(past, n_past, is_past, least)
        event = False
        if last == at + 1 and real == 1:
            event = crossing[order[at]]
        limit = longest_shared if virtual > 1 else longest
        makes_source = boundary or event or (virtual > 0 and n_met > limit)
        n_flat = 0
        if makes_source and n_met > longest_shared:
            # --- the same in terms of what its junctions depend on, if that is much shorter
            most = max(n_met, LONGEST_FLAT)
            if most > len(flat_met):
                flat_met = np.empty(2 * most, np.int32)
            n_flat = _flattened(
                met,
                n_met,
                weight_of,
                flat_first,
                flat_count,
                flat_source,
                flat_weight,
                flat_met,
                weight_flat,
                most,
            )
            n_flat = _without_superfluous(flat_met, n_flat, weight_flat, least)
            if 0 < 2 * n_flat <= n_met:
                for i in range(n_met):
                    weight_of[met[i]] = _NONE
                for i in range(n_flat):
                    met[i] = flat_met[i]
                    weight_of[met[i]] = weight_flat[met[i]]
                n_met = n_flat
        if makes_source:
            if sources == room:
                room *= 2
                kind = _grown8(kind)
                owner = _grown32(owner)
                wider = np.full((room, BAND), _NONE, np.int64)
                wider[:sources] = least
                least = wider
                longer = np.zeros(room + 1, np.int64)
                longer[: sources + 1] = edge_offsets
                edge_offsets = longer
                more = np.full(room, _NONE, np.int64)
                more[:sources] = weight_of
                weight_of = more
                more = np.full(room, _NONE, np.int64)
                more[:sources] = weight_flat
                weight_flat = more
                flat_first = _grown64(flat_first)
                flat_count = _grown32(flat_count)
                flags = np.zeros(room, np.bool_)
                flags[:sources] = is_past
                is_past = flags
            new = sources
            sources += 1
            kind[new] = _BOUNDARY if boundary else (_EVENT if event else _JUNCTION)
            owner[new] = number if boundary else (order[at] if event else -1)
            flat_first[new], flat_count[new] = flats, 0
            if kind[new] == _JUNCTION and n_flat <= LONGEST_FLAT:
                flat_count[new] = n_flat
                while flats + n_flat > len(flat_source):
                    flat_source = _grown32(flat_source)
                    flat_weight = _grown64(flat_weight)
                for i in range(n_flat):
                    flat_source[flats] = flat_met[i]
                    flat_weight[flats] = weight_flat[flat_met[i]]
                    flats += 1
            while edges + n_met > len(edge_source):
                edge_source = _grown32(edge_source)
                edge_weight = _grown64(edge_weight)
            for i in range(n_met):
                edge_source[edges] = met[i]
                edge_weight[edges] = weight_of[met[i]]
                edges += 1
            edge_offsets[new + 1] = edges
            row_least = least[new]
            for i in range(n_met + n_past):
                source = met[i] if i < n_met else past[i - n_met]
                bound = max(weight_of[source], 0) if i >= n_met else weight_of[source]
                if new - source > BAND:
                    continue
                row_least[source % BAND] = max(row_least[source % BAND], bound)
                # What is before the source is before this one as well.
                for before in range(max(0, new - BAND), source):
                    through = least[source, before % BAND] if source - before <= BAND else _NONE
                    if through != _NONE:
                        slot = before % BAND
                        row_least[slot] = max(row_least[slot], through + bound)
            for i in range(n_met):
                weight_of[met[i]] = _NONE
            for i in range(n_past):
                is_past[past[i]] = False
            if pool == len(pool_source):
                pool_source = _grown32(pool_source)
                pool_weight = _grown64(pool_weight)
            pool_source[pool], pool_weight[pool] = new, 0
            label, length = pool, 1
            pool += 1
        else:
            # The label itself; of sandbox rows what they come after.
            length = n_met if virtual > 0 else n_met + n_past
            while pool + length > len(pool_source):
                pool_source = _grown32(pool_source)
                pool_weight = _grown64(pool_weight)
            label = pool
            for i in range(n_met):
                pool_source[pool] = met[i]
                pool_weight[pool] = weight_of[met[i]]
                weight_of[met[i]] = _NONE
                pool += 1
            for i in range(n_past):
                is_past[past[i]] = False
                if virtual == 0:
                    pool_source[pool] = past[i]
                    pool_weight[pool] = 0
                    pool += 1
        for i in range(n_flat):
            weight_flat[flat_met[i]] = _NONE
        for k in range(at, last):
            row = order[k]
            first[row], count[row] = label, length
            add[row] = 0 if sandbox[row] else duration[row]
        at = last
    return (
        kind[:sources],
        owner[:sources],
        edge_offsets[: sources + 1],
        edge_source[:edges],
        edge_weight[:edges],
    )


@compiled
def _flattened(
    met: Any,
    n_met: int,
    weight_of: Any,
    flat_first: Any,
    flat_count: Any,
    flat_source: Any,
    flat_weight: Any,
    flat_met: Any,
    weight_flat: Any,
    most: int,
) -> int:
    """Unite the flat labels of junctions, and other pairs; how many pairs, 0: more than `most`."""
    n_flat = 0
    for i in range(n_met):
        junction = met[i]
        base = weight_of[junction]
        count = flat_count[junction]
        for j in range(max(1, count)):
            source, weight = junction, base
            if count > 0:
                source = flat_source[flat_first[junction] + j]
                weight = base + flat_weight[flat_first[junction] + j]
            if weight_flat[source] == _NONE:
                if n_flat == most:
                    for k in range(n_flat):
                        weight_flat[flat_met[k]] = _NONE
                    return 0
                flat_met[n_flat] = source
                n_flat += 1
            weight_flat[source] = max(weight_flat[source], weight)
    return n_flat


@compiled
def _without_superfluous(met: Any, n_met: int, weight_of: Any, least: Any) -> int:
    """Drop pairs that another pair always outweighs; how many remain, first in `met`."""
    kept = 0
    for i in range(n_met):
        source = met[i]
        weight = weight_of[source]
        dominated = False
        for j in range(n_met):
            other = met[j]
            if other > source and other - source <= BAND and weight_of[other] != _NONE:
                bound = least[other, source % BAND]
                if bound != _NONE and bound + weight_of[other] >= weight:
                    dominated = True
                    break
        if dominated:
            weight_of[source] = _NONE
        else:
            met[kept] = source
            kept += 1
    return kept


@compiled
def _without_old(past: Any, n_past: int, is_past: Any, least: Any) -> int:
    """Drop sources that another one comes after; how many remain, first in `past`."""
    kept = 0
    for i in range(n_past):
        source = past[i]
        for j in range(n_past):
            other = past[j]
            if (
                other > source
                and other - source <= BAND
                and is_past[other]
                and least[other, source % BAND] != _NONE
            ):
                is_past[source] = False
                break
        if is_past[source]:
            past[kept] = source
            kept += 1
    return kept


@compiled
def _grown8(array: Any) -> Any:
    longer = np.zeros(2 * len(array), np.int8)
    longer[: len(array)] = array
    return longer


@compiled
def _grown32(array: Any) -> Any:
    longer = np.full(2 * len(array), -1, np.int32)
    longer[: len(array)] = array
    return longer


@compiled
def _grown64(array: Any) -> Any:
    longer = np.zeros(2 * len(array), np.int64)
    longer[: len(array)] = array
    return longer
