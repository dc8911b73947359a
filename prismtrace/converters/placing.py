"""Give each communication its process group, its partner and its payload.

What one rank recorded is looked at alone; other ranks come into play in `matching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prismtrace.converters.groups import GroupBook, GroupKey
from prismtrace.converters.kineto.carried import CommOp
from prismtrace.converters.sequences import Ints
from prismtrace.errors import GroupError
from prismtrace.schema import ROOTED_KINDS

__all__ = ["Assignment", "RankComms", "assign_groups"]


@dataclass(frozen=True)
class RankComms:
    """The communications of one rank in issue order; parallel sequences."""

    rank: int
    index: Ints
    comm: Sequence[CommOp]
    start_ns: Ints
    end_ns: Ints
    seq: Sequence[int | None]
    comms_id: Sequence[int | None]
    step: Sequence[int | None]
    host: str | None = None
    tag: Ints | None = None
    """Tags of messages, −1 where there is none: they arrive in the order sent, each tag for
    itself."""


@dataclass
class Assignment:
    """What matching found for one rank; parallel to its `RankComms`."""

    group: list[GroupKey | None]
    seq: list[int | None]
    peer: list[int | None]
    nbytes: list[int | None]


def assign_groups(comms: RankComms, book: GroupBook, keep_unmatched: bool) -> Assignment:
    """Groups and partners of all communications of a rank; `seq` is still open.

    Raises:
        GroupError: no or several groups fit, or a p2p operation does not tell its partner
            (with `keep_unmatched` it is kept without).
    """
    count = len(comms.comm)
    assignment = Assignment([None] * count, [None] * count, [None] * count, [None] * count)
    known: dict[int, tuple[GroupKey | None, int | None, int | None]] = {}
    for position, comm in enumerate(comms.comm):
        # Equal descriptions are one object, so that each is looked up once.
        if id(comm) not in known:
            known[id(comm)] = _place(comms.rank, comm, book, keep_unmatched)
        key, peer, nbytes = known[id(comm)]
        assignment.group[position] = key
        assignment.peer[position] = peer
        assignment.nbytes[position] = nbytes
        book.counts[_WITHOUT_GROUP[comm.alone, comm.early]] += key is None
        book.counts["assumed-world-group"] += key is book.assumed
    return assignment


_WITHOUT_GROUP = {
    (True, False): "exported-as-local",
    (False, True): "early-without-group",
    (False, False): "kept-without-group",
}
"""What is counted when no group is found, by `CommOp.alone` and `CommOp.early`."""


def _place(
    rank: int, comm: CommOp, book: GroupBook, keep_unmatched: bool
) -> tuple[GroupKey | None, int | None, int | None]:
    """Group, partner and payload of a communication; no group when it is kept without.

    What was launched before the recording began may not tell, and is always kept.
    """
    if comm.alone:
        return None, None, comm.nbytes
    try:
        key = book.assign(rank, comm)
        peer = _peer(rank, comm, key)
    except GroupError:
        if not (keep_unmatched or comm.early):
            raise
        return None, None, comm.nbytes
    nbytes = comm.nbytes
    if nbytes is not None and comm.share:
        nbytes *= len(key.ranks)
    return key, peer, nbytes


def _peer(rank: int, comm: CommOp, key: GroupKey) -> int | None:
    """Global rank of the partner, which has to be another member of the group, or of the root."""
    if not comm.kind.is_p2p:
        rooted = comm.kind in ROOTED_KINDS and comm.group_peer in range(len(key.ranks))
        return key.ranks[comm.group_peer or 0] if rooted else None
    found = [comm.peer] if comm.peer in key.ranks else []
    if comm.group_peer is not None and 0 <= comm.group_peer < len(key.ranks):
        found.append(key.ranks[comm.group_peer])
    for peer in found:
        if peer != rank:
            return peer
    raise GroupError(
        f"{comm.kind} does not tell its partner",
        where=f"rank {rank}, group {key.label}",
        hint="profile with record_shapes=True on torch ≥ 2.5 (nsys: export with --include-blobs "
        "true), or keep such operations as local spans with --unmatched keep",
    )
