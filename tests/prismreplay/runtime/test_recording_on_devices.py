"""The recorder where devices compute: fake ones, real events of a program, a valid trace."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import prismtrace as pt
from prismreplay.runtime import device_time, recording
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.graph_recorder import GraphRecorder
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismreplay.runtime.recording import RecordRole
from prismreplay.runtime.works import RealBatch
from prismtrace.schema import DType, ReduceOp, TraceHeader, TraceKind
from tests.prismreplay.runtime.fake_devices import DEFAULT, SIDE, FakeDevices

NEAR_NS = 3_000
MS = 1_000_000
FLOATS = TensorSpec((4,), DType.FLOAT32)
ON_DEVICE = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))
ON_HOST = SimpleNamespace(is_cuda=False)


class HostFuture:
    def add_done_callback(self, call):
        self.call = call


class HostWork:
    """gloo's handle: a thread of it says when it is over."""

    def __init__(self, devices, duration_ns):
        self.devices, self.duration_ns, self.future = devices, duration_ns, HostFuture()

    def get_future(self):
        return self.future

    def wait(self):
        self.devices.pass_time(self.duration_ns)

    def is_completed(self):
        return False


class DeviceWork:
    """NCCL's handle: a wait holds up the stream that is current then."""

    def __init__(self, devices, work):
        self.devices, self.work = devices, work
        self.waited_on, self.fails, self.end_ns = work.waited_on, False, work.end_ns
        self.get_future = HostFuture

    def wait(self):
        devices = self.devices
        devices.free[devices.stream] = max(devices.free[devices.stream], self.end_ns)

    def is_completed(self):
        return self.devices.now >= self.end_ns


class Rank:
    """One rank's program, its recorder and role."""

    def __init__(self, folder, *, timed=True):
        self.folder = folder
        self.devices = FakeDevices()
        self.writer = pt.SpanWriter(folder / "0.spool", rank=0, background=False)
        self.timeline = Timeline(self.devices, self.writer) if timed else None
        self.where = None
        self.recorder = GraphRecorder(
            self.writer,
            timeline=self.timeline,
            current_stream=self.devices.current,
            callers=lambda: [self.where],
        )
        self.lanes, self.position = self.recorder.lanes, self.recorder.position
        self.role = RecordRole(self.recorder, self.timeline)
        self.group = Group("0", (0,), 0, "cpu:gloo,cuda:nccl")
        self.recorder.joined(self.group)
        self.seqs = itertools.count()
        self.busy = 0

    def issue(self, make, *, call=Call.ALL_REDUCE, tensor=ON_DEVICE, batch=None, asynchronous=True):
        op = Op(
            call=call,
            group=self.group,
            seq=next(self.seqs),
            inputs=(FLOATS,),
            outputs=(FLOATS,),
            payload_bytes=16,
            dtype=DType.FLOAT32,
            reduce_op=ReduceOp.SUM if call is Call.ALL_REDUCE else None,
            batch=batch,
        )
        self.where = object()
        token = self.recorder.issued(op)
        options = SimpleNamespace(asyncOp=asynchronous)
        tensors = () if tensor is None else (tensor,)
        return token, self.role.submit(op, tensors, tensors, partial(make, options))

    def wait(self, token, pending, *, same_call=False):
        if not same_call:
            self.where = object()
        self.recorder.waiting(token)
        pending.wait()
        self.recorder.waited(token)

    def reduce_beside(self, duration_ns):
        """An asynchronous all-reduce: on a stream of the backend."""

        def make(_options):
            work = self.devices.communicate(duration_ns, behind=self.busy)
            self.busy = work.end_ns
            return DeviceWork(self.devices, work)

        return self.issue(make)

    def reduce_at_once(self, duration_ns):
        """A synchronous one: on the current stream; torch gives no handle."""

        def make(_options):
            self.devices.launch(duration_ns)

        self.wait(*self.issue(make, asynchronous=False), same_call=True)

    def step_over(self):
        self.position.begin_optimizer("adam")
        self.position.end_optimizer("adam")
        self.devices.pass_time(device_time.PAIR_EVERY_NS)

    def rows(self):
        self.devices.pass_time(10_000 * MS)
        self.recorder.finish()
        kind = TraceKind.BARE if self.timeline is None else TraceKind.RECORDED
        header = TraceHeader(kind=kind, world_size=1, ranks=())
        pt.assemble(self.folder / "0.spool", self.folder / "out.parquet", header=header)
        trace = pt.open(self.folder / "out.parquet")
        assert [str(each) for each in pt.validate(trace)] == []
        self.streams = trace.header.streams
        return trace.collect()


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path)


