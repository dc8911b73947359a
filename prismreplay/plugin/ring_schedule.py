"""The pruned ring: all_reduce, reduce_scatter and all_gather of K ranks, few of whom are there.

In the full ring every rank sends to the next one and receives from the one before, K - 1 times a
phase. A chunk's way through the reduce phase visits all ranks once, each adds its part; in the
gather phase the finished chunk goes round once more. Cutting out the virtual ranks leaves runs of
sandbox ranks (*segments*) with *gaps* between them, and in each gap the assistant receives what
the segment before it sends and feeds the one behind it. It sends and receives at the same steps
as the virtual ranks next to the sandbox would, so every sandbox rank has K - 1 or 2(K - 1) steps
and as many bytes on its links as in the full group: a gap of g ranks just hands on a chunk g
steps after it came in.

The sum of all virtual contributions, V, must enter each chunk once, and nobody knows the full
result beforehand. So where a chunk's way starts in a gap, the assistant sends V's chunk; where
it starts at a sandbox rank, the assistant adds V's chunk in the first gap that it passes. From
there on it hands on what came in. When a way ends in a gap, what came in is the full sum, which
the gather phase starts with. No gap ever needs what only another gap has, and what the gaps do
to one chunk happens in the order of its way: they share one buffer, which may be V itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prismreplay.plugin.moves import Link, Move, Part, Program, Role, Schedule, Span, shares

__all__ = ["ring_all_gather", "ring_all_reduce", "ring_reduce_scatter"]


def ring_all_reduce(size: int, sandbox: Iterable[int], count: int, *, align: int = 1) -> Schedule:
    """2(K - 1) steps.

    Args:
        size: K, members of the group.
        sandbox: places of those that are there.
        count: elements of the tensor; need not be a multiple of K.
        align: chunks start at multiples of so many elements.

    Raises:
        ValueError: no such group.
    """
    ring = _ring(size, sandbox)
    chunks = shares(count, size, align)
    # Rank c starts chunk c; rank c - 1 then has its sum and starts handing it round.
    programs = [
        _program(ring, node, _reducing(ring, node, chunks, 0), _handing(ring, node, chunks, -1))
        for node in range(len(ring.nodes))
    ]
    counts = _counts(ring, count, count)
    return _schedule("ring all_reduce", ring, programs, counts, counts)


def ring_reduce_scatter(
    size: int, sandbox: Iterable[int], count: int, *, align: int = 1
) -> Schedule:
    """K - 1 steps; member r ends with chunk r.

    Args:
        size: K, members of the group.
        sandbox: places of those that are there.
        count: elements that a member gets, a K-th of what it gives.
        align: unused, since chunks are as the caller laid them out.

    A sandbox rank's `data` is its result and nothing else: what it receives in one step it sends
    in the next.

    Raises:
        ValueError: no such group.
    """
    del align
    ring = _ring(size, sandbox)
    chunks = [Span(number * count, count) for number in range(size)]
    programs = [
        _program(ring, node, _reducing(ring, node, chunks, 1, narrow=True))
        for node in range(len(ring.nodes))
    ]
    return _schedule(
        "ring reduce_scatter",
        ring,
        programs,
        _counts(ring, size * count, size * count),
        _counts(ring, count, size * count),
        in_place=False,
    )


def ring_all_gather(size: int, sandbox: Iterable[int], count: int, *, align: int = 1) -> Schedule:
    """K - 1 steps; the assistant's `source` has the virtual members' chunks at their places.

    Args:
        size: K, members of the group.
        sandbox: places of those that are there.
        count: elements that a member gives, a K-th of what it gets. Its own chunk does not
            travel: whoever calls copies it.
        align: unused, since chunks are as the caller laid them out.

    Raises:
        ValueError: no such group.
    """
    del align
    ring = _ring(size, sandbox)
    chunks = [Span(number * count, count) for number in range(size)]
    programs = [
        _program(ring, node, _handing(ring, node, chunks, 0, fresh=True))
        for node in range(len(ring.nodes))
    ]
    return _schedule(
        "ring all_gather",
        ring,
        programs,
        _counts(ring, count, size * count),
        _counts(ring, size * count, size * count),
        in_place=False,
    )


class _Node(NamedTuple):
    """A sandbox rank, or a gap.

    Of a rank, `first` and `last` are itself and `passed` is 0; a gap stands behind rank `first`
    and before rank `last`, with `members` between them and a segment of `passed` ranks before.
    """

    role: Role
    first: int
    last: int
    members: tuple[int, ...]
    passed: int

    @property
    def delay(self) -> int:
        """Steps from a chunk's coming in to its going out; a rank sends in the next step."""
        return len(self.members)


