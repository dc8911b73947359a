"""Which operations a recording of tensors should hold: what its manifest says, without its index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismreplay.errors import TensorRecordingError
from prismreplay.runtime.operations import Call, Op
from prismtrace.ranks import parse_ranks

__all__ = ["RecordingScope", "is_large"]

_ALL = "all"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class RecordingScope:
    """Operations that were recorded.

    Attributes:
        sandbox: those that concern one of these ranks; None: all.
        most_bytes: no `is_large` ones; None: of any size.
    """

    sandbox: frozenset[int] | None = None
    most_bytes: int | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> RecordingScope:
        """That of a recording with this manifest."""
        whole = manifest.get("choice") == _ALL
        most = manifest.get("most_bytes")
        return cls(
            None if whole else frozenset(parse_ranks(str(manifest.get("sandbox", "")))),
            None if most is None else int(most),
        )

    @classmethod
    def read(cls, folder: Path) -> RecordingScope:
        """That of the recording in a folder.

        Raises:
            TensorRecordingError: there is none, or it is damaged.
        """
        try:
            found = json.loads((folder / _MANIFEST).read_bytes())
        except (OSError, ValueError) as error:
            raise TensorRecordingError(
                f"no recording of tensors: {error}", where=str(folder / _MANIFEST)
            ) from error
        return cls.of(found)

    def covers(self, op: Op) -> bool:
        """True when the recording should hold this operation."""
        if self.most_bytes is not None and is_large(op, self.most_bytes):
            return False
        if self.sandbox is None:
            return True
        if op.call in (Call.SEND, Call.RECV):
            return not self.sandbox.isdisjoint({op.peer, op.group.global_rank})
        return not self.sandbox.isdisjoint(op.group.ranks)


def is_large(op: Op, most_bytes: int) -> bool:
    """True if an operation carries more than so many bytes of real numbers.

    Whole numbers are never large: sizes, tokens and pickled objects decide what a program does.
    """
    return (
        op.payload_bytes > most_bytes
        and op.dtype is not None
        and op.dtype.value.startswith(("float", "bfloat", "complex"))
    )