def told(rows):
    """Kind, stream and dependencies (as indices)."""
    columns = rows.select("index", "kind", "stream", "deps").iter_rows()
    return [(kind, stream, [at - back for back in deps]) for at, kind, stream, deps in columns]


def test_backward_overlaps_with_its_reductions(rank):
    rank.position.optimizer_made()
    for _ in range(3):
        rank.devices.launch(4 * MS)
        first = rank.reduce_beside(3 * MS)
        rank.devices.launch(2 * MS)
        second = rank.reduce_beside(3 * MS)
        rank.devices.launch(1 * MS)
        rank.wait(*first)
        rank.wait(*second)
        rank.devices.launch(1 * MS)
        rank.step_over()
    rows = rank.rows()
    last = rows.filter(step=2)
    reductions = last.filter(kind="all_reduce")
    assert reductions["dur_ns"].to_list() == pytest.approx([3 * MS, 3 * MS], abs=NEAR_NS)
    first, second = reductions.rows(named=True)
    assert second["start_ns"] == first["start_ns"] + first["dur_ns"], "it queues up"
    over = last.filter(phase="optimizer")["start_ns"][0]
    assert over - first["start_ns"] == pytest.approx(7 * MS, abs=10 * NEAR_NS)
    starts = dict(rows.select("index", "start_ns").iter_rows())
    ends = {at: start + rows["dur_ns"][at] for at, start in starts.items()}
    for index, deps in rows.select("index", "deps").iter_rows():
        assert all(ends[index - back] <= starts[index] for back in deps), "causes come first"


def test_an_operation_on_the_program_s_stream_ends_before_what_follows(rank):
    rank.devices.launch(MS)
    rank.reduce_at_once(2 * MS)
    rank.devices.launch(MS)
    rows = rank.rows()
    assert told(rows) == [("compute", 0, []), ("all_reduce", 1, [0]), ("compute", 0, [0, 1])]
    assert rows["dur_ns"].to_list()[1] == pytest.approx(2 * MS, abs=NEAR_NS)
    assert len(rank.devices.private) == 1, "nothing follows it"


def test_a_group_of_both_backends_tells_them_apart(rank, monkeypatch):
    rank.devices.launch(2 * MS)
    work = HostWork(rank.devices, 5 * MS)
    token, pending = rank.issue(lambda _options: work, tensor=ON_HOST)
    issued = rank.devices.now
    rank.devices.pass_time(5 * MS)
    over = rank.devices.now
    monkeypatch.setattr(recording, "_now", lambda: over)
    work.future.call(None)  # gloo's thread
    rank.wait(token, pending)
    rank.wait(*rank.reduce_beside(3 * MS))
    rows = rank.rows()
    host, device = rows.filter(kind="all_reduce").rows(named=True)
    assert host["start_ns"] == pytest.approx(issued + 2 * MS, abs=NEAR_NS)
    assert host["start_ns"] + host["dur_ns"] == over
    assert device["dur_ns"] == pytest.approx(3 * MS, abs=NEAR_NS)


def test_gloo_has_the_host_wait_also_for_tensors_on_devices(rank):
    rank.group.backend = "gloo"
    work = HostWork(rank.devices, 4 * MS)
    token, pending = rank.issue(lambda _options: work)
    assert not pending.on_device
    assert len(rank.devices.private) == 1, "a follower's wait would block"
    rank.wait(token, pending)
    assert rank.rows().filter(kind="all_reduce")["dur_ns"][0] < 5 * MS


