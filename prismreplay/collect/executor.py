"""Performs a communication once all its members' inputs are there.

Moving data is copying bytes; only reductions look at elements (`gloo_order`). A result that
several ranks get is written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from prismreplay.collect.gloo_order import Spread, reduce_in_order
from prismreplay.collect.handover import (
    Files,
    Parcel,
    ParcelWriter,
    Place,
    Span,
    bytes_of,
    torch_dtype,
)
from prismreplay.collect.matching import Request
from prismreplay.collect.supplying import Supplier
from prismreplay.errors import UnsupportedOperationError
from prismreplay.runtime.operations import Call, Op, TensorSpec
from prismtrace.schema import ReduceOp

__all__ = ["Executor", "Result"]

Tensor = Any

Result = tuple[Parcel, list[Span | None]]
"""What a rank gets: bytes, and where in them each of its outputs is (None: stays as it is)."""

_COPY_BYTES = 1 << 22
_NEAR_BYTES = 1 << 26
_WORTH_THREADS_BYTES = 1 << 22


class _Output(ParcelWriter):
    """Where results go. `spread` computes the parts of a reduction."""

    spread: Spread = map


class Executor:
    """Makes results in parcels at `place`, with a supplier's help if there is one.

    With `files` their files are taken from there and go back to it when they are closed: who sends
    them keeps them until all receivers are done. With `threads`, so many reduce beside each other.
    """

    def __init__(
        self,
        place: Place,
        supplier: Supplier | None = None,
        files: Files | None = None,
        threads: int = 1,
    ) -> None:
        self._place = place
        self._supplier = supplier
        self._files = files
        self._near: list[Tensor] = []
        """Memory that inputs are read into, used again and again: fresh pages take their time."""
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """End its threads, if it has any."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _spread(self, nbytes: int) -> Spread:
        if self._threads < 2 or nbytes < _WORTH_THREADS_BYTES:
            return map
        if self._pool is None:
            # Each of them reduces alone: torch's own threads would be too many together.
            self._pool = ThreadPoolExecutor(
                self._threads, "reduce", lambda: torch.set_num_threads(1)
            )
        return self._pool.map

    def supply(self, rank: int, op: Op, inputs: Parcel) -> Result | None:
        """What the supplier gives `rank` for `op`; None: it is to be performed."""
        if self._supplier is None:
            return None
        answer = self._supplier.supply(rank, op, inputs.tensors(op.inputs))
        if answer is None:
            return None
        writer = ParcelWriter(self._place)
        spans = [None if tensor is None else writer.put_tensor(tensor) for tensor in answer]
        return writer.finish(), spans

    def _read(self, members: Sequence[Request]) -> Sequence[Request]:
        """The members, with inputs that are not too many in memory until the next time."""
        files = [one for one in members if one.inputs.file is not None]
        if sum(one.inputs.nbytes for one in files) > _NEAR_BYTES:
            return members
        while len(self._near) < len(files):
            self._near.append(torch.empty(0, dtype=torch.uint8))
        here = {}
        for number, one in enumerate(files):
            nbytes = one.inputs.nbytes
            if self._near[number].numel() < nbytes:
                self._near[number] = torch.empty(nbytes, dtype=torch.uint8)
            memory = self._near[number][:nbytes]
            one.inputs.read_into(bytes_of(memory), 0)
            here[one.rank] = replace(one, inputs=Parcel.holding([memory]))
        return [here.get(one.rank, one) for one in members]

    def perform(self, members: Sequence[Request]) -> list[Result]:
        """The results of a collective, in the order of its members (group order).

        Raises:
            UnsupportedOperationError: torch does not reduce such elements.
            HandoverError: no space is left.
        """
        op = members[0].op
        if op.call is Call.BROADCAST:
            # The root's own bytes serve all.
            root = members[op.group.ranks.index(op.root or 0)]
            return [(root.inputs, list(_spans(root.op.inputs))) for _ in members]
        expected = max(sum(spec.nbytes for spec in specs) for specs in (op.inputs, op.outputs))
        writer = _Output(self._place, self._files, expected)
        writer.spread = self._spread(expected)
        try:
            with torch.no_grad():
                spans = _PERFORM[op.call](self._read(members), writer)
        except (RuntimeError, TypeError) as error:
            writer.discard()
            raise _refused(op, error) from error
        except BaseException:
            writer.discard()
            raise
        parcel = writer.finish()
        parcel.files = self._files
        return [(parcel, list(one)) for one in spans]


