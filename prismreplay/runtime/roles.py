"""What a rank's process does with its communications: the one seam between torch and us.

The process group calls a `Role` and a `GraphObserver`; everything above it is PyTorch and the
user's program, everything below it is one of our runs. Roles: `prismreplay.collect.client`
(hand inputs to the coordinator, get results back) and `prismreplay.runtime.recording` (let the
real backend do it). Slices and sandboxes are further roles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prismreplay.runtime.operations import Group, Op

__all__ = ["GraphObserver", "Pending", "Role"]

Tensor = Any
"""A torch.Tensor; torch carries no types that a strict checker accepts."""


class Pending(Protocol):
    """A submitted communication.

    One whose tensors are kept until the program itself waits has two further methods: `release`,
    for a wait after one by future, and `wait_by_future`, as `wait` but without giving them up.
    """

    source: int | None
    """After `wait`: the global rank that a receive from anyone came from."""

    def wait(self) -> None:
        """Block until the outputs are filled in."""

    def done(self) -> bool:
        """True once `wait` would not block. Does not block."""


class Role(Protocol):
    """What becomes of a rank's communications in this run."""

    def join(self, group: Group) -> None:
        """A process group was made that this rank is a member of."""

    def submit(
        self, op: Op, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: Callable[[], Any]
    ) -> Pending:
        """Start a communication; never blocks.

        `inputs` and `outputs` are as in the table of `operations`; outputs are written in place
        by the time `wait` returns. `call` performs it on the real backend with the program's own
        arguments and returns torch's Work; only roles that asked for real groups may call it.
        """

    def make_store(self, namespace: str) -> Any:
        """The key-value store (`torch.distributed.Store`) that rendezvous hands to the program."""

    # A role that launches the operations of a batch together has a method `batch_over(number)`,
    # called once all of them are submitted.

    @property
    def wants_real_groups(self) -> bool:
        """True when `submit` needs `call`: the real backend is then instantiated as well."""


class GraphObserver(Protocol):
    """Turns what a rank does, in the order in which it does it, into nodes of the graph."""

    def joined(self, group: Group) -> None:
        """A process group was made that this rank is a member of."""

    def issued(self, op: Op) -> int:
        """The program issued a communication; returns a token for `waiting` and `waited`."""

    def waiting(self, token: int) -> None:
        """The program is about to wait for it."""

    def waited(self, token: int, source: int | None = None) -> None:
        """The wait is over: what the program does next depends on it. Called once an operation;
        `source` names the sender of a receive from anyone.
        """

    def completed(self, token: int, start_ns: int, end_ns: int) -> None:
        """When it ran, where the role can tell (a real run). Times on the observer's clock."""
