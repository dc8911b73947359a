"""all_to_all with parts of any size, and single messages, between sandbox ranks and absent ones.

Every sandbox rank sends and receives in K - 1 rounds, in round d to the member d places on and
from the one d places back, as a full group would. Its parts for virtual members, and theirs for
it, go over its links with the assistant, byte for byte; virtual members have nothing to tell each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from prismreplay.plugin.moves import Link, Move, Part, Program, Role, Schedule, Span

__all__ = ["exchange"]

Counts = Sequence[Sequence[int]]


def exchange(size: int, sandbox: Iterable[int], counts: Counts) -> Schedule:
    """An all_to_all(v); a single message is one whose other counts are 0.

    Args:
        size: K, members of the group.
        sandbox: places of those that are there.
        counts: [K, K] elements, from row to column. Between virtual members it is not read.

    A sandbox rank's `source` and `data` are its parts in order of the other member, as torch has
    them; its part for itself does not travel: whoever calls copies it. The assistant's `source`
    has, for each sandbox rank in order, what each virtual member in order sends it.

    Raises:
        ValueError: no such group, or not [K, K] counts.
    """
    ranks = tuple(sorted(set(sandbox)))
    if not ranks or ranks[0] < 0 or ranks[-1] >= size:
        raise ValueError(f"a group of {size} has no sandbox ranks {ranks}")
    if len(counts) != size or any(len(row) != size for row in counts):
        raise ValueError(f"counts are not {size} times {size}")
    links, numbers = _links(size, ranks)
    programs = [_rank(size, rank, ranks, counts, numbers) for rank in ranks]
    sources: dict[Role, int] = {rank: sum(counts[rank]) for rank in ranks}
    data: dict[Role, int] = {rank: sum(row[rank] for row in counts) for rank in ranks}
    if len(ranks) < size:
        virtual = [rank for rank in range(size) if rank not in ranks]
        # What virtual members get nobody reads: one area that holds the largest part, in which
        # channels may write over each other.
        sink = max(counts[rank][other] for rank in ranks for other in virtual)
        given = 0
        for place, rank in enumerate(ranks):
            programs.append(_assistant(size, rank, virtual, counts, numbers, given, place * sink))
            given += sum(counts[other][rank] for other in virtual)
        sources[None], data[None] = given, len(ranks) * sink
    return Schedule(
        "all_to_all", size, ranks, tuple(programs), tuple(links), sources, data, in_place=False
    )


def _links(size: int, ranks: tuple[int, ...]) -> tuple[list[Link], dict[tuple[Role, Role], int]]:
    """All pairs of sandbox ranks, and each with the program of the assistant that serves it."""
    links: list[Link] = []
    numbers: dict[tuple[Role, Role], int] = {}
    for place, rank in enumerate(ranks):
        for other_place, other in enumerate(ranks):
            if rank != other:
                numbers[rank, other] = len(links)
                links.append(Link(place, other_place))
        if len(ranks) < size:
            numbers[rank, None], numbers[None, rank] = len(links), len(links) + 1
            helper = len(ranks) + place
            links += [Link(place, helper), Link(helper, place)]
    return links, numbers


def _rank(
    size: int,
    rank: int,
    ranks: tuple[int, ...],
    counts: Counts,
    links: dict[tuple[Role, Role], int],
) -> Program:
    sends = [0, *accumulate(counts[rank])]
    gets = [0, *accumulate(row[rank] for row in counts)]
    moves = []
    for distance in range(1, size):
        to, back = (rank + distance) % size, (rank - distance) % size
        moves.append(
            Move(
                links[rank, to if to in ranks else None],
                Span(sends[to], counts[rank][to]),
                Part.SOURCE,
                links[back if back in ranks else None, rank],
                Span(gets[back], counts[back][rank]),
            )
        )
    return Program(rank, (rank,), tuple(moves))


def _assistant(
    size: int,
    rank: int,
    virtual: list[int],
    counts: Counts,
    links: dict[tuple[Role, Role], int],
    given: int,
    sink: int,
) -> Program:
    parts = [0, *accumulate(counts[other][rank] for other in virtual)]
    at = {other: given + parts[place] for place, other in enumerate(virtual)}
    moves = []
    for distance in range(1, size):
        to, back = (rank + distance) % size, (rank - distance) % size
        move = Move()
        if back in at:
            move = move._replace(
                send_link=links[None, rank],
                send=Span(at[back], counts[back][rank]),
                send_part=Part.SOURCE,
            )
        if to in at:
            move = move._replace(
                receive_link=links[rank, None], receive=Span(sink, counts[rank][to])
            )
        if back in at or to in at:
            moves.append(move)
    return Program(None, tuple(virtual), tuple(moves))