def test_whoever_waits_for_a_barrier_blocks(rank):
    work = HostWork(rank.devices, 4 * MS)
    token, pending = rank.issue(lambda _options: work, call=Call.BARRIER, tensor=None)
    assert pending.on_device
    rank.wait(token, pending)
    rows = rank.rows()
    assert rows.filter(kind="barrier")["dur_ns"][0] == pytest.approx(4 * MS, abs=NEAR_NS)
    assert len(rank.devices.private) == 1, "a follower's wait would block, too"


def test_a_batch_is_followed_once_it_is_launched(rank):
    joint = RealBatch()
    pairs = [rank.issue(lambda _options: joint, batch=7) for _ in range(3)]
    work = DeviceWork(rank.devices, rank.devices.communicate(2 * MS))
    joint.launched(work)
    assert len(work.waited_on) == 1
    for token, pending in pairs:
        rank.wait(token, pending)
    rows = rank.rows()
    assert rows.filter(kind="all_reduce")["dur_ns"].to_list() == pytest.approx(
        [2 * MS] * 3, abs=NEAR_NS
    )


def test_tensors_stay_until_the_program_itself_waits(rank):
    pairs = [rank.reduce_beside(MS) for _ in range(3)]
    (_, by_future), (_, by_program), (_, never) = pairs
    by_future.wait_by_future()
    by_program.wait()
    assert by_program.kept is None
    assert [pending.kept.tensors is None for pending in (by_future, never)] == [False, False]
    rank.devices.pass_time(10 * MS)
    rank.issue(lambda _options: None, asynchronous=False)
    assert [pending.kept.tensors is None for pending in (by_future, never)] == [True, True]
    late = rank.reduce_beside(MS)[1]
    late.wait_by_future()
    late.release()
    assert late.kept is None


def test_of_messages_the_backend_keeps_nothing(rank):
    work = DeviceWork(rank.devices, rank.devices.communicate(MS))
    _, pending = rank.issue(lambda _options: work, call=Call.SEND)
    assert pending.kept is None
    assert len(work.waited_on) == 1


def test_tensors_of_a_batch_stay_from_its_launch_on(rank):
    joint = RealBatch()
    pairs = [rank.issue(lambda _options: joint, batch=7) for _ in range(2)]
    joint.launched(DeviceWork(rank.devices, rank.devices.communicate(2 * MS)))
    kept = [pending.kept for _, pending in pairs]
    assert all(one.tensors for one in kept)
    pairs[0][1].wait()
    assert [one.tensors is None for one in kept] == [True, False]
    rank.devices.pass_time(10 * MS)
    rank.reduce_beside(MS)
    assert kept[1].tensors is None


def test_nothing_is_kept_while_a_graph_is_captured(rank):
    _, before = rank.reduce_beside(MS)
    rank.devices.pass_time(10 * MS)
    rank.devices.is_ready = False
    assert rank.reduce_beside(MS)[1].kept is None
    assert before.kept.tensors is not None
    rank.devices.is_ready = True


def test_waits_with_nothing_in_between_are_one_place(rank):
    rank.devices.launch(MS)
    pairs = [rank.reduce_beside(2 * MS) for _ in range(3)]
    rank.devices.launch(MS)
    marks = rank.devices.records
    with rank.recorder.waits_together():
        for pair in pairs:
            rank.wait(*pair)
    assert rank.devices.records == marks + 2, "before the first and after the last"
    rank.devices.launch(MS)
    rows = rank.rows()
    assert told(rows)[-1] == ("compute", 0, [6, 1, 3, 5])
    assert rows["dur_ns"][-1] < 20_000 * MS
    assert rows.filter(kind="all_reduce")["dur_ns"].to_list() == pytest.approx(
        [2 * MS] * 3, abs=NEAR_NS
    )
    with rank.recorder.waits_together():
        pass


def test_a_launched_batch_that_gives_no_handle_ends_at_the_wait(rank):
    joint = RealBatch()
    pair = rank.issue(lambda _options: joint, batch=7)
    rank.devices.launch(2 * MS)
    joint.launched(None)
    assert pair[1].done()
    rank.wait(*pair)
    assert rank.rows().filter(kind="all_reduce")["dur_ns"][0] == pytest.approx(2 * MS, abs=NEAR_NS)


