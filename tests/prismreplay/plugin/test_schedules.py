"""The proof of the pruned communications: every set of sandbox ranks, on sets of contributions."""

from __future__ import annotations

import itertools
import random

import pytest

from prismreplay.plugin.exchange_schedule import exchange
from prismreplay.plugin.moves import Link, Move, Part, Program, Schedule, Span, shares
from prismreplay.plugin.ring_schedule import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from prismreplay.plugin.simulation import ScheduleError, simulate
from prismreplay.plugin.tree_schedule import tree_all_reduce, tree_parents

# Every subset, but of those that are rotations of each other one: ranks and chunks of a ring can
# be renumbered by a rotation, which `test_a_rotated_ring_is_the_same_ring` looks at. All of them
# up to 7; the rest of the proof, up to 16, is slow.
QUICK, COMPLETE = range(2, 11), range(11, 17)
RACES_UP_TO = 8


def subsets(size, *, rotations):
    every = (1 << size) - 1
    for mask in range(1, 1 << size):
        turned = ((mask >> by | mask << (size - by)) & every for by in range(size))
        if rotations or mask == min(turned):
            yield [rank for rank in range(size) if mask >> rank & 1]


def joined(parts):
    return list(itertools.chain.from_iterable(parts))


def masks(schedule):
    """Each rank contributes its bit to every element, the assistant those of all virtual ones."""
    given = {rank: [1 << rank] * schedule.source_counts[rank] for rank in schedule.sandbox}
    virtual = (1 << schedule.size) - 1 & ~sum(1 << rank for rank in schedule.sandbox)
    return given | {None: [virtual] * schedule.source_counts.get(None, 0)}


def prove_all_reduce(size, sandbox, make, *, count, sizes=None, **more):
    schedule = make(size, sandbox, count, **more)
    full = [(1 << size) - 1] * count
    races = size <= RACES_UP_TO
    found = simulate(schedule, masks(schedule), races=races)
    assert all(found[rank] == full for rank in sandbox)
    if schedule.in_place and races:
        shared = simulate(schedule, masks(schedule), shared=True, races=True)
        assert all(shared[role] == full for role in schedule.roles)
    if sizes is not None:
        assert set(schedule.sent().values()) == sizes


def prove_scatter_and_gather(size, sandbox):
    races = size <= RACES_UP_TO
    schedule = ring_reduce_scatter(size, sandbox, 1)
    found = simulate(schedule, masks(schedule), races=races)
    assert all(found[rank] == [(1 << size) - 1] for rank in sandbox)
    assert set(schedule.sent().values()) == {size - 1}

    schedule = ring_all_gather(size, sandbox, 1)
    given = {rank: [1 << rank] for rank in sandbox}
    given[None] = [0 if rank in sandbox else 1 << rank for rank in range(size)]
    found = simulate(schedule, given, races=races)
    for rank in sandbox:
        # Its own chunk does not travel.
        assert found[rank] == [(other != rank) << other for other in range(size)]
    assert set(schedule.sent().values()) == {size - 1}


def prove(size, *, rotations):
    for sandbox in subsets(size, rotations=rotations):
        # A full ring's link carries all chunks but one, twice.
        prove_all_reduce(size, sandbox, ring_all_reduce, count=size, sizes={2 * (size - 1)})
        prove_scatter_and_gather(size, sandbox)


@pytest.mark.parametrize("size", QUICK)
def test_rings_of_up_to_10_ranks_with_any_sandbox(size):
    prove(size, rotations=size <= 7)


@pytest.mark.slow
@pytest.mark.parametrize("size", COMPLETE)
def test_rings_of_up_to_16_ranks_with_any_sandbox(size):
    prove(size, rotations=False)


@pytest.mark.parametrize("size", range(2, 10))
def test_trees_with_any_sandbox(size):
    for sandbox in subsets(size, rotations=size <= 8):
        # The two trees carry half of the tensor each, on every link that is one of a sandbox rank.
        prove_all_reduce(size, sandbox, tree_all_reduce, count=4, pieces=2, sizes={2})


@pytest.mark.parametrize("size", range(2, 9))
def test_exchanges_with_any_sandbox(size):
    counts = [[(3 * row + 5 * column) % 4 for column in range(size)] for row in range(size)]
    for sandbox in subsets(size, rotations=size <= 6):
        schedule = exchange(size, sandbox, counts)
        virtual = [rank for rank in range(size) if rank not in sandbox]

        def part(row, column):
            return [100 * row + column] * counts[row][column]

        given = {rank: joined(part(rank, to) for to in range(size)) for rank in sandbox}
        given[None] = joined(part(other, to) for to in sandbox for other in virtual)
        found = simulate(schedule, given, races=True)
        sent = schedule.sent()
        for number, rank in enumerate(sandbox):
            wanted = [part(row, rank) for row in range(size)]
            wanted[rank] = [0] * counts[rank][rank]
            assert found[rank] == joined(wanted)
            out = sum(sent[link] for link, one in enumerate(schedule.links) if one.sender == number)
            assert out == sum(counts[rank]) - counts[rank][rank]


