"""What the ranks that do not run contribute to communications with those that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prismreplay.collect.handover import Parcel, ParcelWriter, Place, Span
from prismreplay.collect.matching import Instance, Request
from prismreplay.collect.supplying import Supplier
from prismreplay.errors import TensorRulesError
from prismreplay.run.needs import needed
from prismreplay.runtime.operations import Call, Op
from prismreplay.tensors.by_recording import RecordingSupplier
from prismreplay.tensors.prefetching import Prefetcher, PrefetchReport
from prismtrace.trace import Trace

__all__ = ["Source", "VirtualMembers"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

Source = Supplier
"""Rules, or a recording, in the order in which they are asked."""

Result = tuple[Parcel, Sequence[Span | None]]


class VirtualMembers:
    """Asks rules and recordings, in order, for what operations with virtual members need.

    A rule gives a sandbox rank its result at once. A recording gives what each virtual member
    contributed; together with what the sandbox ranks contribute now, the executor makes the result
    in the order of the real backend.

    Args:
        sources: rules and recordings; the first that answers counts.
        place: where bytes are kept.
    """

    def __init__(self, sources: Sequence[Source], place: Place) -> None:
        self._sources = tuple(sources)
        self._place = place
        self._prefetchers: list[Prefetcher] = []

    @property
    def recordings(self) -> list[RecordingSupplier]:
        """Those among the sources."""
        return [one for one in self._sources if isinstance(one, RecordingSupplier)]

    def read_ahead(self, graph: Trace, sandbox: Sequence[int], most_bytes: int) -> None:
        """Begin to read what the operations of sandbox ranks need, in the graph's order."""
        for recording in self.recordings:
            needs = needed(graph, sandbox, recording)
            recording.ahead = Prefetcher(recording.load, needs.once, most_bytes, needs.again)
            self._prefetchers.append(recording.ahead)
            recording.ahead.start()

    def close(self) -> PrefetchReport:
        """Read no more; says how it went."""
        reports = [one.stop() for one in self._prefetchers]
        return PrefetchReport(
            hits=sum(one.hits for one in reports),
            misses=sum(one.misses for one in reports),
            evicted=sum(one.evicted for one in reports),
            read_bytes=sum(one.read_bytes for one in reports),
            peak_bytes=sum(one.peak_bytes for one in reports),
        )

    def supplied(self, rank: int, op: Op, inputs: Parcel) -> Result | None:
        """What rules give a rank, if one does before a recording knows the operation.

        Raises:
            TensorRulesError: they contradict each other or make no such tensor.
        """
        tensors: list[Tensor] | None = None
        for source in self._sources:
            if isinstance(source, RecordingSupplier):
                if source.covers(op):
                    return None
                continue
            if tensors is None:
                tensors = inputs.tensors(op.inputs)
            answer = source.supply(rank, op, tensors)
            if answer is not None:
                writer = ParcelWriter(self._place)
                spans = [None if one is None else writer.put_tensor(one) for one in answer]
                return writer.finish(), spans
        return None

    def contribution(self, member: int, rank: int, op: Op) -> Request:
        """What a virtual member gives to a collective that sandbox rank `rank` issued as `op`.

        Raises:
            TensorRulesError: nothing says what.
            TensorRecordingError: the recording does not fit.
        """
        if op.call is Call.BARRIER:
            return Request(member, 0, replace(op, inputs=()), _nothing(), Instance(0, ()))
        return self._recording(op).contribution(member, rank, op)

    def message(self, rank: int, op: Op) -> Result:
        """What a virtual rank sends; `op` is the receive of sandbox rank `rank`.

        Raises:
            TensorRulesError: nothing says what.
            TensorRecordingError: the recording does not fit.
        """
        parcel = self._recording(op).sent(rank, op)
        return parcel, [Span(0, parcel.nbytes)]

    def _recording(self, op: Op) -> RecordingSupplier:
        for source in self._sources:
            if isinstance(source, RecordingSupplier) and source.covers(op):
                return source
        ranks = "virtual ranks" if op.peer is None else f"rank {op.peer}"
        raise TensorRulesError(
            f"nothing says what {ranks} contribute to {op.call.value}",
            where=f"group={op.group.called} seq={op.seq}" + (f" at {op.site}" if op.site else ""),
            hint="record the tensors (collect --record-tensors all; where only some ranks ever run "
            "for real, sandbox-facing --sandbox RANKS is enough) or give rules: --tensors",
        )


def _nothing() -> Parcel:
    return Parcel(b"", None, 0)
