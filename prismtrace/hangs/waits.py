"""Who waits for whom, as a graph: the parts of it that wait for nobody else."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

__all__ = ["ends_of_waiting", "reaching"]

Item = TypeVar("Item", bound=Hashable)


def ends_of_waiting(waits: Mapping[Item, Iterable[Item]]) -> list[list[Item]]:
    """Sets of items that wait for each other or for nothing, and for nothing outside.

    Args:
        waits: item -> what it waits for; what is no key waits for nothing.

    Returns:
        A single item that waits for nothing, or all members of a cycle without exit.
    """
    component: dict[Item, int] = {}
    components = _components(waits)
    for number, members in enumerate(components):
        component.update(dict.fromkeys(members, number))
    leaving = {
        component[item]
        for item, targets in waits.items()
        for target in targets
        if component[target] != component[item]
    }
    return [members for number, members in enumerate(components) if number not in leaving]


def _components(waits: Mapping[Item, Iterable[Item]]) -> list[list[Item]]:
    """Strongly connected components (Tarjan), without recursion: chains may be long."""
    number: dict[Item, int] = {}
    low: dict[Item, int] = {}
    path: list[Item] = []
    on_path: set[Item] = set()
    found: list[list[Item]] = []
    for root in waits:
        if root in number:
            continue
        work = [(root, iter(waits[root]))]
        number[root] = low[root] = len(number)
        path.append(root)
        on_path.add(root)
        while work:
            item, targets = work[-1]
            for target in targets:
                if target not in number:
                    number[target] = low[target] = len(number)
                    path.append(target)
                    on_path.add(target)
                    work.append((target, iter(waits.get(target, ()))))
                    break
                if target in on_path:
                    low[item] = min(low[item], number[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[item])
                if low[item] == number[item]:
                    members = [path.pop()]
                    while members[-1] != item:
                        members.append(path.pop())
                    on_path.difference_update(members)
                    found.append(members)
    return found


def reaching(waits: Mapping[Item, Iterable[Item]], ends: Iterable[Item]) -> set[Item]:
    """Everything that waits for one of `ends`, directly or not; `ends` included."""
    waiters: dict[Item, list[Item]] = {}
    for item, targets in waits.items():
        for target in targets:
            waiters.setdefault(target, []).append(item)
    seen = set(ends)
    front = list(seen)
    while front:
        for item in waiters.get(front.pop(), ()):
            if item not in seen:
                seen.add(item)
                front.append(item)
    return seen