def _refused(op: Op, error: Exception) -> UnsupportedOperationError:
    """What to say when torch cannot do it."""
    how = "" if op.reduce_op is None else f" ({op.reduce_op.value})"
    what = "" if op.dtype is None else f" of {op.dtype.value} elements"
    return UnsupportedOperationError(
        f"{op.call.value}{how}{what}: {error}",
        where=op.site or f"group {op.group.called}",
        hint="gloo does not reduce such elements either; communicate them as another type",
    )


Spans = Sequence[Sequence[Span]]


def _spans(specs: Sequence[TensorSpec]) -> list[Span]:
    """Where tensors are in a parcel that holds them end to end."""
    spans, offset = [], 0
    for spec in specs:
        spans.append(Span(offset, spec.nbytes))
        offset += spec.nbytes
    return spans


def _copy(request: Request, span: Span, writer: _Output) -> Span:
    """Append some bytes of a member's inputs."""
    if request.inputs.memory is not None:
        held = request.inputs.view(span.offset, span.nbytes, torch.uint8)
        return writer.put(bytes_of(held))
    start, end = None, span.offset + span.nbytes
    for offset in range(span.offset, end, _COPY_BYTES):
        buffer = memoryview(bytearray(min(_COPY_BYTES, end - offset)))
        request.inputs.read_into(buffer, offset)
        put = writer.put(buffer)
        start = put.offset if start is None else start
    if start is None:
        return writer.put(b"")
    return Span(start, span.nbytes)


def _joined(spans: Sequence[Span]) -> Span:
    """Spans that follow each other, as one."""
    if not spans:
        return Span(0, 0)
    return Span(spans[0].offset, sum(span.nbytes for span in spans))


# --- reductions ------------------------------------------------------------------------


def _reduced(
    members: Sequence[Request], first_byte: int, spec: TensorSpec, writer: _Output
) -> Span:
    """Append the reduction of the tensors that begin at `first_byte` of each member's inputs."""
    op = members[0].op
    dtype, itemsize = torch_dtype(spec), spec.dtype.itemsize

    whole = [
        None if one.inputs.memory is None else one.inputs.view(first_byte, spec.elements, dtype)
        for one in members
    ]

    def read(member: int, start: int, stop: int) -> Tensor:
        there = whole[member]
        if there is not None:
            return there[start:stop]
        offset = first_byte + start * itemsize
        return members[member].inputs.part(offset, (stop - start,), dtype)

    parts = reduce_in_order(
        read,
        spec.elements,
        itemsize,
        len(members),
        op.reduce_op or ReduceOp.SUM,
        op.premul_factor,
        spread=writer.spread,
    )
    return _joined([writer.put_tensor(part) for part in parts])


def _all_reduced(members: Sequence[Request], writer: _Output) -> list[Span]:
    """The reduction of all inputs; of the same type, they are reduced as one, as gloo does."""
    specs = members[0].op.inputs
    if len({spec.dtype for spec in specs}) == 1:
        flat = TensorSpec((sum(spec.elements for spec in specs),), specs[0].dtype)
        start = _reduced(members, 0, flat, writer).offset
        return [Span(start + span.offset, span.nbytes) for span in _spans(specs)]
    places = _spans(specs)
    return [
        _reduced(members, place.offset, spec, writer)
        for place, spec in zip(places, specs, strict=True)
    ]


def _all_reduce(members: Sequence[Request], writer: _Output) -> Spans:
    return [_all_reduced(members, writer)] * len(members)


