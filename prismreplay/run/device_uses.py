"""What a rank that follows its graph itself tells the hub of the process groups that it used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from prismreplay.run.following import Placed
from prismreplay.runtime.operations import Group, Op

__all__ = ["GroupUses"]


class GroupUses:
    """Counts, group by group; see `prismreplay.run.hybrid.GroupUse`.

    Args:
        sandbox: ranks that run.
    """

    def __init__(self, sandbox: Collection[int]) -> None:
        self._sandbox = frozenset(sandbox)
        self._uses: dict[str, _Use] = {}

    def note(self, op: Op, placed: Placed, *, real: bool) -> None:
        """An operation was issued; `real`: the backend performs it."""
        use = self._uses.get(op.group.key)
        if use is None:
            use = self._uses[op.group.key] = _Use(op.group, self._sandbox)
        use.operations += 1
        # With nobody else in it, a group is what it is on the cluster.
        use.real += real or use.is_whole
        use.nbytes += op.payload_bytes
        use.sources[placed.transfer_source or "none"] += 1

    def told(self) -> list[tuple[Any, ...]]:
        """For the hub: each group's key, and the fields of a `GroupUse`."""
        return [
            (
                key,
                use.group.label,
                use.group.desc,
                use.group.ranks,
                use.sandbox,
                use.operations,
                use.real,
                use.nbytes,
                use.sources,
            )
            for key, use in self._uses.items()
        ]


class _Use:
    __slots__ = ("group", "is_whole", "nbytes", "operations", "real", "sandbox", "sources")

    def __init__(self, group: Group, sandbox: frozenset[int]) -> None:
        self.group = group
        self.sandbox = tuple(rank for rank in group.ranks if rank in sandbox)
        self.is_whole = len(self.sandbox) == len(group.ranks)
        self.operations = self.real = self.nbytes = 0
        self.sources: Counter[str] = Counter()
