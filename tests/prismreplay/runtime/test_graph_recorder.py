"""Events in, rows out: the graph of a rank, without torch."""

from __future__ import annotations

import itertools

import pytest

import prismtrace as pt
from prismreplay.runtime.graph_recorder import GraphRecorder
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismtrace.schema import DType, ReduceOp, TraceHeader, TraceKind

FLOATS = TensorSpec((4,), DType.FLOAT32)


class Rank:
    """A rank's program as a script of events."""

    def __init__(self, folder, rank=0, size=2, clock=None, ranks=None, backend="nccl"):
        self.where = None
        self.writer = pt.SpanWriter(folder / f"{rank}.spool", rank=rank, background=False)
        self.recorder = GraphRecorder(self.writer, clock=clock, callers=lambda: [self.where])
        self.position = self.recorder.position
        ranks = tuple(ranks or range(size))
        self.group = Group("0", ranks, ranks.index(rank), backend, desc="default_pg")
        self.recorder.joined(self.group)
        self.seqs = itertools.count()

    def issue(self, call=Call.ALL_REDUCE, *, peer=None, seq=None, **more):
        collective = call not in (Call.SEND, Call.RECV)
        op = Op(
            call=call,
            group=self.group,
            seq=next(self.seqs) if collective else seq,
            inputs=(FLOATS,),
            outputs=(FLOATS,),
            payload_bytes=16,
            dtype=DType.FLOAT32,
            reduce_op=ReduceOp.SUM if call is Call.ALL_REDUCE else None,
            peer=peer,
            **more,
        )
        self.where = object()
        return self.recorder.issued(op)

    def wait(self, token, source=None):
        self.where = object()
        self.recorder.waiting(token)
        self.recorder.waited(token, source)

    def blocking(self, *arguments, **options):
        token = self.issue(*arguments, **options)
        self.recorder.waiting(token)
        self.recorder.waited(token)
        return token


def rows_of(folder, *ranks, kind=TraceKind.BARE):
    for rank in ranks:
        rank.recorder.finish()
    header = TraceHeader(kind=kind, world_size=len(ranks), ranks=())
    pt.assemble(folder, folder / "out.parquet", header=header)
    trace = pt.open(folder / "out.parquet")
    assert [str(each) for each in pt.validate(trace)] == []
    return trace.collect()


def told(rows):
    """Kind and dependencies (as indices) of rank 0's rows."""
    mine = rows.filter(rank=0)
    return [
        (kind, sorted(index - back for back in deps))
        for index, kind, deps in mine.select("index", "kind", "deps").iter_rows()
    ]


@pytest.fixture
def pair(tmp_path):
    return Rank(tmp_path, 0), Rank(tmp_path, 1)


def test_a_blocking_collective_lies_between_two_segments(tmp_path, pair):
    for rank in pair:
        rank.blocking()
    assert told(rows_of(tmp_path, *pair)) == [
        ("compute", []),
        ("all_reduce", [0]),
        ("compute", [0, 1]),
    ]


def test_work_beside_a_collective_does_not_depend_on_it(tmp_path, pair):
    for rank in pair:
        token = rank.issue()
        rank.wait(token)
    assert told(rows_of(tmp_path, *pair)) == [
        ("compute", []),
        ("all_reduce", [0]),
        ("compute", [0]),
        ("compute", [1, 2]),
    ]


def test_collectives_of_a_group_queue_up(tmp_path, pair):
    for rank in pair:
        tokens = [rank.issue(), rank.issue()]
        for token in tokens:
            rank.wait(token)
    rows = told(rows_of(tmp_path, *pair))
    assert rows == [
        ("compute", []),
        ("all_reduce", [0]),
        ("compute", [0]),
        ("all_reduce", [1, 2]),
        ("compute", [2]),
        ("compute", [1, 4]),
        ("compute", [3, 5]),
    ]


