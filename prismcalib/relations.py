"""How operations relate the clocks of their members, and the offsets that fit their ends best.

A spanning tree over the clock domains, whose edges are medians of end differences, gives first
offsets; a few rounds of alternating medians then fit all operations together.  Medians, because a
member that is late by chance must not move its clock.  What depends on who takes part in what is
found once, since rates of clocks are fitted by many rounds over the same operations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Int64Array
from prismcalib.grouped import Groups, group_max, group_min, numbered

__all__ = ["DomainPair", "Relations", "across_domains", "thin_out"]

_ROUNDS = 20
# Offsets need some hundred operations per pair of domains, not millions.
_MOST_PER_DOMAIN = 512


@dataclass(frozen=True, eq=False)
class DomainPair:
    """Two domains that share operations, and int[p] each: members of these in either."""

    parent: int
    child: int
    parent_members: NDArray[np.intp]
    child_members: NDArray[np.intp]


class Relations:
    """How operations relate D clock domains, for ends that are changed and fitted anew.

    Args:
        instance: int[m], operation of each of m members.
        domain: int[m], clock domain of each member, in 0 .. domains - 1.
        tier: int[m], how well the ends of this kind of operation agree, 0 best.
        domains: D.
        reference: the domain whose clock is kept.

    Attributes:
        reached: bool[D], the domains that the operations relate to the reference.
    """

    def __init__(
        self,
        instance: NDArray[Any],
        domain: NDArray[Any],
        tier: NDArray[Any],
        domains: int,
        reference: int,
    ) -> None:
        self._across = np.flatnonzero(across_domains(instance, domain))
        number, domain = numbered(instance[self._across]), domain[self._across]
        edges = _edges(number, domain, tier[self._across])
        self._edges = edges
        self._tree = _spanning_tree(edges, domains, reference)
        self._reference = reference
        self.reached = np.zeros(domains, np.bool_)
        self.reached[[reference, *(step.child for step in self._tree)]] = True
        # Offsets need no others.
        place = np.full(len(edges.first), -1)
        place[[step.edge for step in self._tree]] = np.arange(len(self._tree))
        in_tree = np.flatnonzero(place[edges.number] >= 0)
        self._one, self._other = edges.one[in_tree], edges.other[in_tree]
        self._step = Groups(place[edges.number[in_tree]], len(self._tree))
        self._kept = np.flatnonzero(thin_out(number, domain, domains))
        self._operation = Groups(numbered(number[self._kept]))
        self._domain = Groups(domain[self._kept], domains)

    def offsets(self, end_ns: Int64Array) -> Int64Array:
        """int64[D], to be added to the clocks for ends, int64[m], to agree; 0 if not reached.

        Nothing is taken for noise.
        """
        end = end_ns[self._across]
        apart = self._step.median(end[self._one] - end[self._other]).tolist()
        offset = [0] * len(self.reached)
        for step, between in zip(self._tree, apart, strict=True):
            offset[step.child] = offset[step.parent] + step.sign * between
        return np.where(self.reached, self._refined(np.array(offset), end[self._kept]), 0)

    def tree(self) -> Iterator[DomainPair]:
        """Pairs of domains along which offsets are found, from the reference outwards."""
        yield from self._pairs([(step.edge, step.sign) for step in self._tree])

    def pairs_of(self, domains: Collection[int]) -> Iterator[DomainPair]:
        """All pairs, in the tree or not, of which exactly one is among some domains: the child."""
        both = zip(self._edges.first.tolist(), self._edges.second.tolist(), strict=True)
        ways = (
            (edge, (other in domains) - (one in domains)) for edge, (one, other) in enumerate(both)
        )
        yield from self._pairs([(edge, sign) for edge, sign in ways if sign])

    def _pairs(self, signed: list[tuple[int, int]]) -> Iterator[DomainPair]:
        """Pairs of domains by numbers of edges; of sign -1 those whose child is the first."""
        edges = self._edges
        order = np.argsort(edges.number, kind="stable")
        bounds = np.searchsorted(edges.number[order], np.arange(len(edges.first) + 1))
        for edge, sign in signed:
            members = order[bounds[edge] : bounds[edge + 1]]
            one, other = self._across[edges.one[members]], self._across[edges.other[members]]
            first, second = int(edges.first[edge]), int(edges.second[edge])
            if sign > 0:
                yield DomainPair(first, second, one, other)
            else:
                yield DomainPair(second, first, other, one)

    def _refined(self, offset: Int64Array, end: Int64Array) -> Int64Array:
        """Alternate between the middle of each operation and the offset of each domain."""
        operation, domain = self._operation, self._domain
        for _ in range(_ROUNDS if len(end) else 0):
            aligned = end + offset[domain.number]
            middle = operation.median(aligned)[operation.number]
            correction = domain.median(middle - aligned)
            correction -= correction[self._reference]
            offset = offset + correction
            if not correction.any():
                break
        return offset


def across_domains(instance: NDArray[Any], domain: NDArray[Any]) -> NDArray[np.bool_]:
    """bool[m]: whether the operation of the member has members in several domains."""
    number, each = numbered(instance), domain.astype(np.int64)
    several: NDArray[np.bool_] = group_max(number, each) > group_min(number, each)
    return several[number]


def thin_out(instance: NDArray[Any], domain: NDArray[Any], domains: int) -> NDArray[np.bool_]:
    """bool[m]: members of every k-th operation, so that a fit stays quick on long traces."""
    number = numbered(instance)
    step = -(-len(number) // (_MOST_PER_DOMAIN * domains))
    if step <= 1:
        return np.ones(len(number), np.bool_)
    kept: NDArray[np.bool_] = np.arange(number.max() + 1) % step == 0
    # Never at the price of a domain that has few operations.
    kept[number[np.bincount(domain)[domain] <= _MOST_PER_DOMAIN]] = True
    return kept[number]


@dataclass(frozen=True, eq=False)
class _Edges:
    """Pairs of domains that share operations, best first, and the p pairs of members that do so.

    `one` (int[p], index of a member) is in the pair's domain `first`, `other` in `second`;
    `number`, int[p], says which pair of domains this is.
    """

    first: Int64Array
    second: Int64Array
    one: NDArray[np.intp]
    other: NDArray[np.intp]
    number: NDArray[np.intp]


def _edges(number: NDArray[Any], domain: NDArray[Any], tier: NDArray[Any]) -> _Edges:
    """Compare every member with the first member of its operation."""
    order = np.argsort(number, kind="stable")
    hub = np.flatnonzero(np.diff(number[order], prepend=-1))
    hub_of = order[np.repeat(hub, np.diff(np.append(hub, len(order))))]
    apart = domain[hub_of] != domain[order]
    order, hub_of = order[apart], hub_of[apart]
    flip = domain[hub_of] > domain[order]
    one, other = np.where(flip, order, hub_of), np.where(flip, hub_of, order)
    domains = int(domain.max(initial=0)) + 1
    pairs = domain[one].astype(np.int64) * domains + domain[other]
    names, pair, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    best_tier = group_min(pair, tier[order].astype(np.int64))
    best_first = np.lexsort((names, -counts, best_tier))
    place = np.empty(len(names), np.intp)
    place[best_first] = np.arange(len(names))
    first, second = np.divmod(names[best_first], domains)
    return _Edges(first, second, one, other, place[pair])


class _Step(NamedTuple):
    """From a domain whose offset is known to one whose offset is not; sign: 1 if it is `second`."""

    parent: int
    child: int
    edge: int
    sign: int


def _spanning_tree(edges: _Edges, domains: int, reference: int) -> list[_Step]:
    """Steps from the reference outwards, along a spanning tree of the best edges."""
    root = list(range(domains))

    def find(domain: int) -> int:
        while root[domain] != domain:
            root[domain] = root[root[domain]]
            domain = root[domain]
        return domain

    steps: list[list[_Step]] = [[] for _ in range(domains)]
    pairs = zip(edges.first.tolist(), edges.second.tolist(), strict=True)
    for edge, (first, second) in enumerate(pairs):
        a, b = find(first), find(second)
        if a != b:
            root[a] = b
            steps[first].append(_Step(first, second, edge, 1))
            steps[second].append(_Step(second, first, edge, -1))
    tree: list[_Step] = []
    reached, queue = {reference}, [reference]
    for domain in queue:
        for step in steps[domain]:
            if step.child not in reached:
                reached.add(step.child)
                queue.append(step.child)
                tree.append(step)
    return tree
