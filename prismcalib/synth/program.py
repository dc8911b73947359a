"""What every rank of a pipeline stage does in one step, as data.

All ranks of a stage run the same program, so it is written down once and repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prismcalib.graph import Int32Array, Int64Array
from prismcalib.synth.layout import Channel
from prismcalib.synth.spec import JobSpec

__all__ = ["NODE_COLUMNS", "Program", "Stream", "stream_names"]

NODE_COLUMNS = (
    "kind",
    "name",
    "stream",
    "batch",
    "microbatch",
    "chunk",
    "phase",
    "bytes",
    "dtype",
    "reduce_op",
    "mem_bytes",
    "mem_peak_bytes",
)
"""Node columns that are the same on all ranks of a stage and in all steps."""


class Stream(IntEnum):
    """Where operations run.

    Every direction between stages has a stream of its own, so that sender and receiver have
    the same order; coalesced messages share one for each neighbour.
    """

    COMPUTE = 0
    TP = 1
    EP = 2
    DP = 3
    SEND_FORWARD = 4
    RECV_FORWARD = 5
    SEND_BACKWARD = 6
    RECV_BACKWARD = 7

    def coalesced(self) -> int:
        """The stream of the neighbour that this one leads to."""
        if self in (Stream.SEND_FORWARD, Stream.RECV_BACKWARD):
            return 4
        return 5 if self in (Stream.RECV_FORWARD, Stream.SEND_BACKWARD) else self


def stream_names(spec: JobSpec) -> dict[int, str]:
    """Stream -> name, for the header."""
    names = {stream.value: stream.name.lower().replace("_", " ") for stream in Stream}
    if spec.coalesced_p2p:
        return {**dict(list(names.items())[:4]), 4: "next stage", 5: "previous stage"}
    return names


@dataclass(frozen=True, eq=False)
class Program:
    """T operations of one step of one rank, equal for all ranks of a stage.

    Attributes:
        stage: pipeline stage.
        columns: `NODE_COLUMNS`, lists of T values.
        mean_ns: float64[T], mean duration; of a communication its mean transfer.
        channels: the channels the stage uses, and how often in a step.
        counts: int64[channels], operations in a step.
        channel: int16[T], position in `channels`; -1 of a computation.
        seq: int64[T], number within the channel in this step; 0 of a computation.
        peer_stage: int64[T], stage of the other side of send and recv, else -1.
        load: int32[T], which of the `loads` expert loads of a step scales the operation; -1.
        dep_offsets, dep_distance: int32[T + 1] and int32[e], deps within the step as CSR; the
            first operation has none.
        tails: int32[k], how far before the first operation of the next step the last operation
            of each stream lies; that operation waits for all of them.
    """

    stage: int
    columns: dict[str, list[Any]]
    mean_ns: NDArray[np.float64]
    channels: tuple[Channel, ...]
    counts: Int64Array
    channel: NDArray[np.int16]
    seq: Int64Array
    peer_stage: Int64Array
    load: Int32Array
    loads: int
    dep_offsets: Int32Array
    dep_distance: Int32Array
    tails: Int32Array

    @property
    def rows(self) -> int:
        """Operations T in a step."""
        return len(self.mean_ns)