def test_gloo_runs_two_collectives_of_a_group_at_a_time(tmp_path):
    for number in range(2):
        rank = Rank(tmp_path, number, backend="gloo")
        for _ in range(4):
            rank.issue()
        if number == 0:
            first = rank
    rows = rows_of(tmp_path, first, rank)
    deps = [each for kind, each in told(rows) if kind == "all_reduce"]
    # Each behind the one before the last.
    assert deps == [[0], [2], [1, 4], [3, 6]]
    mine = rows.filter(rank=0, kind="all_reduce")
    assert mine["stream"].n_unique() == 2


def test_a_range_that_copies_is_a_node_of_its_own(tmp_path):
    clock = iter(range(0, 1000, 10))
    rank = Rank(tmp_path, size=1, clock=lambda: next(clock))
    rank.position.optimizer_made()
    rank.blocking()
    rank.position.begin_range("microbatch 1")
    rank.position.begin_range("offload activation")
    rank.position.end_range("offload activation")
    rank.position.end_range("microbatch 1")
    rank.position.begin_range("reload")
    rank.blocking()
    rank.position.end_range("reload")
    rank.position.begin_optimizer("sgd")
    rank.position.end_optimizer("sgd")
    rows = rows_of(tmp_path, rank, kind=TraceKind.RECORDED)
    found = rows.filter(step=0).select("kind", "name", "microbatch").rows()
    copied = [row for row in found if row[0] == "memcpy"]
    # What a range that copies does beside a communication is copying, too.
    assert copied == [
        ("memcpy", "offload activation", 1), ("memcpy", "reload", None), ("memcpy", "reload", None)
    ]  # fmt: skip
    at = found.index(copied[0])
    assert [row[0] for row in found[at - 1 : at + 2]] == ["compute", "memcpy", "compute"]
    deps = rows.filter(kind="memcpy")["deps"].to_list()
    assert deps == [[1], [1], [2, 1]]
    assert rows["dur_ns"].null_count() == 0


def test_operations_of_a_batch_have_nothing_between_them(tmp_path, pair):
    for rank, other in zip(pair, (1, 0), strict=True):
        tokens = [
            rank.issue(Call.SEND, peer=other, seq=0, batch=7),
            rank.issue(Call.RECV, peer=other, seq=0, batch=7),
        ]
        for token in tokens:
            rank.wait(token)
    rows = rows_of(tmp_path, *pair)
    assert told(rows) == [
        ("compute", []),
        ("send", [0]),
        ("recv", [0]),
        ("compute", [0]),
        ("compute", [1, 2, 3]),
    ]
    assert rows["batch"].to_list() == [None, 7, 7, None, None] * 2


def test_a_queue_waits_for_all_of_a_batch(tmp_path, pair):
    for rank, call in zip(pair, (Call.SEND, Call.RECV), strict=True):
        other = 1 if rank is pair[0] else 0
        for seq, batch in ((0, 3), (1, 3), (2, None)):
            rank.issue(call, peer=other, seq=seq, batch=batch)
    assert told(rows_of(tmp_path, *pair))[:5] == [
        ("compute", []),
        ("send", [0]),
        ("send", [0]),
        ("compute", [0]),
        ("send", [1, 2, 3]),
    ]


def test_a_receive_from_anyone_learns_its_sender(tmp_path, pair):
    zero, one = pair
    zero.blocking(Call.SEND, peer=1, seq=0)
    zero.blocking(Call.SEND, peer=1, seq=1)
    token = one.issue(Call.RECV, peer=0)
    one.wait(token)
    token = one.issue(Call.RECV, peer=None)
    one.wait(token, source=0)
    rows = rows_of(tmp_path, *pair).filter(rank=1, kind="recv")
    assert rows.select("peer", "seq").rows() == [(0, 0), (0, 1)]