def test_a_rotated_ring_is_the_same_ring():
    choose = random.Random(1)
    for _ in range(200):
        size = choose.randrange(2, 14)
        sandbox = choose.sample(range(size), choose.randrange(1, size + 1))
        by = choose.randrange(size)

        def turned(rank, by=by, size=size):
            return (rank + by) % size

        for make, per_chunk in (
            (ring_all_reduce, size),
            (ring_reduce_scatter, 1),
            (ring_all_gather, 1),
        ):
            one = make(size, sandbox, per_chunk)
            other = make(size, map(turned, sandbox), per_chunk)
            theirs = {(program.role, program.members): program for program in other.programs}
            for program in one.programs:
                role = None if program.role is None else turned(program.role)
                same = theirs[role, tuple(map(turned, program.members))]
                for move, moved in zip(program.moves, same.moves, strict=True):
                    assert (move.send_part, move.own is None) == (
                        moved.send_part,
                        moved.own is None,
                    )
                    for span, turned_span, whole in (
                        (move.send, moved.send, make is not ring_reduce_scatter),
                        (move.receive, moved.receive, make is not ring_reduce_scatter),
                    ):
                        narrow = move.send_part is Part.SOURCE and make is ring_all_gather
                        if whole and not (narrow and program.role is not None):
                            assert turned_span.at == turned(span.at)


@pytest.mark.parametrize("seed", range(30))
def test_any_size_and_any_cut(seed):
    choose = random.Random(seed)
    size = choose.randrange(2, 40)
    sandbox = choose.sample(range(size), choose.randrange(1, min(size, 9) + 1))
    count, align = choose.randrange(0, 200), choose.choice((1, 4, 16))
    schedule = ring_all_reduce(size, sandbox, count, align=align)
    found = simulate(schedule, masks(schedule), slots=choose.randrange(1, 5))
    assert all(found[rank] == [(1 << size) - 1] * count for rank in sandbox)
    schedule = tree_all_reduce(size, sandbox, count, align=align, pieces=choose.randrange(1, 7))
    found = simulate(schedule, masks(schedule), races=True)
    assert all(found[rank] == [(1 << size) - 1] * count for rank in sandbox)


def test_trees_are_shallow_and_mirrored():
    for size in range(1, 70):
        for mirrored in (False, True):
            parents = tree_parents(size, mirrored=mirrored)
            assert parents.count(None) == 1
            for rank in range(size):
                depth, up = 0, parents[rank]
                while up is not None:
                    depth, up = depth + 1, parents[up]
                assert depth < size.bit_length()
    assert [tree_parents(8).count(rank) for rank in range(8)] == [0, 2, 0, 2, 0, 2, 0, 1]


def test_shares_cover_everything_in_order():
    assert shares(10, 4, 4) == [Span(0, 4), Span(4, 4), Span(8, 2), Span(10, 0)]
    assert shares(0, 2) == [Span(0, 0), Span(0, 0)]


@pytest.mark.parametrize("make", [ring_all_reduce, ring_reduce_scatter, tree_all_reduce])
@pytest.mark.parametrize("sandbox", [[], [4], [-1]])
def test_no_such_group(make, sandbox):
    with pytest.raises(ValueError, match="no sandbox ranks"):
        make(4, sandbox, 8)


def toy(*programs, links=((0, 1), (1, 0))):
    roles = (0, None)
    made = tuple(
        Program(role, (0,), moves) for role, moves in zip((0, None, None), programs, strict=False)
    )
    counts = dict.fromkeys(roles, 1)
    return Schedule(
        "toy", 2, (0,), made, tuple(Link(*link) for link in links), counts, counts, True
    )


ONE = Span(0, 1)


def test_the_simulation_finds_parties_that_wait_for_each_other():
    waits = (Move(receive_link=1, receive=ONE), Move(0, ONE, Part.SOURCE))
    also = (Move(receive_link=0, receive=ONE), Move(1, ONE, Part.SOURCE))
    with pytest.raises(ScheduleError, match="does not end: rank 0 of the group in move 0 of 2"):
        simulate(toy(waits, also), {0: [1], None: [2]})


def test_the_simulation_finds_contributions_that_count_twice():
    adds = (Move(0, ONE, Part.SOURCE, 1, ONE, 0),)
    again = (Move(receive_link=0, receive=ONE), Move(1, ONE, Part.DATA))
    with pytest.raises(ScheduleError, match="added twice"):
        simulate(toy(adds, again), {0: [1], None: [2]})


def test_the_simulation_finds_races():
    sends = (Move(0, ONE, Part.SOURCE), Move(1, ONE, Part.SOURCE))
    one, other = (Move(receive_link=0, receive=ONE),), (Move(receive_link=1, receive=ONE),)
    schedule = toy(sends, one, other, links=((0, 1), (0, 2)))
    simulate(schedule, {0: [1], None: [2]})
    with pytest.raises(ScheduleError, match="programs 1 and 2 race"):
        simulate(schedule, {0: [1], None: [2]}, races=True)