class _Ring(NamedTuple):
    size: int
    sandbox: tuple[int, ...]
    nodes: tuple[_Node, ...]


def _ring(size: int, sandbox: Iterable[int]) -> _Ring:
    ranks = tuple(sorted(set(sandbox)))
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a group of {size} has no sandbox ranks {ranks}")
    nodes: list[_Node] = []
    run = 0
    # Begin behind a gap, so that the first segment is whole.
    start = next((i for i, rank in enumerate(ranks) if (rank - 1) % size not in ranks), 0)
    ordered = ranks[start:] + ranks[:start]
    for rank, following in zip(ordered, ordered[1:] + ordered[:1], strict=True):
        nodes.append(_Node(rank, rank, rank, (rank,), 0))
        run += 1
        absent = (following - rank - 1) % size
        if absent:
            members = tuple((rank + 1 + number) % size for number in range(absent))
            nodes.append(_Node(None, rank, following, members, run))
            run = 0
    return _Ring(size, ranks, tuple(nodes))


def _links(ring: _Ring, node: int) -> tuple[int, int]:
    """Link to the next node, and from the one before; link i starts at node i."""
    return node, (node - 1) % len(ring.nodes)


def _reducing(
    ring: _Ring, number: int, chunks: list[Span], shift: int, *, narrow: bool = False
) -> Iterator[Move]:
    """Rank c + `shift` starts chunk c. `narrow`: a rank's `data` is one chunk wide."""
    node, size = ring.nodes[number], ring.size
    out, into = _links(ring, number)
    for step in range(size - 1):
        if node.role is None:
            # What the next rank takes in this step; its way started `step` ranks before that.
            sent = chunks[(node.last - 1 - step - shift) % size]
            got = chunks[(node.first - step - shift) % size]
            part = Part.SOURCE if step < node.delay else Part.DATA
            own = got.at if step < node.passed else None
            yield Move(out, sent, part, into, got, own)
        else:
            sent = chunks[(node.first - step - shift) % size]
            taken = chunks[(node.first - 1 - step - shift) % size]
            kept = Span(0, taken.count) if narrow else taken
            if step:
                yield Move(
                    out, Span(0, sent.count) if narrow else sent, Part.DATA, into, kept, taken.at
                )
            else:
                yield Move(out, sent, Part.SOURCE, into, kept, taken.at)


def _handing(
    ring: _Ring, number: int, chunks: list[Span], shift: int, *, fresh: bool = False
) -> Iterator[Move]:
    """Rank c + `shift` has chunk c and hands it round. `fresh`: it is its own contribution."""
    node, size = ring.nodes[number], ring.size
    out, into = _links(ring, number)
    for step in range(size - 1):
        if node.role is None:
            sent = chunks[(node.last - 1 - step - shift) % size]
            got = chunks[(node.first - step - shift) % size]
            own = fresh and step < node.delay
        else:
            sent = chunks[(node.first - step - shift) % size]
            got = chunks[(node.first - 1 - step - shift) % size]
            own = fresh and step == 0
            if own:
                sent = Span(0, sent.count)
        yield Move(out, sent, Part.SOURCE if own else Part.DATA, into, got)


def _program(ring: _Ring, number: int, *phases: Iterable[Move]) -> Program:
    node = ring.nodes[number]
    return Program(node.role, node.members, tuple(move for phase in phases for move in phase))


def _counts(ring: _Ring, rank: int, assistant: int) -> dict[Role, int]:
    counts: dict[Role, int] = dict.fromkeys(ring.sandbox, rank)
    if len(ring.sandbox) < ring.size:
        counts[None] = assistant
    return counts


def _schedule(
    name: str,
    ring: _Ring,
    programs: list[Program],
    sources: dict[Role, int],
    data: dict[Role, int],
    *,
    in_place: bool = True,
) -> Schedule:
    nodes = len(ring.nodes)
    links = tuple(Link(number, (number + 1) % nodes) for number in range(nodes))
    if ring.size == 1:
        links = ()
    return Schedule(name, ring.size, ring.sandbox, tuple(programs), links, sources, data, in_place)
