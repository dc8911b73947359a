"""What a rank does in one of its groups, call by call: numbered, described, told and handed on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prismreplay.errors import UnsupportedOperationError
from prismreplay.runtime.futures import FutureQueue
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op
from prismreplay.runtime.payloads import calling_line, payload_bytes, reduction, spec_of
from prismreplay.runtime.roles import GraphObserver, Role
from prismreplay.runtime.works import Batch, PrismWork, RealBatch

__all__ = ["CallSequence"]

Tensors = Sequence[Any]

_batch_numbers = itertools.count()


class CallSequence:
    """The communications of one group, in the order in which the program issues them.

    Args:
        group: its name and members, as this rank holds them.
        role: what becomes of communications.
        observer: is told of them, in program order.
        futures: of this process.
    """

    def __init__(
        self, group: Group, role: Role, observer: GraphObserver, futures: FutureQueue
    ) -> None:
        self._group, self._role, self._observer = group, role, observer
        self._futures = futures
        self._collectives = itertools.count()
        self._messages: dict[tuple[Call, int, int], int] = {}
        self.batch: Batch | None = None
        """The one that is open."""
        self._wants_sites = bool(getattr(role, "wants_sites", False))
        self._batch_over: Callable[[int], None] | None = getattr(role, "batch_over", None)

    @property
    def collectives(self) -> int:
        """How many collectives were issued, which is the next one's number."""
        return int(repr(self._collectives).removeprefix("count(").removesuffix(")"))

    def issue(
        self,
        call: Call,
        inputs: Tensors,
        outputs: Tensors,
        perform: Callable[[], Any],
        *,
        peer: int | None = None,
        tag: int = 0,
        root: int | None = None,
        op: Any = None,
        splits: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> PrismWork:
        """Number and describe a communication, tell the observer, hand it to the role.

        Args:
            call: what it is.
            inputs: flat, as the table of `operations` has them.
            outputs: likewise.
            perform: the program's call on the real backend.
            peer: of a message, by its rank in the group; None: anyone.
            tag: of a message.
            root: rank in the group.
            op: torch's reduction.
            splits: of an all-to-all: of outputs, of inputs.
        """
        group = self._group
        shapes_in = tuple([spec_of(tensor) for tensor in inputs])
        shapes_out = (
            shapes_in if inputs is outputs else tuple([spec_of(tensor) for tensor in outputs])
        )
        reduce_op, factor = (None, None) if op is None else reduction(op)
        specs = shapes_in or shapes_out
        described = Op(
            call=call,
            group=group,
            seq=self._number(call, peer, tag),
            inputs=shapes_in,
            outputs=shapes_out,
            payload_bytes=payload_bytes(call, group.size, shapes_in, shapes_out),
            dtype=specs[0].dtype if specs else None,
            root=None if root is None else group.ranks[root],
            peer=None if peer is None else group.ranks[peer],
            tag=tag,
            reduce_op=reduce_op,
            premul_factor=factor,
            input_splits=tuple(splits[1]),
            output_splits=tuple(splits[0]),
            batch=None if self.batch is None else self.batch.number,
            site=calling_line() if self._wants_sites else "",
        )
        token = self._observer.issued(described)
        pending = self._role.submit(described, inputs, outputs, perform)
        work = PrismWork(
            described, pending, token, self._observer, outputs, self._futures, self.batch
        )
        if self.batch is not None:
            self.batch.works.append(work)
        return work

    @contextmanager
    def batched(self, real: RealBatch | None) -> Iterator[Batch]:
        """Operations issued inside are one launch; `real`: on the real backend, too."""
        if self.batch is not None:
            raise UnsupportedOperationError(
                "a coalesced launch within another one", where=f"group={self._group.called}"
            )
        batch = self.batch = Batch(next(_batch_numbers), real)
        try:
            yield batch
            if self._batch_over is not None:
                self._batch_over(batch.number)
        finally:
            self.batch, batch.open = None, False
            for work in batch.works:
                work.leave_batch()

    def _number(self, call: Call, peer: int | None, tag: int) -> int | None:
        if call not in MESSAGES:
            return next(self._collectives)
        if peer is None:
            return None
        pair = (call, peer, tag)
        count = self._messages.get(pair, 0)
        self._messages[pair] = count + 1
        # Messages with different tags may overtake each other: each tag has numbers of its own.
        return (tag << 32) + count
