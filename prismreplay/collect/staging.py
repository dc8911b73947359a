"""Tensors of a GPU on their way into parcels and out of them, through pinned memory.

The tensors of one operation are copied to one pinned buffer, one after the other, on the stream
that the program is using; then the stream is waited for, once. Operations larger than the buffer
take several rounds. It is the same in the other direction: an operation counts as done once its
outputs are on the GPU, which is later than on a cluster, where only the stream waits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from prismreplay.collect.handover import Parcel, ParcelWriter, Span, bytes_of

__all__ = ["Copies", "CudaCopies", "Staging", "cuda_staging"]

Tensor = Any

BUFFER_BYTES = 64 << 20
SMALLEST_BUFFER_BYTES = 1 << 20


class Copies(Protocol):
    """Copies between a device and pinned memory, in the order in which they are asked for."""

    def pinned(self, nbytes: int) -> Tensor:
        """A new buffer of bytes."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy bytes; done once `finish` has returned."""

    def finish(self, device: Any) -> None:
        """Wait for the copies to and from `device`."""

    def mark(self, device: Any) -> Any:
        """What `device` has been given to do so far."""

    def follow(self, mark: Any) -> None:
        """Copies from now on come after that."""


class CudaCopies:
    """On the current stream of whichever thread asks.

    Events go past the hooks that a recorder puts into torch's classes
    (`prismreplay.runtime.cuda_streams`): what is done here is not the program's doing.
    """

    def pinned(self, nbytes: int) -> Tensor:
        """See `Copies`."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Copies`."""
        target.copy_(source, non_blocking=True)

    def finish(self, device: Any) -> None:
        """See `Copies`."""
        torch.cuda.current_stream(device).synchronize()

    def mark(self, device: Any) -> Any:
        """See `Copies`."""
        event = torch.cuda.Event()
        torch._C._CudaEventBase.record(event, torch.cuda.current_stream(device))  # noqa: SLF001
        return event

    def follow(self, mark: Any) -> None:
        """See `Copies`."""
        torch._C._CudaEventBase.wait(mark, torch.cuda.current_stream())  # noqa: SLF001


class Staging:
    """The pinned buffers of a rank, and what goes through them.

    Args:
        copies: how bytes get to a device and back.
        most: bytes of a buffer at the most.
    """

    def __init__(self, copies: Copies, most: int = BUFFER_BYTES) -> None:
        self._copies = copies
        self._most = most
        self._spare: list[Tensor] = []
        self._lock = threading.Lock()

    def collect(self, tensors: Sequence[Tensor], writer: ParcelWriter) -> None:
        """Append the elements of `tensors`, which are on one device, to a parcel.

        Raises:
            HandoverError: no space is left.
        """
        with torch.no_grad():
            flat = [_flat(tensor.detach().resolve_conj().resolve_neg()) for tensor in tensors]
        self._pass(flat, _Outward(writer, self._copies))

    def mark(self, tensor: Tensor) -> Any:
        """What has to be over before `tensor` may be written: its memory may have been another's.

        A communication comes after what was asked for before it was issued, on whatever stream
        the program waits for it.
        """
        return self._copies.mark(tensor.device)

    def deliver(
        self, outputs: Sequence[tuple[Tensor, Span]], parcel: Parcel, after: Any = None
    ) -> None:
        """Fill tensors of one device from where their bytes are in a parcel.

        Args:
            outputs: tensors and the places of their bytes.
            parcel: has them.
            after: a `mark` of when the communication was issued.
        """
        if after is not None:
            self._copies.follow(after)
        flat, strided = [], []
        with torch.no_grad():
            for output, _ in outputs:
                # As NCCL does, without autograd's noticing.
                target = output.data
                if not target.is_contiguous():
                    dense = torch.empty_like(target, memory_format=torch.contiguous_format)
                    strided.append((target, dense))
                    target = dense
                flat.append(_flat(target))
            self._pass(flat, _Inward([span.offset for _, span in outputs], parcel, self._copies))
            for target, dense in strided:
                target.copy_(dense)

    def _pass(self, flat: Sequence[Tensor], way: _Outward | _Inward) -> None:
        total = sum(one.numel() for one in flat)
        if total == 0:
            return
        buffer = self._take(total)
        try:
            device = next(one.device for one in flat)
            for round_ in _rounds([one.numel() for one in flat], buffer.numel()):
                way.carry([(flat[piece.tensor], piece) for piece in round_], buffer, device)
        finally:
            with self._lock:
                self._spare.append(buffer)

    def _take(self, nbytes: int) -> Tensor:
        """A buffer that nobody uses: large enough, or as large as they get."""
        wanted = SMALLEST_BUFFER_BYTES
        while wanted < min(nbytes, self._most):
            wanted *= 2
        wanted = min(wanted, self._most)
        with self._lock:
            for place, buffer in enumerate(self._spare):
                if buffer.numel() >= wanted:
                    return self._spare.pop(place)
            # Smaller ones are not needed beside a larger one.
            self._spare.clear()
        return self._copies.pinned(wanted)


class _Piece:
    """Some bytes of a tensor, and their place in the buffer."""

    __slots__ = ("nbytes", "offset", "start", "tensor")

    def __init__(self, tensor: int, start: int, nbytes: int, offset: int) -> None:
        self.tensor, self.start, self.nbytes, self.offset = tensor, start, nbytes, offset


class _Outward:
    """From a device to a parcel."""

    def __init__(self, writer: ParcelWriter, copies: Copies) -> None:
        self._writer, self._copies = writer, copies

    def carry(self, pieces: Sequence[tuple[Tensor, _Piece]], buffer: Tensor, device: Any) -> None:
        """One round."""
        filled = 0
        for flat, piece in pieces:
            filled = piece.offset + piece.nbytes
            self._copies.copy(
                buffer[piece.offset : filled], flat[piece.start : piece.start + piece.nbytes]
            )
        self._copies.finish(device)
        self._writer.put(bytes_of(buffer)[:filled])


class _Inward:
    """From a parcel to a device."""

    def __init__(self, offsets: Sequence[int], parcel: Parcel, copies: Copies) -> None:
        self._offsets, self._parcel, self._copies = offsets, parcel, copies

    def carry(self, pieces: Sequence[tuple[Tensor, _Piece]], buffer: Tensor, device: Any) -> None:
        """One round."""
        memory = bytes_of(buffer)
        for flat, piece in pieces:
            end = piece.offset + piece.nbytes
            self._parcel.read_into(
                memory[piece.offset : end], self._offsets[piece.tensor] + piece.start
            )
            self._copies.copy(
                flat[piece.start : piece.start + piece.nbytes], buffer[piece.offset : end]
            )
        # The buffer is for others now, and the program may use the outputs on any stream.
        self._copies.finish(device)


def _rounds(sizes: Sequence[int], room: int) -> list[list[_Piece]]:
    """Tensors of so many bytes, cut so that each round fits into `room` bytes."""
    rounds: list[list[_Piece]] = [[]]
    used = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if used == room:
                rounds.append([])
                used = 0
            nbytes = min(size - start, room - used)
            rounds[-1].append(_Piece(tensor, start, nbytes, used))
            start, used = start + nbytes, used + nbytes
    return rounds


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in their order; of a contiguous one, the tensor's own memory."""
    return tensor.contiguous().view(-1).view(torch.uint8)


@functools.cache
def cuda_staging() -> Staging:
    """That of this process."""
    return Staging(CudaCopies())
