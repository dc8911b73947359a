"""What a device works out from its table is what `VirtualWorld` says, whatever overtakes what."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prismcalib
from prismcalib import synth
from prismreplay.boundary import Boundary, Repeat, VertexKind, VirtualWorld
from prismreplay.errors import PlanError
from prismreplay.plan import Known, OpKey, compile_plan
from prismreplay.plugin.advance_simulation import Running, Status, new_tables
from prismreplay.run.device_plan import DevicePlan, PlaceCodes, Program

ROUNDS = 6


@dataclass
class Op:
    """What one rank does: it arrives at a place, in one of its queues."""

    rank: int
    queue: int
    round_: int
    known: Known
    otherwise: tuple[Known, int] | None = None
    phase: int = 0
    first_time: bool = True


@dataclass
class Job:
    boundary: Boundary
    members: dict[int, list[int]]
    repeat: Repeat
    ops: list[Op] = field(default_factory=list)


def random_job(rng: np.random.Generator, ranks: int, size: int, steps: int) -> Job:
    """Steps of one pattern, something before and after them, and ROUNDS repetitions."""
    before, after = 2, 2
    total = 1 + before + steps * size + after
    kinds = np.full(total, VertexKind.EVENT, np.int8)
    kinds[0] = VertexKind.ORIGIN
    members: dict[int, list[int]] = {}
    offsets, sources, weights = [0, 0], [], []
    pattern_kind = rng.choice([VertexKind.INSTANCE, VertexKind.EVENT, VertexKind.JUNCTION], size)
    pattern_members = [
        sorted(rng.choice(ranks, rng.integers(1, ranks + 1), False)) for _ in range(size)
    ]
    pattern_edges = [
        [
            (int(rng.integers(size)), int(rng.integers(0, 3)), int(rng.integers(0, 50)))
            for _ in range(rng.integers(1, 5))
        ]
        for _ in range(size)
    ]
    from_origin = [int(rng.integers(0, 80)) if rng.random() < 0.3 else None for _ in range(size)]
    steps_before = np.full(total, -1, np.int32)
    successor = np.full(total, -1, np.int32)

    def close(edges: list[tuple[int, int]]) -> None:
        unique = dict(edges)
        sources.extend(unique)
        weights.extend(unique.values())
        offsets.append(len(sources))

    for vertex in range(1, 1 + before):
        members[vertex] = [int(rng.integers(ranks))]
        close([(0, int(rng.integers(20)))])
    for step in range(steps):
        base = 1 + before + step * size
        for place in range(size):
            vertex = base + place
            kinds[vertex] = pattern_kind[place]
            if kinds[vertex] != VertexKind.JUNCTION:
                steps_before[vertex] = steps - 1 - step
                successor[vertex] = vertex + size if step < steps - 1 else -1
                some = pattern_members[place]
                if kinds[vertex] == VertexKind.EVENT:
                    some = some[:1]
                members[vertex] = [int(one) for one in some]
            edges = []
            for other, back, weight in pattern_edges[place]:
                if back == 0 and other >= place:
                    continue
                if step - back < 0:
                    edges.append((int(rng.integers(0, 1 + before)), weight))
                    continue
                edges.append((base - back * size + other, weight))
            if from_origin[place] is not None:
                edges.append((0, from_origin[place] + step * 100))
            close(edges or [(0, 1)])
    for vertex in range(total - after, total):
        members[vertex] = [int(rng.integers(ranks))]
        close([(int(rng.integers(1, vertex)), int(rng.integers(50))) for _ in range(3)])
    boundary = Boundary(
        kind=kinds,
        owner=np.full(total, -1, np.int32),
        edge_offsets=np.array(offsets, np.int64),
        edge_source=np.array(sources, np.int32),
        edge_weight_ns=np.array(weights, np.int64),
    )
    repeat = Repeat(steps_before=steps_before, successor=successor, period_ns=100)
    job = Job(boundary, members, repeat)
    queues = int(rng.integers(1, 4))
    own = rng.integers(0, queues, total)
    ends = 1 + before + steps * size

    def arrive(vertex: int, round_: int) -> None:
        for rank in members[vertex]:
            job.ops.append(Op(rank, int(own[vertex]), round_, Known(None, vertex, 0)))

    for vertex in range(1, ends):
        if kinds[vertex] != VertexKind.JUNCTION:
            arrive(vertex, 0)
    last = [vertex for vertex in range(ends - size, ends) if kinds[vertex] != VertexKind.JUNCTION]
    doubt = rng.random() < 0.5 and last and len(members[last[0]]) == 1
    for round_ in range(1, ROUNDS):
        for vertex in last:
            if doubt and round_ < 3 and vertex == last[0]:
                rank, *_ = members[vertex]
                ends_with = total - 2
                members[ends_with] = [rank]
                op = Op(rank, 0, round_, Known(None, ends_with, 0))
                op.otherwise = Known(None, vertex, 0), round_
                job.ops.append(op)
                continue
            arrive(vertex, round_)
    for vertex in range(total - after, total):
        if not (doubt and vertex == total - 2):
            arrive(vertex, 0)
    phase = 0
    for op in job.ops:
        op.phase = phase = max(phase, op.round_)
    return job


def perform(job: Job, ranks: int, rng: np.random.Generator, mess: float) -> int:
    """Run all queues in a random order; gives how many operations ended."""
    counts = {vertex: len(some) for vertex, some in job.members.items()}
    world = VirtualWorld(job.boundary, counts, job.repeat)
    codes = [PlaceCodes(job.boundary, job.members, job.repeat, rank) for rank in range(ranks)]
    layout = codes[0].layout
    shared = new_tables(layout)[0]
    tables = [new_tables(layout, shared) for _ in range(ranks)]
    queues: dict[tuple[int, int], list[tuple[Op, Program]]] = {}
    after: list[set[Known]] = [set() for _ in range(ranks)]
    ops = list(job.ops)
    for number in range(len(ops) - 1):
        # The host of a rank does things in an order of its own, too.
        if rng.random() < mess and ops[number].round_ == ops[number + 1].round_:
            ops[number], ops[number + 1] = ops[number + 1], ops[number]
    issue = iter(ops)
    pending: list[Op] = []
    running: list[tuple[Op, Running]] = []
    busy: dict[tuple[int, int], int] = {}
    ended = 0
    in_doubt = any(op.otherwise for op in ops)

    def finish() -> None:
        nonlocal ended
        moved = True
        while moved:
            moved = False
            for one in list(running):
                op, kernel = one
                outcome = kernel.poll()
                if outcome is None:
                    continue
                assert outcome.status is Status.DONE
                running.remove(one)
                busy.pop((op.rank, op.queue))
                outcomes.append((op, kernel, outcome))
                moved = True
        for op, kernel, outcome in outcomes:
            assert outcome.ready_ns == max(expected(op), kernel._arrival_ns)
            ended += 1
        outcomes.clear()
        # What another rank has left in doubt is known with its next operation.
        for op, _ in running if ranks == 1 or not in_doubt else ():
            assert expected(op) is None

    def expected(op: Op) -> int | None:
        places = [(op.known, 0 if op.otherwise else op.round_)]
        if op.otherwise:
            places.insert(0, op.otherwise)
        found = [world.ready_ns(known.ready, round_) for known, round_ in places]
        return next((one for one in found if one is not None), None)

    outcomes: list = []
    exhausted = False
    while True:
        while not exhausted and len(pending) < 12:
            op = next(issue, None)
            if op is None:
                exhausted = True
                break
            if op.otherwise:
                op.first_time = op.known not in after[op.rank]
                after[op.rank].add(op.known)
                code = codes[op.rank].doubtful(op.known, 0, op.otherwise, first_time=op.first_time)
            else:
                codes[op.rank].forget(op.round_)
                code = codes[op.rank].code(op.known, op.round_, op.queue)
            pending.append(op)
            queues.setdefault((op.rank, op.queue), []).append((op, Program(code, op.round_)))
        heads = [(queue, some[0]) for queue, some in queues.items() if some and queue not in busy]
        if not heads:
            break
        queue, (op, program) = heads[int(rng.integers(len(heads)))]
        oldest = min(one.phase for one in [*pending, *(one for one, _ in running)])
        if op.phase > oldest + 2:
            queue, (op, program) = min(heads, key=lambda head: head[1][0].phase)
            if op.phase > oldest + 2:
                break
        queues[queue].pop(0)
        pending.remove(op)
        time_ns = int(rng.integers(0, 300)) + 100 * op.round_
        if op.otherwise:
            world.arrived(op.otherwise[0].ready, time_ns, op.otherwise[1])
            if op.first_time:
                world.arrived(op.known.ready, time_ns, 0)
        else:
            world.arrived(op.known.ready, time_ns, op.round_)
        busy[queue] = op.round_
        running.append((op, Running(layout, tables[op.rank], program, time_ns)))
        finish()
    return ended


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3))
def test_devices_find_the_times_of_the_virtual_world(seed, ranks, size, steps):
    rng = np.random.default_rng(seed)
    job = random_job(rng, ranks, size, steps)
    ended = perform(job, ranks, rng, 0.0)
    if ranks == 1 or not any(op.otherwise for op in job.ops):
        assert ended == len(job.ops)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 9), st.integers(1, 3))
def test_what_waits_on_a_device_waits_in_the_virtual_world(seed, ranks, size, steps):
    rng = np.random.default_rng(seed)
    job = random_job(rng, ranks, size, steps)
    perform(job, ranks, rng, 0.5)


def job(steps, **options):
    steady = {"jitter": 0.0, "step_jitter": 0.0, "comm_jitter": 0.0, "moe_imbalance": 0.0}
    spec = synth.JobSpec(
        **{"pp": 2, "tp": 2, "dp": 2, "microbatches": 4, "layers_per_stage": 2, **options},
        **steady,
        end_spread_ns=0,
        steps=steps,
    )
    return prismcalib.merge(synth.generate(spec)).trace


def operations(trace, sandbox):
    """(arrival, key, rank) of the communications of some ranks, in time order."""
    rows = trace.collect().filter(pl.col("rank").is_in(sandbox) & pl.col("seq").is_not_null())
    found = []
    for row in rows.iter_rows(named=True):
        sender = receiver = -1
        if row["kind"] in ("send", "recv"):
            ends = (row["rank"], row["peer"])
            sender, receiver = ends if row["kind"] == "send" else ends[::-1]
        key = OpKey(row["group"], row["seq"], sender, receiver)
        found.append((row["start_ns"], key, row["rank"]))
    return sorted(found)


SHAPES = [
    {},
    {"pp": 4, "tp": 1, "dp": 2},
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "layers_per_stage": 4},
    {"pp": 1, "tp": 2, "dp": 4, "ep": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sandbox", [[0], [1, 6]], ids=str)
def test_jobs_longer_and_slower_than_planned(shape, sandbox):
    """Every operation of a job of more steps, with arrivals that nobody has foreseen."""
    short, long = job(2, **shape), job(5, **shape)
    plan = compile_plan(short, sandbox)
    world, rng = plan.world(), np.random.default_rng(3)
    plans = {rank: DevicePlan(plan, rank) for rank in sandbox}
    layout = plans[sandbox[0]].layout
    assert {one.layout for one in plans.values()} == {layout}
    shared = new_tables(layout)[0]
    tables = {rank: new_tables(layout, shared) for rank in sandbox}
    running, late, codes, done = [], 0, [], 0
    for time, key, rank in operations(long, sandbox):
        if not world.is_boundary(key, rank):
            assert not plans[rank].is_boundary(key)
            continue
        late += int(rng.integers(0, 20_000))
        arrival = time - plan.boundary.origin_ns + late
        queue = key.group, key.sender, key.receiver
        program = plans[rank].program(key, queue=queue)
        assert program.transfer_ns == world.transfer_ns(key, rank)
        codes.append((program.round_, program.code))
        world.arrived(key, rank, arrival)
        running.append((key, rank, Running(layout, tables[rank], program, arrival)))
        moved = True
        while moved:
            moved = False
            for one in list(running):
                outcome = one[2].poll()
                if outcome is not None:
                    assert outcome.status is Status.DONE
                    assert outcome.ready_ns == world.ready_ns(one[0], one[1])
                    running.remove(one)
                    done += 1
                    moved = True
        for other, its_rank, _ in running:
            assert world.ready_ns(other, its_rank) is None
    assert not running
    assert done == len(codes) > 50
    # Repeated steps run the same codes: nothing is made anew.
    per_round = [[code for number, code in codes if number == round_] for round_ in (2, 3)]
    assert per_round[0]
    assert all(one is other for one, other in zip(*per_round, strict=True))


def test_messages_name_what_is_missing():
    plan = compile_plan(job(2), [0])
    mine = DevicePlan(plan, 0)
    known = [key for _, key, _ in operations(job(2), [0]) if mine.is_boundary(key, 0)]
    program = mine.program(known[-1], 3, queue=0)
    target = program.code.items[-1].target
    assert "rank 0's" in mine.describe(target, 3)
    assert "repetition 3" in mine.describe(target, 3)
    assert str(known[-1].seq) in program.label
    with pytest.raises(PlanError, match="no operation"):
        mine.program(OpKey(99, 0), 0)
    with pytest.raises(PlanError, match="before the step that is repeated"):
        mine.program(known[0], 3)


def test_a_vertex_of_no_step_happened_once():
    repeat = Repeat(
        steps_before=np.array([-1, 1, 0, -1, 2]),
        successor=np.array([-1, 2, -1, -1, -1]),
        period_ns=5,
    )
    assert repeat.source(1, 0) == (1, 0)
    assert repeat.source(1, 4) == (2, 3)
    assert repeat.source(2, 4) == (2, 4)
    assert repeat.source(3, 4) == (3, 0)
    assert repeat.source(4, 4) is None
