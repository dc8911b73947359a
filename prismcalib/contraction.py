"""Fewer rows, the same times: contraction of an execution graph, arrays in, arrays out.

Four rewrites are repeated until none applies any more.

    redundant   an edge that a longer way around already implies is dropped
    series      a -> b, where b waits for a only and a lets only b go, becomes one row
    parallel    rows between the same two rows become one, as long as the longest
    fuse        operations of one group, one after the other, between which every member does at
                most one thing that nobody else sees, become one operation

The first three change no time of a row that remains, whatever the durations.  Neither does
fusing as long as ranks arrive as they did: each rank does all its computation first, then all
wait for each other once, and the rest is transfer.  When ranks arrive otherwise, it may matter
that in truth they met in between; by how much at most is known, see `Net.uneven_ns`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prismcalib.graph import Int32Array, Int64Array
from prismcalib.net import BoolArray, Net, edges_in_order, renumbered

__all__ = ["contract"]

_MOST_ROUNDS = 50


def contract(net: Net, *, group: Int32Array | None = None) -> Net:
    """Apply the rewrites as long as they find something; with `group` also fuse.

    `group` is int32[G]: the process group of every instance that may be fused, -1 of others.
    """
    for _ in range(_MOST_ROUNDS):
        before = len(net)
        net = _without_redundant(net)
        net = _series(net)
        net = _parallel(net)
        if group is not None:
            net = _fused(net, group)
        if len(net) == before:
            return net
    return net


def _without_redundant(net: Net) -> Net:
    """Drop edges a -> c where a -> b -> c exists and takes as long by its lags alone.

    Dropping several at once is sound: the edges of a way around reach less far than the edge
    that it replaces, so those that are dropped as well have ways around of their own.
    """
    n, edges = len(net), len(net.owner)
    several = net.waits_for[net.owner] > 1
    first = np.searchsorted(net.owner, np.arange(n + 1))
    # Ways of two edges: the second from a row with several deps, all firsts into its middle.
    second = np.flatnonzero(several)
    middle = net.dep[second]
    counts = first[middle + 1] - first[middle]
    leg = np.repeat(second, counts)
    begin = np.repeat(first[middle] - np.cumsum(counts) + counts, counts)
    inner = begin + np.arange(len(leg))
    around = net.lag[inner] + net.lag[leg]
    key = net.owner * n + net.dep
    wanted = net.owner[leg] * n + net.dep[inner]
    at = np.minimum(np.searchsorted(key, wanted), max(edges - 1, 0))
    found = np.flatnonzero(key[at] == wanted) if edges else np.empty(0, np.int64)
    redundant = np.zeros(edges, np.bool_)
    redundant[at[found[around[found] >= net.lag[at[found]]]]] = True
    if not redundant.any():
        return net
    return replace(
        net, **edges_in_order(net.owner[~redundant], net.dep[~redundant], net.lag[~redundant])
    )


def _series(net: Net) -> Net:
    single = np.flatnonzero(net.waits_for[net.owner] == 1)
    after, before = net.owner[single], net.dep[single]
    chained = net.mergeable[after] & net.mergeable[before] & (net.lets_go[before] == 1)
    for key in (net.place, net.sort, net.lane):
        chained &= key[after] == key[before]
    single, after, before = single[chained], after[chained], before[chained]
    if not len(single):
        return net
    n = len(net)
    link = np.arange(n)
    link[after] = before
    root = _roots(link)
    duration = np.zeros(n, np.int64)
    np.add.at(duration, root, net.duration)
    np.add.at(duration, root[after], net.lag[single])
    last = np.ones(n, np.bool_)
    last[before] = False
    tail, end = net.tail.copy(), net.end.copy()
    tail[root[last]], end[root[last]] = net.tail[last], net.end[last]
    outer = np.ones(len(net.owner), np.bool_)
    outer[single] = False
    changed = replace(net, duration=duration, tail=tail, end=end)
    ends = (root[net.owner[outer]], root[net.dep[outer]], net.lag[outer])
    return renumbered(changed, root == np.arange(n), root, *ends)


def _parallel(net: Net) -> Net:
    n = len(net)
    between = net.mergeable & (net.waits_for == 1) & (net.lets_go == 1)
    rows = np.flatnonzero(between)
    if len(rows) < 2:
        return net
    into, out = np.zeros(n, np.int64), np.zeros(n, np.int64)
    into[net.owner], out[net.dep] = np.arange(len(net.owner)), np.arange(len(net.owner))
    # Hardly any rows have the same neighbours: the others need no further look.
    pair = net.dep[into[rows]] * n + net.owner[out[rows]]
    order = np.argsort(pair, kind="stable")
    same = pair[order][1:] == pair[order][:-1]
    rows = np.sort(rows[order][np.append(same, False) | np.append(False, same)])
    if not len(rows):
        return net
    edge_in, edge_out = into[rows], out[rows]
    key = np.stack(
        [
            net.place[rows],
            net.sort[rows],
            net.dep[edge_in],
            net.lag[edge_in],
            net.owner[edge_out],
            net.lag[edge_out],
        ]
    )
    order = np.lexsort((rows, *key))
    new = np.append(True, (np.diff(key[:, order], axis=1) != 0).any(axis=0))
    keeper = rows[order][np.flatnonzero(new)[np.cumsum(new) - 1]]
    if new.all():
        return net
    root = np.arange(n)
    root[rows[order]] = keeper
    duration, end, tail = net.duration.copy(), net.end.copy(), net.tail.copy()
    start, head, lane = net.start.copy(), net.head.copy(), net.lane.copy()
    # The longest says what the row is called; of equals the first.
    by_length = rows[np.lexsort((-rows, net.duration[rows], root[rows]))]
    longest = by_length[np.append(np.diff(root[by_length]) != 0, True)]
    for values, given in ((duration, net.duration), (tail, net.tail), (head, net.head)):
        values[root[longest]] = given[longest]
    lane[root[longest]] = net.lane[longest]
    np.maximum.at(end, root[rows], net.end[rows])
    np.minimum.at(start, root[rows], net.start[rows])
    kept = np.ones(len(net.owner), np.bool_)
    gone = rows[root[rows] != rows]
    kept[into[gone]] = kept[out[gone]] = False
    changed = replace(net, duration=duration, start=start, end=end, tail=tail, head=head, lane=lane)
    ends = (net.owner[kept], net.dep[kept], net.lag[kept])
    return renumbered(changed, root == np.arange(n), root, *ends)


# --- fusing -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Chains:
    """Operations to be fused, as seen by their members: k rows of k operations in a chain each.

    Attributes:
        first, last: int64[c], first and last row of every chain.
        inner: int64[m], rows of computation in between; `of` the chain they are in.
        middle: rows of the operations, neither first nor last; `middle_of` their chain.
        spent: int64[c], computation, and idle time around it, on every chain; 0 where there is
            none.
    """

    first: Int64Array
    last: Int64Array
    inner: Int64Array
    of: Int64Array
    middle: Int64Array
    middle_of: Int64Array
    spent: Int64Array


def _fused(net: Net, group: Int32Array) -> Net:
    """Every chain becomes a row of computation, if it has any, and a row of communication."""
    chains = _chains(net, group)
    if chains is None:
        return net
    first, last = chains.first, chains.last
    operation = net.instance[first]
    arrival = net.start[first] + chains.spent
    meeting = np.full(int(net.instance.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(meeting, operation, arrival)
    working = np.zeros(len(first), np.bool_)
    working[chains.of] = True
    begin, lasting = first[working], chains.spent[working]

    names = (
        "duration", "start", "end", "instance", "head", "tail", "sort", "lane", "mergeable",
    )  # fmt: skip
    new: dict[str, Any] = {name: getattr(net, name).copy() for name in names}
    # The last row of a chain stands for all its operations, ...
    new["instance"][last], new["head"][last] = operation, net.head[first]
    new["start"][last], new["duration"][last] = arrival, net.end[last] - meeting[operation]
    # ... the first for all its computations.
    earliest, latest = np.full(len(first), len(net)), np.full(len(first), -1)
    np.minimum.at(earliest, chains.of, chains.inner)
    np.maximum.at(latest, chains.of, chains.inner)
    earliest, latest = earliest[working], latest[working]
    new["instance"][begin], new["mergeable"][begin] = -1, True
    new["duration"][begin], new["end"][begin] = lasting, net.start[begin] + lasting
    new["head"][begin], new["tail"][begin] = net.head[earliest], net.tail[latest]
    new["sort"][begin], new["lane"][begin] = net.sort[earliest], net.lane[earliest]

    rows = np.arange(len(net))
    part_of, stays = rows.copy(), np.ones(len(net), np.bool_)
    part_of[first], part_of[chains.middle] = last, last[chains.middle_of]
    part_of[chains.inner] = first[chains.of]
    stays[chains.inner] = stays[chains.middle] = stays[first[~working]] = False
    # Edges inside chains go; what leads to the first row leads to whatever begins the chain.
    inside = np.zeros(len(net), np.bool_)
    inside[chains.inner] = inside[chains.middle] = inside[last] = True
    outer = ~inside[net.owner]
    moved = rows.copy()
    moved[first[~working]] = last[~working]
    owner = np.concatenate([moved[net.owner[outer]], last[working]])
    dep = np.concatenate([net.dep[outer], begin])
    lag = np.concatenate([net.lag[outer], np.zeros(len(begin), np.int64)])
    least = np.full(len(meeting), np.iinfo(np.int64).max)
    most = np.zeros(len(meeting), np.int64)
    np.minimum.at(least, operation, chains.spent)
    np.maximum.at(most, operation, chains.spent)
    uneven = int((most - least)[operation].max())
    changed = replace(net, **new, uneven_ns=max(net.uneven_ns, uneven))
    return renumbered(changed, stays, part_of, owner, dep, lag)


def _chains(net: Net, group: Int32Array) -> _Chains | None:
    follower, via, idle = _followers(net)
    member = np.flatnonzero(net.instance >= 0)
    goes_on = _goes_on(net, member, follower, group)
    rows = member[goes_on[net.instance[member]]]
    if not len(rows):
        return None
    link = np.arange(len(net))
    link[follower[rows]] = rows
    root = _roots(link)
    first = rows[root[rows] == rows]
    number = np.full(len(net), -1)
    number[first] = np.arange(len(first))
    chain = number[root]
    followed = np.zeros(len(net), np.bool_)
    followed[rows] = True
    ends = follower[rows[~followed[follower[rows]]]]
    last = np.empty(len(first), np.int64)
    last[chain[ends]] = ends
    middle = rows[root[rows] != rows]
    busy = via[rows] >= 0
    inner, of = via[rows[busy]], chain[rows[busy]]
    spent, working = np.zeros(len(first), np.int64), np.zeros(len(first), np.bool_)
    np.add.at(spent, of, net.duration[inner])
    np.add.at(spent, chain[rows], idle[rows])
    working[of] = True
    return _Chains(first, last, inner, of, middle, chain[middle], np.where(working, spent, 0))


def _followers(net: Net) -> tuple[Int64Array, Int64Array, Int64Array]:
    """What alone follows a member of an operation.

    The next member, or -1; the computation in between, or -1; and the lags on the way.
    """
    n = len(net)
    single = net.waits_for[net.owner] == 1
    only = np.full(n, -1)
    lag = np.zeros(n, np.int64)
    only[net.dep[single]], lag[net.dep[single]] = net.owner[single], net.lag[single]
    only[net.lets_go != 1] = -1
    member = net.instance >= 0
    near = np.where((only >= 0) & (net.place[only] == net.place), only, -1)
    through = (near >= 0) & net.mergeable[near]
    far = np.where(through, near[near], -1)
    reached = np.where(through, far, near)
    reached = np.where((reached >= 0) & member[reached] & member, reached, -1)
    via = np.where(through, near, -1)
    idle = lag + np.where(through, lag[near], 0)
    return reached, via, idle


def _goes_on(net: Net, member: Int64Array, follower: Int64Array, group: Int32Array) -> BoolArray:
    """bool[G], operations that all members leave for one and the same next one of the group."""
    count = len(group)
    instance = net.instance[member]
    size = np.bincount(instance, minlength=count)
    known = follower[member] >= 0
    here, there = instance[known], net.instance[follower[member[known]]]
    low, high = np.full(count, count), np.full(count, -1)
    np.minimum.at(low, here, there)
    np.maximum.at(high, here, there)
    followed = np.bincount(here, minlength=count)
    goes_on = (group >= 0) & (size > 0) & (followed == size) & (low == high)
    after = np.where(goes_on, high, 0)
    goes_on &= (group[after] == group) & (size[after] == size)
    return np.asarray(goes_on, np.bool_)


# --- renumbering ------------------------------------------------------------------------


def _roots(link: Int64Array) -> Int64Array:
    """Where following the links from every row ends; links lead to earlier rows or stay."""
    while True:
        further = link[link]
        if np.array_equal(further, link):
            return link
        link = further
