"""The hub's process: `prismreplay.collect.serving` for sandbox ranks among virtual ones.

Beside what ranks of a collection say, those of a run say:

=============  ===============================================  =====================
name           fields                                           answered by
=============  ===============================================  =====================
enter          ticket, packed operation, bytes or None, when,   (result, on `wait`)
               numbers of answers whose results are copied
real           packed operation                                 -
placed         where the next of these is in the graph          -
virtual        packed operation, as a recording names it;       (value, bytes, size)
               whether the rank asks before it needs it
device         a `DeviceSummary`, how the graph was followed,   -
               which groups were used
step           a `StepMark`                                     -
over           a `RankSummary`                                  -
assist         key and ranks of a group that is made small      -
moved          a `MovedSummary`                                 -
cost           packed operation, whether a small group plays    (value, ns)
=============  ===============================================  =====================

A result says, behind its fields in a collection, when the operation began and when it ends; and, if
how long it takes is not known, when all members were there.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence

from torch.distributed import TCPStore

from prismreplay.collect.handover import Parcel
from prismreplay.collect.logs import RankLogs
from prismreplay.collect.messages import Message, unpack_op
from prismreplay.collect.pool import RankProcess
from prismreplay.collect.questions import Sent
from prismreplay.collect.serving import Service
from prismreplay.run.assistants import Assistant, Assistants
from prismreplay.run.contention import ProcessorCosts
from prismreplay.run.hybrid import HybridCoordinator
from prismreplay.run.ledger import Ledger
from prismreplay.run.marks import DeviceSummary, RankSummary, StepMark
from prismreplay.run.small_groups import MovedSummary
from prismreplay.runtime.operations import Op

__all__ = ["Hub", "serve_store"]

START_NS = 20_000_000
"""Ahead of time, all ranks are told when to begin."""


class Hub(Service):
    """Runs sandbox ranks to their end.

    Args:
        coordinator: knows what to do.
        ranks: their processes, which wait for their first turn.
        logs: their output.
        ledger: what they share.
        progress: as in `Service`.
    """

    def __init__(
        self,
        coordinator: HybridCoordinator,
        ranks: Sequence[RankProcess],
        logs: RankLogs,
        ledger: Ledger,
        progress: Callable[[int, str], None] | None = None,
    ) -> None:
        super().__init__(coordinator, ranks, logs, progress)
        self.marks: list[StepMark] = []
        self.summaries: dict[int, RankSummary] = {}
        self.moved: list[MovedSummary] = []
        self.devices: dict[int, DeviceSummary] = {}
        self._hybrid = coordinator
        self._ledger = ledger
        self._lent: dict[tuple[int, int], Parcel] = {}
        """Results that ranks have not copied yet, by rank and number of the answer."""
        self.costs: ProcessorCosts | None = None
        """What communications take of the ranks' processors; None: nothing."""
        # Looking at a process's memory stops it for milliseconds; ranks say themselves.
        self.memory.look = False

    def employ(self, assistants: Assistants) -> None:
        """Have them play virtual ranks in real groups."""
        self._hybrid.assistants = assistants
        for one in assistants.processes:
            self._selector.register(one.pidfd, selectors.EVENT_READ, (self._lose, one))

    def _lose(self, one: Assistant) -> None:
        raise Assistants.lost(one)

    def begin_at(self) -> int:
        """When all ranks will begin, on the machine's clock; call `run` at once."""
        self._ledger.origin_ns = time.monotonic_ns() + START_NS
        return self._ledger.origin_ns

    def _handle(self, rank: int, message: Message, file: int | None) -> None:
        name = message[0]
        if name == "enter":
            _, ticket, packed, data, issued_ns, taken = message
            for number in taken:
                self._lent.pop((rank, number), None)
            op = unpack_op(packed, self._hybrid.groups_of(rank))
            nbytes = sum(spec.nbytes for spec in op.inputs)
            self._hybrid.enter(rank, ticket, op, Parcel(data, file, nbytes), issued_ns)
        elif name == "real":
            self._hybrid.note_real(rank, unpack_op(message[1], self._hybrid.groups_of(rank)))
        elif name == "placed":
            self._hybrid.note_place(rank, message[1])
        elif name == "virtual":
            _, number, packed, ahead = message
            op = unpack_op(packed, self._hybrid.groups_of(rank))
            parcel = self._hybrid.share_for(rank, op, ahead=ahead)
            answer = ("value", number, parcel.data, parcel.nbytes)
            self._hybrid.outbox.append(Sent(rank, answer, parcel))
        elif name == "device":
            self.devices[rank] = DeviceSummary(*message[1])
            self._hybrid.note_followed(rank, message[2], message[3])
        elif name == "step":
            self.marks.append(StepMark(*message[1]))
        elif name == "over":
            self.summaries[rank] = RankSummary(*message[1])
        elif name == "assist" and self._hybrid.assistants is not None:
            self._hybrid.assistants.join(*message[1:])
        elif name == "cost":
            _, number, packed, plays, _ = message
            op = unpack_op(packed, self._hybrid.groups_of(rank))
            span_ns = 0 if self.costs is None else self.costs.span_ns(op, op.group.size)
            self._hybrid.outbox.append(
                Sent(rank, ("value", number, self._cost_ns(op, plays), span_ns))
            )
        elif name == "moved":
            self.moved.append(MovedSummary(*message[1]))
        else:
            super()._handle(rank, message, file)

    def _deliver(self, sent: Sent) -> None:
        if sent.parcel is not None and sent.parcel.files is not None:
            self._lent[sent.rank, sent.message[1]] = sent.parcel
        super()._deliver(sent)

    def _cost_ns(self, op: Op, plays: bool) -> int:
        if self.costs is None:
            return 0
        cost_ns = self.costs.of(op, op.group.size)
        if plays:
            small = sum(rank in self._hybrid.sandbox for rank in op.group.ranks) + 1
            cost_ns -= self.costs.of(op, small)
        return max(0, cost_ns)


def serve_store() -> tuple[object, int]:
    """A store for real groups of sandbox ranks; keep it until they have ended. With its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, int(store.port)
