"""Any program that can run gives a graph that holds its rules, and explains its own times.

Programs are drawn as one order of communications among a few ranks, each rank doing its part: at
once or asynchronously, single or in batches, with computations, steps and phases in between.
They run on a model of a machine: members wait for each other, queues are served in order.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import prismcalib
import prismtrace as pt
from prismcalib.build import graph_from_trace
from prismcalib.propagation import propagate
from prismreplay.runtime.graph_recorder import GraphRecorder
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType, ReduceOp, TraceHeader

WORLD = 4
TENSOR = (TensorSpec((2,), DType.FLOAT32),)


class Rank:
    """A rank with a clock of its own."""

    def __init__(self, folder: Path, rank: int, groups: list[tuple[int, ...]], *, timed: bool):
        self.rank, self.now = rank, 0
        self.where: object = None
        writer = pt.SpanWriter(
            folder / f"{rank}.spool", rank=rank, world_size=WORLD, background=False
        )
        clock = (lambda: self.now) if timed else None
        self.recorder = GraphRecorder(writer, clock=clock, callers=lambda: [self.where])
        self.groups = {}
        for number, ranks in enumerate(groups):
            if rank in ranks:
                group = Group(str(number), ranks, ranks.index(rank), "gloo")
                self.recorder.joined(group)
                self.groups[number] = group
        self.pending: list[tuple[int, int]] = []
        """Token and operation number of what is not waited for yet."""


class Machine:
    """Runs operations in one order, on all ranks."""

    def __init__(self, folder: Path, draw: random.Random, *, timed: bool):
        self.draw, self.timed = draw, timed
        self.groups = [tuple(range(WORLD))]
        for _ in range(draw.randint(0, 3)):
            self.groups.append(tuple(draw.sample(range(WORLD), draw.randint(2, WORLD))))
        self.ranks = [Rank(folder, rank, self.groups, timed=timed) for rank in range(WORLD)]
        self.seqs: Counter[object] = Counter()
        self.free: dict[object, int] = defaultdict(int)
        self.ends: dict[int, int] = {}
        self.number = 0

    def compute(self, ranks) -> None:
        for rank in ranks:
            self.ranks[rank].now += self.draw.randint(0, 50)

    def start(self, operations, batch=None) -> list[tuple[int, int, int]]:
        """Begin operations (group, call, sender, receiver) on all their members.

        Returns rank, token, operation number of each part.
        """
        parts = []
        for group, call, sender, receiver in operations:
            members = self.groups[group] if sender is None else (sender, receiver)
            key = (group, sender, receiver)
            seq = self.seqs[key]
            self.seqs[key] += 1
            arrivals = []
            for member in members:
                rank = self.ranks[member]
                mine = call
                if sender is not None:
                    mine = Call.SEND if member == sender else Call.RECV
                op = Op(
                    call=mine,
                    group=rank.groups[group],
                    seq=seq,
                    inputs=TENSOR,
                    outputs=TENSOR,
                    payload_bytes=8,
                    dtype=DType.FLOAT32,
                    reduce_op=ReduceOp.SUM if mine is Call.ALL_REDUCE else None,
                    peer={sender: receiver, receiver: sender}[member]
                    if sender is not None
                    else None,
                    batch=batch,
                )
                rank.where = object()
                token = rank.recorder.issued(op)
                queue = (member, key, mine)
                arrivals.append((member, token, queue, max(rank.now, self.free[queue])))
            parts.append((self.number, arrivals))
            self.number += 1
        if batch is not None:
            # One vertex: all parts of a batch that hang together start and end together.
            ready = max(at for _, arrivals in parts for *_, at in arrivals)
            parts = [
                (number, [(m, t, q, ready) for m, t, q, _ in arrivals])
                for number, arrivals in parts
            ]
        found = []
        for number, arrivals in parts:
            end = max(at for *_, at in arrivals) + (
                0 if batch is not None else self.draw.randint(0, 20)
            )
            self.ends[number] = end
            for member, token, queue, _ in arrivals:
                rank = self.ranks[member]
                if self.timed:
                    rank.recorder.completed(token, rank.now, end)
                self.free[queue] = end
                found.append((member, token, number))
        return found

    def wait(self, rank: Rank, token: int, number: int, *, blocking=False) -> None:
        if not blocking:
            rank.where = object()
        rank.recorder.waiting(token)
        rank.now = max(rank.now, self.ends[number])
        rank.recorder.waited(token)

    def collective(self) -> None:
        group = self.draw.randrange(len(self.groups))
        call = self.draw.choice([Call.ALL_REDUCE, Call.ALL_GATHER, Call.BARRIER])
        self.compute(self.groups[group])
        at_once = self.draw.random() < 0.5
        for member, token, number in self.start([(group, call, None, None)]):
            rank = self.ranks[member]
            if at_once:
                self.wait(rank, token, number, blocking=True)
            else:
                rank.pending.append((token, number))

    def exchange(self) -> None:
        one, two = self.draw.sample(range(WORLD), 2)
        self.compute((one, two))
        messages = [(0, None, one, two), (0, None, two, one)][: self.draw.randint(1, 2)]
        batch = self.number if self.draw.random() < 0.5 else None
        for member, token, number in self.start(messages, batch):
            self.ranks[member].pending.append((token, number))

    def settle(self, *, everything=False) -> None:
        for rank in self.ranks:
            self.draw.shuffle(rank.pending)
            for _ in range(len(rank.pending) if everything else self.draw.randint(0, 2)):
                if rank.pending:
                    if self.draw.random() < 0.5:
                        rank.now += self.draw.randint(0, 9)
                    self.wait(rank, *rank.pending.pop())

    def mark(self) -> None:
        position = self.ranks[self.draw.randrange(WORLD)].recorder.position
        if position.step is None:
            position.optimizer_made()
        elif self.draw.random() < 0.5:
            position.begin_optimizer(0)
            position.end_optimizer(0)
        else:
            position.begin_backward()
            position.end_backward()


def run(folder: Path, draw: random.Random, *, timed: bool) -> pt.Trace:
    machine = Machine(folder, draw, timed=timed)
    for _ in range(draw.randint(0, 25)):
        draw.choice([machine.collective, machine.exchange, machine.settle, machine.mark])()
    machine.settle(everything=True)
    machine.compute(range(WORLD))
    for rank in machine.ranks:
        rank.recorder.finish()
    header = TraceHeader(kind="recorded" if timed else "bare", world_size=WORLD, ranks=())
    pt.assemble(folder, folder / "out.parquet", header=header)
    return pt.open(folder / "out.parquet")


SEEDS = st.integers(0, 2**32).map(random.Random)
# Shrinking a program takes minutes; its seed is enough to see it again.
FEW = settings(deadline=None, max_examples=25, phases=[Phase.explicit, Phase.generate])


@given(SEEDS)
@FEW
def test_recorded_times_are_explained_by_the_graph(draw):
    with tempfile.TemporaryDirectory() as folder:
        trace = run(Path(folder), draw, timed=True)
        assert pt.validate(trace) == []
        report = prismcalib.merge(trace, clock="keep").report
        assert report.propagated_ns == report.recorded_ns
        assert report.overlap_clamps.count == report.transfer_clamps.count == 0


@given(SEEDS)
@settings(FEW, max_examples=5)
def test_a_graph_without_times_has_no_cycle(draw):
    with tempfile.TemporaryDirectory() as folder:
        trace = run(Path(folder), draw, timed=False)
        assert pt.validate(trace) == []
        graph, _ = graph_from_trace(trace)
        propagate(graph)  # raises where there is a cycle
