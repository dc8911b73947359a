"""When operations end: as in the calibrated trace, whatever the order in which ranks tell."""

from __future__ import annotations

from itertools import pairwise

import pytest

from prismreplay.plan import OpKey, PlannedWorld, compile_plan
from prismreplay.run.following import Placed, followers_of
from prismreplay.run.timekeeping import Entry, Timekeeper
from tests.prismreplay.run.jobs import job, program

ORIGIN = 5_000_000


def entry(rank, ticket, *, issued, queue="g", seq=0, batch=None, waits_for=(), transfer=0):
    placed = Placed(OpKey(0, seq), 0, seq, None, 0, transfer, None)
    return Entry((rank, ticket), placed, queue, batch, issued, waits_for, boundary=False)


def test_without_a_plan_virtual_ranks_are_there():
    keeper = Timekeeper(None, ORIGIN)
    (one,) = keeper.enter(entry(3, 1, issued=100, transfer=50))
    assert (one.arrived_ns, one.end_ns) == (100, 100)


def test_sandbox_ranks_wait_for_each_other():
    keeper = Timekeeper(None, ORIGIN, lambda _: 7)
    assert keeper.enter(entry(0, 1, issued=100, waits_for=(0, 1))) == []
    found = keeper.enter(entry(1, 1, issued=140, waits_for=(0, 1)))
    assert sorted((one.ticket, one.end_ns) for one in found) == [((0, 1), 147), ((1, 1), 147)]
    assert keeper.waiting == []


def test_a_queue_is_a_queue():
    keeper = Timekeeper(None, ORIGIN, lambda _: 10)
    ends = [
        keeper.enter(entry(0, ticket, issued=100 + ticket, seq=ticket))[0] for ticket in range(3)
    ]
    assert [one.end_ns for one in ends] == [110, 120, 130]
    assert [one.arrived_ns for one in ends] == [100, 110, 120]


def test_a_batch_runs_side_by_side():
    keeper = Timekeeper(None, ORIGIN, lambda _: 10)
    keeper.enter(entry(0, 1, issued=100, seq=1))
    ends = [keeper.enter(entry(0, t, issued=101, seq=t, batch=4))[0].end_ns for t in (2, 3)]
    after = keeper.enter(entry(0, 4, issued=101, seq=4))[0]
    assert ends == [120, 120]
    assert after.end_ns == 130


def test_the_end_of_one_behind_another_that_waits():
    keeper = Timekeeper(None, ORIGIN, lambda _: 10)
    assert keeper.enter(entry(0, 1, issued=100, seq=1, waits_for=(0, 1))) == []
    assert keeper.enter(entry(0, 2, issued=101, seq=2)) == []
    found = keeper.enter(entry(1, 1, issued=150, seq=1, waits_for=(0, 1)))
    assert {one.ticket: one.end_ns for one in found} == {(0, 1): 160, (1, 1): 160, (0, 2): 170}


SHAPES = [{}, {"pp": 4, "tp": 1}, {"pp": 1, "tp": 2, "dp": 4, "ep": 2}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sandbox", [(0,), (3, 4), (7,)])
def test_in_the_calibrated_world_operations_end_as_calibrated(shape, sandbox):
    trace = job(steps=2, **shape)
    plan = compile_plan(trace, sandbox)
    world = PlannedWorld(plan)
    origin = ORIGIN - plan.boundary.origin_ns
    keeper = Timekeeper(world, ORIGIN)
    followers = followers_of(trace, sandbox)
    told = []
    for rank in sandbox:
        for ticket, (row, op) in enumerate(program(trace, rank)):
            told.append((row["start_ns"], rank, ticket, row, op))
    ends = {}
    for start, rank, ticket, _, op in sorted(told, key=lambda one: one[:3]):
        placed = followers[rank].place(op)
        message = op.peer is not None
        partners = tuple(one for one in op.group.ranks if one in sandbox) if not message else ()
        if message and op.peer in sandbox:
            partners = (op.peer,)
        for one in keeper.enter(
            Entry(
                (rank, ticket),
                placed,
                (op.group.name, op.peer, op.call),
                op.batch,
                start + origin,
                partners,
                boundary=world.is_boundary(placed.key, rank, placed.round_),
            )
        ):
            ends[one.ticket] = one.end_ns
    assert keeper.waiting == []
    for _, rank, ticket, row, _ in told:
        assert ends[rank, ticket] == row["start_ns"] + row["dur_ns"] + origin


def test_runs_go_on_at_the_graph_s_pace():
    trace, rank = job(steps=3), 2
    world = PlannedWorld(compile_plan(trace, [rank]))
    keeper, follower = Timekeeper(world, ORIGIN), followers_of(trace, [rank])[rank]
    made = [(row, op) for row, op in program(trace, rank) if row["step"] is not None]
    last = [one for one in made if one[0]["step"] == trace.header.steps[-1]]
    ends, ticket, now = [], 0, ORIGIN
    for step in [made, *[last] * 3]:
        for row, op in step:
            # Computes nothing: the virtual ranks alone decide.
            placed = follower.place(op)
            waits = Entry((rank, ticket), placed, ticket, op.batch, now, (), boundary=True)
            found = keeper.enter(waits)
            assert [one.ticket for one in found] == [(rank, ticket)], row
            now, ticket = max(now, found[0].end_ns), ticket + 1
        ends.append(now)
    times = [after - before for before, after in pairwise(ends)]
    assert max(times[1:]) - min(times[1:]) <= max(times) // 100
