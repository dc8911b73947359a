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
from prismreplay.plugin import advance_code
from prismreplay.plugin.advance_code import Kind, Slot, Table, pack_time, slot_of_word, unpack_time
from prismreplay.plugin.advance_code import word_of_slot as word
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
        for op, _ in running:
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
    assert ended == len(job.ops)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(2, 9), st.integers(1, 3))
def test_what_waits_on_a_device_waits_in_the_virtual_world(seed, ranks, size, steps):
    rng = np.random.default_rng(seed)
    job = random_job(rng, ranks, size, steps)
    perform(job, ranks, rng, 0.5)
