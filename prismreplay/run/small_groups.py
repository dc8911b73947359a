"""A sandbox rank's end of small groups, in which an assistant plays the virtual members."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from prismreplay.run.assistants import name_of, operation_tag, participant
from prismreplay.run.compensation import difference, finished
from prismreplay.run.ledger import Arrival, Ledger
from prismreplay.run.real_group import gloo_group
from prismreplay.run.reduced import Buffers, is_reducible, members_of, perform, steps_of
from prismreplay.runtime.operations import MESSAGES, Call, Group, Op
from prismtrace.schema import ReduceOp

__all__ = ["MovedSummary", "SmallGroups", "SmallWork"]

Tensor = Any


class MovedSummary(NamedTuple):
    """What a rank measured in a group with an assistant. Times in ns; medians, and the largest.

    `transfer_ns` is from when the last of the small group was there until it was over;
    `late_ns` by how much the assistant was later than its time and the last sandbox member.
    Of a checking run: all_reduces whose result was `compared` with the exact one, and the largest
    difference, as a multiple of what the type can tell apart at the result's largest element.
    """

    key: str
    operations: int
    transfer_ns: int
    most_transfer_ns: int
    late_ns: int
    most_late_ns: int
    compared: int = 0
    largest_difference: float = 0.0


class SmallGroups:
    """The small groups of one rank.

    Args:
        rank: this one.
        sandbox: ranks that run.
        assistants: how many there are; 0: no group is a small one.
        ledger: what the processes of the run share.
        check: assistants add what makes the small groups' all_reduces give the exact result.
    """

    def __init__(
        self,
        rank: int,
        sandbox: frozenset[int],
        assistants: int,
        ledger: Ledger,
        *,
        check: bool = False,
    ) -> None:
        self._rank = rank
        self._sandbox = sandbox
        self._assistants = tuple(map(participant, range(assistants)))
        self._ledger = ledger
        self._groups: dict[str, Any] = {}
        self._found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._check = check
        self._differences: dict[str, list[float]] = defaultdict(list)

    def wants(self, group: Group) -> bool:
        """Whether an assistant takes part in this group."""
        return bool(self._assistants) and not self._sandbox.issuperset(group.ranks)

    def make(self, group: Group) -> None:
        """Make the small group; the assistant knows that it has to."""
        members = members_of(group.ranks, self._sandbox)
        place, size = members.index(self._rank), len(members) + 1
        name = f"reduced/{group.key}"
        self._groups[group.key] = gloo_group(name, place, size, self._ledger.store_port)

    def announce(self, op: Op, debt_ns: int) -> None:
        """The rank will start an operation; the hub looks at its debt once it hears of it."""
        if op.group.key in self._groups and is_reducible(op, self._sandbox):
            name = name_of(op, self._rank)
            self._ledger.arrive(self._rank, name, Arrival(time.monotonic_ns(), debt_ns))

    def start(
        self, op: Op, ticket: int, outputs: Sequence[Tensor], debt_ns: int
    ) -> SmallWork | None:
        """Start an operation in its small group; None: it has none.

        Args:
            op: as the rank issued it; its inputs are with the hub already.
            ticket: the rank's number for it.
            outputs: are overwritten, and get their contents from the hub later.
            debt_ns: of the rank.
        """
        made = self._groups.get(op.group.key)
        if made is None or not is_reducible(op, self._sandbox):
            return None
        members = members_of(op.group.ranks, self._sandbox)
        if self._check and op.call is Call.ALL_REDUCE:
            outputs = [one.detach().contiguous() for one in outputs]
            for one in outputs if op.premul_factor is not None else ():
                one.mul_(op.premul_factor)
        name = name_of(op, self._rank)
        self._ledger.arrive(self._rank, name, Arrival(time.monotonic_ns(), debt_ns))
        place, tag = members.index(self._rank), operation_tag(op, ticket)
        works = perform(steps_of(op, members, self._rank), made, place, tag, Buffers(outputs))
        return SmallWork(self, op, name, works)

    def measure(self, op: Op, name: str, ended_ns: int) -> int | None:
        """How long an operation took once all of the small group were there; None: unknown."""
        mine = [self._rank] if op.call in MESSAGES else members_of(op.group.ranks, self._sandbox)
        arrived = self._ledger.arrivals(mine, name)
        played = self._ledger.arrivals(self._assistants, name)
        if len(arrived) < len(mine) or not played:
            return None  # overwritten by later operations
        last_ns, assistant = max(one.machine_ns for one in arrived), played[0]
        took = max(1, ended_ns - max(last_ns, assistant.machine_ns))
        due_ns = max(last_ns, assistant.machine_ns - assistant.debt_ns)
        self._found[op.group.key].append((took, max(0, assistant.machine_ns - due_ns)))
        return took

    def compare(self, op: Op, own: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
        """Keep by how much all_reduces of the small group differ from those of the large one."""
        if op.call is not Call.ALL_REDUCE:
            return
        for here, there in zip(own, exact, strict=True):
            found = finished(here, op.reduce_op or ReduceOp.SUM, op.group.size)
            self._differences[op.group.key].append(difference(found, there))

    def summaries(self) -> list[MovedSummary]:
        """What was measured."""
        return [
            MovedSummary(
                key,
                len(found),
                round(statistics.median(took for took, _ in found)),
                max(took for took, _ in found),
                round(statistics.median(late for _, late in found)),
                max(late for _, late in found),
                len(self._differences[key]),
                max(self._differences[key], default=0.0),
            )
            for key, found in self._found.items()
        ]


class SmallWork:
    """An operation under way in a small group."""

    def __init__(
        self, groups: SmallGroups, op: Op, name: str, works: Sequence[tuple[Any, Any]]
    ) -> None:
        self._groups = groups
        self._op = op
        self._name = name
        self._works = works
        self._ended_ns = 0
        if op.call not in MESSAGES:
            for work, _ in works:
                # gloo's messages have none; of these, the end is when the wait returns.
                with suppress(RuntimeError, AttributeError):
                    work.get_future().add_done_callback(self._note_end)

    def wait(self) -> int | None:
        """Block until it is over; its transfer in ns, if it is known."""
        for work, _ in self._works:
            work.wait()
        if not self._ended_ns:
            self._note_end()
        return self._groups.measure(self._op, self._name, self._ended_ns)

    def compare(self, exact: Sequence[Tensor]) -> None:
        """In a checking run, after `wait`: see how good the small group's result is.

        Args:
            exact: the operation's results, flat.
        """
        self._groups.compare(self._op, [data for _, data in self._works], exact)

    def done(self) -> bool:
        """True once `wait` would not block."""
        return all(work.is_completed() for work, _ in self._works)

    def _note_end(self, _future: Any = None) -> None:
        self._ended_ns = time.monotonic_ns()
