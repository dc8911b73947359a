"""What a rank on a GPU is made of, piece by piece, on tensors of the host."""

from __future__ import annotations

import json
import weakref

import pytest

pytest.importorskip("torch")

import torch

from prismreplay.collect.handover import Parcel
from prismreplay.errors import TensorRulesError
from prismreplay.run.channels import Node
from prismreplay.run.device_fetching import Fetcher
from prismreplay.run.device_numerics import combine, make_up
from prismreplay.run.device_shares import Piece, pieces_of
from prismreplay.run.device_sources import MIRROR, NOTHING, RECORDING, DeviceSources, follow_rule
from prismreplay.run.device_work import DeviceWork, Launcher
from prismreplay.run.following import Placed
from prismreplay.run.outside_memory import BufferPool
from prismreplay.runtime.device_time import Timeline
from prismreplay.runtime.operations import Call, Group, Op, TensorSpec
from prismreplay.runtime.own_parts import alone, mirror
from prismreplay.runtime.payloads import spec_of
from prismreplay.runtime.shelves import LOOK_EVERY_NS, Shelf
from prismreplay.tensors.rules import Rule, RuleSet
from prismreplay.tensors.scope import FORMAT
from prismtrace.schema import DType, ReduceOp
from tests.prismreplay.run.fake_streams import FakeStreams, NoDevices

GROUP = Group("0", (4, 5, 6), 1, "nccl")


def make_op(call, inputs, outputs, **more):
    specs = [tuple(map(spec_of, tensors)) for tensors in (inputs, outputs)]
    first = (specs[0] or specs[1] or (TensorSpec((), DType.FLOAT32),))[0]
    fields = {"seq": 0, "payload_bytes": first.nbytes, "dtype": first.dtype, **more}
    return Op(call=call, group=GROUP, inputs=specs[0], outputs=specs[1], **fields)


@pytest.mark.parametrize(
    ("how", "factor", "found", "mirrored"),
    [
        (ReduceOp.SUM, None, 12.0, 6.0),
        (ReduceOp.AVG, None, 10 + 2 / 3, 2.0),
        (ReduceOp.MAX, None, 10.0, 2.0),
        (ReduceOp.MIN, None, 2.0, 2.0),
        (ReduceOp.PRODUCT, None, 20.0, 8.0),
        (ReduceOp.PREMUL_SUM, 0.5, 11.0, 3.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions(how, factor, found, mirrored, dtype):
    x = torch.full((6,), 2.0, dtype=dtype)
    op = make_op(Call.ALL_REDUCE, [x], [x], reduce_op=how, premul_factor=factor)
    given = torch.full((6,), 10.0, dtype=dtype)
    y = x.clone()
    combine(op, [y], [y], pieces_of(op, [0, 2]), [given])
    assert y[0].item() == pytest.approx(found, rel=1e-2)
    y = x.clone()
    mirror(op, [y], [y], torch.Tensor.zero_)
    assert y[0].item() == pytest.approx(mirrored, rel=1e-2)
    out = torch.empty(2, dtype=dtype)
    op = make_op(Call.REDUCE_SCATTER_SINGLE, [x], [out], reduce_op=how, premul_factor=factor)
    combine(op, [x], [out], pieces_of(op, [0, 2]), [given[:2]])
    assert out[1].item() == pytest.approx(found, rel=1e-2)


def test_whole_numbers_are_divided_at_the_end():
    x = torch.tensor([7])
    op = make_op(Call.ALL_REDUCE, [x], [x], reduce_op=ReduceOp.AVG)
    combine(op, [x], [x], pieces_of(op, [0, 2]), [torch.tensor([9])])
    assert x.item() == 5


def test_pieces_lie_where_virtual_members_belong():
    out, own = torch.zeros(6), torch.tensor([1.0, 2.0])
    op = make_op(Call.ALL_GATHER_SINGLE, [own], [out])
    assert pieces_of(op, [0, 2]) == [Piece(0, 0, 2, 0), Piece(0, 4, 2, 2)]
    combine(op, [own], [out], pieces_of(op, [0, 2]), [torch.ones(2) * 8, torch.ones(2) * 9])
    assert out.tolist() == [8, 8, 1, 2, 9, 9]
    # In place, as FSDP has it.
    out = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 0.0])
    mirror(op, [out[2:4]], [out], torch.Tensor.zero_)
    assert out.tolist() == [1, 2] * 3
    make_up(op, [out[2:4]], [out], lambda tensor: tensor.fill_(7))
    assert out.tolist() == [7, 7, 1, 2, 7, 7]


def test_uneven_rows_of_an_exchange_are_filled_as_far_as_they_go():
    rows, got = torch.arange(6.0).view(6, 1), torch.full((7, 1), -1.0)
    splits = {"input_splits": (1, 2, 3), "output_splits": (3, 2, 2)}
    op = make_op(Call.ALL_TO_ALL_SINGLE, [rows], [got], **splits)
    mirror(op, [rows], [got], torch.Tensor.zero_)
    assert got.flatten().tolist() == [1, 2, 0, 1, 2, 1, 2]


def test_messages_are_noise_and_broadcasts_stay():
    streams, x = FakeStreams(), torch.zeros(9)
    mirror(make_op(Call.RECV, [], [x], peer=4), [], [x], streams.noise)
    assert x.abs().sum() > 0
    before = x.clone()
    mirror(make_op(Call.BROADCAST, [], [x], root=4), [], [x], streams.noise)
    assert torch.equal(x, before)


def test_alone_a_rank_keeps_what_it_has():
    x, out = torch.ones(3), torch.zeros(3)
    group = Group("1", (5,), 0, "nccl")
    for call in (Call.ALL_REDUCE, Call.ALL_GATHER_SINGLE, Call.REDUCE_SCATTER_SINGLE):
        out.zero_()
        op = Op(call, group, 0, (spec_of(x),), (spec_of(out),), 12, reduce_op=ReduceOp.SUM)
        alone(op, [x], [out])
        assert torch.equal(out, x)


def test_sources_answer_in_order(tmp_path):
    manifest = {"format": FORMAT, "world_size": 9, "groups": {}, "choice": "all", "most_bytes": 8}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    rules = RuleSet(rule=(Rule(kind="broadcast", constant=3), Rule(kind="gather", python="a:b")))
    sources = DeviceSources([rules, tmp_path])
    x = torch.zeros(2)
    small, large = (make_op(Call.ALL_REDUCE, [x], [x], payload_bytes=size) for size in (8, 9))
    assert sources.way(5, small) is RECORDING
    assert sources.way(5, large) is MIRROR
    assert sources.way(5, make_op(Call.ALL_REDUCE, [x], [x], payload_bytes=99, dtype=DType.INT64))
    assert sources.way(5, make_op(Call.SEND, [x], [], peer=4)) is NOTHING
    op = make_op(Call.BROADCAST, [], [x], root=4)
    follow_rule(sources.way(5, op), op, [], [x], FakeStreams())
    assert x.tolist() == [3, 3]
    with pytest.raises(TensorRulesError, match="copying all inputs"):
        sources.way(5, make_op(Call.GATHER, [x], [x] * 3, root=5))


def test_buffers_are_used_again_once_the_device_is_past_them():
    made, over = [], set()

    def make(nbytes):
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)

    pool = BufferPool(make, over.__contains__)
    first = pool.take(100)
    pool.give(first, "event")
    assert pool.take(100) is not first
    over.add("event")
    assert pool.take(100) is first
    pool.take(5 << 20)
    assert made == [1 << 20, 1 << 20, 8 << 20]
    assert pool.nbytes == 10 << 20


