"""The pruned tree all_reduce: sums rise to a root and the result comes down again.

Two trees, the second the mirror image of the first, carry half of the tensor each, so that (for
an even number of ranks) who has children in one is a leaf in the other. Virtual ranks next to
each other in a tree grow together to one node that the assistant plays: what they would send
each other stays inside. Each sandbox rank keeps its links, the bytes on them, and its place in
the order of things. V, the sum of all virtual contributions, goes in at one of the assistant's
nodes; its others add nothing, but send as much as the full tree would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prismreplay.plugin.moves import Link, Move, Part, Program, Role, Schedule, Span, shares

__all__ = ["tree_all_reduce", "tree_parents"]


def tree_parents(size: int, *, mirrored: bool = False) -> list[int | None]:
    """Each rank's parent in a tree of least depth, in whose order the ranks are sorted.

    Leaves are the even ranks; the middle of every range is the root of its subtree. The root's
    parent is None.
    """
    parents: list[int | None] = [None] * size
    waiting: list[tuple[int, int, int | None]] = [(0, size, None)]
    while waiting:
        low, high, parent = waiting.pop()
        if low == high:
            continue
        # The largest power of two in the range keeps leaves at even places.
        half = 1 << (high - low).bit_length() >> 1
        root = low + half - 1
        parents[root] = parent
        waiting += [(low, root, root), (root + 1, high, root)]
    if not mirrored:
        return parents
    return [None if up is None else size - 1 - up for up in reversed(parents)]


def tree_all_reduce(
    size: int, sandbox: Iterable[int], count: int, *, align: int = 1, pieces: int = 1
) -> Schedule:
    """Twice the depth of the tree in steps, with `pieces` under way at a time.

    Args:
        size: K, members of the group.
        sandbox: places of those that are there.
        count: elements of the tensor.
        align: pieces start at multiples of so many elements.
        pieces: into which each half is cut, so that levels of the tree work at the same time.

    Raises:
        ValueError: no such group.
    """
    ranks = tuple(sorted(set(sandbox)))
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a group of {size} has no sandbox ranks {ranks}")
    builder = _Builder([], [])
    scratch = 0
    for half, mirrored in zip(shares(count, 2, align), (False, True), strict=True):
        nodes = _nodes(tree_parents(size, mirrored=mirrored), frozenset(ranks))
        spans = [Span(half.at + one.at, one.count) for one in shares(half.count, pieces, align)]
        scratch = _add_tree(builder, nodes, [span for span in spans if span.count], count, scratch)
    sources: dict[Role, int] = dict.fromkeys(ranks, count)
    data: dict[Role, int] = dict.fromkeys(ranks, count)
    if len(ranks) < size:
        sources[None], data[None] = count, max(scratch, 1) * count
    return Schedule(
        "tree all_reduce",
        size,
        ranks,
        tuple(builder.programs),
        tuple(builder.links),
        sources,
        data,
        in_place=len(ranks) == size,
    )


class _Node(NamedTuple):
    """A sandbox rank or grown-together virtual ranks; `parent` and `children` are node numbers."""

    role: Role
    members: tuple[int, ...]
    parent: int | None
    children: tuple[int, ...]


def _nodes(parents: list[int | None], sandbox: frozenset[int]) -> list[_Node]:
    size = len(parents)
    head = list(range(size))

    def top(rank: int) -> int:
        up = parents[rank]
        while up is not None and rank not in sandbox and up not in sandbox:
            rank, up = up, parents[up]
        return rank

    head = [top(rank) for rank in range(size)]
    numbers = {rank: number for number, rank in enumerate(sorted(set(head)))}
    above: list[int | None] = []
    for rank in numbers:
        up = parents[rank]
        above.append(None if up is None else numbers[head[up]])
    return [
        _Node(
            rank if rank in sandbox else None,
            tuple(one for one in range(size) if head[one] == rank),
            above[number],
            tuple(child for child, up in enumerate(above) if up == number),
        )
        for rank, number in numbers.items()
    ]


class _Builder(NamedTuple):
    programs: list[Program]
    links: list[Link]


def _add_tree(
    builder: _Builder, nodes: list[_Node], spans: list[Span], count: int, scratch: int
) -> int:
    """Programs and links of one tree; `scratch` counts the assistant's areas of `count`."""
    # A node's way up is a program, its way down another, so that results come down while sums
    # still rise; the root's are one. Programs of a node stand in a row.
    first_program, up_of, down_of = len(builder.programs), {}, {}
    number = first_program
    for node, one in enumerate(nodes):
        up_of[node] = number
        down_of[node] = number + (one.parent is not None)
        number = down_of[node] + 1
    up_link, down_link = {}, {}
    for node, one in enumerate(nodes):
        if one.parent is not None:
            up_link[node], down_link[node] = len(builder.links), len(builder.links) + 1
            builder.links.append(Link(up_of[node], up_of[one.parent]))
            builder.links.append(Link(down_of[one.parent], down_of[node]))
    gives = next((node for node, one in enumerate(nodes) if one.role is None), None)
    for node, one in enumerate(nodes):
        base = 0
        if one.role is None:
            base, scratch = scratch * count, scratch + 1
        adds = one.role is not None or node == gives
        rise, fall = [], []
        for span in spans:
            kept = Span(base + span.at, span.count)
            rise += _rising(span, kept, [up_link[child] for child in one.children], adds)
            if one.parent is not None:
                part = Part.DATA if one.children else Part.SOURCE if adds else Part.IDENTITY
                rise.append(Move(up_link[node], kept if one.children else span, part))
                fall.append(Move(receive_link=down_link[node], receive=kept))
            lower = fall if one.parent is not None else rise
            lower += [Move(down_link[child], kept, Part.DATA) for child in one.children]
        builder.programs.append(Program(one.role, one.members, tuple(rise)))
        if one.parent is not None:
            builder.programs.append(Program(one.role, one.members, tuple(fall)))
    return scratch


def _rising(span: Span, kept: Span, links: list[int], adds: bool) -> list[Move]:
    """Take what the children send; the first meets the node's own contribution, if it adds."""
    first = span.at if adds else None
    return [
        Move(
            receive_link=link,
            receive=kept,
            own=kept.at if place else first,
            own_part=Part.DATA if place else Part.SOURCE,
        )
        for place, link in enumerate(links)
    ]