def _reduce(members: Sequence[Request], writer: _Output) -> Spans:
    spans = _all_reduced(members, writer)
    return [spans if request.rank == request.op.root else [] for request in members]


def _reduce_scatter(members: Sequence[Request], writer: _Output) -> Spans:
    """N tensors a member, the i-th of which is reduced for member i; apart, as gloo does."""
    return [[span] for span in _each_reduced(members, writer)]


def _each_reduced(members: Sequence[Request], writer: _Output) -> list[Span]:
    specs = members[0].op.inputs
    return [
        _reduced(members, place.offset, spec, writer)
        for place, spec in zip(_spans(specs), specs, strict=True)
    ]


def _reduce_scatter_single(members: Sequence[Request], writer: _Output) -> Spans:
    """Each input is reduced whole; member i gets the i-th N-th of it."""
    spans = _each_reduced(members, writer)
    size = len(members)
    return [
        [Span(span.offset + place * (span.nbytes // size), span.nbytes // size) for span in spans]
        for place in range(size)
    ]


# --- moving data -----------------------------------------------------------------------


def _all_gather(members: Sequence[Request], writer: _Output) -> Spans:
    spans = [
        _copy(request, _spans(request.op.inputs)[which], writer)
        for which in range(len(members[0].op.inputs))
        for request in members
    ]
    return [spans] * len(members)


def _all_gather_single(members: Sequence[Request], writer: _Output) -> Spans:
    size = len(members)
    pieces = _all_gather(members, writer)[0]
    joined = [_joined(pieces[start : start + size]) for start in range(0, len(pieces), size)]
    return [joined] * size


def _gather(members: Sequence[Request], writer: _Output) -> Spans:
    spans = [_copy(request, Span(0, request.inputs.nbytes), writer) for request in members]
    return [spans if request.rank == request.op.root else [] for request in members]


def _scatter(members: Sequence[Request], writer: _Output) -> Spans:
    root = next(request for request in members if request.rank == request.op.root)
    return [[_copy(root, span, writer)] for span in _spans(root.op.inputs)]


def _all_to_all(members: Sequence[Request], writer: _Output) -> Spans:
    """N tensors a member; those for one receiver are written end to end."""
    return [
        [_copy(request, _spans(request.op.inputs)[place], writer) for request in members]
        for place in range(len(members))
    ]


def _all_to_all_single(members: Sequence[Request], writer: _Output) -> Spans:
    """One tensor a member, cut along its first dimension."""
    cuts = [_row_spans(request.op, len(members)) for request in members]
    return [
        [
            _joined(
                [
                    _copy(request, cut[place], writer)
                    for request, cut in zip(members, cuts, strict=True)
                ]
            )
        ]
        for place in range(len(members))
    ]


def _row_spans(op: Op, size: int) -> list[Span]:
    spec = op.inputs[0]
    rows = spec.shape[0] if spec.shape else 1
    row_bytes = spec.nbytes // rows if rows else 0
    splits = op.input_splits or (rows // size,) * size
    spans, offset = [], 0
    for count in splits:
        spans.append(Span(offset, count * row_bytes))
        offset += count * row_bytes
    return spans


def _barrier(members: Sequence[Request], writer: _Output) -> Spans:  # noqa: ARG001
    return [[] for _ in members]


_PERFORM: dict[Call, Callable[[Sequence[Request], _Output], Spans]] = {
    Call.ALL_REDUCE: _all_reduce,
    Call.REDUCE: _reduce,
    Call.ALL_GATHER: _all_gather,
    Call.ALL_GATHER_SINGLE: _all_gather_single,
    Call.GATHER: _gather,
    Call.SCATTER: _scatter,
    Call.REDUCE_SCATTER: _reduce_scatter,
    Call.REDUCE_SCATTER_SINGLE: _reduce_scatter_single,
    Call.ALL_TO_ALL: _all_to_all,
    Call.ALL_TO_ALL_SINGLE: _all_to_all_single,
    Call.BARRIER: _barrier,
}