class Hub:
    """Answers with the number of the operation; `asked` has all questions."""

    def __init__(self):
        self.asked, self.answers = [], {}

    def begin_asking(self, name, packed, ahead):
        assert name == "virtual"
        self.asked.append((packed[2], ahead))
        self.answers[len(self.asked)] = packed[2]
        return len(self.asked)

    def answer(self, request):
        data = bytes([self.answers.pop(request)])
        return ("value", request, data, 1), None


class Coming:
    """The graph: operations of one group, one after another."""

    def __init__(self):
        self.done = 0

    def coming(self, _op, count):
        for seq in range(self.done, min(self.done + count, 30)):
            yield Node("all_reduce", seq, None, 8, 0, 0, None)


def test_what_comes_next_is_asked_for_before_it_is_needed():
    hub, graph = Hub(), Coming()
    fetcher = Fetcher(hub, graph, lambda: 0)
    x = torch.zeros(2)
    for seq in range(30):
        graph.done = seq + 1
        placed = Placed(None, 0, seq, None, 0, 0, None)
        parcel = fetcher.fetch(make_op(Call.ALL_REDUCE, [x], [x]), placed)
        assert isinstance(parcel, Parcel)
        assert parcel.data == bytes([seq])
    assert (fetcher.fetched, fetcher.late) == (30, 1)
    assert sorted(seq for seq, _ in hub.asked) == list(range(30))
    assert hub.answers == {}


class Issuer:
    """Puts operations into streams, on a clock of its own."""

    def __init__(self):
        self.now = 1
        self.streams = FakeStreams()
        timeline = Timeline(NoDevices(), None)
        self.launcher = Launcher(self.streams, timeline, lambda _works, _stream: None)
        self.launcher._shelves[GROUP.key] = Shelf(looks=True, clock=lambda: self.now)

    def issue(self, call, *, asynchronous):
        """Returns the operation, and whether its tensor lives."""
        x = torch.zeros(2)
        op = make_op(call, [x], [x], peer=6 if call is Call.SEND else None)
        placed = Placed(None, 0, 0, None, 0, 0, None)
        work = DeviceWork(self.launcher, op, 0, placed, ([x], [x]), asynchronous=asynchronous)
        self.launcher.launch([work])
        return work, weakref.ref(x)


def test_tensors_stay_until_the_backend_would_have_looked():
    issuer = Issuer()
    work, tensor = issuer.issue(Call.ALL_REDUCE, asynchronous=True)
    work.wait_by_future()
    issuer.issue(Call.ALL_REDUCE, asynchronous=False)
    assert tensor() is not None
    issuer.now += 2 * LOOK_EVERY_NS
    issuer.issue(Call.ALL_REDUCE, asynchronous=False)
    assert tensor() is None, "also by an operation in the program's own stream"


def test_of_messages_nothing_is_kept():
    issuer = Issuer()
    work, tensor = issuer.issue(Call.SEND, asynchronous=True)
    assert tensor() is None
    assert ("lend", work.stream, 2) in issuer.streams.said