def test_optimizers_tell_steps_and_phases(tmp_path, pair):
    for rank in pair:
        rank.position.optimizer_made()
        for _ in range(2):
            rank.blocking()
            rank.position.begin_backward()
            rank.blocking()
            rank.position.end_backward()
            for optimizer in ("one", "two"):
                rank.position.begin_optimizer(optimizer)
                rank.position.end_optimizer(optimizer)
    rows = rows_of(tmp_path, *pair).filter(rank=0)
    places = [key for key, _ in itertools.groupby(rows.select("step", "phase").iter_rows())]
    one_step = ["forward", "backward", "forward", "optimizer", "forward", "optimizer"]
    assert places == [
        (None, "other"),
        *((0, phase) for phase in one_step),
        *((1, phase) for phase in one_step),
        (None, "forward"),
    ]
    assert rows["name"].to_list()[:2] == ["other", "forward"]


def test_named_steps_win(tmp_path, pair):
    for rank in pair:
        rank.position.optimizer_made()
        rank.blocking()
        for step in (10, 11):
            rank.position.begin_range(f"ProfilerStep#{step}")
            rank.blocking()
            rank.position.begin_optimizer(1)
            rank.position.end_optimizer(1)
            rank.position.end_range(f"ProfilerStep#{step}")
        rank.blocking()
    trace = rows_of(tmp_path, *pair)
    steps = trace.filter(rank=0)["step"].to_list()
    assert [key for key, _ in itertools.groupby(steps)] == [None, 10, 11, None]
    assert pt.open(tmp_path / "out.parquet").header.steps == (10, 11)


def test_steps_that_are_counted_anew_go_on(tmp_path, pair):
    for rank in pair:
        for _epoch, step in itertools.product(range(2), range(2)):
            rank.position.begin_range(f"step {step}")
            rank.blocking()
            rank.position.end_range(f"step {step}")
    assert rows_of(tmp_path, *pair)["step"].drop_nulls().unique().to_list() == [0, 1, 2, 3]


def test_ranges_tell_microbatches_and_names(tmp_path, pair):
    for rank in pair:
        rank.position.begin_range("microbatch 3")
        rank.position.begin_range("layer 5")
        rank.blocking()
        rank.blocking()
        rank.position.end_range("layer 5")
        rank.position.end_range("microbatch 3")
    rows = rows_of(tmp_path, *pair).filter(rank=0)
    assert rows["microbatch"].to_list() == [None, 3, 3, 3, 3, 3, None]
    assert rows["name"].to_list() == [
        "other", "microbatch 3", "layer 5", "layer 5", "layer 5", "layer 5", "other",
    ]  # fmt: skip


def test_messages_belong_to_the_microbatch_they_are_for(tmp_path, pair):
    class Message:
        pass

    kept = [Message(), Message()]
    for rank, call in zip(pair, (Call.SEND, Call.RECV), strict=True):
        other = 1 if rank is pair[0] else 0
        for number, message in enumerate((Message(), *kept)):
            # The first is announced and dropped, as an empty schedule slot may do.
            rank.position.expect_message(
                message, "0", other, call is Call.SEND, (number, 1, "backward")
            )
            del message
        for seq in range(3):
            rank.issue(call, peer=other, seq=seq)
    rows = rows_of(tmp_path, *pair).filter(kind="send")
    assert rows.select("microbatch", "chunk", "phase").rows() == [
        (1, 1, "backward"),
        (2, 1, "backward"),
        (None, None, "other"),
    ]


def test_times_of_a_recorded_run(tmp_path):
    clocks = [itertools.count(0, 100) for _ in range(2)]
    ranks = [Rank(tmp_path, rank, clock=clock.__next__) for rank, clock in enumerate(clocks)]
    for rank in ranks:
        first, second = rank.issue(), rank.issue()
        start = rank.recorder.latest[1]
        rank.recorder.completed(second, start, start + 1000)
        rank.recorder.completed(first, start - 100, start + 500)
        rank.wait(first)
        rank.wait(second)
    rows = rows_of(tmp_path, *ranks, kind=TraceKind.RECORDED).filter(rank=0)
    assert rows["start_ns"].null_count() == 0
    ends = (rows["start_ns"] + rows["dur_ns"]).to_list()
    assert rows["start_ns"][3] == ends[1], "the second starts when the first is over"
    program = rows.filter(kind="compute")
    assert (program["dur_ns"] > 0).all()
