"""Is what a sandbox rank contributes what it contributed when it was recorded?"""

from __future__ import annotations

import pickletools

from prismreplay.collect.handover import Parcel
from prismreplay.errors import TensorRecordingError
from prismreplay.runtime.operations import Call, Op
from prismreplay.tensors.recorded import RecordedTensors
from prismtrace.schema import DType

__all__ = ["require_equal"]


def require_equal(recorded: RecordedTensors, rank: int, op: Op, inputs: Parcel) -> None:
    """Refuse inputs that differ from the recorded ones.

    Of gathered objects, their pickles are compared: behind those lies what happened to be in
    memory.

    Raises:
        TensorRecordingError: names the first input that differs, and the program's line.
    """
    try:
        recorded.require_equal(rank, op, inputs.tensors(op.inputs))
    except TensorRecordingError:
        if not _may_be_object(op):
            raise
        (entry,) = recorded.entries(rank, op.group.key, op.seq or 0)
        if entry.call is not op.call:
            raise
        then = bytes(recorded.read(entry).numpy().tobytes())
        now = bytearray(inputs.nbytes)
        inputs.read_into(memoryview(now), 0)
        pickle = _pickle_in(bytes(now))
        if pickle is None or pickle != _pickle_in(then):
            raise


def _may_be_object(op: Op) -> bool:
    gathers = op.call in (Call.ALL_GATHER, Call.GATHER)
    return gathers and len(op.inputs) == 1 and op.inputs[0].dtype is DType.UINT8


def _pickle_in(data: bytes) -> bytes | None:
    """The pickle at the beginning of some bytes; nothing is executed."""
    try:
        end = next(at for code, _, at in pickletools.genops(data) if code.name == "STOP")
    except (ValueError, IndexError, StopIteration, UnicodeDecodeError):
        return None
    return data[: (end or 0) + 1]
