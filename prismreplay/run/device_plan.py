"""The plan of a run as programs for a device. No torch, no CUDA, no input or output in here.

`VirtualWorld` says when virtual members arrive while the host watches; here the device finds out
by itself. Each operation becomes a `Program`: a few sums and maxima over slots in which earlier
operations have left when they were ready (`prismreplay.run.device_codes`).

    plan = DevicePlan(compiled_plan, rank=0)
    program = plan.program(key, round_, queue=stream_id)       # in the order of launches
    advancer.launch(program, stream)                           # prismreplay.plugin.advancing

Operations that are launched as one (a coalesced send and receive) are one program: `plan.batch`.

Every sandbox rank has a plan of its own and asks nobody: what lies where follows from the compiled
plan alone. Ranks tell each other only when their own operations arrive and are ready.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from prismreplay.plan import OpKey, Plan, PlannedWorld
from prismreplay.plugin.advance_code import Code, Slot
from prismreplay.run.device_codes import AHEAD, PlaceCodes
from prismtrace.group_names import group_labels

__all__ = ["DevicePlan", "Program"]


# Never changed once made. Not frozen: each launch makes one.
@dataclass(slots=True, eq=False)
class Program:
    """What the device does for one operation.

    Attributes:
        code: see `prismreplay.plugin.advance_code`; the same object again when a step is repeated.
        round_: in which repetition of the last step it runs.
        transfer_ns: from when all are there to the end.
        keys: of the operations that are launched as one.
        groups: what messages call their groups, by id.
    """

    code: Code
    round_: int = 0
    transfer_ns: int = 0
    keys: tuple[OpKey, ...] = ()
    groups: Mapping[int, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Names the operation in messages."""
        return " and ".join(map(self._label, self.keys))

    def _label(self, key: OpKey) -> str:
        label = f"group={self.groups.get(key.group, key.group)} seq={key.seq}"
        return label if key.sender < 0 else f"{label} {key.sender}>{key.receiver}"


class DevicePlan:
    """`PlannedWorld` for a device: addressed by the names of operations, for one sandbox rank.

    Not thread-safe: whoever uses it from several threads holds a lock. `layout` gives the sizes of
    the tables; all ranks of a run have the same SHARED one.

    Args:
        plan: of the run.
        rank: the sandbox rank.
        ahead: rounds that operations of one queue may be ahead of those of another.
    """

    def __init__(self, plan: Plan, rank: int, *, ahead: int = AHEAD) -> None:
        self.plan, self.rank = plan, rank
        members: dict[int, list[int]] = {}
        for vertex, member in plan.operations.select("vertex", "rank").iter_rows():
            members.setdefault(vertex, []).append(member)
        self._codes = PlaceCodes(plan.boundary, members, plan.repeat, rank, ahead=ahead)
        self.layout = self._codes.layout
        self._names = PlannedWorld(plan)
        self._groups = group_labels(plan.groups)
        # For messages. A forked process must not touch what polars has.
        self._at: dict[int, list[str]] = {}
        columns = plan.operations.select("vertex", "rank", "kind", "group", "seq")
        for vertex, member, kind, group, seq in columns.iter_rows():
            name = f"rank {member}'s {kind} [group={self._groups.get(group, group)} seq={seq}]"
            self._at.setdefault(vertex, []).append(name)
        self._after: set[OpKey] = set()
        self._round = 0

    def is_boundary(self, key: OpKey, round_: int | None = None) -> bool:
        """Whether virtual ranks take part in this operation."""
        return self._names.is_boundary(key, self.rank, round_)

    def prepare(self) -> list[Code]:
        """Make codes of the graph's operations before they are launched; gives these."""
        return self._codes.prepare(self._names.known_to(self.rank))

    def program(
        self,
        key: OpKey,
        round_: int | None = None,
        *,
        queue: Hashable = None,
        otherwise: tuple[OpKey, int] | None = None,
    ) -> Program:
        """What the device does for an operation; ask in the order of launches.

        Args:
            key: the operation, as `prismreplay.run.following` places it.
            round_: which repetition of the last step; None: the key counts on.
            queue: names the stream: what was asked for it before has ended when this starts.
            otherwise: key and round of what it is if the training goes on, see `Placed`.

        Raises:
            PlanError: the plan does not know it.
        """
        known, round_ = self._names.located(key, self.rank, round_)
        if otherwise is None:
            self._go_on(round_)
            code = self._codes.code(known, round_, queue)
            return Program(code, round_, known.transfer_ns, (key,), self._groups)
        other, later = self._names.located(otherwise[0], self.rank, otherwise[1])
        self._go_on(later)
        code = self._codes.doubtful(
            known, round_, (other, later), first_time=key not in self._after
        )
        self._after.add(key)
        return Program(code, later, known.transfer_ns, (key,), self._groups)

    def batch(self, keys: Sequence[tuple[OpKey, int | None]], *, queue: Hashable = None) -> Program:
        """What the device does for operations that are launched as one, such as a ring's send and
        receive: all arrive at once, and none waits for another's end. Launch it once; it is `ready`
        when the last one ends.

        Args:
            keys: of the operations, each with its round; those of one round.
            queue: as in `program`.

        Raises:
            PlanError: the plan does not know one of them.
        """
        located = [self._names.located(key, self.rank, round_) for key, round_ in keys]
        round_ = max(when for _, when in located)
        self._go_on(round_)
        code = self._codes.batch(located, queue)
        return Program(code, round_, 0, tuple(key for key, _ in keys), self._groups)

    def _go_on(self, round_: int) -> None:
        if round_ > self._round:
            self._round = round_
            self._codes.forget(round_)

    def describe(self, slot: Slot, round_: int) -> str:
        """Whose time a slot holds, for messages about what did not happen."""
        place = self._codes.place_of(slot, round_)
        if place is None:
            return "a time that this rank computes itself"
        again = f", repetition {place[1]} of the last step" if place[1] else ""
        return " and ".join(self._at.get(place[0], ["an operation"])) + again
