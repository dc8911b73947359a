"""Messages and tensors on their way from process to process."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest
import torch

from prismreplay.collect.handover import (
    INLINE_BYTES,
    Files,
    Parcel,
    ParcelWriter,
    Place,
    Span,
)
from prismreplay.collect.messages import Channel, pack_op, unpack_op
from prismreplay.errors import HandoverError
from prismreplay.runtime.operations import Call
from prismreplay.runtime.payloads import spec_of
from tests.prismreplay.collect.members import op_of

TENSORS = [
    torch.arange(6, dtype=torch.float32).reshape(2, 3),
    torch.empty(0, 4),
    torch.tensor(3.5),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.arange(12).reshape(3, 4).t(),
    torch.randn(5, 7).to(torch.bfloat16)[:, ::2],
]


def packed(tensors: list[torch.Tensor], place: Place) -> Parcel:
    writer = ParcelWriter(place)
    for tensor in tensors:
        writer.put_tensor(tensor)
    return writer.finish()


@pytest.mark.parametrize("elements", [1, INLINE_BYTES])
@pytest.mark.parametrize("on_disk", [False, True])
def test_tensors_of_all_layouts_arrive(elements: int, on_disk: bool, tmp_path: Path) -> None:
    place = Place(tmp_path) if on_disk else Place()
    tensors = [*TENSORS, torch.randn(elements)]
    parcel = packed(tensors, place)
    assert (parcel.file is None) == (elements == 1)
    back = parcel.tensors([spec_of(tensor) for tensor in tensors])
    for tensor, got in zip(tensors, back, strict=True):
        assert got.dtype is tensor.dtype
        assert torch.equal(got, tensor.resolve_conj())
    assert list(tmp_path.iterdir()) == []  # never a name, so nothing to be left behind


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_files_are_freed() -> None:
    before = open_files()
    parcel = packed([torch.zeros(10_000)], Place())
    assert open_files() == before + 1
    del parcel
    assert open_files() == before


def test_spans_are_end_to_end() -> None:
    writer = ParcelWriter(Place())
    assert writer.put(b"abc") == Span(0, 3)
    assert writer.put(bytes(INLINE_BYTES)) == Span(3, INLINE_BYTES)
    assert writer.put(b"xyz") == Span(3 + INLINE_BYTES, 3)
    parcel = writer.finish()
    found = bytearray(3)
    parcel.read_into(memoryview(found), 3 + INLINE_BYTES)
    assert found == b"xyz"


def test_a_full_folder_is_told(tmp_path: Path) -> None:
    for number, words in (
        (errno.ENOSPC, "no space is left"),
        (errno.EMFILE, "no more files can be open"),
        (errno.EACCES, "Permission denied"),
    ):
        error = Place(tmp_path).error(OSError(number, ""))
        assert words in str(error)
        assert error.hint
    with pytest.raises(HandoverError):
        Place(tmp_path / "missing").open()


def test_a_device_that_is_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ParcelWriter(Place())
    monkeypatch.setattr(Place, "open", lambda _: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(HandoverError, match="no space is left"):
        writer.put(bytes(INLINE_BYTES + 1))


def channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def test_messages_arrive_whole_with_their_files() -> None:
    left, right = channels()
    parcel = packed([torch.arange(5_000)], Place())
    left.send(("first", "x" * 30_000))
    left.send(("second",), parcel.file)
    left.send(("third",))
    found = [right.receive(), *right.receive_available()]
    assert [message[0] for message, _ in found] == ["first", "second", "third"]
    assert [file is not None for _, file in found] == [False, True, False]
    got = Parcel(None, found[1][1], 40_000).part(0, (5_000,), torch.int64)
    assert torch.equal(got, torch.arange(5_000))
    left.close()
    right.close()


def test_the_end_of_a_channel() -> None:
    left, right = channels()
    assert right.receive_available() == []
    left.send(("last",))
    left.close()
    assert [message for message, _ in right.receive_available()] == [("last",)]
    with pytest.raises(EOFError):
        right.receive_available()
    with pytest.raises(EOFError):
        right.receive()
    right.close()


def test_operations_travel_without_their_group() -> None:
    op = op_of(Call.BROADCAST, 4, 2, root=1, outputs=[spec_of(torch.ones(2))], site="a.py:3")
    back = unpack_op(pack_op(op), {op.group.key: op.group})
    assert back == op
    assert back.group is op.group
    assert back.site == "a.py:3"


def test_files_are_used_again_when_all_are_done_with_them() -> None:
    before = open_files()
    files = Files(Place(), most_bytes=100_000)
    numbers = []
    for size in (40_000, 20_000, 30_000):
        writer = ParcelWriter(Place(), files, size)
        writer.put(bytes([size // 10_000]) * size)
        parcel = writer.finish()
        numbers.append(parcel.file)
        assert os.fstat(parcel.file or 0).st_size == size  # nothing is left of what was there
        assert parcel.tensors([spec_of(torch.zeros(size, dtype=torch.uint8))])[0].unique() == (
            size // 10_000
        )
        parcel.files = files
        parcel.close()
    assert len(set(numbers)) == 1
    assert open_files() == before + 1
    files.give(Place().open(), 90_000)  # too much: the smaller one goes
    assert open_files() == before + 1
    del files, parcel, writer
    assert open_files() == before


@pytest.mark.parametrize("count", [0, 1, 3])
def test_tensors_that_stay_in_this_process_are_not_copied(count: int) -> None:
    tensors = [torch.arange(10, dtype=torch.int32) + number for number in range(count)]
    parcel = Parcel.holding(tensors)
    assert parcel.nbytes == 40 * count
    for number, tensor in enumerate(tensors):
        assert torch.equal(parcel.view(40 * number + 8, 5, torch.int32), tensor[2:7])
        assert torch.equal(parcel.part(40 * number, (2, 5), torch.int32), tensor.reshape(2, 5))
    if count == 1:
        assert parcel.view(0, 10, torch.int32).data_ptr() == tensors[0].data_ptr()
    if count:  # not where such elements can be
        assert parcel.view(1, 1, torch.int32).item() == 1 << 24
