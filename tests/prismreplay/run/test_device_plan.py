"""What a device works out from its table is what `VirtualWorld` says, whatever overtakes what."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prismreplay.boundary import Boundary, Repeat, VertexKind, VirtualWorld
from prismreplay.errors import PlanError
from prismreplay.plan import Known, OpKey, compile_plan
from prismreplay.plugin.advance_simulation import Running, Status, new_tables
from prismreplay.run.device_codes import PlaceCodes
from prismreplay.run.device_plan import DevicePlan, Program
from tests.prismreplay.run.jobs import PLANNED, job, operations

ROUNDS, PERIOD_NS = 6, 100
BEFORE = AFTER = 2


@dataclass
class Op:
    """What one rank does in one of its queues: it arrives at one place, or at several at once.

    `phase` is the round in which it is issued.
    """

    rank: int
    queue: int
    parts: list[tuple[Known, int]]
    otherwise: tuple[Known, int] | None = None
    phase: int = 0
    first_time: bool = True


@dataclass
class Pattern:
    """One step: kinds of its places, who takes part, and edges (other place, steps back, weight).

    `pairs`: a rank's arrival, and the place after it, at which that rank is ready.
    """

    kinds: list[VertexKind]
    members: list[list[int]]
    edges: list[list[tuple[int, int, int]]]
    origins: list[int | None]
    pairs: set[int]


@dataclass
class Job:
    """Steps of one pattern, something before and after them, and ROUNDS repetitions."""

    boundary: Boundary
    members: dict[int, list[int]]
    repeat: Repeat
    ops: list[Op] = field(default_factory=list)


def random_pattern(rng, ranks, size):
    choices = [VertexKind.INSTANCE, VertexKind.EVENT, VertexKind.JUNCTION]
    kinds = [choices[int(rng.integers(3))] for _ in range(size)]
    members, pairs = [], set()
    for place, kind in enumerate(kinds):
        count = 1 if kind is VertexKind.EVENT else int(rng.integers(1, ranks + 1))
        members.append(sorted(rng.choice(ranks, count, replace=False).tolist()))
        two = kinds[max(0, place - 1) : place + 1] == [VertexKind.EVENT] * 2
        if two and place - 2 not in pairs and rng.random() < 0.5:
            pairs.add(place - 1)
            members[place] = members[place - 1]
    edges = [
        [
            (int(rng.integers(size)), int(rng.integers(0, 3)), int(rng.integers(0, 50)))
            for _ in range(rng.integers(1, 5))
        ]
        for _ in range(size)
    ]
    origins = [int(rng.integers(0, 80)) if rng.random() < 0.3 else None for _ in range(size)]
    return Pattern(kinds, members, edges, origins, pairs)


def unrolled(rng, ranks, pattern, steps):
    """The boundary of so many steps."""
    size = len(pattern.kinds)
    total = 1 + BEFORE + steps * size + AFTER
    kinds = np.full(total, VertexKind.EVENT, np.int8)
    kinds[0] = VertexKind.ORIGIN
    members, edges = {}, [[]]
    steps_before, successor = np.full(total, -1, np.int32), np.full(total, -1, np.int32)
    for vertex in range(1, 1 + BEFORE):
        members[vertex] = [int(rng.integers(ranks))]
        edges.append([(0, int(rng.integers(20)))])
    for step in range(steps):
        base = 1 + BEFORE + step * size
        for place in range(size):
            vertex = base + place
            kinds[vertex] = pattern.kinds[place]
            if pattern.kinds[place] is not VertexKind.JUNCTION:
                steps_before[vertex] = steps - 1 - step
                successor[vertex] = vertex + size if step < steps - 1 else -1
                members[vertex] = pattern.members[place]
            mine = [
                (base - back * size + other, weight)
                if step >= back
                else (int(rng.integers(0, 1 + BEFORE)), weight)
                for other, back, weight in pattern.edges[place]
                if (back or other < place) and place not in pattern.pairs
            ]
            if pattern.origins[place] is not None:
                mine.append((0, pattern.origins[place] + step * PERIOD_NS))
            edges.append(mine or [(0, 1)])
    for vertex in range(total - AFTER, total):
        members[vertex] = [int(rng.integers(ranks))]
        some = [(int(rng.integers(1, vertex)), int(rng.integers(50))) for _ in range(3)]
        edges.append([*some, (0, int(rng.integers(1500)))])
    unique = [dict(mine) for mine in edges]
    boundary = Boundary(
        kind=kinds,
        owner=np.full(total, -1, np.int32),
        edge_offsets=np.cumsum([0, *(len(mine) for mine in unique)]),
        edge_source=np.array([one for mine in unique for one in mine], np.int32),
        edge_weight_ns=np.array([one for mine in unique for one in mine.values()], np.int64),
    )
    repeat = Repeat(steps_before=steps_before, successor=successor, period_ns=PERIOD_NS)
    return Job(boundary, members, repeat)


def random_job(rng, ranks, size, steps):
    pattern = random_pattern(rng, ranks, size)
    job = unrolled(rng, ranks, pattern, steps)
    total = job.boundary.vertices
    ends = total - AFTER
    queue_of = rng.integers(0, int(rng.integers(1, 4)), total).tolist()
    paired = {1 + BEFORE + step * size + place for step in range(steps) for place in pattern.pairs}
    doubt = total - 2 if rng.random() < 0.5 else None

    def arrive(vertices, round_, phase):
        for vertex in vertices:
            if job.boundary.kind[vertex] == VertexKind.JUNCTION or vertex - 1 in paired:
                continue
            arrival, ready = (vertex, vertex + 1) if vertex in paired else (None, vertex)
            known = Known(arrival, ready, int(rng.integers(30)))
            for rank in job.members[vertex]:
                op = Op(rank, queue_of[vertex], [(known, round_)], phase=phase)
                alone = arrival is None and len(job.members[vertex]) == 1
                if doubt and alone and vertex == ends - size and 0 < round_ < 3:
                    job.members[doubt] = [rank]
                    op.parts, op.otherwise = [(Known(None, doubt, 0), 0)], (known, round_)
                job.ops.append(op)

    arrive(range(1, ends), 0, 0)
    for round_ in range(1, ROUNDS):
        arrive(range(ends - size, ends), round_, round_)
    doubted = any(op.otherwise for op in job.ops)
    arrive([one for one in (total - 2, total - 1) if not (doubted and one == doubt)], 0, ROUNDS)
    job.ops = list(batched(rng, job.ops))
    return job


def batched(rng, ops):
    """Some neighbours of one queue become one operation."""
    before = None
    for op in ops:
        like = before is not None and (before.rank, before.queue, before.phase) == (
            op.rank, op.queue, op.phase,
        )  # fmt: skip
        if like and not before.otherwise and not op.otherwise and rng.random() < 0.3:
            before.parts += op.parts
            continue
        if before is not None:
            yield before
        before = op
    if before is not None:
        yield before


class Run:
    """All queues of all ranks, in a random order, beside the virtual world."""

    def __init__(self, job, ranks, rng, mess):
        self.rng = rng
        counts = {vertex: len(some) for vertex, some in job.members.items()}
        self.world = VirtualWorld(job.boundary, counts, job.repeat)
        self.codes = [
            PlaceCodes(job.boundary, job.members, job.repeat, one) for one in range(ranks)
        ]
        self.layout = self.codes[0].layout
        shared = new_tables(self.layout)[0]
        self.tables = [new_tables(self.layout, shared) for _ in range(ranks)]
        in_doubt = any(op.otherwise for op in job.ops)
        # What was left in doubt is known to what waits already with the next operation.
        self.at_once = not in_doubt or (ranks == 1 and not mess)
        self.after = [set() for _ in range(ranks)]
        self.queues, self.running, self.busy, self.ended = {}, [], set(), 0

    def issue(self, op):
        codes = self.codes[op.rank]
        codes.forget(op.phase if op.phase < ROUNDS else 0)
        known, round_ = op.parts[0]
        if op.otherwise:
            op.first_time = known not in self.after[op.rank]
            self.after[op.rank].add(known)
            code = codes.doubtful(known, 0, op.otherwise, first_time=op.first_time)
            round_ = op.otherwise[1]
        elif len(op.parts) > 1:
            code = codes.batch(op.parts, op.queue)
        else:
            code = codes.code(known, round_, op.queue)
        self.queues.setdefault((op.rank, op.queue), []).append((op, Program(code, round_)))

    def start(self, op, program):
        time_ns = int(self.rng.integers(0, 300)) + PERIOD_NS * op.phase
        parts = [*([op.otherwise] if op.otherwise else []), *(op.parts if op.first_time else [])]
        for known, round_ in parts:
            for vertex in (known.arrival, known.ready):
                if vertex is not None:
                    self.world.arrived(vertex, time_ns, round_)
        self.busy.add((op.rank, op.queue))
        kernel = Running(self.layout, self.tables[op.rank], program, time_ns)
        self.running.append((op, kernel, time_ns))

    def step(self, wanted):
        """Start one operation that can start, at random; False if none can."""
        heads = [
            (queue, *some[0])
            for queue, some in self.queues.items()
            if some and queue not in self.busy
        ]
        # Nobody gets further ahead than a ring is long.
        heads = [head for head in heads if head[1].phase <= wanted + 2]
        if not heads:
            return False
        queue, op, program = heads[int(self.rng.integers(len(heads)))]
        self.queues[queue].pop(0)
        self.start(op, program)
        self.finish()
        return True

    def finish(self):
        done = ended(self.running, self.tables[0][0])
        for (op, _, time_ns), outcome in done:
            self.busy.remove((op.rank, op.queue))
            assert outcome.status is Status.DONE
            assert outcome.ready_ns in [max(one, time_ns) for one in self.expected(op)]
        self.ended += len(done)
        if self.at_once:
            self.nobody_waits_in_vain()

    def nobody_waits_in_vain(self):
        assert not any(self.expected(op) for op, _, _ in self.running)

    def expected(self, op):
        """When it is ready, if that is known; two times if it is in doubt, and either may count."""
        readies = [self.world.ready_ns(known.ready, round_) for known, round_ in op.parts]
        if len(readies) > 1 and None not in readies:
            ends = zip(readies, op.parts, strict=True)
            return [max(ready + known.transfer_ns for ready, (known, _) in ends)]
        if op.otherwise:
            readies.append(self.world.ready_ns(op.otherwise[0].ready, op.otherwise[1]))
        return [] if len(op.parts) > 1 else [one for one in readies if one is not None]


def ended(running, shared):
    """Takes those of (what, kernel, ...) out that end; gives them with their outcomes."""
    done, told = [], None
    # Some tell others a time before they end: the parts of a batch.
    while told != shared:
        told = list(shared)
        for one in list(running):
            outcome = one[1].poll()
            if outcome is not None:
                running.remove(one)
                done.append((one, outcome))
    return done


def perform(job, ranks, rng, mess):
    """Gives how many operations ended; with some mess, programs issue them in another order."""
    run, ops = Run(job, ranks, rng, mess), list(job.ops)
    for number in range(len(ops) - 1):
        if rng.random() < mess and ops[number].phase == ops[number + 1].phase:
            ops[number], ops[number + 1] = ops[number + 1], ops[number]
    waiting = []
    while True:
        while ops and len(waiting) < 12:
            run.issue(ops[0])
            waiting.append(ops.pop(0))
        queued = {id(op) for some in run.queues.values() for op, _ in some}
        under_way = {id(op) for op, _, _ in run.running}
        waiting = [op for op in waiting if id(op) in queued | under_way]
        if not run.step(min((op.phase for op in waiting), default=0)):
            run.nobody_waits_in_vain()
            return run.ended


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 9), st.integers(1, 3))
@example(76368357, 2, 8, 3)  # what is ready was polled before the part of a batch that tells it so
def test_devices_find_the_times_of_the_virtual_world(seed, ranks, size, steps):
    rng = np.random.default_rng(seed)
    job = random_job(rng, ranks, size, steps)
    ended = perform(job, ranks, rng, 0.0)
    # A batch waits for what one of its parts waits for, and so may others wait for it.
    if max(len(op.parts) for op in job.ops) == 1 and (
        ranks == 1 or not any(op.otherwise for op in job.ops)
    ):
        assert ended == len(job.ops)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 9), st.integers(1, 3))
@example(2364894835, 1, 3, 2)  # what is left in doubt is waited for by what was launched before
@example(1552405559, 1, 8, 2)  # the same, and others are some rounds ahead by then
def test_what_waits_on_a_device_waits_in_the_virtual_world(seed, ranks, size, steps):
    rng = np.random.default_rng(seed)
    job = random_job(rng, ranks, size, steps)
    perform(job, ranks, rng, 0.5)


@pytest.mark.parametrize("shape", PLANNED, ids=str)
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
    for time, key, rank, _ in operations(long, sandbox):
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
        running.append((key, Running(layout, tables[rank], program, arrival), rank))
        for (other, _, its_rank), outcome in ended(running, shared):
            assert outcome.status is Status.DONE
            assert outcome.ready_ns == world.ready_ns(other, its_rank)
            done += 1
        for other, _, its_rank in running:
            assert world.ready_ns(other, its_rank) is None
    assert not running
    assert done == len(codes) > 50
    # Repeated steps run the same codes: nothing is made anew.
    per_round = [[code for number, code in codes if number == round_] for round_ in (2, 3)]
    assert per_round[0]
    assert all(one is other for one, other in zip(*per_round, strict=True))


def test_of_two_that_could_be_ready_the_training_goes_on():
    boundary = Boundary(
        kind=np.array([VertexKind.ORIGIN, VertexKind.EVENT, VertexKind.EVENT], np.int8),
        owner=np.full(3, -1, np.int32),
        edge_offsets=np.array([0, 0, 1, 2]),
        edge_source=np.zeros(2, np.int32),
        edge_weight_ns=np.array([10, 500]),
    )
    nothing = np.full(3, -1, np.int32)
    repeat = Repeat(
        steps_before=np.array([-1, 0, -1], np.int32), successor=nothing, period_ns=PERIOD_NS
    )
    codes = PlaceCodes(boundary, {1: [0], 2: [0]}, repeat, 0)
    code = codes.doubtful(Known(None, 2, 0), 0, (Known(None, 1, 0), 1))
    running = Running(codes.layout, new_tables(codes.layout), Program(code, 1), 0)
    assert running.poll().ready_ns == PERIOD_NS + 10


def test_messages_name_what_is_missing():
    trace = job(2, **PLANNED[0])
    plan = compile_plan(trace, [0])
    mine = DevicePlan(plan, 0)
    known = [key for _, key, *_ in operations(trace, [0]) if mine.is_boundary(key, 0)]
    program = mine.program(known[-1], 3, queue=0)
    target = program.code.items[-1].target
    assert "rank 0's" in mine.describe(target, 3)
    assert "repetition 3" in mine.describe(target, 3)
    (called,) = (group.name for group in trace.header.groups if group.id == known[-1].group)
    assert f"group={called} seq={known[-1].seq}" in program.label
    assert f"[group={called} seq=" in mine.describe(target, 3)
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
