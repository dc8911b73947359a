"""One data-parallel replica stands for all. No torch in here.

Replicas do the same on other data. Collecting one of them is enough for the graph of all, if
that is so. The groups of the axis that is folded say which ranks are replicas of each other;
the lowest rank of a group represents it. Ranks that are not run take part in collectives with
what their representative contributes.

That replicas are alike is checked, not believed: the last replica runs too and has to do, one
communication after the other, what the first does (only the sizes of all_to_all may differ).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from prismreplay.errors import FoldError
from prismreplay.runtime.axes import axis_of
from prismreplay.runtime.operations import MESSAGES, Call, Op, TensorSpec
from prismtrace.group_names import group_label
from prismtrace.ranks import format_ranks

__all__ = ["Folding", "KnownGroup", "fold"]

_HINT = "collect without --fold"
_EXCHANGES = (Call.ALL_TO_ALL, Call.ALL_TO_ALL_SINGLE)


@dataclass(frozen=True)
class KnownGroup:
    """A process group that the program makes. `ranks` are global, in group order."""

    name: str
    desc: str
    ranks: tuple[int, ...]

    def text(self) -> str:
        """The group in messages."""
        return group_label(self.name, self.desc, self.ranks)


@dataclass(frozen=True)
class Folding:
    """Which ranks run, and for whom. A supplier that refuses what cannot be folded.

    See `prismreplay.collect.supplying.Supplier`.
    """

    axis: str
    world_size: int
    symmetry: Mapping[int, int]
    """Every rank that is not in the graph -> its representative."""
    checked: frozenset[int] = frozenset()
    """Ranks of the last replica, which run to be compared; not in the graph either."""
    groups: tuple[KnownGroup, ...] = ()
    """All groups of the program, also those without ranks that run."""
    varying: dict[str, int] = field(default_factory=lambda: {"all_to_all": 0}, compare=False)
    """How many all_to_all of the two replicas differ in size."""
    _ahead: dict[tuple[int, bool], deque[_Did]] = field(default_factory=dict, compare=False)
    """What one of two replicas has done and the other has not yet."""

    @property
    def representatives(self) -> tuple[int, ...]:
        """Ranks whose rows make up the graph."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.symmetry)

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks that have processes."""
        return tuple(sorted({*self.representatives, *self.checked}))

    @cached_property
    def absent(self) -> dict[int, int]:
        """Ranks without processes -> who contributes in their place."""
        return {rank: like for rank, like in self.symmetry.items() if rank not in self.checked}

    def supply(self, rank: int, op: Op, inputs: Sequence[Any]) -> list[None] | None:  # noqa: ARG002
        """Check an operation of a rank that runs; answer it where only absent ranks could.

        Raises:
            FoldError: data would come from a replica that does not run, or replicas differ.
        """
        self._compare(rank, op)
        absent = self.absent
        if op.call in MESSAGES:
            if op.peer in absent:
                raise self._crossing(rank, op, op.peer)
            return None
        if op.call in _EXCHANGES:
            pair = self._alike(rank, op.group.ranks)
            if pair is not None:
                raise self._crossing(pair[0], op, pair[1])
        if op.call in (Call.BROADCAST, Call.SCATTER) and op.root in absent:
            alike = {self._like(member) for member in op.group.ranks} == {self._like(rank)}
            if not alike or op.call is Call.SCATTER:
                raise self._crossing(rank, op, op.root)
            # All of them are alike, so they have it already.
            return [None] * len(op.outputs)
        return None

    def finish(self) -> None:
        """The program is over.

        Raises:
            FoldError: one replica did more than the other.
        """
        for (like, from_checked), left in self._ahead.items():
            if left:
                other = self._twins[like]
                ahead, behind = (other, like) if from_checked else (like, other)
                raise FoldError(
                    f"rank {ahead} communicates {len(left)} times more than rank {behind}, which "
                    f"should be its replica: first {left[0].text}",
                    hint=_HINT,
                )

    def _alike(self, rank: int, ranks: Sequence[int]) -> tuple[int, int] | None:
        """Two of `ranks` that belong to different replicas, `rank` if it is one of them."""
        seen: dict[int, int] = {self._like(rank): rank}
        for other in ranks:
            first = seen.setdefault(self._like(other), other)
            if first != other:
                return min(first, other), max(first, other)
        return None

    def _like(self, rank: int) -> int:
        return self.symmetry.get(rank, rank)

    @cached_property
    def _twins(self) -> dict[int, int]:
        """Representative -> the rank of the last replica that is compared with it."""
        return {self._like(rank): rank for rank in self.checked}

    def _compare(self, rank: int, op: Op) -> None:
        """Compare with what the other replica did in its place."""
        like = self._like(rank)
        from_checked = rank in self.checked
        if like not in self._twins:
            return
        mine = _Did.of(rank, op, self._like)
        waiting = self._ahead.setdefault((like, not from_checked), deque())
        if not waiting:
            self._ahead.setdefault((like, from_checked), deque()).append(mine)
            return
        other = waiting.popleft()
        if mine.form != other.form:
            first, second = (other, mine) if from_checked else (mine, other)
            raise FoldError(
                f"rank {second.rank} does not do what rank {first.rank} does, which should be "
                f"its replica: {second.text} | {first.text}",
                hint=_HINT,
            )
        if mine.sizes != other.sizes:
            self.varying["all_to_all"] += 1

    def _crossing(self, rank: int, op: Op, other: int | None) -> FoldError:
        site = f" at {op.site}" if op.site else ""
        return FoldError(
            f"{op.call.value} carries data between ranks {rank} and {other}, which belong to "
            "different replicas",
            where=f"group={op.group.called} seq={op.seq}{site}",
            hint=f"replicas along {self.axis} depend on each other (expert parallelism across "
            f"them?): {_HINT}",
        )


@dataclass(frozen=True)
class _Did:
    """A communication, told so that it is equal on replicas."""

    rank: int
    form: tuple[Any, ...]
    sizes: tuple[Any, ...]
    """What may differ: shapes in an all_to_all."""
    text: str

    @classmethod
    def of(cls, rank: int, op: Op, like: Callable[[int], int]) -> _Did:
        """What a rank did; `like` gives the representative of a rank."""
        # Only the root has both sides of these, and it stands in one replica.
        inputs = () if op.call in (Call.BROADCAST, Call.SCATTER) else op.inputs
        outputs = () if op.call in (Call.REDUCE, Call.GATHER) else op.outputs
        exchanged = op.call in _EXCHANGES
        form = (
            op.call,
            op.dtype,
            op.reduce_op,
            tuple(sorted(map(like, op.group.ranks))),
            None if op.peer is None else like(op.peer),
            None if op.root is None else like(op.root),
            () if exchanged else (inputs, outputs),
        )
        return cls(rank, form, (inputs, outputs) if exchanged else (), _text(op))


def _text(op: Op) -> str:
    shapes: list[TensorSpec] = list(op.inputs or op.outputs)
    shown = ", ".join(f"{spec.dtype.value}{list(spec.shape)}" for spec in shapes[:2])
    more = ", …" if len(shapes) > 2 else ""
    site = f" at {op.site}" if op.site else ""
    return f"{op.call.value} of {shown or 'nothing'}{more} in {op.group.called}{site}"


def fold(
    groups: Iterable[KnownGroup], axis: str, world_size: int, *, check: bool = True
) -> Folding:
    """Settle which ranks are replicas of each other.

    Args:
        groups: all groups that the program makes.
        axis: ``dp``, another axis that `axis_of` knows, or a pattern for the name or
            description of groups (``mesh_replicate``).
        world_size: ranks of the job.
        check: run the last replica, too, and compare it with the first.

    Raises:
        FoldError: no group serves that axis, or its replicas are laid out differently.
    """
    known = tuple(dict.fromkeys(groups))
    along = [group for group in known if _serves(group, axis) and len(group.ranks) > 1]
    others = [group for group in known if group not in along and len(group.ranks) > 1]
    inner = [group for group in others if len(group.ranks) < world_size]
    if not along and axis == "dp" and len(others) < 2 and not inner:
        # Plain data parallelism has no groups of its own.
        along = [KnownGroup("world", "", tuple(range(world_size)))]
    if not along:
        shown = ", ".join(dict.fromkeys(group.desc or group.name for group in known)) or "none"
        raise FoldError(
            f"no process group of the program serves the axis {axis}",
            where=f"groups: {shown}",
            hint="give the pattern of the group's name or description: --fold 'mesh_*'",
        )
    like = _representatives(along, world_size)
    last = {first: rank for rank, first in enumerate(like)} if check else {}
    folding = Folding(
        axis=axis,
        world_size=world_size,
        symmetry={rank: other for rank, other in enumerate(like) if rank != other},
        checked=frozenset(rank for first, rank in last.items() if rank != first),
        groups=known,
    )
    _require_same_layout(folding, inner)
    return folding


def _serves(group: KnownGroup, axis: str) -> bool:
    return axis_of(group.name, group.desc) == axis or any(
        text and fnmatchcase(text, axis) for text in (group.name, group.desc)
    )


def _representatives(groups: Sequence[KnownGroup], world_size: int) -> list[int]:
    """The lowest rank that each rank is joined with."""
    like = list(range(world_size))

    def root(rank: int) -> int:
        while like[rank] != rank:
            rank = like[rank]
        return rank

    for group in groups:
        first = min(map(root, group.ranks))
        for rank in group.ranks:
            like[root(rank)] = first
    return [root(rank) for rank in range(world_size)]


def _require_same_layout(folding: Folding, others: Iterable[KnownGroup]) -> None:
    """Groups inside a replica have their like inside the others."""
    symmetry, absent = folding.symmetry, folding.absent
    others = list(others)
    for group in others:
        lone = [rank for rank in group.ranks if rank in absent and absent[rank] not in group.ranks]
        if lone and len(lone) < len(group.ranks):
            raise FoldError(
                f"rank {lone[0]} is in a group with ranks that run, and rank {absent[lone[0]]}, "
                "which would stand for it, is not",
                where=group.text(),
                hint=f"the replicas along {folding.axis} are laid out differently: {_HINT}",
            )
    inside = {
        frozenset(symmetry.get(rank, rank) for rank in group.ranks): group for group in others
    }
    sizes = {frozenset(group.ranks) for group in others}
    for members, group in inside.items():
        if len(members) == len(group.ranks) and members not in sizes:
            raise FoldError(
                f"the ranks {format_ranks(group.ranks)} form a group, and those that would stand "
                f"for them ({format_ranks(tuple(sorted(members)))}) form none",
                where=group.text(),
                hint=f"the replicas along {folding.axis} are laid out differently: {_HINT}",
            )
