from __future__ import annotations

import threading

import pytest
import torch

from prismreplay.collect.client import fill_all, pack
from prismreplay.collect.handover import INLINE_BYTES, ParcelWriter, Place, Span
from prismreplay.collect.staging import BUFFER_BYTES, CudaCopies, Staging


class LazyCopies:
    """Plays a device: copies happen when they are waited for, in the order they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.finished = 0
        self.buffers: list[int] = []
        self.followed: list[str] = []

    def mark(self, device):
        return f"mark on {device}"

    def follow(self, mark):
        assert not self.asked, "too late: bytes are on their way"
        self.followed.append(mark)

    def pinned(self, nbytes):
        self.buffers.append(nbytes)
        # Whoever reads before the copy is done sees nonsense.
        return torch.full((nbytes,), 0xAB, dtype=torch.uint8)

    def copy(self, target, source):
        self.asked.append((target, source))

    def finish(self, device):
        assert device.type == "cpu"
        self.finished += 1
        for target, source in self.asked:
            target.copy_(source)
        self.asked.clear()


def tensors() -> list[torch.Tensor]:
    return [
        torch.arange(5000, dtype=torch.float32),
        torch.arange(12, dtype=torch.int64).reshape(3, 4).t(),
        torch.tensor(7, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.randn(4, 3).to(torch.complex64).conj(),
        torch.rand(300) > 0.5,
        torch.arange(7).to(torch.float8_e4m3fn),
    ]


@pytest.fixture
def copies():
    return LazyCopies()


@pytest.mark.parametrize("most", [1 << 20, 1000, 64])
def test_there_and_back_again(copies, most):
    staging, sent = Staging(copies, most), tensors()
    writer = ParcelWriter(Place())
    staging.collect(sent, writer)
    parcel = writer.finish()
    outputs = [torch.empty_like(one).resolve_conj() for one in sent]
    outputs[1] = torch.empty(4, 6, dtype=torch.int64)[:, ::2]
    versions = [one._version for one in outputs]
    offset, wanted = 0, []
    for one, output in zip(sent, outputs, strict=True):
        nbytes = one.numel() * one.element_size()
        wanted.append((output, Span(offset, nbytes)))
        offset += nbytes
    assert parcel.nbytes == offset
    staging.deliver(wanted, parcel)
    for one, output in zip(sent, outputs, strict=True):
        as_bytes = one.resolve_conj().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(output.contiguous().view(-1).view(torch.uint8), as_bytes)
    assert [one._version for one in outputs] == versions
    assert not copies.asked


def test_one_wait_for_an_operation_of_many_tensors(copies):
    staging = Staging(copies)
    writer = ParcelWriter(Place())
    staging.collect(tensors(), writer)
    assert copies.finished == 1
    parcel = writer.finish()
    assert parcel.nbytes > INLINE_BYTES


def test_same_bytes_as_without_staging(copies):
    sent = tensors()
    writer = ParcelWriter(Place())
    Staging(copies, 64).collect(sent, writer)
    staged, plain = writer.finish(), pack(sent, Place())
    one, other = bytearray(staged.nbytes), bytearray(plain.nbytes)
    staged.read_into(memoryview(one), 0)
    plain.read_into(memoryview(other), 0)
    assert one == other


def test_buffers_are_used_again_and_grow(copies):
    staging = Staging(copies)
    for size in (10, 10, 3 << 20, 10, 200 << 20):
        writer = ParcelWriter(Place())
        staging.collect([torch.zeros(size, dtype=torch.uint8)], writer)
        writer.finish().close()
    assert copies.buffers == [1 << 20, 4 << 20, BUFFER_BYTES]


def test_threads_do_not_share_a_buffer():
    entered, go = threading.Event(), threading.Event()

    class Slow(LazyCopies):
        def finish(self, device):
            entered.set()
            go.wait(5)
            super().finish(device)

    slow = Slow()
    staging = Staging(slow)
    thread = threading.Thread(
        target=lambda: staging.collect([torch.ones(4)], ParcelWriter(Place())), daemon=True
    )
    thread.start()
    entered.wait(5)
    go.set()
    staging.collect([torch.ones(4)], ParcelWriter(Place()))
    thread.join(5)
    assert len(slow.buffers) in (1, 2)


def test_outputs_are_written_after_what_was_asked_for_before_the_communication(copies):
    staging = Staging(copies)
    writer = ParcelWriter(Place())
    staging.collect([torch.ones(4)], writer)
    output = torch.zeros(4)
    mark = staging.mark(output)
    staging.deliver([(output, Span(0, 16))], writer.finish(), mark)
    assert copies.followed == ["mark on cpu"]
    assert output.tolist() == [1, 1, 1, 1]


def test_nothing_to_move(copies):
    Staging(copies).collect([], ParcelWriter(Place()))
    Staging(copies).collect([torch.zeros(0)], ParcelWriter(Place()))
    assert copies.buffers == []


@pytest.mark.gpu
def test_on_a_gpu_the_bytes_are_those_of_a_plain_copy():
    sent = [one.cuda() for one in tensors()]
    staged, plain = pack(sent, Place()), pack([one.cpu() for one in sent], Place())
    one, other = bytearray(staged.nbytes), bytearray(plain.nbytes)
    staged.read_into(memoryview(one), 0)
    plain.read_into(memoryview(other), 0)
    assert one == other


@pytest.mark.gpu
def test_on_a_gpu_inputs_are_read_after_what_the_stream_computes():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(50_000_000)
        x += 3
        parcel = pack([x], Place())
        outputs = [torch.empty(1 << 21, 2, device="cuda").t()]
        fill_all([(outputs[0], Span(0, parcel.nbytes))], parcel)
        torch.cuda._sleep(50_000_000)
    assert bool((outputs[0] == 3).all())
    assert CudaCopies().pinned(16).is_pinned()
