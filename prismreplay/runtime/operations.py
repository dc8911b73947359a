"""One communication of one rank, as every part of prismreplay sees it. No torch in here.

PyTorch has some twenty entry points for communication (lists or one tensor, coalesced or not,
old and new names). The process group turns each into one of the `Call`s below with flat lists
of input and output tensors, so that roles, executor and recorder know one form only:

========================  ==================================  ================================
call                      inputs of a rank                    outputs of a rank
========================  ==================================  ================================
all_reduce                k tensors                           the same k tensors
broadcast                 k tensors on the root, else none    k tensors
reduce                    k tensors                           k tensors on the root, else none
all_gather                k tensors                           k x N tensors, all of input 0 first
all_gather_single         k tensors                           k tensors, each N times its input
gather                    1 tensor                            N tensors on the root, else none
scatter                   N tensors on the root, else none    1 tensor
reduce_scatter            N tensors                           1 tensor
reduce_scatter_single     k tensors                           k tensors, each 1/N of its input
all_to_all                N tensors                           N tensors
all_to_all_single         1 tensor                            1 tensor, cut along dim 0
barrier                   none                                none
send                      1 tensor                            none
recv                      none                                1 tensor
========================  ==================================  ================================

N is the size of the group; k > 1 where several are coalesced into one operation.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from prismtrace.group_names import group_label
from prismtrace.schema import DType, Kind, ReduceOp

__all__ = ["MESSAGES", "REDUCTIONS", "Call", "Group", "Op", "TensorSpec"]


class Call(StrEnum):
    """Form of a communication; see the table above."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_GATHER = "all_gather"
    ALL_GATHER_SINGLE = "all_gather_single"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE_SCATTER = "reduce_scatter"
    REDUCE_SCATTER_SINGLE = "reduce_scatter_single"
    ALL_TO_ALL = "all_to_all"
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    BARRIER = "barrier"
    SEND = "send"
    RECV = "recv"

    @property
    def kind(self) -> Kind:
        """What the trace calls it."""
        return _KINDS[self]


MESSAGES = (Call.SEND, Call.RECV)
"""Calls between two ranks; all others are collectives."""

REDUCTIONS = frozenset(
    {Call.ALL_REDUCE, Call.REDUCE, Call.REDUCE_SCATTER, Call.REDUCE_SCATTER_SINGLE}
)
"""Calls whose outputs are made of several members' inputs at each place."""

_KINDS = {call: Kind(call.value.removesuffix("_single")) for call in Call}

_AT_A_TIME = {"gloo": 2}
"""Collectives of a group that a backend runs at a time, if more than one: torch gives each gloo
group two threads, which take operations in the order of their numbers."""


@dataclass(slots=True, eq=False)
class Group:
    """A process group as one of its members holds it.

    `name` is what torch calls it; `generation` counts `init_process_group`, after which torch
    starts its names anew. `ranks` are global, in group-rank order; `rank` is this process's
    place in them. `backend` is the one the program asked for. `desc` may be set later.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    backend: str
    generation: int = 0
    desc: str = ""
    key: str = field(init=False, repr=False)
    """Unique in a run: the same on all members. Each operation asks several times."""

    def __post_init__(self) -> None:
        self.key = f"{self.generation}/{self.name}"

    @property
    def label(self) -> str:
        """What a trace calls it."""
        return self.name if self.generation == 0 else f"{self.name} ({self.generation})"

    @property
    def called(self) -> str:
        """What people are told: names that are mere numbers give way to description and ranks."""
        return group_label(self.name, self.desc, self.ranks)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This process's rank in the world."""
        return self.ranks[self.rank]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.elements * self.dtype.itemsize


# Never changed once made. Not frozen: that would cost more than all else about a communication.
@dataclass(slots=True, unsafe_hash=True)
class Op:
    """One communication of one rank. Ranks in it are global; sizes in bytes.

    `seq` numbers collectives within their group, p2p within (group, sender, receiver); it is
    None for a receive from anyone until the sender is known, as is `peer`. `payload_bytes` is
    the payload as nccl-tests counts it. `splits` of all_to_all_single are rows along dim 0,
    empty when even. Operations of one coalesced launch share `batch`. `site` is the program's
    own line that issued it (``train.py:41 in train``), for messages; empty when not asked for.
    `step` is the training step as the graph's recorder counts, where it does.
    """

    call: Call
    group: Group
    seq: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    payload_bytes: int
    dtype: DType | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    reduce_op: ReduceOp | None = None
    premul_factor: float | None = None
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    batch: int | None = None
    site: str = field(default="", compare=False)
    step: int | None = field(default=None, compare=False)

    @property
    def kind(self) -> Kind:
        """What the trace calls it."""
        return self.call.kind

    @property
    def count(self) -> int | None:
        """`seq` as people count: without the tag that stands above the numbers of messages."""
        return None if self.seq is None else self.seq - (self.tag << 32)

    @property
    def queue(self) -> Hashable:
        """Operations of one queue run one after another.

        Messages to or from one partner do, and collectives of a group. Where the backend runs
        several of these at a time, there are as many queues, which take turns.
        """
        if self.call in MESSAGES:
            return self.group.key, self.peer, self.call
        return self.group.key, self.queue_number

    @property
    def queue_number(self) -> int:
        """Which of its group's queues a collective is in; those of a batch are in the first."""
        if self.seq is None or self.batch is not None:
            return 0
        return self.seq % _AT_A_TIME.get(self.group.backend, 1)
