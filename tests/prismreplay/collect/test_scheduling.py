"""The policy: never too many, everybody in the end, and no dearer than the plain order."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from prismreplay.collect.scheduling import (
    Program,
    Turns,
    View,
    count_switches,
    in_turn,
    thrifty,
)


def view(**changes: object) -> View:
    facts = {
        "ready": [],
        "free": [0],
        "residents": [None],
        "running": (),
        "awaited": lambda _: [],
    }
    return View(**{**facts, **changes})  # type: ignore[arg-type]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Collectives and messages of random groups, waited for at once or later; no deadlocks."""
    size = draw(st.integers(1, 7))
    rng = random.Random(draw(st.integers(0, 2**32)))
    program = Program.of(range(size))
    owed: dict[int, list[int]] = {rank: [] for rank in range(size)}
    for instance in range(1, draw(st.integers(0, 25)) + 1):
        members = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
        for rank in members:
            program.issued(rank, instance, members)
            owed[rank].append(instance)
            if rng.random() < 0.7:
                for number in owed[rank]:
                    program.waited(rank, number)
                owed[rank].clear()
    for rank, numbers in owed.items():
        for number in numbers:
            program.waited(rank, number)
    return program


@given(programs(), st.integers(1, 4), st.sampled_from([thrifty, in_turn]))
def test_every_program_is_played_to_its_end(program: Program, slots: int, policy: object) -> None:
    switches = count_switches(program, slots, policy)  # type: ignore[arg-type]
    assert switches is not None
    assert switches >= len(program.actions)  # everybody had a first turn


@given(programs(), st.integers(1, 4))
def test_keeping_residents_is_not_dearer(program: Program, slots: int) -> None:
    ours = count_switches(program, slots, thrifty)
    plain = count_switches(program, slots, in_turn, keep=False)
    assert ours is not None
    assert plain is not None
    if slots >= len(program.actions):
        assert ours == len(program.actions) <= plain


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("rbel"), st.integers(0, 5)), max_size=60),
)
def test_never_more_than_there_are_slots(slots: int, moves: list[tuple[str, int]]) -> None:
    turns = Turns(slots)
    ended: set[int] = set()
    for move, rank in moves:
        if rank in ended:
            continue
        if move == "r" and rank not in turns.running:
            turns.make_ready(rank, patient=rank % 2 == 0)
        elif move in "bl":
            turns.release(rank)
        elif move == "e":
            turns.release(rank, ended=True)
            ended.add(rank)
        turns.grant(lambda _: [])
        assert len(turns.running) <= slots
        assert not set(turns.running) & set(turns.ready)
        # Nobody is kept from a free slot by ranks that wait for nobody.
        assert not turns.ready or len(turns.running) == slots
    assert turns.most_running <= slots


def test_who_is_resident_goes_first() -> None:
    assert thrifty(view(ready=[1, 2], residents=[2])) == (2, 0)


def test_the_lowest_rank_goes_first() -> None:
    assert thrifty(view(ready=[4, 2, 3])) == (2, 0)


def test_a_slot_is_kept_while_its_resident_waits_for_computing_ranks() -> None:
    facts = {"ready": [5], "residents": [0, 1], "free": [0], "running": {1}}
    assert thrifty(view(**facts, awaited=lambda _: [1])) is None
    assert thrifty(view(**facts, awaited=lambda _: [1, 2])) == (5, 0)
    assert in_turn(view(**facts, awaited=lambda _: [1])) == (5, 0)


def test_neighbours_that_talk_much_stay_together() -> None:
    """Four pairs, each with 20 collectives of its own, then one of all."""
    program = Program.of(range(8))
    everybody = tuple(range(8))
    for rank in range(8):
        pair = (rank // 2 * 2, rank // 2 * 2 + 1)
        for number in range(20):
            instance = 1 + number + 100 * (rank // 2)
            program.issued(rank, instance, pair)
            program.waited(rank, instance)
        program.issued(rank, 1000, everybody)
        program.waited(rank, 1000)
    ours, plain = count_switches(program, 2), count_switches(program, 2, in_turn, keep=False)
    assert ours is not None
    assert plain is not None
    assert 2 * ours < plain


def test_a_rank_that_only_asks_lets_others_go_first() -> None:
    turns = Turns(1)
    turns.make_ready(0)
    turns.make_ready(1)
    assert turns.grant(lambda _: []) == [0]
    turns.release(0)
    turns.make_ready(0, patient=True)
    assert turns.grant(lambda _: []) == [1]
    turns.release(1, ended=True)
    assert turns.grant(lambda _: []) == [0]


def test_a_program_that_is_too_long_is_not_counted() -> None:
    program = Program({0: array("q")}, most=1)
    program.issued(0, 1, (0,))
    program.waited(0, 1)
    assert not program.whole
    assert count_switches(program, 1) is None


def test_a_program_that_cannot_end_is_not_counted() -> None:
    program = Program.of([0, 1])
    program.issued(0, 1, (0, 1))
    program.waited(0, 1)
    assert count_switches(program, 1) is None
