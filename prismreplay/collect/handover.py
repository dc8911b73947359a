"""How the bytes of tensors get from one process to another.

The tensors of one operation travel as one `Parcel`: their bytes end to end, inside the message
when there are few, else in a file without a name whose open descriptor goes with the message.
The file lives in memory (`memfd_create`) or in a folder that the user chose, perhaps on disk. As it
has no name, nothing of it can be left behind, however a process ends; it is freed when the last
process that may still read it has closed it. That also is its reference count: a result of which
many ranks get a part is written once.

Files are written and read, not mapped: touching fresh pages of a shared mapping one fault at a
time is some four times slower than `write`, which makes them in one go. Most of a write is making
pages, so where a sender knows that all receivers are done it uses a file again (`Files`).
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prismreplay.errors import HandoverError
from prismreplay.runtime.operations import TensorSpec

__all__ = [
    "INLINE_BYTES",
    "Files",
    "Parcel",
    "ParcelWriter",
    "Place",
    "Span",
    "bytes_of",
    "torch_dtype",
]

Tensor = Any

INLINE_BYTES = 4096
"""Up to this size, bytes travel inside the message: a file costs some 20 us."""


class Span(NamedTuple):
    """A run of bytes in a parcel."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Place:
    """Where the files are kept: a folder, or None for memory."""

    folder: Path | None = None

    def open(self) -> int:
        """A new file without a name.

        Raises:
            HandoverError: the folder does not take it.
        """
        try:
            if self.folder is None:
                return os.memfd_create("prismreplay", os.MFD_CLOEXEC)
            try:
                return os.open(self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
            # Some file systems only know files with names.
            handle, name = tempfile.mkstemp(prefix="prismreplay-", dir=self.folder)
            Path(name).unlink()
            return handle
        except OSError as error:
            raise self.error(error) from error

    def error(self, error: OSError) -> HandoverError:
        """What a failure of the operating system means here."""
        where = "memory" if self.folder is None else str(self.folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            return HandoverError(
                "no space is left for tensors that ranks hand over",
                where=where,
                hint="name a folder with more space: --shm-dir DIR",
            )
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return HandoverError(
                "too many tensors are on their way at once: no more files can be open",
                where=where,
                hint="raise the limit of open files (ulimit -n)",
            )
        return HandoverError(
            f"cannot keep tensors that ranks hand over: {os.strerror(error.errno or 0)}",
            where=where,
            hint="name another folder: --shm-dir DIR",
        )


class Files:
    """Files that nobody reads any more, for use again.

    Args:
        place: where new ones are made.
        most_bytes: that those which are not in use may hold together.
    """

    def __init__(self, place: Place, most_bytes: int = 128 << 20) -> None:
        self.place = place
        self._most_bytes = most_bytes
        self._free: list[tuple[int, int]] = []
        """Sizes and descriptors, smallest first."""

    def take(self, nbytes: int) -> int:
        """A file to write to, from its beginning, if possible one that has held as much before.

        Raises:
            HandoverError: a new one is needed, and there is no room.
        """
        if not self._free:
            return self.place.open()
        at = min(bisect.bisect_left(self._free, (nbytes, -1)), len(self._free) - 1)
        _, file = self._free.pop(at)
        os.lseek(file, 0, os.SEEK_SET)
        return file

    def give(self, file: int, nbytes: int) -> None:
        """Nobody reads this file of so many bytes any more."""
        bisect.insort(self._free, (nbytes, file))
        while sum(size for size, _ in self._free) > self._most_bytes:
            os.close(self._free.pop(0)[1])

    def __del__(self) -> None:
        for _, file in self._free:
            with contextlib.suppress(OSError):
                os.close(file)


class Parcel:
    """Bytes of some tensors, end to end. Owns its file.

    `memory`: instead of `data` or a file, bytes that stay in this process, as a 1-D tensor. `files`:
    where its file goes when it is closed, if all who were sent it are done with it then.
    """

    __slots__ = ("data", "file", "files", "memory", "nbytes")

    def __init__(self, data: bytes | None, file: int | None, nbytes: int) -> None:
        self.data = data
        self.file = file
        self.nbytes = nbytes
        self.memory: Tensor = None
        self.files: Files | None = None

    @classmethod
    def holding(cls, tensors: Sequence[Tensor]) -> Parcel:
        """Those contiguous CPU tensors, for use in this process; copied only if there are several."""
        flat = [one.detach().reshape(-1).view(torch.uint8) for one in tensors if one.numel()]
        memory = flat[0] if len(flat) == 1 else torch.cat(flat) if flat else torch.empty(0)
        parcel = cls(None, None, memory.numel())
        parcel.memory = memory
        return parcel

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` from the bytes at `offset`."""
        if self.memory is not None:
            target[:] = bytes_of(self.memory)[offset : offset + len(target)]
            return
        if self.data is not None:
            target[:] = self.data[offset : offset + len(target)]
            return
        if self.file is None:
            raise ValueError("this parcel is closed")
        while target:
            count = os.preadv(self.file, [target], offset)
            if count == 0:
                raise EOFError(f"the parcel ends at {self.nbytes} bytes")
            target, offset = target[count:], offset + count

    def part(self, offset: int, shape: Sequence[int], dtype: Any) -> Tensor:
        """A new tensor with the bytes at `offset`."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.read_into(bytes_of(tensor), offset)
        return tensor

    def view(self, offset: int, elements: int, dtype: Any) -> Tensor:
        """A 1-D tensor with the bytes at `offset`, not to be written to: it may be no copy."""
        if self.memory is not None:
            with contextlib.suppress(RuntimeError):  # some are not where such elements can be
                return self.memory[offset : offset + elements * dtype.itemsize].view(dtype)
        return self.part(offset, (elements,), dtype)

    def tensors(self, specs: Iterable[TensorSpec]) -> list[Tensor]:
        """New tensors with the bytes of the whole parcel, which are `specs` end to end."""
        found, offset = [], 0
        for spec in specs:
            found.append(self.part(offset, spec.shape, torch_dtype(spec)))
            offset += spec.nbytes
        return found

    def close(self) -> None:
        """Free the file here; other processes keep theirs."""
        file, self.file = self.file, None
        if file is None:
            return
        if self.files is None:
            os.close(file)
        else:
            self.files.give(file, self.nbytes)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


class ParcelWriter:
    """Puts bytes end to end into a parcel.

    Args:
        place: where its file is made, if it needs one.
        files: where to get it from instead.
        expected: how many bytes there will be, about.
    """

    def __init__(self, place: Place, files: Files | None = None, expected: int = 0) -> None:
        self._place = place
        self._files = files
        self._expected = expected
        self._start = bytearray()
        self._file: int | None = None
        self._size = 0

    def put(self, data: memoryview | bytes) -> Span:
        """Append a copy of `data`.

        Raises:
            HandoverError: no space is left.
        """
        view = memoryview(data)
        span = Span(self._size, len(view))
        self._size += len(view)
        if self._file is None:
            if self._size <= INLINE_BYTES:
                self._start += view
                return span
            files = self._files
            self._file = self._place.open() if files is None else files.take(self._expected)
            self._write(memoryview(self._start))
        self._write(view)
        return span

    def put_tensor(self, tensor: Tensor) -> Span:
        """Append the elements of `tensor`, from whatever device and layout."""
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return self.put(bytes_of(plain))

    def finish(self) -> Parcel:
        """The parcel; the writer is not used any more."""
        if self._file is None:
            return Parcel(bytes(self._start), None, self._size)
        file, self._file = self._file, None
        if self._files is not None:
            # It may have held more; whoever passes it on takes all that is in it.
            os.ftruncate(file, self._size)
        return Parcel(None, file, self._size)

    def discard(self) -> None:
        """Give up what was written."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, view: memoryview) -> None:
        try:
            while view:
                view = view[os.write(self._file or 0, view) :]
        except OSError as error:
            self.discard()
            raise self._place.error(error) from error


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable; valid while the tensor lives."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    # Through the address, as NumPy lacks some element types and autograd shall not notice.
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def torch_dtype(spec: TensorSpec) -> Any:
    """The element type of `spec` in torch."""
    return getattr(torch, spec.dtype.value)
