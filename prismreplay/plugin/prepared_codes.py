"""Codes of operations, ready to be launched: each with its kernels and their arguments.

A short code travels with the launch, as an argument; a long one lies in memory that the device
reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prismreplay.plugin.advance_code import Code, encode
from prismreplay.plugin.driver_memory import DriverMemory

__all__ = ["CODE_KERNELS", "NOTHING", "Prepared", "PreparedCodes"]

NOTHING = encode((), ())
"""Of an operation that nobody else takes part in."""
_CODE_WORDS = (96, 448)
"""Codes up to so many words travel with the launch."""
CODE_KERNELS = tuple(
    f"{kind}_{size}" for kind in ("advance", "arrive") for size in (*_CODE_WORDS, "far")
)
"""Names of the kernels that codes run on."""
_ROOM_WORDS = 1 << 20


@dataclass(frozen=True)
class Prepared:
    """A code, ready to be launched: kernels, and the addresses of their arguments."""

    advance: int
    arrive: int
    arguments: Any
    keeps: Any


class PreparedCodes:
    """Makes codes ready, each once.

    Args:
        kernels: addresses of CODE_KERNELS.
        memory: that long codes lie in.
        call: address of what a launch is told beside its code.
    """

    def __init__(self, kernels: Mapping[str, int], memory: DriverMemory, call: int) -> None:
        self._kernels, self._memory, self._call = kernels, memory, call
        self._room = _ROOM_WORDS
        self._room_at, self._words = memory.pinned(self._room)
        self._ready: dict[Code, Prepared] = {}
        self.get = self._ready.get
        """The code if it is ready; asked at each launch."""

    def prepare(self, code: Code) -> Prepared:
        """Get a code ready."""
        prepared = self._ready[code] = self._prepared(code)
        return prepared

    def samples(self) -> Iterator[Prepared]:
        """Codes that do nothing, at least one for each kernel."""
        for size in (1, *_CODE_WORDS, _CODE_WORDS[-1] + 1):
            yield self._prepared(Code(np.resize(NOTHING.words, size), (), ()))

    def _prepared(self, code: Code) -> Prepared:
        count = len(code.words)
        size = next((size for size in _CODE_WORDS if count <= size), None)
        keeps: Any
        if size is None:
            keeps, name = ctypes.c_uint64(self._far(code)), "far"
        else:
            keeps, name = (ctypes.c_int64 * size)(*code.words.tolist()), str(size)
        return Prepared(
            advance=self._kernels[f"advance_{name}"],
            arrive=self._kernels[f"arrive_{name}"],
            arguments=(ctypes.c_void_p * 2)(self._call, ctypes.addressof(keeps)),
            keeps=keeps,
        )

    def _far(self, code: Code) -> int:
        """Where the device finds a long code. Memory is taken in large pieces, the first at once:
        while the driver makes some, kernels may not start that others wait for.
        """
        count = len(code.words)
        if self._room < count:
            self._room = max(count, _ROOM_WORDS)
            self._room_at, self._words = self._memory.pinned(self._room)
        begin = len(self._words) - self._room
        self._words[begin : begin + count] = code.words
        self._room -= count
        return self._room_at + 8 * begin