# Several streams ----------------------------------------------------------------------------


def switch(rank, stream):
    rank.lanes.leave(rank.devices.stream)
    rank.devices.stream = stream
    rank.lanes.find()


def put_event(rank, stream):
    return rank.lanes.event_recorded(stream), rank.devices.free[stream]


def wait_for(rank, stream, event):
    known, when = event

    def wait():
        rank.devices.free[stream] = max(rank.devices.free[stream], when)

    rank.lanes.wait_for_event(stream, known, wait)


def test_a_stream_beside_the_first_is_a_lane_of_its_own(rank):
    rank.devices.launch(3 * MS)
    wait_for(rank, SIDE, put_event(rank, DEFAULT))
    switch(rank, SIDE)
    rank.devices.launch(2 * MS)
    rank.reduce_at_once(4 * MS)
    gathered = put_event(rank, SIDE)
    switch(rank, DEFAULT)
    rank.devices.launch(5 * MS)
    wait_for(rank, DEFAULT, gathered)
    rank.devices.launch(MS)
    rows = rank.rows()
    assert sorted(rank.streams.values()) == ["group of 1", "program", "program, stream 1"]
    side = next(number for number, label in rank.streams.items() if label.startswith("program, "))
    group = next(number for number, label in rank.streams.items() if label.startswith("group"))
    kinds = told(rows)
    assert kinds[:4] == [
        ("compute", 0, []),
        ("compute", side, [0]),
        ("all_reduce", group, [1]),
        ("compute", side, [1, 2]),
    ]
    assert kinds[-2:][0][:2] == ("compute", 0)
    last = kinds[-1]
    assert last[1] == 0
    waited = [at for at in last[2] if kinds[at][1] == side]
    assert waited, "the last piece waits for what the side stream has gathered"
    reduced = rows.filter(kind="all_reduce").rows(named=True)[0]
    beside = rows.rows(named=True)[-2]
    assert beside["dur_ns"] == pytest.approx(5 * MS, abs=5 * NEAR_NS)
    assert beside["start_ns"] < reduced["start_ns"] + reduced["dur_ns"], "they overlap"


def test_a_program_that_moves_to_another_stream_for_good(rank):
    rank.devices.launch(MS)
    switch(rank, SIDE)
    for _ in range(2):
        rank.devices.launch(2 * MS)
        rank.reduce_at_once(MS)
    rows = rank.rows()
    first = rows.filter(stream=0)
    assert first["dur_ns"].sum() < 20_000 * MS
    assert rows.filter(kind="all_reduce").height == 2


def test_hooks_need_not_see_a_change_of_streams(rank):
    rank.devices.launch(MS)
    rank.devices.stream = SIDE  # autograd's engine, in C++
    rank.reduce_at_once(MS)
    rank.devices.stream = DEFAULT
    rank.reduce_at_once(MS)
    assert rank.rows().filter(kind="all_reduce").height == 2


def test_events_that_nobody_announced_are_no_edges(rank):
    wait_for(rank, SIDE, ((), 0))
    assert rank.lanes.event_recorded(SIDE) == ()
    own = put_event(rank, DEFAULT)
    wait_for(rank, DEFAULT, own)
    rows = rank.rows()
    assert all(max([0, *deps]) == 0 or len(deps) == 1 for deps in rows["deps"].to_list())


def test_a_graph_without_times_has_the_same_lanes(tmp_path):
    graphs = []
    for timed in (True, False):
        rank = Rank(tmp_path / str(timed), timed=timed)
        wait_for(rank, SIDE, put_event(rank, DEFAULT))
        switch(rank, SIDE)
        token, _ = rank.reduce_beside(MS)
        gathered = put_event(rank, SIDE)
        switch(rank, DEFAULT)
        wait_for(rank, DEFAULT, gathered)
        rank.where = object()
        rank.recorder.waiting(token)
        rank.recorder.waited(token)
        graphs.append(told(rank.rows()))
    assert graphs[0] == graphs[1]
