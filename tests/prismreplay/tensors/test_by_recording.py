"""A rank alone, with a recording for its partners, gets what it gets among them."""

from __future__ import annotations

import pytest
import torch

from prismreplay.collect.coordinator import Coordinator
from prismreplay.collect.executor import Executor
from prismreplay.collect.handover import ParcelWriter, Place, torch_dtype
from prismreplay.errors import TensorRecordingError
from prismreplay.tensors.by_recording import RecordingSupplier
from prismreplay.tensors.choices import RecordTensors
from prismreplay.tensors.recorded import RecordedTensors
from prismreplay.tensors.recording import TensorRecorder
from tests.prismreplay.tensors.operations import op, spec

WORLD = (0, 1, 2, 3)


def parcel(tensors):
    writer = ParcelWriter(Place())
    for tensor in tensors:
        writer.put_tensor(tensor)
    return writer.finish()


def performed(ops, inputs):
    """Outputs of every rank, as a coordinator among all of them makes them."""
    results = {}

    class Spy(Executor):
        def perform(self, members):
            made = super().perform(members)
            for member, (found, spans) in zip(members, made, strict=True):
                results[member.rank] = [
                    found.part(span.offset, s.shape, torch_dtype(s))
                    for span, s in zip(spans, member.op.outputs, strict=True)
                ]
            return made

    coordinator = Coordinator(WORLD, 4, Spy(Place()))
    for rank in WORLD:
        coordinator.begin(rank)
        coordinator.join(rank, ops[rank].group)
        coordinator.submit(rank, 1, ops[rank], parcel(inputs[rank]))
    return results


def case(call, seq):
    """Operation and inputs of each rank."""
    generator = torch.Generator().manual_seed(seq)
    size = len(WORLD)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    splits = [[(r + c) % 3 for c in range(size)] for r in range(size)]
    forms = {
        "all_reduce": lambda _: ([draw(77)], [spec(77)], {}),
        "broadcast": lambda r: ([draw(5)] if r == 2 else [], [spec(5)], {"root": 2}),
        "reduce": lambda r: ([draw(5)], [spec(5)] if r == 1 else [], {"root": 1}),
        "all_gather": lambda r: ([draw(r + 1)], [spec(n + 1) for n in range(size)], {}),
        "all_gather_single": lambda _: ([draw(3)], [spec(12)], {}),
        "gather": lambda r: ([draw(3)], [spec(3)] * 4 if r == 3 else [], {"root": 3}),
        "scatter": lambda r: ([draw(3) for _ in WORLD] if r == 0 else [], [spec(3)], {"root": 0}),
        "reduce_scatter": lambda _: ([draw(3) for _ in WORLD], [spec(3)], {}),
        "reduce_scatter_single": lambda _: ([draw(40)], [spec(10)], {}),
        "all_to_all": lambda r: ([draw(splits[r][c]) for c in WORLD], [spec(splits[c][r]) for c in WORLD], {}),
        "all_to_all_single": lambda r: (
            [draw(sum(splits[r]), 2)],
            [spec(sum(splits[c][r] for c in WORLD), 2)],
            {"input_splits": tuple(splits[r]), "output_splits": tuple(splits[c][r] for c in WORLD)},
        ),
        "barrier": lambda _: ([], [], {}),
    }  # fmt: skip
    ops, inputs = {}, {}
    for rank in WORLD:
        tensors, outputs, more = forms[call](rank)
        ops[rank] = op(
            call,
            WORLD,
            rank,
            inputs=[spec(*t.shape) for t in tensors],
            outputs=outputs,
            seq=seq,
            **more,
        )
        inputs[rank] = tensors
    return ops, inputs


CALLS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier",
)  # fmt: skip


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    writing = TensorRecorder(
        tmp_path_factory.mktemp("r") / "t", choice=RecordTensors.ALL, world_size=4
    )
    for seq, call in enumerate(CALLS):
        ops, inputs = case(call, seq)
        for rank in WORLD:
            if writing.wants(rank, ops[rank]):
                writing.record(rank, ops[rank], inputs[rank])
    send = op("send", WORLD, 1, inputs=[spec(3)], peer=2, seq=9)
    writing.record(1, send, [torch.tensor([1.0, 2, 3])])
    return RecordedTensors(writing.close().folder)


@pytest.mark.parametrize("call", CALLS)
def test_every_call_gives_what_it_gave(recording, call):
    seq = CALLS.index(call)
    ops, inputs = case(call, seq)
    expected = performed(ops, inputs)
    supplier = RecordingSupplier(recording)
    for rank in WORLD:
        made = supplier.supply(rank, ops[rank], inputs[rank])
        assert len(made) == len(expected[rank])
        assert all(torch.equal(a, b) for a, b in zip(made, expected[rank], strict=True))


def test_messages(recording):
    supplier = RecordingSupplier(recording)
    receive = op("recv", WORLD, 2, outputs=[spec(3)], peer=1, seq=9)
    assert supplier.supply(2, receive, [])[0].tolist() == [1, 2, 3]
    assert supplier.supply(1, op("send", WORLD, 1, inputs=[spec(3)], peer=2, seq=9), []) == []
    with pytest.raises(TensorRecordingError, match="does not fit the recv of rank 2"):
        supplier.supply(2, op("recv", WORLD, 2, outputs=[spec(4)], peer=1, seq=9), [])


def test_another_program_is_refused(recording):
    supplier = RecordingSupplier(recording)
    other = op("all_reduce", WORLD, 0, inputs=[spec(78)], outputs=[spec(78)], seq=0)
    with pytest.raises(
        TensorRecordingError, match=r"rank 1 contributed all_reduce of float32\[77\]"
    ):
        supplier.supply(0, other, [torch.ones(78)])
    with pytest.raises(TensorRecordingError, match="rank 1 contributed all_reduce"):
        supplier.supply(
            0,
            op("all_gather", WORLD, 0, inputs=[spec(77)], outputs=[spec(77)] * 4, seq=0),
            [torch.ones(77)],
        )
    with pytest.raises(
        TensorRecordingError, match=r"holds no tensors of rank=1 group=\[0-3\] seq=99"
    ):
        supplier.supply(
            0,
            op("all_reduce", WORLD, 0, inputs=[spec(7)], outputs=[spec(7)], seq=99),
            [torch.ones(7)],
        )
    with pytest.raises(TensorRecordingError, match="had the ranks"):
        supplier.supply(0, op("barrier", (0, 1), 0), [])


def test_what_does_not_concern_the_sandbox_is_performed(tmp_path):
    writing = TensorRecorder(
        tmp_path / "t", choice=RecordTensors.SANDBOX_FACING, world_size=4, sandbox=[1]
    )
    writing.record(1, op("send", WORLD, 1, inputs=[spec(3)], peer=2), [torch.ones(3)])
    supplier = RecordingSupplier(RecordedTensors(writing.close().folder))
    assert supplier.supply(2, op("recv", WORLD, 2, outputs=[spec(3)], peer=1), []) is not None
    assert supplier.supply(2, op("recv", WORLD, 2, outputs=[spec(3)], peer=0), []) is None
    assert supplier.supply(2, op("barrier", (2, 3), 2), []) is None
