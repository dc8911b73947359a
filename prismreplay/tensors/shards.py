"""Safetensors files written tensor by tensor, and read one tensor at a time.

A safetensors file begins with a JSON header that says where every tensor lies. Room for it is
left free at the start (the format allows blanks behind the JSON), so that tensors go to disk as
they come and memory holds none of them. Any safetensors reader opens the result.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from prismreplay.collect.handover import bytes_of
from prismreplay.runtime.operations import TensorSpec
from prismtrace.output import output_error
from prismtrace.schema import DType

__all__ = ["HEADER_BYTES", "ShardWriter", "stored_dtype"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

HEADER_BYTES = 1 << 20
"""Room for the header: some 6,000 tensors."""
_LENGTH_BYTES = 8
_ALIGNMENT = 16
_STORED = {
    DType.FLOAT64: "F64",
    DType.FLOAT32: "F32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.FLOAT8_E4M3FN: "F8_E4M3",
    DType.FLOAT8_E5M2: "F8_E5M2",
    DType.INT64: "I64",
    DType.INT32: "I32",
    DType.INT16: "I16",
    DType.INT8: "I8",
    DType.UINT64: "U64",
    DType.UINT32: "U32",
    DType.UINT16: "U16",
    DType.UINT8: "U8",
    DType.BOOL: "BOOL",
}


def stored_dtype(dtype: DType) -> str:
    """How a shard names an element type; those that the format lacks are stored as bytes."""
    return _STORED.get(dtype, "U8")


class ShardWriter:
    """Writes one shard; it has its name only once it is whole."""

    def __init__(self, path: Path) -> None:
        """Begin a shard.

        Raises:
            OutputError: the folder takes no file.
        """
        self.path = path
        self.nbytes = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._entries: dict[str, dict[str, Any]] = {}
        self._header_size = len("{}")
        try:
            self._file = self._temporary.open("wb")
            self._file.seek(_LENGTH_BYTES + HEADER_BYTES)
        except OSError as error:
            raise output_error(path, error.errno or 0) from error

    def fits(self, key: str, spec: TensorSpec) -> bool:
        """True while the header has room for one more tensor, and for the gap before it."""
        own = len(self._entry_text(key, self._entry(spec))) + len(self._gap_text())
        return self._header_size + own + _ALIGNMENT <= HEADER_BYTES

    def add(self, key: str, tensor: Tensor, spec: TensorSpec) -> None:
        """Append a contiguous CPU tensor.

        Raises:
            OutputError: the disk is full.
        """
        try:
            gap = -self.nbytes % _ALIGNMENT
            if gap:
                # The format wants no holes: a tensor of its own fills the gap.
                self._place(f"gap-{len(self._entries)}", "U8", [gap], gap)
                self._file.write(bytes(gap))
            entry = self._entry(spec)
            self._place(key, entry["dtype"], entry["shape"], spec.nbytes)
            self._file.write(bytes_of(tensor))
        except OSError as error:
            raise output_error(self.path, error.errno or 0) from error

    def close(self) -> None:
        """Write the header and give the shard its name.

        Raises:
            OutputError: the disk is full.
        """
        header = json.dumps(self._entries, separators=(",", ":")).encode().ljust(HEADER_BYTES)
        try:
            self._file.seek(0)
            self._file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
            self._file.write(header)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
        except OSError as error:
            raise output_error(self.path, error.errno or 0) from error

    def discard(self) -> None:
        """Give the shard up."""
        with suppress(OSError):  # what is still to be written has no space
            self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _entry(self, spec: TensorSpec) -> dict[str, Any]:
        name = stored_dtype(spec.dtype)
        shape = [spec.nbytes] if spec.dtype not in _STORED else list(spec.shape)
        return {"dtype": name, "shape": shape, "data_offsets": [10**15, 10**15]}

    def _entry_text(self, key: str, entry: dict[str, Any]) -> str:
        return json.dumps({key: entry}, separators=(",", ":"))

    def _gap_text(self) -> str:
        entry = {"dtype": "U8", "shape": [_ALIGNMENT], "data_offsets": [10**15, 10**15]}
        return self._entry_text(f"gap-{10**9}", entry)

    def _place(self, key: str, dtype: str, shape: list[int], nbytes: int) -> None:
        entry = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [self.nbytes, self.nbytes + nbytes],
        }
        self._entries[key] = entry
        self._header_size += len(self._entry_text(key, entry))
        self.nbytes += nbytes
