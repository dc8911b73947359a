"""A supplier that knows from a recording what the other ranks contributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prismreplay.collect.executor import Executor
from prismreplay.collect.handover import Parcel, ParcelWriter, Place, torch_dtype
from prismreplay.collect.matching import Instance, Request
from prismreplay.errors import TensorRecordingError
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismreplay.tensors.prefetching import Contribution, Prefetcher, Wanted
from prismreplay.tensors.recorded import RecordedTensor, RecordedTensors
from prismreplay.tensors.scope import RecordingScope
from prismtrace.schema import DType

__all__ = ["RecordingSupplier"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""

_ROOT_GIVES = (Call.BROADCAST, Call.SCATTER)


class RecordingSupplier:
    """Performs operations with the rank's own inputs and the recorded ones of its partners.

    See `prismreplay.collect.supplying.Supplier`. Reductions are done in the order of the real
    backend: with the same program the results are those of the recorded run, bit for bit. Where
    only operations of a sandbox were recorded, others are performed for real.
    """

    def __init__(self, recorded: RecordedTensors) -> None:
        self.recorded = recorded
        self.ahead: Prefetcher | None = None
        """Reads ahead, if somebody has it do so."""
        self._place = Place()
        self._executor = Executor(self._place)
        self._scope = RecordingScope.of(recorded.manifest)

    def supply(self, rank: int, op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """See `prismreplay.collect.supplying.Supplier.supply`."""
        if op.seq is None or not self.covers(op):
            return None
        self.recorded.require_job(
            world_size=self.recorded.world_size, groups={op.group.key: op.group.ranks}
        )
        if op.call in (Call.SEND, Call.BARRIER):
            return []
        if op.call is Call.RECV:
            return self.sent(rank, op).tensors(op.outputs)
        members = [self._request(member, rank, op, inputs) for member in op.group.ranks]
        instance = Instance(0, op.group.ranks, dict(zip(op.group.ranks, members, strict=True)))
        for member in members:
            member.instance = instance
        parcel, spans = self._executor.perform(members)[op.group.ranks.index(rank)]
        return [
            parcel.part(span.offset if span else 0, spec.shape, torch_dtype(spec))
            for span, spec in zip(spans, op.outputs, strict=True)
        ]

    def covers(self, op: Op) -> bool:
        """True when the recording should hold this operation."""
        return self._scope.covers(op)

    def _request(self, member: int, rank: int, op: Op, inputs: Sequence[Tensor]) -> Request:
        """What a member of the operation contributes, as the executor wants it."""
        if member != rank:
            return self.contribution(member, rank, op)
        own = replace(op, group=replace(op.group, rank=op.group.ranks.index(member)))
        return Request(rank, 0, own, _parcel(inputs, self._place), Instance(0, ()))

    def contribution(self, member: int, rank: int, op: Op) -> Request:
        """What another member contributed to a collective, as the executor wants it.

        Args:
            member: global rank, not the one that issues the operation.
            rank: that issues it.
            op: as that rank sees it.

        Raises:
            TensorRecordingError: it is not recorded, or does not fit the operation.
        """
        own = replace(op, group=replace(op.group, rank=op.group.ranks.index(member)))
        instance = Instance(0, ())
        if op.call is Call.BARRIER or (op.call in _ROOT_GIVES and member != op.root):
            return Request(member, 0, replace(own, inputs=()), Parcel(b"", None, 0), instance)
        found, parcel = self._given(Wanted(member, op.group.key, op.seq or 0))
        if found[0].call is not op.call:
            raise self._unlike(rank, op, member, found)
        specs = tuple(entry.spec for entry in found)
        self._require_fit(rank, op, member, found)
        padded = _padded_spec(op, op.group.ranks.index(member), specs)
        if padded is not None:
            parcel, specs = _repacked(parcel, padded, self._place), (padded,)
        own = replace(own, inputs=specs, input_splits=found[0].splits)
        return Request(member, 0, own, parcel, instance)

    def sent(self, rank: int, op: Op) -> Parcel:
        """What the sender of a receive sent, as bytes.

        Raises:
            TensorRecordingError: it is not recorded, or does not fit.
        """
        sender = op.peer
        if sender is None or op.seq is None:
            raise AssertionError("a receive from anyone is not supplied")
        found, parcel = self._given(Wanted(sender, op.group.key, op.seq, rank))
        if [entry.spec.nbytes for entry in found] != [spec.nbytes for spec in op.outputs]:
            raise self._unlike(rank, op, sender, found)
        return parcel

    def load(self, wanted: Wanted) -> Contribution:
        """Read a contribution.

        Raises:
            TensorRecordingError: it is not recorded, or damaged.
        """
        rank, group, seq, receiver = wanted
        if receiver is None:
            found = self.recorded.entries(rank, group, seq)
        else:
            found = self.recorded.sent_entries(group, rank, receiver, seq)
        tensors = [self.recorded.read(entry) for entry in found]
        if receiver is not None or found[0].call is Call.BROADCAST:
            # Ranks get it as it is.
            return Contribution(found, _parcel(tensors, self._place))
        return Contribution(found, Parcel.holding(tensors))

    def _given(self, wanted: Wanted) -> Contribution:
        return self.load(wanted) if self.ahead is None else self.ahead.take(wanted)

    def _require_fit(self, rank: int, op: Op, member: int, found: Sequence[RecordedTensor]) -> None:
        """Refuse what the executor could not combine with the rank's own inputs."""
        if op.call in (Call.ALL_REDUCE, Call.REDUCE, Call.REDUCE_SCATTER_SINGLE) and (
            [entry.spec.elements for entry in found] != [spec.elements for spec in op.inputs]
        ):
            raise self._unlike(rank, op, member, found)
        if op.call is Call.ALL_TO_ALL_SINGLE:
            me, them = op.group.ranks.index(rank), op.group.ranks.index(member)
            rows = found[0].spec.shape[0] // op.group.size
            sent = found[0].splits[me] if found[0].splits else rows
            expected = (
                op.output_splits[them]
                if op.output_splits
                else op.outputs[0].shape[0] // op.group.size
            )
            if sent != expected:
                raise self._unlike(rank, op, member, found)

    def _unlike(
        self, rank: int, op: Op, member: int, found: Sequence[RecordedTensor]
    ) -> TensorRecordingError:
        shapes = ", ".join(f"{entry.spec.dtype.value}{list(entry.spec.shape)}" for entry in found)
        return TensorRecordingError(
            f"rank {member} contributed {found[0].call.value} of {shapes} when it was recorded, "
            f"which does not fit the {op.call.value} of rank {rank}",
            where=f"{self.recorded.folder}, group={op.group.called} seq={op.seq}"
            + (f" at {op.site}" if op.site else ""),
            hint="the recording is of another program, version or setting: record it again",
        )


def _padded_spec(op: Op, place: int, specs: Sequence[TensorSpec]) -> TensorSpec | None:
    """What a member's bytes have to be padded to, or None.

    Pickled objects are gathered as bytes, padded to the largest; which that is may change with
    what the sandbox ranks' objects hold.
    """
    if len(specs) != 1 or specs[0].dtype is not DType.UINT8 or not op.inputs:
        return None
    if op.call is Call.ALL_GATHER and op.outputs:
        wanted = op.outputs[place]
    elif op.call in (Call.ALL_GATHER_SINGLE, Call.GATHER):
        wanted = op.inputs[0]
    else:
        return None
    return None if wanted.elements == specs[0].elements else wanted


def _repacked(parcel: Parcel, spec: TensorSpec, place: Place) -> Parcel:
    data = bytearray(parcel.nbytes)
    parcel.read_into(memoryview(data), 0)
    writer = ParcelWriter(place)
    writer.put(bytes(data[: spec.nbytes]).ljust(spec.nbytes, b"\0"))
    return writer.finish()


def _parcel(tensors: Sequence[Tensor], place: Place) -> Parcel:
    writer = ParcelWriter(place)
    for tensor in tensors:
        writer.put_tensor(tensor)
    return writer.finish()
