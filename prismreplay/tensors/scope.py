"""What the manifest of a recording says, without its index: which operations it should hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prismreplay.errors import TensorRecordingError
from prismreplay.runtime.operations import MESSAGES, Op
from prismtrace.errors import InputFileError
from prismtrace.input_files import require_readable
from prismtrace.ranks import parse_ranks

__all__ = ["AGAIN", "FORMAT", "MANIFEST", "RecordingScope", "is_large", "read_manifest"]

FORMAT = "prismreplay-tensors/1"
MANIFEST = "manifest.json"
AGAIN = "record the tensors again: prismreplay collect --record-tensors"
_ALL = "all"


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
        return cls.of(read_manifest(folder))

    def covers(self, op: Op) -> bool:
        """True when the recording should hold this operation."""
        if self.most_bytes is not None and is_large(op, self.most_bytes):
            return False
        if self.sandbox is None:
            return True
        if op.call in MESSAGES:
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a recording says of itself.

    Raises:
        TensorRecordingError: there is none, it is damaged, or another version wrote it.
    """
    path = folder / MANIFEST
    where = str(path)
    try:
        require_readable(path)
        found = json.loads(path.read_bytes())
    except InputFileError as error:
        raise TensorRecordingError(
            f"no recording of tensors: {error.message}",
            where=where,
            hint="name the folder that collect --record-tensors wrote (OUTPUT.tensors)",
        ) from error
    except (OSError, RecursionError, ValueError) as error:
        raise TensorRecordingError("damaged: not JSON", where=where, hint=AGAIN) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        shown = found.get("format") if isinstance(found, dict) else found
        raise TensorRecordingError(
            f"not a recording that this version reads: {shown!r:.80} instead of {FORMAT!r}",
            where=where,
            hint=AGAIN,
        )
    try:
        int(found["world_size"])
        int(found.get("parts", 0))
        for ranks in [*found["groups"].values(), str(found.get("sandbox", ""))]:
            parse_ranks(ranks)
        RecordingScope.of(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TensorRecordingError(f"damaged: {error}", where=where, hint=AGAIN) from error
    result: dict[str, Any] = found
    return result
